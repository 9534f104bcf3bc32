"""Makes a Prefect server have what an instance shall have. Idempotent: what is so already is left alone.

People's decisions stay: a paused pool, deployment or schedule, schedules that were added, limits, edited blocks.
"""

import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from cluster.profile import load_profile, profile_names
from flows.deploy.deployments import COMPARED, Deployment, FlowFacts, Pool, Wanted, differences, digest, superfluous
from flows.deploy.forms import parameter_fields, readable
from flows.deploy.profile_blocks import ProfileBlock, untouched, values_of
from flows.names import instance_tag
from flows.up.state import UpError

FLOWS = ("train", "sweep", "reconcile")
PAGE = 200


@dataclass(frozen=True)
class Done:
    """What became of one thing: `what` is "made", "updated (…)", "unchanged", "kept (…)" or "removed"."""

    kind: str
    name: str
    what: str


def engine_command() -> str:
    """What a worker starts for a flow run, quoted for a shell."""
    import shlex

    return shlex.join([sys.executable, "-m", "flows.up.engine"])


def known_flows() -> dict[str, FlowFacts]:
    """The flows that are there, by name."""
    found = {}
    for name in FLOWS:
        if find_spec(f"flows.{name}") is not None:
            function = getattr(import_module(f"flows.{name}"), name, None)
            if not isinstance(function, Flow):
                continue
            drawn = parameter_schema(function).model_dump_for_openapi()
            schema = readable(drawn, parameter_fields(function.fn))
            about = inspect.cleandoc(function.fn.__doc__ or "").partition("\n\n")[0]
            found[name] = FlowFacts(f"flows/{name}.py:{name}", schema, about)
    return found


def known_profiles() -> dict[str, dict[str, Any]]:
    """The values that each profile of slurm/profiles sets. Raises ClusterError."""
    return {
        name: load_profile(name).model_dump(mode="json", exclude_none=True, exclude_unset=True)
        for name in profile_names()
    }


async def apply(want: Wanted, at_once: int | None = None) -> list[Done]:
    """Make it so; what was done, in order.

    Args:
        at_once: most trainings at once; None: as it is.
    """
    done: list[Done] = []
    async with get_client() as client:
        for number, pool in enumerate(want.pools):
            limit = at_once if number == 0 else None
            done.append(await _look_again(partial(_apply_pool, client, pool, limit)))
        for deployment in want.deployments:
            done.append(await _apply_deployment(client, deployment))
        await ProfileBlock.register_type_and_schema(client=client)
        for block in want.blocks:
            done.append(await _look_again(partial(_apply_block, client, block.name, block.file, block.values)))
    return done


async def _look_again(step: Callable[[], Awaitable[Done]]) -> Done:
    """The step; once more where another `slipstream deploy` has made the same thing since it looked."""
    try:
        return await step()
    except (ObjectAlreadyExists, ValueError):
        return await step()


def template(pool: Pool) -> dict[str, Any]:
    """Prefect's job template of a process worker, with our values as the defaults."""
    found = ProcessWorker.get_default_base_job_template()
    values = {
        "command": pool.command,
        "working_dir": pool.directory,
        "env": dict(pool.environment),
        "stream_output": False,
    }
    for name, value in values.items():
        found["variables"]["properties"][name]["default"] = value
    return found


async def _apply_pool(client: PrefectClient, pool: Pool, at_once: int | None) -> Done:
    want = template(pool)
    try:
        found = await client.read_work_pool(pool.name)
    except ObjectNotFound:
        create = WorkPoolCreate(
            name=pool.name,
            type="process",
            description=pool.description,
            base_job_template=want,
            concurrency_limit=at_once,
        )
        await client.create_work_pool(create)
        return Done("pool", pool.name, "made")
    if found.type != "process":
        raise UpError(
            f"the work pool {pool.name!r} is there, of the type {found.type!r}: it is somebody else's; choose another "
            "instance id (--instance)"
        )
    changed: dict[str, Any] = {}
    if found.base_job_template != want:
        changed["base_job_template"] = want
    if found.description != pool.description:
        changed["description"] = pool.description
    if at_once is not None and found.concurrency_limit != at_once:
        changed["concurrency_limit"] = at_once
    if changed:
        await client.update_work_pool(pool.name, WorkPoolUpdate(**changed))
    return Done("pool", pool.name, f"updated ({', '.join(changed)})" if changed else "unchanged")


