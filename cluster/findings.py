"""What `slipstream doctor` makes of a cluster's facts. Pure: facts in, findings out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cluster.profile import ClusterProfile
from cluster.slurm import Shape
from cluster.slurm_states import expand_hosts

CLIENTS = ("sinfo", "squeue", "sbatch", "scancel", "scontrol")
LITTLE_SPACE_GB = 5.0
LATE_S = 5.0  # storage on which another's file is seen later than this
LEAVES_S = 5.0  # a job's processes have gone within this after TERM
LEAST_LEAD_S = 120.0


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """`way_out`: what to do about it; empty where nothing is to be done."""

    check: str
    level: Level
    text: str
    way_out: str = ""


@dataclass(frozen=True)
class Partition:
    """What `scontrol show partition` says of one.

    Attributes:
        max_minutes, max_nodes: of a job; None: unlimited.
        outranked: another partition has a higher PriorityTier.
        gpus: of each of its nodes, by name.
    """

    name: str
    state: str = "UP"
    max_minutes: float | None = None
    max_nodes: int | None = None
    preempt_mode: str = ""
    grace_s: float = 0.0
    outranked: bool = False
    gpus: Mapping[str, int] = field(default_factory=dict)


def ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def warning(check: str, text: str, way_out: str = "") -> Finding:
    return Finding(check, Level.WARNING, text, way_out)


def problem(check: str, text: str, way_out: str = "") -> Finding:
    return Finding(check, Level.PROBLEM, text, way_out)


def minutes_of(text: str) -> float | None:
    """SLURM's time ("1-00:00:00", "30:00", "UNLIMITED") in minutes; None: unlimited."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return float(text) if text.strip().isdigit() else None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 1440.0 * days + 60 * hours + minutes + seconds / 60


def gpus_of(gres: str) -> int:
    """GPUs in a node's GRES, like `gpu:h100:8(S:0-1),shard:16`."""
    found = re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", re.sub(r"\([^)]*\)", "", gres))
    return sum(int(number) for number in found)


def partition_of(text: str, name: str | None, nodes: str = "") -> Partition | None:
    """The partition `name` (None: the default) out of `scontrol show partition -o`, and `sinfo -N -o "%N %G"` of it."""
    partitions = [dict(word.partition("=")[::2] for word in line.split() if "=" in word) for line in text.splitlines()]
    partitions = [fields for fields in partitions if "PartitionName" in fields]
    words = [fields.get("PriorityTier", "1") for fields in partitions]
    tiers = [int(word) if word.isdigit() else 1 for word in words]
    for fields, tier in zip(partitions, tiers, strict=True):
        if fields["PartitionName"] == name or (name is None and fields.get("Default") == "YES"):
            most = fields.get("MaxNodes", "")
            rows = [row.split(None, 1) for row in nodes.splitlines() if row.strip()]
            return Partition(
                name=fields["PartitionName"],
                state=fields.get("State", ""),
                max_minutes=minutes_of(fields.get("MaxTime", "")),
                max_nodes=int(most) if most.isdigit() else None,
                preempt_mode=fields.get("PreemptMode", ""),
                grace_s=float(fields["GraceTime"]) if fields.get("GraceTime", "").isdigit() else 0.0,
                outranked=tier < max(tiers),
                gpus={host: gpus_of(row[-1]) for row in rows for host in expand_hosts(row[0])},
            )
    return None


