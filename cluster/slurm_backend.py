"""Jobs on SLURM. Its clients tell the state; a client that fails or hangs tells nothing."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster.backend import KILL_AFTER_S, JobRequest
from cluster.clients import ClusterAway, call
from cluster.intents import open_intents, record_of, void_intent, write_intent, writer_lives
from cluster.jobs import (
    UNRECORDED,
    JobRecord,
    JobState,
    JobView,
    exit_record,
    read_jobs,
    record_job,
    with_exit_record,
)
from cluster.node import environment_file
from cluster.profile import ClusterError, ClusterProfile
from cluster.refusals import refusals
from cluster.slurm import (
    EntryExecutor,
    exported,
    is_anothers,
    job_command,
    job_comment,
    job_name,
    parse_comment,
    sbatch_parameters,
    sbatch_text,
)
from cluster.slurm_states import (
    SACCT_FORMAT,
    SlurmJob,
    no_such_job,
    parse_down,
    parse_sacct,
    parse_scontrol,
    state_of,
    view_of,
)
from cluster.squeue import Queue, Snapshot
from slipstream.instance import instance_of
from slipstream.run_config import RecoverySection, RunConfig
from slipstream.run_folder import RunFolder, read_object, write_json

# A submission may reach a busy controller after its client was given up, and a new job may miss from a list for a moment.
LATE_S = 60.0
CANCEL_S = 15.0  # for all of `cancel`
CANCEL_CALL_S = 5.0
AFTER_KILL_S = 2.5
POLL_S = float(RecoverySection.model_fields["poll"].default)


def jobs_folder(run: RunFolder) -> Path:
    """submitit's files: batch files, job logs."""
    return run.path / "jobs" / "submitit"


