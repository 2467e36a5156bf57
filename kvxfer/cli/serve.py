"""``kvxfer serve``: the whole service on this machine, kept up until Ctrl-C.

Decides what the operator, or the program that started it, reads while it starts, runs and ends. A lost child process is
reported, not restarted: the others keep running, and the router works without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TextIO, TypeVar

from kvxfer import observe
from kvxfer.cli import asking, lifetime, mock_stack, placement_flags, stack
from kvxfer.cli.child_logs import ChildLogs
from kvxfer.cli.console import Checklist, ProgressBar, duration
from kvxfer.cli.flags import add_flags, options_from, print_json_line
from kvxfer.cli.services import add_process_arguments
from kvxfer.cli.supervise import Child, Supervisor
from kvxfer.errors import ConfigError
from kvxfer.types import Lane

ResultT = TypeVar("ResultT")


@dataclasses.dataclass(frozen=True)
class ServeOptions(stack.StackOptions):
    """What is served, and how it is shown, on top of how the service is laid out."""

    policy: str = dataclasses.field(
        default="",
        metadata={
            "help": "how the router chooses: 'seconds', or 'local-prefill=off min-remote-prefill-tokens=256'",
            "metavar": "'NAME=VALUE ...'",
        },
    )
    lanes: tuple[Lane, ...] = dataclasses.field(
        default=(), metadata={"help": "the workers' lanes, best first (default: all)"}
    )
    mock: str | None = dataclasses.field(
        default=None,
        metadata={"help": "engines without a model instead; flags of kvxfer mock-engine, or ''", "metavar": "'FLAGS'"},
    )
    log_dir: str = dataclasses.field(
        default="", metadata={"help": "the processes' log lines go to DIR/NAME.log instead of stderr"}
    )
    quiet: bool = dataclasses.field(default=False, metadata={"help": "leave the processes' log lines out"})
    ready_json: bool = dataclasses.field(
        default=False,
        metadata={"help": "for programs: one JSON line on stdout when all is ready, everything else on stderr"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mock is not None and self.lanes:
            raise ConfigError("lanes are of the built-in engine's workers; mock engines have none")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    add_flags(parser, ServeOptions)
    add_process_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.exit_with_parent is not None:
        lifetime.die_with_parent(args.exit_with_parent)
    observe.configure_logging(level=args.log_level, style=args.log_style)
    options = options_from(ServeOptions, args)
    return asyncio.run(_serve(args, options))


async def until_stopped(stop: asyncio.Event, work: Awaitable[ResultT]) -> ResultT | None:
    """The result of ``work``, or None where ``stop`` was set first and the work was cancelled."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        say("stopping")
        return None
    finally:
        for pending in (task, stopped):
            pending.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


async def resolve_model(model: str) -> pathlib.Path:
    """The local directory of ``model``, fetched with progress on stderr where it is not there yet."""
    from kvxfer.engine import model_store

    progress = ProgressBar(of=model)
    try:
        return await asyncio.to_thread(model_store.resolve, model, progress=progress)
    finally:
        progress.close()


@contextlib.asynccontextmanager
async def running_stack(
    options: stack.StackOptions,
    *,
    on_line: Callable[[str, str], None],
    say: Callable[[str], None],
    router_flags: dict[str, Any] | None = None,
    worker_flags: dict[str, Any] | None = None,
    stream: TextIO | None = None,
) -> AsyncIterator[tuple[Supervisor, Child, pathlib.Path]]:
    """The whole service, shown on ``stream`` (stdout) while it becomes ready; yields the supervisor, the router and the
    model's directory."""
    stack.check_port(options.port)
    model = await resolve_model(options.model)
    async with _shown(
        stack.names(options), "a coordinator, workers and the router", on_line, say, stream
    ) as supervisor:
        router = await stack.start(supervisor, options, model, router_flags=router_flags, worker_flags=worker_flags)
        yield supervisor, router, model


