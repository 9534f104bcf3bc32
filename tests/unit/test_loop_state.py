"""What a loop wants kept in a checkpoint."""

import numpy as np
import pytest

from slipstream.rollout.setup import checked_state


def test_it_is_what_comes_back() -> None:
    state = {"rates": {"3": 0.5, "4": None}, "seen": [1, 2], "pair": (1, "a"), "done": True}
    assert checked_state("Loop", state) == {**state, "pair": [1, "a"]}
    assert checked_state("Loop", {"rate": np.float64(0.5)}) == {"rate": 0.5}


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"rates": {3: 0.5}}, r"Loop\.state_dict\(\)\['rates'\]: the key 3 would come back as text"),
        ({"rates": [np.float32(0.5)]}, r"\['rates'\]\[0\].*float32.*cannot be kept"),
        ({"seen": {1, 2}}, r"\['seen'\].*set"),
        ([1], "Loop.state_dict returned list"),
    ],
)
def test_what_would_not_come_back_is_refused_by_its_place(state: object, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        checked_state("Loop", state)
