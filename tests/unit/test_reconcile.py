"""What reconciliation sees of run folders: whose they are, who leads them, how often leaders were started."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cluster.decide import Kind
from flows.cli.main import main
from flows.prefect_rest import STARTED, FlowRun, PrefectAway
from flows.reconciliation import Pass, Row, reconcile_all
from slipstream.instance import remember_root
from slipstream.run_folder import RunFolder, RunFolderError, create_exclusively, read_object, write_atomic, write_json
from tasks.leads import Lead, asked_for, in_a_row, read_leads, record_lead, resumed_at
from tasks.lease import LeaseWatch, begin_after, lead_if_free, newest_term, release
from tasks.origin import Origin, begun_by, origin_here, original_of, write_origin
from tasks.outcome import Outcome, read_outcome, write_outcome
from tasks.prepare import check_resumable
from tasks.reconcile import Memory, do, is_ours, look, runs_in
from tasks.reconcile_policy import Act, Leader, Plan
from tasks.records import forgive


@pytest.fixture(autouse=True)
def instance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_INSTANCE", "me")
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tasks.reconcile.finish", lambda run: None)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "runs", "r")
    write_origin(folder, origin_here("f00d", "d0"))
    folder.begin_attempt(None, 0)
    return folder


def holder(run: RunFolder, term: int, host: str, counter: int) -> None:
    """The lease of a process of another host."""
    if newest_term(run) < term:
        (run.path / "leases").mkdir(exist_ok=True)
        create_exclusively(run.path / "leases" / f"{term}.json", json.dumps({"pid": 1, "host": host, "started": 0.0}))
    write_json(run.path / "lease.json", {"term": term, "counter": counter, "released": False})


def leader(run: RunFolder, memory: Path) -> Leader:
    """As one pass judges it."""
    known = Memory(memory)
    found = look(run, known).facts.leader
    known.save()
    return found


def test_whose_a_run_is(run: RunFolder, tmp_path: Path) -> None:
    assert [found.path for found in runs_in([tmp_path / "runs", tmp_path / "nowhere"])] == [run.path]
    assert is_ours(run)
    write_origin(run, Origin(instance="somebody"))
    assert not is_ours(run)
    write_origin(run, Origin())  # of before there were instances
    assert not is_ours(run)


def test_a_copy_is_left_alone_and_its_original_named(run: RunFolder, tmp_path: Path) -> None:
    """It names the other's jobs and flow run. One that was moved is no copy, nor is one at the end of a link."""
    write_atomic(run.run_file, "")
    copy = RunFolder(tmp_path / "runs" / "backup")
    shutil.copytree(run.path, copy.path)
    (tmp_path / "link").symlink_to(run.path)
    assert original_of(copy) == run.path
    assert original_of(run) is None
    assert original_of(RunFolder(tmp_path / "link")) is None
    rows = {row.run: row for row in reconcile_all([tmp_path / "runs"], dry_run=True)}
    assert (rows["backup"].act, rows["backup"].why) == (Act.NOTHING, f"it is a copy of {run.path}")
    for command in ("stop", "resume", "supervise"):
        done = CliRunner().invoke(main, [command, str(copy.path)])
        assert done.exit_code == 2
        assert f"is a copy of {run.path}" in done.output
    assert not copy.cancel_file.exists()
    with pytest.raises(RunFolderError, match="is a copy of"):  # as a flow asks
        check_resumable(copy)
    run.path.rename(tmp_path / "moved")
    assert original_of(copy) is None
    assert original_of(RunFolder(tmp_path / "moved")) is None


