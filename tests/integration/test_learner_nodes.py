"""A learner of two nodes: two leaders on two loopback addresses, the real torchrun and real ranks between them."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from slipstream.run_folder import RunFolder, read_json
from tests.learner_nodes import exit_of, leaders, nodes_run
from tests.learner_process import step_of
from tests.serving_process import wait_for
from tests.standins.replayed_learner import PAUSE_ENV

pytestmark = pytest.mark.integration

SLOW = {PAUSE_ENV: "0.2"}
LONG = 10_000


def result(run: RunFolder) -> dict[str, object]:
    found = read_json(run.path / "result.json")
    assert isinstance(found, dict), (exit_of(run, 0), exit_of(run, 1))
    return found


def train(run: RunFolder, nodes: int) -> dict[str, object]:
    with leaders(run, nodes) as started:
        for leader in started:
            leader.wait(300)
    for node in range(nodes):
        record = exit_of(run, node)
        assert record is not None
        assert (record["returncode"], record["reason"]) == (0, "finished"), record["last_lines"]
    return result(run)


def ranks_of(leader: subprocess.Popen[bytes]) -> list[psutil.Process]:
    family = psutil.Process(leader.pid).children(recursive=True)
    found = [p for p in family if "tests.standins.replayed_learner" in p.cmdline() and "RANK" in p.environ()]
    assert found
    return [p for p in found if "slipstream.learner.torchrun" not in p.cmdline()]


def listening(process: psutil.Process) -> set[str]:
    family = [process, *process.children(recursive=True)]
    return {c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}


def test_two_nodes_train_as_one_does_and_each_leaves_its_own_record_and_log(tmp_path: Path) -> None:
    one = train(nodes_run(tmp_path / "one", "one", nodes=1, ranks=2), 1)
    run = nodes_run(tmp_path / "two", "two", nodes=2, ranks=1)
    two = train(run, 2)
    assert two["steps"] == 4
    assert len(two["losses"]) == 4  # type: ignore[arg-type]
    assert two["losses"] == one["losses"]
    assert two["norms"] == one["norms"]
    roles = [exit_of(run, node)["role"] for node in (0, 1)]  # type: ignore[index]
    assert roles == ["learner", "learner.1"]
    assert run.log_file("learner", 1).is_file()
    assert (run.logs / "learner-1-n1.log").is_file()


def test_two_learners_of_two_nodes_at_once_on_one_machine_keep_apart_and_to_their_ports(tmp_path: Path) -> None:
    runs = [nodes_run(tmp_path / name, "same-id", nodes=2, ranks=1) for name in ("a", "b")]
    ports = {"SLIPSTREAM_PORTS": "23450-23489"}
    with leaders(runs[0], 2, **ports) as first, leaders(runs[1], 2, **ports) as second:
        for leader in (*first, *second):
            leader.wait(300)
    met = [read_json(next((run.path / "endpoints").glob("meeting-*.json"))) for run in runs]
    assert {meeting["host"] for meeting in met} == {"127.0.0.1"}
    assert len({meeting["port"] for meeting in met}) == 2
    assert all(23450 <= meeting["port"] <= 23489 for meeting in met)
    assert result(runs[0])["losses"] == result(runs[1])["losses"]


def test_the_death_of_one_nodes_leader_ends_the_other_which_names_it(tmp_path: Path) -> None:
    """Of the node that holds the store; the other node's leader dies in `tests/slurm/test_multinode_bed.py`."""
    victim = 0
    run = nodes_run(tmp_path, "killed", nodes=2, ranks=1, max_steps=LONG)
    with leaders(run, 2, **SLOW) as started:
        wait_for(lambda: step_of(run) >= 2, "the second step")
        other = started[1 - victim]
        assert listening(psutil.Process(other.pid)) <= {"127.0.0.1", "127.0.0.2"}
        family = [p for leader in started for p in psutil.Process(leader.pid).children(recursive=True)]
        assert len(family) >= 4
        started[victim].kill()
        wait_for(lambda: other.poll() is not None, "the end of the other leader")
        assert other.returncode != 0
    wait_for(lambda: not any(p.is_running() for p in family), "the end of every process")
    assert exit_of(run, victim) is None, "it was killed"
    record = exit_of(run, 1 - victim)
    assert record is not None
    assert f"the leader of node {victim} died without a word" in record["reason"]
    assert record["reason"].startswith("node ")


def test_a_rank_killed_on_one_node_is_named_by_both(tmp_path: Path) -> None:
    run = nodes_run(tmp_path, "rank", nodes=2, ranks=1, max_steps=LONG)
    with leaders(run, 2, **SLOW) as started:
        wait_for(lambda: step_of(run) >= 2, "the second step")
        for rank in ranks_of(started[1]):
            rank.send_signal(signal.SIGKILL)
        wait_for(lambda: all(leader.poll() is not None for leader in started), "the end of both leaders")
    first, second = exit_of(run, 1), exit_of(run, 0)
    assert first is not None
    assert second is not None
    assert first["reason"].startswith("rank 1 was ended by SIGKILL")
    assert second["reason"].startswith("node 1 (")
    assert "rank 1 was ended by SIGKILL" in second["reason"]
    assert first["returncode"] != 0
    assert second["returncode"] != 0


def test_a_stop_of_one_node_stops_the_other(tmp_path: Path) -> None:
    run = nodes_run(tmp_path, "stopped", nodes=2, ranks=1, max_steps=LONG)
    with leaders(run, 2, **SLOW) as started:
        wait_for(lambda: step_of(run) >= 2, "the second step")
        started[1].send_signal(signal.SIGINT)  # TERM would let all of them save and leave
        wait_for(lambda: all(leader.poll() is not None for leader in started), "the end of both leaders")
    record = exit_of(run, 0)
    assert record is not None
    assert record["reason"].startswith("node 1 (")
    assert "stopped by SIGINT" in record["reason"]


def test_a_node_that_never_comes_is_named(tmp_path: Path) -> None:
    run = nodes_run(tmp_path, "alone", nodes=2, ranks=1, startup_timeout=2)
    with leaders(run, 2, started_on=[0]) as (leader,):
        leader.wait(60)
    record = exit_of(run, 0)
    assert record is not None
    assert "these did not come within learner.startup_timeout = 2 s: 1" in record["reason"]
