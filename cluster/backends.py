"""placeholder until the cluster layer is merged"""

import os
from pathlib import Path

from cluster import submit as submission
from cluster.backend import Backend
from cluster.jobs import record_job, unrecorded_jobs
from cluster.local_jobs import cancel_jobs, job_processes, job_view
from cluster.submit import check_profile, job_log
from slipstream.process import INCARNATION_ENV


class LocalBackend:
    def __init__(self, profile):
        self.profile = profile

    def check(self, config):
        check_profile(self.profile, config)

    def submit(self, run, request):
        old = submission.new_incarnation
        submission.new_incarnation = lambda: request.incarnation
        os.environ[INCARNATION_ENV] = request.incarnation
        try:
            return submission.submit(
                self.profile, run, request.role, request.attempt, request.config, cwd=request.cwd, why=request.why
            )
        finally:
            submission.new_incarnation = old
            del os.environ[INCARNATION_ENV]

    def look(self, run, jobs):
        return {job.incarnation: job_view(run, job) for job in jobs}

    def adopt(self, run):
        found = []
        for job in unrecorded_jobs(run):
            if job_processes(job):
                record_job(run, job)
                found.append(job)
            else:
                path = run.path / "intents" / f"{job.attempt}-{job.role}-{job.incarnation}.json"
                path.rename(path.with_suffix(".void"))
        return found

    def cancel(self, run, jobs, kill_after_s=5.0):
        return cancel_jobs(jobs, kill_after_s)

    def log(self, run, job) -> Path:
        return job_log(run, job)


def backend_of(profile) -> Backend:
    return LocalBackend(profile)
