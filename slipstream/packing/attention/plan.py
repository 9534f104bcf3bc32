"""Attention over a tree as few dense blocks: which queries meet which keys in one call. Pure.

A segment's descendants are contiguous and attend to all of it: one rectangle without a mask, and no key is copied.
Small neighbouring subtrees cost less as one masked square than as many calls; a whole small row is one such square.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from slipstream.packing.attention.layout import ROOT, TreeLayout

MAX_SQUARE = 512  # tokens of a masked square: masks stay linear in the row
MERGE = 8  # adding one query's part of a rectangle costs as much as this many query-key pairs
QUERY_CHUNK = 256  # queries per block where a sliding window needs a mask


class Block(NamedTuple):
    """Queries `[q0, q1)` against keys `[k0, k1)`: all pairs, a causal square, or those that the layout allows."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Literal["full", "causal", "masked"]


@dataclass
class Plan:
    """`diagonal` blocks cover each query once, and are computed first; `above` adds its ancestors' segments."""

    diagonal: list[Block] = field(default_factory=list)
    above: list[Block] = field(default_factory=list)


@dataclass
class _Group:
    """Neighbouring subtrees `[start, end)`, computed as one square or (a single segment) split further."""

    start: int
    end: int
    cost: float
    segment: int | None  # what to split; None: one square


def make_plan(layout: TreeLayout, window: int | None, overhead: float) -> Plan:
    """The cheapest blocks found, a pair of query and key costing 1 and a call `overhead`; window in tokens."""
    segments = layout.segments
    children: list[list[int]] = [[] for _ in segments]
    roots: list[int] = []
    for index, segment in enumerate(segments):
        (roots if segment.parent == ROOT else children[segment.parent]).append(index)
    groups: list[list[_Group]] = [[] for _ in segments]
    best: list[_Group] = [_Group(s.start, s.subtree_end, 0.0, None) for s in segments]
    for index in range(len(segments) - 1, -1, -1):
        segment = segments[index]
        groups[index] = _group([best[child] for child in children[index]], overhead)
        length, below = segment.end - segment.start, segment.subtree_end - segment.end
        split = overhead + float(length) ** 2 + sum(group.cost for group in groups[index])
        if below:
            split += overhead + below * (length + MERGE)
        square = _square(length + below, overhead)
        one = square <= split and below
        best[index] = _Group(segment.start, segment.subtree_end, min(square, split), None if one else index)

    plan = Plan()
    pending = _group([best[root] for root in roots], overhead)
    while pending:
        group = pending.pop()
        if group.segment is None:
            plan.diagonal.append(Block(group.start, group.end, group.start, group.end, "masked"))
            continue
        start, end, _, subtree_end = segments[group.segment]
        plan.diagonal.extend(_triangle(start, end, window))
        if subtree_end > end:
            plan.above.extend(_rectangle(layout, start, end, subtree_end, window))
        pending.extend(groups[group.segment])
    return plan


def _square(size: int, overhead: float) -> float:
    return overhead + float(size) ** 2 if size <= MAX_SQUARE else float("inf")


def _group(parts: list[_Group], overhead: float) -> list[_Group]:
    found: list[_Group] = []
    for part in parts:
        if found:
            last = found[-1]
            square = _square(part.end - last.start, overhead)
            if square <= last.cost + part.cost:
                found[-1] = _Group(last.start, part.end, square, None)
                continue
        found.append(part)
    return found


def _triangle(start: int, end: int, window: int | None) -> Iterator[Block]:
    if window is None or end - start <= window:
        yield Block(start, end, start, end, "causal")
        return
    for q0 in range(start, end, QUERY_CHUNK):
        q1 = min(q0 + QUERY_CHUNK, end)
        yield Block(q0, q1, max(start, q0 - window + 1), q1, "masked")


def _rectangle(layout: TreeLayout, start: int, end: int, subtree_end: int, window: int | None) -> Iterator[Block]:
    first = int(layout.depth[start])

    def visible(q0: int, q1: int) -> tuple[int, bool]:
        """The first key that a query of `[q0, q1)` sees, and whether all of them see it."""
        assert window is not None
        depths = layout.depth[q0:q1]
        k0 = start + max(0, int(depths.min()) - window + 1 - first)
        return k0, k0 < end and int(depths.max()) - int(layout.depth[k0]) < window

    if window is None or visible(end, subtree_end) == (start, True):
        yield Block(end, subtree_end, start, end, "full")
        return
    for q0 in range(end, subtree_end, QUERY_CHUNK):
        q1 = min(q0 + QUERY_CHUNK, subtree_end)
        k0, everyone = visible(q0, q1)
        if k0 < end:
            yield Block(q0, q1, k0, end, "full" if everyone else "masked")
