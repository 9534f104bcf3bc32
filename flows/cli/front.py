"""`slipstream up`, `slipstream down` and `slipstream deploy`: the Prefect server, and what we have on it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from flows.cli.plain import HOME, fail_plainly

PRESET = click.option(
    "--preset",
    "presets",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Another configuration to fill a form with, besides the examples.",
)
DIRECTORY = click.option(
    "--directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder that runs of the presets work in: relative paths start there (default: this one).",
)
AT_ONCE = click.option("--at-once", type=click.IntRange(min=0), metavar="N", help="Most trainings at once.")
INSTANCE = click.option("--instance", metavar="ID", help="Instance id (default: $SLIPSTREAM_INSTANCE, else your name).")


def _use(instance: str | None) -> None:
    import os

    from slipstream.instance import INSTANCE_ENV, instance_id

    os.environ[INSTANCE_ENV] = instance_id(instance)


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Port (default: that of last time, else 4200); 0: any.")
@PRESET
@DIRECTORY
@AT_ONCE
@INSTANCE
@click.option("--only", type=click.Choice(["server", "workers"]), help="Only this part.")
@click.option("--install", is_flag=True, help="Start it with the machine: systemd's user units, else cron.")
@click.option("--uninstall", is_flag=True, help="Take that back.")
@click.option("--print", "only_print", is_flag=True, help="With --install: show what it would do.")
@fail_plainly
def up(
    port: int | None,
    presets: tuple[Path, ...],
    directory: Path | None,
    at_once: int | None,
    instance: str | None,
    only: str | None,
    install: bool,
    uninstall: bool,
    only_print: bool,
) -> int:
    """Start a local Prefect server, its workers and our deployments, and print the address.

    It runs until Ctrl-C, which ends no run and no job.
    """
    from flows.up.run import SERVER, WORKERS, Asked, Upholder

    _use(instance)
    if presets and not uninstall:
        from flows.deploy.presets import load_presets

        load_presets(presets)  # refused now, and not once the server is there
    words = [part for path in presets for part in ("--preset", str(path.absolute()))]
    words += ["--directory", str((directory or Path.cwd()).absolute())] if presets else []
    words += [] if at_once is None else ["--at-once", str(at_once)]
    if install or uninstall or only_print:
        if install and uninstall:
            raise click.UsageError("--install and --uninstall exclude each other")
        if only_print and not install:
            raise click.UsageError("--print belongs to --install")
        if only:
            raise click.UsageError("--install and --uninstall are about both parts: leave --only out")
        from flows.up import install as installing
        from slipstream.instance import instance_id

        if uninstall:
            installing.uninstall(instance_id(), _say)
            return 0
        place = installing.here([*words, *([] if port is None else ["--port", str(port)])])
        installing.show(place, _say) if only_print else installing.install(place, _say)
        return 0
    asked = Asked((only,) if only else (SERVER, WORKERS), port, words)
    with _progress() as step:
        return Upholder(asked, _say, step).run()


def _say(text: str, err: bool = False) -> None:
    """Where nobody reads it any more (a closed terminal, `| head`), what is looked after goes on."""
    stream = sys.stderr if err else sys.stdout
    try:
        click.echo(text, err=err)
        stream.flush()
    except OSError:
        import os

        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows how far it is: with the seconds on a terminal, else one line a step."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:

        def line(text: str) -> None:
            if text:
                _say(f"… {text}", err=True)

        yield line
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    display = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    )
    task = display.add_task("")

    def show(text: str) -> None:
        if text:
            display.reset(task, description=text)
            display.start()
        else:
            display.stop()

    try:
        yield show
    finally:
        display.stop()


@click.command()
@fail_plainly
def down() -> int:
    """End what `slipstream up` started; runs go on."""
    from flows.up.run import bring_down

    return bring_down(_say)


@click.command()
@PRESET
@DIRECTORY
@AT_ONCE
@INSTANCE
@click.option("--prune", is_flag=True, help="Show what this instance has there and does not want any more.")
@click.option("--yes", is_flag=True, help="With --prune: remove it.")
@click.option(
    "--allow-unauthenticated", is_flag=True, help="Use a server that asks nobody for a password all the same."
)
@click.option(
    "--notify",
    multiple=True,
    metavar="TYPE/NAME",
    help="Notify with this block when a run fails or recovers often, and when a sweep has finished.",
)
@fail_plainly
def deploy(
    presets: tuple[Path, ...],
    directory: Path | None,
    at_once: int | None,
    instance: str | None,
    prune: bool,
    yes: bool,
    allow_unauthenticated: bool,
    notify: tuple[str, ...],
) -> int:
    """Register our deployments, pools, limits and blocks on a Prefect server.

    It may be run again and again: what people have paused, scheduled or edited there stays.
    """
    from flows.connection import asks_nobody, connect, is_loopback
    from flows.deploy.presets import in_place_of_examples, load_presets
    from slipstream.instance import instance_id

    if yes and not prune:
        raise click.UsageError("--yes belongs to --prune")
    _use(instance)
    configurations = load_presets(presets)
    connection = connect()
    if not allow_unauthenticated and not is_loopback(connection.url) and asks_nobody(connection.url):
        raise click.ClickException(
            f"{connection.url} asks nobody for a password, and whoever reaches it can run any command as you: set "
            "PREFECT_SERVER_API_AUTH_STRING there, or say --allow-unauthenticated"
        )
    import asyncio

    from flows.deploy import apply
    from flows.deploy.deployments import wanted

    want = wanted(
        instance_id(),
        apply.known_flows(),
        configurations,
        apply.known_profiles(),
        command=apply.engine_command(),
        directory=str(HOME),
        elsewhere={path.stem: str((directory or Path.cwd()).absolute()) for path in presets},
    )
    click.echo(f"{connection.url} ({connection.source}), instance {want.instance}")
    for path in in_place_of_examples(presets):
        click.echo(f"  {path} takes the place of the example {path.stem}")
    if prune:
        if yes:
            lines = [f"  {done.what:<12} {done.name}" for done in asyncio.run(apply.prune(want))]
        else:
            lines = [f"  {name}" for name in asyncio.run(apply.unwanted(want))]
            if lines:
                lines = ["not wanted any more (--prune --yes removes them):", *lines]
        click.echo("\n".join(lines) or "nothing to remove")
        return 0
    if notify:
        from prefect.client.orchestration import get_client

        from flows.deploy.notifications import apply_notifications, find_block

        with get_client(sync_client=True) as client:
            for block in notify:
                find_block(client, block)  # refused before anything is changed
    for done in asyncio.run(apply.apply(want, at_once)):
        click.echo(f"  {done.kind:<11} {done.name:<44} {done.what}")
    if notify:
        with get_client(sync_client=True) as client:
            applied = apply_notifications(client, want.instance, notify)
        for what, names in (("made", applied.created), ("updated", applied.updated), ("unchanged", applied.kept)):
            for name in names:
                click.echo(f"  {'automation':<11} {name:<44} {what}")
    return 0
