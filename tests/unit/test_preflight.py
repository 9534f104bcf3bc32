"""What is refused before anything is allocated."""

import http.server
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import slipstream.preflight as preflight_module
from slipstream.config_file import ConfigError
from slipstream.preflight import check, preflight
from slipstream.preflight_model import ModelFiles, has_chat_template
from slipstream.run_config import RunConfig

WEIGHTS = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without tensors


def make_model(folder: Path, **settings: Any) -> Path:
    """The files of a model folder; the weights are a stand-in, since nothing here reads them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **settings}))
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def write_rows(path: Path, count: int, first: int = 0, text: str = "what is {i}") -> Path:
    rows = (
        {"prompt": [{"role": "user", "content": text.format(i=i)}], "answer": str(i)}
        for i in range(first, first + count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Case:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model(folder / "model")
        self.data = write_rows(folder / "train.jsonl", 5)

    def config(self, **sections: Any) -> RunConfig:
        values: dict[str, Any] = {
            "model": {"name": str(self.model)},
            "data": {"source": str(self.data)},
            "reward": {"functions": ["slipstream.rewards:exact_match_reward"]},
            "server": {"gpus": 0, "command": ["python3"]},
            "learner": {"gpus": 0},
            "storage": {"root": str(self.folder / "runs")},
        }
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
        return RunConfig(**values)

    def only(self, severity: str = "error", **sections: Any) -> Any:
        """The one problem of a configuration."""
        (problem,) = preflight(self.config(**sections))
        assert problem.severity == severity
        return problem


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_a_good_configuration_has_no_problems(case: Case) -> None:
    held_out = write_rows(case.folder / "test.jsonl", 3, first=100)
    assert check(case.config(data={"eval_source": str(held_out)})) == []


def test_check_raises_all_errors_and_returns_warnings(case: Case) -> None:
    with pytest.raises(ConfigError) as caught:
        check(
            case.config(model={"name": "./none"}, data={"source": "./none.jsonl"}, server={"command": ["no-program"]})
        )
    assert [p.key for p in caught.value.problems] == ["data.source", "model.name", "server.command"]
    held_out = write_rows(case.folder / "test.jsonl", 3, first=4)
    (warning,) = check(case.config(data={"eval_source": str(held_out)}))
    assert (warning.key, warning.severity) == ("data.eval_source", "warning")
    assert "1 of 3 held-out prompts are in the training data" in warning.message


def test_rewards_are_checked_against_the_columns_of_the_data(case: Case) -> None:
    problem = case.only(reward={"functions": ["slipstream.rewards:reasoning_gym_reward"]})
    assert problem.key == "reward.functions"
    assert problem.value == "slipstream.rewards:reasoning_gym_reward"
    assert "needs the columns metadata, question, task" in problem.message
    problem = case.only(reward={"functions": ["nowhere:f"], "paths": [str(case.folder)]})
    assert str(case.folder) in problem.message


def test_held_out_data(case: Case) -> None:
    assert "same rows" in case.only(data={"eval_source": str(case.data)}).message
    copy = shutil.copy(case.data, case.folder / "copy.jsonl")
    assert "same rows" in case.only(data={"eval_source": str(copy)}).message
    assert case.only(data={"eval_source": "./none.jsonl"}).key == "data.eval_source"
    far = write_rows(case.folder / "far.jsonl", 4, first=3)
    assert case.only("warning", data={"eval_source": str(far), "eval_size": 2}).message.startswith("2 of 2")


def test_overlapping_seeds_of_reasoning_gym_are_explained(case: Case) -> None:
    sources = {
        "source": "reasoning_gym:chain_sum?size=20&seed=1",
        "eval_source": "reasoning_gym:chain_sum?size=20&seed=11",
    }
    problem = case.only("warning", data=sources)
    assert "10 of 20" in problem.message
    assert "seed + size" in problem.message


def remove(case: Case, *names: str) -> None:
    for name in names:
        (case.model / name).unlink()


def test_no_weights(case: Case) -> None:
    remove(case, "model.safetensors")
    assert "no weights" in case.only().message


def test_missing_shards(case: Case) -> None:
    shards = {"a": "one.safetensors", "b": "two.safetensors"}
    (case.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (case.model / "one.safetensors").write_bytes(b"x")
    assert "1 of 2 weight files are missing, like two.safetensors" in case.only().message


def test_pointers_and_empty_files_are_no_weights(case: Case) -> None:
    (case.model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in case.only().message
    (case.model / "model.safetensors").write_bytes(b"")
    assert "is empty" in case.only().message


@pytest.mark.parametrize("content", [WEIGHTS[:-1], WEIGHTS + b"x", b"weights", (99).to_bytes(8, "little") + b"{}"])
def test_damaged_weights(case: Case, content: bytes) -> None:
    (case.model / "model.safetensors").write_bytes(content)
    assert "damaged or cut short" in case.only().message


def test_real_weights_cut_short(case: Case) -> None:
    from safetensors.numpy import save

    whole = save({"a": np.zeros((3, 4), np.float32)}, metadata={"format": "pt"})
    (case.model / "model.safetensors").write_bytes(whole)
    assert preflight(case.config()) == []
    (case.model / "model.safetensors").write_bytes(whole[:-1])
    assert "damaged or cut short" in case.only().message


def test_room_for_one_checkpoint_and_for_those_that_are_kept(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import save

    (case.model / "model.safetensors").write_bytes(save({"a": np.zeros((1000, 1000), np.float16)}))
    free = 11_000_000  # bytes; 10^6 numbers in float32, three of each in a checkpoint
    monkeypatch.setattr("slipstream.preflight_room.free_bytes", lambda folder: free)
    error = case.only(model={"dtype": "float32"})
    assert error.key == "storage.root"
    for words in ("12.0 MB", "11.0 MB are free", "make room"):
        assert words in error.message
    assert preflight(case.config(model={"dtype": "float16"})) == []
    assert preflight(case.config(model={"dtype": "float32"}, learner={"use_lora": True})) == []
    warning = case.only("warning", model={"dtype": "float16"}, trainer={"save_total_limit": 1})
    assert "up to 2 at once, 12.0 MB" in warning.message
    free = 14_000_000
    assert preflight(case.config(model={"dtype": "float16"}, trainer={"save_total_limit": 1})) == []


def test_no_config(case: Case) -> None:
    remove(case, "config.json")
    assert "no config.json" in case.only().message
    (case.model / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    assert "an adapter, not a model: name some/base" in case.only().message


def test_broken_config(case: Case) -> None:
    (case.model / "config.json").write_text("[1")
    assert "no JSON object" in case.only().message


def test_no_tokenizer(case: Case) -> None:
    remove(case, "tokenizer.json")
    assert "no tokenizer" in case.only().message


def test_no_chat_template(case: Case) -> None:
    remove(case, "chat_template.jinja")
    problem = case.only()
    assert problem.key == "model.name"
    assert "no chat template" in problem.message
    assert "instruct version" in problem.message


@pytest.mark.parametrize("content", ["{{ x }}", [{"name": "default", "template": "{{ x }}"}]])
def test_a_chat_template_in_the_tokenizer_settings_counts(tmp_path: Path, content: Any) -> None:
    assert not has_chat_template(ModelFiles(tmp_path, complete=True))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": content}))
    assert has_chat_template(ModelFiles(tmp_path, complete=True))


@pytest.mark.parametrize("nested", [False, True])
def test_more_positions_than_the_model_has(case: Case, nested: bool) -> None:
    settings = {"max_position_embeddings": 3000}
    (case.model / "config.json").write_text(json.dumps({"text_config": settings} if nested else settings))
    problem = case.only()
    assert (problem.key, problem.value) == ("server.max_model_len", 4096)
    assert "3000" in problem.message


def test_a_model_that_is_nowhere(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = case.only(model={"name": "nobody/nothing"}).message
    assert "not in the local cache" in message
    assert "HF_HUB_OFFLINE" in message
    assert "no folder" in case.only(model={"name": str(case.folder / "none")}).message
    assert "is a file" in case.only(model={"name": str(case.data)}).message
    assert "neither a folder here nor a hub id" in case.only(model={"name": "not an id"}).message


def test_an_unreachable_hub(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    message = case.only(model={"name": "nobody/nothing"}).message
    assert "hub" in message
    assert "Traceback" not in message


def test_prompts_without_room(case: Case) -> None:
    case.data.write_text(
        write_rows(case.folder / "a", 3, text="a " * 300).read_text() + write_rows(case.folder / "b", 2).read_text()
    )
    server = {"max_model_len": 256}
    problem = case.only("warning", server=server, trainer={"max_completion_length": 64})
    assert problem.key == "server.max_model_len"
    assert "300 tokens" in problem.message
    write_rows(case.data, 5, text="a " * 300)
    problem = case.only(server=server, trainer={"max_completion_length": 64})
    assert problem.key == "server.max_model_len"
    assert "even the shortest prompt has 300 tokens" in problem.message
    budget = {"token_budget": 300, "max_completion_length": 8}
    problem = case.only(trainer=budget)
    assert problem.key == "trainer.token_budget"
    assert "even the shortest prompt has 300 tokens" in problem.message
    assert preflight(case.config(trainer=budget | {"token_budget": 301})) == []


def test_the_system_prompt_takes_room(case: Case) -> None:
    (case.model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    system = "a " * 300
    trainer = {"token_budget": 300, "max_completion_length": 8}
    problem = case.only(data={"system_prompt": system}, trainer=trainer)
    assert problem.key == "trainer.token_budget"


def test_a_tokenizer_that_cannot_be_read(case: Case) -> None:
    (case.model / "tokenizer.json").write_text("{")
    problem = case.only()
    assert problem.key == "model.name"
    assert "tokenizer.json cannot be read" in problem.message


@pytest.mark.parametrize(
    ("template", "words"),
    [("{% if %}", "TemplateSyntaxError"), ("{{ raise_exception('no user role') }}", "no user role")],
)
def test_a_chat_template_that_fails(case: Case, template: str, words: str) -> None:
    (case.model / "chat_template.jinja").write_text(template)
    message = case.only().message
    assert "chat template fails" in message
    assert words in message


def test_special_tokens_of_a_template(case: Case) -> None:
    (case.model / "chat_template.jinja").write_text("{{ bos_token + pad_token + messages[0].content }}")
    (case.model / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert preflight(case.config()) == []


def test_columns_that_the_rewards_do_not_see(case: Case) -> None:
    row = {"prompt": [{"role": "user", "content": "a"}], "answer": "b", "completions": "c"}
    case.data.write_text(json.dumps(row) + "\n")
    problem = case.only("warning")
    assert problem.key == "data.source"
    assert "completions" in problem.message


class Health(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 500)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("status", "accepted"), [(200, True), (401, True), (404, False), (503, False)])
def test_a_server_that_runs(case: Case, url: str, monkeypatch: pytest.MonkeyPatch, status: int, accepted: bool) -> None:
    monkeypatch.setattr(Health, "status", status)
    problems = preflight(case.config(server={"url": url, "command": []}))
    assert [p.key for p in problems] == ([] if accepted else ["server.url"])
    assert accepted or str(status) in problems[0].message


def test_a_server_that_does_not_run(case: Case) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port, and it refuses
        problem = case.only(server={"url": f"http://127.0.0.1:{unused.getsockname()[1]}"})
    assert "does not answer" in problem.message


def test_programs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'no-such-program'" in case.only(server={"command": ["no-such-program", "exec"]}).message
    assert case.only(learner={"python": "/no/python"}).key == "learner.python"
    monkeypatch.setenv("SLIPSTREAM_VLLM_PYTHON", "/no/python")
    assert "SLIPSTREAM_VLLM_PYTHON" in case.only(server={"command": []}).message


@pytest.mark.parametrize(
    ("present", "learner", "server", "keys"),
    [
        (0, 0, 0, []),
        (0, 1, 0, ["learner.gpus"]),
        (0, 1, 1, ["learner.gpus", "server.gpus"]),
        (1, 1, 1, ["learner.gpus"]),
        (2, 1, 1, []),
        (None, 8, 8, []),
    ],
)
def test_gpus_of_this_machine(
    case: Case, monkeypatch: pytest.MonkeyPatch, present: int | None, learner: int, server: int, keys: list[str]
) -> None:
    monkeypatch.setattr(preflight_module, "gpus_here", lambda: present)
    sections = {"learner": {"gpus": learner, "processes_per_node": max(1, learner)}, "server": {"gpus": server}}
    assert [p.key for p in preflight(case.config(**sections))] == keys
    assert preflight(case.config(**sections, cluster={"profile": "slurm"})) == []


def test_visible_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, count in (("", 0), ("-1", 0), ("0,2", 2), ("GPU-1a", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert preflight_module.gpus_here() == count


def test_several_nodes_need_a_cluster(case: Case) -> None:
    problems = preflight(case.config(learner={"nodes": 2}, server={"nodes": 2, "data_parallel_size": 2}))
    assert [p.key for p in problems] == ["learner.nodes", "server.nodes"]
    assert preflight(case.config(learner={"nodes": 2}, cluster={"profile": "slurm"})) == []


def test_storage(case: Case) -> None:
    assert case.only(storage={"root": str(case.data)}).key == "storage.root"
    assert "is a file" in case.only(storage={"root": str(case.data / "sub")}).message


def test_storage_that_refuses_a_write(case: Case) -> None:
    problem = case.only(storage={"root": "/proc/runs"})  # its permissions allow it, for root
    assert problem.key == "storage.root"
    assert "cannot be written to" in problem.message
