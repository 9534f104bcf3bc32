"""Schedules on a Prefect server: each is a deployment of its own.

Its parameters are the deployment's defaults and its cron is bare, because whoever pauses and resumes a schedule in
Prefect's UI, or by `prefect deployment schedule`, wipes what the schedule itself would override.

Call `flows.connection.connect` before this module is imported.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.server.schemas import schedules as server

from flows.deploy.cron import dates
from flows.deploy.deployments import PULL_STEP, SCHEDULED
from flows.deploy.scheduled import SOURCE, Work
from flows.names import TAG, deployment_name, instance_tag
from flows.prefect_api import PrefectUnavailable
from slipstream.config_file import ConfigError, Problem

VALID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")
PAGE = 200


@dataclass(frozen=True)
class Schedule:
    """A schedule as it stands on the server.

    Attributes:
        deployment: its whole name, flow/instance.preset@name.
        active: whether it starts anything now.
        whens: each of its times in words; more than one, or none, where somebody changed it in Prefect's UI.
        starts: the next ones, ascending, in the schedule's zone, also of a paused one.
    """

    name: str
    deployment: str
    active: bool
    whens: tuple[str, ...]
    starts: tuple[datetime, ...]


def scheduled_name(instance: str, preset: str, name: str) -> str:
    """Name of a schedule's deployment."""
    return f"{deployment_name(instance, preset)}{SCHEDULED}{name}"


@contextlib.contextmanager
def _client() -> Iterator[SyncPrefectClient]:
    """Raises PrefectUnavailable where the server refuses us or falls silent."""
    try:
        with get_client(sync_client=True) as client:
            yield client
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in (401, 403):
            raise
        message = "the Prefect server wants a password: set PREFECT_API_AUTH_STRING (or PREFECT_API_KEY)"
        raise PrefectUnavailable(message) from None
    except httpx.TransportError as error:
        raise PrefectUnavailable(f"the Prefect server does not answer: {error or type(error).__name__}") from None


def check_name(name: str) -> None:
    """Raises ConfigError."""
    if not VALID.match(name):
        message = "cannot name a schedule: letters, digits, '_' and '-', at most 63"
        raise ConfigError([Problem("--name", name, message)], SOURCE)


def add(instance: str, name: str, work: Work, cron: str, timezone: str, paused: bool) -> str:
    """Register the schedule; the name of its deployment.

    Raises ConfigError where the name is taken, PrefectUnavailable where the work pool is not there.
    """
    with _client() as client:
        if taken := _named(client, instance, name):
            message = f"is taken by {taken.deployment}: choose another, or `slipstream schedule remove {name}` first"
            raise ConfigError([Problem("--name", name, message)], SOURCE)
        try:
            client.read_work_pool(work.pool)
        except ObjectNotFound:
            raise PrefectUnavailable(
                f"the Prefect server has no work pool {work.pool!r}, so nothing would start the runs: "
                "`slipstream up`, or `slipstream deploy` for a server that runs already, makes it"
            ) from None
        deployment = scheduled_name(instance, work.preset, name)
        when = DeploymentScheduleCreate(
            schedule=CronSchedule(cron=cron, timezone=timezone), active=not paused, slug=name
        )
        client.create_deployment(
            flow_id=client.create_flow_from_name(work.flow),
            name=deployment,
            schedules=[when],
            parameters=work.parameters,
            description=f"Schedule `{name}` of `{work.preset}`, by `slipstream schedule`.\n\n{work.facts.description}",
            work_pool_name=work.pool,
            tags=[TAG, instance_tag(instance)],
            entrypoint=work.entrypoint,
            pull_steps=[{PULL_STEP: {"directory": str(work.cwd)}}],
            parameter_openapi_schema=dict(work.facts.schema),
            enforce_parameter_schema=True,
        )
    return f"{work.flow}/{deployment}"


def schedules(instance: str, now: datetime, count: int = 3) -> list[Schedule]:
    """All schedules of the instance, by name, each with its next `count` starts."""
    with _client() as client:
        return [_schedule(client, found, now, count) for found in _deployments(client, instance)]


def set_active(instance: str, name: str, active: bool, now: datetime) -> Schedule:
    """Pause or resume a schedule; what it is then. Raises ConfigError where there is none of that name."""
    with _client() as client:
        found = _deployment(client, instance, name)
        for schedule in found.schedules:
            client.update_deployment_schedule(found.id, schedule.id, active=active)
        if active and found.paused:
            client.resume_deployment(found.id)
        return _schedule(client, client.read_deployment(found.id), now, 3)


def remove(instance: str, name: str) -> str:
    """Remove a schedule and what it has not started yet; the deployment's name. Raises ConfigError."""
    with _client() as client:
        found = _deployment(client, instance, name)
        whole = _whole_name(client, found)
        client.delete_deployment(found.id)
        return whole


def _deployments(client: SyncPrefectClient, instance: str) -> list[DeploymentResponse]:
    ours = DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG, instance_tag(instance)]))
    found: list[DeploymentResponse] = []
    while True:
        page = client.read_deployments(deployment_filter=ours, limit=PAGE, offset=len(found))
        found += page
        if len(page) < PAGE:
            break
    return sorted((one for one in found if is_schedule(instance, one.name)), key=lambda one: _name(one.name))


def is_schedule(instance: str, deployment: str) -> bool:
    """Whether a deployment of that name (without the flow's) is a schedule of the instance."""
    return deployment.startswith(f"{instance}.") and SCHEDULED in deployment


def _name(deployment: str) -> str:
    return deployment.rpartition(SCHEDULED)[2]


def _named(client: SyncPrefectClient, instance: str, name: str) -> Schedule | None:
    for found in _deployments(client, instance):
        if _name(found.name) == name:
            return _schedule(client, found, datetime.now(ZoneInfo("UTC")), 0)
    return None


def _deployment(client: SyncPrefectClient, instance: str, name: str) -> DeploymentResponse:
    found = _deployments(client, instance)
    for one in found:
        if _name(one.name) == name:
            return one
    known = ", ".join(_name(one.name) for one in found)
    message = f"there is no such schedule of instance {instance!r}; " + (
        f"there are {known}" if known else "there is none"
    )
    raise ConfigError([Problem("NAME", name, message)], SOURCE)


def _whole_name(client: SyncPrefectClient, found: DeploymentResponse) -> str:
    return f"{client.read_flow(found.flow_id).name}/{found.name}"


def _schedule(client: SyncPrefectClient, found: DeploymentResponse, now: datetime, count: int) -> Schedule:
    live = [schedule for schedule in found.schedules if schedule.active] or found.schedules
    starts = sorted(start for schedule in live for start in _starts(schedule, now, count))[:count]
    active = not found.paused and any(schedule.active for schedule in found.schedules)
    whens = tuple(_when(schedule) for schedule in live)
    return Schedule(_name(found.name), _whole_name(client, found), active, whens, tuple(starts))


def _starts(schedule: DeploymentSchedule, now: datetime, count: int) -> list[datetime]:
    kind = getattr(server, type(schedule.schedule).__name__)
    return dates(kind.model_validate(schedule.schedule.model_dump()), now, count) if count else []


def _when(schedule: DeploymentSchedule) -> str:
    inner = schedule.schedule
    zone = getattr(inner, "timezone", None) or "UTC"
    text = getattr(inner, "cron", None) or getattr(inner, "rrule", None) or f"every {getattr(inner, 'interval', '?')}"
    return f"{text} ({zone})"
