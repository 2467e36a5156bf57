"""What the files of the repository must not be, say or forget."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import kvxfer

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis"}
TEXT = {".py", ".pyi", ".cpp", ".hpp", ".md", ".toml", ".txt", ".yaml", ".yml", ".proto", ".sh", ".json", ""}
LINES_MAX = 500
WORKPLACE = [
    re.compile("/" + "work/"),
    re.compile("/" + "root/"),
    re.compile("/opt/" + "pypi"),
    re.compile("/tmp/" + "kvx/"),
    re.compile(r"https?://[\w.-]*(pypi|artifactory|nexus|registry|mirror)[\w.-]*", re.IGNORECASE),
]
CITED = {"LICENSE"}


def files(*suffixes: str) -> list[pathlib.Path]:
    found = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if SKIPPED.intersection(parts) or any(part.endswith(("_cache", ".egg-info")) for part in parts):
            continue
        if path.is_file() and path.suffix in (suffixes or TEXT):
            found.append(path)
    return sorted(found)


def test_no_file_is_too_long_to_hold_in_the_head() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in files(".py", ".cpp", ".hpp")}
    wrong = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for path, count in lengths.items()
        if count > LINES_MAX and "_pb" not in path.parts
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_decides() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in files(".py")
        if path.is_relative_to(ROOT / "kvxfer")
        and "_pb" not in path.parts
        and not path.read_text().lstrip().startswith(('"""', 'r"""'))
        and path.read_text().strip()
    ]
    assert not wrong, "\n".join(wrong)


def test_no_workplace_facts() -> None:
    wrong = []
    for path in files():
        if path.name in CITED:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            wrong += [
                f"{path.relative_to(ROOT)}:{number}: {match.group()}" for p in WORKPLACE for match in p.finditer(line)
            ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_to_do() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)" + r"\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files(".py", ".cpp", ".hpp")
        if path != pathlib.Path(__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_forks() -> None:
    """gRPC starts its threads again in a forked child: closing descriptors for exec then aborts some of those children.

    Without ``preexec_fn`` subprocess has a child by vfork, which gRPC does not see. Tests of fork itself run it in a
    process that has no gRPC.
    """
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files(".py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Call) and any(word.arg == "preexec_fn" for word in node.keywords))
        or (isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty"))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_test_changes_where_modules_are_found() -> None:
    """Helpers are in ``tests.support``; a child process is started in ``tests.support.child.environment()``."""
    changes = re.compile(r"\bsys\.path(\.(append|insert|extend|remove)|\[[^\]]*\] *=| *\+?=)")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files(".py")
        if path.is_relative_to(ROOT / "tests")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if changes.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[(Unreleased|{re.escape(kvxfer.__version__)})\]", text, re.MULTILINE)
    allowed = {"Safety", "Features", "Internals"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= allowed


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_pages_name_what_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    from kvxfer.cli import COMMANDS

    for target in re.findall(r"(?:`|^\$ |^)make ([a-z0-9-]+)", text, re.MULTILINE):
        assert target in targets(), f"{name}: make {target}"
    for command in re.findall(r"(?:`|^\$ )kvxfer ([a-z]+)", text, re.MULTILINE):
        assert command in COMMANDS, f"{name}: kvxfer {command}"
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in link:
            assert (ROOT / link).exists(), f"{name}: {link}"


def test_readme_says_what_it_must() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    for phrase in (
        "make demo",
        "make serve",
        "make test",
        "authenticates",
        "does not encrypt",
        "libucx",
        "ucx-py",
        "LICENSE",
    ):
        assert phrase in text, phrase


def test_ci_runs_the_gates() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    for command in ("make check", "make test", "make deep", "make demo"):
        assert re.search(rf"^{command}$", text, re.MULTILINE), command
    for target in re.findall(r"^make ([a-z0-9-]+)", text, re.MULTILINE):
        assert target in targets()


def test_every_part_of_deep_and_nightly_is_a_target() -> None:
    text = (ROOT / "Makefile").read_text()
    [deep] = re.findall(r"^deep: (.+)$", text, re.MULTILINE)
    [nightly] = re.findall(r"^NIGHTLY = (.+)$", text, re.MULTILINE)
    assert {*deep.split(), *nightly.split()} <= targets()


def test_every_place_in_the_table_of_tiers_exists(pytestconfig: pytest.Config) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert conftest is not None
    assert conftest.PLACES["tests/"] in conftest.TIERS, "what the table does not name has a tier too"
    assert set(conftest.PLACES.values()) <= set(conftest.TIERS)
    assert sorted(conftest.REPEATS) == conftest.REPEATS
    for place in (*conftest.PLACES, *conftest.REPEATS):
        path, _, test = place.partition("::")
        assert (ROOT / path).exists(), place
        if test:
            name = re.escape(test.partition("[")[0])
            begin = rf"^(async def |def )?{name}"
            assert re.search(begin, (ROOT / path).read_text(), re.MULTILINE), place


@pytest.mark.nightly
def test_generated_code_is_fresh() -> None:
    command = [sys.executable, str(ROOT / "protos" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_constraints_pin_exactly_what_the_extras_bring() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1].isalnum())
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    assert "kvxfer" not in normal
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    needed = {re.split(r"[\[<>=!~; ]", text)[0] for text in wanted}
    missing = {name for name in needed if re.sub(r"[-_.]+", "-", name).lower() not in normal} - {"kvxfer"}
    assert not missing
