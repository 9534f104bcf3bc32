"""The double of the rollout process: asks the server for each prompt's group, and says on stdout what became of it.

stdin: a line of JSON with where to start, then lines {"total": n}: groups that may have been started by then.
"""

import json
import queue
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from slipstream.process import Heartbeat, die_with_parent, job_incarnation
from slipstream.run_folder import RunFolder
from tests.doubles.events import Injected, event, identify
from tests.doubles.remote import POLL_S, Refused, Server, ServerGone, usable_endpoint

IN_FLIGHT = 3
BEAT_S = 0.2


class Rollouts:
    def __init__(self, run: RunFolder, setup: dict[str, Any]) -> None:
        self.run, self.setup = run, setup
        self.attempt = int(setup["attempt"])
        self.total = int(setup["total"])
        self.beat = Heartbeat(run, "rollout", self.attempt, job_incarnation()).start()
        self.done = 0
        self._out: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.total = int(json.loads(line)["total"])

    def say(self, **message: Any) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    def numbers(self) -> Any:
        known, end = set(self.setup["known"]), self.setup["end"]
        number = int(self.setup["first"])
        while end is None or number < end:
            if number not in known:
                yield number
            number += 1

    def work(self) -> None:
        """Generate for all prompts; the main thread beats, so that a process that hangs is seen to hang."""
        started, flying = 0, set[Future[dict[str, Any]]]()
        numbers = self.numbers()
        following = next(numbers, None)
        beaten = 0.0
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            while following is not None or flying:
                while following is not None and len(flying) < IN_FLIGHT and started < self.total:
                    flying.add(pool.submit(self.generate, following))
                    started, following = started + 1, next(numbers, None)
                finished, flying = wait(flying, BEAT_S, FIRST_COMPLETED) if flying else (set(), flying)
                for future in finished:
                    group = future.result()
                    event(self.run, "rollout.group", number=group["number"])
                    self.done += 1
                    self.beat.update(progress=self.done)
                    self.say(**group)
                if not flying:
                    time.sleep(POLL_S)
                if time.monotonic() - beaten > BEAT_S:
                    beaten = time.monotonic()
                    self.say(beat=self.done)
        self.say(ended=True)

    def generate(self, number: int) -> dict[str, Any]:
        """Until a server that counts has answered; what was in flight at a server that died is asked for again."""
        while True:
            endpoint = usable_endpoint(self.run, self.attempt)
            if endpoint is not None:
                try:
                    answer = Server(self.run, endpoint).call("/generate", {"number": number, "n": self.setup["group"]})
                    return {"number": number, "label": answer["label"], "tokens": answer["tokens"]}
                except (ServerGone, Refused):
                    time.sleep(POLL_S)
            time.sleep(POLL_S)


def main() -> None:
    die_with_parent()
    setup = json.loads(sys.stdin.readline())
    run = RunFolder.open(setup["run_dir"])
    identify(who="rollout", attempt=setup["attempt"], start=setup["start"])
    rollouts = Rollouts(run, setup)
    try:
        event(run, "rollout.start")
        rollouts.work()
    except Injected as error:  # as of a reward: no restart of this process can help
        rollouts.say(error=f"reward double_reward raised {error}")
    rollouts.beat.stop(phase="ended")


if __name__ == "__main__":
    main()
