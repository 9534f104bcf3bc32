"""How long a run is, and what a resume says about it."""

import sys

import pytest

from slipstream.learner.duration import Duration, changed_settings, nothing_left, plan_duration


@pytest.mark.parametrize(
    ("epochs", "prompts", "end"),
    [(1, 10, 10), (2, 7, 14), (0.5, 10, 5), (0.5, 7, 4), (1.5, 10, 15), (0.07, 100, 7), (0.01, 10, 1), (3.0, 1, 3)],
)
def test_epochs_end_at_a_whole_prompt(epochs: float, prompts: int, end: int) -> None:
    found = plan_duration(-1, epochs, prompts)
    assert found == Duration(sys.maxsize, end=end)
    assert found.known_steps == 0, "no made-up number of steps is shown"


@pytest.mark.parametrize("prompts", [3, None])
def test_the_number_of_steps_overrides_the_epochs(prompts: int | None) -> None:
    found = plan_duration(7, 0.5, prompts)
    assert found == Duration(7)
    assert found.known_steps == 7


def test_without_a_length_only_whole_epochs_have_an_end() -> None:
    assert plan_duration(-1, 2.0, None) == Duration(sys.maxsize, epochs=2)
    with pytest.raises(ValueError, match=r"num_train_epochs=1\.5.*iterable.*whole number, or set max_steps"):
        plan_duration(-1, 1.5, None)


@pytest.mark.parametrize("epochs", [0, -1.0, float("inf"), float("nan")])
def test_no_epochs_are_refused(epochs: float) -> None:
    with pytest.raises(ValueError, match=r"num_train_epochs=.*above 0, or set max_steps"):
        plan_duration(-1, epochs, 10)


BEFORE = {"max_steps": 100, "lr_scheduler_type": "linear", "learning_rate": 1e-3, "rewards": ["a"], "ranks": 2}


def test_what_is_as_it_was_needs_no_word() -> None:
    assert changed_settings(BEFORE, BEFORE, 50) == []
    assert changed_settings({}, BEFORE, 50) == [], "an older checkpoint kept no settings"


def test_each_change_is_said_with_what_it_means() -> None:
    now = {**BEFORE, "max_steps": 200, "learning_rate": 1e-4, "rewards": ["b"], "ranks": 1}
    notes = changed_settings(BEFORE, now, 50)
    assert [note.split(" was ")[0] for note in notes] == ["max_steps", "learning_rate", "rewards", "ranks"]
    assert "from step 51 on the learning rate is that of the linear schedule of 200 steps" in notes[0]
    assert "go on with the checkpoint's" in notes[1]
    constant = {"max_steps": 100, "lr_scheduler_type": "constant"}
    assert changed_settings(constant, {**constant, "max_steps": 200}, 50) == [
        "max_steps was 100 at the checkpoint and is 200 now"
    ]


def test_a_finished_run_says_how_to_go_on() -> None:
    assert "raise max_steps" in nothing_left(plan_duration(6, 1, 10), 6, 3, 0)
    assert nothing_left(plan_duration(7, 1, 10), 6, 30, 3) == "", "the prompts repeat"
    assert "raise num_train_epochs" in nothing_left(plan_duration(-1, 1, 10), 6, 10, 1)
    assert nothing_left(plan_duration(-1, 1, 10), 6, 9, 0) == ""
    assert "raise num_train_epochs" in nothing_left(plan_duration(-1, 2, None), 6, 0, 2)
    assert nothing_left(plan_duration(-1, 2, None), 6, 0, 1) == ""
