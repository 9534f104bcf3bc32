"""The metrics of the loss that a run logs, against their definitions written out token by token."""

import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.learner.plan import PlannedMicroBatch, share_of
from slipstream.packing.trie import pack
from tests.learner_replay import ReplayTrainer, for_reference, made_up_group, replay_config, tiny_model
from tests.reference import policy_log_probs

EPSILON, EPSILON_HIGH, TEMPERATURE = 0.1, 0.35, 0.7


def first_window(folder: Path, centering: bool, candidates: int | None) -> tuple[dict[str, float], list[Any]]:
    """What the first step logged, and its samples."""
    config = replay_config(
        folder, score_centering=centering, epsilon=EPSILON, epsilon_high=EPSILON_HIGH, temperature=TEMPERATURE
    )
    groups = [made_up_group(number, 3, 5, 4, candidates) for number in range(4)]
    trainer = ReplayTrainer(tiny_model(), config, groups, 64)
    trainer.train()
    return trainer.state.log_history[0], [sample for batch in trainer.steps[0].micro_batches for sample in batch]


@pytest.mark.parametrize(("centering", "candidates"), [(False, None), (False, 9), (True, None), (True, 9)])
def test_logged_metrics_are_as_defined(tmp_path: Path, centering: bool, candidates: int | None) -> None:
    logs, samples = first_window(tmp_path, centering, candidates)
    model: Any = tiny_model()
    ratios, differences, entropies, masses, low, high = [], [], [], [], [], []
    for sample in samples:
        plain = for_reference(sample)
        log_p = policy_log_probs(model, plain, TEMPERATURE).detach()
        mine: list[tuple[bool, bool]] = []
        for t in np.flatnonzero(plain.trained):
            p = log_p[t][log_p[t].isfinite()]
            difference = log_p[t, plain.completion_ids[t]].item() - plain.sampler_logprobs[t]
            ratio = math.exp(difference)
            ratios.append(ratio)
            differences.append(abs(difference))
            entropies.append(-(p.exp() * p).sum().item())
            inside = range(len(log_p[t])) if plain.candidate_ids is None else plain.candidate_ids[t]
            head = zip(plain.head_ids[t], plain.head_logprobs[t], strict=True)
            masses.append(sum(math.exp(q) for v, q in head if v in inside))
            below, above = ratio < 1 - EPSILON, ratio > 1 + EPSILON_HIGH
            if not centering:  # where the objective is cut; without a cut, where the token is outside the region
                below, above = below and plain.advantage < 0, above and plain.advantage > 0
            mine.append((below, above))
        low.append([below for below, _ in mine])
        high.append([above for _, above in mine])
    every_low, every_high = (list(chain.from_iterable(flags)) for flags in (low, high))
    masked = [not 0.6 <= ratio <= 2.0 for ratio in ratios]
    expected = {
        "entropy": np.mean(entropies),
        "clip_ratio/low_mean": np.mean(every_low),
        "clip_ratio/low_min": min(np.mean(of) for of in low),
        "clip_ratio/high_mean": np.mean(every_high),
        "clip_ratio/high_max": max(np.mean(of) for of in high),
        "clip_ratio/region_mean": np.mean(every_low) + np.mean(every_high),
        "sampling/importance_sampling_ratio/mean": np.mean(ratios),
        "sampling/importance_sampling_ratio/min": min(ratios),
        "sampling/importance_sampling_ratio/max": max(ratios),
        "sampling/sampling_logp_difference/mean": np.mean(differences),
        "sampling/sampling_logp_difference/max": max(differences),
        "sampling/masked_mean": np.mean(masked),
    }
    if centering:
        expected["sampling/sampler_mass"] = np.mean(masses)
    assert 0 < expected["clip_ratio/low_mean"] < 1
    assert 0 < expected["clip_ratio/high_mean"] < 1
    assert {name: logs[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert ("sampling/sampler_mass" in logs) is centering
    assert "aux_loss" not in logs


def test_a_row_without_samples_has_no_share_in_the_router_loss() -> None:
    """It is met on ranks that got nothing: the mean is over the rows that hold samples."""
    sample = made_up_group(0, 3, 5).samples[0]
    batch = PlannedMicroBatch([pack([sample]), pack([])], sample.num_trained, 1.0)
    share = share_of([batch], rank=1, accumulation=2)
    assert [(item["num_rows"], item["row"].num_samples) for item in share] == [(1, 0), (1, 0)]
