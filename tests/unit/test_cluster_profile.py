"""Cluster profiles, the environment of jobs, devices."""

from pathlib import Path

import pytest

from cluster.environment import job_environment, local_devices
from cluster.profile import ClusterError, load_profile, profile_names


def test_the_shipped_profiles_load() -> None:
    assert profile_names() == ["local", "slurm"]
    assert load_profile("local").executor == "local"
    assert load_profile("slurm").executor == "slurm"


def test_a_profile_is_found_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('executor = "slurm"\npartition = "gpu"\nsbatch = ["--exclusive", "--reservation=mine"]\n')
    assert load_profile(str(path)).partition == "gpu"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("executor = 1", "executor = 1"),
        ('executor = "pbs"', "'local' or 'slurm'"),
        ('executor = "slurm"\npartitoin = "gpu"', "partitoin"),
        ('executor = "slurm"\npartition = "a b"', "partition = 'a b'"),
        ('executor = "slurm"\ntime_limit = 0', "time_limit = 0"),
        ('executor = "slurm"\nsbatch = ["exclusive"]', "sbatch.0 = 'exclusive'"),
        ('executor = "local"\npartition = "gpu"', "partition is set but"),
        ("executor =", "not readable TOML"),
        ("", "executor"),
    ],
)
def test_a_faulty_profile_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "faulty.toml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=r"cluster\.profile = ") as caught:
        load_profile(str(path))
    assert words in str(caught.value)


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ClusterError, match="Known profiles: local, slurm"):
        load_profile("mycluster")


def test_secrets_and_foreign_launchers_stay_out_of_a_jobs_environment() -> None:
    environment = {
        "PATH": "/bin", "HF_TOKEN": "a", "WANDB_API_KEY": "b", "AWS_SECRET_ACCESS_KEY": "c", "DB_PASSWORD": "d",
        "PREFECT_API_AUTH_STRING": "e", "PREFECT_API_URL": "f", "SLURM_JOB_ID": "7", "RANK": "3", "SUBMITIT_EXECUTOR": "x",
        "TOKENIZERS_PARALLELISM": "false", "CUDA_HOME": "/cuda", "SSH_AUTH_SOCK": "/s", "RANKING": "1",
    }  # fmt: skip
    plain = {"PATH", "TOKENIZERS_PARALLELISM", "CUDA_HOME", "SSH_AUTH_SOCK", "RANKING"}
    assert set(job_environment(environment)) == plain
    assert set(job_environment(environment, ["HF_TOKEN"])) == plain | {"HF_TOKEN"}


def test_devices_are_disjoint_and_come_from_the_visible_ones() -> None:
    assert local_devices({"server": 1, "learner": 2}, "4,5,6,7") == {"server": "4", "learner": "5,6"}
    assert local_devices({"server": 1, "learner": 1}, None) == {"server": "0", "learner": "1"}
    assert local_devices({"server": 0, "learner": 0}, "") == {"server": "", "learner": ""}
    with pytest.raises(ValueError, match="server 1 \\+ learner 2"):
        local_devices({"server": 1, "learner": 2}, "0,1")
