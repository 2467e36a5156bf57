"""Writes down what a program can see of NIXL's real package, in tests/connectors/nixl/surface.json.

usage: python snapshot.py PACKAGE      (nixl_cu12, in an environment that has it; the environment needs numpy only)
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import sys
import types

HERE = pathlib.Path(__file__).parent


def support() -> types.ModuleType:
    """The module beside this one, also where kvxfer is not installed."""
    for name in ("kvxfer", "kvxfer.connectors"):
        sys.modules.setdefault(name, types.ModuleType(name))
    stub = types.ModuleType("kvxfer.connectors.nixl")
    stub.nixl_agent = stub.nixl_xfer_handle = object  # type: ignore[attr-defined]
    sys.modules.setdefault("kvxfer.connectors.nixl", stub)
    spec = importlib.util.spec_from_file_location("nixl_agents", HERE / "agents.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(package: str) -> None:
    parts = [importlib.import_module(f"{package}.{name}") for name in ("_api", "_bindings", "_utils")]
    found = support().surface(*parts)
    found["package"] = f"{package} {importlib.metadata.version(package.replace('_', '-'))}"
    (HERE.parents[1] / "connectors" / "nixl" / "surface.json").write_text(
        json.dumps(found, indent=1, sort_keys=True) + "\n"
    )


if __name__ == "__main__":
    import importlib.metadata

    main(sys.argv[1])
