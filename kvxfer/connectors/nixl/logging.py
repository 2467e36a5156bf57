"""``nixl.logging``: loggers under ``nixl``, at the level of ``NIXL_LOG_LEVEL``, written to stdout as NIXL's are. What
NIXL's core would say (here the logger ``nixl.kvxfer``) goes to stderr, from WARN on where no level is set, as there.
Decides format, level and place."""

from __future__ import annotations

import logging
import os
import sys
import threading

from kvxfer.connectors.nixl.settings import with_file
from kvxfer.errors import ConfigError

__all__ = ["get_logger", "setup_logging"]

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
CORE = "nixl.kvxfer"
_lock = threading.Lock()
_is_set_up = False


class _StandardStream(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stdout`` or ``sys.stderr`` is at that moment: a test or a redirect may replace it."""

    def __init__(self, *, is_core: bool) -> None:
        logging.Handler.__init__(self)
        self._is_core = is_core
        self.addFilter(lambda record: (record.name == CORE) == is_core)

    @property
    def stream(self) -> object:
        return sys.stderr if self._is_core else sys.stdout


def setup_logging() -> None:
    """Once a process: two handlers for ``nixl``, unless the program has put one there."""
    global _is_set_up
    with _lock:
        if _is_set_up:
            return
        _is_set_up = True
        logger = logging.getLogger("nixl")
        name = _level()
        if not logger.handlers:
            form = "%(asctime)s NIXL %(levelname)-7s %(filename)s:%(lineno)d %(message)s"
            for handler in (_StandardStream(is_core=False), _StandardStream(is_core=True)):
                handler.setFormatter(logging.Formatter(form, "%Y-%m-%d %H:%M:%S"))
                logger.addHandler(handler)
            logger.propagate = False
            core = logging.getLogger(CORE)
            if core.level == logging.NOTSET and name not in _LEVELS:
                core.setLevel(logging.WARNING)
        if logger.level == logging.NOTSET or name in _LEVELS:
            logger.setLevel(_LEVELS.get(name, logging.INFO))
        if name and name not in _LEVELS:
            logger.warning("NIXL_LOG_LEVEL=%s is none of %s; INFO it is", name, ", ".join(_LEVELS))


def _level() -> str:
    """The level's name, from the environment or NIXL's file of settings. A file that cannot be read is ignored here:
    making an agent raises its error."""
    try:
        return with_file(os.environ).get("NIXL_LOG_LEVEL", "").upper()
    except ConfigError:
        return os.environ.get("NIXL_LOG_LEVEL", "").upper()


def get_logger(name: str) -> logging.Logger:
    """The logger ``nixl.NAME``, without leading underscores of the name."""
    setup_logging()
    return logging.getLogger(f"nixl.{name.lstrip('_')}")
