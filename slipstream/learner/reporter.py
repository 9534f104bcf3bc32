"""What a learner writes about itself into the run folder; outside a run: its metrics."""

import json
import time
from pathlib import Path
from typing import Any

from slipstream.learner.failure import record_departure
from slipstream.process import Heartbeat
from slipstream.run_folder import LEDGER, RunFolder, append_jsonl, sync_file, write_json


class Reporter:
    """Records of one attempt, written by rank 0. Without a run folder only metrics are written, and into `folder` where
    that is given."""

    def __init__(
        self,
        run: RunFolder | None = None,
        attempt: int = 1,
        heartbeat: Heartbeat | None = None,
        *,
        folder: Path | None = None,
    ) -> None:
        self._records: Path | None = None
        self._folder = folder
        self._run = run
        self._attempt = attempt
        self._heartbeat = heartbeat
        self._progress = 0
        if run is not None:
            self._folder = self._records = run.records(attempt)
            self._records.mkdir(parents=True, exist_ok=True)

    def phase(self, name: str, **values: Any) -> None:
        """Say what the learner does now. Counts as progress. From the first "training" on, its first step has begun."""
        begun = {"begun": True} if name == "training" else {}
        self.advance(phase=name, **begun, **values)

    def advance(self, **values: Any) -> None:
        """Work was done: the supervisor judges a run by this, not by signs of life."""
        self._progress += 1
        if self._heartbeat is not None:
            self._heartbeat.update(progress=self._progress, **values)

    def metrics(self, step: int, values: dict[str, float], texts: dict[str, str] | None = None) -> None:
        """One window: metrics, and what they mean in words."""
        if self._folder is not None:
            line = {"step": step, "time": time.time(), **values, **(texts or {})}
            append_jsonl(self._folder / "metrics.jsonl", line)

    def ledger(self, line: dict[str, Any]) -> None:
        if self._records is not None:
            append_jsonl(self._records / LEDGER, line)

    def sync(self) -> None:
        """Make ledger and metrics durable: a checkpoint must not know more than they do. Raises OSError."""
        if self._folder is not None:
            sync_file(self._folder / "metrics.jsonl")
        if self._records is not None:
            sync_file(self._records / LEDGER)

    def event(self, kind: str, step: int, **values: Any) -> None:
        if self._records is not None:
            append_jsonl(self._records / "events.jsonl", {"event": kind, "step": step, "time": time.time(), **values})

    def completions(self, step: int, table: list[dict[str, Any]]) -> None:
        if self._records is not None and table:
            folder = self._records / "completions"
            folder.mkdir(exist_ok=True)
            with open(folder / f"step-{step:06d}.jsonl", "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in table)

    def result(self, value: dict[str, Any]) -> None:
        """The run's result: its presence says that the learner has finished."""
        if self._run is not None:
            write_json(self._run.path / "result.json", {"attempt": self._attempt, "time": time.time(), **value})

    def left(self, step: int, reason: str) -> None:
        """The ranks have left at this step, because they were told to: the leader's exit record will say so."""
        if self._run is not None:
            record_departure(self._run, self._attempt, step, reason)
            self.event("left", step, reason=reason)
