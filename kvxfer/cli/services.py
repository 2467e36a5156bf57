"""``kvxfer coordinator | worker | router``: one service in this process, until it is told to stop.

Decides how a service is started and ended; what its options mean is the service's own. Each service offers an options
dataclass and ``async def serve(options, *, on_ready, stop)``.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import logging
from typing import Any

from kvxfer import observe, open_files
from kvxfer.cli import lifetime
from kvxfer.cli.flags import add_flags, options_from, print_json_line


@dataclasses.dataclass(frozen=True)
class Service:
    """Where a service's options class and serve function live, as ``module:name``."""

    options: str
    serve: str


SERVICES = {
    "coordinator": Service("kvxfer.coordinator.options:CoordinatorOptions", "kvxfer.coordinator.server:serve"),
    "worker": Service("kvxfer.engine.options:WorkerOptions", "kvxfer.engine.worker:serve"),
    "router": Service("kvxfer.router.options:RouterOptions", "kvxfer.router.server:serve"),
}


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def options_class(command: str) -> type[Any]:
    """The options dataclass of a service command."""
    return _named(SERVICES[command].options)  # type: ignore[no-any-return]


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    add_flags(parser, options_class(command))
    add_process_arguments(parser)


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every long-running command."""
    group = parser.add_argument_group("process")
    group.add_argument("--log-level", choices=observe.LEVELS, default="info", help="least level to log (default: info)")
    group.add_argument("--log-style", choices=observe.STYLES, default="text", help="how log lines look (default: text)")
    group.add_argument(
        "--exit-with-parent", type=int, metavar="PID", help="stop when this process, which must be the parent, is gone"
    )


def run(args: argparse.Namespace) -> int:
    if args.exit_with_parent is not None:
        lifetime.die_with_parent(args.exit_with_parent)
    observe.configure_logging(level=args.log_level, style=args.log_style)
    open_files.raise_limit()
    options = options_from(options_class(args.command), args)
    asyncio.run(_serve(args, options))
    return 0


async def _serve(args: argparse.Namespace, options: Any) -> None:
    stop = asyncio.Event()
    lifetime.stop_on_signals(stop)
    if args.exit_with_parent is not None:
        lifetime.watch_parent(args.exit_with_parent, stop)
    serve = _named(SERVICES[args.command].serve)
    await serve(options, on_ready=print_json_line, stop=stop)
    logging.getLogger(f"kvxfer.{args.command}").info("stopped")
