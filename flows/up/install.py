"""`slipstream up --install`: started with the machine and looked after without a person, by systemd's user units or cron.

What is written is made by pure functions; `install` and `uninstall` put it there. Both may be repeated.
"""

import contextlib
import getpass
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.environment import SECRET
from cluster.slurm import ALWAYS_KEPT
from flows.cli.plain import HOME
from flows.up import state as up_state
from flows.up.run import COMMAND, SERVER, WORKERS
from slipstream.instance import HOME_ENV, INSTANCE_ENV, home, instance_id
from slipstream.process import how_ended
from slipstream.run_folder import write_atomic

CLIENT_TIMEOUT_S = 60
KEPT = ("PATH", "PYTHONPATH", "LANG", "SLURM_CONF")
NO_CRONTAB = re.compile(r"no crontab|no such file", re.IGNORECASE)  # of this user, as each cron says it
WITH_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")


@dataclass(frozen=True)
class Place:
    """What the written texts depend on.

    Attributes:
        up, reconcile: commands. directory: where they run.
        environment: what they need of this shell's.
        logs: folder of what cron's commands print.
    """

    instance: str
    up: Sequence[str]
    reconcile: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    logs: str


def here(words: Sequence[str]) -> Place:
    """This process's place; `words` are those of `slipstream up`."""
    names = {*KEPT, *ALWAYS_KEPT}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in names and not SECRET.search(name) and not WITH_PASSWORD.search(value) and value.isprintable()
    }
    kept |= {HOME_ENV: str(home()), INSTANCE_ENV: instance_id()}
    return Place(
        instance_id(),
        [*COMMAND, "up", *words],
        [*COMMAND, "reconcile"],
        str(HOME),
        dict(sorted(kept.items())),
        str(up_state.logs()),
    )


def unit_names(instance: str) -> dict[str, str]:
    """Names of the units, by what they are."""
    return {part: f"slipstream-{instance}-{part}" for part in (SERVER, WORKERS, "reconcile")}


