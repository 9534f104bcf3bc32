"""The supervisor: look, decide, act, until the run has ended. Needs no Prefect; any number may run, one acts."""

import contextlib
import os
import random
import time
from collections.abc import Callable

from cluster.backend import Backend
from cluster.clients import ClusterAway
from cluster.decide import Decision, Kind, Observation, State, decide
from cluster.jobs import JobRecord, JobView
from cluster.profile import ClusterError
from cluster.recovery import REFUSED, Fault, excluded
from cluster.slurm_backend import SlurmBackend
from cluster.submit import job_log
from slipstream.process import Heartbeat, new_incarnation
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder
from tasks.interrupt import uninterrupted
from tasks.lease import Lease, LeaseWatch, StepDown, held_lease, lead_if_free, release
from tasks.observe import ask_to_leave, cancel_request, evidence, newest_attempt, observe, policy_of, states_of
from tasks.outcome import Outcome, RunCancelled, RunFailed, outcome_of, read_outcome, write_outcome
from tasks.records import assign, assigned_jobs, assignment, log_event, read_faults, record_fault, run_step
from tasks.start import start_role
from tasks.stop import request_cancel, stop_jobs
from tasks.stored import backend_for, stored_config

LOCAL_POLL_S = 1.0  # no scheduler is asked
TICK_S = 0.5  # a cancel request is seen within this

Watcher = Callable[[Observation, Decision], None]


def supervise(
    run: RunFolder,
    on_observation: Watcher | None = None,
    poll_s: float | None = None,
    yields_to: tuple[type[BaseException], ...] = (),
) -> Outcome:
    """Watch the run until it has ended: as its leader, where nobody else leads it, else as an onlooker who takes over.

    As the leader: no job is left when this returns or raises, whatever it raises but StepDown and `yields_to`, which
    end the supervision and not the run.
    Raises RunFailed with the failed role, the reason and the last lines of its log; RunCancelled when somebody asked
    the run to stop.
    """
    supervisor = Supervisor(run, on_observation, poll_s, yields_to)
    watch = LeaseWatch(run, supervisor.config.recovery.lease)
    begun = time.monotonic()
    while True:
        lease = None
        try:
            if held_lease(run) is None:
                release(run)  # of a term that another has ended
                if ended := read_outcome(run):
                    return ended.told(str(run.path))
            lease = lead_if_free(run, watch, supervisor.config.recovery.lease)
        except OSError as error:
            supervisor.say(f"the run's storage does not answer: {error}")
        if lease is not None:
            outcome = supervisor.lead(lease)
            if outcome is not None:
                return outcome
        elif time.monotonic() - begun > 1:
            supervisor.say(f"another process leads the run: {watch.look(time.monotonic())}")
        supervisor.sleep()


def at_once(decision: Decision, before: Decision | None) -> bool:
    """Whether the next look comes without a pause: after jobs were stopped or started, but not if that changed nothing."""
    did = {action.kind for action in decision.actions} <= {Kind.STOP, Kind.START}
    return did and (before is None or before.actions != decision.actions)


