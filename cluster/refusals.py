"""What SLURM would refuse of a run, asked before anything is allocated: no server holds nodes for a refused learner."""

import re
import tempfile
from dataclasses import replace
from pathlib import Path

from cluster.backend import roles_of
from cluster.clients import ClusterAway, call
from cluster.findings import Level, judge_partition, partition_of, size_of
from cluster.profile import ClusterError, ClusterProfile
from cluster.slurm import sbatch_text, shape_of
from cluster.slurm_states import all_usable
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder

# SLURM says this of what no node ever has, and of what no node has while some are down or drained
_NODES = re.compile(r"node configuration is not available", re.IGNORECASE)
# word of a refusal → key of the profile
_KEYS = (
    ("time limit", "time_limit"),
    ("account", "account"),
    ("qos", "qos"),
    ("reservation", "reservation"),
    ("feature", "constraint"),
    ("partition", "partition"),
    ("option", "sbatch"),
)


def refusals(profile: ClusterProfile, config: RunConfig) -> list[str]:
    """Why SLURM would refuse jobs of `config`, each with the way out; nothing where it does not answer."""
    try:
        found = _beyond_the_partition(profile, config)
        if found:
            return found
        for role in roles_of(config):
            try:
                try_request(profile, config, role)
            except ClusterAway:
                raise
            except ClusterError as error:
                words = str(error)
                if _NODES.search(words) and not _all_nodes_usable(profile):
                    continue  # it may be taken once they are back
                text = f"SLURM would refuse the {role}'s job ({size_of(shape_of(config, role))}): {words}"
                found.append(f"{text}; {way_out(profile, config, role, words)}")
        return found
    except ClusterAway:
        return []


def try_request(profile: ClusterProfile, config: RunConfig, role: str) -> None:
    """Hand the batch file of `role` to `sbatch --test-only`. Raises ClusterError with SLURM's words, ClusterAway."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        file = Path(folder) / f"{role}.sh"
        file.write_text(sbatch_text(profile, run, role, 1, "incarnation", config, Path.cwd(), Path(folder)))
        call(["sbatch", "--test-only", str(file)], profile.client_timeout)


def way_out(profile: ClusterProfile, config: RunConfig, role: str, words: str) -> str:
    """Which key to change after a refusal."""
    for word, key in _KEYS:
        if word in words.lower():
            return f"change `{key}` ({_shown(getattr(profile, key))}) of the profile"
    sections = ("learner", "server") if role == "allocation" else (role,)
    sizes = ", ".join(f"{name}.{key}" for name in sections for key in ("nodes", "gpus"))
    return f"lower {sizes}, or `cpus_per_task` and `memory_gb` of the profile, or choose another `partition`"


def _shown(value: object) -> str:
    return "not set" if value in (None, ()) else repr(value)


def _beyond_the_partition(profile: ClusterProfile, config: RunConfig) -> list[str]:
    """What the partition's own limits forbid: sbatch takes such a job, and it waits for ever. A QoS may lift them."""
    if profile.qos:
        return []
    try:
        partitions = call(["scontrol", "show", "partition", "-o"], profile.client_timeout)
        found = partition_of(partitions, profile.partition)
        if found is None:  # sbatch has the words
            return []
        nodes = call(["sinfo", "-h", "-N", "-p", found.name, "-o", "%N %G"], profile.client_timeout)
    except ClusterAway:
        raise
    except ClusterError:
        return []
    found = partition_of(partitions, found.name, nodes)
    if found is None or not found.gpus:  # its nodes are hidden
        return []
    shapes = {role: shape_of(config, role) for role in roles_of(config)}
    findings = judge_partition(profile, replace(found, state="UP"), shapes)
    return [f"{one.text}: {one.way_out}" for one in findings if one.level is Level.PROBLEM]


def _all_nodes_usable(profile: ClusterProfile) -> bool:
    partition = ["-p", profile.partition] if profile.partition else []
    try:
        return all_usable(call(["sinfo", "-h", "-N", *partition, "-o", "%N|%T"], profile.client_timeout))
    except ClusterAway:
        raise
    except ClusterError:
        return False
