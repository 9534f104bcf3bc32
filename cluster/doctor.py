"""`slipstream doctor`: gathers the facts of a cluster, a tiny job included, and leaves nothing behind."""

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.backend import roles_of
from cluster.backends import backend_of
from cluster.clients import ClusterAway, call
from cluster.doctor_node import answer, fingerprint
from cluster.environment import SECRET, code_root, job_environment
from cluster.findings import (
    CLIENTS,
    Finding,
    Partition,
    judge_accounting,
    judge_clients,
    judge_nodes,
    judge_partition,
    judge_preemption,
    judge_times,
    judge_visibility,
    ok,
    partition_of,
    problem,
    settings_of,
    size_of,
    warning,
)
from cluster.jobs import JobState
from cluster.profile import ClusterError, ClusterProfile
from cluster.queue import hopeless
from cluster.refusals import try_request, way_out
from cluster.slurm import EntryExecutor, Shape, exported, in_container, sbatch_parameters, shape_of
from cluster.slurm_backend import SlurmBackend
from cluster.slurm_states import SQUEUE_FORMAT, SlurmJob, parse_squeue, state_of
from slipstream.process import last_lines
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, write_json

JOB_MINUTES = 5  # most that the test job may hold its nodes; it takes seconds
IMPORT_S = 120.0  # vLLM's import on cold network storage
PATIENCE_S = 60.0  # for a file to be seen elsewhere
POLL_S = 0.5
FOLDER = ".slipstream-doctor-"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What to look at.

    Args:
        config: of the run that is meant; without `given` one that asks for nothing but a node of each role.
        given: whether a person named it.
        job: run the test job.
        wait_s: most seconds that the job may wait in the queue.
    """

    profile: ClusterProfile
    config: RunConfig
    given: bool = False
    job: bool = True
    wait_s: float = 300.0

    @property
    def roles(self) -> tuple[str, ...]:
        return roles_of(self.config)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {role: shape_of(self.config, role) for role in self.roles}

    @property
    def need_vllm(self) -> bool:
        return not self.config.server.url and not self.config.server.command

    @property
    def root(self) -> Path | None:
        """Where runs will lie; None where nobody says."""
        if self.given:
            return Path(self.config.storage.root).expanduser().absolute()
        return Path(self.profile.shared) if self.profile.shared else None


def examine(asked: Asked, say: Say) -> Generator[Finding, None, None]:
    """All findings, one after the other; `say` shows what is waited for. Close it to stop early."""
    if asked.profile.executor == "local":
        yield from _local(asked, say)
        return
    said = {client: _version(client) for client in CLIENTS}
    findings = judge_clients(said)
    yield from findings
    if any(text.startswith("error: ") for text in said.values()):
        return
    about = list(_cluster(asked))
    yield from about
    if any(finding.check == "controller" and finding.level == "problem" for finding in about):
        return
    with _folder(asked) as (folder, findings):
        yield from findings
        tests = list(_test_only(asked))
        yield from tests
        if folder is None or not asked.job:
            return
        if any(finding.level == "problem" for finding in tests):
            yield warning("job", "not tried: SLURM would refuse it")
            return
        yield from _job(asked, folder, say)


def _version(client: str) -> str:
    try:
        said = " ".join(call([client, "--version"], 20).split())
        if re.match(r"slurm[\w.-]* \d", said):
            return said[:100]
        return f"error: it is no client of SLURM: --version says {said[:60]!r}"
    except ClusterError as error:
        return f"error: {error}"


def _cluster(asked: Asked) -> Iterator[Finding]:
    """The profile against the cluster's settings."""
    profile = asked.profile
    try:
        settings = settings_of(call(["scontrol", "show", "config"], profile.client_timeout))
        partitions = call(["scontrol", "show", "partition", "-o"], profile.client_timeout)
        found = partition_of(partitions, profile.partition)
        if found is not None:
            nodes = call(["sinfo", "-h", "-N", "-p", found.name, "-o", "%N %G"], profile.client_timeout)
            found = partition_of(partitions, profile.partition, nodes)
    except ClusterError as error:
        yield problem("controller", str(error), "wait until SLURM answers, or look at SLURM_CONF")
        return
    yield ok(
        "controller", f"{settings.get('ClusterName', 'SLURM')} answers, version {settings.get('SLURM_VERSION', '?')}"
    )
    yield from judge_partition(profile, found, asked.shapes)
    yield judge_accounting(settings.get("AccountingStorageType", ""), _sacct())
    yield from judge_times(profile, settings)
    yield judge_preemption(found, settings)
    try:
        SlurmBackend(profile).check_values(asked.config)
    except ClusterError as error:
        if asked.given:
            yield problem("storage", str(error))


