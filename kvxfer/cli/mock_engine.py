"""``kvxfer mock-engine``: engines without a model, in this process, until they are told to stop.

Decides how the process starts and ends, and which event loop it has; what the options mean is the mock engine's own.
"""

from __future__ import annotations

import argparse
import asyncio
import logging

from kvxfer import observe, open_files
from kvxfer.cli import lifetime
from kvxfer.cli.flags import add_flags, options_from, print_json_line
from kvxfer.cli.services import add_process_arguments
from kvxfer.mock_engine.options import MockEngineOptions


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    add_flags(parser, MockEngineOptions)
    add_process_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from kvxfer.mock_engine import server

    if args.exit_with_parent is not None:
        lifetime.die_with_parent(args.exit_with_parent)
    observe.configure_logging(level=args.log_level, style=args.log_style)
    open_files.raise_limit()
    options = options_from(MockEngineOptions, args)
    with asyncio.Runner(loop_factory=server.new_event_loop) as runner:
        runner.run(_serve(args, options))
    return 0


async def _serve(args: argparse.Namespace, options: MockEngineOptions) -> None:
    from kvxfer.mock_engine import server

    stop = asyncio.Event()
    lifetime.stop_on_signals(stop)
    if args.exit_with_parent is not None:
        lifetime.watch_parent(args.exit_with_parent, stop)
    await server.serve(options, on_ready=print_json_line, stop=stop)
    logging.getLogger("kvxfer.mock_engine").info("stopped")
