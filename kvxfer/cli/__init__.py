"""The ``kvxfer`` command: runs the subcommand, and turns every failure into one sentence and an exit code.

Decides words and exit codes only: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted. What a command
does lies in the module named beside it, imported when that command is the one that runs, so that ``kvxfer doctor``
needs neither torch nor FastAPI.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import resource
import sys
from collections.abc import Sequence
from typing import Any

from kvxfer import __version__
from kvxfer.errors import KvxferError, UsageError

COMMANDS: dict[str, tuple[str, str]] = {
    "coordinator": ("services", "run the coordinator: the directory of workers"),
    "worker": ("services", "run a worker: the built-in engine as prefill, decode or both"),
    "router": ("services", "run the router: the OpenAI API in front of the workers"),
    "tier": ("services", "keep blocks in this host's memory that engines had to evict, and give them back"),
    "drain": ("drain", "have a router give one worker no new requests, and wait until none runs there"),
    "certs": ("certs", "make a development CA and certificates, and say what a certificate says"),
    "mock-engine": ("mock_engine", "run engines without a model: made-up answers over real HTTP, faults on command"),
    "load": ("load", "send a workload to a server: what it held within its limits, which split is best"),
    "serve": ("serve", "start coordinator, workers and router on this machine and keep them up"),
    "demo": ("demo", "answer one prompt over prefill and decode workers, and compare with a single process"),
    "nixl": ("nixl", "run a program that imports NIXL on kvxfer instead"),
    "doctor": ("doctor", "say which lanes this machine has, and why not the others"),
    "model": ("model", "fetch, list or remove models"),
    "version": ("", "print the version"),
}

_EXTRA_OF = {"fastapi": "router", "uvicorn": "router", "pydantic": "router"}
_EXTRA_OF |= {"httptools": "router", "yaml": "router", "msgspec": "mock", "zmq": "mock"}
_EXTRA_OF |= {"plotly": "load", "cryptography": "certs"}
_ENGINE_MODULES = ("torch", "transformers", "gguf", "accelerate", "safetensors", "jinja2", "httpx")


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of ``kvxfer``; only ``command``'s own flags are filled in (all commands are listed in the help)."""
    parser = argparse.ArgumentParser(
        prog="kvxfer",
        description="Move the KV cache of a prompt from the worker that computed it to the worker that uses it.",
        epilog="kvxfer COMMAND --help lists the flags of one command.",
    )
    parser.add_argument("--version", action="version", version=f"kvxfer {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        child = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        child.allow_abbrev = False
        if name == command and module:
            importlib.import_module(f"kvxfer.cli.{module}").add_arguments(child, name)
    return parser


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text


def _advice(error: OSError) -> str:
    """What to do about it, where the name of the error does not say."""
    if error.errno != errno.EMFILE:
        return ""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f" (ulimit -n is {soft}): raise it"


def _missing_extra(error: ImportError) -> str | None:
    module = (error.name or "").partition(".")[0]
    extra = "engine" if module in _ENGINE_MODULES else _EXTRA_OF.get(module)
    return None if extra is None else f"{module} is not installed; pip install 'kvxfer[{extra}]' brings it"


def fail(message: str, code: int) -> int:
    """Print ``kvxfer: message`` to stderr and return ``code``."""
    print(f"kvxfer: {message}", file=sys.stderr, flush=True)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Only argparse's own usage errors and ``--help`` raise SystemExit."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if not word.startswith("-")), None)
    try:
        args: Any = build_parser(command).parse_args(words)
        if args.command == "version":
            print(f"kvxfer {__version__}")
            return 0
        module = importlib.import_module(f"kvxfer.cli.{COMMANDS[args.command][0]}")
        return int(module.run(args))
    except UsageError as error:
        return fail(_sentence(error), 2)
    except KvxferError as error:
        return fail(_sentence(error), 1)
    except ImportError as error:
        hint = _missing_extra(error)
        if hint is None:
            raise
        return fail(hint, 1)
    except OSError as error:
        if error.strerror is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return fail(f"{where}{error.strerror}{_advice(error)}", 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