def _sacct() -> str:
    try:
        call(["sacct", "-n", "-X", "-S", "now"], 30)
        return ""
    except ClusterError as error:
        return str(error)


@contextlib.contextmanager
def _folder(asked: Asked) -> Iterator[tuple[Path | None, list[Finding]]]:
    """A folder of our own where runs will lie, and what is to be said of that; removed afterwards."""
    root = asked.root
    if root is None:
        way_out = "set `shared` of the profile, or give --config with its storage.root"
        yield None, [warning("storage", "nobody says where runs lie, so no job is tried", way_out)]
        return
    there = root
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=there))
    except OSError as error:
        way_out = "choose another storage.root (`shared` of the profile), or mend its permissions"
        yield None, [problem("storage", f"{there} is not writable here: {error.strerror}", way_out)]
        return
    try:
        free = shutil.disk_usage(folder).free / 1e9
        yield folder, [ok("storage", f"{there} is writable here, {free:.1f} GB free")]
    finally:
        for _ in range(20):  # a task that is ending may still write
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.2)


def _test_only(asked: Asked) -> Iterator[Finding]:
    """The batch files of a run, as they would be submitted, judged by SLURM."""
    profile, config = asked.profile, asked.config
    for role, shape in asked.shapes.items():
        try:
            try_request(profile, config, role)
            yield ok("submission", f"SLURM would take the {role}'s job ({size_of(shape)})")
        except ClusterError as error:
            text = f"the {role}'s job ({size_of(shape)}): {error}"
            yield problem("submission", text, way_out(profile, config, role, str(error)))


def _request(asked: Asked, folder: Path, meet: bool) -> dict[str, str]:
    """What the nodes are to look at; fingerprints of the secrets here that must not arrive."""
    profile, salt = asked.profile, secrets.token_hex(8)
    request = {
        "salt": salt,
        "secret": SECRET.pattern,
        "vllm": asked.need_vllm,
        "learner_python": asked.config.learner.python,
        "patience_s": PATIENCE_S,
        "import_s": IMPORT_S,
        "meet": meet,
    }
    write_json(folder / "request.json", request)
    write_json(folder / "environment.json", _passed(profile))
    return {
        name: fingerprint(salt, value)
        for name, value in os.environ.items()
        if SECRET.search(name) and name not in profile.keep_environment
    }


def _passed(profile: ClusterProfile) -> dict[str, str]:
    values = exported(os.environ, profile.keep_environment)
    if profile.vllm_python:
        values.pop("SLIPSTREAM_VLLM_PYTHON", None)
    return values


def _job(asked: Asked, folder: Path, say: Say) -> Iterator[Finding]:
    """A tiny job on two nodes (one, where there are no two): what the nodes see."""
    profile = asked.profile
    marks = _request(asked, folder, meet=True)
    nodes = 2 if _two_nodes(asked) else 1
    gpus = max(shape.gpus for shape in asked.shapes.values())
    run = RunFolder(folder)
    lead = min(profile.signal_lead, 30 * JOB_MINUTES)
    short = profile.model_copy(update={"time_limit": JOB_MINUTES, "signal_lead": lead})
    parameters = sbatch_parameters(short, run, "doctor", 1, "doctor", asked.config, Path.cwd())
    parameters |= {"nodes": nodes, "gpus_per_node": gpus or None, "job_name": folder.name.lstrip(".")}
    executor = EntryExecutor(folder, profile.client_timeout)
    executor.update_parameters(
        **{key: value for key, value in parameters.items() if value is not None or key == "wckey"}
    )
    words = [profile.python or sys.executable, "-u", "-m", "cluster.doctor_node", str(folder)]
    job_id = ""
    try:
        job_id = executor.submit_command(in_container(profile, folder.parent, words), "job")
        why = _follow(job_id, folder, nodes, asked.wait_s, say)
    except ClusterError as error:
        why = problem("job", f"the test job could not be followed: {error}", "run doctor again")
    finally:
        _end(job_id, str(parameters["job_name"]))
    facts = [json.loads(path.read_text()) for path in sorted(folder.glob("facts-*.json"))]
    if why is not None:
        yield why
    elif len(facts) < nodes:
        log = "\n".join(last_lines(path, 4) for path in sorted(folder.glob("*_log.out")))
        text = f"{nodes - len(facts)} of {nodes} nodes of the test job did not get to Python: {' '.join(log.split())[:600]}"
        yield problem("job", text, "`python`, `container` and `setup` of the profile must work on the nodes")
    if facts:
        yield judge_visibility(facts)
        yield from judge_nodes(profile, facts, gpus, marks, asked.need_vllm)


