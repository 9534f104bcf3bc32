"""The loss and its gradient through the real `Trainer.train()`, one rank and two, against the float64 reference."""

import copy
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.learner.checkpoint import RolloutState
from slipstream.learner.forward import to_tensors, token_terms
from slipstream.learner.router_loss import router_loss
from slipstream.metrics.audit import check_lines
from slipstream.packing.attention import use_tree_attention
from slipstream.packing.trie import pack
from tests import reference
from tests.learner_cases import CASES, Case, run_case
from tests.learner_replay import Step, for_reference, replay_config, tiny_model
from tests.learner_resume import NUM_PROMPTS, new_trainer
from tests.moe import model_of

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
RANKS = 2


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks did in all cases: one start of torchrun."""
    folder = tmp_path_factory.mktemp("ranks")
    one = new_trainer(folder / "one", num_steps=4)
    one.train()
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "-m", "tests.standins.learner_ranks", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    return [{**result, "folder": folder, "one_run": (one.steps, one.reports.lines)} for result in results]


@pytest.fixture(scope="module")
def steps_of(two_ranks: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(case, ranks) → the optimizer steps done, as rank 0 saw them."""
    done: dict[str, list[Step]] = {}

    def steps(name: str, ranks: int) -> list[Step]:
        if ranks == RANKS:
            return two_ranks[0]["steps"][name]
        if name not in done:
            done[name] = run_case(CASES[name], tmp_path_factory.mktemp("one_rank"))
        return done[name]

    return steps


def reference_options(case: Case) -> dict[str, Any]:
    config = replay_config(Path("unused"), **case.config)
    return {
        "score_centering": config.score_centering,
        "clip_min": config.vllm_importance_sampling_clip_min,
        "clip_max": config.vllm_importance_sampling_clip_max,
        "epsilon": config.epsilon,
        "epsilon_high": case.config.get("epsilon_high"),
        "temperature": config.temperature,
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Equal up to `tolerance` times the parameter's largest gradient, every parameter."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().item()
        assert scale > 0, f"{name} has no gradient, so nothing is compared"
        error = (found[name] - value).abs().max().item()
        assert error <= tolerance * scale, f"{name}: off by {error / scale:.1e} of its largest gradient"


@pytest.mark.parametrize("ranks", [1, RANKS])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_the_reference(name: str, ranks: int, steps_of: Any) -> None:
    case = CASES[name]
    options = reference_options(case)
    model: Any = tiny_model()
    for step in steps_of(name, ranks):
        model.load_state_dict(step.before, strict=False)
        model.zero_grad()
        batches = [[for_reference(sample) for sample in batch] for batch in step.micro_batches]
        loss = reference.reference_loss(model, batches, **options)
        loss.backward()
        assert_same(step.gradient, {n: p.grad for n, p in model.named_parameters()}, 1e-9)
        assert step.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)  # transformers adds it up in float32


@pytest.mark.parametrize("ranks", [1, RANKS])
@pytest.mark.parametrize("name", CASES)
def test_every_sample_is_trained_once(name: str, ranks: int, steps_of: Any) -> None:
    given = sorted(sample.rollout_id for group in CASES[name].data for sample in group.samples)
    assert sorted(i for step in steps_of(name, ranks) for i in step.samples) == given


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_the_cases_cover_what_they_are_for(ranks: int, steps_of: Any) -> None:
    for name, case in CASES.items():
        steps = steps_of(name, ranks)
        sizes = [len(step.micro_batches) for step in steps]
        if "accumulation" in name and not case.lone:
            assert sizes[0] == 3, name
            assert 0 < sizes[-1] < 3, f"{name}: no short last accumulation"
        if "lone" in name:
            assert steps[0].samples_per_row == [[1, 0][:ranks]]
        if "one micro-batch" in name:
            assert sizes == [1]
        options = reference_options(case)
        model: Any = tiny_model()
        ratios = [
            ratio
            for batch in steps[0].micro_batches
            for sample in map(for_reference, batch)
            for ratio, trained in zip(
                reference.ratios(model, sample, options["temperature"]), sample.trained, strict=True
            )
            if trained
        ]
        if not case.lone:
            assert any(ratio < options["clip_min"] for ratio in ratios), name
            assert any(ratio > options["clip_max"] for ratio in ratios), name
            assert any(options["clip_min"] < ratio < options["clip_max"] for ratio in ratios), name
            masks = [sample.trained.tolist() for batch in steps[0].micro_batches for sample in batch]
            assert any(False in mask[mask.index(True) :] for mask in masks), (
                f"{name}: no untrained stretch in the middle"
            )


