"""Reading, refusing and writing configurations."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config_file import EXAMPLE, ConfigError, dump_config, field_help, load_config, parse_config
from slipstream.config_schema import is_section, known_keys
from slipstream.run_config import RunConfig

BASE = {"model": {"name": "m"}, "data": {"source": "d"}}


def refused(*overrides: str, values: dict | None = None) -> dict[str, str]:
    """Key -> line of every problem."""
    with pytest.raises(ConfigError) as caught:
        parse_config(BASE if values is None else values, overrides)
    text = str(caught.value)
    for jargon in ("pydantic", "http://errors", "https://errors", "input_value", "type=", "Value error", "Traceback"):
        assert jargon not in text
    return {problem.key: str(problem) for problem in caught.value.problems}


def write(path: Path, text: str) -> Path:
    file = path / "run.toml"
    file.write_text(text)
    return file


def test_the_example_in_the_message_is_valid(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, EXAMPLE))
    assert config.model.name == "Qwen/Qwen3-0.6B"
    assert config.trainer.max_staleness == 4


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("trainer.max_stalenes=3", "trainer.max_stalenes", "= 3: unknown key; did you mean trainer.max_staleness?"),
        ("learning_rate=3", "learning_rate", "did you mean trainer.learning_rate?"),
        ("server.max_steps=3", "server.max_steps", "did you mean trainer.max_steps?"),
        ("trainr.max_steps=3", "trainr", "did you mean trainer?"),
        ("server.qqqq=1", "server.qqqq", "unknown key; known in server: url, command"),
        ("zzzz=1", "zzzz", "unknown key; known sections and keys: name, model"),
        ("trainer.learning_rat=", "trainer.learning_rat", "did you mean trainer.learning_rate?"),
        ('trainer.learning_rate="abc"', "trainer.learning_rate", '= "abc": must be a number above 0'),
        ("trainer.learning_rate=0", "trainer.learning_rate", "= 0: must be a number above 0"),
        ("trainer.learning_rate=nan", "trainer.learning_rate", "must be a number above 0"),
        ("trainer.learning_rate=inf", "trainer.learning_rate", "must be a number above 0"),
        ("trainer.max_steps=true", "trainer.max_steps", "= true: must be a whole number at least -1"),
        ('trainer.max_steps="5"', "trainer.max_steps", "must be a whole number"),
        ("trainer.max_staleness=1.5", "trainer.max_staleness", "= 1.5: must be a whole number at least 0"),
        ("trainer.max_staleness=-1", "trainer.max_staleness", "= -1: must be a whole number at least 0"),
        ("trainer.score_centering=yes", "trainer.score_centering", '= "yes": must be true or false'),
        ("trainer.score_centering=1", "trainer.score_centering", "must be true or false"),
        ("trainer.epsilon=1", "trainer.epsilon", "must be a number above 0 and below 1"),
        ("trainer.top_p=2", "trainer.top_p", "must be a number above 0 and at most 1"),
        ("trainer.lr_scheduler_type=cosin", "trainer.lr_scheduler_type", 'must be one of "constant",'),
        ("model.dtype=fp8", "model.dtype", 'must be one of "auto", "bfloat16", "float16", "float32"'),
        ("server.max_lora_rank=33", "server.max_lora_rank", "must be one of 1, 8, 16"),
        ("server.url=localhost:8000", "server.url", 'must be text like "http://gpu-node:8000"'),
        ("server.kv_cache_memory=1T", "server.kv_cache_memory", 'must be text like "20G"'),
        ("name=a b", "name", "letters, digits"),
        ('model.name=""', "model.name", "must be text that is not empty"),
        ("reward.functions=[]", "reward.functions", "must be a list of text"),
        ("reward.functions=[1]", "reward.functions", "entry 1 of the list must be text"),
        ("reward.functions=a:b", "reward.functions", '= "a:b": must be a list of text'),
        ("trainer=5", "trainer", "= 5: must be a section"),
        ("trainer.max_steps=99999999999999999999", "trainer.max_steps", "too large: at most 2147483647"),
        ("trainer.learning_rate=1e30", "trainer.learning_rate", "too large"),
        ("learner.step_timeout=1e7", "learner.step_timeout", "at most 1.9994e+06"),
        ("name.first=1", "name.first", "name is a value, not a section"),
        ("trainer.max_steps", "", "--set 'trainer.max_steps': write section.key=value"),
        ("=5", "", "write section.key=value"),
        ("trainer..x=5", "", "write section.key=value"),
        ("two words=5", "", "write section.key=value"),
        # combinations
        ("trainer.top_p=0.9", "trainer.top_p", "= 0.9: needs top_k > 0"),
        ("trainer.min_p=0.1", "trainer.min_p", "= 0.1: needs top_k > 0"),
        ("trainer={bf16=true,fp16=true}", "trainer.bf16", "= true: excludes fp16 = true"),
        ("trainer.max_steps=0", "trainer.max_steps", "= 0: trains nothing: set it to -1"),
        ("trainer.lr_scheduler_type=cosine", "trainer.lr_scheduler_type", "needs max_steps of at least 1"),
        ("trainer.warmup_steps=5", "trainer.warmup_steps", "= 5: the constant schedule has no warm-up"),
        ("trainer.max_concurrent_rollouts=4", "trainer.max_concurrent_rollouts", "num_generations = 8"),
        ("trainer.num_sampler_logprobs=0", "trainer.num_sampler_logprobs", "or set score_centering = false"),
        ("trainer.eval_steps=5", "trainer.eval_steps", "= 5: needs held-out prompts: set data.eval_source"),
        ("data.eval_size=5", "data.eval_size", "= 5: needs data.eval_source"),
        ('server.environment=["A=1","b"]', "server.environment", '= ["b"]: each entry must be "NAME=VALUE"'),
        ("server.tensor_parallel_size=2", "server.tensor_parallel_size", "= 2: is more than gpus = 1"),
        ("learner.gpus=2", "learner.processes_per_node", "= 1: differs from gpus = 2"),
        ('learner={use_lora=true,lora_target_modules=["lm_head"]}', "learner.lora_target_modules", "take it out"),
        ("server.max_model_len=2048", "trainer.max_completion_length", "= 2048: leaves no prompt room"),
        ("server.max_num_seqs=4", "trainer.num_generations", "= 8: is more than server.max_num_seqs = 4"),
        ("server={enable_lora=true,max_lora_rank=16}", "learner.lora_rank", "= 32: is more than server.max_lora_rank"),
    ],
)
def test_refusals_name_key_value_and_way_out(override: str, key: str, words: str) -> None:
    problems = refused(override)
    assert list(problems) == [key]
    assert words in problems[key]
    assert problems[key].startswith(key)


def test_every_problem_is_listed_also_combinations_beside_faulty_values() -> None:
    problems = refused(
        "trainer.seed=x",
        "trainer.max_steps=0",
        "trainer.top_p=0.5",
        "learner.gpus=4",
        "server.max_num_seqs=2",
        "nonsense",
    )
    assert set(problems) == {
        "",
        "trainer.seed",
        "trainer.max_steps",
        "trainer.top_p",
        "learner.processes_per_node",
        "trainer.num_generations",
    }


def test_no_combination_is_judged_with_a_stand_in_for_a_faulty_value() -> None:
    problems = refused("server.max_model_len=64k", "trainer.max_completion_length=8000")
    assert set(problems) == {"server.max_model_len"}


@pytest.mark.parametrize("values", [{}, {"model": {}, "data": {}}])
def test_missing_keys(values: dict) -> None:
    problems = refused(values=values)
    assert set(problems) == {"model.name", "data.source"}
    assert "missing" in problems["model.name"]
    assert "Hub id" in problems["model.name"]


def test_overrides_later_ones_win_and_lists_tables_text() -> None:
    config = parse_config(
        {**BASE, "trainer": {"max_steps": 1, "seed": 7}},
        [
            "trainer.max_steps=5",
            "trainer.max_steps = 6",
            'reward.functions=["a:b", "c:d"]',
            "trainer={save_steps=3}",
            "model.name=some/model",
            "model.revision=1234567",
            'data.source="quoted"',
            "data.eval_source=reasoning_gym:chain_sum?size=3&seed=9",
        ],
    )
    assert (config.trainer.max_steps, config.trainer.seed, config.trainer.save_steps) == (6, 7, 3)
    assert config.reward.functions == ["a:b", "c:d"]
    assert (config.model.name, config.model.revision, config.data.source) == ("some/model", "1234567", "quoted")
    assert config.data.eval_source == "reasoning_gym:chain_sum?size=3&seed=9"


def test_an_empty_override_puts_back_the_default() -> None:
    values = {**BASE, "trainer": {"eval_steps": 5, "seed": 1}}
    config = parse_config(values, ["trainer.eval_steps=", "trainer.seed="])
    assert config.trainer.eval_steps is None
    assert config.trainer.seed == RunConfig(**BASE).trainer.seed
    assert values["trainer"]["eval_steps"] == 5


def file_refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


def test_malformed_toml_names_file_line_column_and_shows_the_line(tmp_path: Path) -> None:
    file = write(tmp_path, "[model]\nname = Qwen\n")
    message = file_refused(file)
    assert str(file) in message
    assert "line 2, column 8" in message
    assert "needs quotes" in message
    line, caret = message.splitlines()[-2:]
    assert line.endswith("name = Qwen")
    assert line[caret.index("^")] == "Q"


@pytest.mark.parametrize("text", ["[model", 'a = "', "a = 1\na = 2\n", "a = [1,\n2", "= 1"])
def test_malformed_toml_always_has_a_position(tmp_path: Path, text: str) -> None:
    assert "not valid TOML at line" in file_refused(write(tmp_path, text))


def test_of_a_long_line_only_what_is_around_the_fault_is_shown(tmp_path: Path) -> None:
    message = file_refused(write(tmp_path, f'a = "{"x" * 5000}" here "{"y" * 5000}"\n'))
    line, caret = message.splitlines()[-2:]
    assert line.strip().startswith("…x")
    assert line.endswith("y…")
    assert len(line) < 140
    assert line[caret.index("^") :].startswith("here")


def test_a_sweep_s_file_is_said_to_be_one(tmp_path: Path) -> None:
    file = write(tmp_path, 'name = "s"\nbase = "demo"\n[axes]\n"trainer.max_staleness" = [0, 2]\n')
    assert f"this is a sweep, not a run: `slipstream sweep {file}` runs it" in file_refused(file)


def test_missing_file_folder_and_binary(tmp_path: Path) -> None:
    message = file_refused(tmp_path / "none.toml")
    assert str(tmp_path / "none.toml") in message
    assert "examples/" in message
    shown = "\n".join(line.strip() for line in message.splitlines()[4:])
    assert tomllib.loads(shown) == tomllib.loads(EXAMPLE)
    assert "this is a folder" in file_refused(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in file_refused(tmp_path / "x.toml")


def test_dump_explains_every_key(tmp_path: Path) -> None:
    text = dump_config(RunConfig(**BASE))
    for key, schema in known_keys().items():
        if not is_section(key):
            assert schema["description"] in text, key
    assert "# eval_source =" in text


text_values = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@settings(deadline=None, max_examples=60)
@given(
    name=text_values,
    source=text_values,
    paths=st.lists(text_values, max_size=3),
    rate=st.floats(min_value=1e-300, max_value=1e9, allow_subnormal=False),
    eval_steps=st.none() | st.integers(1, 10**9),
    bf16=st.none() | st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_dump_and_load_round_trip(name, source, paths, rate, eval_steps, bf16, seed) -> None:  # type: ignore[no-untyped-def]
    config = RunConfig(
        model={"name": name},
        data={"source": source, "eval_source": source},
        reward={"paths": paths},
        trainer={"learning_rate": rate, "eval_steps": eval_steps, "bf16": bf16, "seed": seed},
    )
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_help_of_every_key_says_what_it_takes_and_its_default() -> None:
    for key in known_keys():
        text = field_help(key)
        assert text.startswith(f"{key}: ")
        assert is_section(key) or "Default: " in text or "Required." in text
    assert field_help("trainer.max_staleness").endswith("Takes a whole number at least 0. Default: 4.")
    assert field_help("model.name").endswith("Required.")
    assert 'Default: ["all-linear"].' in field_help("learner.lora_target_modules")
    with pytest.raises(KeyError):
        field_help("trainer.nope")
