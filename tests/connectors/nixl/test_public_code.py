"""What public programs take from NIXL's package is there under ``kvxfer nixl``, and in NIXL's own wheel.

``public_code.json`` says which program takes what, and where it was read: a name is ``MODULE:NAME.ATTRIBUTE``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from kvxfer.connectors.nixl.shim import NIXL_VERSION

HERE = pathlib.Path(__file__).parent
CODE: list[dict[str, Any]] = json.loads((HERE / "public_code.json").read_text())
NAMES = sorted({name for entry in CODE for name in entry["names"]})
WHEEL = "nixl_cu12"

RESOLVE = """
import functools, importlib, importlib.metadata, importlib.util, json, sys
names, specs, distributions = json.load(sys.stdin)
for name in names:
    module, _, path = name.partition(":")
    try:
        functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as error:
        print(name, type(error).__name__, error)
for module in specs:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        print(module, spec)
for name in distributions:
    if importlib.metadata.version(name) != sys.argv[1] or importlib.metadata.distribution(name).version != sys.argv[1]:
        print(name, importlib.metadata.version(name))
"""


def under_the_drop_in(program: str, *words: str, given: str = "", **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "nixl", "--", sys.executable, "-c", program, *words],
        input=given, capture_output=True, text=True, timeout=120, env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_list_names_its_sources() -> None:
    for entry in CODE:
        assert entry["repository"].count("/") == 1, entry
        assert entry["file"], entry
        assert len(entry["commit"]) == 40, entry
        assert len(entry["names"]) == len(set(entry["names"])), entry
    assert {"LMCache/LMCache", "sgl-project/sglang", "ModelTC/lightllm", "ray-project/ray", "vllm-project/vllm"} <= {
        entry["repository"] for entry in CODE
    }


def test_every_name_is_there_under_the_drop_in() -> None:
    specs = sorted({"nixl", "nixl._api", "nixl_cu12", "nixl_cu13", *(s for e in CODE for s in e.get("specs", ()))})
    distributions = ["nixl", "nixl-cu12", "nixl_cu12", "nixl-cu13", "nixl_cu13"]
    asked = json.dumps([[*NAMES, "nixl:nixlBind.nixlAgent"], specs, distributions])
    assert under_the_drop_in(RESOLVE, NIXL_VERSION, given=asked) == ""


@pytest.mark.skipif(importlib.util.find_spec(WHEEL) is None, reason="the real NIXL is not installed here")
def test_every_name_is_in_the_wheel_too() -> None:
    """The package ``nixl`` is another wheel, which gives out what is in the modules of this one."""
    parts = [importlib.import_module(f"{WHEEL}.{part}") for part in ("_bindings", "_utils", "logging", "_api")]
    top = {name: getattr(part, name) for part in parts for name in dir(part) if name[0] != "_"}
    top["_pkg"] = importlib.import_module(WHEEL)
    for name in NAMES:
        module, _, path = name.partition(":")
        first, *rest = path.split(".")
        package, _, part = module.partition(".")
        there = top if package == "nixl" and not part else vars(importlib.import_module(module.replace(package, WHEEL)))
        found = there[first]
        for attribute in rest:
            found = getattr(found, attribute)


def test_the_package_says_which_version_and_variant_it_is(tmp_path: pathlib.Path) -> None:
    """By the CUDA that torch was built for, as NIXL's does; without torch, or without CUDA, NIXL takes 13."""
    program = textwrap.dedent("""
        import importlib.metadata as metadata, nixl, sys
        print(nixl._pkg.__name__, nixl.__version__, nixl._pkg.__version__, "torch" in sys.modules,
              nixl.nixl_agent is nixl._pkg.nixl_agent, metadata.version(nixl._pkg.__name__),
              *metadata.packages_distributions()["nixl"], sep=" ")
    """)
    for cuda, variant in (("'12.9'", "nixl_cu12"), ("'13.0'", "nixl_cu13"), ("None", "nixl_cu13")):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch/__init__.py").write_text("raise SystemExit('torch is not to be imported')")
        (tmp_path / "torch/version.py").write_text(f"from typing import Optional\ncuda: Optional[str] = {cuda}\n")
        said = under_the_drop_in(program, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1").split()
        assert said == [variant, NIXL_VERSION, NIXL_VERSION, "False", "True", NIXL_VERSION, "nixl"]


def test_version_is_that_of_the_snapshot() -> None:
    snapshot = json.loads((HERE / "surface.json").read_text())
    assert snapshot["package"] == f"nixl_cu12 {NIXL_VERSION}"


def test_bindings_of_the_api_make_an_agent_as_hicache_does() -> None:
    """SGLang's HiCache puts an agent of the bindings in the place of the API's own."""
    program = textwrap.dedent("""
        from nixl._api import nixl_agent, nixl_agent_config, nixlBind
        config = nixl_agent_config(backends=[])
        agent = nixl_agent("one", config)
        bound = nixlBind.nixlAgentConfig()
        bound.useProgThread, bound.useListenThread = config.enable_pthread, config.enable_listen
        bound.listenPort, bound.captureTelemetry = config.port, config.capture_telemetry
        bound.syncMode = getattr(nixlBind, "NIXL_THREAD_SYNC_RW", nixlBind.NIXL_THREAD_SYNC_STRICT)
        bound.pthrDelay, bound.lthrDelay = 0, 100000
        agent.agent = nixlBind.nixlAgent("one", bound)
        agent.plugin_list = agent.agent.getAvailPlugins()
        assert not {"3FS", "POSIX", "GDS_MT", "GDS", "OBJ"} & set(agent.get_plugin_list())
        agent.create_backend("UCX", {})
        buffer = bytearray(4096)
        import ctypes
        at = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        descs = agent.register_memory([(at, 4096, 0, "")], "DRAM")
        assert isinstance(descs, nixlBind.nixlRegDList) and isinstance(descs.trim(), nixlBind.nixlXferDList)
        try:
            agent.initialize_xfer("WRITE", descs.trim(), descs.trim(), "absent")
        except nixlBind.nixlNotFoundError as error:
            print("refused", error)
    """)
    assert "absent" in under_the_drop_in(program)
