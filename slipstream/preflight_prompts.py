"""Do the model's tokenizer and chat template work on the prompts, and do these leave room? No torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream.config_file import Problem
from slipstream.preflight_model import ModelFiles
from slipstream.run_config import RunConfig

if TYPE_CHECKING:
    from datasets import Dataset

PROMPTS_LOOKED_AT = 20_000
LONGEST_TOKENISED = 32
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

Prompt = list[dict[str, Any]]


def prompt_problems(config: RunConfig, model: ModelFiles, dataset: "Dataset") -> list[Problem]:
    """A tokenizer or template that fails, and prompts that leave no room. Lengths are those of the rendered prompts."""
    path = model.file("tokenizer.json")
    if path is None:
        return []  # a kind of tokenizer that only transformers can load
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        return [Problem("model.name", config.model.name, f"its tokenizer.json cannot be read: {error}")]
    tokenizer.no_truncation()
    prompts = _shortest_and_longest(dataset, config.data.system_prompt)
    template = chat_template(model)
    if template is not None:
        try:
            texts = _render(template, prompts, special_tokens(model))
        except Exception as error:  # of jinja, or raised by the template
            message = f"its chat template fails on the prompts: {type(error).__name__}: {error}"
            return [Problem("model.name", config.model.name, message)]
    else:
        texts = [_text(prompt) for prompt in prompts]
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return _room(config, lengths)


def _room(config: RunConfig, lengths: Sequence[int]) -> list[Problem]:
    """`lengths` in tokens, of the prompts that look shortest and longest."""
    problems = []
    least, most = min(lengths), max(lengths)
    limit, budget = config.server.max_model_len, config.trainer.token_budget
    if least >= limit:
        message = f"even the shortest prompt has {least} tokens, which leaves no room for a completion: raise it"
        problems.append(Problem("server.max_model_len", limit, message))
    elif most >= limit:
        message = f"a prompt has {most} tokens: prompts that leave no room for a completion are skipped"
        problems.append(Problem("server.max_model_len", limit, message, "warning"))
    if budget is not None and least >= budget:
        message = f"even the shortest prompt has {least} tokens, so that no sample fits into a row: raise it"
        problems.append(Problem("trainer.token_budget", budget, message))
    return problems


def _shortest_and_longest(dataset: "Dataset", system_prompt: str | None) -> list[Prompt]:
    step = max(1, len(dataset) // PROMPTS_LOOKED_AT)
    looked_at = dataset.select_columns(["prompt"]).select(range(0, len(dataset), step))
    prompts = sorted((row["prompt"] for row in looked_at), key=lambda prompt: len(_text(prompt)))
    chosen = prompts if len(prompts) <= LONGEST_TOKENISED else [prompts[0], *prompts[1 - LONGEST_TOKENISED :]]
    return [_complete(prompt, system_prompt) for prompt in chosen]


def _complete(prompt: Prompt, system_prompt: str | None) -> Prompt:
    """As the rollout process renders it."""
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    if system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _text(prompt: Prompt) -> str:
    return "".join(message.get("content") or "" for message in prompt)


def chat_template(model: ModelFiles) -> str | None:
    """The template's text; None where there is none, or only several without a default."""
    path = model.file("chat_template.jinja")
    if path is not None:
        return path.read_text(encoding="utf-8")
    found = model.read("chat_template.json").get("chat_template") or model.read("tokenizer_config.json").get(
        "chat_template"
    )
    if isinstance(found, list):  # several, by name
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def special_tokens(model: ModelFiles) -> dict[str, str]:
    """What templates refer to by name; empty text where the model has no such token."""
    given = {**model.read("special_tokens_map.json"), **model.read("tokenizer_config.json")}
    values = {name: given.get(name) for name in SPECIAL_TOKENS}
    return {
        name: str(value.get("content", "") if isinstance(value, dict) else value or "")
        for name, value in values.items()
    }


def _render(template: str, prompts: list[Prompt], tokens: dict[str, str]) -> list[str]:
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template
    rendered, _ = render(conversations=prompts, chat_template=template, add_generation_prompt=True, **tokens)
    return list(rendered)
