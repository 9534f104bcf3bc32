import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.serving.control import ServerControl, ServerError
from slipstream.serving.transport import ParameterInfo, TransferError, checked, make_transport

CPU = torch.device("cpu")
ANNOUNCED = [ParameterInfo("a", torch.float32, (2, 3)), ParameterInfo("b", torch.float32, (4,))]
A, B = ("a", torch.zeros(2, 3)), ("b", torch.zeros(4))


@pytest.fixture
def nobody() -> Iterator[ServerControl]:
    """Control of a server that is not there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with ServerControl(f"http://127.0.0.1:{taken.getsockname()[1]}", None, 5) as control:
            yield control


def test_what_was_announced_passes() -> None:
    assert [p.name for p, _ in checked(ANNOUNCED, iter([A, B]))] == ["a", "b"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([A], "b did not come"),
        ([A, B, ("c", torch.zeros(1))], "more tensors than the 2 announced: c"),
        ([B, A], r"got b \(4,\) where a \(2, 3\) was announced"),
        ([("a", torch.zeros(3, 2)), B], r"got a \(3, 2\) where a \(2, 3\)"),
    ],
)
def test_anything_else_is_refused(tensors: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(checked(ANNOUNCED, iter(tensors)))


def test_sending_without_a_connection_is_refused(nobody: ServerControl) -> None:
    transport = make_transport(nobody, "slipstream", CPU, "run", 1, 5)
    with pytest.raises(TransferError, match="connect"):
        transport.send(ANNOUNCED, iter([A, B]), "run/a1/0")


def test_connecting_to_nobody_names_the_phase(nobody: ServerControl) -> None:
    transport = make_transport(nobody, "slipstream", CPU, "run", 1, 5)
    with pytest.raises(TransferError, match="'attach'") as caught:
        transport.connect()
    assert caught.value.phase == "attach"
    transport.close()


def test_nobody_is_an_error_that_may_pass(nobody: ServerControl) -> None:
    with pytest.raises(ServerError) as caught:
        nobody.pause()
    assert (caught.value.route, caught.value.status, caught.value.permanent) == ("/pause", None, False)


def test_a_dead_process_ends_the_wait_for_health(nobody: ServerControl) -> None:
    with pytest.raises(ServerError, match="ended before it was healthy"):
        nobody.wait_healthy(600, alive=lambda: False)


def test_the_nccl_backend_says_what_it_needs(nobody: ServerControl) -> None:
    with pytest.raises(RuntimeError, match="needs a GPU"):
        make_transport(nobody, "nccl", CPU, "run", 1, 5)


def test_another_backend_is_refused(nobody: ServerControl) -> None:
    with pytest.raises(ValueError, match="'ipc' is not supported"):
        make_transport(nobody, "ipc", CPU, "run", 1, 5)  # type: ignore[arg-type]
