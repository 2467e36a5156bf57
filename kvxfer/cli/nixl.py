"""``kvxfer nixl -- COMMAND``: run a program that imports NIXL on kvxfer. Decides the environment it gets; the program
then takes this process over, so that its exit code, its signals and its terminal are its own.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Mapping

import kvxfer.connectors
from kvxfer.errors import ConfigError

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes, as a shell's."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.usage = "kvxfer nixl [--host HOST] [--advertise HOST] [--insecure] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("--host", default="", help="where its agents listen (default: KVXFER_NIXL_HOST, or 127.0.0.1)")
    parser.add_argument("--advertise", default="", help="what their peers dial, where that differs")
    parser.add_argument(
        "--insecure", action="store_true", help="allow a host that is not loopback: metadata is not encrypted"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program and its arguments")


def environment(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """The program's environment. PYTHONPATH begins with kvxfer's packages called ``nixl``, so that they go before all
    others; the program's children inherit that. The rest of PYTHONPATH, and a sitecustomize in it, stay as they are.
    """
    shims = str(pathlib.Path(kvxfer.connectors.__file__).parent / "nixl" / "shims")
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != shims]
    values = {"KVXFER_NIXL_HOST": args.host, "KVXFER_NIXL_ADVERTISE": args.advertise}
    values["KVXFER_NIXL_INSECURE"] = "1" if args.insecure else ""
    chosen = {name: value for name, value in values.items() if value}
    return {**environ, **chosen, "PYTHONPATH": os.pathsep.join([shims, *paths])}


def run(args: argparse.Namespace) -> int:
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        raise ConfigError("kvxfer nixl needs a command to run: kvxfer nixl -- python app.py")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(program[0], program, environment(args, os.environ))
    except OSError as error:
        print(f"kvxfer: {program[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
