"""``kvxfer coordinator | worker | router | tier``: one service in this process, until it is told to stop.

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
from kvxfer.cli.flags import add_flags, flag_name, given, print_json_line
from kvxfer.cli.settings import from_environment, from_file
from kvxfer.errors import ConfigError
from kvxfer.serving.threads import end_where_abandoned


@dataclasses.dataclass(frozen=True)
class Service:
    """Where a service's options class and serve function live, as ``module:name``, and what runs it, as
    ``asyncio.run`` does."""

    options: str
    serve: str
    run: str = "asyncio:run"
    is_forced_by_sigterm: bool = False
    member: str = ""
    """What serves as one of several processes that a parent of the same command started."""
    check: str = ""
    """What raises ConfigError for options that a start would refuse, beyond those that the options class refuses."""


SERVICES = {
    "coordinator": Service("kvxfer.coordinator.options:CoordinatorOptions", "kvxfer.coordinator.server:serve"),
    "tier": Service(
        "kvxfer.connectors.tier.service_options:TierServiceOptions", "kvxfer.connectors.tier.service:serve"
    ),
    "worker": Service("kvxfer.engine.options:WorkerOptions", "kvxfer.engine.worker:serve"),
    "router": Service(
        "kvxfer.router.options:RouterOptions",
        "kvxfer.router.run:serve",
        "kvxfer.serving.loop:run",
        is_forced_by_sigterm=True,
        member="kvxfer.router.group.member:serve_member",
        check="kvxfer.router.server:check",
    ),
}


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def options_class(command: str) -> type[Any]:
    """The options dataclass of a service command."""
    return _named(SERVICES[command].options)  # type: ignore[no-any-return]


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    add_flags(parser, options_class(command), only_given=True)
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--config", default="", metavar="FILE", help="YAML file with options; flags and KVXFER_ variables win over it"
    )
    group.add_argument(
        "--check-config", action="store_true", help="check the options, print them as they would be used, and end"
    )
    if SERVICES[command].member:
        parser.add_argument("--member", default="", help=argparse.SUPPRESS)
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
    if SERVICES[args.command].member and args.member:
        _named(SERVICES[args.command].run)(_serve_member(args))
        return 0
    options = settled(args)
    if args.check_config:
        if SERVICES[args.command].check:
            _named(SERVICES[args.command].check)(options)
        print_json_line({name: _plain(value) for name, value in dataclasses.asdict(options).items()})
        return 0
    _named(SERVICES[args.command].run)(_serve(args, options))
    return 0


def settled(args: argparse.Namespace) -> Any:
    """The options of a service: its flags, over the environment, over its file. Raises ConfigError."""
    kind = options_class(args.command)
    values = from_file(kind, args.config) if args.config else {}
    values |= from_environment(kind, args.command)
    values |= given(kind, args)
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.init
        and field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{', '.join(map(flag_name, missing))} must be given")
    return kind(**values)


async def _serve(args: argparse.Namespace, options: Any) -> None:
    stop = asyncio.Event()
    lifetime.stop_on_signals(stop, is_forced_by_sigterm=SERVICES[args.command].is_forced_by_sigterm)
    if args.exit_with_parent is not None:
        lifetime.watch_parent(args.exit_with_parent, stop)
    serve = _named(SERVICES[args.command].serve)
    await serve(options, on_ready=print_json_line, stop=stop)
    logging.getLogger(f"kvxfer.{args.command}").info("stopped")
    end_where_abandoned()


async def _serve_member(args: argparse.Namespace) -> None:
    """A parent sends its options, and says when to stop. A supervisor may signal all processes at once beside that, so
    only a second signal forces."""
    stop, signalled = asyncio.Event(), asyncio.Event()
    lifetime.stop_on_signals(signalled, is_forced_by_sigterm=SERVICES[args.command].is_forced_by_sigterm)
    if args.exit_with_parent is not None:
        lifetime.watch_parent(args.exit_with_parent, stop)

    async def pass_on() -> None:
        await signalled.wait()
        stop.set()

    passing = asyncio.create_task(pass_on())
    try:
        await _named(SERVICES[args.command].member)(args.member, stop=stop)
    finally:
        passing.cancel()


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)
