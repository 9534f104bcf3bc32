"""Checkpoints that are complete or do not exist, and the rollout state in them."""

import hashlib
import json
import os
import re
import shutil
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from slipstream.learner.ledger import History
from slipstream.packing.sample import Sample
from slipstream.rollout.setup import Position
from slipstream.run_folder import RunFolder, fsync_folder, read_json, write_json

MARKER = "COMPLETE.json"
STATE_FILE = "rollout_state.json"
REMAINDER_FILE = "rollout_remainder.npz"
_NAME = re.compile(r"^checkpoint-(\d+)$")
_ARRAYS = ("input_ids", "trained", "logprobs", "versions", "head_ids", "head_logprobs")
_OPTIONAL_ARRAYS = ("candidate_ids", "candidate_offsets")


class CheckpointError(Exception):
    """A checkpoint is incomplete, damaged, or of another run."""

    final = False  # a restart begins from another one


class OtherData(CheckpointError):
    """A checkpoint was made with other data than the run has now."""

    final = True


class NotWritten(CheckpointError):
    """A checkpoint could not be written, or has no room."""

    final = True


def _digest(path: Path) -> str:
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def is_write_failure(error: BaseException) -> bool:
    """Whether the storage refused a write: safetensors and torch.save report that as errors of their own."""
    if isinstance(error, (OSError, SafetensorError)):
        return True
    return type(error) is RuntimeError and any(
        word in str(error) for word in ("inline_container", "PytorchStreamWriter")
    )


def seal(checkpoint: Path) -> None:
    """Make every file of the checkpoint durable, then write the marker with their sizes and checksums."""
    files = {}
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != MARKER):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        files[str(path.relative_to(checkpoint))] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    fsync_folder(checkpoint)
    write_json(checkpoint / MARKER, {"files": files})
    fsync_folder(checkpoint.parent)


