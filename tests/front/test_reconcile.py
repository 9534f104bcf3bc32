"""Runs that a worker started, and what becomes of them when worker, flow or Prefect die: real ones, with stand-ins of models."""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psutil
import pytest

from slipstream.run_folder import read_json, write_json
from tasks.lease import newest_term
from tasks.origin import origin_file, read_origin
from tasks.records import read_faults
from tests.front_runs import CLI, INSTANCE, PATIENCE_S, Front
from tests.prefect_server import ROOT
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NOWHERE = "http://127.0.0.1:9/api"
PROCESSES = 6  # of a run: controller, leader and the leader's child, of both roles


@pytest.fixture(scope="module")
def module_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    found = Front(tmp_path_factory.mktemp("front"))
    try:
        yield found.start()
    finally:
        found.close()


@pytest.fixture
def front(module_front: Front) -> Front:
    """Server and worker run, whatever the test before did to them."""
    if module_front.worker is None or module_front.worker.poll() is not None:
        module_front.start_worker()
    return module_front


def acts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["act"] for row in rows]


def start_again(front: Front, flow: str) -> None:
    """As the UI does."""
    front.force(flow, "SCHEDULED", "AwaitingRetry", scheduled_time=datetime.now(UTC).isoformat())


def test_a_killed_flow_is_started_again_by_itself(front: Front) -> None:
    """No hook runs in a process that is killed. Its jobs have none of its outputs, so that the worker sees it die.

    The second start takes the jobs over: no task of it is answered from a cache, with the job of a dead one. The server
    dies within the second of the crash and loses what it would have told others: nothing here waits for that.
    """
    flow, run = front.submit("killed", tags=["slipstream.sweep:s-1"])
    front.training(run)
    origin = read_origin(run)
    assert (origin.flow_run, origin.deployment) == (flow, front.deployment)
    assert (origin.instance, origin.sweep) == (INSTANCE, "s-1")
    assert run.run_id in front.flow_run(flow)["name"]
    assert acts(front.reconcile()[run.run_id]) == ["nothing"]
    jobs = run.assignment()
    front.kill_leader(run)
    front.wait_state(flow, "CRASHED")
    front.server.kill()
    front.server.start()
    assert len(front.processes(run)) >= PROCESSES
    again = ["start its flow run again"]
    wait_until(lambda: acts(front.reconcile("--dry-run")[run.run_id]) == again, "it is to start again", PATIENCE_S)
    assert front.state(flow) == "CRASHED"
    front.reconcile()
    front.wait_state(flow, "RUNNING")
    wait_until(lambda: newest_term(run) == 2, "the second start leads", PATIENCE_S)
    front.go(run)
    assert front.wait_state(flow, "COMPLETED")["run_count"] == 2
    assert (run.attempts(), run.assignment(), front.processes(run)) == ([1], jobs, [])
    tasks = front.call("POST", "task_runs/filter", {"flow_runs": {"id": {"any_": [flow]}}})
    assert "Cached" not in {task["state"]["name"] for task in tasks}
    front.reconcile()
    assert run.run_id not in front.reconcile(), "a run that has ended, and of which all agree, is not looked at again"


def test_a_flow_that_dies_before_it_has_a_folder_is_started_again(front: Front) -> None:
    """Nothing of it is on storage: only Prefect knows that there is a run to make."""
    front.die_in_prepare("early")
    flow, run = front.submit("early")
    front.wait_state(flow, "CRASHED")
    assert not run.path.exists()
    again, name = ["start its flow run again"], f"flow run {flow}"
    wait_until(lambda: acts(front.reconcile("--dry-run").get(name, [])) == again, "it is to start again", PATIENCE_S)
    assert acts(front.reconcile("--root", str(front.root)).get(f"flow run {flow}", [])) == []
    front.reconcile_until(flow, "SCHEDULED", "PENDING", "RUNNING")
    front.training(run)
    front.go(run)
    assert front.wait_state(flow, "COMPLETED")["run_count"] == 2
    assert (run.attempts(), front.outcome(run)) == ([1], "finish")


