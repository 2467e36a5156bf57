"""The Dockerfile, read: an image of the service and one of each engine, all of which run as nobody special. Nothing is
built here.
"""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import tomllib
from typing import Any

import pytest

from tests.support.dockerfile import arguments, stages

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAGES = stages()
TARGETS = ("vllm", "sglang", "service")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENTRYPOINTS = {
    "service": ["kvxfer"],
    "vllm": ["vllm", "serve"],
    "sglang": ["python3", "-m", "sglang.launch_server"],
}
CHECKED = {"vllm": r"^VLLM_VERSION = (\S+)$", "sglang": r"^SGLANG_VERSION = (\S+)$"}
"""The versions with which the tests run, in the Makefile."""


def test_the_service_is_what_is_built_without_a_target() -> None:
    assert list(STAGES)[-1] == "service"
    assert set(TARGETS) <= set(STAGES)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_its_command_as_nobody_special(target: str) -> None:
    stage = STAGES[target]
    assert [json.loads(words) for words in stage.all("ENTRYPOINT")] == [ENTRYPOINTS[target]]
    assert stage.all("USER") == ["kvxfer"]
    assert re.search(r"useradd --uid 10001 .*\bkvxfer\b", " ".join(stage.all("RUN")))
    assert "kvxfer" in PROJECT["scripts"]


@pytest.mark.parametrize("target", TARGETS)
def test_directories_of_an_image_are_its_users(target: str) -> None:
    stage = STAGES[target]
    made = next(text for text in stage.all("RUN") if "install --directory" in text)
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        assert stage.variables()[name] in shlex.split(made)
    assert stage.all("VOLUME") == [f'["{stage.variables()["XDG_CACHE_HOME"]}"]']
    assert stage.all("WORKDIR")[-1] in shlex.split(made)


def test_the_service_has_extras_that_exist() -> None:
    (extras,) = re.findall(r"kvxfer-\*\.whl\)\[([\w,]+)\]", " ".join(STAGES["service"].all("RUN")))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("target", CHECKED)
def test_an_engine_is_of_the_version_that_is_tested(target: str) -> None:
    (version,) = re.findall(CHECKED[target], (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert arguments()[f"{target.upper()}_IMAGE"].endswith(f":v{version}")
    assert STAGES[target].base == STAGES[f"{target}-builder"].base == f"${{{target.upper()}_IMAGE}}"


@pytest.mark.parametrize("target", CHECKED)
def test_kvxfer_changes_no_package_of_an_engine(target: str) -> None:
    (installed,) = [text for text in STAGES[target].all("RUN") if "pip install" in text]
    listed, _, then = installed.partition("&&")
    (file,) = re.findall(r"pip list --format=freeze > (\S+)", listed)
    assert f"--constraint {file}" in then


def test_images_are_built_from_what_the_context_holds() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    assert {"pyproject.toml", "constraints.txt", "kvxfer", PROJECT["readme"], *PROJECT["license-files"]} <= set(kept)
    for stage in STAGES.values():
        words = " ".join(words for _, words in stage.instructions)
        assert set(re.findall(r"from=([\w-]+)", words)) <= set(STAGES)
        assert set(re.findall(r"\$\{(\w+)", stage.base)) <= set(arguments())
        declared = {name.partition("=")[0] for name in stage.all("ARG")}
        assert set(re.findall(r"\$\{(\w+)", words)) <= declared
