"""What `slipstream up --install` writes. systemctl, loginctl and crontab are stand-ins that record how they were called;
the texts are judged by systemd itself where it is there."""

import getpass
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.up.install import (
    Place,
    cron_lines,
    cron_scripts,
    has_user_systemd,
    here,
    install,
    show,
    uninstall,
    units,
    with_block,
)
from flows.up.state import UpError, holding
from slipstream.run_folder import write_atomic

PLACE = Place(
    "alice",
    ["/venv/bin/python", "-m", "flows.cli.main", "up", "--preset", "/a b/100%.toml"],
    ["/venv/bin/python", "-m", "flows.cli.main", "reconcile"],
    "/opt/slip stream",
    {"SLIPSTREAM_HOME": "/home/alice/.slipstream", "TERM": 'a"b\\c', "PATH": "/usr/bin:/bin"},
    "/home/alice/.slipstream/logs",
)


def value(text: str, key: str) -> list[str]:
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{key}=")]


def test_the_units_are_the_server_the_workers_and_a_look_each_minute() -> None:
    found = units(PLACE)
    assert sorted(found) == [
        "slipstream-alice-reconcile.service",
        "slipstream-alice-reconcile.timer",
        "slipstream-alice-server.service",
        "slipstream-alice-workers.service",
    ]
    server, workers = found["slipstream-alice-server.service"], found["slipstream-alice-workers.service"]
    assert value(server, "ExecStart") == [
        '"/venv/bin/python" "-m" "flows.cli.main" "up" "--preset" "/a b/100%%.toml" "--only" "server"'
    ]
    assert value(server, "Environment")[1] == '"TERM=a\\"b\\\\c"'
    assert value(workers, "After") == ["slipstream-alice-server.service"]
    assert value(found["slipstream-alice-reconcile.timer"], "OnUnitInactiveSec") == ["60"]


@pytest.mark.parametrize("name", ["slipstream-alice-workers.service", "slipstream-alice-reconcile.service"])
def test_a_stop_reaches_no_flow_and_no_job_in_the_control_group(name: str) -> None:
    assert value(units(PLACE)[name], "KillMode") == ["process"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_understands_them(tmp_path: Path) -> None:
    place = Place(
        "alice", ["/bin/true", "100%", "$HOME"], ["/bin/true"], str(tmp_path), PLACE.environment, str(tmp_path)
    )
    for name, text in units(place).items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", *map(str, tmp_path.glob("slipstream-*"))],
        env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if "slipstream-" in line]
    assert not complaints, done.stderr
    assert done.returncode == 0, done.stderr


def test_cron_s_lines_say_where_and_with_what(tmp_path: Path) -> None:
    long = {"PATH": ":".join(f"/opt/module's/{number}/bin" for number in range(100)), "A": "$HOME %"}
    place = replace(PLACE, environment=long, logs=f"{tmp_path}/1 0%/logs", directory=str(tmp_path))
    first, up, look, last = cron_lines(place)
    assert (first, last) == ("# >>> slipstream alice", "# <<< slipstream alice")
    assert up == f"@reboot /bin/sh '{tmp_path}/1 0\\%/cron/up.sh'"
    assert look == f"* * * * * /bin/sh '{tmp_path}/1 0\\%/cron/reconcile.sh'"
    show_it = [
        sys.executable,
        "-c",
        "import json, os, sys; print(json.dumps([os.getcwd(), *sys.argv[1:], dict(os.environ)]))",
    ]
    scripts = cron_scripts(replace(place, up=[*show_it, "/a b/100%.toml", "$(id)"]))
    (tmp_path / "1 0%" / "logs").mkdir(parents=True)
    for path, text in scripts.items():
        write_atomic(path, text)
    subprocess.run(["/bin/sh", str(next(iter(scripts)))], env={}, check=True)
    *words, environment = json.loads((tmp_path / "1 0%" / "logs" / "up.log").read_text())
    assert words == [str(tmp_path), "/a b/100%.toml", "$(id)"]
    assert long.items() <= environment.items()


LINES = st.lists(
    st.sampled_from(["0 3 * * * backup", "", "# a remark", "MAILTO=me", "# >>> slipstream bob", "# <<< slipstream bob"])
)


@given(LINES)
def test_other_lines_of_a_crontab_stay(lines: list[str]) -> None:
    before = "".join(f"{line}\n" for line in lines)
    block = cron_lines(PLACE)
    once = with_block(before, "alice", block)
    assert with_block(once, "alice", block) == once
    assert once.splitlines() == [*lines, *block]
    assert with_block(once, "alice", []) == before


STANDIN = """#!/bin/sh
echo "$(basename $0) $*" >> {calls}
case "$(basename $0) $*" in
  "systemctl --user show-environment") exit {systemd} ;;
  "systemctl --user is-active"*) exit 3 ;;
  "loginctl "*) echo Linger={linger} ;;
  "crontab -l") cat {crontab} || {{ echo "${{NO_CRONTAB:-no crontab for alice}}" >&2; exit 1; }} ;;
  "crontab -") cat > {crontab} ;;
esac
"""