class SlurmBackend:
    """The jobs of one user on one SLURM cluster, seen from one host.

    Args:
        poll_s: seconds between two questions to the scheduler.
        queue: for tests.
    """

    def __init__(self, profile: ClusterProfile, poll_s: float = POLL_S, queue: Queue | None = None) -> None:
        self.profile = profile
        self._queue = queue or Queue(poll_s, profile.client_timeout)
        self._ended: dict[str, JobView] = {}  # by incarnation: a final state outlives the scheduler's memory
        self._asked: dict[str, tuple[float, JobView]] = {}  # of jobs that squeue does not list, per snapshot

    # -- submission ------------------------------------------------------------------------------------------------

    def check(self, config: RunConfig) -> None:
        missing = [client for client in ("sbatch", "squeue", "scontrol", "scancel") if shutil.which(client) is None]
        if missing:
            raise ClusterError(
                f"cluster.profile = {config.cluster.profile!r}: there is no `{missing[0]}` on this machine: start the run "
                'where SLURM\'s clients are, or use cluster.profile = "local"'
            )
        self.check_values(config)
        if found := refusals(self.profile, config):
            raise ClusterError(f"cluster.profile = {config.cluster.profile!r}: {'; '.join(found)}")

    def check_values(self, config: RunConfig) -> None:
        """The part of `check` that needs no SLURM."""
        root = Path(config.storage.root).expanduser().absolute()
        if self.profile.shared and not root.is_relative_to(self.profile.shared):
            raise ClusterError(
                f"storage.root = {config.storage.root!r}: not every node sees {root}; choose a folder in {self.profile.shared} "
                f"(`shared` of cluster.profile = {config.cluster.profile!r})"
            )
        if config.cluster.shape == "one_allocation" and config.server.url:
            raise ClusterError(
                f'cluster.shape = "one_allocation", but server.url = {config.server.url!r} is a server of somebody else: '
                'use cluster.shape = "separate", or leave server.url out'
            )

    def submit(self, run: RunFolder, request: JobRequest) -> JobRecord:
        profile, config = self.profile, request.config
        identity = (request.role, request.attempt, request.incarnation)
        parameters = sbatch_parameters(profile, run, *identity, config, request.cwd, request.exclude)
        folder = jobs_folder(run)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._leave_environment(run)
        executor = EntryExecutor(folder, profile.client_timeout)
        executor.update_parameters(**parameters)
        intent = write_intent(run, *identity, profile.executor, request.why)
        try:
            job_id = executor.submit_command(
                job_command(profile, run, *identity, config),
                f"{request.attempt}-{request.role}-{request.incarnation}",
            )
        except ClusterAway as error:
            raise ClusterAway(f"the {request.role}'s job could not be submitted: {error}") from None
        except ClusterError as error:
            void_intent(run, intent)
            raise ClusterError(f"the {request.role}'s job was refused: {error}") from None
        record = replace(record_of(run, intent, job_id), submitted=time.time())
        record_job(run, record)
        return record

    def _leave_environment(self, run: RunFolder) -> None:
        """The variables of the allow-list, on storage. What an earlier submitter had and this one has not stays."""
        path = environment_file(run)
        before = read_object(path)
        now = {**before, **exported(os.environ, self.profile.keep_environment)}
        if self.profile.vllm_python:
            now.pop("SLIPSTREAM_VLLM_PYTHON", None)
        if now != before or not path.exists():
            write_json(path, now)

    def describe(self, run: RunFolder, role: str, attempt: int, config: RunConfig, cwd: Path) -> str:
        """The batch file that `submit` would hand to sbatch."""
        return sbatch_text(self.profile, run, role, attempt, "incarnation", config, cwd, jobs_folder(run))

    # -- state -----------------------------------------------------------------------------------------------------

    def look(self, run: RunFolder, jobs: Sequence[JobRecord]) -> dict[str, JobView]:
        if not jobs:
            return {}
        return self._views(run, jobs, self._queue.snapshot())

    def _views(self, run: RunFolder, jobs: Sequence[JobRecord], snapshot: Snapshot) -> dict[str, JobView]:
        listed = {job.job_id: job for job in snapshot.jobs}
        instance = instance_of(run)
        views = {}
        for job in jobs:
            found = listed.get(job.job_id)
            if snapshot.error:
                view = self._ended.get(job.incarnation) or JobView(
                    JobState.UNKNOWN, reason=snapshot.error, source="squeue"
                )
            elif found is not None and _is(found, job, instance):
                view = view_of(found, "squeue")
            else:
                view = self._ended.get(job.incarnation) or self._unlisted(job, snapshot, instance)
            if view.state.ended:
                known = self._ended.get(job.incarnation)
                view = self._with_lost(view) if known is None else replace(view, lost=known.lost)
                self._ended[job.incarnation] = view
                view = with_exit_record(view, exit_record(run, job))
            views[job.incarnation] = view
        return views

    def _with_lost(self, view: JobView) -> JobView:
        """Asked once, when a job of several nodes has just ended for a node's sake; no answer blames nobody."""
        if view.state not in (JobState.NODE_FAIL, JobState.BOOT_FAIL) or len(view.nodes) < 2:
            return view
        argv = ["sinfo", "-h", "-N", "-n", ",".join(view.nodes), "-o", "%N|%T"]
        try:
            down = parse_down(call(argv, self.profile.client_timeout))
        except ClusterError:
            return view
        return replace(view, lost=tuple(node for node in view.nodes if node in down))

    def _unlisted(self, job: JobRecord, snapshot: Snapshot, instance: str) -> JobView:
        """A job that squeue did not list: too new, too old, or lost. Asked once for each snapshot."""
        if snapshot.time <= job.submitted:
            return JobView(JobState.PENDING, source="sbatch")
        asked = self._asked.get(job.job_id)
        if asked is None or asked[0] != snapshot.monotonic:
            asked = (snapshot.monotonic, self._ask(job, instance))
            self._asked[job.job_id] = asked
        return asked[1]

    def _ask(self, job: JobRecord, instance: str) -> JobView:
        unclear = ""
        try:
            text = call(["scontrol", "show", "job", "-o", job.job_id], self.profile.client_timeout)
        except ClusterAway as error:
            return JobView(JobState.UNKNOWN, reason=str(error), source="scontrol")
        except ClusterError as error:
            text, unclear = "", "" if no_such_job(str(error)) else str(error)
        found = next(
            (one for one in parse_scontrol(text) if one.job_id == job.job_id and _is(one, job, instance)), None
        )
        if found is not None:
            return view_of(found, "scontrol")
        accounted = self._accounted(["-j", job.job_id])
        found = next((one for one in accounted if one.job_id == job.job_id and one.name == _name(job)), None)
        if found is not None and state_of(found.state).ended:
            return view_of(found, "sacct")
        if unclear:
            return JobView(JobState.UNKNOWN, reason=unclear, source="scontrol")
        if time.time() < job.submitted + LATE_S:
            return JobView(JobState.PENDING, source="sbatch")
        return JobView(JobState.GONE, reason="SLURM does not know the job any more", source="scontrol")

    def _accounted(self, words: Sequence[str]) -> list[SlurmJob]:
        """What the accounting has; nothing where there is none, which is no error."""
        try:
            return parse_sacct(call(["sacct", "-XDnP", "-o", SACCT_FORMAT, *words], self.profile.client_timeout))
        except ClusterError:
            return []

    # -- adoption --------------------------------------------------------------------------------------------------

    def adopt(self, run: RunFolder) -> list[JobRecord]:
        """Also records jobs of the run whose intent is void or lost: the comment names them whole."""
        recorded = {job.incarnation for attempt in run.attempts() for job in read_jobs(run, attempt)}
        ids = {job.job_id for attempt in run.attempts() for job in read_jobs(run, attempt)}
        intents = {intent["incarnation"]: intent for intent in open_intents(run, recorded) if _on_slurm(intent)}
        snapshot = self._queue.new()
        if snapshot.error:
            raise ClusterAway(snapshot.error)
        adopted, instance = [], instance_of(run)
        for found in snapshot.jobs:
            intent = None if is_anothers(found.comment, instance) else self._intent_of(run, found, intents)
            if intent is None or intent["incarnation"] in recorded or found.job_id in ids:
                continue
            adopted.append(self._adopted(run, intent, found.job_id))
            recorded.add(intent["incarnation"])
        for intent in intents.values():
            if intent["incarnation"] in recorded:
                continue
            job_id = self._forgotten(run, intent, ids)
            if job_id:
                adopted.append(self._adopted(run, intent, job_id))
            elif time.time() > intent["time"] + LATE_S or writer_lives(intent) is False:
                void_intent(run, intent)
        return adopted

    def _intent_of(self, run: RunFolder, found: SlurmJob, intents: dict[str, dict]) -> dict | None:
        """The intent of a listed job; from its comment, or by its name where the site takes comments away."""
        parsed = parse_comment(found.comment)
        if parsed is not None:
            _, run_id, attempt, role, incarnation = parsed
            if run_id != run.run_id or attempt not in run.attempts():
                return None
            lost = {"attempt": attempt, "role": role, "incarnation": incarnation, "time": time.time(), "why": "adopted"}
            lost |= {"executor": self.profile.executor, "host": ""}
            # ended and without an intent: nobody waits for it
            return intents.get(incarnation) or (None if state_of(found.state).ended else lost)
        named = [one for one in intents.values() if found.name == job_name(run.run_id, one["role"])]
        return named[-1] if named and not found.comment.startswith("slipstream:") else None

    def _forgotten(self, run: RunFolder, intent: dict, ids: set[str]) -> str:
        """The id of a job that has ended and that only the accounting remembers; ''."""
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(intent["time"] - LATE_S))
        name = job_name(run.run_id, intent["role"])
        comment = job_comment(instance_of(run), run.run_id, intent["attempt"], intent["role"], intent["incarnation"])
        rows = self._accounted(["-u", str(os.getuid()), "-S", since, f"--name={name}"])
        own = [one.job_id for one in rows if one.job_id not in ids and one.comment in ("", comment)]
        return own[-1] if own else ""

    def _adopted(self, run: RunFolder, intent: dict, job_id: str) -> JobRecord:
        record = record_of(run, intent, job_id)
        record_job(run, record)
        return record

    # -- the end ---------------------------------------------------------------------------------------------------

    def cancel(self, run: RunFolder, jobs: Sequence[JobRecord], kill_after_s: float = KILL_AFTER_S) -> list[JobRecord]:
        """Jobs whose state the scheduler does not tell are signalled too. Never raises.

        A plain scancel would leave what ignores TERM to the cluster's KillWait (30 s and more), and then refuse the KILL.
        """
        deadline = time.monotonic() + max(CANCEL_S, kill_after_s + CANCEL_S / 2)
        named = self._named(jobs, instance_of(run))
        live = self._live(run, [job for job in named if job.job_id.isdigit() and job.job_id != UNRECORDED])
        if not live:
            return []
        self._scancel(live, "--state=PENDING")
        self._scancel(live, "--signal=TERM")
        left = self._wait(run, live, min(deadline, time.monotonic() + kill_after_s))
        # Each harder than the one before: KILL of its steps is immediate, that of its batch shell ends a job without steps.
        for kill in (self._kill_steps, self._kill_batch, self._scancel):
            if left:
                kill(left)
                left = self._wait(run, left, min(deadline, time.monotonic() + AFTER_KILL_S))
        return live

    def _named(self, jobs: Sequence[JobRecord], instance: str) -> list[JobRecord]:
        """`jobs`, with the ids that squeue has for those of which only the intent is on storage."""
        known = {job.job_id for job in jobs}
        listed = self._queue.new(CANCEL_CALL_S).jobs if UNRECORDED in known else ()
        named = []
        for job in jobs:
            if job.job_id == UNRECORDED:
                found = (one for one in listed if one.job_id not in known and _may_be(one, job, instance))
                job = replace(job, job_id=next((one.job_id for one in found), UNRECORDED))
                known.add(job.job_id)
            named.append(job)
        return named

    def _live(self, run: RunFolder, jobs: Sequence[JobRecord]) -> list[JobRecord]:
        views = self._views(run, jobs, self._queue.new(CANCEL_CALL_S)) if jobs else {}
        return [job for job in jobs if not views[job.incarnation].state.ended]

    def _wait(self, run: RunFolder, jobs: list[JobRecord], deadline: float) -> list[JobRecord]:
        """Those that have not ended by `deadline` (monotonic)."""
        left = jobs
        while left and time.monotonic() < deadline:
            time.sleep(0.5)
            left = self._live(run, left)
        return left

    def _scancel(self, jobs: Sequence[JobRecord], *options: str) -> None:
        self._try(["scancel", *options, *(job.job_id for job in jobs)])

    def _kill_batch(self, jobs: Sequence[JobRecord]) -> None:
        self._scancel(jobs, "--signal=KILL", "--batch")

    def _kill_steps(self, jobs: Sequence[JobRecord]) -> None:
        """KILL of a whole job SLURM would make a plain scancel, which waits KillWait."""
        ids = ",".join(job.job_id for job in jobs)
        text = self._try(["squeue", "-h", "-a", "-s", "-j", ids, "-o", "%i"])
        steps = [step for step in text.split() if step.rpartition(".")[2].isdigit()]
        if steps:
            self._try(["scancel", "--signal=KILL", *steps])

    def _try(self, argv: Sequence[str]) -> str:
        """One that fails may have found a job ended already; the next look tells."""
        try:
            return call(argv, CANCEL_CALL_S)
        except ClusterError:
            return ""


def _on_slurm(intent: dict) -> bool:
    return bool(intent.get("executor") == "slurm")


def _name(job: JobRecord) -> str:
    return job_name(job.run_id, job.role)


def _names(comment: str, job: JobRecord, instance: str) -> bool:
    """Whether a comment is that of `job`; one of before there were instances names none."""
    said = parse_comment(comment)
    identity = (job.run_id, job.attempt, job.role, job.incarnation)
    return said is not None and said[1:] == identity and not is_anothers(comment, instance)


def _may_be(found: SlurmJob, job: JobRecord, instance: str) -> bool:
    """Whether a listed job is that of an intent: by its comment, or by its name where the site takes comments away."""
    by_name = found.name == _name(job) and not found.comment.startswith("slipstream:")
    return by_name or _names(found.comment, job, instance)


def _is(found: SlurmJob, job: JobRecord, instance: str) -> bool:
    """Whether a listed job with this id is the recorded one: a reset controller counts from 1 again."""
    by_name = found.name == _name(job) and not is_anothers(found.comment, instance)
    return by_name or _names(found.comment, job, instance)
