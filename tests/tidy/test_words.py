"""The words of the tree: none that was retired, few pronouns in place of a name, and one class for each class name.

The lists of what is left only shrink: a test fails for an entry that is no longer true.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import re
from collections.abc import Callable, Iterator

import pytest

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvxfer"
EXEMPT = (PACKAGE / "_pb", PACKAGE / "_native" / "_core.pyi")
"""Generated."""

RETIRED = {
    r"aside": "ejected",
    r"as (?:it|they) comes?": "default",
    r"books?": "counters; in the simulation: reference model",
    r"bur(?:y|ied)|graves?": "tombstone",
    r"cables?": "link",
    r"cards?": "agent metadata; of a GPU: GPU",
    r"complaints?": "rate-limited log",
    r"enrolments?": "registration",
    r"grids?": "strided range",
    r"guests?": "bearer peer",
    r"introductions?": "discovery",
    r"last words": "unacknowledged RELEASE or REVOKE; of a log: last lines",
    r"lattices?": "strided range",
    r"lends?|lent|lending": "zero-copy",
    r"life|lives": "incarnation; of time: lifetime",
    r"picks": "indices",
    r"strangers?": "unregistered peer",
    r"summed": "checksummed",
}
"""A pattern of a word that is no longer used, and what is said instead. In pages `code` is not looked at: it has the
names that the code has."""
ROOMS = (
    *("kvxfer/_native", "kvxfer/agent", "kvxfer/cli", "kvxfer/connectors", "kvxfer/coordinator", "kvxfer/engine"),
    *("kvxfer/layout", "kvxfer/openai", "kvxfer/protocol", "kvxfer/rpc", "kvxfer/serving", "kvxfer/testing"),
    *("kvxfer/router", "kvxfer/policy", "kvxfer/mock_engine", "kvxfer/forecast", "tests/router", "tests/policy"),
    *("kvxfer/transport", "kvxfer/config.py", "kvxfer/errors.py", "kvxfer/observe.py", "kvxfer/places.py"),
    *("kvxfer/trust", "tests/trust"),
    *("kvxfer/types.py", "tests/contract", "tests/faults", "tests/machines", "tests/native"),
    *("tests/agent", "tests/engine", "tests/support", "tests/benchmarks", "tests/cli", "tests/deploy", "tests/e2e"),
    *("tests/fuzz", "tests/mock_engine", "tests/serving", "tests/sglang", "tests/vllm"),
)
"""Folders and files whose code is looked at too: names, comments, docstrings, texts."""
TRAVELS = (
    *('"lives"', '"cards"', "kvxfer.lives", "kvxfer.cards", '"card"', '"Card"'),
    '"gridPos"',
    *('b"kvxfer introduction key v1"', 'b"kvxfer introduction v1', '"introductions":', '"hold_life_max_s":'),
)
"""What other processes, versions or programs read or write, old keys that are refused."""
RETIRED_LEFT: dict[str, list[str]] = {}
"""Pages that still have some of them, by pattern."""

PRONOUNS = re.compile(r"\b(?:who|whom|whoever|nobody|somebody)\b", re.IGNORECASE)
PRONOUNS_PER_1000_LINES = 0.5
PRONOUNS_LEFT = {"benchmarks": 0, "docs": 2, "kvxfer": 0, "tests": 0}
"""Where there are more than PRONOUNS_PER_1000_LINES: how many may be left."""

DOUBLES_LEFT: dict[str, set[str]] = {".py": set(), ".cpp": set()}
"""Class names that two classes of one language have."""


def pages() -> list[pathlib.Path]:
    return sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])


def sources(folder: str, *suffixes: str) -> list[pathlib.Path]:
    found = [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return sorted(path for path in found if not any(path.is_relative_to(one) for one in EXEMPT))


def prose(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """(line number, line) outside of code blocks, without `code` and the targets of links."""
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_no_retired_word(page: pathlib.Path) -> None:
    name = str(page.relative_to(ROOT))
    found = {
        word: [(number, match.group()) for number, line in prose(page) for match in compiled.finditer(line)]
        for word, compiled in ((word, re.compile(rf"\b(?:{word})\b", re.IGNORECASE)) for word in RETIRED)
    }
    left = set(RETIRED_LEFT.get(name, ()))
    wrong = [
        f"{name}:{number}: {text!r}, say {RETIRED[word]}"
        for word, places in found.items()
        if word not in left
        for number, text in places
    ]
    assert not wrong, "\n".join(wrong)
    gone = {word for word in left if not found[word]}
    assert not gone, f"no longer there, take them off RETIRED_LEFT[{name!r}]: {', '.join(sorted(gone))}"


def words_of_code(line: str) -> str:
    """``fooBar_baz`` and ``FooBar`` as their words."""
    for text in TRAVELS:
        line = line.replace(text, "")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", line)


@pytest.mark.parametrize("room", ROOMS)
def test_code_of_a_room_has_no_retired_word(room: str) -> None:
    place = ROOT / room
    compiled = {word: re.compile(rf"\b(?:{word})\b", re.IGNORECASE) for word in RETIRED}
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()!r}, say {RETIRED[word]}"
        for path in ([place] if place.is_file() else sources(room, ".py", ".cpp", ".hpp"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word, pattern in compiled.items()
        for match in pattern.finditer(words_of_code(line))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", PRONOUNS_LEFT)
def test_pronouns_are_rarer_than_their_limit(folder: str) -> None:
    paths = pages() if folder == "docs" else sources(folder, ".py", ".pyi", ".cpp", ".hpp")
    paths = [path for path in paths if path != pathlib.Path(__file__).resolve()]
    lines = [(path, line) for path in paths for line in path.read_text().splitlines()]
    found = collections.Counter(path for path, line in lines for _ in PRONOUNS.finditer(line))
    limit = max(PRONOUNS_LEFT[folder], int(PRONOUNS_PER_1000_LINES * len(lines) / 1000))
    worst = ", ".join(f"{path.relative_to(ROOT)} {count}" for path, count in found.most_common(20))
    assert found.total() <= limit, f"name the subject: {found.total()} in {folder}, at most {limit} ({worst})"


def python_classes() -> Iterator[tuple[str, str]]:
    for path in sources("kvxfer", ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name, f"{path.relative_to(ROOT)}:{node.lineno}"


def native_classes() -> Iterator[tuple[str, str]]:
    comment = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
    definition = re.compile(r"\b(?:class|struct|union|enum(?: class)?)\s+(\w+)(?:\s+final)?\s*(?::[^;{()]*)?\{")
    for path in sources("kvxfer", ".cpp", ".hpp"):
        text = comment.sub("", path.read_text())
        yield from ((match.group(1), str(path.relative_to(ROOT))) for match in definition.finditer(text))


@pytest.mark.parametrize(("language", "classes"), [(".py", python_classes), (".cpp", native_classes)])
def test_class_name_exists_once(language: str, classes: Callable[[], Iterator[tuple[str, str]]]) -> None:
    places: dict[str, list[str]] = collections.defaultdict(list)
    for name, place in classes():
        places[name].append(place)
    doubles = {name: found for name, found in places.items() if len(found) > 1}
    new = [f"{name}: {', '.join(found)}" for name, found in doubles.items() if name not in DOUBLES_LEFT[language]]
    assert not new, "\n".join(new)
    gone = DOUBLES_LEFT[language] - set(doubles)
    assert not gone, f"no longer defined twice, take them off DOUBLES_LEFT: {', '.join(sorted(gone))}"
