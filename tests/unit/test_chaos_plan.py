"""The pure parts of the chaos test: scenarios from seeds, results and their table."""

import json
from pathlib import Path

import pytest

from slipstream.config_file import load_config
from tests.chaos import results
from tests.chaos.acts import Acts
from tests.chaos.checks import recovery_times
from tests.chaos.drive import write_files
from tests.chaos.faults import BY_NAME, FAULTS, RECORD, End
from tests.chaos.plan import plan
from tests.chaos.results import Result
from tests.doubles.outcomes import num_steps

SEEDS = range(300)


def test_a_seed_replays_and_seeds_in_a_row_meet_every_fault() -> None:
    assert [plan(seed) for seed in SEEDS] == [plan(seed) for seed in SEEDS]
    assert [plan(seed).injections[0].fault for seed in range(len(FAULTS))] == [fault.name for fault in FAULTS]
    drawn = [plan(seed) for seed in SEEDS]
    assert {scenario.shape for scenario in drawn} == {"separate", "one_allocation"}
    assert len({scenario.names for scenario in drawn}) > 80
    assert any(len(scenario.injections) == 2 for scenario in drawn)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scenario_can_meet_its_faults(seed: int) -> None:
    scenario = plan(seed)
    assert scenario.learner_nodes + scenario.server_nodes <= 5, "a node may be lost"
    assert scenario.steps == num_steps(scenario.prompts * scenario.epochs, 3) >= 4
    assert scenario.step_s < 15, "less than step_timeout"
    first = scenario.injections[0]
    where = first.plan["where"]
    assert where.get("step", 1) <= scenario.steps
    assert where.get("step", 0) % scenario.save_steps == 0 or not BY_NAME[first.fault].during_save
    assert where.get("rank", 0) < scenario.world
    assert scenario.shape == "separate" or first.plan["event"] != RECORD or first.plan["count"] == 1, "all is one job"
    assert not first.act or hasattr(Acts, first.act)
    assert first.end is End.FINISHED or len(scenario.injections) == 1, "what ends a run comes last"


def test_the_files_of_a_scenario_are_a_valid_run(tmp_path: Path) -> None:
    scenario = plan(25)
    config = load_config(write_files(tmp_path / "s", scenario))
    assert config.learner.nodes == scenario.learner_nodes
    assert config.cluster.shape == scenario.shape
    assert 'partition = "spot"' in (tmp_path / "s" / "profile.toml").read_text()
    assert json.loads((tmp_path / "s" / "runs" / "fault-plan.json").read_text()) == scenario.plan


def result(seed: int, faults: str, problems: tuple[str, ...] = (), **recovery: float) -> Result:
    times = {name.replace("_", " "): seconds for name, seconds in recovery.items()}
    return Result(seed, faults, "separate", "finish", "finish", [], list(problems), recovery_s=times)


def test_results_are_resumable_and_summed_up_per_fault(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.append(path, result(1, "rank killed", ("it did not end",)))
    results.append(path, result(1, "rank killed", rank_killed=4.0))
    results.append(path, result(2, "rank killed", rank_killed=6.0))
    results.append(path, result(3, "rank killed + server process killed", ("audit: x",), rank_killed=9.0, b=1.0))
    known = results.done(path)
    assert sorted(known) == [1, 2, 3]
    assert known[1].right, "the newest counts"
    lines = results.table(list(known.values())).splitlines()
    assert lines[1].split() == ["rank", "killed", "3", "1", "5.0", "6.0"]
    assert lines[2].split() == ["server", "process", "killed", "1", "1"]
    assert lines[3:] == ["3 runs, 2 right", "  seed 3 (rank killed + server process killed): audit: x"]


def test_recovery_is_over_with_the_first_step_that_was_not_done_before() -> None:
    events = [{"event": "step", "time": float(t), "step": s} for t, s in ((1, 4), (2, 5), (10, 5), (12, 6), (13, 7))]
    assert recovery_times(events, {"first": {"time": 2.5}}) == {"first": 9.5}
    assert recovery_times(events, {"first": {"time": 20.0}}) == {}
