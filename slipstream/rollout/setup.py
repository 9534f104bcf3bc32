"""What the trainer hands to the rollout process when it starts it."""

import hashlib
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
        shuffle, seed: of the order of prompts.
        eval_dataset: held-out rows, or None.
        kv_cache_tokens: that the server's KV caches hold; None where it does not tell.
        loop_state: what the loop's own `state_dict` returned at the checkpoint, or None.
    """

    run_id: str
    attempt: int
    served_model: str
    use_generate_route: bool
    max_model_len: int
    position: Position = field(default_factory=Position)
    end: int | None = None
    epochs: int | None = None
    shuffle: bool = True
    seed: int = 42
    eval_dataset: Any = None
    loop_state: dict[str, Any] | None = None
    returns_candidates: bool = False
    kv_cache_tokens: int | None = None


def request_seed(seed: int, number: int, generation: int, turn: int, attempt: int) -> int:
    """A seed per request, the same for the same request; `number` of the prompt holds its epoch. Below 2^62."""
    key = f"{seed}/{number}/{generation}/{turn}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 2
