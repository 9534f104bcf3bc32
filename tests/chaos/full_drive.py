"""Runs one scenario of the full stack on a bed and judges it."""

import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

from slipstream.learner.checkpoint import MARKER
from slipstream.metrics.audit_records import audit_run
from slipstream.run_folder import write_json
from slurm.bed import Bed
from tests.chaos.ending import Ending
from tests.chaos.faults import SEPARATE, End
from tests.chaos.full_acts import FullActs, wait_a_little
from tests.chaos.full_plan import FullScenario, Strike
from tests.chaos.results import Result
from tests.doubles.events import FOLDER, PLAN
from tests.full_stack import RUN_ID, USER, FullRun, steps_of

LEASE_S = 10.0
POLL_S = 1.0
PACE_S = 0.25
PROMPTS = 240
PATIENCE_S = 900.0
GONE_S = 15.0
PAUSE_S = 6.0  # steps come every second or two: such a gap is a recovery

SECTIONS: dict[str, dict[str, Any]] = {
    "server": {"stall_timeout": 20.0},
    "learner": {"step_timeout": 120.0, "sync_timeout": 60.0, "save_timeout": 60.0},
    "recovery": {"heartbeat_timeout": 45.0, "lease": LEASE_S, "poll": POLL_S},
}


class FullDriver:
    """One scenario on one bed."""

    def __init__(self, bed: Bed, scenario: FullScenario, name: str) -> None:
        self.bed, self.scenario = bed, scenario
        sections: dict[str, Any] = {key: dict(value) for key, value in SECTIONS.items()}
        sections["learner"] |= {"nodes": scenario.nodes, "processes_per_node": scenario.ranks}
        sections["trainer"] = {"save_steps": scenario.save_steps, "rollout_worker_timeout": 40.0}
        sections["cluster"] = {"shape": scenario.shape}
        self.full = FullRun(
            bed,
            name,
            prompts=PROMPTS,
            pace_s=PACE_S,
            profile=scenario.profile,
            storage=scenario.storage,
            **sections,
        )
        plans = [{"id": strike.fault.name, **strike.fault.plan} for strike in scenario.strikes if strike.fault.plan]
        write_json(plan := self.full.run.path.parent / PLAN, plans)
        os.chown(plan, bed.description.uid(USER), -1)
        self.supervisors: list[subprocess.Popen[str]] = []
        self.acts = FullActs(self.full, self.supervisors, LEASE_S, POLL_S)
        self.ending = Ending(bed, self.acts.usual, USER)
        self.struck: dict[str, tuple[float, int]] = {}  # by fault: when, at which step
        self.missed: dict[str, str] = {}
        self._over = False

    def drive(self) -> Result:
        begun = time.monotonic()
        problems: list[str] = []
        self.supervisors.append(self.full.supervise())
        acting = threading.Thread(target=self._act, daemon=True)
        acting.start()
        try:
            if not self._until_ended(begun + PATIENCE_S):
                problems.append(f"it did not end within {PATIENCE_S:.0f} s")
            problems += [f"left {what}" for what in self.full.left(GONE_S, self.ending.look)]
            problems += self.ending.problems()
        finally:
            self._over = True
            acting.join(120)
            self.acts.mend()
            self.full.close()
            self.bed.command("scancel", "--user", "bed2")
        return self._result(problems, time.monotonic() - begun)

    def _until_ended(self, deadline: float) -> bool:
        """Start another supervisor where the last has died before the run's end, as a person or a service would."""
        while time.monotonic() < deadline:
            self.ending.look()
            if all(process.poll() is not None for process in self.supervisors):
                if self.full.outcome():
                    return True
                time.sleep(1)
                self.supervisors.append(self.full.supervise())
            time.sleep(0.2)
        return False

    def _act(self) -> None:
        draw = random.Random(self.scenario.seed)
        for strike in self.scenario.strikes:
            while not self._over and not self._met(strike):
                time.sleep(0.02)
            if self._over:
                return
            if strike.fault.at == "step":
                wait_a_little(draw)
            self._strike(strike)
        if not any(strike.fault.act == "spoil_reward" for strike in self.scenario.strikes):
            self.full.pace(0.05)

    def _strike(self, strike: Strike) -> None:
        """Until it can be done: what it is done to may be away just then."""
        name, end = strike.fault.name, time.monotonic() + 60
        while not self._over:
            self.struck[name] = (time.time(), self.full.step)
            try:
                if strike.fault.act:
                    getattr(self.acts, strike.fault.act)()
                return
            except Exception as error:
                self.struck.pop(name)
                self.missed[name] = f"{type(error).__name__}: {error}"
                if time.monotonic() > end:
                    return
                time.sleep(0.5)

    def _met(self, strike: Strike) -> bool:
        full = self.full
        if strike.fault.at == "plan":
            return (full.run.path / FOLDER / f"reached-{strike.fault.name}.json").exists()
        if strike.attempt > 1:  # while it recovers: another server or another attempt has been submitted
            return len(full.jobs()) > (2 if self.scenario.shape == SEPARATE else 1)
        if full.step < strike.step:
            return False
        if strike.fault.at == "save":
            output = full.run.output(full.attempt)
            return any(not (path / MARKER).exists() for path in output.glob("checkpoint-*"))
        return strike.fault.at == "step" or full.beat().get("phase") == "delivering weights"

    # -- the judgement

    def _result(self, problems: list[str], seconds: float) -> Result:
        scenario, full = self.scenario, self.full
        end = str(full.outcome().get("kind", ""))
        attempts = redone = 0
        if full.run.run_file.exists():
            audit = audit_run(full.run)
            attempts, redone = len(audit.attempts), audit.redone
            problems += [f"audit: {finding}" for finding in full.findings()]
            problems += self._wrong_ends(end, redone)
        else:
            problems.append("there is no run")
        return Result(
            seed=scenario.seed,
            faults=scenario.names,
            shape=scenario.shape,
            expected=str(scenario.end),
            end=end,
            met=list(self.struck),
            problems=problems,
            attempts=attempts,
            redone=redone,
            seconds=round(seconds, 1),
            ended_after_s=self.ending.after_s,
            load=round(self.ending.load, 1),
            recovery_s=self._recovery_times(),
        )

    def _wrong_ends(self, end: str, redone: int) -> list[str]:
        problems = []
        ends = {strike.fault.end for strike in self.scenario.strikes if strike.fault.name in self.struck}
        expected = next(iter(ends - {End.FINISHED}), End.FINISHED)
        if end != str(expected):
            problems.append(f"ended as {end or 'nothing'} ({self.full.outcome().get('reason')}), not as {expected}")
        first = self.scenario.strikes[0].fault
        reason = str(self.full.outcome().get("reason"))
        if end == End.FAILED and first.reason not in reason:
            problems.append(f"failed without its cause: {reason}")
        given_up = self.acts.given_up
        if first.storage and not (given_up and all(given_up)):
            problems.append(f"the supervisor did not give up: {given_up}")
        if first.name not in self.struck:
            problems.append(f"{first.name} was not met: {self.missed.get(first.name, 'the run was over')}")
        if redone and len(self.struck) == len(self.scenario.strikes) == 1 and not first.redoes:
            problems.append(f"{redone} steps were made again, none had to be")
        again = sorted(fault["role"] for fault in self.full.faults() if "role" in fault)
        alone = len(self.scenario.strikes) == 1 and self.scenario.shape == SEPARATE
        if alone and first.again is not None and again != sorted(first.again):
            problems.append(f"started again: {again or 'nothing'}, not {sorted(first.again) or 'nothing'}")
        return problems

    def _recovery_times(self) -> dict[str, float]:
        """By fault, seconds from it to the step after the first long pause that follows it."""
        times = sorted(when for when, _ in steps_of(self.full.run))
        found = {}
        for name, (struck, _) in self.struck.items():
            later = [struck, *(when for when in times if when > struck)]
            gaps = [b for a, b in itertools.pairwise(later) if b - a > PAUSE_S]
            if gaps:
                found[name] = round(gaps[0] - struck, 1)
        return found


def run_full_scenario(bed: Bed, scenario: FullScenario, keep: bool = False) -> Result:
    """Run and judge one; its files stay only where something is wrong, or with `keep`."""
    name = f"chaos/full-{scenario.seed}"
    folder = bed.folder / scenario.storage / name
    shutil.rmtree(folder, ignore_errors=True)
    result = FullDriver(bed, scenario, name).drive()
    if result.right and not keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"seed {scenario.seed}: files in {folder} ({RUN_ID})", file=sys.stderr)
    return result
