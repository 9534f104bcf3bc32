"""The parts of the SLURM test bed that need neither root nor SLURM."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm.bed import packages
from slurm.bed.cli import main
from slurm.bed.configuration import FILES, slurm_conf
from slurm.bed.description import BedError, Description, free_uids, load
from slurm.bed.machine_init import first_hidden_ancestor
from slurm.bed.machines import command_line

BED = Description(folder="/srv/bed", index=7, nodes=3, gpus=4, users={"bed1": 58001})


def test_names_and_addresses() -> None:
    assert BED.machines == ["ctl", "login", "n1", "n2", "n3"]
    assert [BED.address(name) for name in ("n1", "n3", "ctl")] == ["10.213.7.1", "10.213.7.3", "10.213.7.253"]
    assert (BED.node("2"), BED.node("n2"), BED.machine("login")) == ("n2", "n2", "login")
    longest = Description(folder="/b", index=250, nodes=64)
    assert max(len(longest.cable(name)) for name in longest.machines) <= 15, "the kernel's limit"


@pytest.mark.parametrize("name", ["4", "n0", "0", "login", "ctl", ""])
def test_what_is_no_node(name: str) -> None:
    with pytest.raises(BedError, match="n1 to n3"):
        BED.node(name)


def test_an_unknown_user_is_named() -> None:
    with pytest.raises(BedError, match="'eve' is not one of the bed's: root, bed1"):
        command_line(BED, 1, ["true"], "eve", None, None)


def test_a_folder_too_deep_for_sockets_is_refused() -> None:
    with pytest.raises(BedError, match="longer than 88"):
        Description(folder="/" + "x" * 88, index=1)


def test_it_is_kept_in_one_file(tmp_path: Path) -> None:
    bed = Description(folder=str(tmp_path), index=3, users=free_uids(["a", "b"]), exposed=("/opt",))
    bed.save()
    assert load(tmp_path) == bed
    (tmp_path / "bed.json").write_text("{")
    with pytest.raises(BedError, match="is damaged"):
        load(tmp_path)
    (tmp_path / "bed.json").write_text('{"format": 0}')
    with pytest.raises(BedError, match="another version"):
        load(tmp_path)


def test_configuration() -> None:
    texts = {name: text(BED) for name, text in FILES.items()}
    assert texts["gres.conf"] == "NodeName=n[1-3] Name=gpu File=/srv/bed/dev/nvidia[0-3]\n"
    assert "NodeAddr=10.213.7.2 " in texts["slurm.conf"]
    assert "accounting_storage/slurmdbd" in texts["slurm.conf"]
    assert "bed1:x:58001:58001:test bed:/srv/bed/home/bed1:/bin/bash\n" in texts["passwd"]
    assert "10.213.7.253 ctl\n" in texts["hosts"]
    without = slurm_conf(Description(folder="/b", index=1, accounting=False, cgroup=False))
    assert "accounting_storage/none" in without
    assert "slurmdbd" not in without
    assert "proctrack/linuxproc" in without


def test_nothing_of_the_caller_reaches_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    call = command_line(BED, 4242, ["env"], "bed1", None, {"RANK": "1"})
    assert "-i" in call
    assert not any("secret" in word for word in call)
    assert call[-2:] == ["RANK=1", "env"]
    assert "--chdir=/srv/bed/home/bed1" in call


def test_the_outermost_closed_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = {"/a": 0o755, "/a/closed": 0o700, "/a/closed/b": 0o750, "/a/closed/b/c": 0o755, "/a/open": 0o711}
    monkeypatch.setattr(os, "stat", lambda path: SimpleNamespace(st_mode=modes[path]))
    assert first_hidden_ancestor("/a/closed/b/c", set()) == "/a/closed"
    assert first_hidden_ancestor("/a/open/x", set()) is None
    assert first_hidden_ancestor("/a/closed", set()) is None, "what is closed itself no mount opens"
    assert first_hidden_ancestor("/a/open/x", {"/a"}) == "/a"


def test_without_root_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in str(packages.unusable())
    assert main(["check"]) == 1
    assert "testbed: error: a SLURM test bed needs root" in capsys.readouterr().err
    assert main(["up"]) == 1
    assert "`up` needs root" in capsys.readouterr().err


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        packages.shutil, "which", lambda name, path=None: None if name in ("slurmctld", "apt-get") else name
    )
    assert packages.missing_packages() == ["slurm-wlm"]
    assert "not Debian" in str(packages.unusable())
    assert "apt-get install -y --no-install-recommends slurm-wlm`" in str(packages.unusable())
    with pytest.raises(BedError, match="install slurm-wlm by hand"):
        packages.install()


def test_where_it_cannot_be_installed_make_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages.shutil, "which", lambda name, path=None: None)
    assert main(["install"]) == 1
    assert main(["install", "--if-possible"]) == 0
    assert "the SLURM tests will be skipped: this is not Debian" in capsys.readouterr().out


def test_a_command_needs_a_bed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--dir", str(tmp_path)]) == 1
    assert f"no bed in {tmp_path}: start one with" in capsys.readouterr().err
