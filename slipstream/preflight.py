"""Everything about a run that can be refused before anything is allocated. Starts nothing, needs no GPU and no torch.

Light to import: what is needed to look into datasets or at the hub is imported by the checks.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config_file import ConfigError, Problem
from slipstream.config_rules import remarks
from slipstream.preflight_model import find_model, model_problems
from slipstream.preflight_prompts import prompt_problems
from slipstream.preflight_room import room_problems
from slipstream.run_config import RunConfig
from slipstream.serving.command import CommandError, vllm_python
from slipstream.tracking import report_problems
from slipstream.trainer_section import TrainerSection

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Problem", "check", "preflight"]

URL_TIMEOUT_S = 10.0
LEAST_ROOM = 1 << 20  # bytes; a run folder without any checkpoint


def check(config: RunConfig, source: str = "the configuration") -> list[Problem]:
    """`preflight`, with errors raised as one ConfigError; returns the warnings."""
    problems = preflight(config)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors, source)
    return problems


def preflight(config: RunConfig) -> list[Problem]:
    """All problems of a valid configuration on this machine, errors and warnings. Relative paths are read from here."""
    dataset, problems = _load("data.source", config.data.source, config.data.split)
    problems += _held_out(config, dataset)
    problems += _rewards(config, dataset)
    model, found = find_model(config.model.name, config.model.revision)
    problems += found
    if model is not None:
        problems += model_problems(model, config)
        if dataset is not None:
            problems += prompt_problems(config, model, dataset)
        problems += room_problems(model, config)
    return [*problems, *without_effect(config), *_server(config), *_machine(config), *_integrations(config)]


def without_effect(config: RunConfig) -> list[Problem]:
    """A warning for each value of the trainer section that others make useless."""
    values = {name: getattr(config.trainer, name) for name in TrainerSection.model_fields}
    default = {name: field.default for name, field in TrainerSection.model_fields.items()}
    found = remarks(values, default)
    return [Problem(f"trainer.{key}", value, message, "warning") for key, value, message in found]


def _integrations(config: RunConfig) -> list[Problem]:
    names = config.trainer.report_to
    if config.learner.python is not None:  # what is installed there is found out by the learner
        return []
    return [Problem("trainer.report_to", names, text) for text in report_problems(names)]


def _load(key: str, source: str, split: str) -> tuple["Dataset | None", list[Problem]]:
    from slipstream.data import DataError, load_dataset_source

    try:
        return load_dataset_source(source, split), []
    except DataError as error:
        return None, [Problem(key, source, str(error))]


def _held_out(config: RunConfig, train: "Dataset | None") -> list[Problem]:
    from slipstream.data import fingerprint

    data = config.data
    if data.eval_source is None:
        return []
    held_out, problems = _load("data.eval_source", data.eval_source, data.eval_split)
    if held_out is None or train is None:
        return problems
    if len(held_out) == len(train) and fingerprint(held_out) == fingerprint(train):
        message = "has the same rows as data.source: a held-out reward needs prompts that are not trained on"
        return [*problems, Problem("data.eval_source", data.eval_source, message)]
    count = min(data.eval_size or len(held_out), len(held_out))
    trained = {
        _prompt_text(prompt) for batch in train.select_columns(["prompt"]).iter(1_000) for prompt in batch["prompt"]
    }
    shared = sum(_prompt_text(row["prompt"]) in trained for row in held_out.select(range(count)))
    if shared:
        both_generated = all(source.startswith("reasoning_gym:") for source in (data.source, data.eval_source))
        hint = " (many tasks make row i from seed + i: choose a seed beyond the training data's seed + size)"
        message = f"{shared} of {count} held-out prompts are in the training data{hint if both_generated else ''}"
        problems.append(Problem("data.eval_source", data.eval_source, message, "warning"))
    return problems


def _prompt_text(prompt: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message.get("content") or "") for message in prompt)


def _rewards(config: RunConfig, dataset: "Dataset | None") -> list[Problem]:
    from slipstream.rewards.resolve import ARGUMENTS, RewardError, resolve_reward

    columns = None if dataset is None else dataset.column_names
    problems = []
    for name in config.reward.functions:
        try:
            resolve_reward(name, config.reward.paths, columns)
        except RewardError as error:
            problems.append(Problem("reward.functions", name, str(error)))
    hidden = [name for name in ARGUMENTS if name in (columns or ())]
    if hidden:
        message = (
            f"its column{'s' * (len(hidden) > 1)} {', '.join(hidden)} will not reach the rewards, which get what was "
            "generated by that name: rename it"
        )
        problems.append(Problem("data.source", config.data.source, message, "warning"))
    return problems


def _server(config: RunConfig) -> list[Problem]:
    server = config.server
    if server.url is not None:
        return _answers(server.url)
    if not server.command:
        try:
            vllm_python()
        except CommandError as error:
            return [Problem("server.command", server.command, str(error))]
    elif shutil.which(os.path.expanduser(server.command[0])) is None:
        message = f"there is no program {server.command[0]!r} on PATH: install it or give its full path"
        return [Problem("server.command", server.command, message)]
    return []


def _answers(url: str) -> list[Problem]:
    import httpx

    address = url.rstrip("/") + "/health"
    try:
        status = httpx.get(address, timeout=URL_TIMEOUT_S, trust_env=False).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        return [Problem("server.url", url, f"does not answer ({reason}): start it first, or leave the key out")]
    if status in (200, 401, 403):  # ours asks for a token
        return []
    return [Problem("server.url", url, f"{address} answers {status}: this is no vLLM server, or it is not ready")]


def _machine(config: RunConfig) -> list[Problem]:
    problems = _storage(config.storage.root)
    if config.learner.python is not None and shutil.which(os.path.expanduser(config.learner.python)) is None:
        problems.append(Problem("learner.python", config.learner.python, "there is no such program here"))
    if config.cluster.profile == "local":
        problems += _local(config)
    return problems


def _local(config: RunConfig) -> list[Problem]:
    """What the local profile cannot do: it runs everything on this machine."""
    starts_server = config.server.url is None
    problems = []
    for key, nodes in (("learner.nodes", config.learner.nodes), ("server.nodes", config.server.nodes)):
        if nodes > 1 and (starts_server or key != "server.nodes"):
            message = 'cluster.profile = "local" has one node, this machine: set it to 1, or choose another profile'
            problems.append(Problem(key, nodes, message))
    present = gpus_here()
    if present is None:
        return problems
    wanted = {"learner.gpus": config.learner.gpus, "server.gpus": config.server.gpus if starts_server else 0}
    if present == 0:
        for key, count in wanted.items():
            if count:
                problems.append(
                    Problem(key, count, "this machine has no GPU: set it to 0 (CPU), or choose a cluster.profile")
                )
    elif sum(wanted.values()) > present:
        message = f"together with server.gpus = {wanted['server.gpus']} this is more than the {present} of this machine"
        problems.append(
            Problem("learner.gpus", wanted["learner.gpus"], f"{message}: lower one, or choose a cluster.profile")
        )
    return problems


def gpus_here() -> int | None:
    """Number of GPUs of this machine that a process may use, or None where it cannot be told."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    if Path("/dev/kfd").exists() or Path("/dev/dxg").exists():  # AMD, or Windows' subsystem: not counted by files
        return None
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()])


def _storage(root: str) -> list[Problem]:
    path = Path(root).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        return [Problem("storage.root", root, f"{existing} is a file, not a folder")]
    try:  # only a write tells: permissions say nothing of a full disk, a quota, or a kernel's file system
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(LEAST_ROOM))
            file.flush()
    except OSError as error:
        message = f"cannot be written to ({error.strerror or error}): choose another folder, or make room"
        return [Problem("storage.root", root, message)]
    return []
