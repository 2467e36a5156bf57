"""A poster over a transport that a test leads by the hand."""

import pytest

from tests.support.posts_setting import Setting


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    return Setting(monkeypatch)
