"""What a rank of the learner makes of the configuration."""

import warnings
from pathlib import Path

import pytest

from slipstream.config import AsyncGRPOConfig
from slipstream.config_file import load_config
from slipstream.learner.main import on_gpu, trainer_arguments
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder

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
