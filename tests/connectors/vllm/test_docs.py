"""What docs/vllm.md says can be done as it says, and its tables have all that there is; no page has a command that
cannot work from a checkout.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import pytest

from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.errors import BY_CODE, StoreError

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = (ROOT / "docs" / "vllm.md").read_text()
FAMILIES = {"usage", "peer", "grant_gone"}
"""Codes of classes that only stand above others: nothing is raised with them."""
OF_BODIES = {"invalid_json", "json_too_complex"}
"""Of HTTP bodies, which the connector does not read."""
OF_TIERS = {kind.code for kind in (StoreError, *StoreError.__subclasses__())}
"""In docs/tiers.md."""


def rows(header: str) -> list[list[str]]:
    """The cells of the table under that header line."""
    after = TEXT.partition(f"\n{header}\n")[2]
    assert after, header
    table = after.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table]


def serve_commands() -> list[tuple[int, dict[str, object]]]:
    """Each `vllm serve`: its port, and its --kv-transfer-config."""
    found = re.findall(r"^vllm serve MODEL --port (\d+) --kv-transfer-config '(.*?)'$", TEXT, re.MULTILINE | re.DOTALL)
    return [(int(port), json.loads(config)) for port, config in found]


def test_the_table_of_codes_has_every_code_once() -> None:
    codes = [re.findall(r"`([a-z_]+)`", row[1]) for row in rows("| what | code | when |")]
    assert sorted({code for found in codes for code in found}) == sorted(set(BY_CODE) - FAMILIES - OF_BODIES - OF_TIERS)
    assert all(len(found) == 1 for found in codes)


def test_the_table_of_options_has_every_option_with_its_default() -> None:
    fields = {field.name: field for field in dataclasses.fields(ConnectorOptions) if field.name != "role"}
    told: dict[str, str] = {}
    for keys, default, _ in rows("| key | default | meaning |"):
        names = re.findall(r"`([a-z_]+)`", keys)
        told.update(dict.fromkeys(names, default if len(names) == 1 else ""))
    assert sorted(told) == sorted(fields)
    said = {"false": False, "true": True, "empty": "", "2^30": 1 << 30, "`off`": "off"}
    for name, default in told.items():
        wanted = fields[name].default
        if default in said:
            assert wanted == said[default], name
        elif re.fullmatch(r"[\d.]+", default):
            assert wanted == float(default), name
    assert {name for name, default in told.items() if default in said or re.fullmatch(r"[\d.]+", default)} >= {
        *(
            "discovery",
            "http_url",
            "checksum",
            "kv_lease_duration",
            "kv_lease_max_s",
            "load_deadline_s",
            "grant_wait_s",
        ),
        *("unknown_wait_s", "engine_silent_s", "room_wait_s"),
        *("overlap", "staging_bytes", "huge_pages", "idle_wait_s", "record_digests"),
    }


def test_the_engines_that_the_page_begins_with_can_be_started_and_reached() -> None:
    commands = serve_commands()
    assert [config["kv_role"] for _, config in commands] == ["kv_producer", "kv_consumer"]
    for port, config in commands:
        assert config["kv_connector"] == "KvxferConnector"
        extra = config["kv_connector_extra_config"]
        assert isinstance(extra, dict)
        options = ConnectorOptions.from_config(str(config["kv_role"]), None, extra)
        assert options.http_url == f"http://127.0.0.1:{port}"
        assert f"kvxfer router --coordinator {options.coordinator} " in TEXT
        assert f"kvxfer coordinator --port {options.coordinator.partition(':')[2]} " in TEXT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_command_that_cannot_work_from_a_checkout(page: pathlib.Path) -> None:
    text = page.read_text()
    from_an_index = re.findall(r"pip install[^`\n#]*\bkvxfer\b[^`\n#]*", text)
    assert not from_an_index, "nothing is on an index"
    ours = r"(?:-m kvxfer|protos/|benchmarks/|tests/)"
    without_environment = re.findall(rf"(?:`|^|[|&;] ?)python3? {ours}[^`\n]*", text, re.MULTILINE)
    assert not without_environment, "kvxfer's Python is .venv/bin/python"
    for script in re.findall(r"\.venv/bin/python ([\w/.-]+\.py)", text):
        assert (ROOT / script).is_file(), script
