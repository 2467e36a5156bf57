"""Where the log lines of child processes go: to stderr, to a file for each, or nowhere."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import TextIO

from kvxfer.errors import ConfigError


class ChildLogs(contextlib.AbstractContextManager["ChildLogs"]):
    """Called with a child's name and one line. Leaving it closes the files."""

    def __init__(self, directory: str, *, is_quiet: bool, otherwise: Callable[[str, str], None]) -> None:
        """``directory`` is made where it is missing. Raises ConfigError where it cannot be."""
        self._directory = pathlib.Path(directory) if directory else None
        self._is_quiet = is_quiet
        self._otherwise = otherwise
        self._files: dict[str, TextIO] = {}
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot make the log directory {directory}: {error.strerror}") from None

    def __exit__(self, *exc_info: object) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def __call__(self, name: str, line: str) -> None:
        if self._directory is not None:
            try:
                if name not in self._files:
                    self._files[name] = (self._directory / f"{name}.log").open("a", encoding="utf-8", buffering=1)
                self._files[name].write(line + "\n")
            except OSError as error:  # the disk is full: the service goes on
                self._directory = None
                self._otherwise(name, f"its log goes here now: {error.strerror}")
                self._otherwise(name, line)
        elif not self._is_quiet:
            self._otherwise(name, line)
