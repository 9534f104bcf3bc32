"""Every fault that a chaos run can meet: where it strikes, who carries it out, what must come of it.

A fault is injected by the process that meets the event (`deeds`), or by the driver (`act`, a method of
`tests.chaos.acts.Acts`) while that process waits.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SEPARATE, ONE = "separate", "one_allocation"
BOTH = (SEPARATE, ONE)
RECORD = "supervisor.record"  # between a submission and its record

NOTHING: frozenset[str] = frozenset()
SERVER, LEARNER = frozenset({"server"}), frozenset({"learner"})


class End(StrEnum):
    """How a run may end."""

    FINISHED = "finish"
    FAILED = "fail"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Fault:
    """
    Attributes:
        event: of the doubles; `steps`: its `step` is drawn, else which of its occurrences is.
        where: facts that the event must have besides; "other rank" stands for one that is drawn.
        deeds: what the process that meets it does to itself.
        act: what the driver does then.
        end: what the run must come to where this fault was met.
        shapes: of allocations in which it is possible.
        during_save: the step is one at which a checkpoint is written.
        second: it may strike while the run recovers from another fault.
        always: it strikes at every such event.
        settings: of the cluster profile that it needs.
        storage: of the bed that the run lies on, where that is not the shared one.
        lasts_s: seconds for which the run must go on after it.
        again: the roles that must be started again because of it, each once, in separate jobs; in one allocation this is
            the allocation where there are any. Of a fault that comes for ever: as often as the run allows.
        redoes: whether steps since the newest checkpoint may have to be made again; None: a half that is cut off makes more
            of them, which do not count.
    """

    name: str
    event: str
    deeds: tuple[str, ...] = ()
    act: str = ""
    end: End = End.FINISHED
    where: dict[str, Any] = field(default_factory=dict)
    steps: bool = False
    during_save: bool = False
    always: bool = False
    shapes: tuple[str, ...] = BOTH
    second: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    storage: str = ""
    lasts_s: float = 0.0
    again: frozenset[str] = LEARNER
    redoes: bool | None = True


def _step(name: str, *deeds: str, **fields: Any) -> Fault:
    return Fault(name, "step", tuple(deeds), steps=True, **fields)


FAULTS: tuple[Fault, ...] = (
    # the server
    Fault("server process killed", "server.generate", ("kill",), again=SERVER),
    Fault("server killed during a delivery", "server.begin", ("kill",), again=SERVER),
    Fault("server process stopped", "server.generate", ("stop",), again=SERVER),
    Fault("server leader killed", "server.generate", ("kill parent",), again=SERVER),
    Fault("server node loses power", "server.generate", act="power_off", again=SERVER),
    # the rollout process
    Fault("rollout process killed", "rollout.group", ("kill",), again=NOTHING),
    Fault("rollout process stopped", "rollout.group", ("stop",), again=NOTHING),
    Fault("rollout process hangs", "rollout.group", ("hang",), again=NOTHING),
    # the learner
    _step("rank 0 killed", "kill"),
    Fault("rank killed", "rank.step", ("kill",), where={"rank": "other rank"}, steps=True),
    _step("learner leader killed", "kill parent"),
    _step("rank 0 stopped", "stop"),
    Fault("rank stopped", "rank.step", ("stop",), where={"rank": "other rank"}, steps=True),
    Fault("collective stuck", "rank.step", ("hang",), where={"rank": "other rank"}, steps=True),
    Fault("killed during a delivery", "sync.middle", ("kill",), steps=True),
    Fault("killed before a save", "save.begin", ("kill",), steps=True, during_save=True),
    Fault("killed during a save", "save.middle", ("kill",), steps=True, during_save=True),
    Fault("checkpoint truncated", "save.end", ("truncate", "kill"), steps=True, during_save=True),
    # nodes and network
    _step("learner node loses power", act="power_off"),
    _step("learner node drained, then a rank killed", "kill", act="drain"),
    _step("short partition of the learner", act="partition_short", lasts_s=15.0, again=NOTHING),
    _step("long partition of the learner", act="partition_long", lasts_s=25.0, redoes=None),
    Fault("short partition of the server", "server.generate", act="partition_short", lasts_s=15.0, again=NOTHING),
    Fault(
        "long partition of the server", "server.generate", act="partition_long", lasts_s=25.0, redoes=None, again=SERVER
    ),
    # time and others
    _step("time limit of the learner", act="time_limit", lasts_s=80.0, redoes=False),
    _step(
        "preemption of the learner",
        act="preempt",
        settings={"partition": "spot"},
        second=False,
        lasts_s=15.0,
        again=SERVER | LEARNER,
        redoes=False,
    ),
    # the supervisor
    _step("supervisor killed", act="supervisor_killed", lasts_s=6.0, again=NOTHING),
    _step("supervisor stopped longer than its lease", act="supervisor_stopped", lasts_s=20.0, again=NOTHING),
    Fault("supervisor killed before its record", RECORD, ("kill",), second=False, again=NOTHING),
    # SLURM
    _step("controller away", act="controller_away", lasts_s=20.0, again=NOTHING),
    _step("accounting away", act="accounting_away", lasts_s=20.0, again=NOTHING),
    _step("slurmd restarted", act="slurmd_restarted", lasts_s=6.0, again=NOTHING),
    # storage that is mended once the supervisor has given up, and another is started
    _step("storage runs full", act="storage_full", storage="limited", second=False, again=SERVER | LEARNER),
    _step("storage refuses writes", act="storage_refuses", storage="limited", second=False, again=SERVER | LEARNER),
    # what ends a run
    Fault("storage full", "save.middle", ("enospc",), end=End.FAILED, steps=True, during_save=True, again=NOTHING),
    Fault("reward that always raises", "rollout.group", ("raise",), end=End.FAILED, always=True, second=False),
    _step("cancelled by a person", act="cancel", end=End.CANCELLED, again=NOTHING),
    _step("job cancelled by a person", act="scancel", end=End.CANCELLED, again=NOTHING),
)
# Not drawn by seeds, whose scenarios stay what they are: for the table's rows only.
MORE = (
    Fault("over quota", "save.middle", ("edquot",), end=End.FAILED, steps=True, during_save=True, again=NOTHING),
    Fault("no nodes for the learner", "server.start", act="nodes_come_back", again=SERVER, redoes=False),
    Fault("no nodes for the server", "learner.start", act="nodes_come_back", redoes=False),
)
BY_NAME = {fault.name: fault for fault in (*FAULTS, *MORE)}

# Events at which a second fault meets a run that recovers from the first.
RECOVERING = ("resume", "server.start", "rollout.start", "server.begin")
