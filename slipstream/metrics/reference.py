"""docs/metrics.md, made from the registry: python -m slipstream.metrics.reference > docs/metrics.md"""

from slipstream.metrics.registry import SECTIONS, Metric

HEAD = """# Metrics

Made from the registry (`python -m slipstream.metrics.reference`); a test compares it with what runs log.

Metrics are logged once per window: everything since the last log, which is the last `logging_steps` steps. They go to
`metrics.jsonl` of the run's records, and to the integrations that `report_to` names. How a window is reduced follows
from the last part of a name: with the word `count` observations are **sum**med (since the last log, not since the start),
`max` and `min` keep the extreme, a **rate** is the total by the total time, anything else is the **mean** over what the
table says, over all processes. **latest** is the value at the time of the log. A window ends with each `logging_steps`th
step, and with the last step of a run; a checkpoint keeps the window that is open.

Two texts stand beside them in `metrics.jsonl`: `verdict` says which side of the pipeline holds the other up, and
`saturation` what the rewards of the groups say. A run that takes no step for a minute writes a line with what is known
without a step. Metrics marked ▪ are this project's own.
"""

CONDITIONS = {
    "tools": "Only with tools.",
    "environment": "Only with an environment.",
    "moe": "Only for a mixture of experts with `router_aux_loss_coef` ≠ 0.",
    "peak FLOPs": "Only where the device's peak and the model's FLOPs are known.",
    "score centering": "Only with `score_centering`.",
    "several turns": "Only for rollouts of several turns.",
    "/metrics": "Only where the server has `/metrics`.",
    "eval": "Only with held-out prompts.",
}


def _meaning(metric: Metric) -> str:
    parts = [metric.meaning]
    if metric.seldom:
        parts.append("Only in windows where there was one.")
    if metric.needs:
        parts.append(CONDITIONS[metric.needs])
    return " ".join(parts).replace("|", "\\|")


def _reduction(metric: Metric) -> str:
    return f"mean over {metric.over}" if metric.reduction == "mean" else metric.reduction


def reference() -> str:
    """The whole page, as Markdown."""
    lines = [HEAD]
    for section in SECTIONS:
        lines += [f"## {section.title}", "", "| metric | unit | over a window | meaning |", "| --- | --- | --- | --- |"]
        for metric in section.metrics:
            name = f"`{metric.name}`" + (" ▪" if metric.own else "")
            lines.append(f"| {name} | {metric.unit} | {_reduction(metric)} | {_meaning(metric)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(reference(), end="")
