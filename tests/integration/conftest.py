"""Fixtures of tests that need a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import save_tiny_model
from tests.serving_process import VllmServer, new_run, serving


@pytest.fixture(scope="session")
def tiny_model_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer Qwen3 with tied embeddings and a byte tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def tiny_model_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an output layer of its own."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="session")
def vllm_server(tiny_model_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One real vLLM server (CPU) of the tied model for the whole session, started by its leader.

    Tests change its weights: one that depends on them delivers its own first.
    """
    run = new_run(tmp_path_factory.mktemp("runs"), tiny_model_tied, "shared")
    with serving(run, tiny_model_tied) as server:
        yield server
