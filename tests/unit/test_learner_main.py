"""What a rank of the learner makes of the configuration."""

import pytest

from slipstream.learner.main import on_gpu


def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error() -> None:
    assert on_gpu(2, available=True)
    assert not on_gpu(0, available=True)
    assert not on_gpu(0, available=False)
    with pytest.raises(RuntimeError, match=r"learner.gpus = 2, but torch sees no GPU.*learner.gpus = 0"):
        on_gpu(2, available=False)
