import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.serving.buckets import ALIGNMENT, plan_buckets


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(1, 4000))
def test_every_tensor_lies_in_exactly_one_bucket_without_overlap(sizes: list[int], bound: int) -> None:
    buckets = plan_buckets(sizes, bound)
    covered = [bucket.start + i for bucket in buckets for i in range(len(bucket.offsets))]
    assert covered == list(range(len(sizes)))
    for bucket in buckets:
        end = 0
        for index, offset in enumerate(bucket.offsets, start=bucket.start):
            assert offset % ALIGNMENT == 0
            assert offset >= end
            end = offset + sizes[index]
        assert end == bucket.size
        assert bucket.size <= bound or len(bucket.offsets) == 1


def test_buckets_are_filled_as_far_as_the_bound_allows() -> None:
    assert [(b.start, b.offsets, b.size) for b in plan_buckets([16, 16, 16, 100], 40)] == [
        (0, (0, 16), 32),
        (2, (0,), 16),
        (3, (0,), 100),
    ]


def test_a_bound_below_one_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes = 0"):
        plan_buckets([1], 0)