def verify(checkpoint: Path, checksums: bool = True) -> None:
    """Raise CheckpointError where the checkpoint is not complete, naming the file; sizes only if not `checksums`."""
    try:
        marker = read_json(checkpoint / MARKER)
        files = None if marker is None else {str(name): entry for name, entry in marker["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint}: {MARKER} is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: {MARKER} cannot be read: {error}") from error
    if files is None:
        raise CheckpointError(f"{checkpoint} is not complete: it has no {MARKER}, so the process died while writing it")
    for name, expected in files.items():
        try:
            _verify_file(checkpoint, name, expected, checksums)
        except OSError as error:
            raise CheckpointError(f"{checkpoint} is damaged: {name} cannot be read: {error}") from error


def _verify_file(checkpoint: Path, name: str, expected: dict[str, Any], checksums: bool) -> None:
    path = checkpoint / name
    if not path.is_file():
        raise CheckpointError(f"{checkpoint} is damaged: {name} is missing")
    if path.stat().st_size != expected["bytes"]:
        raise CheckpointError(f"{checkpoint} is damaged: {name} has {path.stat().st_size} bytes of {expected['bytes']}")
    if checksums and _digest(path) != expected["sha256"]:
        raise CheckpointError(f"{checkpoint} is damaged: {name} has another checksum than when it was written")


def _numbered(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, path) of all checkpoints in an output_dir, whole or not, ascending."""
    found = [(match, path) for path in output_dir.glob("checkpoint-*") if (match := _NAME.match(path.name))]
    return sorted((int(match[1]), path) for match, path in found if path.is_dir())


def complete_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints in an output_dir, ascending; sizes are checked, checksums are not."""
    return [(step, path) for step, path in _numbered(output_dir) if is_whole(path)]


def _candidates(run: RunFolder) -> list[tuple[int, int, Path]]:
    """Step, attempt and path of all checkpoints that no later attempt's fence makes void, whole or not, newest first."""
    limits = run.void_after()
    found = [(step, attempt, path) for attempt in run.attempts() for step, path in _numbered(run.output(attempt))]
    return sorted((c for c in found if c[1] not in limits or c[0] <= limits[c[1]]), reverse=True)


def latest_complete(run: RunFolder) -> tuple[Path, int] | None:
    """The checkpoint that a new attempt of the run starts from, and its step; None: from the model.

    What an attempt wrote beyond the checkpoint that a later attempt's fence names does not count. A checkpoint whose
    checksums do not match is passed over.
    """
    for step, _, path in _candidates(run):
        try:
            verify(path)
        except CheckpointError:
            continue
        return path, step
    return None


def resume_point(run: RunFolder) -> tuple[tuple[Path, int] | None, list[str]]:
    """`latest_complete`; checkpoints that are newer but broken are set aside on the way, and named in words.

    Set aside means renamed to `….bad`, or only named where the storage takes no change. Call it only while nothing
    writes to the run: an unfinished checkpoint cannot be told from one that is being written.
    """
    notes = []
    for step, _, path in _candidates(run):
        try:
            verify(path)
        except CheckpointError as error:
            notes.append(f"{_set_aside(path)}: {error}")
            continue
        return (path, step), notes
    return None, notes


def _set_aside(checkpoint: Path) -> str:
    """Give a broken checkpoint another name; what was done, in words."""
    number = 1
    while (bad := checkpoint.with_name(f"{checkpoint.name}.bad{'' if number == 1 else number}")).exists():
        number += 1
    try:
        checkpoint.rename(bad)
    except OSError as error:
        return f"{checkpoint.name} is passed over (it cannot be renamed: {error.strerror or error})"
    return f"{checkpoint.name} was set aside as {bad}"


def ledger_known(checkpoint: Path) -> tuple[int, int] | None:
    """The attempt that wrote a checkpoint and the last step whose ledger lines it knows; None where it does not say."""
    state = read_json(checkpoint / STATE_FILE) or {}
    if state.get("ledger_step") is None:
        return None
    return int(state["attempt"]), int(state["ledger_step"])


def rotate(output_dir: Path, keep: int | None) -> None:
    """Delete the oldest complete checkpoints beyond `keep`, and incomplete ones that are older than a complete one."""
    if keep is None:
        return
    complete = complete_checkpoints(output_dir)
    kept = {path for _, path in complete[-keep:]}
    newest = complete[-1][0] if complete else -1
    for step, path in _numbered(output_dir):
        if path not in kept and step < newest:
            _delete(path)


def rotate_attempts(run: RunFolder, attempt: int, keep: int | None) -> None:
    """`rotate` over all attempts, once `attempt` has sealed a checkpoint: until then the one that it started from stays.

    What is void by a later fence goes as well. Where `attempt` is not the newest any more, nothing is deleted: the newest
    one started from some checkpoint, and this process may not know which.
    """
    own = complete_checkpoints(run.output(attempt))
    if keep is None or not own or run.attempts()[-1:] != [attempt]:
        return
    complete = [(step, a, path) for step, a, path in _candidates(run) if a != attempt and is_whole(path)]
    complete = sorted([*complete, *((step, attempt, path) for step, path in own)])
    kept = {path for _, _, path in complete[-keep:]}
    newest = own[-1][0]
    for a in run.attempts():
        for step, path in _numbered(run.output(a)):
            # an unfinished one that is newer may be under way
            if path not in kept and (step < newest or (a != attempt and is_whole(path))):
                _delete(path)


def is_whole(checkpoint: Path) -> bool:
    """Whether it is sealed and its files have their sizes."""
    try:
        verify(checkpoint, checksums=False)
    except CheckpointError:
        return False
    return True


def _delete(checkpoint: Path) -> None:
    # without its marker first: a deletion cut short must not look like a checkpoint
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


@dataclass(frozen=True)
class RolloutState:
    """`rollout_state.json`: where the data stands, and what a resume must find unchanged.

    Attributes:
        epoch, prompt: of the first unsettled prompt; `settled_beyond` are prompt numbers settled after it.
        model_version: weight updates delivered so far.
        dataset_fingerprint, dataset_length, shuffle, seed: of the prompts and their order.
        rewards, loop: names.
        loop_state: what the loop's own `state_dict` returned.
        settings: others that a resume may change, but says so.
        outcomes, split: the ledger's `History`, by epoch and by number; None where an older version wrote the file.
        group_tokens: mean size of the newest groups, in tokens; None before the first.
        ledger_step: the last step that a line of the ledger names by now: the next one's, where the data ended before it;
            None where an older version wrote the file.
    """

    step: int
    epoch: int
    prompt: int
    settled_beyond: list[int]
    model_version: int
    attempt: int
    dataset_fingerprint: str
    dataset_length: int | None
    shuffle: bool
    seed: int
    rewards: list[str]
    loop: str
    loop_state: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, dict[str, int]] | None = None
    split: dict[str, dict[str, Any]] = field(default_factory=dict)
    group_tokens: float | None = None
    ledger_step: int | None = None

    @property
    def history(self) -> History | None:
        if self.outcomes is None:
            return None
        return History({int(k): v for k, v in self.outcomes.items()}, {int(k): v for k, v in self.split.items()})

    @property
    def position(self) -> Position:
        return Position(self.epoch * (self.dataset_length or 0) + self.prompt, frozenset(self.settled_beyond))

    def write(self, checkpoint: Path) -> None:
        write_json(checkpoint / STATE_FILE, asdict(self))

    @classmethod
    def read(cls, checkpoint: Path) -> "RolloutState":
        """Raises CheckpointError where the file is missing or has other fields."""
        try:
            value = read_json(checkpoint / STATE_FILE)
            if value is None:
                raise CheckpointError(f"{checkpoint} has no {STATE_FILE}: it was not written by this trainer")
            optional = {f.name for f in fields(cls) if f.default is not MISSING or f.default_factory is not MISSING}
            names = [f.name for f in fields(cls) if f.name in value or f.name not in optional]
            return cls(**{name: value[name] for name in names})
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{checkpoint / STATE_FILE} is damaged: {error!r}") from error

    def check_same_data(self, fingerprint: str, length: int | None, shuffle: bool, seed: int) -> None:
        """Raise OtherData where a resume would visit other prompts, or in another order."""
        for key, old, new in (
            ("length of the dataset", self.dataset_length, length),
            ("content of the dataset (fingerprint)", self.dataset_fingerprint, fingerprint),
            ("order of prompts (shuffle)", self.shuffle, shuffle),
            ("seed of the order", self.seed, seed),
        ):
            if old != new:
                raise OtherData(
                    f"the checkpoint was made with another dataset or order: {key} was {old}, now it is {new}. Prompts "
                    "would be skipped or trained twice; resume with the same data, or start a new run from this model"
                )


