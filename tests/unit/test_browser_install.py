"""Where there is no browser, its tests say so and how to get one."""

from pathlib import Path

import pytest

from tests.browser import install


def script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_no_browser_is_told_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(install.BROWSER_ENV, raising=False)
    assert install.browser_path() is None
    assert install.BROWSER_ENV in (install.unusable() or "")
    monkeypatch.setattr(install, "is_debian", lambda: True)
    assert "apt-get install -y --no-install-recommends chromium" in (install.unusable() or "")


def test_one_that_was_named_counts_and_a_broken_one_says_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(install.BROWSER_ENV, str(tmp_path / "none"))
    assert "is no program" in (install.unusable() or "")
    monkeypatch.setenv(install.BROWSER_ENV, str(script(tmp_path, "broken", "echo no such library >&2; exit 127")))
    assert "no such library" in (install.unusable() or "")
    monkeypatch.setenv(install.BROWSER_ENV, str(script(tmp_path, "good", "echo Chromium 1")))
    assert install.unusable() is None
    assert install.install() is False


def test_without_root_or_apt_nothing_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(install.BROWSER_ENV, raising=False)
    monkeypatch.setattr(install, "apt_get", lambda *words: pytest.fail(f"apt-get {words}"))
    monkeypatch.setattr(install, "is_debian", lambda: False)
    assert install.main(["--if-possible"]) == 0
    assert "will be skipped: this is not Debian" in capsys.readouterr().out
    monkeypatch.setattr(install, "is_debian", lambda: True)
    monkeypatch.setattr(install.os, "geteuid", lambda: 1000)
    assert install.main([]) == 1
    assert "needs root" in capsys.readouterr().err
