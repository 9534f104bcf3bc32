"""Reward functions that a user's script defines reach the rollout process, and the script does not train twice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
from dataclasses import dataclass
import sys
from tests.script_trainer import ScriptTrainer
{imports}
def note(word):
    with open(sys.argv[1] if len(sys.argv) > 1 else {log!r}, "a") as file:
        file.write(word + "\\n")

note("begun")

FACTOR = 10

def reward(completion_ids, **kwargs):
    return [FACTOR * len(ids) for ids in completion_ids]

@dataclass
class Offset:
    by: int

    def __call__(self, completion_ids, **kwargs):
        return [self.by + value for value in reward(completion_ids)]

"""
BARE = """
trainer = ScriptTrainer([reward, Offset(5)])
note("made")
print(trainer.train())
note("trained")
"""
GUARDED = """
def main():
    trainer = ScriptTrainer([reward, Offset(5)])
    note("made")
    print(trainer.train())
    note("trained")

if __name__ == "__main__":
    main()
"""
EXPECTED = "[[20, 10], [25, 15]]"


def run(arguments, cwd):
    """stdout of the script; its stderr where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def script(path, body, log, imports=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD.format(log=str(log), imports=imports) + body)
    return path


def test_a_script_without_a_guard(tmp_path):
    log = tmp_path / "log"
    assert run([script(tmp_path / "train.py", BARE, log), log], tmp_path) == EXPECTED
    assert log.read_text().split() == ["begun", "made", "begun", "trained"], "the child ran as far as the trainer"


def test_a_script_with_a_guard(tmp_path):
    log = tmp_path / "log"
    assert run([script(tmp_path / "train.py", GUARDED, log), log], tmp_path) == EXPECTED
    assert log.read_text().split() == ["begun", "made", "begun", "trained"]


def test_a_script_with_a_neighbour_started_from_elsewhere(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour.py").write_text("WEIGHT = 3\n")
    body = BARE.replace("trainer =", "FACTOR = neighbour.WEIGHT\ntrainer =")
    script(tmp_path / "scripts" / "train.py", body, tmp_path / "log", imports="import neighbour")
    assert run(["scripts/train.py"], tmp_path) == "[[6, 3], [11, 8]]"


@pytest.mark.parametrize("body", [BARE, GUARDED])
def test_a_module_of_a_package(tmp_path, body):
    """`python -m pack.train`, with a relative import."""
    log = tmp_path / "log"
    script(tmp_path / "pack" / "train.py", body, log, imports="from .neighbour import WEIGHT")
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "neighbour.py").write_text("WEIGHT = 3\n")
    assert run(["-m", "pack.train"], tmp_path) == EXPECTED
    assert log.read_text().split().count("made") == log.read_text().split().count("trained") == 1


def test_a_package_s_main(tmp_path):
    log = tmp_path / "log"
    script(tmp_path / "pack" / "__main__.py", BARE, log)
    (tmp_path / "pack" / "__init__.py").write_text("")
    assert run(["-m", "pack"], tmp_path) == EXPECTED
    assert log.read_text().split().count("made") == 1


def test_a_script_whose_rewards_come_from_elsewhere_is_not_run_again(tmp_path):
    log = tmp_path / "log"
    body = BARE.replace("[reward, Offset(5)]", "[length_reward]")
    path = script(tmp_path / "train.py", body, log, imports="from tests.tiny_loops import length_reward")
    assert run([path, log], tmp_path) == "[[2, 1]]"
    assert log.read_text().split() == ["begun", "made", "trained"]


def test_the_script_s_main_module_is_itself_afterwards(tmp_path):
    body = BARE + "import __main__\nprint(__main__.__file__.endswith('train.py'), reward.__module__)\n"
    assert run([script(tmp_path / "train.py", body, tmp_path / "log")], tmp_path).splitlines()[1] == "True __main__"


def test_a_killed_trainer_leaves_no_rollout_process(tmp_path):
    import psutil

    body = """
from slipstream.rollout.setup import LoopSetup
from slipstream.rollout.worker import RolloutWorker
from tests.tiny_loops import Describes
worker = RolloutWorker(Describes, {}, LoopSetup("r", 1, "m", True, 64), 60.0)
worker.start()
print(worker.rollouts.get(timeout=60)["pid"], flush=True)
import time
time.sleep(600)
"""
    (tmp_path / "train.py").write_text(body)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen(
        [sys.executable, tmp_path / "train.py"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        child = psutil.Process(int(trainer.stdout.readline()))
    finally:
        trainer.kill()
        trainer.communicate()
    gone, alive = psutil.wait_procs([child], timeout=30)
    assert gone
    assert not alive