def test_gradient_of_a_micro_batch_does_not_depend_on_ranks_or_rows(steps_of: Any) -> None:
    for name in ("one micro-batch", "one micro-batch, clipped"):
        base = steps_of(name, 1)[0]
        placements = {tuple(map(tuple, base.samples_per_row))}
        for other, ranks in ((f"{name}, dealt", 1), (name, RANKS), (f"{name}, dealt", RANKS)):
            step = steps_of(other, ranks)[0]
            assert step.samples == base.samples
            assert_same(step.gradient, base.gradient, 1e-12)
            assert step.loss == pytest.approx(base.loss, rel=1e-5)
            placements.add(tuple(map(tuple, step.samples_per_row)))
        assert len(placements) == 3, f"{name}: the samples were not placed in different ways: {placements}"


def test_all_ranks_take_the_same_step(two_ranks: list[dict[str, Any]]) -> None:
    for name in CASES:
        for one, other in zip(*(rank["steps"][name] for rank in two_ranks), strict=True):
            assert one.gradient.keys() == other.gradient.keys()
            assert all(torch.equal(one.gradient[key], other.gradient[key]) for key in one.gradient)


def test_router_loss_is_averaged_over_the_rows_of_all_ranks(two_ranks: list[dict[str, Any]]) -> None:
    """The gradients with and without it differ by its coefficient times its mean over the rows that hold samples."""
    without, having = two_ranks[0]["moe"][0.0][0], two_ranks[0]["moe"][0.125][0]
    assert without.samples == having.samples
    model = model_of("qwen3_moe")
    use_tree_attention(model, torch.device("cpu"))
    router = router_loss(model, 0.125)
    means = []
    for samples, counts in zip(having.micro_batches, having.samples_per_row, strict=True):
        assert len(counts) == RANKS
        values, begin = [], 0
        for count in filter(None, counts):
            row = pack(samples[begin : begin + count])
            begin += count
            with router.recorded():
                token_terms(model, to_tensors(row, torch.device("cpu")), 1.0)
            values.append(router.value(row.num_tokens))
        means.append(torch.stack(values).mean())
    mean = torch.stack(means).mean()
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(0.125 * mean, list(parameters.values()), allow_unused=True)
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        expected = torch.zeros_like(parameter) if gradient is None else gradient
        found = having.gradient[name] - without.gradient[name]
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7), name
    assert two_ranks[0]["moe_logs"][0]["aux_loss"] == pytest.approx(mean.item(), rel=1e-5)


def test_two_ranks_resume_where_they_stopped(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert all(torch.equal(rank["whole"][name], value) for name, value in rank["resumed"].items())


def assert_goes_on(before: Any, after: Any, checkpoint: Path) -> None:
    """Steps 3 and 4 of another number of ranks train each sample that steps 1 and 2 did not, from the same weights."""
    (first, lines), (second, more_lines) = before, after
    assert len(second) == 2
    trained = [i for step in [*first[:2], *second] for i in step.samples]
    assert len(trained) == len(set(trained))
    assert all(step.samples for step in second)
    assert check_lines([line for line in lines if line["step"] <= 2] + more_lines, NUM_PROMPTS) == []
    assert all(torch.equal(second[0].before[name], value) for name, value in first[2].before.items())
    assert RolloutState.read(checkpoint).model_version == 2


def test_fewer_ranks_go_on_from_a_checkpoint_of_more(
    two_ranks: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = two_ranks[0]["folder"] / "whole" / "checkpoint-2"
    trainer = new_trainer(tmp_path, num_steps=4, seed=1)
    with caplog.at_level(logging.WARNING, "slipstream"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert "ranks was 2 at the checkpoint and is 1 now" in caplog.text
    assert_goes_on(two_ranks[0]["whole_run"], (trainer.steps, trainer.reports.lines), checkpoint)


def test_more_ranks_go_on_from_a_checkpoint_of_fewer(two_ranks: list[dict[str, Any]]) -> None:
    checkpoint = two_ranks[0]["folder"] / "one" / "checkpoint-2"
    assert_goes_on(two_ranks[0]["one_run"], two_ranks[0]["more_run"], checkpoint)
    one, other = (rank["more_run"][0][-1].before for rank in two_ranks)
    assert all(torch.equal(one[name], other[name]) for name in one), "the ranks agree"


def test_a_wrong_gradient_would_be_seen(steps_of: Any) -> None:
    step = copy.deepcopy(steps_of("one micro-batch", 1)[0])
    expected = {name: value.clone() for name, value in step.gradient.items()}
    name = next(iter(expected))
    step.gradient[name].view(-1)[step.gradient[name].abs().argmax()] *= 1 + 1e-8
    with pytest.raises(AssertionError, match="off by"):
        assert_same(step.gradient, expected, 1e-9)
