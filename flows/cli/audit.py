"""What `slipstream audit` prints."""

import dataclasses
import json
import textwrap
from collections.abc import Sequence

from slipstream.metrics.audit_types import Audit

WIDTH = 110
MOST_FINDINGS = 40


def audit_text(audit: Audit) -> str:
    """The audit for a person: what is proved, the table of attempts, what is open, what is wrong."""
    count = len(audit.attempts)
    of = f" of {audit.expected}" if audit.expected is not None else ""
    lines = [
        f"{'finished' if audit.finished else 'not finished'}: {audit.settled}{of} prompts settled over "
        f"{count} attempt{'s' * (count != 1)}, {audit.redone} steps redone",
        f"  {audit.void} void ledger lines of interrupted attempts"
        + (f", {audit.repeated} prompts repeated by an iterable dataset" if audit.repeated else ""),
        "",
        *_table(audit),
    ]
    if audit.open_count:
        lines += ["", *_wrapped(f"open: {audit.open_count} prompts that later ones have overtaken: {audit.open}")]
    shown = audit.findings[:MOST_FINDINGS]
    if audit.clean:
        lines += ["", "clean: every prompt was settled exactly once, and every checkpoint agrees with the ledger"]
    else:
        lines += ["", f"{len(audit.findings)} findings:"]
        lines += [line for finding in shown for line in _wrapped(f"  {finding}")]
        if len(audit.findings) > len(shown):
            lines.append(f"  and {len(audit.findings) - len(shown)} more (--json has all)")
    return "\n".join(lines)


def audit_json(audit: Audit) -> str:
    value = dataclasses.asdict(audit) | {"clean": audit.clean, "redone": audit.redone}
    return json.dumps(value, indent=1)


def _wrapped(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False)


def _table(audit: Audit) -> Sequence[str]:
    lines = [f"{'attempt':>7}  {'from step':>9}  {'to step':>7}  {'redone':>6}  why"]
    for row in audit.attempts:
        head = f"{row.number:>7}  {row.began_from:>9}  {row.reached:>7}  {row.redone:>6}  "
        texts = textwrap.wrap(row.why, max(WIDTH - len(head), 30), break_long_words=False) or [""]
        lines += [head + texts[0], *(" " * len(head) + text for text in texts[1:])]
        for fault in row.faults:
            lines += _wrapped(" " * len(head) + f"· {fault}")
    return lines
