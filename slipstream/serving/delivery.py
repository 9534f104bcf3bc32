"""What can go wrong with a delivery of weights, whether it may be gone on another try, and how one is closed."""

import time

from slipstream.serving.control import ServerControl, ServerError
from slipstream.serving.group import GroupError, GroupTimeout

CLOSE_DELAYS_S = (0.1, 0.3, 1.0)
# what the server's side says to a trainer that must not come back, and where no delivery is open
REPLACED = ("is the newest seen", "another trainer has connected since")
NONE_OPEN = "without a matching start"
MADE_ONCE = ("rendezvous", "start", "transfer", "finish")  # phases whose calls are not repeated


class TransferError(RuntimeError):
    """Weights did not reach the server whole. Connect again before sending.

    Attributes:
        phase: the step that failed.
        passing: whether the same delivery may succeed on another try.
        timed_out: whether the step took its whole bound.
    """

    def __init__(self, phase: str, message: str, passing: bool = False, timed_out: bool = False) -> None:
        self.phase = phase
        self.passing = passing
        self.timed_out = timed_out
        super().__init__(f"weight transfer failed in phase {phase!r}: {message}")


def failure(phase: str, error: BaseException) -> TransferError:
    """What broke a delivery, and whether it may be gone on another try: the way to the server is, its refusal is not.

    What `ServerControl` repeats has had its tries. With weights that are whole and labelled nothing is to be sent again.
    """
    timed_out = isinstance(error, (TimeoutError, GroupTimeout)) or (isinstance(error, ServerError) and error.timed_out)
    passing = isinstance(error, (GroupError, TimeoutError)) or (isinstance(error, ServerError) and not error.permanent)
    if any(words in str(error) for words in REPLACED) or phase == "resume" or (timed_out and phase not in MADE_ONCE):
        passing = False
    return TransferError(phase, str(error) or type(error).__name__, passing, timed_out)


def close_delivery(control: ServerControl) -> bool:
    """Close the delivery that is open on a paused server; False where none was. Raises ServerError without an answer.

    Made again after an answer that was lost or may have been: where the first call did its work, the second one is told
    that none is open. True there too.
    """
    lost = False  # whether a call may have done its work unheard
    for delay in (*CLOSE_DELAYS_S, None):
        try:
            control.finish_weight_update()
            return True
        except ServerError as error:
            if error.permanent or NONE_OPEN in error.message:
                return lost
            if error.timed_out or (delay is None and error.status is None):
                raise
            lost = True
        if delay is not None:
            time.sleep(delay)
    return lost
