"""Secrets never reach a page, an event or a message: what is masked, and by which rule.

Masked are: the run's token; the values of environment variables whose names look like secrets (`cluster.environment`), of
this process and of those that are handed to the jobs; and what has the shape of a credential. A value of fewer than
`SHORTEST` characters is no secret, and would hide words.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from cluster.environment import NOT_SECRET, SECRET
from slipstream.run_folder import RunFolder, read_object
from tasks.outcome import RunFailed

SHORTEST = 8
MASK = "•••"
SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}"
    r"|\bAKIA[A-Z0-9]{16}\b"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"
    r"|(?<=\bBearer )[A-Za-z0-9+/=._~-]{8,}"
    r"|(?<=\bBasic )[A-Za-z0-9+/=]{8,}"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)",
    re.IGNORECASE,
)
ASSIGNED = re.compile(
    r"\b((?:[A-Z0-9]+_)*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|AUTH_STRING)(?:_[A-Z0-9]+)*['\"]?\s*[=:]\s*['\"]?)"
    r"(?!\d+\b)([^\s'\"]{6,})"
)


class Mask:
    """Puts `MASK` in the place of each of `values`, and of what looks like a credential."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = sorted({value for value in values if len(value) >= SHORTEST}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(MASK, text)
        return ASSIGNED.sub(lambda found: found[1] + MASK, SHAPES.sub(MASK, text))


def mask_of(run: RunFolder, environment: Mapping[str, str] | None = None) -> Mask:
    """The mask of a run, by what its folder and this process know now."""
    values = list(_secrets(os.environ if environment is None else environment))
    with contextlib.suppress(OSError, UnicodeDecodeError):
        values.append(run.token_file.read_text().strip())
    with contextlib.suppress(OSError, ValueError):
        kept = read_object(run.path / "secrets" / "environment.json")
        values += _secrets({name: value for name, value in kept.items() if isinstance(value, str)})
    return Mask(values)


@contextlib.contextmanager
def masking_failures(run: RunFolder) -> Iterator[None]:
    """A failure of the body carries last lines of a log, which Prefect makes the state's message of task and flow run:
    raise it masked."""
    try:
        yield
    except RunFailed as error:
        mask, told = mask_of(run), error.outcome
        told = replace(told, reason=mask(told.reason), last_lines=mask(told.last_lines))
        raise RunFailed(error.run_dir, told) from None


def _secrets(environment: Mapping[str, str]) -> Iterable[str]:
    for name, value in environment.items():
        if SECRET.search(name) and name not in NOT_SECRET:
            yield value.strip()
            yield value.strip().partition(":")[2]  # of "user:password"
