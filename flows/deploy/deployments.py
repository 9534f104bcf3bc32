"""What an instance has on a Prefect server: work pools, deployments, blocks. Values only; `flows.deploy.apply` makes it so."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flows.deploy.presets import CUSTOM
from flows.names import TAG, care_pool, deployment_name, instance_tag, runs_pool
from flows.sweep_form import SweepForm
from slipstream.run_config import RunConfig

SCHEDULED = "@"  # in a deployment's name: it belongs to `slipstream schedule`
EVERY_MINUTE = "* * * * *"
PULL_STEP = "prefect.deployments.steps.set_working_directory"


@dataclass(frozen=True)
class FlowFacts:
    """What is known of a flow: where its code is, what it takes.

    Attributes:
        entrypoint: file and function, relative to the working directory.
        schema: JSON schema of its parameters. description: of the flow.
    """

    entrypoint: str
    schema: Mapping[str, Any]
    description: str = ""


@dataclass(frozen=True)
class Pool:
    """A work pool; `command` is what its worker starts for a flow run, `environment` what it adds there."""

    name: str
    description: str
    command: str
    directory: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Deployment:
    """A deployment, and the schedule that it is made with (later ones are people's).

    Attributes:
        flow, name: together its full name.
        limit: flow runs at once (a further one is cancelled); None: as many as the pool takes.
        cron: schedule at its making, in UTC; None: none.
    """

    flow: str
    name: str
    pool: str
    entrypoint: str
    description: str
    directory: str
    parameters: Mapping[str, Any]
    schema: Mapping[str, Any]
    tags: Sequence[str]
    limit: int | None = None
    cron: str | None = None

    @property
    def full_name(self) -> str:
        return f"{self.flow}/{self.name}"

    @property
    def pull_steps(self) -> list[dict[str, Any]]:
        return [{PULL_STEP: {"directory": self.directory}}]


@dataclass(frozen=True)
class ProfileBlock:
    """A cluster profile as a block: `name` on the server, the values of the file that it is made from."""

    name: str
    file: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Wanted:
    """All that an instance shall have."""

    instance: str
    pools: Sequence[Pool]
    deployments: Sequence[Deployment]
    blocks: Sequence[ProfileBlock] = field(default=())


def wanted(
    instance: str,
    flows: Mapping[str, FlowFacts],
    presets: Mapping[str, RunConfig],
    profiles: Mapping[str, Mapping[str, Any]],
    *,
    command: str,
    directory: str,
    elsewhere: Mapping[str, str] | None = None,
) -> Wanted:
    """What `instance` shall have, by what there is.

    Args:
        flows: by name; "train" must be among them, "sweep" and "reconcile" may be.
        profiles: values of each cluster profile, by name.
        command: what a worker starts for a flow run.
        directory: where flow runs work, and where the flows' code is.
        elsewhere: other folders that runs of presets work in, by the preset.
    """
    environment = {"SLIPSTREAM_INSTANCE": instance}
    pools = [
        Pool(runs_pool(instance), f"Trainings of {instance}.", command, directory, environment),
        Pool(
            care_pool(instance),
            f"What looks after the trainings of {instance}, and sweeps: nothing that takes long to begin.",
            command,
            directory,
            environment,
        ),
    ]
    tags = [TAG, instance_tag(instance)]

    def deployment(flow: str, name: str, pool: str, description: str, parameters: Any, **more: Any) -> Deployment:
        facts = flows[flow]
        full = deployment_name(instance, name)
        text = description or facts.description
        folder = (elsewhere or {}).get(name, directory) if flow == "train" else directory
        code = facts.entrypoint if folder == directory else f"{directory}/{facts.entrypoint}"
        return Deployment(flow, full, pool, code, text, folder, parameters, facts.schema, tags, **more)

    found = [
        deployment("train", name, runs_pool(instance), _about(name, config), {"config": config.to_plain()})
        for name, config in sorted(presets.items())
    ]
    text = "A training without a preset: choose at least the model, the training data and the reward."
    found.append(deployment("train", CUSTOM, runs_pool(instance), text, {"config": empty_form()}))
    if "sweep" in flows:
        settings = SweepForm().model_dump(mode="json")
        found.append(deployment("sweep", "sweep", care_pool(instance), "", {"settings": settings}))
    if "reconcile" in flows:
        found.append(deployment("reconcile", "reconcile", care_pool(instance), "", {}, limit=1, cron=EVERY_MINUTE))
    blocks = [
        ProfileBlock(block_name(instance, name), f"{name}.toml", dict(values))
        for name, values in sorted(profiles.items())
    ]
    return Wanted(instance, pools, found, blocks)


def _about(name: str, config: RunConfig) -> str:
    where = f"{config.learner.nodes} learner and {config.server.nodes} server nodes" if config.learner.nodes > 1 else ""
    lines = [
        f"Train a model; the form is filled with the preset `{name}`.",
        "",
        f"- model: `{config.model.name}`",
        f"- training data: `{config.data.source}`",
        f"- cluster profile: `{config.cluster.profile}`" + (f", {where}" if where else ""),
    ]
    return "\n".join(lines)


def empty_form() -> dict[str, Any]:
    """The defaults of everything that has one; what must be chosen is left out."""
    stand_in = RunConfig.model_validate({"model": {"name": "-"}, "data": {"source": "-"}}).to_plain()
    del stand_in["model"]["name"], stand_in["data"]["source"]
    return stand_in


def block_name(instance: str, profile: str) -> str:
    """Name of a profile's block document, which takes small letters, digits and "-" only.

    Where that makes one of two (of "jan_k" and "jan-k", "a" with "b-c" and "a-b" with "c"), a fingerprint tells them apart:
    nobody's block is another's.
    """
    text = f"{instance}-{profile}"
    plain = "".join(sign if sign.isalnum() and sign.isascii() else "-" for sign in text.lower()).strip("-")
    if instance.isalnum() and plain == text:
        return plain
    return f"{plain}-{hashlib.sha256(f'{instance}/{profile}'.encode()).hexdigest()[:6]}"


def digest(values: Mapping[str, Any]) -> str:
    """What tells whether somebody has changed a block since it was made."""
    given = {key: value for key, value in values.items() if value not in (None, [], ())}
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]


COMPARED = ("entrypoint", "description", "parameters", "schema", "tags", "pool", "pull_steps")


def differences(want: Deployment, found: Mapping[str, Any]) -> list[str]:
    """Which of what we set is not so on the server; `found` has the keys of `COMPARED`. Schedules, pauses and limits are
    people's once a deployment is there."""
    return [key for key in COMPARED if _plain(getattr(want, key)) != _plain(found.get(key))]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=list))


def superfluous(want: Wanted, found: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Full names of deployments that are this instance's and not wanted any more.

    Args:
        found: full name and tags of each deployment on the server.

    Those of other instances, without our tag or of `slipstream schedule` are none of our business.
    """
    names = {deployment.full_name for deployment in want.deployments}
    ours = f"{want.instance}."
    return sorted(
        name
        for name, tags in found
        if name not in names
        and instance_tag(want.instance) in tags
        and name.partition("/")[2].startswith(ours)
        and SCHEDULED not in name
    )