def test_worker_and_flow_are_killed_and_a_person_cancels(front: Front) -> None:
    """A cancel without worker and flow runs no hook, and Prefect alone would say Cancelling for minutes.

    A crash that is forced on a cancelled run does not start it again, also where it comes before the cancel was seen.
    """
    names = ("both", "cancel", "stop", "forced")
    (both, goes_on), (cancel, cancelled), (stop, stopped), (force, forced) = (front.submit(name) for name in names)
    for run in (goes_on, cancelled, stopped, forced):
        front.training(run)
    front.kill_worker(goes_on, cancelled, stopped, forced)
    assert {front.state(flow) for flow in (both, cancel, stop, force)} == {"RUNNING"}, "nobody has told Prefect"
    for flow in (cancel, force):
        front.call("POST", f"flow_runs/{flow}/set_state", {"state": {"type": "CANCELLING"}})
    front.force(force, "CRASHED", "Crashed")
    assert len(front.processes(cancelled)) >= PROCESSES

    rows = front.reconcile()
    assert acts(rows[cancelled.run_id])[0] == "stop its jobs, and end it as cancelled"
    assert front.processes(cancelled) == []
    assert (front.outcome(cancelled), front.state(cancel)) == ("cancelled", "CANCELLED")
    assert (front.outcome(forced), front.state(force), front.processes(forced)) == ("cancelled", "CANCELLED", [])
    front.reconcile_until(both, "SCHEDULED")
    front.reconcile_until(stop, "SCHEDULED")
    assert acts(front.reconcile()[goes_on.run_id]) == ["nothing"], "it waits for its worker"

    done = subprocess.run([*CLI, "stop", str(stopped.path)], cwd=ROOT, env=front.environment, check=False)
    assert done.returncode == 0
    front.reconcile()
    assert (front.outcome(stopped), front.processes(stopped)) == ("cancelled", [])

    shown = {one["key"]: one for one in front.artifacts(cancel)}
    assert len(shown) == len(front.artifacts(cancel)), "the same artifacts"
    assert "cancelled" in shown["slipstream-run"]["data"].lower()
    wait_until(lambda: "slipstream.cancelled" in front.events(cancelled), "the event of its end", PATIENCE_S)

    (cancelled.path / "outcome.json").touch()  # so that it is looked at again
    front.force(cancel, "CRASHED", "Crashed")
    front.reconcile()
    assert front.state(cancel) == "CANCELLED"

    front.start_worker()
    front.training(goes_on)
    wait_until(lambda: newest_term(goes_on) == 2, "the second start leads", PATIENCE_S)
    front.go(goes_on)
    assert front.wait_state(both, "COMPLETED")["run_count"] == 2
    assert goes_on.attempts() == [1]
    assert front.wait_state(stop, "CANCELLED")["run_count"] == 2, "asked for before the run ended: it tells the end"
    assert (stopped.attempts(), cancelled.attempts()) == ([1], [1])


def test_a_live_run_keeps_its_leader_whatever_prefect_says(front: Front) -> None:
    """Prefect crashes a live run after an outage, starts a second process where it is told to, and goes away for a while;
    a person pauses it in the page."""
    flow, run = front.submit("live")
    front.training(run)
    leader = front.leader(run)
    front.force(flow, "CRASHED", "Crashed")
    assert front.reconcile()[run.run_id][0]["state"] == "RUNNING"
    assert (front.state(flow), front.leader(run)) == ("RUNNING", leader)
    assert leader is not None

    start_again(front, flow)
    wait_until(lambda: front.flow_run(flow)["run_count"] == 2, "a second process is started", PATIENCE_S)
    front.wait_state(flow, "RUNNING")
    assert (newest_term(run), front.leader(run)) == (1, leader)

    front.call("POST", f"flow_runs/{flow}/set_state", {"state": {"type": "PAUSED", "name": "Paused"}})
    assert acts(front.reconcile()[run.run_id]) == ["nothing"]
    assert front.state(flow) == "PAUSED", "a person's pause stays; it holds nothing up"

    front.server.kill()
    front.go(run)
    wait_until(lambda: front.outcome(run), "it ends without a server", PATIENCE_S)
    wait_until(lambda: not front.processes(run), "no job is left", PATIENCE_S)
    wait_until(lambda: not psutil.pid_exists(leader), "its flow gives up telling", PATIENCE_S)
    front.server.start()
    front.reconcile_until(flow, "COMPLETED")
    assert (front.outcome(run), run.attempts(), newest_term(run)) == ("finish", [1], 1)
    assert read_faults(run) == ()


def test_a_person_cancels_in_the_ui(front: Front) -> None:
    flow, run = front.submit("ui")
    front.training(run)
    front.call("POST", f"flow_runs/{flow}/set_state", {"state": {"type": "CANCELLING"}})
    front.wait_state(flow, "CANCELLED")
    wait_until(lambda: front.outcome(run) == "cancelled", "it says so", PATIENCE_S)
    assert front.processes(run) == []
    assert (read_json(run.cancel_file) or {})["who"] == "Prefect"


def test_a_worker_that_is_stopped_ends_no_job(front: Front) -> None:
    flow, run = front.submit("worker")
    front.training(run)
    jobs, leader = run.assignment(), front.leader(run)
    assert front.worker is not None
    assert leader is not None
    front.worker.terminate()
    wait_until(lambda: not psutil.pid_exists(leader), "its flow ends with the worker", PATIENCE_S)
    assert (front.outcome(run), run.cancel_file.exists()) == ("", False)
    assert len(front.processes(run)) >= PROCESSES
    front.worker.wait(PATIENCE_S)
    front.start_worker()
    wait_until(lambda: front.reconcile() and newest_term(run) == 2, "it is led again", PATIENCE_S)
    front.go(run)
    front.reconcile_until(flow, "COMPLETED")
    assert (run.attempts(), run.assignment()) == ([1], jobs)