def _two_nodes(asked: Asked) -> bool:
    try:
        text = call(["scontrol", "show", "partition", "-o"], asked.profile.client_timeout)
        name = asked.profile.partition
        found: Partition | None = partition_of(text, name)
        command = ["sinfo", "-h", "-N", "-p", found.name if found else "", "-o", "%N %G"]
        nodes = call(command, asked.profile.client_timeout) if found else ""
        found = partition_of(text, name, nodes)
    except ClusterError:
        return False
    return found is not None and len(found.gpus) > 1 and (found.max_nodes is None or found.max_nodes > 1)


def _follow(job_id: str, folder: Path, nodes: int, wait_s: float, say: Say) -> Finding | None:
    """Until the job has ended; meanwhile its nodes' files are answered. Why it was given up, or None."""
    begun = time.monotonic()
    others, answered, started = [str(one) for one in range(nodes)], set[str](), False
    (folder / "hello-here").touch()
    asked_at = 0.0
    while True:
        os.listdir(folder)
        answer(folder, "here", others, answered)
        if len(list(folder.glob("facts-*.json"))) == nodes:
            return None
        if time.monotonic() - asked_at >= 4 * POLL_S:
            asked_at = time.monotonic()
            job = _seen(job_id)
            if job is None:
                return None
            waiting = (JobState.PENDING, JobState.HELD, JobState.UNKNOWN)
            started = started or state_of(job.state, job.reason) not in waiting
            if not started:
                say(f"the test job {job_id} waits in the queue: {job.reason} ({time.monotonic() - begun:.0f} s)")
                if why := hopeless(job.reason):
                    return problem("job", f"the test job will never start: {why}")
                if time.monotonic() - begun > wait_s:
                    text = f"the test job did not start within {wait_s:.0f} s ({job.reason})"
                    return warning("job", text, "--wait SECONDS waits longer, --no-job leaves it out")
            else:
                say(f"the test job {job_id} runs on {job.nodes or 'its nodes'}")
        time.sleep(POLL_S / 5 if started else POLL_S)


def _seen(job_id: str) -> SlurmJob | None:
    """The job as squeue lists it; None once it has ended."""
    try:
        found = parse_squeue(call(["squeue", "-h", "-j", job_id, "-o", SQUEUE_FORMAT], 20))
    except (ClusterAway, ValueError):  # nobody knows, so it may be there
        return SlurmJob(job_id, "UNKNOWN", "squeue does not say", "", "", "")
    except ClusterError:
        return None
    return found[0] if found else None


def _end(job_id: str, name: str) -> None:
    """No job is left, also where nobody knows whether there is one."""
    with contextlib.suppress(ClusterError):
        call(["scancel", job_id] if job_id else ["scancel", f"--name={name}", f"--user={os.getuid()}"], 20)
    end = time.monotonic() + 10
    while job_id and _seen(job_id) is not None and time.monotonic() < end:
        time.sleep(POLL_S)


def _local(asked: Asked, say: Say) -> Iterator[Finding]:
    """The same of this machine, where it makes sense."""
    profile = asked.profile
    try:
        backend_of(profile).check(asked.config)
        yield ok("shape", "this machine can run it")
    except ClusterError as error:
        yield problem("shape", str(error))
    with _folder(replace(asked, given=True)) as (folder, findings):
        yield from findings
        if folder is None or not asked.job:
            return
        marks = _request(asked, folder, meet=False)
        environment = job_environment(os.environ, profile.keep_environment)
        if code := code_root():
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (code, environment.get("PYTHONPATH"))))
        if profile.vllm_python:
            environment["SLIPSTREAM_VLLM_PYTHON"] = profile.vllm_python
        say("looking at the interpreters")
        command = [sys.executable, "-m", "cluster.doctor_node", str(folder)]
        script = "\n".join(["set -e", "umask 077", *profile.setup, 'exec "$@"'])
        done = subprocess.run(
            ["/bin/bash", "-c", script, "bash", *command], env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            yield problem(
                "job", f"the test process failed: {done.stderr.strip()[-400:]}", "look at `setup` of the profile"
            )
            return
        facts = json.loads((folder / "facts-0.json").read_text())
        asked_gpus = sum(shape.gpus for shape in asked.shapes.values())
        facts["bound"] = asked_gpus if facts["learner"].get("gpus") is None else facts["learner"]["gpus"]
        yield from judge_nodes(profile, [facts], asked_gpus, marks, asked.need_vllm)
