"""The child of `slipstream.rewards.judge`: reads requests, writes verdicts, dies when one takes too long."""

import importlib
import json
import logging
import math
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from slipstream.rewards.judge import MEMORY_LIMIT_BYTES, TEXT_LIMIT

WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


@lru_cache(maxsize=4096)
def parse_gold(gold: str) -> Any:
    """math-verify's reading of a gold answer; empty where it is none. A bare expression is read as if in `$…$`."""
    from math_verify import parse

    plain = re.sub(r"\\text\s*\{[^}]*\}", "", gold)
    if "$" not in gold and "\\boxed" not in gold and "\\(" not in gold and "\\[" not in gold and not WORD.search(plain):
        parsed = parse(f"${gold}$", parsing_timeout=None)
        if parsed:
            return parsed
    return parse(gold, parsing_timeout=None)


def accuracy(request: dict[str, Any]) -> float | None:
    from math_verify import parse, verify

    try:
        parsed = parse_gold(request["gold"]) if request["gold"] else None
    except Exception:
        parsed = None
    if not parsed:
        return None
    try:
        given = parse(request["text"][-TEXT_LIMIT:], parsing_timeout=None)
        return float(bool(given) and verify(parsed, given, timeout_seconds=None))
    except Exception:  # sympy raises nearly anything, recursion and memory errors included
        return 0.0


def reasoning_gym(request: dict[str, Any]) -> float | None:
    from slipstream.data.reasoning import load_metadata, verifier

    score = verifier(request["task"])
    entry = {**request, "metadata": load_metadata(request["metadata"])}
    try:
        value = float(score(request["given"][-TEXT_LIMIT:], entry))
    except Exception:
        return 0.0
    return value if math.isfinite(value) else 0.0


VERIFIERS = {"accuracy": accuracy, "reasoning_gym": reasoning_gym}
PACKAGES = {"accuracy": "math_verify", "reasoning_gym": "reasoning_gym"}


def main(cpu_limit_s: float, wall_limit_s: float) -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a verifier prints must not become a reply
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    # No handlers for the timers: one could not run while C code holds the interpreter. The kernel ends this process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    out.write(b"ready\n")
    out.flush()
    for line in sys.stdin.buffer:
        name, request = json.loads(line)
        try:
            importlib.import_module(PACKAGES[name])  # before the timers: imports do not count against a verdict
            signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
            signal.setitimer(signal.ITIMER_REAL, wall_limit_s)
            reply: dict[str, Any] = {"score": VERIFIERS[name](request)}
        except Exception as error:
            reply = {"error": f"the verifier {name} failed: {type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(json.dumps(reply).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
