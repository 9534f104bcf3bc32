"""The nodes of a job: where this one stands, what it may listen on, what became of the others."""

import socket
from pathlib import Path

import pytest

from slipstream import nodes
from slipstream.nodes import (
    CAUSE_S,
    LEAVE_S,
    PEER_SILENT_S,
    NodeError,
    Peers,
    Place,
    allowed_ports,
    free_port,
    interface_of,
    network_environment,
    node_role,
    open_listener,
)
from slipstream.process import write_exit
from slipstream.run_folder import RunFolder, write_json

NAMES = ("SLIPSTREAM_NODE_RANK", "SLIPSTREAM_NODES", "SLIPSTREAM_HOST", "SLIPSTREAM_INCARNATION", "SLIPSTREAM_PORTS")
SECOND = {
    "SLIPSTREAM_NODE_RANK": "1",
    "SLIPSTREAM_NODES": "2",
    "SLIPSTREAM_HOST": "127.0.0.2",
    "SLIPSTREAM_INCARNATION": "abc",
}


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def set_environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_by_hand_there_is_one_node_on_loopback() -> None:
    place = Place.here(1)
    assert (place.node, place.nodes, place.host) == (0, 1, "127.0.0.1")
    assert place.incarnation != Place.here(1).incarnation
    assert network_environment(place) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_a_further_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_environment(monkeypatch, **SECOND)
    place = Place.here(2)
    assert place == Place(1, 2, "127.0.0.2", "abc")
    assert place.role("learner") == "learner.1"
    run = RunFolder(tmp_path)
    assert place.log_file(run, "learner", 3).name == "learner-3-n1.log"
    assert Place(0, 2, "", "").log_file(run, "learner", 3) == run.log_file("learner", 3)


@pytest.mark.parametrize(
    ("changes", "wanted", "words"),
    [
        ({}, 3, "the run wants 3 nodes"),
        ({"SLIPSTREAM_NODES": "two"}, 2, "'two'"),
        ({"SLIPSTREAM_NODE_RANK": "2"}, 2, "from 0 to 1"),
        ({"SLIPSTREAM_HOST": ""}, 2, "SLIPSTREAM_HOST not set"),
        ({"SLIPSTREAM_INCARNATION": ""}, 2, "SLIPSTREAM_INCARNATION not set"),
    ],
)
def test_an_environment_that_contradicts_itself(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], wanted: int, words: str
) -> None:
    set_environment(monkeypatch, **{**SECOND, **changes})
    with pytest.raises(NodeError, match=words):
        Place.here(wanted)


def test_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == "lo"
    with pytest.raises(NodeError, match=r"192\.0\.2\.1.*no address of this node"):
        interface_of("192.0.2.1")
    place = Place(1, 2, "127.0.0.2", "abc")
    assert network_environment(place) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allowed_ports() is None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        set_environment(monkeypatch, SLIPSTREAM_PORTS=f"{port}-{port}")
        with pytest.raises(OSError, match="in use"):
            open_listener("127.0.0.1")
        with open_listener("127.0.0.2") as listener:
            assert listener.getsockname() == ("127.0.0.2", port)
    assert free_port("127.0.0.1") == port


