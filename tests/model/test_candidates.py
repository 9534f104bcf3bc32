"""Candidate sets (top-k, top-p, min-p): from the server's answer through samples and rows to the loss."""

import asyncio
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from slipstream.algorithm.loss import LossSettings, token_loss
from slipstream.learner.checkpoint import load_samples, save_samples
from slipstream.learner.forward import to_tensors, token_terms
from slipstream.learner.live import candidate_problems
from slipstream.packing.attention import use_tree_attention
from slipstream.packing.sample import Sample
from slipstream.packing.trie import pack
from slipstream.rollout.client import Choice, GenerationError, SamplingSettings, VLLMClient
from slipstream.rollout.sequences import build_sequences
from slipstream.rollout.types import TurnRecord
from slipstream.serving.probe import Capabilities
from tests.learner_replay import VOCABULARY, for_reference, made_up_sample, tiny_model
from tests.reference import policy_log_probs, reference_loss
from tests.samples import make_sample

CPU = torch.device("cpu")
TEMPERATURE = 0.8
CENTERED = LossSettings(True, 0.5, 2.0, 0.2, 0.3)
CLIPPED = LossSettings(False, 0.5, 2.0, 0.2, 0.3)


# ---- the request and the answer


def truncating(**changes: Any) -> SamplingSettings:
    fields = {"temperature": 1.0, "top_p": 1.0, "top_k": 4, "min_p": None, "head_size": 0, "stop_token_ids": ()}
    return SamplingSettings(**(fields | changes))


