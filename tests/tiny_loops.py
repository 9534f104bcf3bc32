"""Rollout loops for the process around them: each does one thing and needs no server."""

import os
import signal
import sys
import time

from slipstream.rollout.types import EndOfData, GroupResult


class TinyLoop:
    """Takes what the rollout process hands to every loop; `reward_funcs` and `setup` as the trainer gave them."""

    def __init__(self, *, reward_funcs=(), setup, heartbeat_value, stop_event, rollout_buffer, commands, **shared):
        self.reward_funcs = reward_funcs
        self.setup = setup
        self.heartbeat = heartbeat_value
        self.stop = stop_event
        self.buffer = rollout_buffer
        self.commands = commands
        self.shared = shared

    def until_stopped(self):
        while not self.stop.is_set():
            self.heartbeat.value = time.monotonic()
            time.sleep(0.01)

    def run(self):
        self.until_stopped()


class Describes(TinyLoop):
    """Says where it runs, and what its rewards answer."""

    def run(self):
        self.buffer.put(
            {
                "pid": os.getpid(),
                "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "threads": os.environ.get("OMP_NUM_THREADS"),
                "torch": "torch" in sys.modules,
                "run_id": self.setup.run_id,
                "interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
                "rewards": [reward(completion_ids=[[1, 2], [3]]) for reward in self.reward_funcs],
                "version": self.shared["model_version_value"].value,
            }
        )
        self.until_stopped()


class Fails(TinyLoop):
    def run(self):
        raise ZeroDivisionError("the hook is wrong")


class FailsToStart(TinyLoop):
    def __init__(self, **arguments):
        raise ValueError("no such model")


class Hangs(TinyLoop):
    """Stops beating and does not listen."""

    def run(self):
        self.heartbeat.value = time.monotonic()
        self.buffer.put("hanging")
        time.sleep(600)


class Busy(TinyLoop):
    """Does nothing but read and write the shared values."""

    def run(self):
        self.buffer.put("busy")
        while not self.stop.is_set():
            self.heartbeat.value = time.monotonic()
            if self.shared["token_allowance"].value or self.shared["trainer_waits"].value:
                continue


class Leaves(TinyLoop):
    def run(self):
        os._exit(7)


class Floods(TinyLoop):
    """Puts more into its queue than a pipe holds, which nobody reads, and stops when asked."""

    def run(self):
        self.buffer.put(b"x" * 10_000_000)
        self.until_stopped()


def length_reward(completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]


class HandsOver(TinyLoop):
    """Hands over an empty group for each prompt from its position on, slowly, then says that the data has ended."""

    pause_s = 0.05

    def run(self):
        for number in self.setup.position.numbers(self.setup.end):
            self.hand_over(number)
            self.pause()
        self.buffer.put(EndOfData(0))
        self.until_stopped()

    def hand_over(self, number):
        self.buffer.put(GroupResult(number, 0, number, number, [], {"filtered": 1}, cost=10))

    def pause(self):
        self.heartbeat.value = time.monotonic()
        time.sleep(self.pause_s)

    def until_stopped(self):
        while not self.stop.is_set():
            self.pause()
            while not self.commands.empty():
                kind, request = self.commands.get()
                self.buffer.put((kind, request, {"first": self.setup.position.first_unsettled}))

    @property
    def is_first(self):
        return self.setup.position.first_unsettled == 0

    def flush(self):
        """Until the receiver has what was handed over."""
        while self.buffer._buffer:
            self.pause()
        time.sleep(1.0)


class DiesAtOnce(HandsOver):
    def run(self):
        os.kill(os.getpid(), signal.SIGKILL)


class DiesAfterEach(HandsOver):
    def hand_over(self, number):
        super().hand_over(number)
        self.flush()
        os.kill(os.getpid(), signal.SIGKILL)


class AnswersInItsSecondLife(HandsOver):
    """Takes a question with it to its end."""

    def run(self):
        if not self.is_first:
            return super().run()
        self.hand_over(0)
        while self.commands.empty():
            self.pause()
        os.kill(os.getpid(), signal.SIGKILL)


class WritesSlowly(HandsOver):
    """Dies while half of its second group is written: the receiver is kept from reading it in time by its size."""

    def run(self):
        if self.is_first:
            self.hand_over(0)
            self.flush()
            half = (10_000_000).to_bytes(4, "big") + b"x" * 1000  # the length that a message begins with, and less
            os.write(self.buffer._writer.fileno(), half)
            os.kill(os.getpid(), signal.SIGKILL)
        super().run()
