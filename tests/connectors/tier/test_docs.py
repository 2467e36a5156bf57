"""docs/tiers.md has every code of a store, and every option."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from kvxfer.connectors.vllm.tier.options import TierOptions
from kvxfer.errors import StoreError

pytestmark = pytest.mark.checkout

PAGE = (pathlib.Path(__file__).resolve().parents[3] / "docs" / "tiers.md").read_text()


def test_the_page_has_every_code_of_a_store_and_every_option() -> None:
    codes = {kind.code for kind in StoreError.__subclasses__()}
    names = codes | {field.name for field in dataclasses.fields(TierOptions)}
    assert not sorted(name for name in names if f"`{name}`" not in PAGE)
