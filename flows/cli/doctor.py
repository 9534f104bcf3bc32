"""`slipstream doctor`: what a cluster profile is good for, one line a check."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from cluster.doctor import Asked, examine
from cluster.findings import Finding, Level, counted
from cluster.profile import load_profile
from slipstream.config_file import load_config, parse_config
from tasks.interrupt import handling

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


def doctor(name: str, config: Path | None, overrides: Sequence[str], job: bool, wait_s: float) -> int:
    """Print the findings; the exit code: 1 where there is a problem. Raises ConfigError, ClusterError."""
    profile = load_profile(name)
    of_profile = [*overrides, f"cluster.profile={name!r}"]
    if config is not None:
        wanted = load_config(config, of_profile)
    else:
        none: dict[str, dict[str, object]] = {"model": {"name": "none"}, "data": {"source": "none"}}
        if profile.executor == "local":  # nobody asked for GPUs
            none |= {"server": {"gpus": 0}, "learner": {"gpus": 0}}
        wanted = parse_config(none, of_profile)
    console = Console(stderr=True)
    levels = []
    said = ""

    ending = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal ending
        if (
            not ending
        ):  # the job is cancelled and the folder removed on the way out, which a second signal must not break
            ending = True
            raise KeyboardInterrupt

    with handling(end), console.status("looking at the cluster") as status:

        def say(text: str) -> None:
            nonlocal said
            status.update(text)
            if not console.is_terminal and text.partition(" (")[0] != said:
                said = text.partition(" (")[0]
                console.print(f"… {said}", highlight=False, soft_wrap=True)

        with closing(examine(Asked(profile, wanted, config is not None, job, wait_s), say)) as findings:
            for finding in findings:
                levels.append(finding.level)
                click.echo(line(finding))
    problems, warnings = levels.count(Level.PROBLEM), levels.count(Level.WARNING)
    click.echo(f"{name}: {counted(problems, 'problem')}, {counted(warnings, 'warning')}")
    return 1 if problems else 0


def line(finding: Finding) -> str:
    """One finding, with its way out below it."""
    level = click.style(f"{finding.level:<8}", fg=STYLES[finding.level])
    way_out = f"\n{'':22} → {finding.way_out}" if finding.way_out else ""
    return f"{level} {finding.check:<13} {finding.text}{way_out}"
