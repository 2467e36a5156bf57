"""Versions, and importing: SGLang need not be there."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from kvxfer.connectors.sglang.versions import ADAPTERS, adapter_of
from kvxfer.errors import ConfigError


def test_every_adapter_is_there() -> None:
    for module in ADAPTERS.values():
        assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23rc1", "1.0.0", ""])
def test_an_unknown_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=f"does not know SGLang {version}; it knows 0.5.23"):
        adapter_of(version)


def test_the_plugin_is_imported_without_sglang() -> None:
    code = "import sys, kvxfer, kvxfer.connectors.sglang.plugin; assert not {'sglang', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
