"""The documentation says what the code does."""

import re
from pathlib import Path

from slipstream.config_reference import reference
from slipstream.metrics.reference import reference as metrics_reference
from tests.documented import COMMANDS, ByTest, commands, pages, table

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_configuration_page_is_made_from_the_model() -> None:
    page = (DOCS / "configuration.md").read_text()
    assert page == reference(), "run: python -m slipstream.config_reference > docs/configuration.md"


def test_the_metrics_page_is_made_from_the_registry() -> None:
    page = (DOCS / "metrics.md").read_text()
    assert page == metrics_reference(), "run: python -m slipstream.metrics.reference > docs/metrics.md"


def test_the_tests_that_the_algorithm_s_page_names_are_there() -> None:
    page = (DOCS / "async_grpo.md").read_text()
    rows = re.findall(r"^\| \d+ \|.*$", page, re.MULTILINE)
    assert {int(row.split("|")[1]) for row in rows} == set(range(1, 14)), "one row at least for each part"
    folders = {"U": "unit", "M": "model", "I": "integration"}
    named = 0
    for row in rows:
        folder = None
        for word in re.findall(r"\b[UMI](?= `test_)|`test_\w+\.py`", row):
            if word in folders:
                folder = folders[word]
            else:
                assert folder, row
                assert (DOCS.parent / "tests" / folder / word.strip("`")).is_file(), f"{folder}/{word}"
                named += 1
    assert named > 50


def test_the_tests_that_the_recovery_page_names_are_there() -> None:
    page = (DOCS / "recovery.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ") and "---" not in row][1:]
    assert len(rows) == 27
    for row in rows:
        assert re.search(r"\b[RFISP]\b", row.split("|")[3]), row
        for name in re.findall(r"I `(test_\w+\.py)`", row):
            assert (DOCS.parent / "tests" / "integration" / name).is_file(), name
    for name in re.findall(r"`(tests/\w+/test_\w+\.py)`", page):
        assert (DOCS.parent / name).is_file(), name


def test_every_command_is_run_by_a_test() -> None:
    """And the table names no command that has gone, and no test that is not there."""
    assert set(pages()) == set(COMMANDS), "a page with commands has its entries in tests/documented.py"
    for page in COMMANDS:
        assert set(commands(page)) == set(table(page)), f"{page} against tests/documented.py"
        for how in table(page).values():
            if isinstance(how, ByTest):
                path, _, name = how.test.partition("::")
                text = (DOCS.parent / path).read_text()
                assert re.search(rf"^def {name}\(", text, re.MULTILINE), how.test


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md", DOCS.parent / "examples" / "README.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tests_that_the_design_names_are_there() -> None:
    named = re.findall(r"`([a-z]+/test_\w+\.py)::(test_\w+)`", (DOCS / "design.md").read_text())
    assert len(named) >= 12
    tests = DOCS.parent / "tests"
    assert not [f"{file}::{name}" for file, name in named if f"def {name}(" not in (tests / file).read_text()]
