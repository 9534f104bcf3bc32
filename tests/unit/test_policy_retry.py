"""What is tried again of steering the server and delivering to it, and what is not."""

import socket
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn

import slipstream.learner.sync as sync_module
from slipstream.learner.sync import AGAIN, DONE, PolicySync
from slipstream.serving import control as control_module
from slipstream.serving.control import ServerControl, ServerError
from slipstream.serving.delivery import TransferError, close_delivery, failure
from slipstream.serving.group import GroupError, GroupTimeout
from slipstream.serving.transport import SyncTimes
from tests.fault_proxy import FaultProxy
from tests.steering_server import SteeringServer


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "REPEAT_DELAYS_S", (0.01,) * 4)
    monkeypatch.setattr(sync_module, "RETRY_DELAYS_S", (0.01,) * 4)


@pytest.fixture
def server() -> Iterator[SteeringServer]:
    with SteeringServer() as server:
        yield server


Faulty = Callable[..., tuple[ServerControl, FaultProxy]]


@pytest.fixture
def faulty(server: SteeringServer) -> Iterator[Faulty]:
    """A control whose requests meet the named faults, and the proxy that makes them."""
    opened: list[ServerControl | FaultProxy] = []

    def make(timeout_s: float = 30.0, **named: list[str]) -> tuple[ServerControl, FaultProxy]:
        proxy = FaultProxy(server.url, named={f"/{route}": list(faults) for route, faults in named.items()})
        proxy.__enter__()
        control = ServerControl(proxy.url, None, timeout_s)
        opened.extend([control, proxy])
        return control, proxy

    yield make
    for one in opened:
        one.__exit__(None, None, None)


REPEATED: dict[str, Callable[[ServerControl], object]] = {
    "pause": lambda control: control.pause(),
    "resume": lambda control: control.resume(),
    "is_paused": lambda control: control.is_paused(),
    "get_world_size": lambda control: control.world_size(),
    "weight_info": lambda control: control.weight_version(),
    "abort_requests": lambda control: control.abort_requests(),
    "update_weight_version": lambda control: control.set_weight_version("run/a1/3"),
}
ONCE: dict[str, Callable[[ServerControl], object]] = {
    "init_weight_transfer_engine": lambda control: control.init_weight_transfer({}),
    "start_weight_update": lambda control: control.start_weight_update(),
    "update_weights": lambda control: control.update_weights({}),
    "finish_weight_update": lambda control: control.finish_weight_update("run/a1/3"),
}


@pytest.mark.parametrize("route", REPEATED)
def test_a_call_that_may_be_made_twice_is_repeated(faulty: Faulty, server: SteeringServer, route: str) -> None:
    control, _ = faulty(**{route: ["500", "reset", "lost", "half"]})
    REPEATED[route](control)
    assert server.calls.count(f"/{route}") == 3, "its answer was lost twice, and the server did it again"


@pytest.mark.parametrize("route", ONCE)
@pytest.mark.parametrize("fault", ["503", "reset", "lost", "half"])
def test_any_other_is_made_once(faulty: Faulty, server: SteeringServer, route: str, fault: str) -> None:
    control, _ = faulty(**{route: [fault]})
    with pytest.raises(ServerError) as caught:
        ONCE[route](control)
    assert not caught.value.permanent
    assert server.calls.count(f"/{route}") == (fault in ("lost", "half"))


def test_a_refusal_is_not_repeated(faulty: Faulty, server: SteeringServer) -> None:
    control, _ = faulty()
    server.refused["/pause"] = 400
    with pytest.raises(ServerError, match="HTTP 400"):
        control.pause()
    assert server.calls == ["/pause"]


def test_all_tries_together_stay_within_the_bound(faulty: Faulty) -> None:
    control, proxy = faulty(timeout_s=0.6, pause=["silent"] * 9)
    with pytest.raises(ServerError, match=r"no answer from .* within 0.6 s") as caught:
        control.pause()
    assert caught.value.timed_out
    assert proxy.counts["/pause", "silent"] <= control_module.TRIES_IN_BOUND


def test_one_answer_that_does_not_come_is_asked_for_again(faulty: Faulty) -> None:
    control, proxy = faulty(timeout_s=3.0, pause=["silent"])
    control.pause()
    assert (proxy.counts["/pause", "silent"], proxy.counts["/pause", "passed"]) == (1, 1)


@pytest.mark.parametrize("open_before", [True, False])
@pytest.mark.parametrize("fault", ["reset", "lost", "503"])
def test_an_open_delivery_is_closed_whatever_happens_to_the_first_call(
    faulty: Faulty, server: SteeringServer, fault: str, open_before: bool
) -> None:
    control, _ = faulty(finish_weight_update=[fault])
    server.open = open_before
    closed = close_delivery(control)
    assert not server.open
    assert closed or not open_before, "one that was open is known to have been"


