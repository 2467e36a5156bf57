"""The router's settings are all in its pages."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from kvxfer.router.options import RouterOptions

pytestmark = pytest.mark.checkout

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PAGES = ("router.md", "operating.md", "discovery.md")
OTHERS = {
    *("--help", "--config", "--check-config", "--log-style", "--log-level"),
    *("--undo", "--router", "--no-accounts"),
    *("--enable-metrics", "--otlp-traces-endpoint", "--enable-trace", "--kv-transfer-config", "--model-path"),
    *("--disaggregation-mode", "--disaggregation-transfer-backend", "--disaggregation-bootstrap-port"),
}
"""Of every service; of ``kvxfer drain``, and the negation of a flag; of engines."""


def test_every_flag_of_the_router_is_in_its_pages_and_no_other_one_is() -> None:
    named = set().union(*(re.findall(r"--[a-z0-9-]*[a-z0-9]", (DOCS / page).read_text()) for page in PAGES))
    flags = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(RouterOptions)}
    assert not flags - named
    assert not named - flags - OTHERS