def settings_of(text: str) -> dict[str, str]:
    """`scontrol show config` as values by name."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def size_of(shape: Shape) -> str:
    return f"{counted(shape.nodes, 'node')} with {counted(shape.gpus, 'GPU')}"


def judge_clients(said: Mapping[str, str]) -> list[Finding]:
    """`said`: by client its version, or `error: …`."""
    found = [
        problem("clients", f"{name}: {text.removeprefix('error: ')}", "load SLURM's module here, or ask where it is")
        for name, text in said.items()
        if text.startswith("error: ")
    ]
    return found or [ok("clients", f"{', '.join(said)} answer: {next(iter(said.values()), '')}")]


def judge_accounting(storage_type: str, sacct: str) -> Finding:
    """`sacct`: why it does not answer; ''."""
    means = "how a job ended that SLURM has forgotten is then known from its exit record alone"
    if "none" in storage_type.lower() or sacct:
        return warning("accounting", f"there is none ({sacct or storage_type}): {means}")
    return ok("accounting", "sacct answers")


def judge_partition(profile: ClusterProfile, found: Partition | None, shapes: Mapping[str, Shape]) -> list[Finding]:
    """The profile and what a run needs against a partition's limits."""
    if found is None:
        name = (
            f"partition = {profile.partition!r} does not exist"
            if profile.partition
            else "there is no default partition"
        )
        return [problem("partition", name, "set `partition` of the profile to one that sinfo shows")]
    bad = []
    if found.state != "UP":
        bad.append(problem("partition", f"{found.name} is {found.state}", "wait for it, or choose another `partition`"))
    if found.max_minutes is not None and profile.time_limit > found.max_minutes:
        text = f"time_limit = {profile.time_limit} min, but {found.name} allows {found.max_minutes:g}"
        bad.append(problem("partition", text, "lower `time_limit` of the profile, or choose another `partition`"))
    for role, shape in shapes.items():
        fit = [name for name, gpus in found.gpus.items() if gpus >= shape.gpus]
        way_out = f"lower the {role}'s nodes or gpus, or choose another `partition`"
        if found.max_nodes is not None and shape.nodes > found.max_nodes:
            text = f"the {role} needs {counted(shape.nodes, 'node')}, {found.name} gives a job {found.max_nodes}"
            bad.append(problem("partition", text, way_out))
        elif len(fit) < shape.nodes:
            text = f"the {role} needs {size_of(shape)}, {found.name} has {len(fit)}"
            bad.append(problem("partition", text, way_out))
    most = "unlimited" if found.max_minutes is None else f"{found.max_minutes:g} min"
    text = f"{found.name}: {len(found.gpus)} nodes, time limit {most}, the profile's {profile.time_limit} min"
    return bad or [ok("partition", text)]


def judge_times(profile: ClusterProfile, settings: Mapping[str, str]) -> list[Finding]:
    """Signals before the end of a job, and the time that a job has after TERM."""
    found = []
    wait = re.match(r"\d+", settings.get("KillWait", ""))
    if wait and int(wait[0]) < LEAVES_S:
        text = f"KillWait = {wait[0]} s: a job that is ended from outside may be killed before its leaders have recorded why"
        found.append(warning("times", text, "nothing is lost beyond the last checkpoint; or ask for KillWait = 30"))
    if profile.signal_lead < LEAST_LEAD_S:
        text = f"signal_lead = {profile.signal_lead} s: SLURM may be a minute late, so little may be left to save"
        found.append(warning("times", text, "at least two of the longest steps, a checkpoint and 60 s"))
    text = f"jobs save and leave {profile.signal_lead} s before {profile.time_limit} min; KillWait {wait[0] if wait else '?'} s"
    return found or [ok("times", text)]


def judge_preemption(found: Partition | None, settings: Mapping[str, str]) -> Finding:
    mode = (found.preempt_mode if found else "") or settings.get("PreemptMode", "OFF")
    if settings.get("PreemptType", "").endswith("none") or mode.upper() in ("", "OFF"):
        return ok("preemption", "off")
    if found is not None and settings.get("PreemptType", "").endswith("partition_prio") and not found.outranked:
        return ok("preemption", f"no partition has a higher PriorityTier than {found.name}")
    if "SUSPEND" in mode.upper() or "GANG" in mode.upper():
        text = f"{mode}: a suspended job keeps its memory, the run waits until it goes on"
        return warning("preemption", text, "choose a partition or QoS whose jobs are not suspended")
    text = f"{mode}: a preempted job of ours ends (they are --no-requeue), and the supervisor submits it again"
    if found is not None and found.grace_s < 30:
        text += f"; GraceTime = {found.grace_s:g} s may be too short to save"
        return warning("preemption", text, "a low trainer.save_steps, where jobs of this partition are preempted")
    return ok("preemption", text)


def judge_nodes(
    profile: ClusterProfile, nodes: Sequence[Mapping[str, Any]], gpus: int, secrets: Mapping[str, str], need_vllm: bool
) -> list[Finding]:
    """What the nodes of the test job saw.

    Args:
        nodes: facts of `cluster.doctor_node`.
        gpus: asked for on each.
        secrets: of the submitter's environment: name → fingerprint, without those that the profile keeps.
        need_vllm: the run starts servers of its own.
    """
    hosts = ", ".join(str(node["host"]) for node in nodes)
    found = [_programs(nodes, need_vllm), *_network(profile, nodes), _space(nodes), _gpus(nodes, gpus)]
    if wrong := [node for node in nodes if node["umask"] != 0o077]:
        found.append(problem("privacy", f"umask {wrong[0]['umask']:03o} on {wrong[0]['host']}", "look at `setup`"))
    arrived = {name for node in nodes for name, mark in node["secrets"].items() if secrets.get(name) == mark}
    if arrived:
        way_out = "take it out of what `setup` reads, or name it in `keep_environment` if jobs need it"
        found.append(problem("privacy", f"jobs see {', '.join(sorted(arrived))} of your environment", way_out))
    elif not wrong:
        found.append(ok("privacy", f"umask 077, no secret of your environment on {hosts}"))
    return found


