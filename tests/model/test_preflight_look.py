"""Models that packed rows would be wrong for are refused before anything is allocated."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.preflight import preflight
from tests.unit.test_preflight import Case, make_model


@pytest.mark.parametrize("settings", [{"model_type": "gpt_oss"}, {"model_type": "qwen3", "layer_types": ["mamba"]}])
def test_models_that_packed_rows_would_be_wrong_for(tmp_path: Path, settings: dict[str, Any]) -> None:
    case = Case(tmp_path)
    config = case.config(model={"name": str(make_model(tmp_path / "other", num_hidden_layers=1, **settings))})
    (problem,) = preflight(config)
    assert (problem.key, problem.value) == ("model.name", config.model.name)
    assert "packed rows" in problem.message
