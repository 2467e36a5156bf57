"""Fills a package called ``nixl``, ``nixl_cu12`` or ``nixl_cu13`` with the modules of this connector. Decides which
module has which of NIXL's names, and which CUDA variant ``nixl._pkg`` is; must never touch ``sys.path``.

``*.egg-info`` beside the packages has the names and versions of the distributions.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
import re
import sys

from kvxfer.connectors.nixl import api, bindings, logging, utils

NIXL_VERSION = "1.5.1"
"""The version of NIXL that this connector replaces."""
MODULES = {"_api": api, "_bindings": bindings, "_utils": utils, "logging": logging}
VARIANTS = {"12": "nixl_cu12", "13": "nixl_cu13"}
"""Packages of NIXL by the major version of CUDA."""


def fill(package: str) -> None:
    """Give the imported package ``package`` the modules and names that NIXL's has."""
    module = sys.modules[package]
    for name, ours in MODULES.items():
        sys.modules[f"{package}.{name}"] = ours
        setattr(module, name, ours)
    for ours in (bindings, utils, logging, api):
        for name in ours.__all__:
            setattr(module, name, getattr(ours, name))
    module.__all__ = list(api.__all__)  # type: ignore[attr-defined]
    module.__version__ = NIXL_VERSION  # type: ignore[attr-defined]
    if package not in VARIANTS.values():
        module._pkg = importlib.import_module(variant())  # type: ignore[attr-defined]


def variant() -> str:
    """The package that ``nixl._pkg`` is: that of the CUDA version that torch was built with. The version is read from
    a file of torch, so that torch is not imported. Without torch, or without CUDA in it, it is NIXL's default."""
    text = ""
    with contextlib.suppress(ImportError, OSError, ValueError):  # ValueError: a module `torch` without a spec
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            text = (pathlib.Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.", text, re.MULTILINE)
    return VARIANTS.get(found[1] if found else "", VARIANTS["13"])
