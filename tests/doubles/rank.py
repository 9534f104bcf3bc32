"""One rank of the learner's double: `python -m tests.doubles.rank RUN_DIR ATTEMPT RANK WORLD`, started by its leader."""

import argparse
import contextlib
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from slipstream.learner import checkpoint as ckpt
from slipstream.learner.ledger import NothingTrained
from slipstream.process import Heartbeat, die_with_parent, job_incarnation
from slipstream.run_folder import RunFolder, append_jsonl, read_json, write_json
from slipstream.serving.labels import make_label
from tests.doubles import lockstep
from tests.doubles.book import Book
from tests.doubles.events import FOLDER, Injected, event, identify, setting
from tests.doubles.jobs import config_of
from tests.doubles.remote import Refused, Server, ServerGone, wait_for_endpoint
from tests.doubles.worker import Worker, WorkerFailed

STEP_S = 0.05
WAIT_S = 0.1
MODEL_BYTES = 20_000


class Left(Exception):
    """Its time is up: saved, and gone."""


class RankZero:
    def __init__(self, run: RunFolder, attempt: int, world: int) -> None:
        self.run, self.attempt = run, attempt
        self.config = config = config_of(run)
        self.incarnation = job_incarnation()
        self.beat = Heartbeat(run, "learner", attempt, self.incarnation).start()
        self.progress = 0
        self.say("loading")
        run.records(attempt).mkdir(parents=True, exist_ok=True)
        start = run.fence(attempt).get("checkpoint")
        self.book = Book(run, config, attempt, run.path / start if start else None)
        self.saved = self.book.step if start else -1
        self.hub = lockstep.Hub(run, self.incarnation, world)
        event(run, "resume", step=self.book.step)
        setup = {"run_dir": str(run.path), "attempt": attempt, "group": self.book.group}
        trainer = config.trainer
        self.worker = Worker(
            run, setup, self.book.position, trainer.rollout_worker_timeout, trainer.rollout_worker_restarts
        )  # fmt: skip
        self.server: Server | None = None

    def say(self, phase: str, *, work: bool = True) -> None:
        self.progress += work
        step = self.book.step if hasattr(self, "book") else 0
        begun = {"begun": True} if phase == "training" else {}
        self.beat.update(
            **begun, phase=phase, step=step, progress=self.progress, max_steps=self.config.trainer.max_steps
        )

    def check_leave(self) -> None:
        """Raises Left, after all ranks have saved the same step, where the leader says that the time is up."""
        if self.run.leave_file(self.incarnation).exists():
            event(self.run, "leave", step=self.book.step)
            if self.book.step > 0:
                self.save()
            raise Left

    def attach(self) -> Server:
        self.say("waiting for the server", work=False)
        timeout_s = self.config.server.startup_timeout + 60
        self.server = Server(self.run, wait_for_endpoint(self.run, self.attempt, timeout_s, self.check_leave))
        return self.server

    def deliver(self) -> None:
        """Give the server the weights under their label; anew to another server where this one dies of it."""
        label = make_label(self.run.run_id, self.attempt, self.book.version)
        facts = {"step": self.book.step, "version": self.book.version}
        event(self.run, "sync.begin", **facts)
        body = {"label": label, "attempt": self.attempt}
        while True:
            server = self.server or self.attach()
            self.say("delivering weights")
            try:
                server.call("/begin_delivery", body)
                event(self.run, "sync.middle", **facts)
                server.call("/finish_delivery", body)
                break
            except ServerGone:
                self.server = None
                self.check_leave()
                time.sleep(WAIT_S)
        event(self.run, "sync.end", **facts)

    def look_after_server(self) -> None:
        """Another server than the one that has our weights needs them too."""
        assert self.server is not None
        named = self.run.assignment()
        current = named.get("server") or named.get("allocation")
        if current is not None and current != self.server.incarnation:
            self.server = None
            self.deliver()

    def save(self) -> None:
        book = self.book
        if self.saved == book.step:
            return
        self.say("saving")
        path = self.run.output(self.attempt) / f"checkpoint-{book.step}"
        facts = {"step": book.step, "path": str(path / "model.bin")}
        event(self.run, "save.begin", **facts)
        try:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            (path / "model.bin").write_bytes(bytes(MODEL_BYTES))
            self.hub.all(do="save", step=book.step, path=str(path))
            event(self.run, "save.middle", **facts)
            book.write_state(path)
            ckpt.seal(path)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise ckpt.CheckpointError(f"the checkpoint of step {book.step} could not be written: {error}") from error
        self.saved = book.step
        event(self.run, "save.end", **facts)
        ckpt.rotate(path.parent, self.config.trainer.save_total_limit)

    def next_step(self) -> bool:
        """Wait for the samples of a step; False at the end of the data."""
        self.say("waiting for rollouts")
        while not self.book.take(not self.worker.ended):
            self.check_leave()
            if groups := self.worker.groups(WAIT_S):
                for group in groups:
                    self.book.arrived(group)
                self.say("waiting for rollouts")
                continue
            if self.worker.ended:
                return self.book.take(False)
            if why := self.worker.lost():
                for group in self.worker.groups(0.01):
                    self.book.arrived(group)
                if not self.worker.ended:
                    self.worker.restart(why)
            self.look_after_server()
        return True

    def train(self) -> dict[str, Any]:
        trainer, book = self.config.trainer, self.book
        step_s = setting(self.run, "step_s", STEP_S)
        self.check_leave()
        self.deliver()
        self.worker.start()
        while trainer.max_steps <= 0 or book.step < trainer.max_steps:
            self.check_leave()
            if not self.next_step():
                break
            self.say("training")
            self.hub.all(do="step", step=book.step + 1)
            time.sleep(step_s)
            book.step_finished()
            self.say("training")
            reward = (1 - 0.9**book.step) * trainer.learning_rate / 1e-6
            line = {"step": book.step, "time": time.time(), "loss": 0.5, "reward": reward}
            line |= {"perf/wall_clock_trained_tokens_per_s": 100.0, "sample/staleness_mean": trainer.max_staleness / 2}
            append_jsonl(self.run.records(self.attempt) / "metrics.jsonl", line)
            if book.step % trainer.weight_sync_steps == 0:
                book.version += 1
                self.deliver()
            event(self.run, "step", step=book.step)
            if book.step % trainer.save_steps == 0:
                self.save()
        else:
            return self.result()
        with contextlib.suppress(NothingTrained):
            book.ledger.data_ended()
        self.save()
        return self.result()

    def result(self) -> dict[str, Any]:
        if self.saved != self.book.step:
            self.save()
        return {"attempt": self.attempt, "time": time.time(), "steps": self.book.step}


