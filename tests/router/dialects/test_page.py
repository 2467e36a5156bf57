"""docs/dialects.md: its example is a dialect that works, and its tables name what there is."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

from kvxfer.router.dialects import DIALECTS, HandoverError
from kvxfer.router.dialects.base import PairDialect
from tests.support.router_bodies import CHAT, PAIR, inbound, sent

pytestmark = pytest.mark.checkout

PAGE = (pathlib.Path(__file__).resolve().parents[3] / "docs" / "dialects.md").read_text()
MEMBERS = [name for name in (*PairDialect.__annotations__, *vars(PairDialect)) if not name.startswith("_")]


def test_the_example_is_a_dialect() -> None:
    names: dict[str, Any] = {"__name__": "example"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/dialects.md", "exec"), names)
    spoken = names["LockerDialect"]()
    assert all(hasattr(spoken, name) for name in MEMBERS)
    with pytest.raises(HandoverError):
        spoken.handover(b'{"choices": []}')
    assert sent(spoken.prefill_leg(inbound(CHAT), PAIR))["max_tokens"] == 1


def test_every_dialect_and_every_member_of_the_seam_is_named() -> None:
    for name in [*DIALECTS, *MEMBERS]:
        assert f"`{name}`" in PAGE or f"`{name}(" in PAGE, name
