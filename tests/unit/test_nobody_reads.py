"""Commands whose output nobody reads any more, as behind `| head`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.plain import NOBODY_READS, fail_plainly
from tests.old_runs import a_run

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_no_error_of_the_storage(capsys: pytest.CaptureFixture[str]) -> None:
    @fail_plainly
    def prints() -> int:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(SystemExit) as left:
        prints()
    assert left.value.code == NOBODY_READS
    assert capsys.readouterr().err == ""


def test_a_removal_goes_on_and_is_not_told_otherwise(tmp_path: Path) -> None:
    for name in ("a", "b"):
        a_run(tmp_path, name)
    words = (
        "from flows.cli import clean; import sys; clean.click.echo = lambda *_, **__: None; clean.clean(sys.argv[1:])"
    )
    reading, writing = os.pipe()
    os.close(reading)
    arguments = ["--older-than", "1d", "--yes", "--root", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", words, *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())
