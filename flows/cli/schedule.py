"""`slipstream schedule`."""

from typing import TYPE_CHECKING

import click

from flows.cli.plain import SET, fail_plainly

if TYPE_CHECKING:
    from datetime import datetime

    from flows.deploy.schedules import Schedule

INSTANCE = click.option(
    "--instance", metavar="ID", help="Whose schedules; by default SLIPSTREAM_INSTANCE, or your name."
)


@click.group()
def schedule() -> None:
    """Start runs and sweeps by the clock, on the Prefect server of `slipstream up` or PREFECT_API_URL."""


@schedule.command()
@click.argument("what", metavar="PRESET|FILE.toml")
@click.option("--cron", required=True, help='Five fields: minute, hour, day, month, weekday; "0 20 * * FRI".')
@click.option("--timezone", help="As in Europe/Berlin; by default this machine's.")
@click.option("--name", help="Name of the schedule; by default the preset's or the file's.")
@SET
@click.option("--paused", is_flag=True, help="Register it, but start nothing until `slipstream schedule resume`.")
@INSTANCE
@fail_plainly
def add(
    what: str,
    cron: str,
    timezone: str | None,
    name: str | None,
    overrides: tuple[str, ...],
    paused: bool,
    instance: str | None,
) -> int:
    """Start PRESET (a file of examples/, without its ending) or FILE.toml by a cron expression."""
    from datetime import UTC, datetime

    from flows.connection import connect
    from flows.deploy.zones import machine_zone, zone
    from slipstream.instance import instance_id

    whose, now = instance_id(instance), datetime.now(UTC)
    where = zone(timezone if timezone is not None else machine_zone())
    connection = connect()
    from flows.deploy.cron import change_text, check_cron, touched
    from flows.deploy.scheduled import work_of
    from flows.deploy.schedules import add as register
    from flows.deploy.schedules import check_name, schedules

    check_cron(cron, now)
    work = work_of(what, overrides, whose)
    name = name if name is not None else work.preset
    check_name(name)
    deployment = register(whose, name, work, cron, where.key, paused)
    for note in work.notes:
        click.echo(f"warning: {note}", err=True)
    for change, times in touched(cron, where, now):
        click.echo(f"warning: {change_text(change, times, where)}", err=True)
    (added,) = [one for one in schedules(whose, now) if one.name == name]
    click.echo(f"{deployment} on {connection.url}")
    click.echo(
        f"  time zone {where.key}" + ("" if timezone is not None else ", this machine's (--timezone names another)")
    )
    click.echo(f"  runs start in {work.cwd}")
    click.echo("\n".join(_lines(added)))
    return 0


@schedule.command("list")
@INSTANCE
@fail_plainly
def list_schedules(instance: str | None) -> int:
    """List the schedules, each with its next three starts."""
    from datetime import UTC, datetime

    from flows.connection import connect
    from slipstream.instance import instance_id

    whose = instance_id(instance)
    connect()
    from flows.deploy.schedules import schedules

    found = schedules(whose, datetime.now(UTC))
    if not found:
        click.echo(f"instance {whose!r} has no schedule: `slipstream schedule add` makes one")
    for one in found:
        click.echo("\n".join(_lines(one)))
    return 0


@schedule.command()
@click.argument("name")
@INSTANCE
@fail_plainly
def pause(name: str, instance: str | None) -> int:
    """Start nothing by the schedule NAME until it is resumed; what runs goes on."""
    return _set_active(name, instance, False)


@schedule.command()
@click.argument("name")
@INSTANCE
@fail_plainly
def resume(name: str, instance: str | None) -> int:
    """Let the schedule NAME start runs again; missed ones are not made up for."""
    return _set_active(name, instance, True)


def _set_active(name: str, instance: str | None, active: bool) -> int:
    from datetime import UTC, datetime

    from flows.connection import connect
    from slipstream.instance import instance_id

    whose = instance_id(instance)
    connect()
    from flows.deploy.schedules import set_active

    click.echo("\n".join(_lines(set_active(whose, name, active, datetime.now(UTC)))))
    return 0


@schedule.command()
@click.argument("name")
@INSTANCE
@fail_plainly
def remove(name: str, instance: str | None) -> int:
    """Remove the schedule NAME; what runs goes on."""
    from flows.connection import connect
    from slipstream.instance import instance_id

    whose = instance_id(instance)
    connect()
    from flows.deploy.schedules import remove as delete

    click.echo(f"removed {delete(whose, name)}; runs that it has started go on")
    return 0


def _lines(one: "Schedule") -> list[str]:
    state = "active" if one.active else "paused"
    when = " and ".join(one.whens) or "no time any more: remove it, and add it again"
    would = "next" if one.active else "next, once it is resumed"
    return [f"{one.name}  {state}  {when}", f"  {one.deployment}", *(f"  {would}  {_start(s)}" for s in one.starts)]


def _start(start: "datetime") -> str:
    from datetime import UTC

    return f"{start:%a %Y-%m-%d %H:%M} ({start:%z})  =  {start.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
