"""python -m tests.chaos --runs N --seed S [--full] [--bed DIR] [--results FILE]: N scenarios, from seed S on."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from slurm.bed import Bed
from tests.chaos import results
from tests.chaos.drive import run_scenario
from tests.chaos.full_drive import run_full_scenario
from tests.chaos.full_plan import full_plan
from tests.chaos.plan import plan
from tests.slurm.conftest import restore


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Runs with faults chosen by a seed.")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others count on")
    parser.add_argument("--full", action="store_true", help="with the real server and learner")
    parser.add_argument("--bed", type=Path, help="folder of a bed that runs; else one is made, and removed")
    parser.add_argument(
        "--results", type=Path, help="seeds in it are skipped; chaos-results.jsonl, chaos-full-results.jsonl"
    )
    parser.add_argument("--show", action="store_true", help="only print the scenarios")
    parser.add_argument("--keep", action="store_true", help="keep the files of right runs too")
    parser.add_argument("--stop-at-first", action="store_true", help="stop at the first run that is not right")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    if arguments.show and arguments.full:
        for seed in seeds:
            print(full_plan(seed))
        return 0
    if arguments.show:
        for seed in seeds:
            scenario = plan(seed)
            print(seed, scenario.shape, f"{scenario.learner_nodes}x{scenario.ranks}", scenario.names, scenario.plan)
        return 0
    arguments.results = arguments.results or Path(f"chaos-{'full-' if arguments.full else ''}results.jsonl")
    known = results.done(arguments.results)
    todo = [seed for seed in seeds if seed not in known]
    made = None
    try:
        if todo:
            own = tempfile.mkdtemp(prefix="slipstream-chaos-") if arguments.bed is None else ""
            made = Bed.up(Path(own) / "bed", grace_seconds=10, owner=os.getpid()) if own else None
            bed = made or Bed.attach(arguments.bed)
            (bed.shared / "chaos").mkdir(exist_ok=True)
            for seed in todo:
                restore(bed)
                if arguments.full:
                    result = run_full_scenario(bed, full_plan(seed), arguments.keep)
                else:
                    result = run_scenario(bed, plan(seed), arguments.keep)
                results.append(arguments.results, result)
                state = "right" if result.right else "WRONG: " + "; ".join(result.problems)
                print(f"seed {seed}: {result.faults} ({result.shape}, {result.seconds:.0f} s): {state}", flush=True)
                if arguments.stop_at_first and not result.right:
                    break
    finally:
        if made is not None:
            made.down()
    known = results.done(arguments.results)
    print(results.table([known[seed] for seed in seeds if seed in known]))
    return 0 if all(seed in known and known[seed].right for seed in seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