def test_a_run_of_another_user_is_not_ours(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not is_ours(run)


def test_a_leader_of_another_host_is_judged_by_two_looks_of_one_clock(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("tasks.reconcile.time.monotonic", lambda: now[0])
    holder(run, 1, "elsewhere", 1)
    assert leader(run, tmp_path) is Leader.UNSURE
    holder(run, 1, "elsewhere", 2)
    assert leader(run, tmp_path) is Leader.LIVES
    now[0] += 30
    assert leader(run, tmp_path) is Leader.LIVES
    now[0] += 31
    assert leader(run, tmp_path) is Leader.NONE
    holder(run, 1, "elsewhere", 3)  # it was only stopped
    assert leader(run, tmp_path) is Leader.LIVES
    holder(run, 2, "elsewhere", 1)
    now[0] += 61
    assert leader(run, tmp_path) is Leader.LIVES, "another term"
    monkeypatch.setattr("tasks.reconcile.BOOT_ID", tmp_path / "another-boot")
    now[0] = 5.0
    assert leader(run, tmp_path) is Leader.UNSURE, "the clock has begun anew"


def test_a_leader_of_this_host_is_seen_to_be_gone(run: RunFolder, tmp_path: Path) -> None:
    assert leader(run, tmp_path) is Leader.NONE
    assert lead_if_free(run, LeaseWatch(run, 60), 60) is not None
    assert leader(run, tmp_path) is Leader.LIVES
    release(run)
    assert leader(run, tmp_path) is Leader.RELEASED
    holder(run, 2, socket.gethostname(), 1)  # pid 1 with another start
    assert leader(run, tmp_path) is Leader.NONE


def test_a_settled_run_is_left_out_until_its_end_changes(run: RunFolder, tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    assert memory.done(run) is None
    memory.settle(run, "f00d")
    assert memory.done(run) is None, "it has no end"
    write_outcome(run, Outcome(Kind.FINISH, "done"), 1)
    memory.settle(run, "f00d")
    memory.save()
    assert Memory(tmp_path).done(run) == "f00d"
    write_outcome(run, Outcome(Kind.FAIL, "another"), 1)
    os.utime(run.path / "outcome.json", (1, 1))
    assert Memory(tmp_path).done(run) is None


def test_a_term_that_somebody_has_begun_since_is_not_ended(run: RunFolder, tmp_path: Path) -> None:
    """A person resumes the run between the look and the act."""
    write_outcome(run, Outcome(Kind.FAIL, "broken"), 1)
    found = look(run, Memory(tmp_path))
    lease = begin_after(run, found.term, 60)
    assert lease is not None
    try:
        assert do(found, Plan(Act.STOP_JOBS, "it has ended")) is False
    finally:
        lease.release()


def test_a_cancel_is_recorded_with_its_reason(run: RunFolder, tmp_path: Path) -> None:
    assert do(look(run, Memory(tmp_path)), Plan(Act.CANCEL, "its flow run was cancelled in Prefect"))
    ended = read_outcome(run)
    assert ended is not None
    assert ended.kind is Kind.CANCELLED
    assert "cancelled in Prefect" in ended.reason
    assert run.cancel_file.exists()
    assert look(run, Memory(tmp_path)).facts.leader is Leader.RELEASED


def test_leads_without_a_new_step_count(run: RunFolder) -> None:
    for lead in (Lead(1, 0), Lead(2, 4), Lead(3, 5), Lead(4, 5, queued=True), Lead(5, 5)):
        record_lead(run, lead)
    with open(run.path / "records" / "leads.jsonl", "a") as file:
        file.write('{"time": "never"}\n{"torn')
    leads = read_leads(run)
    assert len(leads) == 5
    assert in_a_row(leads, 5, 0) == 2
    assert in_a_row(leads, 4, 0) == 3, "resumed from a checkpoint: it has done step 5 before"
    assert in_a_row(leads, 6, 0) == 0
    assert in_a_row(leads, 5, 4) == 1, "a person resumed it"


def test_a_persons_resume_forgives(run: RunFolder) -> None:
    assert resumed_at(run) == 0
    forgive(run, 2)
    record_lead(run, Lead(1.0))
    assert in_a_row(read_leads(run), 0, resumed_at(run)) == 0


def test_which_start_was_asked_for(run: RunFolder) -> None:
    assert not asked_for(run, "f00d", 1)
    assert not asked_for(run, "f00d", None)
    record_lead(run, Lead(1.0, 0, "f00d", 1))
    assert asked_for(run, "f00d", 2)
    assert asked_for(run, "f00d", None)
    assert not asked_for(run, "f00d", 3), "a person started it once more"
    assert not asked_for(run, "another", 2)


class Prefect:
    """What a pass asks of a server: it knows these flow runs."""

    def __init__(self, *flows: FlowRun) -> None:
        self.known = {flow.id: flow for flow in flows}
        self.states: list[tuple[str, str]] = []

    def flow_runs(self, ids: Iterable[str]) -> dict[str, FlowRun]:
        return {flow: self.known[flow] for flow in ids if flow in self.known}

    def starting(self, tag: str, flows: Sequence[str], states: Sequence[str] = STARTED) -> list[FlowRun]:
        wanted = "reconcile" if "reconcile" in flows else ""
        return [flow for flow in self.known.values() if flow.state in states and flow.called == wanted]

    def set_state(self, flow: FlowRun, state: str, name: str, message: str) -> bool:
        self.states.append((flow.id, state))
        self.known[flow.id] = replace(flow, state=state, at=time.time())
        return True

    def call(self, method: str, route: str, body: Any = None) -> Any:
        raise PrefectAway("no page here")


def one_pass(prefect: Prefect, root: Path | None = None) -> list[Row]:
    memory = Memory()
    rows = Pass(prefect, memory).all([root] if root else None)  # type: ignore[arg-type]
    memory.save()
    return rows


def flow(identity: str, state: str, age_s: float = 3600.0, **more: Any) -> FlowRun:
    return FlowRun(identity, state, state.capitalize(), time.time() - age_s, "d0", 1, **more)


def test_a_person_s_start_of_a_settled_run_that_was_killed_at_once_is_seen(run: RunFolder, tmp_path: Path) -> None:
    remember_root(tmp_path / "runs")
    write_outcome(run, Outcome(Kind.FAIL, "out of luck"), 1)
    write_json(run.path / "outcome.json", {**read_object(run.path / "outcome.json"), "time": time.time() - 3600})
    assert [row.why for row in one_pass(Prefect(flow("f00d", "FAILED")))] == ["fail: out of luck"]
    assert one_pass(Prefect(flow("f00d", "FAILED"))) == []  # settled
    again = Prefect(flow("f00d", "RUNNING", 1.0))
    assert [row.act for row in one_pass(again)] == [Act.NOTHING]
    again.known["f00d"] = flow("f00d", "RUNNING")
    assert [row.act for row in one_pass(again)] == [Act.SET_STATE]
    assert again.states == [("f00d", "FAILED")]


def test_what_may_have_its_folder_where_nobody_can_look_is_not_started_anew(tmp_path: Path) -> None:
    root = tmp_path / "scratch" / "runs"
    root.mkdir(parents=True)
    remember_root(root)
    remember_root(tmp_path)
    prefect = Prefect(flow("beef", "CRASHED", 60.0))
    (tmp_path / "scratch").rename(tmp_path / "away")
    missing, started = one_pass(prefect)
    assert f"{root} is not to be seen (No such file or directory): mount it, or remove " in missing.why
    assert not missing.problem
    assert (started.act, prefect.states) == (Act.NOTHING, [])
    assert str(root) in started.why
    (tmp_path / "away").rename(tmp_path / "scratch")
    assert [row.act for row in one_pass(prefect)] == [Act.LEAD_BY_FLOW]


def test_a_pass_that_died_does_not_keep_others_from_starting() -> None:
    """Its deployment takes one at once, and a server that was started again gives the place of a dead one to nobody."""
    prefect = Prefect(
        flow("p1", "RUNNING", 1000.0, called="reconcile"), flow("p2", "RUNNING", 60.0, called="reconcile")
    )
    assert [(row.run, row.act) for row in one_pass(prefect)] == [("flow run p1", Act.SET_STATE)]
    assert prefect.states == [("p1", "CANCELLED")]


def test_a_home_that_takes_no_writes_keeps_no_run_from_being_looked_at(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "reconcile").touch()  # nothing can be made in it, whoever runs the test
    (found,) = reconcile_all([tmp_path / "runs"])[1:]
    assert found.run == "r"


def test_one_storage_root_does_not_keep_the_others_from_being_looked_at(run: RunFolder, tmp_path: Path) -> None:
    remember_root(tmp_path / "runs")
    (tmp_path / "home" / "roots" / "0.json").write_text("{")
    found = one_pass(Prefect(flow("f00d", "RUNNING", 1.0)))
    assert [row.run for row in found] == ["", "r"]
    assert "0.json is damaged" in found[0].why
    (given,) = one_pass(Prefect(), tmp_path / "nowhere")
    assert f"--root {tmp_path / 'nowhere'} is not to be seen" in given.problem


def test_a_start_that_died_before_it_wrote_anything_is_gone_on_with(tmp_path: Path, run: RunFolder) -> None:
    (tmp_path / "runs" / "half").mkdir()
    half = RunFolder(tmp_path / "runs" / "half")
    assert begun_by(half, "f00d")
    assert RunFolder.create(tmp_path / "runs", "half", begun=True).token_file.exists()
    assert begun_by(run, "f00d")
    assert not begun_by(run, "another")
    assert not begun_by(RunFolder(tmp_path / "runs" / "none"), "f00d")
