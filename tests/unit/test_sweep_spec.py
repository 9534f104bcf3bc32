"""Sweep files and their cells."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config_file import ConfigError, parse_config
from slipstream.sweep.expand import CellSpec, configure_all, expand, override
from slipstream.sweep.spec import SweepConfig, load_sweep, parse_sweep, same

BASE = parse_config({"model": {"name": "m"}, "data": {"source": "d"}, "trainer": {"max_steps": 5, "seed": 3}})
RANDOM = 'base = "b"\nmethod = "random"\nsamples = 2\n[axes]\n'
AXES = '[axes]\n"trainer.max_staleness" = [0, 2]\n'


def sweep_of(text: str) -> SweepConfig:
    return parse_sweep(tomllib.loads(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (AXES, ["base: missing", "TOML file"]),
        ('base = "b"', ["axes = {}: there are none"]),
        ('base = "b"\n[axes]\n"trainer.seed" = []', ["axes.trainer.seed = []: has no values"]),
        ('base = "b"\n[axes]\n"trainer.seed" = 3', ["axes.trainer.seed = 3: is no list of values"]),
        ('base = "b"\n[axes]\n"trainer.seed" = [1, 2, 1]', ["axes.trainer.seed = 1: is there twice"]),
        ('base = "b"\n[axes]\n"trainer.max_stale" = [1]', ["unknown key; did you mean trainer.max_staleness?"]),
        ('base = "b"\n[axes]\n"trainer" = [1]', ["axes.trainer = [1]: is a section"]),
        ('base = "b"\n[axes]\n"storage.root" = ["a"]', ["axes.storage.root", "one storage root", "[set]"]),
        ('base = "b"\n[axes]\nname = ["a"]', ["axes.name", "named after the sweep"]),
        (f'base = "b"\n{AXES}[set]\n"trainer.max_staleness" = 1', ["set.trainer.max_staleness = 1: is given for each"]),
        (f'base = "b"\ncels_at_once = 2\n{AXES}', ["cels_at_once = 2: unknown key; did you mean cells_at_once?"]),
        (f'base = "b"\ntrainer = 2\n{AXES}', ["trainer = 2: is a section of a run", "[set]"]),
        (f'base = "b"\ncells_at_once = 0\n{AXES}', ["cells_at_once = 0: must be greater than or equal to 1"]),
        (f'base = "b"\ngpu_hours = -1\n{AXES}', ["gpu_hours = -1: must be greater than 0", "Empty: no limit"]),
        (f'base = "b"\nmethod = "all"\n{AXES}', ["method = \"all\": must be 'grid', 'list' or 'random'"]),
        (f'base = "b"\nsamples = 3\n{AXES}', ['samples = 3: is for method = "random"']),
        (f'base = "b"\nmethod = "random"\n{AXES}', ["samples: a random sweep needs their number"]),
        (f'base = "b"\nmethod = "list"\n{AXES}', ["cells = []: a list sweep needs cells", "axes ="]),
        (f'base = "b"\n{AXES}[halving]\nfirst_rung = 0', ["halving.first_rung = 0", "Optimizer steps"]),
        ('base = "b"\n[axes]\n"trainer.seed" = {low = 1, high = 5}', ['a range is for method = "random"']),
        (
            'base = "b"\nmethod = "random"\nsamples = 2\n[axes]\n"trainer.learning_rate" = {low = 0, high = 1, log = true}',
            ["axes.trainer.learning_rate.low = 0: a logarithmic scale needs it above 0"],
        ),
        (f'{RANDOM}"trainer.seed" = {{low = 1}}', ["axes.trainer.seed.high: a range is written like {low ="]),
        (f'{RANDOM}"trainer.seed" = {{low = 1, high = nan}}', ["seed.high = nan: a range", "finite numbers"]),
        (
            f'{RANDOM}"trainer.seed" = {{low = 1, high = 5, step = 2}}',
            ["1 problem", "seed.step = 2: a range is written"],
        ),
        (f'samples = 5000\n{RANDOM}"trainer.seed" = [1]'.replace("samples = 2\n", ""), ["samples = 5000", "1000"]),
        ('base = "b"\n[axes]\n"trainer.seed" = [2020-01-01]', ["axes.trainer.seed = 2020-01-01: is a date", "quotes"]),
        ('base = "b"\n[axes]\n"trainer.seed" = [inf]', ["axes.trainer.seed = inf: is no number that a setting takes"]),
        ('base = "b"\n[axes]\n"trainer.seed" = [{a = 1}]', ["axes.trainer.seed = {a = 1}: is a table"]),
        (f'base = "b"\n{AXES}[set]\n"trainer.seed" = 10:30:00', ["set.trainer.seed = 10:30:00: is a date or a time"]),
        ('base = "b"\nmethod = "list"\n[[cells]]\n"trainer.seed" = nan', ["cells[0].trainer.seed = nan: is no number"]),
        (
            'base = "b"\n[axes]\n"trainer.seed" = [1]\n[axes.trainer]\nseed = [2]',
            ["axes.trainer.seed = [2]: is there twice (also [1])"],
        ),
        (f'base = ""\n{AXES}', ['base = "": must not be empty']),
        (f'base = "b"\nname = "a/b"\n{AXES}', ['name = "a/b": is not possible', "letters, digits"]),
        (f'base = "b"\nhalving = "yes"\n{AXES}', ['halving = "yes": must be a table']),
        ('base = "b"\naxes = 3', ["axes = 3: must be a table"]),
    ],
)
def test_a_refusal_names_key_value_and_way_out(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep_of(text)
    for word in words:
        assert word in str(caught.value)


def test_keys_may_be_quoted_or_tables() -> None:
    quoted = sweep_of(
        'base = "b"\n[axes]\n"trainer.max_staleness" = [0]\n"server.gpus" = [1]\n[set]\n"trainer.seed" = 1'
    )
    tables = sweep_of(
        'base = "b"\n[axes.trainer]\nmax_staleness = [0]\n[axes.server]\ngpus = [1]\n[set]\ntrainer.seed = 1'
    )
    assert quoted == tables
    assert quoted.keys == ("trainer.max_staleness", "server.gpus")


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no such file \(looked for .*none.toml\): examples/sweeps/demo.toml"
    ):
        load_sweep(tmp_path / "none.toml")


def test_a_folder_is_no_sweep_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this is a folder that holds no sweep: name the sweep's \.toml file"):
        load_sweep(tmp_path)


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ('"model.revision" = ["a", 7, "7"]', "cell c02: revision 7 is the same run as revision 7 (c01)"),
        ('"trainer.seed" = [42, ""]', "cell c01: seed default is the same run as seed 42 (c00)"),
    ],
)
def test_two_cells_are_never_the_same_run(axis: str, said: str) -> None:
    sweep = sweep_of(f'base = "b"\n[axes]\n{axis}')
    with pytest.raises(ConfigError) as caught:
        configure_all(BASE, sweep, expand(sweep))
    assert said in str(caught.value)


def test_what_no_run_can_be_is_told_of_all_cells_at_once() -> None:
    sweep = sweep_of('base = "b"\n[axes]\n"trainer.max_staleness" = [-1, 2]\n"trainer.token_budget" = [10, "many"]')
    with pytest.raises(ConfigError) as caught:
        configure_all(BASE, sweep, expand(sweep))
    text = str(caught.value)
    assert (
        "trainer.max_staleness = -1: must be a whole number at least 0 [cell c00 (max_staleness -1, token_budget 10)"
        in text
    )
    assert "and 1 more]" in text
    assert 'trainer.token_budget = "many"' in text
    assert len(caught.value.problems) == 2


def test_a_combination_that_is_impossible_is_refused() -> None:
    sweep = sweep_of('base = "b"\n[axes]\n"trainer.top_p" = [0.9]\n"trainer.top_k" = [0, 40]')
    with pytest.raises(ConfigError, match=r"needs top_k > 0.*\[cell c00 \(top_p 0.9, top_k 0\)\]"):
        configure_all(BASE, sweep, expand(sweep))


def test_cells_set_their_values_over_the_base_and_the_settings() -> None:
    sweep = sweep_of('base = "b"\n[axes]\n"trainer.token_budget" = [64, ""]\n[set]\n"trainer.max_steps" = 9')
    cells = expand(sweep)
    configs = configure_all(BASE, sweep, cells)
    assert [str(cell) for cell in cells] == ["token_budget 64", "token_budget default"]
    assert [config.trainer.token_budget for config in configs.values()] == [64, None]
    assert {(config.trainer.max_steps, config.trainer.seed) for config in configs.values()} == {(9, 3)}


def test_a_list_has_its_own_cells() -> None:
    text = 'base = "b"\nmethod = "list"\n[[cells]]\n"trainer.seed" = 1\n[[cells]]\ntrainer.seed = 2\ntrainer.top_k = 5'
    sweep = sweep_of(text)
    assert expand(sweep) == (
        CellSpec("c00", {"trainer.seed": 1}),
        CellSpec("c01", {"trainer.seed": 2, "trainer.top_k": 5}),
    )
    assert sweep.keys == ("trainer.seed", "trainer.top_k")
    with pytest.raises(ConfigError, match=r"cells\[2\].*the same as an earlier cell"):
        expand(sweep_of(text + "\n[[cells]]\ntrainer.seed = 1"))


def test_too_many_cells_are_refused_before_they_are_made() -> None:
    sweep = parse_sweep(
        {"base": "b", "axes": {f"trainer.{k}": list(range(1, 100)) for k in ("seed", "top_k", "save_steps")}}
    )
    with pytest.raises(ConfigError, match=r"970299.*more than 1000"):
        expand(sweep)


def test_a_random_sweep_that_has_no_more_cells_says_so() -> None:
    sweep = parse_sweep({"base": "b", "method": "random", "samples": 5, "axes": {"trainer.seed": [1, 2, 3]}})
    with pytest.raises(ConfigError, match="samples = 5: only 3 different cells were found"):
        expand(sweep)


values = st.lists(st.integers(0, 50), min_size=1, max_size=4, unique=True)
keys = st.sampled_from(["trainer.seed", "trainer.max_staleness", "trainer.top_k", "trainer.warmup_steps"])
axes = st.dictionaries(keys, values, min_size=1, max_size=4)


@given(axes)
def test_a_grid_is_the_product_each_cell_once_in_a_stable_order(axes: dict[str, list[int]]) -> None:
    sweep = parse_sweep({"base": "b", "axes": axes})
    cells = expand(sweep)
    assert len(cells) == math.prod(len(values) for values in axes.values())
    assert len({tuple(cell.values.items()) for cell in cells}) == len(cells)
    assert [cell.id for cell in cells] == sorted({cell.id for cell in cells})
    assert cells == expand(sweep)
    assert all(tuple(cell.values) == sweep.keys and all(cell.values[k] in axes[k] for k in axes) for cell in cells)


@given(st.integers(0, 2**31 - 1), st.integers(1, 12), st.booleans(), st.integers(1, 10), st.integers(11, 10**6))
def test_random_cells_are_reproducible_and_within_the_space(
    seed: int, samples: int, log: bool, low: int, high: int
) -> None:
    space: dict[str, Any] = {
        "trainer.seed": {"low": low, "high": high + 100, "log": log},
        "trainer.learning_rate": {"low": 1e-6 * low, "high": 1e-6 * high, "log": log},
        "trainer.max_staleness": [0, 2, 8],
    }
    sweep = parse_sweep({"base": "b", "method": "random", "samples": samples, "seed": seed, "axes": space})
    cells = expand(sweep)
    assert cells == expand(sweep)
    assert len(cells) == samples == len({tuple(cell.values.items()) for cell in cells})
    for cell in cells:
        assert low <= cell.values["trainer.seed"] <= high + 100
        assert isinstance(cell.values["trainer.seed"], int)
        assert 1e-6 * low <= cell.values["trainer.learning_rate"] <= 1e-6 * high
        assert cell.values["trainer.max_staleness"] in (0, 2, 8)


@given(st.text(max_size=20) | st.integers(0, 10**6) | st.booleans() | st.lists(st.text(max_size=5), max_size=3))
def test_an_override_is_read_back_as_the_value(value: Any) -> None:
    key = {str: "data.system_prompt", bool: "data.shuffle", int: "trainer.seed", list: "server.extra_args"}[type(value)]
    section, _, name = key.partition(".")
    config = parse_config({"model": {"name": "m"}, "data": {"source": "d"}}, [override(key, value)])
    read = getattr(getattr(config, section), name)
    assert read is None if value == "" else same(read, value)
