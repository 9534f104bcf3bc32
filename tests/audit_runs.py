"""Records of made-up runs that are interrupted and resumed, for the audit: the real ledger under a simulated learner."""

import random
from collections import Counter
from contextlib import suppress
from typing import Any

from slipstream.config_file import dump_config, parse_config
from slipstream.learner.checkpoint import REMAINDER_FILE, STATE_FILE, save_samples, seal
from slipstream.learner.ledger import History, Ledger, NothingTrained
from slipstream.metrics.audit_types import AttemptRecords, CheckpointRecord, RunRecords
from slipstream.packing.sample import Sample
from slipstream.rollout.setup import Position
from slipstream.rollout.types import OVERSIZE_PROMPT, STALE, ZERO_STD, GroupResult
from slipstream.run_folder import LEDGER, RunFolder, append_jsonl, write_json
from tests.samples import make_sample

GROUP = 3
STREAM = 5  # prompts in an epoch of the iterable dataset
MOST_STEPS = 60


class Learner:
    """One attempt: takes groups, trains and drops their samples step by step, writes what a real one writes."""

    def __init__(
        self, draw: random.Random, number: int, length: int | None, end: int, start: CheckpointRecord | None
    ) -> None:
        self.draw, self.number, self.length = draw, number, length
        self.lines: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.saved: list[CheckpointRecord] = []
        self.step = start.step if start else 0
        state = start.state if start else None
        self.first_epoch = int(state["epoch"]) if state and self.length is None else 0
        position, held, history = Position(), {}, None
        if state and self.length:
            position = Position(state["epoch"] * self.length + state["prompt"], frozenset(state["settled_beyond"]))
            held = dict(start.held) if start else {}
            outcomes = {int(k): v for k, v in state["outcomes"].items()}
            history = History(outcomes, {int(k): v for k, v in state["split"].items()})
        self.ledger = Ledger(self.length, position, self.lines.append)
        self.waiting = [sample(n, self.step) for n, count in held.items() for _ in range(count)]
        if state:
            self.ledger.restore(self.waiting, history, self.first_epoch)
        self.ledger.start_at(self.step)
        known = position.settled_beyond | set(held)
        self.to_come = list(Position(position.first_unsettled, frozenset(known)).numbers(end))
        if self.length is None:
            self.to_come = list(range(end - self.first_epoch * STREAM))

    def result(self, number: int) -> GroupResult:
        epoch, position = divmod(number, self.length or STREAM)
        dropped: Counter[str] = Counter()
        kind = self.draw.random()
        samples = [] if kind < 0.25 else [sample(number, self.step) for _ in range(GROUP)]
        if kind < 0.1:
            dropped[OVERSIZE_PROMPT] = 1
        elif kind < 0.25:
            dropped[ZERO_STD] = GROUP
        elif kind < 0.5:
            samples.pop()
            dropped["failed"] = 1
        return GroupResult(number, epoch + self.first_epoch, position, position, samples, dict(dropped))

    def arrive(self, most: int) -> None:
        """Groups come almost in order: whatever is in flight may finish first."""
        for _ in range(self.draw.randint(1, most)):
            if self.to_come:
                group = self.result(self.to_come.pop(self.draw.randrange(min(4, len(self.to_come)))))
                with suppress(NothingTrained):
                    self.ledger.arrived(group)
                self.waiting += group.samples

    def drop(self) -> None:
        for _ in range(self.draw.randint(0, 2)):
            if self.waiting and self.draw.random() < 0.3:
                with suppress(NothingTrained):
                    self.ledger.dropped(self.waiting.pop(self.draw.randrange(len(self.waiting))), STALE)

    def train(self) -> bool:
        """One step; False where there is nothing left for one."""
        while not self.waiting and self.to_come:
            self.arrive(2)
        if not self.waiting:
            return False
        taken = [self.waiting.pop(0) for _ in range(min(self.draw.randint(1, 5), len(self.waiting)))]
        versions: dict[int, list[int]] = {}
        for one in taken:
            versions.setdefault(one.number, []).append(self.step)
        self.ledger.in_step(versions)
        self.ledger.step_finished()
        self.step += 1
        self.metrics.append({"step": self.step, "loss": 0.5})
        if self.draw.random() < 0.2:
            self.metrics.append({"step": self.step, "eval/reward": 1.0})
        return True

    def save(self) -> None:
        epoch, prompt = self.ledger.place
        history = self.ledger.history
        held = Counter(one.number for one in self.waiting if one.number in history.split)
        self.saved.append(
            CheckpointRecord(
                self.number,
                self.step,
                f"output/a{self.number}/checkpoint-{self.step}",
                {
                    "step": self.step,
                    "epoch": epoch,
                    "prompt": prompt,
                    "settled_beyond": sorted(self.ledger.position.settled_beyond),
                    "attempt": self.number,
                    "dataset_length": self.length,
                    "outcomes": {str(k): v for k, v in history.outcomes.items()},
                    "split": {str(k): v for k, v in history.split.items()},
                    "settings": {"num_generations": GROUP},
                    "ledger_step": self.ledger.last_step,
                },
                held,
            )
        )


