"""Sweeps of doubles: `python -m tests.doubles.sweep FOLDER` drives one, with `tests.doubles.cell` for each cell."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.local_jobs import cancel_jobs, find_process
from slipstream.config_file import dump_config, parse_config
from slipstream.run_folder import RunFolder, write_json
from slipstream.sweep.spec import parse_sweep
from tasks.stored import all_jobs
from tasks.sweep_cells import LocalCells
from tasks.sweep_folder import SweepFolder
from tasks.sweep_prepare import create, resolve
from tests.doubles.cli import install
from tests.doubles.events import FOLDER, PLAN

COMMAND = [sys.executable, "-m", "tests.doubles.cell"]
POLL_S = 0.3
HOLD = "hold"


def write_base(folder: Path, **trainer: Any) -> Path:
    """A configuration of doubles, in whose storage root runs and sweeps lie: `folder`/runs."""
    data = folder / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(12)))
    settings = {"num_train_epochs": 2, "num_generations": 3, "save_steps": 4, "max_staleness": 8}
    config = parse_config(
        {
            "name": "double",
            "model": {"name": "double"},
            "data": {"source": str(data)},
            "server": {"gpus": 0},
            "learner": {"gpus": 0},
            "trainer": settings | trainer,
            "storage": {"root": str(folder / "runs")},
            "recovery": {"max_restarts": 0, "backoff": 0},
        }
    )
    base = folder / "base.toml"
    base.write_text(dump_config(config))
    return base


def make_sweep(folder: Path, axes: Mapping[str, Sequence[Any]], **settings: Any) -> SweepFolder:
    """The folder of a sweep whose base is `folder`/base.toml; nothing is started."""
    values = {"name": "s", "base": "base.toml", "axes": {key: list(values) for key, values in axes.items()}, **settings}
    return create(resolve(parse_sweep(values), folder, {}), "s-1")


def hold(root: Path, step: int) -> None:
    """Let every run in the storage root stand still once it has done so many steps in its first attempt."""
    write_json(root / PLAN, [{"id": HOLD, "event": "step", "where": {"step": step, "attempt": 1}, "deeds": ["block"]}])


def is_held(run: RunFolder) -> bool:
    return (run.path / FOLDER / f"reached-{HOLD}.json").exists()


def go_on(root: Path) -> None:
    """Hold no run any more, and let those that stand still go on."""
    write_json(root / PLAN, [])
    for path in root.glob(f"*/{FOLDER}"):
        (path / f"go-{HOLD}").touch()


def remove_processes(root: Path) -> None:
    """End what leads the cells of all sweeps in a storage root, and their jobs."""
    for sweep_file in root.glob("*/sweep.toml"):
        sweep = SweepFolder(sweep_file.parent)
        for cell, note in sweep.notes().items():
            if note.pid and find_process(note.pid, note.started) is not None:
                os.killpg(note.pid, signal.SIGKILL)
            if sweep.run(cell).run_file.exists():
                cancel_jobs(all_jobs(sweep.run(cell)), grace_s=0.1)


def main() -> int:
    install()
    from tasks.sweep import drive

    sweep = SweepFolder.open(sys.argv[1])

    def tell(look: Any, plan: Any) -> None:
        active = [state.id for state in look.states.values() if state.phase.active]
        print(" ".join(f"{result.id}:{result.state}" for result in look.results), len(active), flush=True)

    drive(sweep, LocalCells(sweep, COMMAND), "--retry-failed" in sys.argv, tell, POLL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
