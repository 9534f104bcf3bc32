"""The command line: `slipstream`. Heavy imports happen inside the commands, so that --help is quick."""

from pathlib import Path

import click

from flows.cli import clean, front, reconcile, schedule, sweep
from flows.cli.plain import HOME, ROOT, SET, fail_plainly, find_run, find_sweep


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="slipstream-rl")
def main() -> None:
    """Train language models by asynchronous reinforcement learning."""


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@SET
@click.option("--dry-run", is_flag=True, help="Print the configuration and all commands; start nothing.")
@click.option("--run-id", hidden=True, help="Name of the run's folder.")
@fail_plainly
def train(config: Path, overrides: tuple[str, ...], dry_run: bool, run_id: str | None) -> int:
    """Train a model as the TOML file CONFIG says."""
    again = ["slipstream", "train", str(config), *_flags(overrides), "--set", "trainer.learning_rate=…"]
    return _train(config, overrides, dry_run, again, run_id)


@main.command()
@SET
@click.option("--seed", type=click.IntRange(min=0), help="Seed of prompts and sampling.")
@click.option("--dry-run", is_flag=True, help="Print the configuration and all commands; start nothing.")
@fail_plainly
def demo(overrides: tuple[str, ...], seed: int | None, dry_run: bool) -> int:
    """Teach a tiny model two-digit addition, on this machine, in minutes."""
    import os

    config = HOME / "examples" / "demo.toml"
    if not config.is_file():
        raise click.ClickException(f"there is no {config}: the demo needs a checkout of the repository")
    os.chdir(HOME)
    if seed is not None:
        overrides = (*overrides, f"trainer.seed={seed}")
    other = (seed or 0) + 1
    again = ["slipstream", "demo", "--seed", str(other), "--set", "trainer.learning_rate=1e-4"]
    return _train(config, overrides, dry_run, again)


def _flags(overrides: tuple[str, ...]) -> list[str]:
    return [part for text in overrides for part in ("--set", text)]


def _train(path: Path, overrides: tuple[str, ...], dry: bool, again: list[str], run_id: str | None = None) -> int:
    from slipstream.config_file import load_config

    config = load_config(path, overrides)
    if dry:
        from flows.cli.dry_run import dry_run

        click.echo(dry_run(config), nl=False)
        return 0
    from slipstream.run_folder import new_run_id
    from tasks.prepare import check

    for warning in check(config):  # refuse before Prefect is started; the flow checks again
        click.echo(f"warning: {warning}", err=True)
    from flows.cli.session import run_train

    return run_train(config, run_id or new_run_id(config.name), again)


@main.command()
@click.argument("run")
@ROOT
@fail_plainly
def resume(run: str, root: str | None) -> int:
    """Continue RUN (a path, or an id in the storage root) from its newest complete checkpoint."""
    from tasks.lease import claim
    from tasks.origin import refuse_copy
    from tasks.prepare import check_resumable

    folder = find_run(run, root)
    refuse_copy(folder)
    claim(folder)  # held until this command ends; the flow claims and checks again
    check_resumable(folder)
    from flows.cli.session import run_resume

    return run_resume(folder, ["slipstream", "train", str(folder.run_file), "--set", "trainer.learning_rate=…"])


@main.command()
@click.argument("run")
@ROOT
@click.option("--why", default="slipstream stop", help="Reason, for the record.")
@fail_plainly
def stop(run: str, root: str | None, why: str) -> int:
    """Stop RUN: record the request, then stop its jobs. Of a sweep: stop all its cells."""
    import getpass

    from tasks.origin import refuse_copy
    from tasks.stop import stop as stop_run

    if (sweep_folder := find_sweep(run, root)) is not None:
        from tasks.sweep_stop import stop_sweep

        refuse_copy(sweep_folder.as_run)
        click.echo(stop_sweep(sweep_folder, getpass.getuser(), why))
        return 0
    folder = find_run(run, root)
    refuse_copy(folder)
    stopped = stop_run(folder, getpass.getuser(), why)
    names = ", ".join(f"{job.role} (job {job.job_id})" for job in stopped)
    click.echo(f"stopped {names}" if stopped else f"{folder.run_id}: no job was running here")
    if not folder.cancel_file.exists() and not (folder.path / "outcome.json").exists():
        way_out = (
            "whoever leads the run goes on and may start jobs again: make room, or stop it as the user that owns it"
        )
        click.echo(f"error: {folder.cancel_file} could not be written: {way_out}", err=True)
        return 1
    return 0


@main.command()
@click.argument("run")
@ROOT
@fail_plainly
def supervise(run: str, root: str | None) -> int:
    """Lead RUN without a flow: restart what dies; or look on until its leader falls silent, and take over."""
    from flows.cli.watch import supervise as supervise_run
    from tasks.origin import refuse_copy

    folder = find_run(run, root)
    refuse_copy(folder)
    return supervise_run(folder)


@main.command()
@click.argument("run")
@ROOT
@fail_plainly
def watch(run: str, root: str | None) -> int:
    """Show RUN live, with all its parts; Ctrl-C ends the display, not the run."""
    from flows.cli.watch import watch as watch_run

    return watch_run(find_run(run, root))


@main.command()
@click.argument("run")
@ROOT
@fail_plainly
def status(run: str, root: str | None) -> int:
    """Show how RUN stands."""
    from flows.cli.summary import status as status_text

    click.echo(status_text(find_run(run, root)))
    return 0


@main.command()
@click.argument("run")
@ROOT
@fail_plainly
def report(run: str, root: str | None) -> int:
    """Write the report of RUN, which may be a sweep, and print its path."""
    if (sweep_folder := find_sweep(run, root)) is not None:
        from tasks.sweep_report import write_report as write_sweep_report

        click.echo(str(write_sweep_report(sweep_folder)))
        return 0
    from slipstream.metrics.report import write_report

    click.echo(str(write_report(find_run(run, root))))
    return 0


@main.command()
@click.argument("run")
@ROOT
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@fail_plainly
def audit(run: str, root: str | None, as_json: bool) -> int:
    """Prove from RUN's records that every prompt was settled exactly once; the exit code is 1 where it was not."""
    from flows.cli.audit import audit_json, audit_text
    from slipstream.metrics.audit_records import audit_run

    found = audit_run(find_run(run, root))
    click.echo(audit_json(found) if as_json else audit_text(found))
    return 0 if found.clean else 1


@main.command()
@click.argument("profile")
@click.option("--config", type=click.Path(path_type=Path), help="The run that is meant: its nodes, GPUs and storage.")
@SET
@click.option("--no-job", is_flag=True, help="Leave out the short test job.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0, 86400),
    default=300.0,
    metavar="SECONDS",
    help="Most that the test job may wait in the queue.",
)
@fail_plainly
def doctor(profile: str, config: Path | None, overrides: tuple[str, ...], no_job: bool, wait_s: float) -> int:
    """Check what the cluster profile PROFILE (a name or a path) is good for; the exit code is 1 on a problem."""
    from flows.cli.doctor import doctor as examine

    return examine(profile, config, overrides, not no_job, wait_s)


for command in (
    front.up,
    front.down,
    front.deploy,
    reconcile.reconcile,
    sweep.sweep,
    schedule.schedule,
    clean.clean,
):
    main.add_command(command)


if __name__ == "__main__":
    main()