class Supervisor:
    """One process that leads a run, for as long as it holds the lease."""

    def __init__(
        self,
        run: RunFolder,
        on_observation: Watcher | None,
        poll_s: float | None,
        yields_to: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._yields_to: tuple[type[BaseException], ...] = (StepDown, *yields_to)
        self.run = run
        self.config: RunConfig = stored_config(run)
        self.backend: Backend = backend_for(run)
        self._policy = policy_of(self.config)
        self._tell = on_observation
        on_slurm = isinstance(self.backend, SlurmBackend)
        usual = self.config.recovery.poll if on_slurm else min(LOCAL_POLL_S, self.config.recovery.poll)
        self._poll_s = usual if poll_s is None else poll_s
        self._said = ""
        self._beat: Heartbeat | None = None
        self._jobs: dict[str, JobRecord] = {}
        self._views: dict[str, JobView] = {}

    def say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            with contextlib.suppress(OSError):
                log_event(self.run, newest_attempt(self.run), text)
        if self._beat is not None:
            self._beat.update(phase=text)

    def sleep(self) -> None:
        """Until the next look, with jitter, or until somebody asks the run to stop."""
        end = time.monotonic() + self._poll_s * random.uniform(0.9, 1.1)
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(TICK_S, left))
            if self._asked_to_stop():
                return

    def _asked_to_stop(self) -> bool:
        """Storage that does not answer asks for nothing."""
        with contextlib.suppress(OSError):
            return bool(cancel_request(self.run))
        return False

    def lead(self, lease: Lease) -> Outcome | None:
        """Act until the run has ended, and say on storage how; None where another process has taken over."""
        try:
            attempt = newest_attempt(self.run)
        except OSError:
            return None
        self._beat = Heartbeat(self.run, "supervisor", attempt, new_incarnation()).start()
        ended: Outcome | None = None
        try:
            ended = self._lead(lease)
            return ended
        except self._yields_to:
            raise
        except BaseException as error:
            if self._leads(lease):
                ended = outcome_of(error)
                if not isinstance(error, (RunFailed, RunCancelled)):
                    request_cancel(self.run, f"flow process {os.getpid()}", f"interrupted by {type(error).__name__}")
            elif isinstance(error, Exception):
                return None  # what fails here is the next leader's, who decides
            raise
        finally:
            if ended is not None:
                with uninterrupted():
                    stop_jobs(self.run)
                    with contextlib.suppress(OSError):
                        write_outcome(self.run, ended, newest_attempt(self.run))
                    log_event(self.run, newest_attempt(self.run), f"{ended.kind}: {ended.reason}")
            self._beat.stop(phase="ended")
            self._beat = None

    def _leads(self, lease: Lease) -> bool:
        """Storage that does not answer takes the lead from nobody."""
        with contextlib.suppress(OSError):
            return lease.held()
        return True

    def _lead(self, lease: Lease) -> Outcome | None:
        state, before = State(), None
        while self._leads(lease):
            try:
                seen = self._look()
            except OSError as error:  # storage that stumbles: nothing is known, and the jobs go on
                self.say(f"the run's storage does not answer: {error}")
                self.sleep()
                continue
            decision = decide(seen, self._policy, state)
            state = decision.state
            self.say(decision.reason)
            if self._tell is not None:
                with contextlib.suppress(OSError):  # a terminal or a pipe that is gone
                    self._tell(seen, decision)
            if decision.ending is not None:
                return self._end(decision) if self._leads(lease) else None  # the look may have taken long
            try:
                if not self._act(lease, decision):
                    return None
            except OSError as error:
                self._storage_fails(decision, error)
            if not at_once(decision, before):
                self.sleep()
            before = decision
        return None

    def _act(self, lease: Lease, decision: Decision) -> bool:
        """Do what was decided; False where another process has taken over. Raises OSError."""
        for action in decision.actions:
            if not lease.held():
                return False
            if action.kind is Kind.STOP and decision.fault is not None:
                self._give_up(decision.fault)
            elif action.kind is Kind.START and action.role and not self._start(action.role):
                break
            elif action.kind is Kind.LEAVE and action.role:
                if (job := self._jobs.get(action.role)) is not None:
                    ask_to_leave(self.run, job, decision.reason, time.time())
        return True

    def _storage_fails(self, decision: Decision, error: OSError) -> None:
        """What cannot be recorded is not done: the run ends, and its newest checkpoint is what a resume starts from."""
        reason = f"the run's storage takes no writes ({error}): make room, then resume; {decision.reason}"
        raise RunFailed(str(self.run.path), Outcome(Kind.FAIL, reason, decision.role)) from error

    def _look(self) -> Observation:
        self._jobs, missing = assigned_jobs(self.run)
        if missing:  # whoever submitted them died before the record was written
            with contextlib.suppress(ClusterError):
                for job in self.backend.adopt(self.run):
                    self.say(f"found the {job.role}'s job {job.job_id}, which had no record")
                self._jobs, missing = assigned_jobs(self.run)
                known = {path.stem for path in (self.run.path / "intents").glob("*.json")}
                named = assignment(self.run)
                for role in missing:
                    if not any(stem.endswith(f"-{named[role]}") for stem in known):
                        assign(self.run, newest_attempt(self.run), **{role: None})
                        missing = [other for other in missing if other != role]
        self._views = self.backend.look(self.run, list(self._jobs.values()))
        if self._beat is not None:
            self._beat.update(jobs=states_of(self._jobs, self._views))
        return observe(self.run, self._jobs, self._views, missing, time.monotonic(), time.time())

    def _start(self, role: str) -> bool:
        faults = read_faults(self.run)
        exclude = excluded(faults, time.time(), 60 * self.config.recovery.exclude_minutes)
        own = [fault for fault in faults if fault.role == role]
        try:
            start_role(self.run, role, own[-1].reason if own else "", exclude, self.backend)
        except ClusterAway as error:  # it may be there all the same: the next looks find out
            self.say(f"the scheduler does not answer: {error}")
            self.sleep()
            return False
        except ClusterError as error:
            reason = f"the {role}'s job was not submitted: {error}"
            fault = Fault(time.time(), newest_attempt(self.run), role, REFUSED, run_step(self.run), (), reason)
            record_fault(self.run, fault)
            self.say(reason)
            return False
        return True

    def _give_up(self, fault: Fault) -> None:
        """On storage first, so that the job knows that it is replaced, and a next leader what was decided."""
        with uninterrupted(deliver_after=True):
            job = self._jobs.get(fault.role)
            record_fault(self.run, fault)
            assign(self.run, newest_attempt(self.run), **{fault.role: None})
            if job is not None:
                self.backend.cancel(self.run, [job])

    def _end(self, decision: Decision) -> Outcome:
        if decision.ending is Kind.FAIL:
            job = self._jobs.get(decision.role or "")
            view = self._views.get(job.incarnation) if job else None
            own_log = job_log(self.run, job) if job else None
            log, lines = evidence(self.run, job, view, own_log)
            raise RunFailed(str(self.run.path), Outcome(Kind.FAIL, decision.reason, decision.role, log, lines))
        if decision.ending is Kind.CANCELLED:
            request_cancel(self.run, "supervisor", decision.reason)
            raise RunCancelled(str(self.run.path), decision.reason)
        return Outcome(Kind.FINISH, decision.reason)
