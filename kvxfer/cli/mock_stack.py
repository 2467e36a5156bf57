"""Engines without a model and a router in front of them, as `kvxfer serve --mock` starts them.

Decides which flags the mock engines and their router get for a split into prefill and decode. It must never know what
an engine answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any, NoReturn

from kvxfer.cli.flags import add_flags, options_from, to_flags
from kvxfer.cli.stack import READY, StackOptions, wait_workers
from kvxfer.cli.supervise import Child, ChildSpec, Supervisor
from kvxfer.errors import ConfigError

SET_HERE = ("host", "ports", "count", "roles", "insecure")
"""Options of the mock engine that follow from the split."""
DIALECTS = {"any": "kvxfer", "kvxfer": "kvxfer", "vllm": "vllm", "sglang": "sglang"}
"""How the router asks engines of each kind."""
NAMES = ("mock-engine", "router")


@dataclasses.dataclass(frozen=True)
class MockFlags:
    """Flags of ``kvxfer mock-engine`` that were checked."""

    words: tuple[str, ...]
    dialect: str
    model: str
    """The first name of the model that the engines serve."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--mock: {message}")


def read_flags(text: str) -> MockFlags:
    """The flags in ``text``. Raises ConfigError for one that ``kvxfer mock-engine`` does not have, that it would
    refuse, or that the split decides."""
    from kvxfer.mock_engine.options import MockEngineOptions

    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--mock: {error}") from None
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser, MockEngineOptions)
    defaults = parser.parse_args([])
    values = parser.parse_args(words)
    for name in SET_HERE:
        if getattr(values, name) != getattr(defaults, name):
            raise ConfigError(f"--mock: --{name} follows from --prefill and --decode")
    options = options_from(MockEngineOptions, values)
    return MockFlags(words, DIALECTS[options.kind.value], options.model[0])


async def start(
    supervisor: Supervisor, options: StackOptions, mock: MockFlags, *, router_flags: Mapping[str, Any]
) -> Child:
    """Start one process with all engines, and the router; return the router's child once it would place requests at
    every engine. Raises what :meth:`Supervisor.start` raises, and DeadlineExceededError where the router does not see
    the engines."""
    roles = ["prefill"] * options.prefill + ["decode"] * options.decode
    words = ["mock-engine", *mock.words, *to_flags({"count": len(roles), "roles": roles})]
    engines = await supervisor.start(
        ChildSpec("mock-engine", [*words, "--log-level=warning"]), timeout_s=options.timeout_s
    )
    urls: dict[str, list[str]] = {"prefill": [], "decode": []}
    wanted = {}
    for number, (role, engine) in enumerate(zip(roles, engines.ready["engines"], strict=True)):
        url = str(engine["http_url"])
        wanted[url] = f"{role}-{number if role == 'prefill' else number - options.prefill}"
        has_bootstrap = mock.dialect == "sglang" and role == "prefill"
        bootstrap_port = engine.get("bootstrap_port", engine["port"])
        urls[role].append(f"{url}?bootstrap_port={bootstrap_port}" if has_bootstrap else url)
    values = {"port": options.port, "dialect": mock.dialect, **urls, **router_flags}
    router = await supervisor.start(
        ChildSpec("router", ["router", *to_flags(values), "--log-level=warning"], ready_path=READY),
        timeout_s=options.timeout_s,
    )
    await wait_workers(router, wanted, timeout_s=30.0)
    return router