# ---- a delivery as a whole


class Scripted:
    """A transport that fails as told; what was called is in `calls`."""

    def __init__(self, *outcomes: BaseException | None) -> None:
        self.outcomes = list(outcomes)
        self.calls: list[str] = []
        self.sent: list[list[str]] = []

    def _next(self, name: str) -> None:
        self.calls.append(name)
        error = self.outcomes.pop(0) if self.outcomes else None
        if error is not None:
            raise error

    def connect(self, hold: bool = False) -> None:
        self._next("connect, held" if hold else "connect")

    def send(
        self, parameters: object, tensors: Iterator[tuple[str, torch.Tensor]], label: str, hold: bool = False
    ) -> SyncTimes:
        self.sent.append([name for name, _ in tensors])
        self._next(f"send {label}")
        assert hold
        return SyncTimes(0, 0, 0)

    def release(self) -> None:
        self.calls.append("release")

    def close(self) -> None:
        self.calls.append("close")


LOST = TransferError("transfer", "the answer was lost", passing=True)
SLOW = TransferError("transfer", "no answer", passing=True, timed_out=True)
REFUSED = TransferError("rendezvous", "attempt 1 is refused: attempt 2 is the newest seen")


def synced(*outcomes: BaseException | None) -> tuple[PolicySync, Scripted]:
    transport = Scripted(*outcomes)
    return PolicySync(transport, "run", 1, None, 7), transport


def test_a_broken_delivery_is_made_again_whole_under_the_same_version() -> None:
    sync, transport = synced(LOST, LOST, None, LOST)
    sync.deliver(nn.Linear(2, 2))
    send, connect = "send run/a1/7", "connect, held"
    assert transport.calls == [send, connect, connect, send, connect, send]
    assert transport.sent == [["weight", "bias"]] * 3
    assert sync.version == 7


def test_not_for_ever() -> None:
    sync, transport = synced(*[LOST, None] * 9)
    with pytest.raises(TransferError, match="the answer was lost"):
        sync.deliver(nn.Linear(2, 2))
    assert transport.calls.count("send run/a1/7") == 5
    assert transport.calls[-1] == "release", "the server is not left paused"


def test_one_that_took_its_whole_bound_is_made_once_more_only() -> None:
    sync, transport = synced(SLOW, None, SLOW)
    with pytest.raises(TransferError, match="no answer"):
        sync.deliver(nn.Linear(2, 2))
    assert transport.calls == ["send run/a1/7", "connect, held", "send run/a1/7", "release"]


def test_a_refusal_ends_it_at_once() -> None:
    sync, transport = synced(REFUSED)
    with pytest.raises(TransferError, match="newest"):
        sync.deliver(nn.Linear(2, 2))
    assert transport.calls == ["send run/a1/7"]
    sync, transport = synced(LOST, REFUSED)
    with pytest.raises(TransferError, match="newest"):
        sync.deliver(nn.Linear(2, 2))
    assert transport.calls == ["send run/a1/7", "connect, held", "release"]


class Sharded(nn.Linear):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in super().parameters(recurse):
            parameter.full_tensor = parameter.detach  # type: ignore[attr-defined]
            yield parameter


def test_a_sharded_model_is_sent_once_because_the_other_ranks_gather_it_once() -> None:
    sync, transport = synced(LOST)
    with pytest.raises(TransferError, match="lost"):
        sync.deliver(Sharded(2, 2))
    assert transport.calls == ["send run/a1/7", "release"]


# ---- a server that is replaced


GONE = TransferError("pause", "connection refused")


class Replacing:
    """A server that is gone as often as told; each attaching gives another transport."""

    def __init__(self, *transports: Scripted, lost: int = 1) -> None:
        self.transports = list(transports)
        self.losses = lost
        self.has_moved = False
        self.leaves = False
        self.deliveries = 0

    def moved(self) -> bool:
        return self.has_moved

    def lost(self) -> bool:
        self.losses -= 1
        return self.losses >= 0

    def attach(self) -> bool:
        self.has_moved = False
        return not self.leaves

    def transport(self) -> tuple[Scripted, torch.dtype | None]:
        return self.transports.pop(0), torch.float32

    def delivered(self) -> None:
        self.deliveries += 1


class Ranks:
    """Rank 0's word, as the other ranks hear it."""

    def __init__(self, leads: bool = True, words: Sequence[int] = ()) -> None:
        self.leads = leads
        self.words = list(words)
        self.heard: list[int] = []

    def give(self, word: int) -> None:
        self.heard.append(word)

    def take(self) -> int:
        return self.words.pop(0)


