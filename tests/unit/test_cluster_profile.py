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
        ('executor = "slurm"\npartitoin = "gpu"', "did you mean partition?"),
        ('executor = "slurm"\npartition = "a\\u001b[31m"', "partition holds a control character"),
        ('executor = "slurm"\npython = "/a\\n#SBATCH --x"', "python holds a control character"),
        ('executor = "slurm"\nmemory_gb = 0.0001', "memory_gb = 0.0001"),  # --mem=0 would be all memory
        ('executor = "slurm"\nmemory_gb = inf', "memory_gb = inf"),
        ('executor = "slurm"\ntime_limit = true', "time_limit = True"),
        ('executor = "slurm"\nexclusive = "yes"', "exclusive = 'yes'"),
        ('executor = "slurm"\nsetup = "module load cuda"', "setup: must be a list"),
        ('executor = "slurm"\nsetup = ["echo \'open"]', "setup is no shell text: line 1"),
        ('executor = "slurm"\nsetup = ["cat <<EOF"]', "setup is no shell text: line 1"),
        ('executor = "slurm"\nsbatch = ["--tim=5"]', "--tim=5 is not for the profile to set"),
        ('executor = "slurm"\nsbatch = ["--gres=a:1", "--gres=b:1"]', "--gres stands twice"),
        ('executor = "slurm"\npartition = "a"\nsbatch = ["--partition=b"]', "leave one out"),
        ('executor = "slurm"\nsbatch = ["--clusters=other"]', "SLURM_CLUSTERS"),
        ('executor = "slurm"\nkeep_environment = ["A=B"]', "keep_environment.0 = 'A=B'"),
        ("a = " + 3000 * "[", "not readable TOML"),
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


@pytest.mark.parametrize(
    "text",
    [
        'setup = ["export HF_TOKEN=hunter2"]',
        'setup = "export HF_TOKEN=hunter2"',
        'setup = ["export A=hunter2"]\nsignal_lead = 86400',
    ],
)
def test_a_refusal_repeats_no_line_of_the_setup(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret.toml"
    path.write_text(f'executor = "slurm"\n{text}\n')
    with pytest.raises(ClusterError) as caught:
        load_profile(str(path))
    assert "hunter2" not in str(caught.value)


def test_what_sbatch_takes_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    setup = 'setup = ["export HF_TOKEN=$(cat ~/token)", "export HF_TOKEN_PATH=/a", "if true; then\\n  x=1\\nfi"]'
    path.write_text(f'executor = "slurm"\nconstraint = "[rack1|rack2]&h100"\npartition = ""\n{setup}\n')
    profile = load_profile(str(path))
    assert (profile.constraint, profile.partition) == ("[rack1|rack2]&h100", None)


def test_a_folder_and_a_file_nobody_may_read_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="is a folder"):
        load_profile(f"{tmp_path}/")


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