async def _apply_deployment(client: PrefectClient, want: Deployment) -> Done:
    try:
        found = await client.read_deployment_by_name(want.full_name)
    except ObjectNotFound:
        await client.create_deployment(
            flow_id=await client.create_flow_from_name(want.flow),
            name=want.name,
            entrypoint=want.entrypoint,
            description=want.description,
            parameters=dict(want.parameters),
            parameter_openapi_schema=dict(want.schema),
            enforce_parameter_schema=True,
            tags=list(want.tags),
            work_pool_name=want.pool,
            pull_steps=want.pull_steps,
            **_limited(want),
            schedules=_schedules(want),
        )
        return Done("deployment", want.full_name, "made")
    now = {
        "entrypoint": found.entrypoint,
        "description": found.description,
        "parameters": found.parameters,
        "schema": found.parameter_openapi_schema,
        "tags": found.tags,
        "pool": found.work_pool_name,
        "pull_steps": found.pull_steps,
    }
    changed = differences(want, now)
    if changed:
        names = {"schema": "parameter_openapi_schema", "pool": "work_pool_name"}
        values = {names.get(key, key): getattr(want, key) for key in COMPARED if key in changed}
        await client.update_deployment(found.id, DeploymentUpdate(**values, enforce_parameter_schema=True))
    if want.cron and not found.schedules:
        await client.create_deployment_schedules(found.id, _schedules(want))
        changed.append("schedule")
    return Done("deployment", want.full_name, f"updated ({', '.join(changed)})" if changed else "unchanged")


def _limited(want: Deployment) -> dict[str, Any]:
    if want.limit is None:
        return {}
    options = ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    return {"concurrency_limit": want.limit, "concurrency_options": options}


def _schedules(want: Deployment) -> list[DeploymentScheduleCreate]:
    if want.cron is None:
        return []
    return [DeploymentScheduleCreate(schedule=CronSchedule(cron=want.cron, timezone="UTC"), active=True)]


async def _apply_block(client: PrefectClient, name: str, file: str, values: Mapping[str, Any]) -> Done:
    block: Any = ProfileBlock(**values, made_from=file)
    block.made_as = digest(values_of(block))
    try:
        found = await ProfileBlock.aload(name, validate=False, client=client)
    except ValueError:
        await block.asave(name, client=client)
        return Done("block", name, "made")
    if not untouched(found):
        return Done("block", name, "kept (it was edited)")
    if values_of(found) == values_of(block):
        return Done("block", name, "unchanged")
    await block.asave(name, overwrite=True, client=client)
    return Done("block", name, "updated")


async def unwanted(want: Wanted) -> list[str]:
    """Full names of this instance's deployments that are not wanted any more."""
    async with get_client() as client:
        return [name for name, _ in await _unwanted(client, want)]


async def prune(want: Wanted) -> list[Done]:
    """Remove what `unwanted` names."""
    async with get_client() as client:
        done = []
        for name, identity in await _unwanted(client, want):
            await client.delete_deployment(identity)
            done.append(Done("deployment", name, "removed"))
        return done


async def _unwanted(client: PrefectClient, want: Wanted) -> list[tuple[str, Any]]:
    tags = DeploymentFilter(tags=DeploymentFilterTags(all_=[instance_tag(want.instance)]))
    names: dict[str, Any] = {}
    found: list[tuple[str, Sequence[str]]] = []
    while True:
        page = await client.read_deployments(deployment_filter=tags, limit=PAGE, offset=len(found))
        for deployment in page:
            flow = await client.read_flow(deployment.flow_id)
            full = f"{flow.name}/{deployment.name}"
            names[full] = deployment.id
            found.append((full, deployment.tags))
        if len(page) < PAGE:
            return [(name, names[name]) for name in superfluous(want, found)]
