"""What a server can do, asked before the first sample; and what a run needs of it."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.serving.control import ServerControl, ServerError

GENERATE_ROUTE = "/inference/v1/generate"
ONE_TOKEN = {"token_ids": [0], "sampling_params": {"max_tokens": 1}}
NO_REQUEST: dict[str, Any] = {}  # refused for its form, where the route exists
PROBE_LOGPROBS = 9


@dataclass(frozen=True)
class Capabilities:
    """What the server said about itself. None: it did not say.

    `max_model_len` and `kv_cache_tokens` are in tokens, `dtype` is like "float32", `transfer_backend` is the backend
    of --weight-transfer-config.
    """

    model: str
    max_model_len: int | None = None
    dtype: str | None = None
    max_logprobs: int | None = None
    logprobs_mode: str | None = None
    transfer_backend: str | None = None
    has_server_info: bool = False
    has_generate_route: bool = False
    has_dev_routes: bool = False
    sampling_mask: bool = False
    lora: bool = False
    max_lora_rank: int | None = None
    max_loras: int | None = None
    max_num_seqs: int | None = None
    version: str | None = None
    kv_cache_tokens: int | None = None

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> "Capabilities":
        """The inverse of `to_plain`; unknown keys are left out."""
        return cls(**{key: item for key, item in value.items() if key in cls.__dataclass_fields__})


def probe(control: ServerControl) -> Capabilities:
    """Ask the server; where it does not describe itself, two one-token requests decide. Raises ServerError.

    A server that a dead trainer left paused would answer no generation: it is asked for none.
    """
    models = control.models()
    if not models:
        raise ServerError("/v1/models", 200, "the server serves no model")
    base = next((model for model in models if model.get("parent") is None), models[0])
    has_dev_routes = _has(control, "GET", "/is_paused")
    paused = has_dev_routes and control.is_paused()
    facts: dict[str, Any] = {
        "model": str(base["id"]),
        "max_model_len": base.get("max_model_len"),
        "has_dev_routes": has_dev_routes,
        # a request that works: vLLM logs a traceback for one that does not, and later failures would seem to be that
        "has_generate_route": _has(control, "POST", GENERATE_ROUTE, NO_REQUEST if paused else ONE_TOKEN),
        "version": _optional(control, "/version").get("version"),
        "kv_cache_tokens": kv_cache_tokens(_metrics(control)),
    }
    info = _optional(control, "/server_info", {"config_format": "json"}).get("vllm_config")
    if isinstance(info, dict):
        facts |= describe(info)
    elif paused:
        raise ServerError(
            "/is_paused", 200, "the server is paused and does not describe itself: POST /resume to it first"
        )
    else:
        facts |= _measure(control, facts["model"])
    return Capabilities(**facts)


def describe(info: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Capabilities` in the `vllm_config` of /server_info."""
    model = info.get("model_config") or {}
    lora = info.get("lora_config")
    facts = {
        "has_server_info": True,
        "dtype": str(model["dtype"]).removeprefix("torch.") if model.get("dtype") else None,
        "max_logprobs": model.get("max_logprobs"),
        "logprobs_mode": model.get("logprobs_mode"),
        "sampling_mask": bool(model.get("return_sampling_mask")),
        "transfer_backend": (info.get("weight_transfer_config") or {}).get("backend"),
        "max_num_seqs": (info.get("scheduler_config") or {}).get("max_num_seqs"),
        "lora": lora is not None,
        "max_lora_rank": (lora or {}).get("max_lora_rank"),
        "max_loras": (lora or {}).get("max_loras"),
    }
    if model.get("max_model_len"):
        facts["max_model_len"] = model["max_model_len"]
    return facts


def kv_cache_tokens(metrics: str) -> int | None:
    """Tokens that the KV caches of all engines hold together, from the text of /metrics."""
    total = 0
    for line in metrics.splitlines():
        if not line.startswith("vllm:cache_config_info{"):
            continue
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        if labels.get("kv_cache_size_tokens", "").isdigit():
            total += int(labels["kv_cache_size_tokens"])
        elif labels.get("num_gpu_blocks", "").isdigit() and labels.get("block_size", "").isdigit():
            total += int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    return total or None


def _has(control: ServerControl, method: str, route: str, body: dict[str, Any] | None = None) -> bool:
    try:
        control.call(method, route, repeat=True, json=body)  # one token more does no harm
    except ServerError as error:
        if error.status is None or error.status == 401:
            raise
        return error.status not in (403, 404, 405)  # 403: the route is switched off (no --enable-scale-out)
    return True


