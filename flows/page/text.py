"""Text of others (a model's output, a log, a scheduler) on a page that is rendered as markdown. Pure.

It stands in code spans and code blocks only, behind a fence that is longer than any in it: nothing in there is markup, a
link or an image, in any renderer.
"""

import re
import unicodedata

JOINERS = "\u200c\u200d"  # invisible, but parts of words and of emoji
LINE = 76  # characters of a line in a block; a page would be scrolled sideways otherwise


def visible(text: str) -> str:
    """`text` with what would move the cursor, turn the line around or break an encoding written as its code.

    Line ends and tabs stay.
    """
    text = text.replace("\r\n", "\n").expandtabs(4)
    return "".join(char if _shows(char) else ascii(char)[1:-1] for char in text)


def _shows(char: str) -> bool:
    return (
        char in JOINERS or char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    )


def cut(text: str, most: int) -> str:
    """The beginning and the end of a text that is longer than `most` characters, and how much is missing."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … ({len(text) - 2 * half} characters) … {text[-half:]}"


def code(text: object, most: int = 500) -> str:
    """`text` as a code span of one line. It may stand in a table: a bar becomes a broken one."""
    words = cut(" ".join(visible(str(text)).split()), most).replace("|", "¦")
    if not words:
        return "–"
    fence = "`" * (_longest_run(words) + 1)
    return f"{fence} {words} {fence}" if words[0] == "`" or words[-1] == "`" else f"{fence}{words}{fence}"


def block(text: str, most: int = 2000) -> str:
    """`text` as a code block."""
    shown = cut(visible(text).strip("\n"), most) or "(empty)"
    lines = [part for line in shown.split("\n") for part in _folded(line)]
    fence = "`" * max(3, _longest_run(shown) + 1)
    return "\n".join([f"{fence}text", *lines, fence])


def _folded(line: str) -> list[str]:
    """A line in parts of at most `LINE` characters, between words where there are any; nothing is left out."""
    parts = []
    while len(line) > LINE:
        at = line.rfind(" ", LINE // 2, LINE) + 1 or LINE
        parts.append(line[:at])
        line = line[at:]
    return [*parts, line]


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def table(titles: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are markdown already."""
    head = [" | ".join(titles), " | ".join("---" for _ in titles)]
    return "\n".join(f"| {line} |" for line in [*head, *(" | ".join(row) for row in rows)])
