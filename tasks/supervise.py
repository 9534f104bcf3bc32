"""The supervisor: look, decide, act, until the run has ended. Needs no Prefect."""

import os
import time
from collections.abc import Callable

from cluster.decide import Decision, Kind, Observation, State, decide
from slipstream.process import Heartbeat, new_incarnation
from slipstream.run_folder import RunFolder
from tasks.observe import evidence, observe, policy_of
from tasks.outcome import Outcome, RunCancelled, RunFailed
from tasks.prepare import log_event, stored_config
from tasks.start import start_role
from tasks.stop import request_own_cancel, stop_jobs

POLL_S = 1.0

Watcher = Callable[[Observation, Decision], None]


def supervise(run: RunFolder, attempt: int, on_observation: Watcher | None = None, poll_s: float = POLL_S) -> Outcome:
    """Watch the attempt until it has finished; no job is left when this returns or raises, whatever it raises.

    Raises RunFailed with the failed role, the reason and the last lines of its log; RunCancelled when somebody asked
    the run to stop.
    """
    policy = policy_of(stored_config(run))
    state = State()
    beat = Heartbeat(run, "supervisor", attempt, new_incarnation()).start()
    before = ""
    try:
        while True:
            seen = observe(run, attempt, time.monotonic())
            decision = decide(seen, policy, state)
            state = decision.state
            if decision.reason != before:
                before = decision.reason
                log_event(run, attempt, decision.reason)
                beat.update(phase=decision.reason)
            if on_observation is not None:
                on_observation(seen, decision)
            if decision.ending is not None:
                return _end(run, attempt, decision)
            for action in decision.actions:
                if action.kind is Kind.START and action.role:
                    start_role(run, attempt, action.role)
            time.sleep(poll_s)
    except (RunFailed, RunCancelled):
        raise
    except BaseException as error:
        request_own_cancel(run, attempt, f"flow process {os.getpid()}", f"interrupted by {type(error).__name__}")
        raise
    finally:
        stop_jobs(run, attempt)
        beat.stop(phase="ended")


def _end(run: RunFolder, attempt: int, decision: Decision) -> Outcome:
    if decision.ending is Kind.FAIL:
        log, lines = evidence(run, attempt, decision.role)
        raise RunFailed(str(run.path), Outcome(Kind.FAIL, decision.reason, decision.role, log, lines))
    if decision.ending is Kind.CANCELLED:
        raise RunCancelled(str(run.path), decision.reason)
    return Outcome(Kind.FINISH, decision.reason)