def save_samples(path: Path, samples: list[Sample]) -> None:
    """Write samples to an .npz: the part of split groups that a checkpoint must not lose."""
    arrays: dict[str, Any] = {}
    scalars = []
    for i, sample in enumerate(samples):
        for name in _ARRAYS + _OPTIONAL_ARRAYS:
            if (array := getattr(sample, name)) is not None:
                arrays[f"{i}.{name}"] = array
        scalars.append(
            {
                "advantage": sample.advantage,
                "number": sample.number,
                "rollout_id": sample.rollout_id,
                "reward": sample.reward,
                "group_std": sample.group_std,
                "rewards_by_name": sample.rewards_by_name,
            }
        )
    arrays["scalars"] = np.frombuffer(json.dumps(scalars).encode(), dtype=np.uint8)
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def load_samples(path: Path) -> list[Sample]:
    """What `save_samples` wrote; [] where there is no file."""
    if not path.is_file():
        return []
    with np.load(path, allow_pickle=False) as arrays:
        scalars = json.loads(arrays["scalars"].tobytes())
        samples = []
        for i, values in enumerate(scalars):
            values["rewards_by_name"] = {k: tuple(v) for k, v in values["rewards_by_name"].items()}
            optional = [name for name in _OPTIONAL_ARRAYS if f"{i}.{name}" in arrays]
            samples.append(Sample(**{name: arrays[f"{i}.{name}"] for name in (*_ARRAYS, *optional)}, **values))
    return samples
