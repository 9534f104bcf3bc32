"""Before a sweep starts anything: its file, its base and every cell are checked, and its folder is made."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.config_file import ConfigError, Problem, load_config
from slipstream.metrics.registry import find
from slipstream.run_config import RunConfig, TrainerSection
from slipstream.run_folder import RUN_FILE, DamagedFile
from slipstream.sweep.expand import CellSpec, configure_all, expand, together
from slipstream.sweep.spec import TRAINING, SweepConfig
from tasks.prepare import check
from tasks.sweep_folder import SweepFolder, digest_of, sweeps_in

Presets = Mapping[str, Path]


@dataclass(frozen=True)
class Resolved:
    """A sweep with everything that it stands for."""

    sweep: SweepConfig
    base: RunConfig
    cells: tuple[CellSpec, ...]
    configs: Mapping[str, RunConfig]

    @property
    def root(self) -> Path:
        return Path(self.configs[self.cells[0].id].storage.root).expanduser().absolute()

    @property
    def digest(self) -> str:
        return digest_of(self.configs)


def resolve(sweep: SweepConfig, folder: Path, presets: Presets, overrides: Sequence[str] = ()) -> Resolved:
    """Find the base and make the configuration of every cell. Writes nothing.

    Args:
        folder: that `base` is relative to.
        presets: files of presets by name.
        overrides: section.key=value for all cells; they win over the sweep's own settings.

    Raises ConfigError with what is wrong with any of the cells.
    """
    given = {text.partition("=")[0].strip(): text.partition("=")[2].strip() for text in overrides}
    if axes := [
        Problem(key, given[key], "is an axis of the sweep: change it in its file") for key in sweep.keys if key in given
    ]:
        raise ConfigError(axes, "the sweep")
    sweep = sweep.model_copy(update={"set": {key: value for key, value in sweep.set.items() if key not in given}})
    base = load_config(base_path(sweep.base, folder, presets), overrides)
    cells = expand(sweep)
    configs = configure_all(base, sweep, cells)
    return Resolved(sweep, base, cells, configs)


def presets_in(folder: Path) -> dict[str, Path]:
    """Configurations in a folder, by name."""
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def base_path(name: str, folder: Path, presets: Presets) -> Path:
    """The file that `base` names: a path, a run folder or a preset. Raises ConfigError."""
    try:
        path = folder / Path(name).expanduser()
        if (path / RUN_FILE).is_file():
            return path / RUN_FILE
        if path.is_file():
            return path
    except RuntimeError:
        message = "begins with ~, and nobody knows that home: write it in full, or set HOME"
        raise ConfigError([Problem("base", name, message)], "the sweep") from None
    except OSError as error:
        raise ConfigError([Problem("base", name, f"cannot be looked at: {error.strerror}")], "the sweep") from None
    if name in presets:
        return presets[name]
    known = f"a preset ({', '.join(sorted(presets))})" if presets else "a preset"
    message = f"there is no such file ({path.absolute()}), and it is not {known}: name one of either"
    raise ConfigError([Problem("base", name, message)], "the sweep")


def check_all(resolved: Resolved) -> list[Problem]:
    """Everything that can be refused before a cell exists. Raises ConfigError; returns the warnings.

    Cells that differ only in the trainer's section have the same model, data, rewards and cluster: one of them is
    looked at.
    """
    refused: list[tuple[CellSpec, Problem]] = []
    warned: list[tuple[CellSpec, Problem]] = []
    seen: list[RunConfig] = []
    for cell in resolved.cells:
        config = resolved.configs[cell.id]
        alike = config.model_copy(update={"trainer": TrainerSection()})
        if alike in seen:
            continue
        seen.append(alike)
        try:
            warned += [(cell, problem) for problem in check(config)]
        except ConfigError as error:
            refused += [(cell, problem) for problem in error.problems]
    if refused:
        raise ConfigError(together(refused), "the sweep")
    return [*together(warned), *remarks(resolved)]


def remarks(resolved: Resolved) -> list[Problem]:
    """What is accepted, but will say less than one may hope."""
    sweep, found = resolved.sweep, list[Problem]()
    configs = list(resolved.configs.values())
    if find(sweep.metric) is None:
        message = f"no run records such a metric, so cells are compared by {TRAINING}: docs/metrics.md has those that there are"
        found.append(Problem("metric", sweep.metric, message, "warning"))
    if sweep.metric.startswith("eval/") and not any(config.data.eval_source for config in configs):
        message = f"no cell has held-out data (data.eval_source), so cells are compared by the training {TRAINING}"
        found.append(Problem("metric", sweep.metric, message, "warning"))
    elif sweep.metric.startswith("eval/") and any(config.trainer.eval_steps is None for config in configs):
        message = (
            "held-out data is read only before the first and after the last step, so time-to-reward can be told only "
            'coarsely, and nothing is stopped early by it: set "trainer.eval_steps" under [set]'
        )
        found.append(Problem("metric", sweep.metric, message, "warning"))
    most = max(config.trainer.max_steps for config in configs)
    if sweep.halving and 0 < most <= sweep.halving.first_rung:
        message = f"no cell has more than {most} steps, so nothing is stopped early: lower it"
        found.append(Problem("halving.first_rung", sweep.halving.first_rung, message, "warning"))
    return found


def unfinished(resolved: Resolved, finished_too: bool = False) -> SweepFolder | None:
    """The newest sweep of the command line with these cells that is not over; with `finished_too` any of them.

    What cannot be read is none of them.
    """
    for folder in reversed(sweeps_in(resolved.root)):
        with contextlib.suppress(DamagedFile, OSError):
            own = folder.sweep_id.startswith(f"{resolved.sweep.name}-") and folder.digest() == resolved.digest
            if own and not folder.flow_run and (finished_too or not folder.is_over()):
                return folder
    return None


def create(resolved: Resolved, sweep_id: str, flow_run: str = "", deployment: str = "") -> SweepFolder:
    """Make the sweep's folder. Raises RunFolderError, OSError."""
    return SweepFolder.create(
        resolved.root,
        sweep_id,
        resolved.sweep,
        resolved.base,
        resolved.cells,
        resolved.configs,
        flow_run,
        deployment,
    )
