"""``kvxfer demo``: one prompt through prefill and decode workers, and once more in a single process.

Decides what is asked, what is shown of it, and whether the two answers are the same, token for token. It talks to the
servers as any client would; what happened on the way it reads from the ``kvxfer`` object at the end of the stream.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import sys
import time
from typing import Any

from kvxfer import observe
from kvxfer.cli import lifetime, stack
from kvxfer.cli.console import duration, size, table
from kvxfer.cli.demo_prompt import PROMPT
from kvxfer.cli.flags import add_flags, options_from
from kvxfer.cli.serve import print_to_stderr, running_stack, say, served_model, until_stopped
from kvxfer.cli.services import add_process_arguments
from kvxfer.cli.supervise import Child, Supervisor
from kvxfer.config import check_positive
from kvxfer.errors import DeadlineExceededError, KvxferError, ProtocolError, TransportError


@dataclasses.dataclass(frozen=True)
class DemoOptions(stack.StackOptions):
    """What the demo asks, on top of how the service is laid out."""

    port: int = dataclasses.field(default=0, metadata={"help": "the router's port on 127.0.0.1; 0: any free one"})
    prompt: str = dataclasses.field(default="", metadata={"help": "what to ask; empty asks about a page of text"})
    max_tokens: int = dataclasses.field(default=64, metadata={"help": "longest answer, in tokens", "metavar": "N"})
    answer_timeout_s: float = dataclasses.field(
        default=300.0, metadata={"help": "how long one answer may take", "metavar": "SECONDS"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("max_tokens", self.max_tokens, maximum=1 << 20)
        check_positive("answer_timeout_s", self.answer_timeout_s, maximum=86400)


@dataclasses.dataclass
class Answer:
    """One streamed answer as the client saw it; times in seconds since the request was sent."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    usage: dict[str, int] = dataclasses.field(default_factory=dict)
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        steps, seconds = len(self.token_ids) - 1, self.total_s - self.ttft_s
        return steps / seconds if steps > 0 and seconds > 0 else 0.0


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    add_flags(parser, DemoOptions)
    parser.add_argument("--verbose", action="store_true", help="show what the processes log")
    add_process_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.exit_with_parent is not None:
        lifetime.die_with_parent(args.exit_with_parent)
    observe.configure_logging(level=args.log_level, style=args.log_style)
    return asyncio.run(_demo(args, options_from(DemoOptions, args)))


async def _demo(args: argparse.Namespace, options: DemoOptions) -> int:
    stop = asyncio.Event()
    lifetime.stop_on_signals(stop)
    if args.exit_with_parent is not None:
        lifetime.watch_parent(args.exit_with_parent, stop)
    tail: collections.deque[tuple[str, str]] = collections.deque(maxlen=40)

    def on_line(name: str, line: str) -> None:
        if args.verbose:
            print_to_stderr(name, line)
        tail.append((name, line))

    try:
        code = await until_stopped(stop, _both(options, on_line))
    except BaseException:
        if not args.verbose:
            for name, line in tail:
                print_to_stderr(name, line)
        raise
    if code is None:
        say("interrupted; all processes are stopped")
        return 130
    return code


async def _both(options: DemoOptions, on_line: Any) -> int:
    prompt = options.prompt or PROMPT
    async with running_stack(options, on_line=on_line, say=say) as (_, router, model):
        name = await served_model(router.http_url)
        print(f"\nPrompt ({len(prompt)} characters): {_shortened(prompt)}\n\nAnswer of {name}:\n", flush=True)
        async with asyncio.timeout(options.answer_timeout_s) as timeout:
            with _named_timeout(timeout, options.answer_timeout_s):
                answer = await ask(router.http_url, name, prompt, options.max_tokens, is_shown=True)
    print(f"\n\nWhat happened:\n\n{summary(answer)}\n", flush=True)
    print("The same prompt in a single process, without prefill worker, router or transfer:\n", flush=True)
    async with Supervisor(on_line=on_line) as supervisor:
        threads = stack.threads_each(options, options.prefill + options.decode)
        spec = stack.worker_spec("single", "both", model, threads, agent_id="single")
        single: Child = await supervisor.start(spec, timeout_s=options.timeout_s)
        async with asyncio.timeout(options.answer_timeout_s) as timeout:
            with _named_timeout(timeout, options.answer_timeout_s):
                reference = await ask(single.http_url, name, prompt, options.max_tokens, is_shown=False)
    return verdict(answer, reference)


@contextlib.contextmanager
def _named_timeout(timeout: asyncio.Timeout, seconds: float) -> Any:
    try:
        yield
    except asyncio.CancelledError:
        if timeout.expired():
            raise DeadlineExceededError(f"no answer within {seconds:g} s") from None
        raise