def _programs(nodes: Sequence[Mapping[str, Any]], need_vllm: bool) -> Finding:
    for node in nodes:
        if error := node["learner"].get("error"):
            text = f"on {node['host']}, {node['python']} cannot import slipstream and torch: {error}"
            return problem("interpreters", text, "set `python` (or `container`, `setup`) of the profile")
        if need_vllm and (error := node["vllm"].get("error")):
            text = f"on {node['host']}, no Python with vLLM: {error}"
            return problem("interpreters", text, "set `vllm_python` (or `container`, `setup`) of the profile")
    first = nodes[0]
    vllm = f", vLLM {first['vllm'].get('version')}" if need_vllm else ""
    return ok("interpreters", f"Python {first['version']}, torch {first['learner'].get('version')}{vllm}")


def _network(profile: ClusterProfile, nodes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    found = []
    for node in nodes:
        if error := node["address"].get("error"):
            found.append(problem("interface", error, "set `host_interface` of the profile to one that the nodes have"))
    if not found:
        own = ", ".join(f"{node['host']} {node['address']['address']}" for node in nodes)
        loop = any(str(node["address"]["address"]).startswith("127.") for node in nodes)
        if loop and len(nodes) > 1:
            found.append(problem("interface", f"a node's address is loopback ({own})", "set `host_interface`"))
        else:
            found.append(ok("interface", own))
    least = min(nodes, key=lambda node: node["ports"]["free"])
    count = least["ports"]["free"]
    if profile.port_range and count < 10:
        text = f"{count} ports of {profile.port_range} are free on {least['host']}"
        found.append(problem("ports", text, "choose another `port_range`, or leave it out for any free port"))
    else:
        text = f"{count} of {profile.port_range} free on {least['host']}" if profile.port_range else "any free port"
        found.append(ok("ports", text))
    return found


def _space(nodes: Sequence[Mapping[str, Any]]) -> Finding:
    for node in nodes:
        if error := node["scratch"].get("error"):
            text = f"{node['scratch']['path']} is not writable on {node['host']}: {error}"
            return problem("scratch", text, "set `scratch` of the profile to a folder of the node's own")
    least = min(nodes, key=lambda node: node["scratch"]["free_gb"])
    text = f"{least['scratch']['path']}: {least['scratch']['free_gb']:.1f} GB free on {least['host']}"
    if least["scratch"]["free_gb"] < LITTLE_SPACE_GB:
        return warning("scratch", text, "a larger folder in `scratch` of the profile, for vLLM's and torch's caches")
    return ok("scratch", text)


def _gpus(nodes: Sequence[Mapping[str, Any]], asked: int) -> Finding:
    if asked == 0:
        return ok("GPUs", "none asked for")
    for node in nodes:
        if node["bound"] < asked:
            text = f"{node['bound']} of {asked} GPUs were bound on {node['host']}"
            return problem(
                "GPUs", text, "ask your cluster how GPUs are asked for; `sbatch` of the profile adds options"
            )
    for node in nodes:
        seen = node["learner"].get("gpus")
        if seen is not None and seen < asked:
            text = f"SLURM gave {asked} GPUs on {node['host']}, torch sees {seen}"
            return warning("GPUs", text, "a torch without CUDA, a missing driver, or a container without --nv")
    return ok("GPUs", f"{asked} on each node, as asked")


def judge_visibility(nodes: Sequence[Mapping[str, Any]]) -> Finding:
    """Whether each node and this machine saw each other's files, and how long that took."""
    lost = [
        f"{node['host']} was not seen by {name}" for node in nodes for name, s in node["seen_s"].items() if s is None
    ]
    where = f"from here to {', '.join(str(node['host']) for node in nodes)}" + (
        " and between them" if nodes[1:] else ""
    )
    if lost:
        return problem("visible", "; ".join(lost), "put `storage.root` (`shared`) on storage that all nodes mount")
    slowest = max((s for node in nodes for s in node["seen_s"].values()), default=0.0)
    text = f"{where}: there and back within {slowest:.1f} s"
    if slowest > LATE_S:
        return warning("visible", text, "storage this slow delays every handover; actimeo of the mount may be lowered")
    return ok("visible", text)
