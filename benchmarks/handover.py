"""What the training thread of rank 0 spends between two steps: `python -m benchmarks.handover`.

In line: the step is planned, packed and pickled when it is asked for. Ready: the planning thread has done that while the
step before was trained. Either way one step of one micro-batch with a row for each of `--ranks`; the bytes are the same,
and sending them is not counted: a machine has not a thousand ranks.
"""

import argparse
import statistics
import time

import numpy as np

from benchmarks.planner import make_group
from slipstream.learner.feed import SampleFeed
from slipstream.learner.ledger import Ledger
from slipstream.learner.replay import ReplaySource
from slipstream.metrics.window import Window
from slipstream.rollout.setup import Position
from slipstream.rollout.types import GroupResult


def arrived(number: int, generations: int, prompt: int, completion: int, head: int) -> GroupResult:
    """A group as the rollout process hands it over."""
    samples = make_group(np.random.default_rng(number), number, generations, prompt, completion, head)
    for sample in samples:
        sample.cost = len(sample)
        sample.queued_at = 1.0
        sample.rewards_by_name = {"reward": (0.5, 0.1)}
    observations = [(f"rollout/number_{i}", 1.0, 1.0) for i in range(20)]
    return GroupResult(number, 0, number, number, samples, {}, 0, observations)


def feed_of(groups: list[GroupResult], ranks: int, token_budget: int) -> SampleFeed:
    return SampleFeed(
        ReplaySource(groups),
        Ledger(len(groups) + 1, Position()),
        Window(),
        ranks=ranks,
        accumulation=1,
        token_budget=token_budget,
        max_staleness=4,
        warn=print,
    )


def between_steps(feed: SampleFeed, ahead: bool) -> tuple[list[float], int, int]:
    """Seconds on the training thread for each full step but the first; most samples and bytes of a step."""
    seconds, samples, sent = [], 0, 0
    plan = feed.next_step(0, 0 if ahead else None)
    while plan is not None:
        while ahead and feed.drafting:  # the step is trained
            time.sleep(0.01)
        begun = time.perf_counter()
        feed.step_finished(plan)
        following = feed.next_step(0, 0 if ahead else None)
        seconds.append(time.perf_counter() - begun)
        samples, sent = max(samples, len(plan.samples)), max(sent, sum(len(share) for share in plan.shares[1:]))
        plan = following
    feed.close()
    return seconds[:-2] or seconds[:1], samples, sent


def main() -> None:
    parser = argparse.ArgumentParser(description="seconds of the training thread between two steps")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--token-budget", type=int, default=16_384)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=1024, help="completions have half to twice as many tokens")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--head", type=int, default=8, help="sampler log-probabilities per trained token")
    parser.add_argument("--steps", type=int, default=4, help="about so many")
    args = parser.parse_args()
    per_group = args.prompt + args.generations * args.completion * 1.25
    for ranks in args.ranks:
        count = int(ranks * args.token_budget * args.steps / per_group)
        groups = [arrived(number, args.generations, args.prompt, args.completion, args.head) for number in range(count)]
        for ahead in (False, True):
            seconds, samples, sent = between_steps(feed_of(groups, ranks, args.token_budget), ahead)
            print(
                f"{ranks} rows of {args.token_budget}, {samples} samples, {sent / 1e6:.0f} MB to send, "
                f"{'ready' if ahead else 'in line'}: {statistics.median(seconds) * 1e3:.1f} ms "
                f"(most {max(seconds) * 1e3:.1f}) of {len(seconds)} steps",
                flush=True,
            )


if __name__ == "__main__":
    main()
