"""Rules between the values of a configuration, for the configuration file and for `AsyncGRPOConfig` alike.

Bounds of a single value stand at its field in `slipstream.run_config`. Standard library only.
"""

from collections.abc import Mapping
from typing import Any

Problem = tuple[str, Any, str]  # key, its value, what is wrong and the way out

# schedules that need not know where training ends; each other one decays towards it
WITHOUT_END = ("constant", "constant_with_warmup", "inverse_sqrt")
STEP_FIELDS = ("warmup_steps", "logging_steps", "save_steps", "eval_steps")


class Impossible(ValueError):
    """Values that cannot be, or that exclude each other: `problems` holds each with what is wrong and the way out."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{key} = {value!r}: {message}" for key, value, message in problems))


def contradictions(v: Mapping[str, Any]) -> list[Problem]:
    """What must be refused in the trainer's values `v`; each value is within its own bounds, or a problem of its own."""
    found: list[Problem] = []

    def refuse(key: str, message: str) -> None:
        found.append((key, v[key], message))

    for key, on in (("top_p", v["top_p"] < 1), ("min_p", bool(v["min_p"]))):
        if on and v["top_k"] <= 0:
            refuse(key, "needs top_k > 0, for example top_k = 512: the server bounds the candidate set by it")
    if v["bf16"] and v["fp16"]:
        refuse("bf16", "excludes fp16 = true: set one of them to false")
    if v["max_steps"] == 0:
        refuse("max_steps", "trains nothing: set it to -1 (epochs decide) or to at least 1")
    if v["lr_scheduler_type"] not in WITHOUT_END and v["max_steps"] < 0:
        refuse(
            "lr_scheduler_type",
            "needs max_steps of at least 1: the number of steps per epoch is not known in advance, because it depends on "
            'how samples are packed; set max_steps, or "constant"',
        )
    if v["lr_scheduler_type"] == "constant" and v["warmup_steps"]:
        refuse("warmup_steps", 'the constant schedule has no warm-up: set lr_scheduler_type = "constant_with_warmup"')
    if v["score_centering"] and v["num_sampler_logprobs"] < 1:
        refuse("num_sampler_logprobs", "score centering needs at least 1: raise it, or set score_centering = false")
    if v["max_concurrent_rollouts"] < v["num_generations"]:
        refuse(
            "max_concurrent_rollouts",
            f"is less than one group, num_generations = {v['num_generations']}, which starts together: raise it to that, or "
            "lower num_generations",
        )
    for key in STEP_FIELDS:
        value = v.get(key)
        if value and 0 < value < 1 and v["max_steps"] < 1:
            refuse(key, "is a fraction of max_steps, which is not set: set max_steps, or give a number of steps")
    return found


def remarks(v: Mapping[str, Any], default: Mapping[str, Any]) -> list[Problem]:
    """What is accepted but has no effect, or not the one that it seems to have; `default` is each key's default."""
    found: list[Problem] = []

    def remark(key: str, message: str) -> None:
        found.append((key, v[key], message))

    def given(key: str) -> bool:
        return bool(v[key] != default[key])

    if v["max_steps"] > 0 and given("num_train_epochs"):
        remark("num_train_epochs", f"is not used: max_steps = {v['max_steps']} decides; leave one of them out")
    if 0 < v["max_steps"] <= v["warmup_steps"]:
        remark("warmup_steps", f"training ends before the warm-up does: max_steps = {v['max_steps']}; lower it")
    if v["epsilon_high"] is not None and v["epsilon_high"] < v["epsilon"]:
        remark(
            "epsilon_high",
            f"is below epsilon = {v['epsilon']}: likely tokens are held closer than unlikely ones; it is usually the larger",
        )
    if not v["score_centering"] and given("num_sampler_logprobs"):
        remark("num_sampler_logprobs", "is not used with score_centering = false: leave it out")
    if v["token_budget"] is not None and v["token_budget"] <= v["max_completion_length"]:
        remark(
            "token_budget",
            f"a completion of max_completion_length = {v['max_completion_length']} tokens does not fit and is dropped: "
            "raise token_budget to prompt and completion together, or lower max_completion_length",
        )
    if not v["log_completions"] and v["num_completions_to_print"] is not None:
        remark("num_completions_to_print", "is not used: set log_completions = true, or leave it out")
    return found
