"""`slipstream clean`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flows.cli.plain import fail_plainly, not_empty

if TYPE_CHECKING:
    from tasks.clean_policy import Found, Row


class Duration(click.ParamType):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from tasks.clean_policy import parse_duration

        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.option(
    "--older-than", "older_than_s", type=Duration(), required=True, help="Ended longer ago than 12h, 30d, 2w."
)
@click.option("--keep-best", is_flag=True, help="Of each sweep and each run name, keep the run with the best reward.")
@click.option(
    "--checkpoints-only", is_flag=True, help="Keep the runs; remove their checkpoints but the newest complete."
)
@click.option("--root", metavar="FOLDER", callback=not_empty, help="Storage root that is cleaned.")
@click.option("--yes", is_flag=True, help="Do it; without this only the plan is shown.")
@fail_plainly
def clean(older_than_s: float, keep_best: bool, checkpoints_only: bool, root: str | None, yes: bool) -> int:
    """Show which old runs would go, and with --yes remove them. Runs that are in use are never touched."""
    import time

    from slipstream.run_config import StorageSection
    from slipstream.run_folder import RunFolderError
    from tasks.clean import what_goes

    storage = Path(root or StorageSection().root).expanduser().absolute()
    if not storage.is_dir():
        raise RunFolderError(f"there is no folder {storage}: name the storage root with --root")
    now = time.time()
    rows = what_goes(storage, older_than_s, keep_best, now, lambda text: click.echo(text, err=True))
    if checkpoints_only:
        rows = [row for row in rows if not row.found.is_sweep and not row.found.remains]
    click.echo("\n".join(table(rows, now)))
    going = [row.found for row in rows if row.goes]
    total = size_text(sum(one.size for one in going))
    what = "lose their checkpoints but the newest" if checkpoints_only else f"go, {total}"
    click.echo(f"{storage}: {len(going)} of {len(rows)} {what}")
    if not going or not yes:
        click.echo("nothing was removed" + (": --yes removes them" if going else ""))
        return 0
    return _act(storage, going, checkpoints_only)


def _act(storage: Path, going: Sequence["Found"], checkpoints_only: bool) -> int:
    """The exit code: 1 where something stays that was to go."""
    from flows.cli.plain import say, storage_text
    from tasks.clean import Gone, Stays, remove, thin

    left = 0
    for one in sorted(going, key=lambda one: one.is_sweep):  # a sweep after its cells
        try:
            if checkpoints_only:
                done = f"{one.id}: freed {size_text(thin(storage, one))}"
            else:
                remove(storage, one)
                done = f"removed {one.id}"
        except Gone as error:
            say(f"{one.id}: {error}")
        except Stays as error:
            left += 1
            say(f"{one.id} stays: {error}", err=True)
        except OSError as error:
            left += 1
            say(f"error: {one.id} is not all gone: {storage_text(error)}; clean again", err=True)
        else:
            say(done)
    return 1 if left else 0


def table(rows: Sequence["Row"], now: float) -> list[str]:
    """One line for each folder: what becomes of it, its age, size and reward, and why."""
    from tasks.clean_policy import duration_text

    cells = [("", "run", "ended", "size", "reward", "why")]
    for row in rows:
        one = row.found
        ended = "" if one.ended_at is None else duration_text(max(0.0, now - one.ended_at))
        reward = one.held_out if one.held_out is not None else one.reward
        shown = "" if reward is None else f"{reward:.3f}{'' if one.held_out is not None else ' (training)'}"
        size = size_text(one.size) if one.size else ""
        cells.append(("goes" if row.goes else "stays", one.id, ended, size, shown, row.why))
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    return [
        "  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[5]]) for line in cells
    ]


def size_text(size: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit in ("B", "KiB") else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
