"""What the tests of the front door share."""

from collections.abc import Iterator

import pytest

from tests.front_door import Front


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """`slipstream up`, for as long as the tests of this process last: see `tests.front_door.Front`."""
    found = Front(tmp_path_factory.mktemp("front"))
    try:
        yield found.start()
    finally:
        found.close()
