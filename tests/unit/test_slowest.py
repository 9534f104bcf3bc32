from pathlib import Path

from tests.slowest import slowest

REPORT = """<testsuites><testsuite><testcase classname="a" name="one" time="1.5"/>
<testcase classname="a" name="two" time="{time}"/></testsuite></testsuites>"""


def test_the_slowest_of_all_reports_come_first_and_a_broken_one_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "unit.xml").write_text(REPORT.format(time=0.2))
    (tmp_path / "slurm.xml").write_text(REPORT.format(time=7))
    (tmp_path / "cut.xml").write_text("<testsuites><testsu")
    assert slowest(tmp_path, 3) == [(7.0, "a::two"), (1.5, "a::one"), (1.5, "a::one")]
