"""The ten slowest tests of several reports: `python -m tests.slowest FOLDER`, which holds pytest's junit files."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

COUNT = 10


def slowest(folder: Path, count: int = COUNT) -> list[tuple[float, str]]:
    """(seconds with set-up and tear-down, test), slowest first. A report that was cut short counts for nothing."""
    found = []
    for path in sorted(folder.glob("*.xml")):
        try:
            cases = list(ElementTree.parse(path).iter("testcase"))
        except ElementTree.ParseError:
            continue
        found += [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases]
    return sorted(found, reverse=True)[:count]


def main() -> int:
    print("the ten slowest tests:")
    for seconds, name in slowest(Path(sys.argv[1])):
        print(f"{seconds:8.1f} s  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