def units(place: Place) -> dict[str, str]:
    """The text of each unit file, by its name.

    The workers' unit ends only its own process: flow processes and jobs of this machine are in its control group, and go
    on. So does what a reconciliation has started.
    """
    names = unit_names(place.instance)
    common = [f"WorkingDirectory={_escaped(place.directory)}"]
    common += [f"Environment={_quoted(f'{name}={value}')}" for name, value in place.environment.items()]
    lasting = ["Type=exec", "Restart=on-failure", "RestartSec=5", "TimeoutStopSec=60"]

    def text(about: str, unit: Sequence[str], service: Sequence[str], target: str | None = "default.target") -> str:
        lines = ["[Unit]", f"Description={about} ({place.instance})", *unit, "", *service]
        lines += ["", "[Install]", f"WantedBy={target}"] if target else []
        return "\n".join(lines) + "\n"

    def service(command: Sequence[str], *more: str) -> list[str]:
        return ["[Service]", f"ExecStart={' '.join(map(_quoted_word, command))}", *common, *more]

    server = f"{names[SERVER]}.service"
    return {
        server: text(
            "slipstream: Prefect server", [], service([*place.up, "--only", SERVER], *lasting, "KillMode=mixed")
        ),
        f"{names[WORKERS]}.service": text(
            "slipstream: workers",
            [f"After={server}", f"Wants={server}"],
            service([*place.up, "--only", WORKERS], *lasting, "KillMode=process"),
        ),
        f"{names['reconcile']}.service": text(
            "slipstream: one look after all runs",
            [f"After={server}"],
            service(place.reconcile, "Type=oneshot", "KillMode=process", "TimeoutStartSec=600"),
            None,
        ),
        f"{names['reconcile']}.timer": text(
            "slipstream: a look after all runs each minute",
            [],
            ["[Timer]", "OnBootSec=60", "OnUnitInactiveSec=60", "AccuracySec=5"],
            "timers.target",
        ),
    }


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    return '"' + _escaped(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _quoted_word(text: str) -> str:
    """A word of ExecStart, where a dollar sign would begin a variable."""
    return _quoted(text.replace("$", "$$"))


def marks(instance: str) -> tuple[str, str]:
    """First and last line of our block in a crontab."""
    return f"# >>> slipstream {instance}", f"# <<< slipstream {instance}"


def cron_scripts(place: Place) -> dict[Path, str]:
    """What cron runs, by the file: a line of a crontab is cut off after a thousand characters, and PATH may be as long."""
    folder = Path(place.logs).parent / "cron"

    def script(name: str, command: Sequence[str]) -> tuple[Path, str]:
        lines = ["#!/bin/sh", "# Written by `slipstream up --install`."]
        lines += [f"export {key}={shlex.quote(value)}" for key, value in place.environment.items()]
        lines += [f"cd {shlex.quote(place.directory)} || exit 1"]
        lines += [f"exec {shlex.join(command)} >> {shlex.quote(f'{place.logs}/{name}.log')} 2>&1"]
        return folder / f"{name}.sh", "\n".join(lines) + "\n"

    return dict([script("up", place.up), script("reconcile", place.reconcile)])


def cron_lines(place: Place) -> list[str]:
    """Our block of a crontab."""
    first, last = marks(place.instance)
    when = ("@reboot", "* * * * *")
    lines = [f"{time} /bin/sh {shlex.quote(str(path))}" for time, path in zip(when, cron_scripts(place), strict=True)]
    return [first, *(line.replace("%", "\\%") for line in lines), last]


def with_block(crontab: str, instance: str, block: Sequence[str]) -> str:
    """`crontab` with our block exchanged, added or (where `block` is empty) taken out; other lines stay as they are.

    Raises UpError where our block has lost its last line: what follows may be the user's.
    """
    first, last = marks(instance)
    kept: list[str] = []
    inside = False
    for line in crontab.splitlines():
        if line.strip() == first:
            inside = True
        elif inside and line.strip() == last:
            inside = False
        elif not inside:
            kept.append(line)
    if inside:
        raise up_state.UpError(
            f"the crontab has the line {first!r}, and after it no line {last!r}: remove the first and what belongs to "
            "it by `crontab -e`, then repeat the command"
        )
    lines = [*kept, *block]
    return "\n".join(lines) + "\n" if lines else ""


def unit_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()) / "systemd" / "user"