def test_leaders_that_die_are_bounded_and_a_person_may_start_it_again(front: Front) -> None:
    flow, run = front.submit("bounded", "recovery.max_restarts=1")
    front.training(run)
    front.kill_leader(run)
    front.wait_state(flow, "CRASHED")
    front.reconcile_until(flow, "SCHEDULED", "PENDING", "RUNNING")
    wait_until(lambda: newest_term(run) == 2, "the second start leads", PATIENCE_S)
    front.kill_leader(run)
    front.reconcile_until(flow, "FAILED")
    assert (front.outcome(run), front.processes(run)) == ("fail", [])
    assert "died, 1 times without a new step" in front.wait_state(flow, "FAILED")["state"]["message"]
    front.reconcile()
    assert front.state(flow) == "FAILED"

    start_again(front, flow)
    front.training(run, attempt=2)
    front.go(run)
    assert front.wait_state(flow, "COMPLETED")["run_count"] == 3
    assert run.attempts() == [1, 2]


def test_a_run_that_prefect_does_not_know_is_left_alone_and_without_prefect_a_supervisor_leads(front: Front) -> None:
    """Another database, or a colleague's server, must end nobody's training. Two passes at once are harmless."""
    (unknown, left), (flow, run) = front.submit("unknown"), front.submit("away")
    for one in (left, run):
        front.training(one)
        front.kill_leader(one)
    front.wait_state(unknown, "CRASHED")
    front.wait_state(flow, "CRASHED")
    front.call("DELETE", f"flow_runs/{unknown}")
    (row,) = front.reconcile("--dry-run")[left.run_id]
    assert row["act"] == "nothing"
    assert "does not know its flow run" in row["why"]

    origin = json.loads(origin_file(left).read_text())
    write_json(origin_file(left), {**origin, "instance": "somebody"})
    environment = front.environment | {"PREFECT_API_URL": NOWHERE}
    command = [*CLI, "reconcile", "--json"]
    passes = [subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    rows = [row for one in passes for row in json.loads(one.communicate(timeout=PATIENCE_S)[0])]
    assert any("does not answer" in row["why"] for row in rows if row["run"] == "Prefect")
    assert left.run_id not in {row["run"] for row in rows}, "it is another instance's"
    wait_until(lambda: newest_term(run) == 2, "a supervisor leads", PATIENCE_S)
    front.go(run)
    wait_until(lambda: front.outcome(run) == "finish", "it finishes", PATIENCE_S)
    assert run.attempts() == [1]
    wait_until(lambda: "has finished" in (run.logs / "supervise.log").read_text(), "it says so", PATIENCE_S)
    front.reconcile_until(flow, "COMPLETED")
    assert len(front.processes(left)) >= PROCESSES
    assert (newest_term(left), front.outcome(left)) == (1, "")


def test_what_is_refused_fails_with_the_reason(front: Front) -> None:
    """A configuration that cannot run, the id of another run, one that leads out of the root, a root that is a file."""
    taken = front.root / "taken"
    taken.mkdir()
    (taken / "run.toml").write_text("")
    write_json(taken / "origin.json", {"flow_run": "another"})
    refused, run = front.submit("refused", 'reward.functions=["nowhere:nothing"]')
    other, _ = front.submit("other", run_id="taken")
    outside, _ = front.submit("outside", run_id="../outside")
    (front.folder / "file").touch()
    no_folder, _ = front.submit("no-folder", f"storage.root={front.folder / 'file'}")
    message = front.wait_state(refused, "FAILED")["state"]["message"]
    assert "reward.functions" in message
    assert "nowhere" in message
    assert not run.path.exists()
    assert "there is such a run already" in front.wait_state(other, "FAILED")["state"]["message"]
    assert "run_id = '../outside' cannot name a run" in front.wait_state(outside, "FAILED")["state"]["message"]
    assert not (front.folder / "outside").exists()
    message = front.wait_state(no_folder, "FAILED")["state"]["message"]
    assert "is a file, not a folder" in message
    assert [artifact["key"] for artifact in front.artifacts(no_folder)] == ["refused"]


def test_the_flow_of_reconciliation_and_no_flow_has_a_hook(front: Front) -> None:
    """Hooks see only the parameters that were passed, and do not run where a process is killed: nothing depends on one."""
    script = (
        "from flows.reconcile import reconcile\n"
        "from flows.train import resume, train\n"
        "kinds = ('on_failure', 'on_completion', 'on_crashed', 'on_cancellation', 'on_running')\n"
        "for flow in (reconcile, resume, train):\n"
        "    assert not any(getattr(flow, f'{kind}_hooks') for kind in kinds)\n"
        "print(reconcile())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=front.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = front.call("POST", "flow_runs/filter", {"flows": {"name": {"any_": ["reconcile"]}}})
    assert [run["state_type"] for run in found] == ["COMPLETED"]
