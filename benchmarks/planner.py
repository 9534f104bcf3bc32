"""Raw tokens per second of planning and packing: `python -m benchmarks.planner`.

The input is made before the clock starts. With `--peer-python` and `--peer-script`, another planner runs in between, one
process a round: the script is called with the prompt and completion lengths, makes the same 64 groups of 8 for two rows
of 16384 tokens, and its last word is its raw tokens per second. `--cpu-time` counts the processor time of either process
instead of the time on the wall, for a machine that others use.
"""

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream.packing.planner import MicroBatch
from slipstream.packing.sample import NOT_GENERATED, Sample
from slipstream.packing.trie import Row

GROUPS, GENERATIONS, VOCABULARY = 64, 8, 150_000
RANKS, TOKEN_BUDGET = 2, 16_384
PEER_ON_CPU_TIME = """
import runpy, sys, time
time.time = time.perf_counter = time.monotonic = time.process_time
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Outcome:
    """`raw` tokens in samples, `forwarded` tokens in rows, both over all micro-batches."""

    raw: int
    forwarded: int
    micro_batches: int
    seconds: float


def make_group(
    rng: np.random.Generator, number: int, generations: int, prompt: int, completion: int, head: int
) -> list[Sample]:
    """Samples with one prompt; completions of `completion // 2` to `completion * 2` tokens."""
    question = rng.integers(0, VOCABULARY, prompt)
    group = []
    for _ in range(generations):
        answer = rng.integers(0, VOCABULARY, rng.integers(completion // 2, completion * 2))
        ids = np.concatenate([question, answer]).astype(np.int32)
        trained = np.arange(len(ids)) >= prompt
        group.append(
            Sample(
                input_ids=ids,
                trained=trained,
                logprobs=np.zeros(len(ids), np.float32),
                versions=np.where(trained, 0, NOT_GENERATED).astype(np.int32),
                head_ids=np.zeros((len(answer), head), np.int32),
                head_logprobs=np.zeros((len(answer), head), np.float32),
                advantage=1.0,
                number=number,
            )
        )
    return group


def make_groups(prompt: int, completion: int, head: int) -> list[list[Sample]]:
    """The groups that are planned and packed."""
    rng = np.random.default_rng(0)
    return [make_group(rng, number, GENERATIONS, prompt, completion, head) for number in range(GROUPS)]


def plan_and_pack(groups: list[list[Sample]], ranks: int, token_budget: int) -> list[list[Row]]:
    """The rows of each micro-batch; what does not fit opens the next one."""
    packed: list[list[Row]] = []
    batch = MicroBatch(ranks, token_budget)

    def close() -> None:
        batch.spread()
        packed.append(batch.pack())

    for group in groups:
        rest = batch.offer(group)
        while rest:
            close()
            batch = MicroBatch(ranks, token_budget)
            rest = batch.offer(rest)
    if len(batch):
        close()
    return packed


def measure(groups: list[list[Sample]], ranks: int, token_budget: int, clock: Callable[[], float]) -> Outcome:
    begun = clock()
    packed = plan_and_pack(groups, ranks, token_budget)
    seconds = clock() - begun
    rows = [row for micro_batch in packed for row in micro_batch]
    return Outcome(sum(row.raw_tokens for row in rows), sum(row.num_tokens for row in rows), len(packed), seconds)


def peer_tokens_per_second(python: str, script: str, prompt: int, completion: int, cpu_time: bool) -> float:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, *(["-c", PEER_ON_CPU_TIME] if cpu_time else []), script, str(prompt), str(completion)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    print("  peer:", output.strip().splitlines()[-1])
    return float(output.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="raw tokens per second of planning and packing")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048], help="prompt lengths, in tokens")
    parser.add_argument("--completion", type=int, default=256, help="completions have half to twice as many tokens")
    parser.add_argument("--head", type=int, default=0, help="sampler log-probabilities per trained token")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--token-budget", type=int, default=TOKEN_BUDGET)
    parser.add_argument("--rounds", type=int, default=5, help="how often both are measured, in turn")
    parser.add_argument("--repeats", type=int, default=20, help="passes of ours in a round; the median counts")
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of time on the wall")
    parser.add_argument("--peer-python", help="Python of an environment that has the other planner")
    parser.add_argument("--peer-script", help="script that measures the other planner")
    args = parser.parse_args()
    if bool(args.peer_python) != bool(args.peer_script):
        parser.error("--peer-python and --peer-script belong together")

    clock = time.process_time if args.cpu_time else time.perf_counter
    for prompt in args.prompts:
        print(f"prompt {prompt}, completions {args.completion // 2} to {args.completion * 2 - 1}, head {args.head}")
        groups = make_groups(prompt, args.completion, args.head)
        measure(groups, args.ranks, args.token_budget, clock)
        ours, ratios = [], []
        for _ in range(args.rounds):
            passes = [measure(groups, args.ranks, args.token_budget, clock) for _ in range(args.repeats)]
            rate = passes[0].raw / statistics.median(outcome.seconds for outcome in passes)
            ours.append(rate)
            if args.peer_script:
                peer = (args.peer_python, args.peer_script, prompt, args.completion, args.cpu_time)
                ratios.append(rate / peer_tokens_per_second(*peer))
        print(
            f"  {passes[0].raw} raw tokens, {passes[0].forwarded} forwarded, "
            f"ratio {passes[0].raw / passes[0].forwarded:.2f}, {passes[0].micro_batches} micro-batches"
        )
        print(f"  raw tokens/s, min / median / max: {_three(ours, ',.0f')}")
        if ratios:
            print(f"  times the peer, min / median / max: {_three(ratios, '.1f')}")


def _three(values: list[float], form: str) -> str:
    return " / ".join(format(value, form) for value in (min(values), statistics.median(values), max(values)))


if __name__ == "__main__":
    main()