def _shortened(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit // 2]} ... {line[-limit // 2 :]}"


async def ask(url: str, model: str, prompt: str, max_tokens: int, *, is_shown: bool) -> Answer:
    """Stream one greedy chat answer from the server at ``url``.

    Raises KvxferError with the server's message where it answers with an error, ProtocolError where the stream
    ends early or carries no token ids, TransportError where the connection fails.
    """
    import httpx

    from kvxfer.openai.sse import EventDecoder

    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    answer, decoder, is_done = Answer(), EventDecoder(), False
    began_s = time.perf_counter()
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(10.0, read=None)) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                raise KvxferError(f"{url} answered {response.status_code}: {(await response.aread()).decode()[:400]}")
            async for chunk in response.aiter_bytes():
                for event in decoder.feed(chunk):
                    is_done = is_done or event.is_done
                    if event.data and not event.is_done:
                        _take(answer, event.json(), time.perf_counter() - began_s, is_shown)
    except httpx.HTTPError as error:
        raise TransportError(f"the connection to {url} failed: {error or type(error).__name__}") from error
    if not is_done:
        raise ProtocolError("the stream ended without [DONE]")
    if len(answer.token_ids) != answer.usage.get("completion_tokens"):
        raise ProtocolError(
            f"{len(answer.token_ids)} token ids came for {answer.usage.get('completion_tokens')} tokens"
        )
    return answer


def _take(answer: Answer, chunk: dict[str, Any], now_s: float, is_shown: bool) -> None:
    if "error" in chunk:
        raise KvxferError(f"the stream ended with an error: {chunk['error'].get('message')}")
    for choice in chunk.get("choices", ()):
        text = choice.get("delta", {}).get("content") or ""
        answer.text += text
        if is_shown and text:
            print(text, end="", file=sys.stdout, flush=True)
        if choice.get("token_ids"):
            answer.ttft_s = answer.ttft_s or now_s
            answer.total_s = now_s
            answer.token_ids += choice["token_ids"]
    answer.usage = chunk.get("usage") or answer.usage
    answer.report = chunk.get("kvxfer") or answer.report


def summary(answer: Answer) -> str:
    """The table of what happened to one answer."""
    report = answer.report
    moved, early = int(report.get("bytes_moved", 0)), int(report.get("bytes_before_prefill_end", 0))
    wire_s = float(report.get("seconds", {}).get("wire", 0.0))
    rows = [["prompt", f"{answer.usage.get('prompt_tokens', 0)} tokens"]]
    if report.get("prefill") != "remote":
        rows.append(["prefill", f"in the decode worker: {report.get('reason')}"])
        if report.get("failure"):
            rows.append(["failure", str(report["failure"])])
    else:
        if report.get("prefill_s") is not None:
            rows.append(["prefill", f"{duration(float(report['prefill_s']))} in the prefill worker"])
        share = f" ({early / moved:.0%})" if moved else ""
        rows += [
            ["moved", f"{report.get('blocks_moved')} blocks, {size(moved)}"],
            ["of these early", f"{size(early)}{share} before prefill ended"],
            ["lane", str(report.get("lane_reason") or report.get("lane"))],
        ]
        if wire_s > 0:
            rows.append(["speed", f"{moved / wire_s / 1e9:.2f} GB/s while bytes were moving ({duration(wire_s)})"])
    rows += [
        ["first token", f"{duration(answer.ttft_s)} after the request was sent"],
        ["answer", f"{len(answer.token_ids)} tokens, {answer.tokens_per_s:.1f} tokens/s"],
    ]
    return table(rows)


def verdict(answer: Answer, reference: Answer) -> int:
    """Say whether the two answers are identical; the exit code."""
    rows = [
        ["prefill + decode", f"{len(answer.token_ids)} tokens", f"first after {duration(answer.ttft_s)}"],
        ["single process", f"{len(reference.token_ids)} tokens", f"first after {duration(reference.ttft_s)}"],
    ]
    print(table(rows))
    if answer.report.get("prefill") != "remote":
        say("the prompt was not computed by a prefill worker, so nothing was compared")
        return 1
    if not answer.token_ids:
        say("the answer is empty, so nothing was compared")
        return 1
    if answer.token_ids == reference.token_ids and answer.text == reference.text:
        print(f"\nThe {len(answer.token_ids)} tokens are identical.", flush=True)
        return 0
    pairs = enumerate(zip(answer.token_ids, reference.token_ids, strict=False))
    first = next(
        (n for n, (ours, theirs) in pairs if ours != theirs), min(len(answer.token_ids), len(reference.token_ids))
    )
    print(f"\nThe answers differ from token {first} on. The single process said:\n\n{reference.text}\n", flush=True)
    say("the tokens are not identical")
    return 1
