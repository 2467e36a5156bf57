"""The versions of SGLang that this backend works with; SGLang's connection classes change with each. Decides which
module adapts to a version; must never import it, nor SGLang.
"""

from __future__ import annotations

import importlib.metadata
import re

from kvxfer.errors import ConfigError

ADAPTERS = {"0.5.23": "kvxfer.connectors.sglang.adapter_0_5_23"}
"""The module that adapts to a version. Builds after it (``0.5.23.post1``) are the same version."""
_VERSION = re.compile(r"(\d+\.\d+\.\d+)(\.post\d+)?(\+.*)?")


def installed_version() -> str:
    """The version of SGLang in this environment. Raises ConfigError where there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("the transfer backend kvxfer works inside SGLang, which is not installed here") from None


def adapter_of(version: str) -> str:
    """The name of the module for that version. Raises ConfigError, naming it and those that are known."""
    found = _VERSION.fullmatch(version)
    module = ADAPTERS.get(found[1]) if found else None
    if module is None:
        raise ConfigError(
            f"the transfer backend kvxfer does not know SGLang {version}; it knows {', '.join(ADAPTERS)}: "
            "install one of these, or another version of kvxfer"
        )
    return module
