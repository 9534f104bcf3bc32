"""The files in examples/: configurations that validate, and a demo that starts where its description says."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from slipstream.config_file import load_config
from slipstream.data.source import load_dataset_source
from slipstream.rewards import exact_match_reward
from slipstream.sweep.spec import load_sweep
from tasks.sweep_prepare import resolve

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.toml"))
MODEL = EXAMPLES / "demo_model"


def read_pairs(name: str) -> list[dict]:
    return [json.loads(line) for line in (EXAMPLES / "demo_data" / name).read_text().splitlines()]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_example_validates(path):
    load_config(path)


def test_all_examples_are_described():
    readme = (EXAMPLES / "README.md").read_text()
    names = [p.name for p in EXAMPLES.iterdir() if p.name not in ("README.md", "__pycache__")]
    assert [name for name in names if f"`{name}" not in readme] == []


def test_example_sweeps_expand_to_runs_that_validate():
    for path in sorted((EXAMPLES / "sweeps").glob("*.toml")):
        resolved = resolve(load_sweep(path), path.parent, {})
        assert len(resolved.configs) == 9
        assert len({config.trainer.token_budget for config in resolved.configs.values()}) == 3


def test_demo_names_files_of_the_repository():
    config = load_config(EXAMPLES / "demo.toml")
    assert ROOT / config.model.name == MODEL
    for source in (config.data.source, config.data.eval_source):
        assert "prompt" in load_dataset_source(str(ROOT / source)).column_names


def test_demo_model_is_small_and_has_what_a_server_needs():
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 2_000_000
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert model.config.model_type == "qwen3"
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.vocab_size == len(tokenizer)
    assert len(tokenizer) % 16 == 0
    assert GenerationConfig.from_pretrained(MODEL).eos_token_id == tokenizer.eos_token_id


def test_demo_template_renders_the_question_so_that_the_answer_follows():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    message = [{"role": "user", "content": "47+38="}]
    assert tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) == "<bos>47+38="
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", *"47+38="]
    answer = tokenizer.convert_tokens_to_ids([*"85", "<eos>"])
    assert tokenizer.decode(answer, skip_special_tokens=True) == "85"


def test_demo_pairs_are_right_and_held_out_pairs_are_in_no_training():
    training, held_out = read_pairs("train.jsonl"), read_pairs("heldout.jsonl")
    questions = [[row["prompt"][0]["content"] for row in rows] for rows in (training, held_out)]
    assert 300 <= len(set(questions[1])) == len(held_out) <= 500
    assert not set(questions[0]) & set(questions[1])
    assert len(training) + len(held_out) == 90 * 90
    for row in training + held_out:
        first, second = row["prompt"][0]["content"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(first) + int(second)


def test_demo_starts_at_a_reward_of_about_three_tenths():
    torch.manual_seed(0)
    rows = read_pairs("heldout.jsonl")[:200]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    prompts = [row["prompt"] for row in rows]
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    output = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=5)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = exact_match_reward(completions=completions, prompts=prompts, answer=[row["answer"] for row in rows])
    assert 0.2 <= sum(rewards) / len(rewards) <= 0.45
