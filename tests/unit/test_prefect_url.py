"""A Prefect API that the user has set up, and that is not there."""

import socket
from pathlib import Path

import pytest

from flows.prefect_api import PrefectUnavailable, prefect_api


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def refusal(tmp_path: Path) -> str:
    with pytest.raises(PrefectUnavailable) as caught, prefect_api(tmp_path / "private", "run"):
        pass
    assert not (tmp_path / "private").exists()
    return str(caught.value)


def test_a_forgotten_url_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    url = f"http://127.0.0.1:{closed_port}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    message = refusal(tmp_path)
    assert f"PREFECT_API_URL = {url!r} (from the environment) does not answer" in message
    assert "unset the variable" in message
    monkeypatch.delenv("PREFECT_API_URL")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    (tmp_path / "profiles.toml").write_text(f'active = "a"\n[profiles.a]\nPREFECT_API_URL = "{url}"\n')
    assert "(from Prefect's active profile) does not answer" in refusal(tmp_path)


@pytest.mark.parametrize("url", ["not a url", "http://", "http://[::1"])
def test_a_url_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    assert "does not answer" in refusal(tmp_path)
