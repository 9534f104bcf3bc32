"""What the learner's leader says about the end of its ranks."""

import errno
import subprocess
import sys

import pytest

from slipstream.learner.checkpoint import CheckpointError, NotWritten, OtherData
from slipstream.learner.failure import (
    Failure,
    constructing,
    departure,
    first_failure,
    in_short,
    record_departure,
    record_failure,
)
from slipstream.learner.inbox import InboxError
from slipstream.learner.ledger import NothingTrained
from slipstream.learner.server_link import ServerNotUsable
from slipstream.rollout.worker import NotPicklable, RolloutWorkerError
from slipstream.run_folder import RunFolder

pytestmark = pytest.mark.integration


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path, "run")


def test_the_first_error_counts(run):
    log = run.log_file("learner", 2)
    assert first_failure(run, 2, log) is None
    record_failure(run, 1, 0, ValueError("of an attempt before"))
    assert first_failure(run, 2, log) is None
    record_failure(run, 2, 1, ValueError("the cause"))
    record_failure(run, 2, 0, RuntimeError("connection closed by peer"))
    assert first_failure(run, 2, log) == Failure("rank 1: ValueError: the cause", final=False)


def built_wrong():
    with constructing():
        raise ValueError("no such optimizer")


@pytest.mark.parametrize(
    ("make", "final"),
    [
        (lambda: ServerNotUsable("a flag is missing"), True),
        (lambda: NothingTrained("epoch 0"), True),
        (lambda: NotPicklable("a lambda"), True),
        (lambda: OtherData("another seed"), True),
        (lambda: NotWritten("full"), True),
        (lambda: OSError(errno.ENOSPC, "No space left on device"), True),
        (lambda: OSError(errno.EROFS, "Read-only file system"), True),
        (lambda: CheckpointError("model.bin is missing"), False),
        (lambda: OSError(errno.ECONNREFUSED, "refused"), False),
        (lambda: ValueError("within training"), False),
        (lambda: RolloutWorkerError("it failed"), False),
        (lambda: MemoryError(), False),
    ],
)
def test_whether_a_restart_can_help(run, make, final):
    record_failure(run, 1, 0, make())
    assert first_failure(run, 1, run.log_file("learner", 1)).final == final


def test_what_cannot_be_built_from_the_settings_is_final(run):
    with pytest.raises(ValueError, match="optimizer") as raised:
        built_wrong()
    record_failure(run, 1, 0, raised.value)
    assert first_failure(run, 1, run.log_file("learner", 1)) == ("rank 0: ValueError: no such optimizer", True)


def from_cause(error, cause):
    error.__cause__ = cause
    return error


def test_a_cause_decides_too(run):
    """A hub that cannot be reached is a ValueError of the data; a full disk ends the thread that receives."""
    log = run.log_file("learner", 1)
    with pytest.raises(ValueError, match="hub") as raised, constructing():
        raise from_cause(ValueError("no such data on the hub"), ConnectionError("unreachable"))
    record_failure(run, 1, 0, raised.value)
    assert not first_failure(run, 1, log).final
    record_failure(run, 1, 0, from_cause(InboxError("receiving failed"), OSError(errno.EDQUOT, "Quota exceeded")))
    assert first_failure(run, 1, log).final


def test_a_rank_that_left_has_not_failed(run):
    assert departure(run, 1) is None
    record_departure(run, 1, 12, "saved at step 12 and left: SIGUSR2")
    assert departure(run, 1) == (12, "saved at step 12 and left: SIGUSR2")
    assert first_failure(run, 1, run.log_file("learner", 1)) is None
    record_failure(run, 2, 0, ValueError("x"))
    assert departure(run, 2) is None


def test_an_error_with_a_traceback_of_another_process_is_told_by_its_ends():
    text = 'the process failed:\nTraceback (most recent call last):\n  File "a.py"\nKeyError: 1\n\nThe cause:\n\nTraceback\n'
    text += '  File "b.py"\nslipstream.RewardError: reward f raised X\nsecond line\n'
    short = "RuntimeError: the process failed: slipstream.RewardError: reward f raised X; second line"
    assert in_short(RuntimeError(text)) == short
    assert in_short(RuntimeError("- a\n- b")) == "RuntimeError: - a; - b"
    assert in_short(ValueError()) == "ValueError: "
    assert len(in_short(ValueError("x" * 10_000))) <= 500


def test_a_killed_rank_is_told_from_the_words_of_the_real_torchrun(run, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text("import os, time\nos.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(600)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    log = run.log_file("learner", 1)
    with open(log, "wb") as out:
        ended = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=240, check=False)
    assert ended.returncode != 0
    failure = first_failure(run, 1, log)
    assert not failure.final
    assert failure.reason.startswith("rank 1 was ended by SIGKILL")
