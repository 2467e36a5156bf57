"""What stands for the functions of a package that has no build for this host. Importing one works; calling it says
which one was wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def functions_of(package: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``: any public name of ``package`` is a function that raises NotImplementedError."""

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"{package}.{name} has no build for a CPU; SGLang's own path was to be taken")

        missing.__name__ = name
        return missing

    return find
