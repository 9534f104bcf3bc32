"""What a rank of the learner makes of the configuration."""

import warnings
from pathlib import Path

import pytest

from slipstream.config import AsyncGRPOConfig
from slipstream.config_file import load_config
from slipstream.config_section import LIBRARY_MARGIN_S
from slipstream.learner import main as learner_main
from slipstream.learner.main import on_gpu, trainer_arguments, wait_for_endpoint
from slipstream.learner.patience import server_patience_s
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, write_json

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.toml"))
ENDPOINT = {"url": "http://127.0.0.1:1", "authenticated": True}


def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error() -> None:
    assert on_gpu(2, available=True)
    assert not on_gpu(0, available=True)
    assert not on_gpu(0, available=False)
    with pytest.raises(RuntimeError, match=r"learner.gpus = 2, but torch sees no GPU.*learner.gpus = 0"):
        on_gpu(2, available=False)


def arguments_of(config: RunConfig, root: Path) -> AsyncGRPOConfig:
    run = RunFolder.create(root, "run-1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # no launcher made this process a rank
        return AsyncGRPOConfig(**(trainer_arguments(config, run, 1, ENDPOINT, has_gpu=False) | {"ddp_backend": None}))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_nothing_that_a_run_sets_itself_is_refused_or_warned_about(example: Path, tmp_path: Path) -> None:
    arguments = arguments_of(load_config(example), tmp_path)
    assert arguments.run_dir == str(tmp_path / "run-1")


@pytest.mark.parametrize(
    ("report_to", "run_name", "project"),
    [([], None, "huggingface"), (["tensorboard"], "run-1", "huggingface"), (["trackio"], "run-1", "slipstream")],
)
def test_integrations_know_the_run(
    report_to: list[str], run_name: str | None, project: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.tracking.report_problem", lambda name: None)  # whatever is installed here
    config = load_config(EXAMPLES[0])
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"report_to": report_to})})
    arguments = arguments_of(config, tmp_path)
    assert (arguments.run_name, arguments.project) == (run_name, project)


# ---- how long it waits for a server

DEADLINES = {
    "trainer": {"vllm_server_timeout": 1000},
    "server": {"startup_timeout": 2000},
    "recovery": {"max_idle_gpu_minutes": 50, "heartbeat_timeout": 10, "backoff_max": 200},
}


def config_of(**sections: dict[str, object]) -> RunConfig:
    settings = {"model": {"name": "m"}, "data": {"source": "d.jsonl"}, "learner": {"gpus": 0}, **DEADLINES}
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return RunConfig.model_validate(settings)


def test_the_supervisor_s_deadlines_for_a_server_come_before_the_learner_s() -> None:
    assert server_patience_s(config_of(), supervised=False) == 1000
    assert server_patience_s(config_of(), supervised=True) > 10 + 200 + 60 * 50 + 2000
    assert server_patience_s(config_of(trainer={"vllm_server_timeout": 9000}), supervised=True) == 9000
    external = config_of(server={"url": "http://127.0.0.1:1"})
    assert server_patience_s(external, supervised=True) == 1000


@pytest.mark.parametrize("assignment", [None, {"attempt": 1, "server": "s", "learner": "l"}])
def test_the_other_ranks_wait_longer_than_rank_0_does(assignment: dict[str, object] | None, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run-1")
    if assignment:
        write_json(run.assignment_file, assignment)
    config = config_of(learner=dict.fromkeys(("startup_timeout", "step_timeout", "sync_timeout", "save_timeout"), 60))
    arguments = trainer_arguments(config, run, 1, ENDPOINT, has_gpu=False)
    assert arguments["vllm_server_timeout"] == 1000
    assert arguments["server_patience"] == server_patience_s(config, supervised=bool(assignment))
    assert arguments["ddp_timeout"] == arguments["server_patience"] + LIBRARY_MARGIN_S


def test_by_hand_a_first_server_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"no server for attempt 1 within 0 s: see .*server-1\.log"):
        wait_for_endpoint(RunFolder.create(tmp_path, "run-1"), 1, 0.0)


def test_where_a_supervisor_leads_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(tmp_path, "run-1")
    write_json(run.assignment_file, {"attempt": 1, "server": "s", "learner": "l"})
    looks = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            write_json(run.endpoint_file(), {**ENDPOINT, "incarnation": "s"})

    monkeypatch.setattr(learner_main.time, "sleep", pause)
    assert wait_for_endpoint(run, 1, 0.0)["incarnation"] == "s"
    assert len(looks) == 3
