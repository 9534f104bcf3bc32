"""What the trainer hands to the rollout process when it starts it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Position:
    """Where generation starts: prompt numbers below `first_unsettled` and those in `settled_beyond` are done.

    A prompt's number is `epoch * len(dataset) + position`.
    """

    first_unsettled: int = 0
    settled_beyond: frozenset[int] = field(default_factory=frozenset)

    def is_settled(self, number: int) -> bool:
        return number < self.first_unsettled or number in self.settled_beyond

    @property
    def last_settled(self) -> int:
        """The largest number that is settled; -1 where none is."""
        return max([self.first_unsettled - 1, *self.settled_beyond])

    def numbers(self, end: int | None) -> Iterator[int]:
        """Prompt numbers to generate, in order, up to `end` (exclusive; None: for ever)."""
        number = self.first_unsettled
        while end is None or number < end:
            if number not in self.settled_beyond:
                yield number
            number += 1


@dataclass(frozen=True)
class LoopSetup:
    """Everything about the run that is not in the config.

    Attributes:
        run_id, attempt: what the server's version labels must say.
        served_model: name of the model on the server.
        use_generate_route: whether the server has the token-in token-out route with version spans.
        returns_candidates: whether the server returns the candidate set of each token (`sampling_mask`).
        max_model_len: of the server, in tokens.
        end: prompt number at which the data ends; None where only the number of steps bounds the run.
        epochs: passes over an iterable dataset, which has no `end`; None where only the number of steps bounds the run.
        first_epoch: of an iterable dataset: the epoch that it starts in, after a resume the one that was not over.
        shuffle, seed: of the order of prompts.
        eval_dataset: held-out rows, or None.
        group_tokens: mean size of the groups before a resume, in tokens; None where none has finished yet.
        kv_cache_tokens: that the server's KV caches hold; None where it does not tell.
        server_incarnation: of the server that the run attached to; None where there is no run folder to say it.
        loop_state: what the loop's own `state_dict` returned at the checkpoint, or None.
        finished_cost: tokens of the allowance that the groups of an earlier process of this attempt have taken.
    """

    run_id: str
    attempt: int
    served_model: str
    use_generate_route: bool
    max_model_len: int
    position: Position = field(default_factory=Position)
    end: int | None = None
    epochs: int | None = None
    first_epoch: int = 0
    shuffle: bool = True
    seed: int = 42
    eval_dataset: Any = None
    loop_state: dict[str, Any] | None = None
    returns_candidates: bool = False
    kv_cache_tokens: int | None = None
    group_tokens: float | None = None
    server_incarnation: str | None = None
    finished_cost: int = 0


def checked_state(loop: str, state: Any) -> dict[str, Any]:
    """A loop's state as it comes back after a resume: tuples as lists. Raises TypeError for what would not come back."""

    def check(value: Any, where: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TypeError(
                        f"{where}: the key {key!r} would come back as text; use str keys and convert on load"
                    )
                check(item, f"{where}[{key!r}]")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                check(item, f"{where}[{index}]")
        elif not (value is None or isinstance(value, str | int | float)):
            raise TypeError(f"{where}: {value!r:.100} ({type(value).__name__}) cannot be kept as JSON; convert it")

    if not isinstance(state, dict):
        raise TypeError(f"{loop}.state_dict returned {type(state).__name__}, not a dict")
    check(state, f"{loop}.state_dict()")
    return dict(json.loads(json.dumps(state)))


def request_seed(seed: int, number: int, generation: int, turn: int, attempt: int) -> int:
    """A seed per request, the same for the same request; `number` of the prompt holds its epoch. Below 2^62."""
    key = f"{seed}/{number}/{generation}/{turn}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 2
