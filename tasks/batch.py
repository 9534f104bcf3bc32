"""A run inside one allocation that a person submitted with sbatch: no Prefect, no supervisor, one decider, which is SLURM.

python -m tasks.batch CONFIG_OR_RUN [--set SECTION.KEY=VALUE …]    (called by slurm/train.sbatch, on the first node)

Prepares the run (or, where SLURM has started the job again, its next attempt from the newest complete checkpoint), starts
one task a node, has the learner save and leave when the time limit comes near, and then puts the job back into the queue.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.clients import call
from cluster.decide import Kind
from cluster.jobs import JobRecord, record_job
from cluster.profile import ClusterError, ClusterProfile, load_profile
from cluster.recovery import Fault
from cluster.slurm import job_comment, job_name, shape_of, step_script
from cluster.submit import job_log, jobs_folder
from slipstream.config_file import ConfigError, load_config
from slipstream.instance import instance_of
from slipstream.process import Heartbeat, new_incarnation
from slipstream.run_config import RunConfig
from slipstream.run_folder import RUN_FILE, RunFolder, RunFolderError, read_json, write_atomic, write_json
from tasks.batch_end import End, Ended, as_fault, judge, restarted
from tasks.finish import finish
from tasks.lease import Lease, claim, held_lease, release, take_over
from tasks.observe import cancel_request, evidence, newest_attempt
from tasks.outcome import NothingToResume, Outcome, write_outcome
from tasks.prepare import check_resumable, prepare
from tasks.records import assign, assigned_jobs, forgive, log_event, read_faults, record_fault, run_step
from tasks.start import next_attempt
from tasks.stored import all_jobs, backend_anyway, origin, stored_config

ROLE = "allocation"
LOOK_S = 0.2
ANSWER_S = 60.0  # a node that does not start `true` within this is lost
REQUEUED_S = 120.0  # until SLURM ends this process, after it has put the job back into the queue
REFUSED = 2


@dataclass(frozen=True)
class Job:
    """What SLURM says of the job that this process is in."""

    job_id: str
    restarts: int
    nodes: int
    gpus: int  # of the first node

    @classmethod
    def here(cls) -> "Job":
        env = os.environ
        if not env.get("SLURM_JOB_ID"):
            raise ClusterError("this is no SLURM job: call `sbatch --nodes=N slurm/train.sbatch CONFIG.toml`")
        return cls(
            env["SLURM_JOB_ID"],
            int(env.get("SLURM_RESTART_COUNT") or 0),
            int(env.get("SLURM_JOB_NUM_NODES") or 1),
            int(env.get("SLURM_GPUS_ON_NODE") or 0),
        )


def wrong_shape(config: RunConfig, nodes: int, gpus: int) -> str:
    """What of the allocation does not fit the configuration, with the way out; ''."""
    shape = shape_of(config, ROLE)
    if shape.nodes != nodes:
        return (
            f"the job has {nodes} nodes, but learner.nodes = {config.learner.nodes} and server.nodes = "
            f"{config.server.nodes}: call sbatch --nodes={shape.nodes}"
        )
    if gpus < shape.gpus:
        return (
            f"the job has {gpus} GPUs a node, but learner.gpus = {config.learner.gpus} and server.gpus = "
            f"{config.server.gpus}: call sbatch --gpus-per-node={shape.gpus}"
        )
    return ""


def config_of(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration as one allocation runs it. Raises ConfigError."""
    forced = ['cluster.shape="one_allocation"']
    if load_config(path, overrides).cluster.profile == "local":
        forced.append('cluster.profile="slurm"')
    return load_config(path, [*overrides, *forced])


def run_of_job(path: Path, overrides: Sequence[str], job_id: str) -> RunFolder | None:
    """The run that an earlier start of this job has made."""
    if (path / RUN_FILE).is_file():
        return RunFolder.open(path)
    root = Path(config_of(path, overrides).storage.root).expanduser()
    found = sorted(root.glob(f"*-job{job_id}/{RUN_FILE}"))
    return RunFolder(found[-1].parent) if found else None


def begin(job: Job, path: Path, overrides: Sequence[str]) -> tuple[RunFolder, int]:
    """The run and its attempt, claimed. Raises ConfigError, RunFolderError, NothingToResume, End."""
    run = run_of_job(path, overrides, job.job_id) if job.restarts else None
    if run is not None:
        return run, _again(run, job)
    if (path / RUN_FILE).is_file():
        run = RunFolder.open(path)
        claim(run)
        _fits(stored_config(run), job)
        backend_anyway(run).cancel(run, all_jobs(run))
        return run, _next(run, by_person=True)
    config = config_of(path, overrides)
    _fits(config, job)
    prepared = prepare(config, f"{config.name}-job{job.job_id}")
    for note in prepared.notes:
        print(f"warning: {note}", flush=True)
    return prepared.run, prepared.attempt


