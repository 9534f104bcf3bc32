"""A run on storage that takes no writes is refused on the login machine, before anything is allocated."""

import pytest

from slurm.bed import Bed
from tests.full_stack import USER, FullRun

pytestmark = [pytest.mark.slurm, pytest.mark.integration]


def submitted(bed: Bed) -> list[str]:
    """Every job of the user that the accounting knows; a question whether SLURM would take one (`--test-only`) is none."""
    return bed.command("sacct", "-n", "-X", "-P", "-a", "-u", USER, "-o", "JobID").split()


def test_a_run_on_read_only_storage_is_refused_by_name(bed: Bed) -> None:
    root = bed.readonly / "runs"
    run = FullRun(bed, "read-only", prompts=8)
    run.config.write_text(run.config.read_text().replace(str(run.folder / "runs"), str(root)))
    try:
        before = submitted(bed)
        code = run.wait(run.train(), 300)
        words = run.words()
        assert code == 2, words
        assert "storage.root" in words
        assert str(root) in words
        assert submitted(bed) == before, "a job was submitted"
        assert not root.exists()
        assert run.left() == []
        assert bed.processes(USER) == []
    finally:
        run.close()
