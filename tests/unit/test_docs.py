"""The documentation says what the code does."""

from pathlib import Path

from slipstream.config_reference import reference
from slipstream.metrics.reference import reference as metrics_reference

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_configuration_page_is_made_from_the_model() -> None:
    page = (DOCS / "configuration.md").read_text()
    assert page == reference(), "run: python -m slipstream.config_reference > docs/configuration.md"


def test_the_metrics_page_is_made_from_the_registry() -> None:
    page = (DOCS / "metrics.md").read_text()
    assert page == metrics_reference(), "run: python -m slipstream.metrics.reference > docs/metrics.md"
