"""Makes a package called ``nixl`` (or ``nixl_cu12``, ``nixl_cu13``) out of this connector. Decides which of its modules
goes by which of NIXL's names; must never touch ``sys.path``.
"""

from __future__ import annotations

import sys

from kvxfer.connectors.nixl import api, bindings, logging, utils

MODULES = {"_api": api, "_bindings": bindings, "_utils": utils, "logging": logging}


def fill(package: str) -> None:
    """Give the imported package ``package`` the modules and names that NIXL's has."""
    module = sys.modules[package]
    for name, ours in MODULES.items():
        sys.modules[f"{package}.{name}"] = ours
        setattr(module, name, ours)
    for ours in (bindings, utils, api):
        for name in dir(ours):
            if not name.startswith("_") and (name in getattr(ours, "__all__", ()) or ours is utils):
                setattr(module, name, getattr(ours, name))
    module.__all__ = list(api.__all__)  # type: ignore[attr-defined]
