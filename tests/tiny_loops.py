"""Rollout loops for the process around them: each does one thing and needs no server."""

import os
import signal
import sys
import time


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
