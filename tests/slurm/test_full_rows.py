"""Every fault of the chaos test on the full stack, each in a run of its own: hours, so only on demand."""

from collections.abc import Iterator
from typing import Any

import pytest

from slurm.bed import Bed
from tests.chaos.faults import ONE, SEPARATE
from tests.chaos.full_drive import run_full_scenario
from tests.chaos.full_plan import FULL_FAULTS, FullScenario, Strike

pytestmark = [pytest.mark.slurm, pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1800)]

IN_ONE_ALLOCATION = {"server process killed", "rank 0 killed", "learner node loses power", "server node loses power"}
TWO = [
    ("server process killed", "another rank killed"),
    ("rank 0 killed", "server process killed"),
    ("learner node loses power", "cancelled by a person"),
]  # the second while the run recovers from the first
FAULTS = {fault.name: fault for fault in FULL_FAULTS}


def rows() -> Iterator[Any]:
    for fault in FULL_FAULTS:
        first = Strike(fault, max(6, 4 * fault.saves + 1))
        yield pytest.param(SEPARATE, (first,), id=fault.name)
        if fault.name in IN_ONE_ALLOCATION:
            yield pytest.param(ONE, (first,), id=f"{fault.name}, one allocation")
    for name, other in TWO:
        yield pytest.param(SEPARATE, (Strike(FAULTS[name], 6), Strike(FAULTS[other], 0, 2)), id=f"{name}, then {other}")


@pytest.mark.parametrize(("shape", "strikes"), rows())
def test_a_row(bed: Bed, shape: str, strikes: tuple[Strike, ...]) -> None:
    result = run_full_scenario(bed, FullScenario(0, shape, 1, 2, 4, strikes))
    assert result.right, result.problems
