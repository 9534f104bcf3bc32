"""What a first signal does, and the ones after it."""

import io
import signal
import sys

import pytest

from tasks.interrupt import SIGNALS, handling, stopping


class Gone(io.StringIO):
    """A terminal that has hung up."""

    def write(self, _text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("terminal", [io.StringIO, Gone])
def test_the_first_signal_stops_and_the_others_change_nothing(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, terminal: type[io.StringIO]
) -> None:
    asked: list[str] = []
    after: list[str] = []
    monkeypatch.setattr(sys, "stderr", terminal())
    with stopping("the run", asked.append):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)
        after.append("went on")
    assert (asked, after) == ([number.name], ["went on"])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_it_says_what_is_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    with stopping("the cells"), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert "stopping the cells (SIGTERM)" in capsys.readouterr().err


def test_below_nohup_a_closed_terminal_ends_nothing() -> None:
    taken: list[int] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handling(lambda number, frame: taken.append(number)):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with handling(lambda number, frame: taken.append(number)):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert taken == [signal.SIGTERM, signal.SIGHUP]
