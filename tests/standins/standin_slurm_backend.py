"""The SLURM backend from a shell: run as an unprivileged user on the login machine of a bed.

`python standin_slurm_backend.py COMMAND '{"run": FOLDER, …}'` prints a JSON value.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster import entry
from cluster.backend import JobRequest
from cluster.backends import backend_of
from cluster.jobs import JobRecord, read_jobs
from cluster.profile import ClusterError, ClusterProfile
from slipstream.config_file import parse_config
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder


def config_of(given: dict[str, Any]) -> RunConfig:
    sections: dict[str, Any] = {
        "model": {"name": "m"},
        "data": {"source": "d"},
        "server": {"gpus": 0},
        "learner": {"gpus": 0},
    }
    for key, value in given.get("config", {}).items():
        sections[key] = {**sections.get(key, {}), **value}
    return parse_config(sections)


def jobs_of(run: RunFolder) -> list[JobRecord]:
    return [job for attempt in run.attempts() for job in read_jobs(run, attempt)]


def main(command: str, given: dict[str, Any]) -> Any:
    if command == "create":
        run = RunFolder.create(Path(given["run"]).parent, Path(given["run"]).name)
        run.run_file.write_text("")
        run.begin_attempt(None, 0)
        return run.token_file.read_text().strip()
    run = RunFolder(given["run"])
    profile = ClusterProfile(**{"executor": "slurm", "client_timeout": 20, **given.get("profile", {})})
    backend = backend_of(profile, poll_s=given.get("poll_s", 0.2))
    if command == "submit":
        for role, leader in given.get("leaders", {}).items():
            entry.LEADERS[role] = leader
        if given.get("die"):  # between sbatch and the record
            import cluster.slurm_backend

            cluster.slurm_backend.record_job = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        config = config_of(given)
        if not given.get("unchecked"):
            backend.check(config)
        exclude = tuple(given.get("exclude", ()))
        request = JobRequest(given["role"], 1, given["incarnation"], config, Path.cwd(), "test", exclude)
        return asdict(backend.submit(run, request))
    if command == "check":
        backend.check(config_of(given))
        return "possible"
    if command == "look":
        return {key: asdict(view) for key, view in backend.look(run, jobs_of(run)).items()}
    if command == "adopt":
        return [asdict(job) for job in backend.adopt(run)]
    if command == "cancel":
        return [job.incarnation for job in backend.cancel(run, jobs_of(run), given.get("kill_after_s", 5.0))]
    raise SystemExit(f"no such command: {command}")


if __name__ == "__main__":
    try:
        print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
    except ClusterError as error:
        print(json.dumps({"error": type(error).__name__, "words": str(error)}))
