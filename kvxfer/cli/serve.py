"""``kvxfer serve``: the whole service on this machine, kept up until Ctrl-C.

Decides what the operator reads while it starts, runs and ends. A lost child process is reported, not restarted: the
others keep running, and the router works without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from kvxfer import observe
from kvxfer.cli import lifetime, stack
from kvxfer.cli.console import Checklist, ProgressBar, duration
from kvxfer.cli.flags import add_flags, options_from
from kvxfer.cli.services import add_process_arguments
from kvxfer.cli.supervise import Child, Supervisor

ResultT = TypeVar("ResultT")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    add_flags(parser, stack.StackOptions)
    add_process_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.exit_with_parent is not None:
        lifetime.die_with_parent(args.exit_with_parent)
    observe.configure_logging(level=args.log_level, style=args.log_style)
    options = options_from(stack.StackOptions, args)
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


async def resolve_model(model: str) -> Path:
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
) -> AsyncIterator[tuple[Supervisor, Child, Path]]:
    """The whole service, shown while it becomes ready; yields the supervisor, the router and the model's directory."""
    stack.check_port(options.port)
    model = await resolve_model(options.model)
    print("Starting a coordinator, workers and the router, each its own process:\n", flush=True)
    checklist = Checklist(stack.names(options))

    def ready(child: Child) -> None:
        where = f"{child.address}, process {child.process.pid}"
        checklist.set(child.spec.name, f"ready after {duration(child.ready_after_s)}  ({where})")

    def lost(child: Child) -> None:
        say(f"lost {child.spec.name} (process {child.process.pid}): it {child.ending()}; the others keep running")

    async with Supervisor(on_ready=ready, on_lost=lost, on_line=on_line) as supervisor:
        router = await stack.start(supervisor, options, model)
        yield supervisor, router, model


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
    import httpx

    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
        answer = await client.get(f"{url}/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])


async def _serve(args: argparse.Namespace, options: stack.StackOptions) -> int:
    stop = asyncio.Event()
    lifetime.stop_on_signals(stop)
    if args.exit_with_parent is not None:
        lifetime.watch_parent(args.exit_with_parent, stop)

    async def stay_up() -> None:
        async with running_stack(options, on_line=print_to_stderr, say=say) as (_, router, _model):
            print(instructions(router.http_url, await served_model(router.http_url)), flush=True)
            await asyncio.Event().wait()

    await until_stopped(stop, stay_up())
    say("stopped")
    return 0
