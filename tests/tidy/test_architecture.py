"""docs/ARCHITECTURE.md: what it names exists, and it names every room and a file for each step of the two ways."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.tidy.test_cycles import NATIVE_FLOORS
from tests.tidy.test_floors import FLOORS

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
PACKAGE = ROOT / "kvxfer"
NATIVE = PACKAGE / "_native"
BASES = (ROOT, PACKAGE)
"""The page's paths begin at one of these."""
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w./*-]+/|[\w./*-]+\.(?:py|pyi|cpp|hpp|md|toml)|[\w.*-]+(?:/[\w.*-]+)+")
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
SHIMS = PACKAGE / "connectors" / "nixl" / "shims"
"""Stand-ins for packages of other names: no rooms."""


def section(heading: str) -> str:
    """The text from a heading of the page to the next one."""
    found = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"the page has no section {heading!r}"
    return found.group(1)


def named() -> set[str]:
    """The paths in `code` of the page, outside of its drawings."""
    prose = re.sub(r"^```.*?^```", "", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {text for text in CODE.findall(prose) if PATH.fullmatch(text)}


def is_there(path: str) -> bool:
    found = [place for base in BASES for place in base.glob(path.rstrip("/"))]
    return any(place.is_dir() or not path.endswith("/") for place in found)


def drawn_floors(drawing: str) -> dict[str, int]:
    """Room -> floor of a drawing's lines ``floor │ rooms │ remark``."""
    floors = {}
    for line in drawing.splitlines():
        floor, *columns = line.split("│")
        if floor.strip().isdigit():
            floors |= dict.fromkeys(columns[0].split(), int(floor))
    return floors


def drawings() -> list[str]:
    return re.findall(r"^```\n(floor.*?)^```", section("The rooms"), re.MULTILINE | re.DOTALL)


def test_every_path_of_the_page_exists() -> None:
    paths = named()
    assert len(paths) > 100, f"only {len(paths)} paths are read: the page or the pattern has changed"
    assert not (wrong := sorted(path for path in paths if not is_there(path))), ", ".join(wrong)


def test_every_link_of_the_page_leads_somewhere() -> None:
    links = [link for link in LINK.findall(PAGE.read_text()) if "://" not in link]
    assert links
    assert not (wrong := [link for link in links if not (PAGE.parent / link).exists()]), ", ".join(wrong)


def test_every_package_of_the_tree_is_named() -> None:
    packages = [path.parent for path in PACKAGE.rglob("__init__.py") if not path.is_relative_to(SHIMS)]
    rooms = {f"{package.relative_to(PACKAGE)}/" for package in packages if package != PACKAGE}
    assert not (missing := sorted(rooms - named())), f"not on the page: {', '.join(missing)}"


def test_every_native_room_is_named() -> None:
    rooms = {f"_native/{path.name}/" for path in NATIVE.iterdir() if path.is_dir() and any(path.glob("*.[ch]pp"))}
    assert rooms
    assert not (missing := sorted(rooms - named())), f"not on the page: {', '.join(missing)}"


def test_every_single_file_of_the_package_is_named() -> None:
    files = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert not (missing := sorted(files - named())), f"not on the page: {', '.join(missing)}"


def test_drawings_have_the_floors_that_imports_are_checked_by() -> None:
    rooms, native = map(drawn_floors, drawings())
    assert rooms == FLOORS
    assert native == NATIVE_FLOORS


@pytest.mark.parametrize("heading", ["One transfer's way", "One request's way"])
def test_every_step_of_a_way_names_its_files(heading: str) -> None:
    rows = [line.strip().strip("|").split("|") for line in section(heading).splitlines() if line.startswith("| ")]
    steps = [row for row in rows if row[0].strip()[:1].isdigit()]
    assert len(steps) > 8
    for row in steps:
        assert len(row) == 3, f"step {row[0].strip()} of {heading!r} has {len(row)} columns"
        files = [text for text in CODE.findall(row[2]) if PATH.fullmatch(text) and not text.endswith("/")]
        assert files, f"step {row[0].strip()} of {heading!r} names no file"