class Partly(Scripted):
    """Breaks after the first tensor."""

    def send(
        self, parameters: object, tensors: Iterator[tuple[str, torch.Tensor]], label: str, hold: bool = False
    ) -> SyncTimes:
        next(tensors)
        self._next(f"send {label}")
        raise AssertionError


def test_a_server_that_is_gone_is_followed_by_the_next_under_the_same_version() -> None:
    first, second, third = Scripted(None, GONE), Scripted(GONE), Scripted()
    server = Replacing(second, third, lost=2)
    sync = PolicySync(first, "run", 1, None, 7, server=server)
    sync.connect()
    sync.deliver(nn.Linear(2, 2))
    assert first.calls == ["connect", "send run/a1/7", "close"]
    assert second.calls == ["connect, held", "close"], "gone again while it was signed in to"
    assert third.calls == ["connect, held", "send run/a1/7"]
    assert (sync.version, server.deliveries) == (7, 1)
    sync.advance(nn.Linear(2, 2))
    assert third.calls[-1] == "send run/a1/8"


def test_one_that_counts_by_now_is_taken_before_anything_is_sent() -> None:
    first, second = Scripted(), Scripted()
    server = Replacing(second)
    server.has_moved = True
    PolicySync(first, "run", 1, None, 7, server=server).deliver(nn.Linear(2, 2))
    assert (first.calls, second.calls) == (["close"], ["connect, held", "send run/a1/7"])


def test_what_a_server_that_is_there_refuses_stays_an_error() -> None:
    sync = PolicySync(Scripted(REFUSED), "run", 1, None, 7, server=Replacing(lost=0))
    with pytest.raises(TransferError, match="newest"):
        sync.deliver(nn.Linear(2, 2))


def test_a_run_that_leaves_does_not_wait_for_a_server() -> None:
    server = Replacing()
    server.leaves = True
    sync = PolicySync(Scripted(GONE), "run", 1, None, 7, server=server)
    ranks = sync.orders = Ranks()
    assert sync.advance(nn.Linear(2, 2)) is None
    assert (sync.version, ranks.heard) == (8, [AGAIN, DONE])


def test_the_other_ranks_gather_a_sharded_model_as_often_as_rank_0_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []
    monkeypatch.setattr("slipstream.learner.sync.full_tensor", lambda tensor: gathered.append(1) or tensor)
    broken, second = Partly(LOST, None, GONE), Scripted()
    sync = PolicySync(broken, "run", 1, None, 7, server=Replacing(second, lost=0))
    ranks = sync.orders = Ranks()
    server = sync._server
    assert isinstance(server, Replacing)
    losses = iter([False, True])
    monkeypatch.setattr(server, "lost", lambda: next(losses))
    sync.deliver(Sharded(2, 2))
    assert ranks.heard == [AGAIN, AGAIN, AGAIN, DONE]
    assert len(gathered) == 3 * 2, "also what was not sent any more"
    gathered.clear()
    other = PolicySync(None, "", 1, None, 7)
    other.orders = Ranks(False, ranks.heard)
    assert other.deliver(Sharded(2, 2)) is None
    assert len(gathered) == 3 * 2


@pytest.mark.parametrize(
    ("phase", "error", "passing"),
    [
        ("transfer", ServerError("/update_weights", None, "reset"), True),
        ("start", ServerError("/start_weight_update", 503, "busy"), True),
        ("transfer", GroupError("a peer left"), True),
        ("transfer", GroupTimeout("no progress"), True),
        ("finish", TimeoutError("no answer"), True),
        ("pause", ServerError("/pause", None, "no answer", timed_out=True), False),
        ("attach", ServerError("/is_paused", None, "no answer", timed_out=True), False),
        ("resume", ServerError("/resume", 500, "broken"), False),
        ("transfer", ServerError("/update_weights", 400, "no such parameter"), False),
        ("transfer", ServerError("/update_weights", 500, "another trainer has connected since: refused"), False),
        ("rendezvous", ServerError("/init", 500, "attempt 1 is refused: attempt 2 is the newest seen"), False),
        ("transfer", torch.OutOfMemoryError("out of memory"), False),
        ("transfer", ValueError("fewer tensors than announced"), False),
    ],
)
def test_what_may_be_gone_on_another_try(phase: str, error: Exception, passing: bool) -> None:
    assert failure(phase, error).passing is passing


def test_nobody_there_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with (
            ServerControl(f"http://127.0.0.1:{unused.getsockname()[1]}", None, 5) as control,
            pytest.raises(ServerError),
        ):
            control.pause()
