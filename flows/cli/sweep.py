"""`slipstream sweep`: many runs of one configuration with other values."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flows.cli.plain import HOME, SET, fail_plainly

if TYPE_CHECKING:
    from slipstream.sweep.expand import CellSpec
    from slipstream.sweep.spec import SweepConfig
    from tasks.sweep_folder import SweepFolder


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@SET
@click.option("--at-once", type=click.IntRange(1, 1000), metavar="N", help="Most cells that run at the same time.")
@click.option("--dry-run", is_flag=True, help="Print the cells; start nothing.")
@click.option("--resume", is_flag=True, help="Continue the newest sweep of these cells; an error where there is none.")
@click.option("--new", is_flag=True, help="Begin a new sweep though one of these cells has not ended.")
@click.option("--retry-failed", is_flag=True, help="Try cells again that have failed, or that somebody stopped.")
@click.option("--prefect", is_flag=True, help="Have a worker of the Prefect server do it, and print where to look.")
@click.option("--unattended", is_flag=True, hidden=True, help="Go on with FOLDER as reconciliation has it go on.")
@fail_plainly
def sweep(
    file: Path,
    overrides: tuple[str, ...],
    at_once: int | None,
    dry_run: bool,
    resume: bool,
    new: bool,
    retry_failed: bool,
    prefect: bool,
    unattended: bool,
) -> int:
    """Run the sweep that the TOML file FILE says, or go on with a sweep's folder.

    The same command goes on with a sweep that has not ended: cells that have finished are not run again.
    """
    from slipstream.config_file import ConfigError, Problem
    from slipstream.sweep.spec import load_sweep
    from tasks.origin import refuse_copy
    from tasks.sweep_folder import SWEEP_FILE, SweepFolder
    from tasks.sweep_prepare import check_all, create, presets_in, resolve, unfinished

    if resume and new:
        raise ConfigError([Problem("", None, "--resume and --new exclude each other: leave one out")], "sweep")
    if (file / SWEEP_FILE).is_file():
        if overrides or new:
            message = "a sweep that exists keeps its cells: give the sweep's file to begin another one"
            raise ConfigError([Problem("", None, message)], str(file))
        if prefect:
            message = "a sweep that exists goes on where it was begun: leave --prefect out, or retry its flow run there"
            raise ConfigError([Problem("", None, message)], str(file))
        folder = SweepFolder.open(file)
        spec = folder.spec()
        if at_once is not None:
            spec = spec.model_copy(update={"cells_at_once": at_once})
        if dry_run:
            click.echo(described(spec, folder.cells(), folder.path), nl=False)
            return 0
        refuse_copy(folder.as_run)
        if unattended:  # what was asked of the sweep meanwhile stands
            return run_here(folder, retry_failed, by_person=False)
        if folder.flow_run:
            message = (
                f"flow run {folder.flow_run} drives it, and cells are flow runs: retry that in Prefect's interface"
            )
            raise ConfigError([Problem("", None, message)], str(file))
        return run_here(folder, retry_failed, spec=None if at_once is None else spec)
    spec = load_sweep(file)
    if at_once is not None:
        spec = spec.model_copy(update={"cells_at_once": at_once})
    resolved = resolve(spec, file.parent, presets_in(HOME / "examples"), overrides)
    if dry_run:
        click.echo(described(resolved.sweep, resolved.cells, resolved.root), nl=False)
        return 0
    for warning in check_all(resolved):
        click.echo(f"warning: {warning}", err=True)
    if prefect:
        from flows.cli.sweep_prefect import run_on_server

        return run_on_server(file, overrides, at_once)
    earlier = None if new else unfinished(resolved, finished_too=resume or retry_failed)
    if earlier is None and (resume or retry_failed):
        message = f"there is no sweep of these cells in {resolved.root}: leave --resume and --retry-failed out"
        raise ConfigError([Problem("", None, message)], str(file))
    if earlier is not None:
        click.echo(f"going on with {earlier.path} (--new begins another one)")
        return run_here(earlier, retry_failed, spec=resolved.sweep)
    from slipstream.run_folder import new_run_id

    return run_here(create(resolved, new_run_id(spec.name)), retry_failed)


def described(sweep: "SweepConfig", cells: "Sequence[CellSpec]", where: Path) -> str:
    """The cells, and what they set, as a table. `where`: the folder that their runs lie in."""
    from slipstream.sweep.expand import shown

    rows = [["cell", *sweep.keys]]
    rows += [[cell.id, *(shown(cell.values.get(key, "")) for key in sweep.keys)] for cell in cells]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{len(cells)} cells, {sweep.cells_at_once} at once, in {where}"]
    return "\n".join(lines) + "\n"


def run_here(
    folder: "SweepFolder", retry_failed: bool, by_person: bool = True, spec: "SweepConfig | None" = None
) -> int:
    """Drive the sweep from this process, with a command of its own for each cell. `spec`: other limits than the folder's."""
    from flows.cli.own import own_command
    from flows.cli.sweep_progress import drive_shown
    from tasks.sweep_cells import LocalCells

    return drive_shown(folder, LocalCells(folder, own_command()), retry_failed, by_person, spec)
