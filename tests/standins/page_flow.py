"""A flow process whose run is written by the test: it shows the run's page until the test says how to end.

python page_flow.py RUN_DIR FLOW_RUN_ID
"""

import sys
import time
from pathlib import Path

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.states import Pending, Scheduled

from flows.page import run as run_page
from flows.page.run import showing
from slipstream.run_folder import RunFolder, write_json

run_page.UPDATE_S = 0.5
run_page.CURVES_S = 0.5


@flow(name="train", persist_result=False)
def shown(run_dir: str) -> None:
    run = RunFolder(run_dir)
    began = time.monotonic()
    try:
        with showing(run):
            while not (run.path / "go").exists():
                time.sleep(0.05)
            began = time.monotonic()
            if (run.path / "go").read_text() == "fail":
                raise RuntimeError("out of luck")
    finally:
        write_json(run.path / "left.json", {"seconds": time.monotonic() - began})


if __name__ == "__main__":
    path, flow_run_id = sys.argv[1:]
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, Scheduled(name="AwaitingRetry"), force=True)  # as when it is led again
        client.set_flow_run_state(flow_run_id, Pending())
        flow_run = client.read_flow_run(flow_run_id)
    run_flow(shown, flow_run=flow_run, parameters={"run_dir": str(Path(path))})
