"""A server's load, from the text of its /metrics (Prometheus exposition format). Pure."""

import re

from slipstream.rollout.concurrency import ServerLoad

KV_USAGE = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+\d+)?$")


def parse_load(text: str | None) -> ServerLoad | None:
    """The load that `text` tells: the fullest engine's KV cache, the rest summed over engines; None where it does not."""
    values: dict[str, list[float]] = {}
    for line in (text or "").splitlines():
        match = _LINE.match(line.strip())
        if match and match[1] in (KV_USAGE, RUNNING, WAITING, PREEMPTIONS):
            values.setdefault(match[1], []).append(float(match[2]))
    if KV_USAGE not in values:
        return None
    total = {name: int(sum(values.get(name, []))) for name in (RUNNING, WAITING, PREEMPTIONS)}
    return ServerLoad(max(values[KV_USAGE]), total[RUNNING], total[WAITING], total[PREEMPTIONS])