def sample(number: int, version: int) -> Sample:
    return make_sample([1], [2], number=number, version=version)


def interrupted_run(draw: random.Random, iterable: bool = False) -> RunRecords:
    """A right run of up to four attempts: trained to its end, or interrupted for the last time."""
    length, epochs = (None if iterable else draw.randint(2, 9)), draw.randint(1, 3)
    end = (length or STREAM) * epochs
    every = draw.randint(1, 3)
    attempts: list[AttemptRecords] = []
    start: CheckpointRecord | None = None
    finished = False
    for number in range(1, draw.randint(1, 4) + 1):
        learner = Learner(draw, number, length, end, start)
        patience = draw.choice([draw.randint(1, 6), draw.randint(1, 6), MOST_STEPS])
        finished = live(learner, patience, every)
        fence: dict[str, Any] = {"attempt": number, "checkpoint": start.path if start else None, "step": 0}
        if start:
            fence |= {"step": start.step, "ledger": [start.attempt, start.known]}
        why = "start" if number == 1 else "the learner was killed"
        attempts.append(AttemptRecords(number, fence, learner.lines, learner.metrics, learner.saved, why=why))
        if finished:
            break
        if learner.saved and (len(learner.saved) == 1 or draw.random() < 0.8):
            start = learner.saved[-1]
        elif learner.saved:  # the newest one was damaged
            start = learner.saved[-2]
    steps = max([line["step"] for line in attempts[-1].metrics] + [int(attempts[-1].fence["step"])])
    result = {"attempt": len(attempts), "steps": steps} if finished else None
    return RunRecords(attempts, GROUP, num_train_epochs=float(epochs), result=result)


def live(learner: Learner, steps: int, every: int) -> bool:
    """Train until the end of the data (True), or for so many steps, and then be killed anywhere in the next."""
    for _ in range(steps):
        learner.arrive(4)
        learner.drop()
        if not learner.train():
            with suppress(NothingTrained):
                learner.ledger.data_ended()
            learner.save()
            return True
        if learner.step % every == 0:
            learner.save()
    if learner.draw.random() < 0.5:  # some work of the step that never came
        learner.arrive(3)
        learner.drop()
    return False


def write_run(run: RunRecords, folder: RunFolder) -> None:
    """Write the records of a made-up run into an empty run folder, as learner and supervisor would."""
    epochs = run.num_train_epochs
    values = {"name": "m", "trainer": {"num_generations": GROUP, "num_train_epochs": epochs}}
    values |= {"model": {"name": "m"}, "data": {"source": "d"}}
    folder.run_file.write_text(dump_config(parse_config(values)))
    for attempt in run.attempts:
        write_json(folder.fence_file(attempt.number), dict(attempt.fence))
        for name, lines in ((LEDGER, attempt.ledger), ("metrics.jsonl", attempt.metrics)):
            for line in lines:
                append_jsonl(folder.records(attempt.number) / name, dict(line))
        for checkpoint in attempt.checkpoints:
            path = folder.path / checkpoint.path
            write_json(path / STATE_FILE, dict(checkpoint.state))
            if checkpoint.held:
                rest = [sample(number, 0) for number, count in checkpoint.held.items() for _ in range(count)]
                save_samples(path / REMAINDER_FILE, rest)
            seal(path)
    if run.result is not None:
        write_json(folder.path / "result.json", dict(run.result))
