"""A server's load, from the text of its /metrics (Prometheus exposition format). Pure."""

import math
import re

from slipstream.rollout.concurrency import ServerLoad

KV_USAGE = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+\d+)?$")


def _number(text: str) -> float | None:
    """The finite number that a line ends with; None where the text was cut within it."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def parse_load(text: str | None) -> ServerLoad | None:
    """The load that `text` tells: the fullest engine's KV cache, the rest summed over engines; None where it does not."""
    values: dict[str, list[float]] = {}
    for line in (text or "").splitlines():
        match = _LINE.match(line.strip())
        if match and match[1] in (KV_USAGE, RUNNING, WAITING, PREEMPTIONS) and (value := _number(match[2])) is not None:
            values.setdefault(match[1], []).append(value)
    if KV_USAGE not in values:
        return None
    total = {name: int(sum(values.get(name, []))) for name in (RUNNING, WAITING, PREEMPTIONS)}
    return ServerLoad(max(values[KV_USAGE]), total[RUNNING], total[WAITING], total[PREEMPTIONS])
