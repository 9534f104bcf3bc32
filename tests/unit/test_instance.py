"""The instance's folder where it cannot be used."""

from pathlib import Path

import pytest

import tasks.prepare
from flows.cli.plain import storage_text
from slipstream.config_file import load_config
from slipstream.instance import InstanceError, home
from tests.unit.test_sweep_folder import make


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


def test_nothing_is_made_where_the_home_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_HOME", "state")
    with pytest.raises(InstanceError):
        make(tmp_path)
    monkeypatch.setattr(tasks.prepare, "check", lambda _: [])
    with pytest.raises(InstanceError):
        tasks.prepare.prepare(load_config(tmp_path / "b.toml"))
    assert [path.name for path in tmp_path.iterdir()] == ["b.toml"]
