"""A rollout process that is killed under a whole learner: training goes on, and the ledger is clean.

One that hangs ends the same way once it is seen, which `test_field_cases.py` has with this learner, and
`test_doubles.py` with a double's.
"""

from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.metrics.audit import check_lines
from slipstream.run_folder import RunFolder, read_jsonl
from tests.learner_process import (
    finish,
    learner,
    learner_run,
    ranks_of,
    reach,
    rollout_process,
    rollout_processes,
    write_prompts,
)
from tests.serving_process import VllmServer, wait_for

pytestmark = pytest.mark.integration

PROMPTS = 48


def test_training_goes_on_and_every_prompt_is_settled_once(vllm_server: VllmServer, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "train.jsonl", PROMPTS)
    settings = {"num_train_epochs": 2, "learning_rate": 1e-5, "save_steps": 4}
    run = learner_run(tmp_path / "runs", "respawn", vllm_server, data, **settings)
    with learner(run, 1) as leader:
        reach(run, leader, 2)
        ranks = {process.pid for process in ranks_of(leader)}
        lost = rollout_process(leader)
        lost.kill()

        def replaced() -> bool:
            assert leader.poll() is None, run.log_file("learner", 1).read_text()[-4000:]
            return bool(read_events(run))

        wait_for(replaced, "that another process took its place")
        assert {process.pid for process in ranks_of(leader)} == ranks, "the same ranks"
        assert not psutil.pid_exists(lost.pid)
        wait_for(lambda: rollout_processes(leader), "the next process, which starts once its event is written")
        assert rollout_process(leader).pid != lost.pid
        finish(run, leader, 1)
    (event,) = read_events(run)
    assert event["count"] == 1
    assert "SIGKILL" in event["reason"]
    assert check_lines(run.merged_records("ledger.jsonl"), PROMPTS, 2) == []
    steps = [line["step"] for line in run.merged_records("metrics.jsonl") if "loss" in line]
    assert steps == list(range(1, steps[-1] + 1))


def read_events(run: RunFolder) -> list[dict[str, Any]]:
    events = read_jsonl(run.records(1) / "events.jsonl")
    return [event for event in events if event["event"] == "rollout_worker_restarted"]
