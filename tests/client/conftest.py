"""One fake router per test module would share recordings; each test gets its own, which takes milliseconds."""

from collections.abc import Iterator

import pytest

from tests.client.fake_router import FakeRouter


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with FakeRouter() as running:
        yield running
