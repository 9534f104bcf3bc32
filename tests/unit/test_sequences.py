"""From turns to training sequences: ids, mask and log-probabilities checked by hand."""

import pytest

from slipstream.packing.sample import EMPTY, NOT_GENERATED
from slipstream.packing.trie import pack
from slipstream.rollout.sequences import assign_costs, build_sequences
from slipstream.rollout.types import TurnRecord


def turn(prompt, output, logprobs=None, **changes):
    return TurnRecord(prompt, output, logprobs or [-0.1 * (i + 1) for i in range(len(output))], **changes)


def rounded(values):
    return [round(float(v), 6) for v in values]


def test_one_turn():
    (sample,) = build_sequences([turn([1, 2, 3], [4, 5], [-0.5, -0.25], output_versions=[7, 8])])
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.trained.tolist() == [False, False, False, True, True]
    assert sample.logprobs.tolist() == [0, 0, 0, -0.5, -0.25]
    assert sample.versions.tolist() == [NOT_GENERATED] * 3 + [7, 8]
    assert sample.oldest_version == 7
    assert sample.head_ids.shape == (2, 0)


def test_a_second_turn_that_begins_with_the_first_is_appended():
    turns = [
        turn([1, 2], [3, 4], [-0.5, -1], output_versions=[5, 5]),
        turn([1, 2, 3, 4, 9, 9], [6], [-2.0], output_versions=[6]),
    ]
    (sample,) = build_sequences(turns)
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 9, 9, 6]
    assert sample.trained.tolist() == [False, False, True, True, False, False, True]
    assert sample.logprobs.tolist() == [0, 0, -0.5, -1, 0, 0, -2]
    assert sample.versions.tolist() == [-1, -1, 5, 5, -1, -1, 6]


def test_a_turn_that_renders_the_past_anew_forks():
    """The second prompt drops token 4: the first sequence ends, and no token is trained twice."""
    turns = [turn([1, 2], [3, 4], [-0.5, -1]), turn([1, 2, 3, 9], [6], [-2.0]), turn([1, 2, 3, 9, 6, 7], [8], [-3.0])]
    first, second = build_sequences(turns)
    assert first.input_ids.tolist() == [1, 2, 3, 4]
    assert first.trained.tolist() == [False, False, True, True]
    assert second.input_ids.tolist() == [1, 2, 3, 9, 6, 7, 8]
    assert second.trained.tolist() == [False] * 4 + [True, False, True]
    assert second.logprobs.tolist() == [0, 0, 0, 0, -2, 0, -3]


def test_a_prompt_that_equals_what_is_held_is_appended_without_context():
    (sample,) = build_sequences([turn([1], [2]), turn([1, 2], [3])])
    assert sample.input_ids.tolist() == [1, 2, 3]
    assert sample.trained.tolist() == [False, True, True]


def test_tool_tokens_are_context():
    """Masked tokens carry no log-probability and no head, whatever the caller put there."""
    record = turn(
        [1],
        [2, 50, 51, 3],
        [-0.5, -7, -7, -0.25],
        output_mask=[1, 0, 0, 1],
        output_versions=[4, 0, 0, 4],
        output_sampler_logprobs=[{2: -0.5}, {9: -1.0}, {9: -1.0}, {3: -0.25}],
    )
    (sample,) = build_sequences([record])
    assert sample.trained.tolist() == [False, True, False, False, True]
    assert sample.logprobs.tolist() == [0, -0.5, 0, 0, -0.25]
    assert sample.head_ids.tolist() == [[2], [3]]
    assert sample.oldest_version == 4, "a token that is not trained has no say in the staleness"


def test_masked_output_needs_no_log_probabilities():
    (sample,) = build_sequences(
        [turn([1], [2]), TurnRecord([1, 2], [50, 51], output_mask=[0, 0]), turn([1, 2, 50, 51], [3])]
    )
    assert sample.trained.tolist() == [False, True, False, False, True]


def test_heads_are_padded_to_the_widest_and_keep_the_order():
    record = turn([1], [2, 3], output_sampler_logprobs=[{2: -0.1, 9: -2.0, 8: -3.0}, {3: -0.2}])
    (sample,) = build_sequences([record])
    assert sample.head_ids.tolist() == [[2, 9, 8], [3, EMPTY, EMPTY]]
    assert rounded(sample.head_logprobs[0]) == [-0.1, -2, -3]
    assert rounded(sample.head_logprobs[1]) == [-0.2, 0, 0]


@pytest.mark.parametrize("turns", [[], [turn([1, 2], [])], [TurnRecord([1], [2, 3], [0, 0], output_mask=[0, 0])]])
def test_nothing_trained_is_no_sequence(turns):
    assert build_sequences(turns) == []


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (TurnRecord([1], [2, 3], [-1.0]), "output_log_probs has 1 entries for 2"),
        (TurnRecord([1], [2, 3], []), "output_log_probs has 0 entries for 2"),
        (TurnRecord([1], [2], [-1.0], output_mask=[1, 1]), "output_mask has 2 entries for 1"),
        (TurnRecord([1], [2], [-1.0], output_sampler_logprobs=[{}, {}]), "output_sampler_logprobs has 2"),
        (TurnRecord([1], [2], [-1.0], output_versions=[1, 1]), "versions has 3 entries for 2 tokens"),
        (TurnRecord([1], [2], [float("nan")]), "no finite log-probability"),
        (TurnRecord([], [2], [-1.0]), "first token"),
    ],
)
def test_lists_that_do_not_match_are_refused(record, named):
    with pytest.raises(ValueError, match=named):
        build_sequences([record])


def test_costs_count_a_shared_prompt_once():
    samples = [build_sequences([turn([1, 2, 3, 4], answer)])[0] for answer in ([7, 8], [5, 6], [5, 9])]
    total = assign_costs(samples)
    assert total == sum(s.cost for s in samples) == pack(samples).num_tokens
    # in sorted order: 1 2 3 4 5 6 is new, 1 2 3 4 | 5 9 and 1 2 3 | 4 7 8
    assert [s.cost for s in samples] == [3, 6, 2]