def _fits(config: RunConfig, job: Job) -> None:
    if config.cluster.shape != "one_allocation":
        raise ClusterError('the run has cluster.shape = "separate": continue it with `slipstream resume`')
    if why := wrong_shape(config, job.nodes, job.gpus):
        raise ClusterError(why)


def _again(run: RunFolder, job: Job) -> int:
    """SLURM has started the job again: the next attempt, if it has not been tried too often."""
    config = stored_config(run)
    own = assigned_jobs(run)[0].get(ROLE)
    if own is None:
        claim(run)
    elif (
        own.job_id == job.job_id
    ):  # a copy of this job on a node that is cut off, or a supervisor meanwhile, may lead it
        take_over(run, config.recovery.lease)
    else:
        raise NothingToResume(f"job {own.job_id} has taken the place of this one")
    if read_json(run.path / "result.json"):
        raise End(Ended(Kind.FINISH, 0, "the learner has finished"))
    if cancel := cancel_request(run):
        raise End(Ended(Kind.CANCELLED, 130, cancel))
    faults, before = read_faults(run), str(run.assignment().get(ROLE, ""))
    fault = Fault(time.time(), newest_attempt(run), ROLE, "", run_step(run), (), "", before)
    known = any(one.job == before for one in faults)
    found = restarted(fault, read_json(run.exit_file("learner", before)) or {}, faults, config.recovery.max_restarts)
    if not known:
        record_fault(run, found.fault)
    if found.given_up:
        raise End(Ended(Kind.FAIL, 1, found.given_up))
    return _next(run, by_person=False)


def _next(run: RunFolder, by_person: bool) -> int:
    check_resumable(run)
    for path in (run.cancel_file, run.path / "outcome.json"):
        if path.exists():
            path.replace(path.with_name(f"{path.stem}-{newest_attempt(run)}.json"))
    with origin(run):
        attempt, notes = next_attempt(run, stored_config(run))
    for note in notes:
        print(note, flush=True)
    if by_person:
        forgive(run, attempt)
    return attempt


