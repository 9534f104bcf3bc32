"""What is refused before anything is allocated, with clients that are functions here; the words are SLURM 22.05's."""

from typing import Any

import pytest

import cluster.refusals
from cluster.clients import ClusterAway
from cluster.profile import ClusterError, ClusterProfile
from cluster.refusals import refusals
from cluster.slurm_backend import SlurmBackend
from slipstream.config_file import parse_config

PARTITION = "PartitionName=main Default=YES MaxNodes=4 MaxTime=1-00:00:00 State={state} PriorityTier=1"
NODES = "".join(f"n{i} gpu:8\n" for i in range(1, 7))
NO_NODES = ClusterError("`sbatch` failed: allocation failure: Requested node configuration is not available")
FEATURE = ClusterError("`sbatch` failed: allocation failure: Invalid feature specification")
AWAY = ClusterAway("`sbatch` did not answer within 60 s")


class Slurm:
    """Stands for the clients; `refused`: what sbatch says of a role's batch file."""

    def __init__(
        self, refused: dict[str, Exception], states: str | Exception, state: str, gres: str | Exception
    ) -> None:
        self.refused, self.states, self.state, self.gres = refused, states, state, gres
        self.calls: list[str] = []

    def __call__(self, argv: list[str], timeout_s: float) -> str:
        self.calls.append(argv[0])
        answer: str | Exception = ""
        if argv[0] == "scontrol":
            answer = PARTITION.format(state=self.state)
        elif argv[0] == "sinfo":
            answer = self.states if argv[-1] == "%N|%T" else self.gres
        elif argv[0] == "sbatch":
            assert argv[1] == "--test-only"
            answer = self.refused.get(argv[2].rpartition("/")[2].removesuffix(".sh"), "")
        if isinstance(answer, Exception):
            raise answer
        return answer


def ask(
    monkeypatch: pytest.MonkeyPatch,
    refused: dict[str, Exception] | None = None,
    states: str | Exception = "n1|idle\nn2|allocated",
    state: str = "UP",
    gres: str | Exception = NODES,
    profile: dict[str, Any] | None = None,
    learner: dict[str, Any] | None = None,
    shape: str = "separate",
) -> tuple[list[str], list[str]]:
    slurm = Slurm(refused or {}, states, state, gres)
    monkeypatch.setattr(cluster.refusals, "call", slurm)
    sections = {"model": {"name": "m"}, "data": {"source": "d"}, "cluster": {"shape": shape}}
    config = parse_config({**sections, "learner": learner or {}})
    return refusals(ClusterProfile(executor="slurm", **(profile or {})), config), slurm.calls


def test_each_role_is_asked_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch) == ([], ["scontrol", "sinfo", "sbatch", "sbatch"])
    assert ask(monkeypatch, shape="one_allocation") == ([], ["scontrol", "sinfo", "sbatch"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"refused": {"learner": FEATURE}, "profile": {"constraint": "h9"}}, ["learner's job", "`constraint` ('h9')"]),
        ({"refused": {"server": ClusterError("Invalid account or account/partition combination specified")}},
         ["the server's job", "`account` (not set)"]),
        ({"refused": {"learner": NO_NODES}}, ["the learner's job", "learner.nodes, learner.gpus", "`cpus_per_task`"]),
        ({"refused": {"learner": NO_NODES}, "profile": {"qos": "high"}}, ["the learner's job"]),
        ({"learner": {"nodes": 5}}, ["the learner needs 5 nodes, main gives a job 4", "choose another `partition`"]),
        ({"learner": {"gpus": 9, "processes_per_node": 9}}, ["1 node with 9 GPUs, main has 0"]),
        ({"profile": {"time_limit": 2000}}, ["time_limit = 2000 min, but main allows 1440", "lower `time_limit`"]),
    ],
)  # fmt: skip
def test_refused(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], words: list[str]) -> None:
    found, _ = ask(monkeypatch, **given)
    assert len(found) == 1
    assert all(word in found[0] for word in words), found


@pytest.mark.parametrize(
    "given",
    [
        {"refused": {"server": AWAY, "learner": FEATURE}},
        {"gres": AWAY},
        {"refused": {"learner": NO_NODES}, "states": "n1|idle\nn2|drained"},
        {"refused": {"learner": NO_NODES}, "states": "n1|down*\nn2|mixed"},
        {"refused": {"learner": NO_NODES}, "states": AWAY},
        {"refused": {"learner": NO_NODES}, "states": ""},
        {"state": "DOWN"},  # jobs queue until it is up
        {"gres": "", "learner": {"nodes": 5}},  # nodes that are hidden tell nothing
        {"profile": {"qos": "high", "time_limit": 2000}},  # which may lift the partition's limits
        {"profile": {"partition": "other", "time_limit": 2000}},  # sbatch has the words
    ],
)
def test_what_may_still_start_is_not_refused(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    assert ask(monkeypatch, **given)[0] == []


def test_the_backend_names_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.slurm_backend.shutil.which", lambda client: client)
    monkeypatch.setattr(cluster.refusals, "call", Slurm({"learner": FEATURE}, "n1|idle", "UP", NODES))
    config = parse_config({"model": {"name": "m"}, "data": {"source": "d"}, "cluster": {"profile": "gpu"}})
    with pytest.raises(
        ClusterError, match=r"cluster.profile = 'gpu': SLURM would refuse the learner's job.*Invalid feature"
    ):
        SlurmBackend(ClusterProfile(executor="slurm")).check(config)
