"""From a seed to a scenario of the full stack."""

from tests.chaos.full_acts import FullActs
from tests.chaos.full_plan import FULL_FAULTS, full_plan


def test_the_same_seed_is_the_same_scenario() -> None:
    assert [full_plan(seed) for seed in range(40)] == [full_plan(seed) for seed in range(40)]
    assert full_plan(1) != full_plan(1 + len(FULL_FAULTS))


def test_seeds_in_a_row_go_through_all_faults() -> None:
    found = {full_plan(seed).strikes[0].fault.name for seed in range(7, 7 + len(FULL_FAULTS))}
    assert found == {fault.name for fault in FULL_FAULTS}


def test_some_meet_a_second_fault_some_of_them_while_they_recover() -> None:
    scenarios = [full_plan(seed) for seed in range(200)]
    seconds = [scenario.strikes[1] for scenario in scenarios if len(scenario.strikes) == 2]
    assert 20 < len(seconds) < 120
    assert {strike.attempt for strike in seconds} == {1, 2}
    assert all(strike.fault.second for strike in seconds)
    assert all(scenario.shape in strike.fault.shapes for scenario in scenarios for strike in scenario.strikes)


def test_everything_that_a_fault_asks_for_can_be_done() -> None:
    assert all(callable(getattr(FullActs, fault.act, None)) for fault in FULL_FAULTS if not fault.plan)
    assert all((fault.at == "plan") == bool(fault.plan) != bool(fault.act) for fault in FULL_FAULTS)
    assert {fault.at for fault in FULL_FAULTS} == {"step", "save", "delivery", "plan"}
