"""Makes a package called ``nixl`` (or ``nixl_cu12``, ``nixl_cu13``) out of this connector. Decides which of its modules
goes by which of NIXL's names, and which of the two the package ``nixl`` says it is; must never touch ``sys.path``.

What the distributions are called and of which version they are stands in ``*.egg-info`` beside the packages.
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
"""Of the NIXL that this stands in for."""
MODULES = {"_api": api, "_bindings": bindings, "_utils": utils, "logging": logging}
VARIANTS = {"12": "nixl_cu12", "13": "nixl_cu13"}
"""By the major version of CUDA."""


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
    """The package that ``nixl._pkg`` is: by the CUDA that torch was built with, which is read from torch's file so that
    torch is not imported for it; NIXL's first choice where there is no torch, or one without CUDA."""
    text = ""
    with contextlib.suppress(ImportError, OSError, ValueError):  # ValueError: a torch that says nothing of its place
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            text = (pathlib.Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.", text, re.MULTILINE)
    return VARIANTS.get(found[1] if found else "", VARIANTS["13"])
