"""Models that the engine's tests share: tiny, random, made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.engine.model import LoadedModel
from kvxfer.engine.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Path) -> LoadedModel:
    return LoadedModel.load(tiny_path)
