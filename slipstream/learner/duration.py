"""How long a run is, and what a resume changes about it. Pure."""

import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class Duration:
    """
    Attributes:
        max_steps: optimizer steps; `sys.maxsize` where the prompts decide.
        end: prompt number at which the data ends; None where the steps decide or the length is not known.
        epochs: passes over a dataset of unknown length; None where the steps decide or `end` is known.
    """

    max_steps: int
    end: int | None = None
    epochs: int | None = None

    @property
    def known_steps(self) -> int:
        """The number of steps; 0 where the prompts decide."""
        return 0 if self.max_steps == sys.maxsize else self.max_steps


def num_prompts(dataset: Any) -> int | None:
    """Prompts in a dataset; None for an iterable one."""
    return len(dataset) if hasattr(dataset, "__len__") else None


def plan_duration(max_steps: int, num_train_epochs: float, prompts: int | None) -> Duration:
    """`max_steps` above 0 decides alone, and the prompts repeat as needed; otherwise each epoch is a pass over them.

    A fraction of an epoch is rounded up to whole prompts. Raises ValueError for what has no meaning.
    """
    if max_steps > 0:
        return Duration(max_steps)
    if not 0 < num_train_epochs < math.inf:
        raise ValueError(f"num_train_epochs={num_train_epochs}: it must be above 0, or set max_steps")
    if prompts is not None:
        return Duration(sys.maxsize, end=math.ceil(Fraction(str(num_train_epochs)) * prompts))
    if num_train_epochs != int(num_train_epochs):
        raise ValueError(
            f"num_train_epochs={num_train_epochs}: train_dataset is iterable, so its length and where a part of an epoch "
            "ends are not known; use a whole number, or set max_steps"
        )
    return Duration(sys.maxsize, epochs=int(num_train_epochs))


# settings that a resume may change, and what then holds
_MEANING = {
    "num_train_epochs": "what is settled stays settled",
    "learning_rate": "the optimizer and its schedule go on with the checkpoint's; start a new run from this model to change it",
    "weight_decay": "the optimizer goes on with the checkpoint's",
    "num_generations": "samples that the checkpoint held back are trained as they were scored",
    "rewards": "samples that the checkpoint held back are trained as they were scored",
    "loop": "it is handed the state that the old one kept",
    "ranks": "rows and steps are dealt out anew; a rank without saved random numbers starts its own",
}


def changed_settings(before: dict[str, Any], now: dict[str, Any], step: int) -> list[str]:
    """What is not as it was when the checkpoint of `step` was made, and what that means; one text each.

    `before` and `now` are settings by name; what an older checkpoint did not keep is not compared.
    """
    notes = []
    for name, value in now.items():
        if name not in before or before[name] == value:
            continue
        meaning = _MEANING.get(name, "")
        if name in ("max_steps", "lr_scheduler_type") and now["lr_scheduler_type"] != "constant":
            schedule, steps = now["lr_scheduler_type"], now["max_steps"]
            meaning = f"from step {step + 1} on the learning rate is that of the {schedule} schedule of {steps} steps"
        notes.append(
            f"{name} was {before[name]} at the checkpoint and is {value} now" + (f": {meaning}" if meaning else "")
        )
    return notes


def nothing_left(planned: Duration, step: int, first_unsettled: int, epochs_over: int) -> str:
    """Why a checkpoint has nothing left to train, and the way out; empty where it has.

    Args:
        step, first_unsettled: of the checkpoint.
        epochs_over: passes over a dataset of unknown length that were over.
    """
    if step >= planned.max_steps:
        return f"the checkpoint is of step {step} and max_steps={planned.max_steps}: raise max_steps to train on"
    if planned.end is not None and first_unsettled >= planned.end:
        return "the checkpoint has every prompt of num_train_epochs settled: raise num_train_epochs to train on"
    if planned.epochs is not None and epochs_over >= planned.epochs:
        return "the checkpoint has every pass of num_train_epochs behind it: raise num_train_epochs to train on"
    return ""


def realign(scheduler: Any, optimizer: Any) -> None:
    """Set the learning rate of the step reached by the schedule as it is now: a loaded one still has that of its own.

    Of the schedules that are functions of the step; the others have no other value at a step than the loaded one.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate's wrapper
    functions = getattr(scheduler, "lr_lambdas", None)
    if functions is None:
        return
    rates = [base * f(scheduler.last_epoch) for base, f in zip(scheduler.base_lrs, functions, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
