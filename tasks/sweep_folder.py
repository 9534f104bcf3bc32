"""The folder of a sweep: `<storage root>/<sweep id>/`, beside the run folders of its cells.

sweep.toml      the sweep, with base = "base.toml"; written last, so a folder that has it is whole
base.toml       the configuration that all cells share
cells.json      the cells and what each sets;  cells/<cell>.toml: the whole configuration of each
origin.json     where, when and by whom it was made
state.json      what the driver has done for each cell; what became of it stands in the cell's own run folder
leases/, lease.json     who drives it, as of a run
cancel.json     somebody asked it to stop
outcome.json    how it ended: finish (every cell has), cancelled, or spent (the budget)
logs/<cell>.log what the command that leads a cell prints
report.html, *.png, best.toml
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tomlkit

from slipstream.config_file import dump_config, load_config
from slipstream.instance import check_home, remember_root
from slipstream.run_config import RunConfig
from slipstream.run_folder import (
    DamagedFile,
    RunFolder,
    RunFolderError,
    is_number,
    read_json,
    read_object,
    write_atomic,
    write_json,
)
from slipstream.sweep.expand import CellSpec
from slipstream.sweep.spec import SweepConfig, load_sweep
from tasks.origin import origin_here, read_origin, write_origin

SWEEP_FILE = "sweep.toml"
WITHOUT_CELLS = "without it nobody knows what the sweep's runs are; begin another sweep, with --new"
TAG = "slipstream.sweep"  # of flow runs: slipstream.sweep:<sweep id>


@dataclass
class Note:
    """What the driver did for one cell.

    Attributes:
        starts: starts in a row without a new step in between.
        at_step, attempt: steps done, and newest attempt, at the newest start; attempt -1: never started.
        stopped_for: why the sweep stopped it (`slipstream.sweep.schedule`), and `why` in words; '' where it did not.
        again: a person asked to try it again.
        problem: why it was given up; '' where it was not.
        serial: starts altogether; it names each of them.
        pid, started, host: the process that leads it, where that is a child of a driver.
        flow_run: id of the Prefect flow run that leads it.
        ended: how it has ended (a `Phase`), with `gpu_hours` used; '' where it has not. What counts is its run folder,
            where that is still there.
    """

    starts: int = 0
    at_step: int = 0
    attempt: int = -1
    stopped_for: str = ""
    why: str = ""
    again: bool = False
    problem: str = ""
    serial: int = 0
    pid: int = 0
    started: float = 0.0
    host: str = ""
    flow_run: str = ""
    ended: str = ""
    gpu_hours: float = 0.0


def _fits(key: str, value: Any) -> bool:
    """Whether `value` can be the `key` of a note; what cannot counts as not noted."""
    kinds = {field.name: type(field.default) for field in fields(Note)}
    if key not in kinds or isinstance(value, bool) != (kinds[key] is bool):
        return False
    return is_number(value) if kinds[key] is float else isinstance(value, kinds[key])


class SweepFolder:
    """Paths and records of one sweep. Only the process that drives it writes; holds no state of its own."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    @property
    def sweep_id(self) -> str:
        return self.path.name

    @property
    def as_run(self) -> RunFolder:
        """Itself as what leases, origin and outcome are kept in."""
        return RunFolder(self.path)

    @property
    def sweep_file(self) -> Path:
        return self.path / SWEEP_FILE

    @property
    def cancel_file(self) -> Path:
        return self.path / "cancel.json"

    @property
    def outcome_file(self) -> Path:
        return self.path / "outcome.json"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    def config_file(self, cell: str) -> Path:
        return self.path / "cells" / f"{cell}.toml"

    def log_file(self, cell: str) -> Path:
        return self.path / "logs" / f"{cell}.log"

    def run_id(self, cell: str) -> str:
        return f"{self.sweep_id}-{cell}"

    def run(self, cell: str) -> RunFolder:
        """The run folder of a cell, which may not be there yet."""
        return RunFolder(self.path.parent / self.run_id(cell))

    @classmethod
    def open(cls, path: str | Path) -> "SweepFolder":
        """An existing sweep. Raises RunFolderError."""
        folder = cls(path)
        if not folder.sweep_file.is_file():
            raise RunFolderError(f"{folder.path} holds no sweep: there is no {SWEEP_FILE}")
        return folder

    @classmethod
    def create(
        cls,
        root: str | Path,
        sweep_id: str,
        sweep: SweepConfig,
        base: RunConfig,
        cells: Sequence[CellSpec],
        configs: Mapping[str, RunConfig],
        flow_run: str = "",
        deployment: str = "",
    ) -> "SweepFolder":
        """Make the folder, private to its user. One that was begun and has no sweep.toml is made whole.

        Raises RunFolderError where the sweep exists, OSError.
        """
        folder = cls(Path(root).expanduser() / sweep_id)
        if folder.sweep_file.is_file():
            raise RunFolderError(f"the sweep {folder.path} exists: continue it with `slipstream sweep {folder.path}`")
        check_home()
        folder.path.parent.mkdir(parents=True, exist_ok=True)
        folder.path.mkdir(mode=0o700, exist_ok=True)
        for name in ("cells", "logs"):
            (folder.path / name).mkdir(mode=0o700, exist_ok=True)
        write_origin(folder.as_run, origin_here(flow_run, deployment))
        with contextlib.suppress(OSError):  # a home that takes no writes keeps no sweep from starting
            remember_root(folder.path.parent)
        write_atomic(folder.path / "base.toml", dump_config(base))
        for cell in cells:
            placed = configs[cell.id].model_copy(deep=True)
            placed.storage.root = str(folder.path.parent)
            write_atomic(folder.config_file(cell.id), dump_config(placed))
        write_json(folder.path / "cells.json", [{"id": cell.id, "values": dict(cell.values)} for cell in cells])
        write_json(folder.path / "made.json", {"digest": digest_of(configs), "root": configs[cells[0].id].storage.root})
        folder.write_spec(sweep)
        return folder

    def write_spec(self, sweep: SweepConfig) -> None:
        """Write sweep.toml; on a resume with other limits again."""
        values = sweep.model_copy(update={"base": "base.toml"}).model_dump(exclude_none=True)
        write_atomic(self.sweep_file, tomlkit.dumps({key: value for key, value in values.items() if value != {}}))

    def spec(self) -> SweepConfig:
        """Raises ConfigError."""
        return load_sweep(self.sweep_file)

    def base(self) -> RunConfig:
        """The base without [set]. Raises ConfigError."""
        return load_config(self.path / "base.toml")

    def config(self, cell: str) -> RunConfig:
        """Raises ConfigError."""
        return load_config(self.config_file(cell))

    def best_text(self, cell: str) -> str:
        """The configuration of a cell as a run of its own would have it: with the storage root that the base names."""
        config = self.config(cell)
        config.storage.root = str(read_object(self.path / "made.json").get("root") or config.storage.root)
        return dump_config(config)

    def digest(self) -> str:
        """What the cells are, in one word: the same for the same cells of the same base."""
        return str(read_object(self.path / "made.json").get("digest", ""))

    def cells(self) -> tuple[CellSpec, ...]:
        """Raises DamagedFile."""
        path = self.path / "cells.json"
        try:
            value = read_json(path)
            if value is None:
                raise DamagedFile(f"{path} is not there")
            return tuple(CellSpec(str(cell["id"]), dict(cell["values"])) for cell in value)
        except DamagedFile as error:
            raise DamagedFile(f"{error}: {WITHOUT_CELLS}") from None
        except (TypeError, KeyError, ValueError):
            raise DamagedFile(f"{path} is damaged, it holds no cells: {WITHOUT_CELLS}") from None

    def cell_ids(self) -> list[str]:
        """The cells' ids, also where what they set cannot be read any more. Raises OSError."""
        try:
            return [cell.id for cell in self.cells()]
        except DamagedFile:
            return sorted(path.stem for path in (self.path / "cells").glob("*.toml"))

    def notes(self) -> dict[str, Note]:
        """By cell; empty ones for cells that nothing was done for. Raises DamagedFile."""
        known = read_object(self.path / "state.json")
        found = {}
        for cell in self.cell_ids():
            value = known.get(cell)
            value = value if isinstance(value, dict) else {}
            found[cell] = Note(**{key: item for key, item in value.items() if _fits(key, item)})
        return found

    def write_notes(self, notes: Mapping[str, Note]) -> None:
        write_json(self.path / "state.json", {cell: asdict(note) for cell, note in notes.items()})

    @property
    def flow_run(self) -> str:
        """Id of the flow run that drives it; '' where it is driven from the command line. Raises DamagedFile."""
        return read_origin(self.as_run).flow_run

    def is_over(self) -> bool:
        """Whether every cell has ended. Raises DamagedFile."""
        outcome = self.outcome()
        return outcome.get("kind") in ("finish", "fail") and not outcome.get("left")

    def outcome(self) -> dict[str, Any]:
        """How it ended, {} while it has not. Raises DamagedFile."""
        return read_object(self.outcome_file)


def is_sweep(folder: RunFolder) -> bool:
    """Whether a folder with an origin, a lease and an outcome is that of a sweep."""
    return (folder.path / SWEEP_FILE).is_file()


def digest_of(configs: Mapping[str, RunConfig]) -> str:
    text = json.dumps({cell: config.model_dump(mode="json") for cell, config in configs.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sweeps_in(root: Path) -> list[SweepFolder]:
    """The sweeps of a storage root, oldest first."""
    found: list[tuple[float, SweepFolder]] = []
    for path in root.glob(f"*/{SWEEP_FILE}"):
        with contextlib.suppress(OSError):  # removed meanwhile
            found.append((path.stat().st_mtime, SweepFolder(path.parent)))
    return [sweep for _, sweep in sorted(found, key=lambda pair: pair[0])]
