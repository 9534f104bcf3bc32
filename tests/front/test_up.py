"""`slipstream up` with real runs of the doubles: what its beginning, its middle and its end do, and do not do."""

import os
import signal
import stat
from collections.abc import Iterator

import httpx
import psutil
import pytest

from cluster.local_jobs import job_processes
from slipstream.run_folder import read_json
from tasks.stored import all_jobs
from tests.front_door import Front, alive, flow_processes
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    found = Front(tmp_path_factory.mktemp("up"))
    try:
        yield found.start()
    finally:
        found.close()


def test_a_run_goes_from_submit_to_completed(door: Front) -> None:
    flow_run = door.submit()
    assert door.wait_state(flow_run)["state_type"] == "COMPLETED", door.log_of(flow_run).read_text()[-3000:]
