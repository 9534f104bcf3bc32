"""What the learner's leader says about the end of its ranks."""

import subprocess
import sys

import pytest

from slipstream.learner.failure import first_failure, in_short, record_failure
from slipstream.run_folder import RunFolder

pytestmark = pytest.mark.integration


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path, "run")


def test_the_first_error_counts(run):
    log = run.log_file("learner", 2)
    assert first_failure(run, 2, log) == ""
    record_failure(run, 1, 0, ValueError("of an attempt before"))
    assert first_failure(run, 2, log) == ""
    record_failure(run, 2, 1, ValueError("the cause"))
    record_failure(run, 2, 0, RuntimeError("connection closed by peer"))
    assert first_failure(run, 2, log) == "rank 1: ValueError: the cause"


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
    assert first_failure(run, 1, log).startswith("rank 1 was ended by SIGKILL")
