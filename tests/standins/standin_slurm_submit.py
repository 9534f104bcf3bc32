"""Run as an unprivileged user on the login machine: submits a function with submitit's SLURM executor, prints its result.

`python standin_slurm_submit.py FOLDER` (submitit's logs and pickles).
"""

import json
import os
import socket
import sys

import submitit


def where(word: str) -> dict[str, object]:
    """What a job sees."""
    return {
        "word": word,
        "uid": os.getuid(),
        "host": socket.gethostname(),
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "rank": submitit.JobEnvironment().global_rank,
    }


def main() -> None:
    executor = submitit.SlurmExecutor(folder=sys.argv[1], python=sys.executable)
    executor.update_parameters(nodes=2, ntasks_per_node=1, gpus_per_node=2, time=5, job_name="standin")
    print(json.dumps(executor.submit(where, "hello").results()))


if __name__ == "__main__":
    main()
