"""How a list of tensors is cut into broadcasts: both sides compute the same layout from the same list."""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16  # a dtype view of a byte buffer must start at a multiple of the element size
DEFAULT_BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Tensors `start` to `start + len(offsets)` of the list, each at its byte offset in a buffer of `size` bytes."""

    start: int
    offsets: tuple[int, ...]
    size: int


def plan_buckets(sizes: Sequence[int], bucket_bytes: int) -> list[Bucket]:
    """Consecutive buckets of at most `bucket_bytes`; a tensor larger than that gets a bucket of its own.

    Args:
        sizes: bytes of each tensor, in the order of sending.
        bucket_bytes: bound of a buffer, in bytes; at least 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes = {bucket_bytes}: must be at least 1")
    buckets: list[Bucket] = []
    offsets: list[int] = []
    end = 0
    for index, size in enumerate(sizes):
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if offsets and offset + size > bucket_bytes:
            buckets.append(Bucket(index - len(offsets), tuple(offsets), end))
            offsets, offset = [], 0
        offsets.append(offset)
        end = offset + size
    if offsets:
        buckets.append(Bucket(len(sizes) - len(offsets), tuple(offsets), end))
    return buckets
