import pytest

from slipstream.serving.labels import make_label, parse_label, torn_label


def test_a_label_is_read_back() -> None:
    assert make_label("demo-1", 2, 17) == "demo-1/a2/17"
    assert parse_label("demo-1/a2/17", "demo-1", 2) == 17


@pytest.mark.parametrize(
    "label",
    [
        "default",
        "",
        "17",
        "demo-1/a1/17",
        "demo-2/a2/17",
        "demo-1/a2/",
        "demo-1/a2/-1",
        "x/demo-1/a2/3",
        "demo-1/a2/1/3",
    ],
)
def test_labels_of_anything_else_are_refused(label: str) -> None:
    assert parse_label(label, "demo-1", 2) is None


def test_a_torn_label_is_never_a_version() -> None:
    assert parse_label(torn_label("demo-1", 2), "demo-1", 2) is None