class Machine:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, systemd: bool, linger: str = "no") -> None:
        self.folder, self.calls_file, self.crontab = folder, folder / "calls", folder / "crontab"
        text = STANDIN.format(calls=self.calls_file, systemd=0 if systemd else 1, linger=linger, crontab=self.crontab)
        for name in ("systemctl", "loginctl", "crontab"):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        monkeypatch.setenv("SLIPSTREAM_HOME", str(folder / "home"))
        monkeypatch.setenv("SLIPSTREAM_INSTANCE", "alice")
        monkeypatch.setenv("HF_TOKEN", "s3cret-value")
        monkeypatch.setenv("https_proxy", "http://me:s3cret-value@proxy:1")
        self.said: list[str] = []

    def calls(self) -> list[str]:
        found = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return [call for call in found if "show-environment" not in call]

    def units(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (self.folder / "config" / "systemd" / "user").glob("*")}


SERVICES = "slipstream-alice-server.service slipstream-alice-workers.service"


def test_with_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, systemd=True)
    place = here(["--port", "4711"])
    show(place, machine.said.append)
    assert machine.calls() == []
    assert machine.units() == {}
    shown = "\n".join(machine.said)
    install(place, machine.said.append)
    assert machine.calls() == [
        "systemctl --user daemon-reload",
        f"systemctl --user enable {SERVICES} slipstream-alice-reconcile.timer",
        "systemctl --user start slipstream-alice-reconcile.timer",
        f"systemctl --user restart {SERVICES}",
        f"loginctl show-user {getpass.getuser()} --property=Linger",
    ]
    written = machine.units()
    assert written == units(place)
    assert all(text in shown for text in written.values())
    assert '"up" "--port" "4711" "--only" "server"' in written["slipstream-alice-server.service"]
    assert any("loginctl enable-linger" in line for line in machine.said)
    assert "s3cret-value" not in "".join(written.values())
    machine.said.clear()
    install(place, machine.said.append)
    assert [line.split()[-1] for line in machine.said[:4]] == ["unchanged"] * 4
    machine.calls()
    uninstall("alice", machine.said.append)
    assert machine.units() == {}
    assert machine.calls()[0] == f"systemctl --user disable --now {SERVICES} slipstream-alice-reconcile.timer"
    machine.said.clear()
    uninstall("alice", machine.said.append)
    assert machine.said == ["nothing was installed"]


def test_what_runs_in_a_terminal_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, systemd=True, linger="yes")
    with holding(["server"]):
        install(here([]), machine.said.append)
    assert not any("restart" in call for call in machine.calls())
    assert "slipstream down && systemctl --user start" in machine.said[-1]


def test_without_systemd_cron_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, systemd=False)
    assert not has_user_systemd()
    machine.crontab.write_text("0 3 * * * backup\n")
    place = here([])
    for _ in range(2):
        install(place, machine.said.append)
        assert machine.crontab.read_text().splitlines() == ["0 3 * * * backup", *cron_lines(place)]
    assert [text.split()[1] for text in machine.said if "crontab" in text] == ["written", "unchanged"]
    scripts = [tmp_path / "home" / "cron" / name for name in ("up.sh", "reconcile.sh")]
    assert "s3cret-value" not in machine.crontab.read_text() + "".join(path.read_text() for path in scripts)
    uninstall("alice", machine.said.append)
    assert not any(path.exists() for path in scripts)
    assert machine.crontab.read_text() == "0 3 * * * backup\n"


def test_a_crontab_that_cannot_be_read_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, systemd=False)
    machine.crontab.mkdir()  # what `cat` cannot read
    monkeypatch.setenv("NO_CRONTAB", "crontab: cannot open your crontab: Input/output error")
    with pytest.raises(UpError, match=r"`crontab -l` failed: (.|\n)*nothing was changed"):
        install(here([]), machine.said.append)
    assert machine.calls() == ["crontab -l"]
    machine.crontab.rmdir()
    monkeypatch.delenv("NO_CRONTAB")
    install(here([]), machine.said.append)  # there is none yet
    assert machine.crontab.read_text().splitlines() == cron_lines(here([]))


def test_lines_after_a_block_without_an_end_are_not_taken_for_ours() -> None:
    first, *_, last = cron_lines(PLACE)
    text = f"{first}\n* * * * * ours\n0 3 * * * backup\n"
    for block in ([], cron_lines(PLACE)):
        with pytest.raises(UpError, match=f"no line '{last}'"):
            with_block(text, "alice", block)


def test_with_neither_the_lines_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, systemd=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UpError, match=r"neither systemd's user units nor cron(.|\n)*@reboot /bin/sh"):
        install(here([]), machine.said.append)
