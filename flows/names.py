"""Names of what an instance has on a Prefect server. One place, so that whoever looks for them finds them."""

from slipstream.instance import RESERVED

TAG = "slipstream"


def instance_tag(instance: str) -> str:
    """Tag of every deployment and flow run of an instance."""
    return f"{TAG}:{instance}"


def runs_pool(instance: str) -> str:
    """Work pool of the trainings."""
    return f"{TAG}-{instance}"


def care_pool(instance: str) -> str:
    """Work pool of what must never wait for a training: reconciliation, and sweeps, which only start their cells."""
    return f"{TAG}-{instance}{RESERVED}"


def deployment_name(instance: str, preset: str) -> str:
    """Name of the deployment of a preset; with its flow's name in front, "train/alice.demo", it is unique."""
    return f"{instance}.{preset}"