def _run(*argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Raises UpError where there is no such program, or it hangs."""
    try:
        return subprocess.run(
            argv, input=text, capture_output=True, text=True, errors="replace", timeout=CLIENT_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise up_state.UpError(f"there is no {argv[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise up_state.UpError(f"{shlex.join(argv)} did not end within {CLIENT_TIMEOUT_S} s") from None


def _must(*argv: str, text: str | None = None) -> str:
    done = _run(*argv, text=text)
    if done.returncode:
        raise up_state.UpError(f"{shlex.join(argv)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def has_user_systemd() -> bool:
    """Whether systemd looks after this user's own units here."""
    try:
        return _run("systemctl", "--user", "show-environment").returncode == 0
    except up_state.UpError:
        return False


def show(place: Place, say: Callable[[str], None]) -> None:
    """What `install` would write."""
    if has_user_systemd():
        for name, text in units(place).items():
            say(f"--- {unit_folder() / name}\n{text}")
    else:
        for path, text in cron_scripts(place).items():
            say(f"--- {path}\n{text}")
        say("--- crontab")
        say("\n".join(cron_lines(place)))


def install(place: Place, say: Callable[[str], None]) -> None:
    """Write it, and start it now where systemd is there. Raises UpError, OSError."""
    up_state.logs().mkdir(mode=0o700, exist_ok=True)
    if not has_user_systemd():
        _install_cron(place, say)
        return
    for name, text in units(place).items():
        path = unit_folder() / name
        same = path.exists() and path.read_text() == text
        if not same:
            write_atomic(path, text)
        say(f"  {path}  {'unchanged' if same else 'written'}")
    _must("systemctl", "--user", "daemon-reload")
    names = unit_names(place.instance)
    services = [f"{names[part]}.service" for part in (SERVER, WORKERS)]
    timer = f"{names['reconcile']}.timer"
    _must("systemctl", "--user", "enable", *services, timer)
    _must("systemctl", "--user", "start", timer)
    if up_state.holder(SERVER) is not None and _run("systemctl", "--user", "is-active", services[0]).returncode:
        say(
            "`slipstream up` runs already, and not by these units. They begin with the next start of the machine, or now by:"
        )
        say(f"  slipstream down && systemctl --user start {' '.join(services)}")
    else:
        _must("systemctl", "--user", "restart", *services)
        say(f"started: systemctl --user status {' '.join(services)} {timer}")
    _tell_about_linger(say)


def _tell_about_linger(say: Callable[[str], None]) -> None:
    user = getpass.getuser()
    try:
        linger = _run("loginctl", "show-user", user, "--property=Linger").stdout.strip()
    except up_state.UpError:
        linger = ""
    if linger != "Linger=yes":
        say(
            f"systemd ends all of this, runs on this machine too, when {user} has logged out everywhere, and starts nothing "
            "at boot, unless you say once: loginctl enable-linger"
        )


def _install_cron(place: Place, say: Callable[[str], None]) -> None:
    block = cron_lines(place)
    before = _crontab([f"--- {path}\n{text}" for path, text in cron_scripts(place).items()] + block)
    after = with_block(before, place.instance, block)
    for path, text in cron_scripts(place).items():
        same = path.exists() and path.read_text() == text
        if not same:
            write_atomic(path, text)
        say(f"  {path}  {'unchanged' if same else 'written'}")
    if after != before:
        _must("crontab", "-", text=after)
    say(f"  crontab  {'unchanged' if after == before else 'written'} (there is no systemd for this user here)")
    say("it begins with the next start of the machine; now: slipstream up")


def _crontab(block: Sequence[str] = ()) -> str:
    try:
        done = _run("crontab", "-l")
    except up_state.UpError as error:
        lines = "\n".join(["", *block])
        raise up_state.UpError(
            f"neither systemd's user units nor cron: {error}; what would be needed:{lines}"
        ) from None
    said = done.stderr.strip() or done.stdout.strip()
    if done.returncode and not NO_CRONTAB.search(said):  # what was not read must not be written over
        raise up_state.UpError(f"`crontab -l` failed: {said or how_ended(done.returncode)}; nothing was changed")
    return done.stdout if done.returncode == 0 else ""


def uninstall(instance: str, say: Callable[[str], None]) -> None:
    """Take back what `install` wrote, and end what it started. Raises UpError, OSError."""
    names = unit_names(instance)
    files = [f"{names[SERVER]}.service", f"{names[WORKERS]}.service", f"{names['reconcile']}.timer"]
    found = [name for name in [*files, f"{names['reconcile']}.service"] if (unit_folder() / name).exists()]
    if found:
        if has_user_systemd():
            _must("systemctl", "--user", "disable", "--now", *[name for name in files if name in found])
        for name in found:
            (unit_folder() / name).unlink()
            say(f"  {unit_folder() / name}  removed")
        if has_user_systemd():
            _must("systemctl", "--user", "daemon-reload")
    cron = False
    before = ""
    with contextlib.suppress(up_state.UpError):
        before = _crontab()
    if marks(instance)[0] in before:
        _must("crontab", "-", text=with_block(before, instance, []))
        for path in (home() / "cron").glob("*.sh"):
            path.unlink()
        cron = True
        say("  crontab  our lines removed")
    if not found and not cron:
        say("nothing was installed")
