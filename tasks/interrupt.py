"""Sections that Ctrl-C cannot break."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def uninterrupted(deliver_after: bool = False) -> Iterator[None]:
    """Hold back INT, TERM and HUP inside (in the main thread; in others Python delivers none).

    Handlers, not SIG_IGN: processes started inside would inherit that.

    Args:
        deliver_after: deliver the first signal that came once the section is left; otherwise it is dropped, which is
            right for a clean-up that a signal has begun.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        held.append(number)

    previous = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    if deliver_after and held:
        signal.raise_signal(held[0])


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` on INT, TERM and HUP inside; not on a HUP that is ignored, as below nohup. Main thread only."""
    hangs_on = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    taken = [number for number in SIGNALS if not (hangs_on and number == signal.SIGHUP)]
    previous = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextlib.contextmanager
def stopping(what: str, ask: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """The first INT, TERM or HUP inside says that it stops `what`, calls `ask` with the signal's name and raises
    KeyboardInterrupt; the others change nothing. Main thread only.
    """
    asked = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            return
        asked = True
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"\nstopping {what} ({name}); this takes some seconds", file=sys.stderr, flush=True)
        ask(name)
        raise KeyboardInterrupt

    with handling(handle):
        yield
