"""The leader where no server ever comes up: a stand-in command injects the fault."""

import math
import sys
from pathlib import Path

import pytest

from slipstream.config_file import dump_config
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, read_json, write_atomic, write_json
from slipstream.serving import main as main_module
from slipstream.serving.abandoned import ABANDONED_S, Abandoned
from slipstream.serving.main import PORT_TRIES, Leader, StartError, required, run
from slipstream.serving.stall import generated_tokens

PORT_IS_TAKEN = "import sys; print('OSError: [Errno 98] Address already in use', sys.argv); sys.exit(1)"


def make_run(tmp_path: Path, **server: object) -> tuple[RunFolder, RunConfig]:
    config = RunConfig.model_validate(
        {
            "model": {"name": "m"},
            "data": {"source": "x.jsonl"},
            "trainer": {"max_completion_length": 16},
            "server": {"gpus": 0, **server},
        }
    )
    folder = RunFolder.create(tmp_path, "run")
    write_atomic(folder.run_file, dump_config(config))
    return folder, config


def exit_record(folder: RunFolder) -> dict[str, object]:
    (path,) = (folder.path / "exit").glob("server-0-*.json")
    record = read_json(path)
    assert isinstance(record, dict)
    return record


def test_a_taken_port_is_replaced_by_another_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, config = make_run(tmp_path, command=[sys.executable, "-c", PORT_IS_TAKEN])
    ports = iter(range(20001, 20001 + PORT_TRIES))
    monkeypatch.setattr(main_module, "free_port", lambda host: next(ports))
    assert Leader(folder, config, 1).lead() == 1
    log = folder.log_file("server", 1).read_text()
    assert [port for port in range(20001, 20001 + PORT_TRIES) if f"'{port}'" in log] == list(range(20001, 20006))
    assert f"no free port on 127.0.0.1 in {PORT_TRIES} tries" in str(exit_record(folder)["reason"])


def test_another_end_is_not_tried_again(tmp_path: Path) -> None:
    folder, config = make_run(tmp_path, command=[sys.executable, "-c", "print('no such model'); raise SystemExit(3)"])
    assert Leader(folder, config, 4).lead() == 1
    record = exit_record(folder)
    assert (record["returncode"], record["attempt"], record["last_lines"]) == (1, 4, "no such model")
    assert "ended with code 3" in str(record["reason"])


def test_the_address_comes_from_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, config = make_run(tmp_path)
    assert Leader(folder, config, 1).host == "127.0.0.1"
    monkeypatch.setenv("SLIPSTREAM_HOST", "10.1.2.3")
    assert Leader(folder, config, 1).host == "10.1.2.3"


def test_a_server_that_runs_elsewhere_is_not_started(tmp_path: Path) -> None:
    folder, _ = make_run(tmp_path, url="http://gpu-7:8000")
    with pytest.raises(StartError, match="attach_external"):
        run(folder.path, 1)


def test_what_a_run_requires(tmp_path: Path) -> None:
    _, config = make_run(tmp_path, max_model_len=1000)
    needs = required(config)
    assert needs["max_model_len"] == 1000
    assert needs["num_sampler_logprobs"] == config.trainer.num_sampler_logprobs
    assert needs["lora_rank"] is None


def test_generated_tokens_are_summed_over_engines() -> None:
    metrics = (
        "# TYPE vllm:generation_tokens_total counter\n"
        'vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+03\n'
        'vllm:generation_tokens_total{engine="1",model_name="m"} 7.0\n'
        'vllm:generation_tokens_created{engine="0"} 1.7e+09\n'
    )
    assert generated_tokens(metrics) == 1507
    assert generated_tokens("") == 0


def test_a_server_whose_learner_and_supervisor_are_gone_is_abandoned(tmp_path: Path) -> None:
    folder, _ = make_run(tmp_path)
    abandoned = Abandoned(folder, 2, math.inf)
    late = ABANDONED_S + 1
    write_json(folder.heartbeat_file("supervisor"), {"counter": 1})
    assert [abandoned.look(t * late) for t in range(3)] == [False] * 3, "the learner lives"
    write_json(folder.path / "exit" / "learner-aa.json", {"attempt": 1})
    assert [abandoned.look(t * late) for t in range(3, 6)] == [False] * 3, "another attempt's learner"
    write_json(folder.path / "exit" / "learner-bb.json", {"attempt": 2})
    assert not abandoned.look(6 * late)
    write_json(folder.heartbeat_file("supervisor"), {"counter": 2})
    assert not abandoned.look(7 * late), "the supervisor lives"
    (folder.path / "exit" / "learner-cc.json").write_text("{torn")
    assert not abandoned.look(8 * late), "nothing is known"
    (folder.path / "exit" / "learner-cc.json").unlink()
    assert not abandoned.look(7 * late + 1)
    assert abandoned.look(8 * late + 1)


def test_a_server_of_which_nobody_speaks_any_more_is_abandoned_after_a_longer_while(tmp_path: Path) -> None:
    """The learner's leader was killed with its last words unsaid, or the learner waits in a queue that nobody looks at."""
    folder, _ = make_run(tmp_path)
    abandoned = Abandoned(folder, 1, 1800.0)
    assert not abandoned.look(0)
    assert not abandoned.look(1700)
    write_json(folder.heartbeat_file("learner"), {"counter": 1})
    assert [abandoned.look(t) for t in (1800, 3500)] == [False, False], "the learner lives"
    write_json(folder.heartbeat_file("supervisor"), {"counter": 1})
    assert [abandoned.look(t) for t in (3700, 5400)] == [False, False], "the supervisor lives"
    assert abandoned.look(3700 + 1801)


def test_a_server_is_kept_for_the_next_attempt_of_the_learner(tmp_path: Path) -> None:
    folder, _ = make_run(tmp_path)
    late = ABANDONED_S + 1
    write_json(folder.path / "exit" / "learner-aa.json", {"attempt": 1})
    assert [folder.begin_attempt(None, 0), folder.begin_attempt(None, 0)] == [1, 2]
    abandoned = Abandoned(folder, 1, math.inf)
    assert [abandoned.look(t * late) for t in range(3)] == [False] * 3, "a newer attempt has begun"
    write_json(folder.path / "exit" / "learner-bb.json", {"attempt": 2})
    assert [abandoned.look(t * late) for t in range(3, 5)] == [False, True]
    write_json(folder.assignment_file, {"attempt": 3, "server": "s", "learner": "l"})
    assert not abandoned.look(6 * late)