def tell_leader(run: RunFolder, incarnation: str, **facts: Any) -> None:
    """How this rank ended; the first of several counts."""
    path = run.path / FOLDER / f"ended-{incarnation}.json"
    if read_json(path) is None:
        write_json(path, facts)


def rank_zero(run: RunFolder, attempt: int, world: int) -> int:
    zero: RankZero | None = None
    try:
        zero = RankZero(run, attempt, world)
        result = zero.train()
        zero.hub.release(do="end")
        zero.worker.stop()
        write_json(run.path / "result.json", result)
        zero.beat.stop(phase="finished")
        return 0
    except Left:
        assert zero is not None
        zero.hub.release(do="end")
        zero.worker.stop()
        tell_leader(run, zero.incarnation, left=zero.book.step, reason="its time was up: saved and left")
        zero.beat.stop(phase="ended")
        return 0
    except Exception as error:
        traceback.print_exc()
        final = isinstance(error, ckpt.CheckpointError | NothingTrained)
        lost = isinstance(error, lockstep.Lost)
        if not lost:
            kind = "" if isinstance(error, WorkerFailed | Refused | Injected) else f"{type(error).__name__}: "
            tell_leader(run, job_incarnation(), reason=f"rank 0: {kind}{error}", final=final)
        if zero is not None:
            zero.worker.stop()
        return 1


def other_rank(run: RunFolder, attempt: int, rank: int) -> int:
    incarnation = job_incarnation()
    beat = Heartbeat(run, f"learner-{rank}", attempt, incarnation).start()
    event(run, "rank.start")
    try:
        line = lockstep.join(run, incarnation, rank)
        while (command := line.receive())["do"] != "end":
            step = command["step"]
            beat.update(phase="training" if command["do"] == "step" else "saving", step=step, progress=step)
            if command["do"] == "step":
                time.sleep(STEP_S)
                event(run, "rank.step", step=step)
            else:
                path = Path(command["path"]) / f"rng-{rank}.bin"
                event(run, "rank.save", step=step, path=str(path))
                path.write_bytes(bytes(100))
            line.send({"done": step})
        beat.stop(phase="finished")
        return 0
    except lockstep.Lost:
        traceback.print_exc()
        return 1
    except Exception as error:
        traceback.print_exc()
        tell_leader(run, incarnation, reason=f"rank {rank}: {type(error).__name__}: {error}")
        return 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    for name in ("attempt", "rank", "world"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args()
    die_with_parent()
    identify(who=f"rank-{arguments.rank}", attempt=arguments.attempt, rank=arguments.rank)
    run = RunFolder.open(arguments.run_dir)
    if arguments.rank == 0:
        return rank_zero(run, arguments.attempt, arguments.world)
    return other_rank(run, arguments.attempt, arguments.rank)


if __name__ == "__main__":
    sys.exit(main())
