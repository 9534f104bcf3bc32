"""The label that the server attaches to tokens: which weights of which attempt of which run produced them."""


def make_label(run_id: str, attempt: int, version: int) -> str:
    """`<run id>/a<attempt>/<version>`."""
    return f"{run_id}/a{attempt}/{version}"


def parse_label(label: str, run_id: str, attempt: int) -> int | None:
    """The policy version in `label`, or None where it is none of this attempt of this run ("default", another run)."""
    head, _, version = label.rpartition("/")
    if head == f"{run_id}/a{attempt}" and version.isdigit():
        return int(version)
    return None


def torn_label(run_id: str, attempt: int) -> str:
    """Label of a server whose weights may be a mixture; `parse_label` refuses it."""
    return f"{run_id}/a{attempt}/torn"
