"""The double of the learner's leader: `slipstream.learner.leader:run`, on each node of the learner."""

import sys
import time
from pathlib import Path

from slipstream.process import REPLACED, how_ended, spawn, stop
from slipstream.run_folder import read_json, write_json
from tests.doubles.events import FOLDER, event, identify
from tests.doubles.jobs import LOOK_S, Leader, node_rank, nodes

GRACE_S = 1.0


def run(run_dir: str | Path, attempt: int) -> int:
    """Start this node's ranks; stop them when one ends, a signal comes, or another job has taken this one's place."""
    node = node_rank()
    who = "learner" if node == 0 else f"learner-{node}"
    leader = Leader(run_dir, attempt, "learner", who, beats=False)
    folder, incarnation = leader.run, leader.incarnation
    identify(who=f"leader-{node}", attempt=attempt, node=node)
    event(folder, "learner.start")
    per_node = leader.config.learner.processes_per_node
    world = per_node * nodes()
    children = {}
    try:
        for rank in range(node * per_node, (node + 1) * per_node):
            command = [
                sys.executable,
                "-m",
                "tests.doubles.rank",
                str(folder.path),
                str(attempt),
                str(rank),
                str(world),
            ]
            children[rank] = spawn(command, leader.log, leader.environment)
        left = False
        while any(child.poll() is None for child in children.values()):
            if leader.terms or leader.replaced or any(child.poll() for child in children.values()):
                break
            if leader.leaving and not left:
                left = True
                write_json(folder.leave_file(incarnation), {"signal": leader.leaving, "time": time.time()})
            time.sleep(LOOK_S)
        codes = {rank: child.poll() for rank, child in children.items()}
    finally:
        for child in children.values():
            stop(child, 0.0 if leader.terms else GRACE_S)
    said = read_json(folder.path / FOLDER / f"ended-{incarnation}.json") or {}
    if leader.terms:
        return leader.end(0, f"stopped by {leader.terms[-1]}")
    if leader.replaced:
        return leader.end(1, REPLACED)
    if not any(codes.values()):
        return leader.end(0, said.get("reason", "finished"), left=said.get("left"))
    broken = min((rank for rank, code in codes.items() if code is not None and code < 0), default=None)
    reason = said.get("reason") or "torchrun ended with code 1"
    if broken is not None:
        reason = f"rank {broken} ended {how_ended(codes[broken])}"
    return leader.end(1, reason, final=bool(said.get("final")))
