"""A poster over a transport that a test leads by the hand."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from posts_support import Setting


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    return Setting(monkeypatch)