def _optional(control: ServerControl, route: str, params: dict[str, str] | None = None) -> dict[str, Any]:
    try:
        value = control.call("GET", route, repeat=True, params=params).json()
    except (ServerError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _metrics(control: ServerControl) -> str:
    try:
        return control.metrics(repeat=True)
    except ServerError:
        return ""


def _measure(control: ServerControl, model: str) -> dict[str, Any]:
    """`max_logprobs` and `logprobs_mode` by their effect: a temperature of 2 halves processed gaps, not raw ones."""
    try:
        cold, hot = (_gap(control, model, temperature) for temperature in (1.0, 2.0))
    except ServerError as error:
        allowed = re.search(r"max allowed: (\d+)", error.message)
        if error.status != 400 or allowed is None:
            raise
        return {"max_logprobs": int(allowed.group(1))}
    mode = "processed_logprobs" if abs(hot - cold / 2) < abs(hot - cold) else "raw_logprobs"
    return {"max_logprobs": PROBE_LOGPROBS, "logprobs_mode": mode}


def _gap(control: ServerControl, model: str, temperature: float) -> float:
    """Nats between the likeliest and the least likely token that the server reports for the first token."""
    body = {"model": model, "prompt": "1", "max_tokens": 1, "seed": 0, "logprobs": PROBE_LOGPROBS}
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "return_tokens_as_token_ids": True}
    answer = control.call("POST", "/v1/completions", repeat=True, json=body | sampling).json()
    # the sampled token comes on top of the likeliest ones and must not decide
    values = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)[: PROBE_LOGPROBS - 1]
    return float(values[0] - values[-1])


def check(
    capabilities: Capabilities,
    *,
    max_model_len: int | None = None,
    num_sampler_logprobs: int | None = None,
    num_generations: int | None = None,
    sampling_mask: bool = False,
    lora_rank: int | None = None,
    weight_transfer: bool = True,
) -> list[str]:
    """What a run would miss on this server, each with the flag to start it with. Empty: nothing.

    Args:
        capabilities: of the server.
        max_model_len: least sequence length, in tokens.
        num_sampler_logprobs: likeliest tokens per position that samples must carry.
        num_generations: completions asked for in one request.
        sampling_mask: whether samples must carry their candidate sets. Only a preference on CPU.
        lora_rank: rank of the adapters to load, or None for none.
        weight_transfer: whether full weights are delivered.
    """
    c = capabilities
    problems = []
    if not c.has_dev_routes:
        problems.append("no routes to pause it and update its weights: start it with VLLM_SERVER_DEV_MODE=1")
    if c.logprobs_mode not in (None, "processed_logprobs"):
        problems.append(
            f"logprobs mode is {c.logprobs_mode}, so the sampling temperature is missing from its log-probabilities: "
            "start it with --logprobs-mode processed_logprobs"
        )
    if num_sampler_logprobs is not None and c.max_logprobs is not None and 0 <= c.max_logprobs <= num_sampler_logprobs:
        problems.append(
            f"it gives at most {c.max_logprobs} log-probabilities per token, {num_sampler_logprobs + 1} are needed: "
            f"start it with --max-logprobs {num_sampler_logprobs + 1}"
        )
    if max_model_len is not None and c.max_model_len is not None and c.max_model_len < max_model_len:
        problems.append(
            f"its sequence length is {c.max_model_len}, {max_model_len} is needed: "
            f"start it with --max-model-len {max_model_len}"
        )
    if num_generations is not None and c.max_num_seqs is not None and c.max_num_seqs < num_generations:
        problems.append(
            f"it decodes at most {c.max_num_seqs} requests at once, a group has {num_generations}: "
            f"start it with --max-num-seqs {num_generations} or more"
        )
    if weight_transfer and c.has_server_info and c.transfer_backend not in ("slipstream", "nccl"):
        problems.append(
            f"its weight transfer backend is {c.transfer_backend or 'not set'}: "
            """start it with --weight-transfer-config '{"backend": "slipstream"}' (or "nccl")"""
        )
    if sampling_mask and not c.sampling_mask:
        problems.append("it does not report candidate sets: start it with --return-sampling-mask --enable-scale-out")
    if lora_rank is not None and c.has_server_info and not c.lora:
        problems.append(f"it loads no adapters: start it with --enable-lora --max-lora-rank {lora_rank}")
    elif lora_rank is not None and c.max_lora_rank is not None and c.max_lora_rank < lora_rank:
        problems.append(
            f"it takes adapters up to rank {c.max_lora_rank}, {lora_rank} is needed: "
            f"start it with --max-lora-rank {lora_rank}"
        )
    return problems