def ask(choice: dict[str, Any], settings: SamplingSettings | None = None, **options: Any) -> Choice:
    """What the client makes of one choice that the server answers with."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"index": 0, "finish_reason": "stop", **choice}]})

    async def run() -> Choice:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", answer)
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        client = VLLMClient(
            f"http://{host}:{port}", "m", settings or truncating(), **({"returns_candidates": True} | options)
        )
        await client.open()
        try:
            (found,) = await client.generate([1, 2], n=1, max_tokens=4, seed=0)
        finally:
            await client.close()
            await runner.cleanup()
        return found

    return asyncio.run(run())


GENERATED = {"token_ids": [5, 6], "logprobs": {"content": [{"logprob": -0.1, "top_logprobs": []}] * 2}}


def test_the_sets_of_a_choice_are_taken() -> None:
    assert ask({**GENERATED, "sampling_mask": [[4, 5], [6]]}).candidates == [[4, 5], [6]]


@pytest.mark.parametrize(
    ("mask", "named"),
    [
        ({}, "no sampling_mask"),
        ({"sampling_mask": None}, "no sampling_mask"),
        ({"sampling_mask": [[5]]}, "1 entries for 2 tokens"),
        ({"sampling_mask": [[5], [4, 5]]}, "leaves out token 6 at 1"),
    ],
)
def test_an_answer_without_the_sets_that_were_promised_is_a_failed_rollout(mask: dict[str, Any], named: str) -> None:
    with pytest.raises(GenerationError, match=named):
        ask({**GENERATED, **mask})


def test_where_the_server_returns_no_sets_there_are_none() -> None:
    assert ask(GENERATED, returns_candidates=False).candidates is None
    assert ask(GENERATED, truncating(top_k=0)).candidates is None, "the whole vocabulary is sampled from"
    completion = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.1, -0.2]}}
    assert ask(completion, use_generate_route=False).candidates is None


@pytest.mark.parametrize("changes", [{}, {"top_k": 0, "top_p": 0.9}, {"top_k": 0, "min_p": 0.1}])
def test_what_counts_as_truncating(changes: dict[str, Any]) -> None:
    assert truncating(**changes).truncates
    assert not truncating(top_k=0, min_p=0.0).truncates


FLAGS = ("--return-sampling-mask", "--enable-scale-out", "VLLM_USE_V2_MODEL_RUNNER=1")


@pytest.mark.parametrize(("mask", "route"), [(False, True), (True, False), (False, False)])
def test_a_server_that_cannot_return_them_is_warned_about_once_with_the_flags(mask: bool, route: bool) -> None:
    server = Capabilities("m", sampling_mask=mask, has_generate_route=route)
    for changes in ({"top_k": 8}, {"top_p": 0.9}, {"min_p": 0.1}):
        config = SimpleNamespace(**({"top_k": 0, "top_p": 1.0, "min_p": None} | changes))
        with pytest.warns(UserWarning, match="importance ratio is biased") as caught:
            assert candidate_problems(server, config) == []
        assert len(caught) == 1
        assert all(flag in str(caught[0].message) for flag in FLAGS)


def test_no_warning_where_nothing_is_missing_and_an_error_where_the_server_would_refuse() -> None:
    able = Capabilities("m", sampling_mask=True, has_generate_route=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert candidate_problems(able, SimpleNamespace(top_k=8, top_p=0.9, min_p=None)) == []
        plain = SimpleNamespace(top_k=0, top_p=1.0, min_p=None)
        assert candidate_problems(Capabilities("m"), plain) == []
        assert "needs top_k" in candidate_problems(able, plain)[0]


# ---- samples and rows


def test_sequences_keep_the_sets_of_trained_tokens() -> None:
    turns = [
        TurnRecord([1], [2, 50, 3], [-1.0] * 3, output_mask=[1, 0, 1], output_sampling_mask=[[2, 7], [50], [3]]),
        TurnRecord([1, 2, 50, 3, 9], [4], [-1.0]),
    ]
    (sample,) = build_sequences(turns)
    assert sample.candidate_ids is not None
    assert sample.candidate_offsets is not None
    assert sample.candidate_ids.tolist() == [2, 7, 3]
    assert sample.candidate_offsets.tolist() == [0, 2, 3, 3], "a turn without sets: the whole vocabulary"
    (without,) = build_sequences([TurnRecord([1], [2], [-1.0])])
    assert without.candidate_ids is None
    assert without.candidate_offsets is None


@pytest.mark.parametrize(
    ("sets", "named"), [([[2]], "output_sampling_mask has 1"), ([[2], [4, 5]], "not among the candidates")]
)
def test_sets_that_contradict_the_tokens_are_refused(sets: list[list[int]], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build_sequences([TurnRecord([1], [2, 3], [-1.0] * 2, output_sampling_mask=sets)])


def truncated_samples(seed: int, head_size: int = 6) -> list[Sample]:
    """Four samples: two that share a prefix, the same tokens again, and one drawn from the whole vocabulary."""
    rng = np.random.default_rng(seed)
    tokens = [[7, 8, 9, 10, 11], [7, 8, 9, 12], [7, 8, 9, 10, 11], [20, 21, 22]]
    sizes = [9, 9, 2, None]
    return [
        made_up_sample(rng, ids, [False] + [True] * (len(ids) - 1), head_size, size, advantage=float(rng.normal()))
        for ids, size in zip(tokens, sizes, strict=True)
    ]


def test_rows_and_checkpoints_keep_the_sets(tmp_path: Path) -> None:
    samples = [*truncated_samples(0), make_sample([1], [2])]
    row = pack(samples)
    assert row.candidate_offsets is not None
    assert len(row.candidate_offsets) == row.num_terms + 1
    parts = np.split(row.candidate_ids, row.candidate_offsets[1:-1])
    begin = 0
    for sample in samples:
        mine = parts[begin : begin + sample.num_trained]
        begin += sample.num_trained
        if sample.candidate_ids is None:
            assert all(len(ids) == 0 for ids in mine)
        else:
            assert np.concatenate(mine).tolist() == sample.candidate_ids.tolist()
            assert [len(ids) for ids in mine] == np.diff(sample.candidate_offsets).tolist()
    assert pack(samples[3:]).candidate_ids is None
    save_samples(tmp_path / "samples.npz", samples)
    for before, after in zip(samples, load_samples(tmp_path / "samples.npz"), strict=True):
        assert (before.candidate_ids is None) == (after.candidate_ids is None)
        if before.candidate_ids is not None:
            assert after.candidate_ids.tolist() == before.candidate_ids.tolist()
            assert after.candidate_offsets.tolist() == before.candidate_offsets.tolist()


# ---- the loss


def tree_model() -> Any:
    model = tiny_model()
    use_tree_attention(model, CPU)
    return model


@pytest.mark.parametrize("seed", range(3))
def test_the_policy_is_renormalised_over_each_token_s_set(seed: int) -> None:
    samples, model = truncated_samples(seed), tree_model()
    terms, entropy = token_terms(model, to_tensors(pack(samples), CPU), TEMPERATURE)
    expected = [
        log_p[t]
        for sample in map(for_reference, samples)
        for log_p in [policy_log_probs(model, sample, TEMPERATURE)]
        for t, trained in enumerate(sample.trained)
        if trained
    ]
    targets = np.concatenate([sample.input_ids[sample.trained] for sample in samples])
    assert torch.allclose(terms.logp, torch.stack([e[y] for e, y in zip(expected, targets, strict=True)]), atol=1e-10)
    entropies = [-(e[e.isfinite()].exp() * e[e.isfinite()]).sum() for e in expected]
    assert torch.allclose(entropy, torch.stack(entropies), atol=1e-10)
    for i, head in enumerate(np.concatenate([sample.head_ids for sample in samples])):
        for k, v in enumerate(head):
            assert terms.head_mask[i, k].item() == (v >= 0 and expected[i][v].isfinite().item())
            if terms.head_mask[i, k]:
                assert abs(terms.head_logp[i, k] - expected[i][v]) < 1e-10
    assert not terms.head_mask.all(), "some of the head lies outside the sets"


@pytest.mark.parametrize("settings", [CENTERED, CLIPPED], ids=["centered", "clipped"])
@pytest.mark.parametrize("head_size", [6, VOCABULARY])
def test_loss_and_gradient_equal_the_reference(settings: LossSettings, head_size: int) -> None:
    samples, model = truncated_samples(5, head_size), tree_model()
    options = {
        "score_centering": settings.score_centering,
        "clip_min": settings.clip_min,
        "clip_max": settings.clip_max,
        "epsilon": settings.epsilon,
        "epsilon_high": settings.epsilon_high,
        "temperature": TEMPERATURE,
    }
    expected = reference_loss(model, [list(map(for_reference, samples))], **options)
    terms, _ = token_terms(model, to_tensors(pack(samples), CPU), TEMPERATURE)
    found = token_loss(terms, settings).sum() / len(terms.logp)
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)
    parameters = list(model.parameters())
    for a, b in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True):
        assert (a - b).abs().max() <= 1e-10 * (1 + b.abs().max())


def test_without_the_sets_the_ratio_is_too_small() -> None:
    """What the warning says: the whole vocabulary has more mass than a candidate set."""
    samples, model = truncated_samples(1)[:1], tree_model()
    row = to_tensors(pack(samples), CPU)
    inside, _ = token_terms(model, row, TEMPERATURE)
    samples[0].candidate_ids = samples[0].candidate_offsets = None
    outside, _ = token_terms(model, to_tensors(pack(samples), CPU), TEMPERATURE)
    assert (outside.logp < inside.logp).all()
