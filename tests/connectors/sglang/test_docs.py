"""What docs/sglang.md says there is, there is: versions, options and their defaults, refusals, codes, and the commands
that it begins with.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex

import pytest

from kvxfer.connectors.sglang.limits import ONLY, WHOLE_ROWS
from kvxfer.connectors.sglang.options import SECONDS, Options, variable_of
from kvxfer.connectors.sglang.plugin import NAME
from kvxfer.connectors.sglang.versions import ADAPTERS
from kvxfer.errors import BY_CODE
from kvxfer.transport.base import SEGMENTS_MAX

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "sglang.md").read_text()
EVENTS = "| event | the prefill engine sees | the decode engine sees | within |"
REFUSALS = "| what | code | the sentence says |"


def rows(header: str) -> list[list[str]]:
    """The cells of the table under that header line."""
    after = TEXT.partition(f"\n{header}\n")[2]
    assert after, header
    table = after.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def plain(cell: str) -> str:
    return cell.strip("`")


def shown(value: object) -> str:
    """A default as the page writes it."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"


def commands(program: str) -> list[dict[str, list[str]]]:
    """Of each ``python -m program`` of the page its flags and what follows each."""
    found = []
    for line in re.findall(rf"^python -m {re.escape(program)} (.+)$", TEXT.replace("\\\n", ""), re.MULTILINE):
        flags: dict[str, list[str]] = {}
        for word in shlex.split(line):
            if word.startswith("--"):
                values = flags.setdefault(word, [])
            else:
                values.append(word)
        found.append(flags)
    return found


def test_the_table_of_versions_is_that_of_the_adapters() -> None:
    told = [
        (engine, version, plain(module))
        for engine, version, module, _ in rows("| engine | version | adapter | how it was run |")
    ]
    assert told == [("SGLang", version, module) for version, module in ADAPTERS.items()]


def test_the_table_of_options_has_every_option_with_its_default_and_unit() -> None:
    told = {
        plain(name): (plain(default), unit)
        for name, default, unit, _ in rows("| variable | default | unit | meaning |")
    }
    fields = {variable_of(field.name): field for field in dataclasses.fields(Options)}
    assert list(told) == list(fields)
    for name, (default, unit) in told.items():
        assert default == shown(fields[name].default), name
        assert (unit == "s") == (fields[name].name in SECONDS), name


def test_options_that_the_text_names_are_some() -> None:
    known = {variable_of(field.name) for field in dataclasses.fields(Options)}
    assert set(re.findall(r"KVXFER_SGLANG_[A-Z_]+", TEXT)) <= known


def test_settings_that_are_refused_stand_in_the_table_with_their_reasons() -> None:
    told = {what.split("`")[1]: (code, says) for what, code, says in rows(REFUSALS) if what.startswith("`--")}
    assert told == {flag: ("`config`", why) for flag, _, why in (why.partition(": ") for _, _, why in ONLY)}
    [states] = [what for what, _, _ in rows(REFUSALS) if "hybrid" in what]
    assert set(re.findall(r"`(\w+)`", states)) == set(WHOLE_ROWS)
    assert f"more than {SEGMENTS_MAX} buffers" in TEXT


def test_every_code_is_one() -> None:
    codes = {plain(code) for _, code, _ in rows(REFUSALS)}
    for _, prefill, decode, _ in rows(EVENTS):
        codes |= set(re.findall(r"`([a-z_]+)`", prefill + decode))
    assert codes <= set(BY_CODE)


def test_the_engines_that_the_page_begins_with_are_a_pair_behind_its_router() -> None:
    prefill, decode = commands("sglang.launch_server")
    [router] = commands("sglang_router.launch_router")
    for engine, role in ((prefill, "prefill"), (decode, "decode")):
        assert engine["--disaggregation-mode"] == [role]
        assert engine["--disaggregation-transfer-backend"] == [NAME]
        [url] = [value for value in router[f"--{role}"] if value.startswith("http")]
        assert url == f"http://{engine['--host'][0]}:{engine['--port'][0]}"
    assert (
        prefill["--disaggregation-bootstrap-port"]
        == decode["--disaggregation-bootstrap-port"]
        == router["--prefill"][1:]
    )
    assert f"curl http://{router['--host'][0]}:{router['--port'][0]}/" in TEXT


def test_links_within_the_page_lead_somewhere() -> None:
    titles = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    }
    for page, anchor in re.findall(r"\]\(([\w/.-]*)#?([\w-]*)\)", TEXT.replace("https://", "")):
        if page.endswith(".md"):
            assert (ROOT / "docs" / page).is_file(), page
        elif not page:
            assert anchor in titles, anchor