class Batch:
    """One start of the job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.asked: list[str] = []
        self.incarnation = new_incarnation()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda number, _: self.asked.append(signal.Signals(number).name))

    def say(self, run: RunFolder, text: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
        log_event(run, newest_attempt(run), text)

    def lead(self, run: RunFolder, attempt: int, lease: Lease) -> Ended:
        """Run one attempt on all nodes. Raises NothingToResume where another process leads the run by then."""
        config = stored_config(run)
        with origin(run):
            profile = load_profile(config.cluster.profile)
        beat = Heartbeat(run, "supervisor", attempt, new_incarnation()).start()
        try:
            record = self._record(run, attempt)
            script = self._script(run, attempt, config, profile)
            self.say(run, f"attempt {attempt}: {config.learner.nodes} learner and {config.server.nodes} server nodes")
            beat.update(phase="the allocation runs")
            code = self._watch(run, subprocess.Popen(["/bin/bash", str(script)], start_new_session=True))
            if lease.lost():
                raise NothingToResume("another process leads the run meanwhile, and decides what comes next")
            return self._end(run, attempt, config, record, code)
        finally:
            beat.stop(phase="ended")

    def _record(self, run: RunFolder, attempt: int) -> JobRecord:
        """On storage and in SLURM's list it is a job as any other of the run: status and stop find it."""
        why = "start" if attempt == 1 else "resume"
        now = time.time()
        record = JobRecord(
            run.run_id, ROLE, attempt, self.incarnation, "slurm", self.job.job_id, socket.gethostname(), 0.0, now, why
        )  # fmt: skip
        assign(run, attempt, **{ROLE: self.incarnation})
        record_job(run, record)
        comment = job_comment(instance_of(run), run.run_id, attempt, ROLE, self.incarnation)
        named = [f"JobName={job_name(run.run_id, ROLE)}", f"Comment={comment}"]
        try:
            call(["scontrol", "update", f"JobId={self.job.job_id}", *named])
        except ClusterError as error:
            self.say(run, f"the job keeps its name, so `slipstream status` does not know it: {error}")
        return record

    def _script(self, run: RunFolder, attempt: int, config: RunConfig, profile: ClusterProfile) -> Path:
        folder = jobs_folder(run)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        script = folder / f"{attempt}-{ROLE}-{self.incarnation}.sh"
        write_atomic(script, step_script(profile, run, attempt, self.incarnation, config, folder / "%j_%t_log.out"))
        return script

    def _watch(self, run: RunFolder, child: subprocess.Popen[bytes]) -> int:
        """Until all tasks have ended; on a signal their learner saves and leaves, and the servers follow it."""
        leave = run.leave_file(self.incarnation)
        told = False
        while child.poll() is None:
            if self.asked and not told and not run.cancel_file.exists():
                told = True
                self.say(run, f"{self.asked[0]}: the learner saves and leaves")
                with contextlib.suppress(OSError):
                    write_json(leave, {"signal": self.asked[0], "time": time.time()})
                child.send_signal(
                    signal.SIGUSR2
                )  # srun hands it to all leaders: one that still loads looks for no file
            time.sleep(LOOK_S)
        return child.returncode

    def _end(self, run: RunFolder, attempt: int, config: RunConfig, job: JobRecord, code: int) -> Ended:
        record: dict[str, Any] = read_json(run.exit_file("learner", self.incarnation)) or {}
        result = (read_json(run.path / "result.json") or {}).get("attempt") == attempt
        state, preempted = self._state()
        answer = bool(code == 0 or result or record.get("final") or state != "RUNNING") or self._nodes_answer()
        ended = judge(
            code, record, result, cancel_request(run), state, preempted, "SIGUSR1" in self.asked, answer
        )  # fmt: skip
        if ended.requeue:
            fault = as_fault(ended, attempt, run_step(run), self.incarnation)
            record_fault(run, fault)
            found = restarted(fault, record, read_faults(run), config.recovery.max_restarts)
            if found.given_up:
                return Ended(Kind.FAIL, 1, found.given_up)
        if ended.kind is Kind.FAIL:
            log, lines = evidence(run, job, None, job_log(run, job))
            lines = str(record.get("last_lines") or "") or lines
            return Ended(ended.kind, ended.code, ended.reason, log=log, last_lines=lines)
        return ended

    def _state(self) -> tuple[str, bool]:
        """(SLURM's word for this job, whether it is being preempted); RUNNING where SLURM does not answer."""
        try:
            text = call(["scontrol", "show", "job", "-o", self.job.job_id])
        except ClusterError:
            return "RUNNING", False
        fields = dict(word.partition("=")[::2] for word in text.split() if "=" in word)
        return fields.get("JobState", "RUNNING"), fields.get("PreemptTime", "None") != "None"

    def _nodes_answer(self) -> bool:
        """Whether all nodes of the allocation still start a process: SLURM itself may need minutes to see that one is lost."""
        nodes = str(self.job.nodes)
        argv = ["srun", "--overlap", "--export=ALL", f"--nodes={nodes}", f"--ntasks={nodes}", "/bin/true"]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return False
        print(done.stderr, end="", flush=True)
        return done.returncode == 0

    def requeue(self, run: RunFolder) -> Ended:
        """Back into the queue; this process is ended by it. Returns where SLURM refuses."""
        try:
            call(["scontrol", "requeue", self.job.job_id])
        except ClusterError as error:
            again = f"sbatch slurm/train.sbatch {run.path} continues it"
            return Ended(Kind.FAIL, 1, f"the job could not be put back into the queue ({error}): {again}")
        time.sleep(REQUEUED_S)
        return Ended(Kind.FAIL, 1, "SLURM said that it requeues the job, and did not")


def run_batch(path: Path, overrides: Sequence[str]) -> int:
    """The exit code of the job."""
    os.umask(0o077)
    batch = Batch(Job.here())
    run: RunFolder | None = None
    lease: Lease | None = None
    try:
        try:
            run, attempt = begin(batch.job, path, overrides)
            print(f"run folder: {run.path}", flush=True)
            lease = held_lease(run)
            if lease is None:
                raise NothingToResume(f"{run.run_id} is led by another process")
            ended = batch.lead(run, attempt, lease)
        except End as error:
            ended = error.ended
            run = run_of_job(path, overrides, batch.job.job_id)
        assert run is not None
        if ended.requeue:
            batch.say(run, f"{ended.reason}: back into the queue")
            if lease is not None:
                lease.release()
            ended = batch.requeue(run)
        batch.say(run, f"{ended.kind or 'ended by SLURM'}: {ended.reason}")
        if ended.last_lines:
            print(f"--- last lines of {ended.log}\n{ended.last_lines}\n---", flush=True)
        if ended.kind is not None:
            with contextlib.suppress(OSError):
                outcome = Outcome(ended.kind, ended.reason, ended.role, ended.log, ended.last_lines)
                write_outcome(run, outcome, newest_attempt(run))
            with contextlib.suppress(Exception):
                finish(run)
        return ended.code
    finally:
        if run is not None:
            release(run)


def main(argv: Sequence[str] | None = None) -> int:
    found = argparse.ArgumentParser(prog="python -m tasks.batch", description="Run inside one SLURM allocation.")
    found.add_argument("config", type=Path, help="configuration (TOML), or a run folder to go on with")
    found.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a setting")
    arguments = found.parse_args(argv)
    try:
        return run_batch(arguments.config, arguments.set)
    except (ConfigError, ClusterError, RunFolderError, NothingToResume) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED


if __name__ == "__main__":
    sys.exit(main())
