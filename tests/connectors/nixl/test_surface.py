"""The connector's surface against NIXL's: a committed snapshot of its wheel, and the wheel where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
from typing import Any

import pytest

from kvxfer.connectors.nixl import api, bindings, errors, utils
from kvxfer.errors import InvalidArgumentError, KvxferError, PeerGoneError, TransferCancelledError
from tests.support.nixl.agents import surface

SNAPSHOT = json.loads(pathlib.Path(__file__).with_name("surface.json").read_text())
OURS = surface(api, bindings, utils)


def missing(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What of ``theirs`` is not there, or differs, in ``ours``."""
    wrong = [
        f"{call}: {ours['calls'].get(call)} != {wanted}"
        for call, wanted in theirs["calls"].items()
        if ours["calls"].get(call) != wanted
    ]
    wrong += [f"name {name}" for name in set(theirs["names"]) - set(ours["names"])]
    for kind, names in theirs["bound"].items():
        wrong += [f"{kind}.{name}" for name in set(names) - set(ours["bound"][kind])]
    for part in ("enums", "exceptions", "constants", "utils"):
        if isinstance(theirs[part], list):
            wrong += [f"{part}: {name}" for name in set(theirs[part]) - set(ours[part])]
        elif theirs[part] != ours[part]:
            wrong.append(f"{part}: {ours[part]} != {theirs[part]}")
    return sorted(wrong)


def test_surface_is_that_of_the_snapshot() -> None:
    assert len(SNAPSHOT["calls"]) > 40
    assert missing(SNAPSHOT, OURS) == []


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="the real NIXL is not installed here")
def test_snapshot_is_that_of_the_installed_wheel() -> None:
    parts = [importlib.import_module(f"nixl_cu12.{name}") for name in ("_api", "_bindings", "_utils")]
    theirs = surface(*parts)
    assert missing(theirs, OURS) == []
    assert {key: theirs[key] for key in theirs} == {key: SNAPSHOT[key] for key in theirs}


def test_exceptions_are_in_our_tree_too() -> None:
    for name in SNAPSHOT["exceptions"]:
        assert issubclass(getattr(bindings, name), KvxferError), name
    assert issubclass(bindings.nixlInvalidParamError, InvalidArgumentError)
    assert issubclass(bindings.nixlInvalidParamError, ValueError)
    assert issubclass(bindings.nixlRemoteDisconnectError, PeerGoneError)
    assert issubclass(bindings.nixlCancelledError, TransferCancelledError)


def test_every_error_of_ours_has_a_name_of_theirs() -> None:
    def walk(kind: type[KvxferError]) -> list[type[KvxferError]]:
        return [kind, *(found for child in kind.__subclasses__() for found in walk(child))]

    elsewhere = ("kvxfer.router", "kvxfer.workload", "kvxfer.load")  # these never come near NIXL
    ours = [kind for kind in walk(KvxferError) if not kind.__module__.startswith(elsewhere)]
    for kind in ours:
        translated = errors.translate(kind("why"))
        assert isinstance(translated, errors.nixlError)
        assert str(translated) == "why"
        if kind is not KvxferError and kind.__module__ == "kvxfer.errors":
            assert type(translated) is not errors.nixlUnknownError, kind
