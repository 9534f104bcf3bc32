"""The instance's folder where it cannot be used."""

from pathlib import Path

import pytest

from flows.cli.plain import storage_text
from slipstream.instance import InstanceError, home


def test_a_home_is_the_same_wherever_a_command_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_HOME", "state")
    with pytest.raises(InstanceError, match="SLIPSTREAM_HOME = 'state' in the environment is another folder wherever"):
        home()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "state"))
    assert home().stat().st_mode & 0o777 == 0o700


def test_a_home_that_cannot_be_one_is_named_with_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for given in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("SLIPSTREAM_HOME", str(given))
        with pytest.raises(NotADirectoryError) as caught:
            home()
        text = storage_text(caught.value)
        assert text.startswith(str(tmp_path / "file"))
        assert (
            "(SLIPSTREAM_HOME in the environment): Not a directory: a folder belongs there: move the file away" in text
        )
