"""Commands in the documentation, and what runs each: a page with a command that nothing runs fails `test_docs.py`.

A command is a line of a fenced `bash` or `sh` block, or an indented line that begins like one, without its comment. `HERE`
are run as they stand by `tests/front/test_documented.py`; `ByTest` are run by another test, in these or in equal words; what
cannot be run says why. A page whose own test runs all of it has that test.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("bash", "sh")
INDENTED = re.compile(r"^ {4}((?:\.venv/bin/)?slipstream .*|make .*|sbatch .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Here:
    """Run as it stands. `code`: the exit code that is right."""

    code: int = 0


@dataclass(frozen=True)
class ByTest:
    """Run by a test, named like pytest does without its parameters: "tests/front/test_up.py::test_what"."""

    test: str


@dataclass(frozen=True)
class NotRun:
    """Cannot be run by a test."""

    why: str


How = Here | ByTest | NotRun
HERE = Here()
UP = ByTest("tests/front/test_up.py::test_a_run_goes_from_submit_to_completed")
POSTGRES = ByTest("tests/front/test_postgres.py::test_a_run_with_postgresql")
SWEEP = ByTest("tests/integration/test_sweep_cli.py::test_ctrl_c_and_the_same_command_again")
INSTALLED = ByTest("tests/unit/test_install.py::test_with_systemd")

COMMANDS: Mapping[str, Mapping[str, How] | ByTest] = {
    "docs/schedules.md": ByTest("tests/front/test_schedules.py::test_the_commands_of_the_page"),
    "docs/sweeps.md": {
        "slipstream sweep examples/sweeps/demo.toml --dry-run": HERE,
        "slipstream sweep examples/sweeps/demo.toml": SWEEP,
    },
    "docs/recovery.md": {
        "slipstream reconcile": HERE,
        "slipstream reconcile --dry-run": HERE,
        "slipstream reconcile --json": HERE,
    },
    "docs/getting-started.md": {
        "make demo": ByTest("tests/integration/test_demo.py::test_the_demo_goes_to_its_end"),
        ".venv/bin/slipstream up": UP,
        ".venv/bin/slipstream deploy": HERE,
        "cat ~/.slipstream/auth": HERE,
        ".venv/bin/slipstream status RUN": HERE,
        ".venv/bin/slipstream report RUN": HERE,
        ".venv/bin/slipstream audit RUN": HERE,
        ".venv/bin/slipstream reconcile": HERE,
        ".venv/bin/slipstream down": ByTest("tests/front/test_up.py::test_its_end_ends_no_run_and_no_job"),
    },
    "docs/hpc.md": {
        ".venv/bin/slipstream deploy --notify slack-webhook/team": ByTest(
            "tests/front/test_deploy.py::test_who_is_to_be_told"
        ),
        "make setup": NotRun("`make test` begins with it"),
        "cp slurm/profiles/slurm.toml slurm/profiles/mine.toml": NotRun("a copy of a file in the checkout"),
        ".venv/bin/slipstream doctor mine --config my.toml": ByTest(
            "tests/slurm/test_doctor.py::test_a_profile_that_works"
        ),
        ".venv/bin/slipstream up --preset my.toml": UP,
        ".venv/bin/slipstream up --preset my.toml --install --print": HERE,
        ".venv/bin/slipstream up --preset my.toml --install": INSTALLED,
        "ssh -L 4200:127.0.0.1:4200 login1": NotRun("needs a second machine"),
        "createdb slipstream_alice": POSTGRES,
        "export PREFECT_API_DATABASE_CONNECTION_URL="
        "'postgresql+asyncpg:///slipstream_alice?host=/var/run/postgresql'": POSTGRES,
        "export PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD=2592000": POSTGRES,
        ".venv/bin/slipstream clean --older-than 60d --keep-best --root STORAGE": HERE,
        ".venv/bin/slipstream clean --older-than 60d --keep-best --root STORAGE --yes": HERE,
        ".venv/bin/slipstream reconcile --dry-run": HERE,
        ".venv/bin/slipstream reconcile --json": HERE,
    },
}


def pages() -> list[str]:
    """Pages of the documentation that have commands, relative to the repository."""
    found = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in found if commands(page)]


def commands(page: str) -> list[str]:
    """The commands of a page, in its order."""
    text = (ROOT / page).read_text()
    blocks = [block for language, block in BLOCK.findall(text) if language in SHELL]
    blocks.append("\n".join(INDENTED.findall(BLOCK.sub("", text))))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]


def table(page: str) -> Mapping[str, How]:
    """What runs each command of a page."""
    how = COMMANDS[page]
    return dict.fromkeys(commands(page), how) if isinstance(how, ByTest) else how
