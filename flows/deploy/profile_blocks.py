"""Cluster profiles as blocks on a Prefect server: a form instead of a file.

A run names one as `cluster.profile = "block:NAME"`. The flow writes it to `<home>/profiles/NAME.toml` before it prepares the
run, and the run names that file from then on: whoever looks after the run later needs no Prefect. As with a profile
file, an edit reaches a run when its next job is submitted, after another run with the block has begun.
"""

from pathlib import Path
from typing import Any

import tomlkit
from prefect.blocks.core import Block
from pydantic import Field, create_model

from cluster.profile import ClusterError, ClusterProfile, load_profile
from flows.deploy.deployments import digest
from slipstream.config_file import ConfigError, Problem
from slipstream.instance import home
from slipstream.run_config import RunConfig
from slipstream.run_folder import write_atomic

PREFIX = "block:"


class _ProfileBlock(Block):
    _block_type_name = "Slipstream cluster profile"
    _block_type_slug = "slipstream-cluster-profile"
    _description = "Where and how jobs are submitted. A run names it in cluster.profile, as block:NAME."


def _fields() -> dict[str, Any]:
    """Those of a profile file, then ours. A tuple would show as a list of fixed places, so it is a list here."""
    found: dict[str, Any] = {}
    for name, info in ClusterProfile.model_fields.items():
        if str(info.annotation).startswith("tuple"):
            found[name] = (list[str], Field(default_factory=list, title=info.title, description=info.description))
        else:
            found[name] = (info.annotation, info)
    made_from = "Profile file that `slipstream deploy` made this from; empty: none."
    made_as = "Fingerprint of the values then; once they differ, the block is yours alone."
    found["made_from"] = (str, Field("", title="Made from", description=made_from))
    found["made_as"] = (str, Field("", title="Made as", description=made_as))
    return found


ProfileBlock: Any = create_model(
    "ProfileBlock", __base__=_ProfileBlock, __doc__="Where and how jobs are submitted.", **_fields()
)


def values_of(block: Any) -> dict[str, Any]:
    """What a profile file of it would hold: the values that are set."""
    values = {name: getattr(block, name) for name in ClusterProfile.model_fields}
    return {name: value for name, value in values.items() if value not in (None, [], ())}


def untouched(block: Any) -> bool:
    """Whether `slipstream deploy` made it, and nobody has changed it since."""
    return bool(block.made_from) and block.made_as == digest(values_of(block))


def with_profile_file(config: RunConfig) -> RunConfig:
    """`config` itself, or where its profile is a block, a copy that names the file with the block's values.

    Raises ConfigError where there is no such block, or what it holds is no profile; OSError.
    """
    name = config.cluster.profile
    if not name.startswith(PREFIX):
        return config
    document = name.removeprefix(PREFIX)
    try:
        block = ProfileBlock.load(document, validate=False)
    except ValueError as error:
        message = (
            f"there is no such block of the type {_ProfileBlock._block_type_name!r} ({str(error).splitlines()[0]})"
        )
        raise ConfigError([Problem("cluster.profile", name, message)]) from None
    path = write_profile(document, values_of(block))
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"profile": str(path)})})


def write_profile(document: str, values: dict[str, Any]) -> Path:
    """The profile file of a block. Raises ConfigError, OSError."""
    path = home() / "profiles" / f"{document}.toml"
    write_atomic(path, tomlkit.dumps(values))
    try:
        load_profile(str(path))
    except ClusterError as error:
        raise ConfigError([Problem("cluster.profile", PREFIX + document, str(error))]) from None
    return path
