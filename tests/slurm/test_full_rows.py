"""Every fault of the chaos test on the full stack, each in a run of its own: hours, so only on demand."""

import pytest

from slurm.bed import Bed
from tests.chaos.faults import ONE, SEPARATE
from tests.chaos.full_drive import run_full_scenario
from tests.chaos.full_plan import FULL_FAULTS, FullFault, FullScenario, Strike

pytestmark = [pytest.mark.slurm, pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1800)]

IN_ONE_ALLOCATION = {"server process killed", "rank 0 killed", "learner node loses power", "server node loses power"}
ROWS = [(fault, SEPARATE) for fault in FULL_FAULTS]
ROWS += [(fault, ONE) for fault in FULL_FAULTS if fault.name in IN_ONE_ALLOCATION]


@pytest.mark.parametrize(("fault", "shape"), [pytest.param(f, shape, id=f"{f.name}, {shape}") for f, shape in ROWS])
def test_a_row(bed: Bed, fault: FullFault, shape: str) -> None:
    result = run_full_scenario(bed, FullScenario(0, shape, 1, 2, 4, (Strike(fault, max(6, 4 * fault.saves + 1)),)))
    assert result.right, result.problems
