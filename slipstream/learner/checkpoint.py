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
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: {MARKER} is damaged: {error}") from error
    if marker is None:
        raise CheckpointError(f"{checkpoint} is not complete: it has no {MARKER}, so the process died while writing it")
    for name, expected in marker["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{checkpoint} is damaged: {name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{checkpoint} is damaged: {name} has {path.stat().st_size} bytes of {expected['bytes']}"
            )
        if checksums and _digest(path) != expected["sha256"]:
            raise CheckpointError(f"{checkpoint} is damaged: {name} has another checksum than when it was written")


def complete_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints in an output_dir, ascending; sizes are checked, checksums are not."""
    found = []
    for path in output_dir.glob("checkpoint-*"):
        match = _NAME.match(path.name)
        if match and path.is_dir():
            try:
                verify(path, checksums=False)
            except CheckpointError:
                continue
            found.append((int(match[1]), path))
    return sorted(found)


def latest_complete(run: RunFolder) -> tuple[Path, int] | None:
    """The checkpoint that a new attempt of the run starts from, and its step; None: from the model.

    What an attempt wrote beyond the checkpoint that a later attempt's fence names does not count. A checkpoint whose
    checksums do not match is passed over.
    """
    limits = run.void_after()
    candidates = []
    for attempt in run.attempts():
        for step, path in complete_checkpoints(run.output(attempt)):
            if attempt not in limits or step <= limits[attempt]:
                candidates.append((step, attempt, path))
    for step, _, path in sorted(candidates, key=lambda c: (c[0], c[1]), reverse=True):
        try:
            verify(path)
        except CheckpointError:
            continue
        return path, step
    return None


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
    for path in output_dir.glob("checkpoint-*"):
        match = _NAME.match(path.name)
        if match and path not in kept and int(match[1]) < newest:
            # without its marker first: a deletion cut short must not look like a checkpoint
            (path / MARKER).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


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
        """Raise CheckpointError where a resume would visit other prompts, or in another order."""
        for key, old, new in (
            ("length of the dataset", self.dataset_length, length),
            ("content of the dataset (fingerprint)", self.dataset_fingerprint, fingerprint),
            ("order of prompts (shuffle)", self.shuffle, shuffle),
            ("seed of the order", self.seed, seed),
        ):
            if old != new:
                raise CheckpointError(
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
