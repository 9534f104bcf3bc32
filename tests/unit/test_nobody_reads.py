"""Commands whose output nobody reads any more, as behind `| head`."""

from pathlib import Path
from typing import Any

import click
import pytest

from flows.cli.clean import clean
from flows.cli.plain import NOBODY_READS, fail_plainly
from tests.old_runs import a_run


def test_it_is_no_error_of_the_storage(capsys: pytest.CaptureFixture[str]) -> None:
    @fail_plainly
    def prints() -> int:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(SystemExit) as left:
        prints()
    assert left.value.code == NOBODY_READS
    assert capsys.readouterr().err == ""


def test_a_removal_goes_on_and_is_not_called_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        a_run(tmp_path, name)
    echo = click.echo

    def read_until_the_first(text: Any = None, **how: Any) -> None:
        if str(text).startswith("removed"):
            raise BrokenPipeError(32, "Broken pipe")
        echo(text, **how)

    monkeypatch.setattr(click, "echo", read_until_the_first)
    with pytest.raises(SystemExit) as left:
        clean.main(["--older-than", "1d", "--yes", "--root", str(tmp_path)])
    assert left.value.code == 0
    assert capsys.readouterr().err == ""
    assert not list(tmp_path.iterdir())
