"""How fast a step was."""

from typing import Any

import torch

from slipstream.learner.plan import StepPlan
from slipstream.metrics.flops import FlopCount, peak_flops
from slipstream.rollout.types import Observation


def synchronize(device: torch.device) -> None:
    """Let the device finish, so that a time is that of the work and not of its launch."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class SpeedMeter:
    """Rates of steps over all ranks.

    Args:
        model_config: of the trained model.
        trains_weights: False where only adapters are trained.
        peak: FLOP/s of one training device at the training precision; None where it is not known.
        ranks: training devices.
    """

    def __init__(self, model_config: Any, trains_weights: bool, peak: float | None, ranks: int) -> None:
        self._flops = FlopCount.of(model_config, trains_weights)
        self._peak = None if peak is None else peak * ranks

    def observe(self, plan: StepPlan, passes_s: float, step_s: float) -> list[Observation]:
        """`perf/*_tokens_per_s` and, where they are known, `perf/*_mfu` of a step.

        `passes_s`: seconds of its forward and backward passes; `step_s`: of the whole step.
        """
        forwarded, trained = plan.num_forwarded, plan.num_trained
        found: list[Observation] = [
            ("perf/fwd_bwd_forwarded_tokens_per_s", forwarded / passes_s, passes_s),
            ("perf/wall_clock_forwarded_tokens_per_s", forwarded / step_s, step_s),
            ("perf/wall_clock_trained_tokens_per_s", trained / step_s, step_s),
        ]
        if self._flops is not None and self._peak is not None:
            share = self._flops.step(forwarded, trained, plan.attention_pairs) / self._peak
            found += [
                ("perf/fwd_bwd_mfu", share / passes_s, passes_s),
                ("perf/wall_clock_mfu", share / step_s, step_s),
            ]
        return found


def device_peak(args: Any, model_dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of this rank's device at the precision of the products; None on CPU and where it is not known."""
    if args.device.type != "cuda":
        return None
    mixed = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    return peak_flops(torch.cuda.get_device_name(args.device), mixed or str(model_dtype).removeprefix("torch."))
