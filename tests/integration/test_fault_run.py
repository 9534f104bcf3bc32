"""A run whose every way to the real server is harmed by chance: it loses no prompt, trains none twice, and ends by itself."""

import dataclasses
from pathlib import Path

import pytest

from slipstream.metrics.audit_records import audit_run
from slipstream.rollout.types import TRAINED
from tests.fault_proxy import FAULTS, GENERATION, FaultProxy, Rates
from tests.learner_process import finish, learner, learner_run, write_prompts
from tests.serving_process import VllmServer

pytestmark = pytest.mark.integration

PROMPTS = 60
STEPS = 200
# learning so slowly that the rewards of a group go on to differ
SETTINGS = {"max_steps": STEPS, "learning_rate": 1e-5, "save_steps": 50, "vllm_server_timeout": 10.0}
LONG_S = 600.0
WEIGHTS = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")


@pytest.mark.timeout(2 * LONG_S)
def test_200_steps_through_timeouts_resets_and_5xx(vllm_server: VllmServer, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "train.jsonl", PROMPTS)
    harm = {"generation": Rates(0.12, silent_in_row=2), "control": Rates(0.03, in_row=2)}
    with FaultProxy(vllm_server.base_url, seed=1, **harm) as proxy:
        run = learner_run(
            tmp_path / "runs", "faults", dataclasses.replace(vllm_server, base_url=proxy.url), data, **SETTINGS
        )
        with learner(run, 1) as leader:
            result = finish(run, leader, 1, LONG_S)
        print(f"{result['seconds']:.0f} s, {sum(proxy.counts.values())} requests")
        print("generation:", proxy.harmed(*GENERATION))
        print("weights:", proxy.harmed(*WEIGHTS), "all:", proxy.harmed())
        print(sorted(proxy.counts.items()))

    assert result["steps"] == STEPS
    metrics = list(run.merged_records("metrics.jsonl"))
    assert [line["step"] for line in metrics if "loss" in line] == list(range(1, STEPS + 1))
    lines = list(run.merged_records("ledger.jsonl"))
    last = max(line["epoch"] for line in lines)
    assert last >= 3
    assert audit_run(run).findings == ()
    outcomes = {name for line in lines for name in line["outcomes"]}
    trained = sum(line["outcomes"].get(TRAINED, 0) for line in lines) / sum(sum(x["outcomes"].values()) for x in lines)
    print(outcomes, f"{trained:.3f} of the samples trained")
    assert trained > 0.9, "what failed on the way cost little"
    assert set(proxy.harmed(*GENERATION)) == set(FAULTS), "each kind of fault has been met"
    assert sum(proxy.harmed(*WEIGHTS).values()) >= 5
    assert sum(line.get("rollout/vllm_retry_count", 0) for line in metrics) > 0
