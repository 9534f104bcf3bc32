"""The process group between two real processes, over gloo."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from slipstream.serving.group import GroupError, ProcessGroup, Rendezvous, address_towards

CPU = torch.device("cpu")
HOST = "127.0.0.1"
PATIENCE_S = 120.0


def member(port: int, behaviour: str, result: Any) -> None:
    group = ProcessGroup(Rendezvous.join(HOST, port, PATIENCE_S), 1, 2, CPU)
    result.put("joined")
    if behaviour == "wait":
        signal.pause()
    try:
        tensor = torch.empty(1000)
        group.broadcast(tensor)
        result.put(float(tensor.sum()))
        group.broadcast(torch.empty(1000))
    except GroupError as error:
        result.put(f"error: {error}")


@pytest.fixture
def start_member() -> Iterator[Callable[[int, str], tuple[Any, Any]]]:
    context = multiprocessing.get_context("spawn")
    started = []

    def start(port: int, behaviour: str) -> tuple[Any, Any]:
        result = context.Queue()
        process = context.Process(target=member, args=(port, behaviour, result), daemon=True)
        process.start()
        started.append(process)
        return process, result

    yield start
    for process in started:
        process.kill()
        process.join(30)


def test_a_broadcast_arrives_and_closing_ends_the_wait_of_the_other(
    start_member: Callable[[int, str], tuple[Any, Any]],
) -> None:
    rendezvous = Rendezvous.host(HOST, PATIENCE_S)
    _, result = start_member(rendezvous.port, "receive")
    group = ProcessGroup(rendezvous, 0, 2, CPU)
    group.broadcast(torch.full((1000,), 0.5))
    assert result.get(timeout=PATIENCE_S) == "joined"
    assert result.get(timeout=PATIENCE_S) == 500.0
    group.close()
    assert "a peer left the group" in result.get(timeout=PATIENCE_S)
    with pytest.raises(GroupError, match="closed"):
        group.broadcast(torch.zeros(1))


def test_a_peer_that_dies_is_an_error(start_member: Callable[[int, str], tuple[Any, Any]]) -> None:
    rendezvous = Rendezvous.host(HOST, PATIENCE_S)
    process, result = start_member(rendezvous.port, "wait")
    group = ProcessGroup(rendezvous, 0, 2, CPU)
    assert result.get(timeout=PATIENCE_S) == "joined"
    process.kill()
    process.join(30)
    with pytest.raises(GroupError, match="left"):
        group.broadcast(torch.zeros(10_000_000))


def test_a_peer_that_stalls_is_an_error_within_the_bound(start_member: Callable[[int, str], tuple[Any, Any]]) -> None:
    rendezvous = Rendezvous.host(HOST, PATIENCE_S)
    process, result = start_member(rendezvous.port, "wait")
    group = ProcessGroup(rendezvous, 0, 2, CPU)
    assert result.get(timeout=PATIENCE_S) == "joined"
    os.kill(process.pid, signal.SIGSTOP)
    group.timeout_s = 0.5
    with pytest.raises(GroupError, match=r"within 0\.5 s"):
        group.broadcast(torch.zeros(10_000_000))


def test_a_peer_that_never_comes_is_an_error() -> None:
    with pytest.raises(GroupError, match="1 of 2 members did not join"):
        ProcessGroup(Rendezvous.host(HOST, 0.3), 0, 2, CPU)


def test_what_the_check_raises_ends_the_wait() -> None:
    class Refused(Exception):
        pass

    def check() -> None:
        raise Refused

    with pytest.raises(Refused):
        ProcessGroup(Rendezvous.host(HOST, 60), 0, 2, CPU, check=check)


def test_nobody_there_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))  # bound but not listening: connections are refused
        with pytest.raises(GroupError, match="cannot reach the trainer"):
            Rendezvous.join(HOST, taken.getsockname()[1], 0.5)


def test_the_store_listens_on_the_named_interface_only() -> None:
    rendezvous = Rendezvous.host(HOST, 5)
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == rendezvous.port
    }
    assert listening == {HOST}


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(GroupError, match=r"cannot listen on '192\.0\.2\.1'"):
        Rendezvous.host("192.0.2.1", 5)


def test_the_own_address_towards_loopback_is_loopback() -> None:
    assert address_towards(HOST, 1) == HOST