@contextlib.asynccontextmanager
async def _shown(
    names: list[str],
    what: str,
    on_line: Callable[[str, str], None],
    say: Callable[[str], None],
    stream: TextIO | None,
) -> AsyncIterator[Supervisor]:
    """A supervisor whose children are shown as they become ready."""
    print(f"Starting {what}, each its own process:\n", file=stream or sys.stdout, flush=True)
    checklist = Checklist(names, stream)

    def ready(child: Child) -> None:
        where = f"{child.address}, process {child.process.pid}"
        checklist.set(child.spec.name, f"ready after {duration(child.ready_after_s)}  ({where})")

    def lost(child: Child) -> None:
        say(f"lost {child.spec.name} (process {child.process.pid}): it {child.ending()}; the others keep running")

    async with Supervisor(on_ready=ready, on_lost=lost, on_line=on_line) as supervisor:
        yield supervisor


def print_to_stderr(name: str, line: str) -> None:
    print(f"[{name}] {line}", file=sys.stderr, flush=True)


def say(sentence: str) -> None:
    print(f"kvxfer: {sentence}", file=sys.stderr, flush=True)


def instructions(url: str, model: str) -> str:
    """A ``curl`` line and the three lines for the ``openai`` client that work against the router at ``url``."""
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 64, "stream": True})
    return (
        f"\nServing {model} at {url}/v1\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
        f"  from openai import OpenAI\n"
        f'  client = OpenAI(base_url="{url}/v1", api_key="unused")\n'
        f'  print(client.chat.completions.create(model="{model}", messages={json.dumps(messages)}, max_tokens=64)'
        ".choices[0].message.content)\n\n"
        "Ctrl-C stops all of it."
    )


async def served_model(url: str) -> str:
    """The id of the first model that the server at ``url`` lists."""
    answer = await asking.get_object(url, "/v1/models", timeout_s=30.0)
    return str(answer["data"][0]["id"])


def ready_line(url: str, model: str, children: tuple[Child, ...]) -> dict[str, Any]:
    """What ``--ready-json`` prints: where the service is, and of which processes it consists."""
    processes = []
    for child in children:
        role = child.spec.name if child.spec.name in ("coordinator", "router", "mock-engine") else ""
        processes.append(
            {
                "name": child.spec.name,
                "role": role or child.spec.name.rpartition("-")[0],
                "pid": child.process.pid,
                "address": child.address,
                **({"engines": child.ready["engines"]} if "engines" in child.ready else {}),
            }
        )
    return {"event": "ready", "role": "serve", "url": url, "model": model, "pid": os.getpid(), "processes": processes}


@contextlib.asynccontextmanager
async def _running(
    options: ServeOptions, on_line: Callable[[str, str], None], stream: TextIO | None
) -> AsyncIterator[tuple[Supervisor, Child]]:
    router_flags = placement_flags.read(options.policy)
    if options.mock is None:
        lanes: dict[str, Any] = {"lanes": options.lanes or None}
        async with running_stack(
            options, on_line=on_line, say=say, router_flags=router_flags, worker_flags=lanes, stream=stream
        ) as (supervisor, router, _):
            yield supervisor, router
        return
    mock = mock_stack.read_flags(options.mock)
    stack.check_port(options.port)
    engines = f"{options.prefill + options.decode} engines without a model and the router"
    async with _shown(list(mock_stack.NAMES), engines, on_line, say, stream) as supervisor:
        yield supervisor, await mock_stack.start(supervisor, options, mock, router_flags=router_flags)


async def _serve(args: argparse.Namespace, options: ServeOptions) -> int:
    stop = asyncio.Event()
    lifetime.stop_on_signals(stop)
    if args.exit_with_parent is not None:
        lifetime.watch_parent(args.exit_with_parent, stop)

    async def stay_up() -> None:
        with ChildLogs(options.log_dir, is_quiet=options.quiet, otherwise=print_to_stderr) as logs:
            async with _running(options, logs, sys.stderr if options.ready_json else None) as (supervisor, router):
                model = await served_model(router.http_url)
                if options.ready_json:
                    print_json_line(ready_line(router.http_url, model, supervisor.children))
                else:
                    print(instructions(router.http_url, model), flush=True)
                await asyncio.Event().wait()

    await until_stopped(stop, stay_up())
    say("stopped")
    return 0