@pytest.mark.parametrize("text", ["80-90", "2000", "30000-20000", "20000-70000", "a-b"])
def test_impossible_ports(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    set_environment(monkeypatch, SLIPSTREAM_PORTS=text)
    with pytest.raises(NodeError, match=text):
        allowed_ports()


class Others:
    """Node 0 of three watches the others."""

    def __init__(self, root: Path) -> None:
        self.run = RunFolder.create(root, "run")
        place = Place(0, 3, "127.0.0.1", "now")
        self.peers = Peers(self.run, place, lambda n: node_role("learner", n), [1, 2], {1: "n1", 2: "n2"})

    def beat(self, node: int, counter: int, incarnation: str = "now") -> None:
        value = {"counter": counter, "incarnation": incarnation, "host": f"host{node}"}
        write_json(self.run.heartbeat_file(f"n{node}"), value)

    def end(self, node: int, code: int, reason: str, incarnation: str = "now") -> None:
        write_exit(self.run, node_role("learner", node), incarnation, 1, code, reason, Path("x.log"))


@pytest.fixture
def others(tmp_path: Path) -> Others:
    return Others(tmp_path)


def test_who_is_missing(others: Others) -> None:
    others.beat(1, 1)
    others.beat(2, 1, incarnation="an earlier start")
    assert others.peers.missing() == [2]
    others.beat(2, 1)
    assert others.peers.missing() == []


def test_a_failure_of_another_node_ends_this_one_at_once(others: Others) -> None:
    others.end(1, 1, "an earlier start", incarnation="before")
    assert others.peers.verdict(0.0) is None
    others.end(2, 1, "out of luck")
    code, reason = others.peers.verdict(1.0) or (0, "")
    assert code == 1
    assert reason == f"node 2 ({socket.gethostname()}) ended: out of luck"


def test_a_reason_that_blames_a_node_is_handed_on_as_it_is(others: Others) -> None:
    others.end(1, 1, "node host1: no GPU")
    assert others.peers.verdict(0.0) == (1, "node host1: no GPU")


def test_an_end_without_failure_leaves_the_others_some_time(others: Others) -> None:
    others.end(1, 0, "finished")
    assert others.peers.verdict(0.0) is None
    assert others.peers.verdict(LEAVE_S) is None
    code, reason = others.peers.verdict(LEAVE_S + 1) or (1, "")
    assert code == 0
    assert "finished" in reason


def test_a_failure_counts_more_than_an_earlier_end(others: Others) -> None:
    others.end(1, 0, "finished")
    others.end(2, 3, "out of luck")
    assert "out of luck" in (others.peers.verdict(0.0) or (0, ""))[1]


def test_a_leader_without_a_sign_is_blamed(others: Others) -> None:
    assert others.peers.verdict(0.0) is None
    assert others.peers.verdict(10 * PEER_SILENT_S) is None, "it has not come yet: another bound counts"
    begin = 20 * PEER_SILENT_S
    for node in (1, 2):
        others.beat(node, 1)
    for part in range(4):
        assert others.peers.verdict(begin + part * PEER_SILENT_S / 4) is None
    others.beat(1, 2)
    assert others.peers.verdict(begin + PEER_SILENT_S) is None
    others.beat(1, 3)
    code, reason = others.peers.verdict(begin + PEER_SILENT_S + 1) or (0, "")
    assert code == 1
    assert reason.startswith("node host2: the leader of node 2 gave no sign")


def test_after_a_pause_of_all_nodes_nobody_is_blamed(others: Others) -> None:
    """SLURM suspends whole jobs; the first to go on sees the old beats of the others."""
    for node in (1, 2):
        others.beat(node, 1)
    assert others.peers.verdict(0.0) is None
    assert others.peers.verdict(1.0) is None
    assert others.peers.verdict(7200.0) is None
    for part in range(1, 4):
        assert others.peers.verdict(7200.0 + part * PEER_SILENT_S / 4) is None
    assert others.peers.verdict(7201.0 + PEER_SILENT_S) is not None


def test_storage_that_stumbles_here_blames_nobody(others: Others) -> None:
    for node in (1, 2):
        others.beat(node, 1)
    assert others.peers.verdict(0.0) is None
    for node in (1, 2):
        others.run.heartbeat_file(f"n{node}").write_text("not JSON")
    assert others.peers.verdict(PEER_SILENT_S + 1) is None
    for node in (1, 2):
        others.beat(node, 1)
    assert others.peers.verdict(PEER_SILENT_S + 2) is None, "what it was before does not count"


def test_the_cause_of_a_failure_here(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        others.beat(1, int(clock[0] / 2) + 2)
        if with_record and clock[0] > CAUSE_S / 2:
            others.end(2, 1, "rank 1 was ended by SIGKILL")

    for node in (1, 2):
        others.beat(node, 1)
    monkeypatch.setattr(nodes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(nodes.time, "sleep", sleep)
    with_record = False
    assert others.peers.cause(lambda: True) is None, "there is no time to look"
    code, reason = others.peers.cause() or (0, "")
    assert code == 1
    assert reason.startswith("node host2: the leader of node 2 died without a word")
    with_record = True
    clock[0] = 0.0
    assert "rank 1 was ended by SIGKILL" in (others.peers.cause() or (0, ""))[1]
