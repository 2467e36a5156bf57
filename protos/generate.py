"""Regenerates kvxfer/_pb from protos/, or with ``--check`` says whether what is committed is fresh (exit 1 if not).

The compiler is pinned, and is older than the oldest runtime that we allow, because generated code works on newer
runtimes and not on older ones. protoc 26.1 (in grpcio-tools 1.64.3) is chosen deliberately: it is the last line whose
code has no runtime version check, so one set of files imports on protobuf 5.26.1 and on 7.x alike (code from protoc 27
on refuses every runtime older than itself). The gRPC stubs warn below grpcio 1.64.3. The compiler lives in a virtual
environment of its own under build/, since it cannot share one with protobuf 7. It has wheels for Python 3.11 and 3.12.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "kvxfer" / "_pb"
COMPILER = ("grpcio-tools==1.64.3", "grpcio==1.64.3", "protobuf==5.26.1", "setuptools<81")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def compiler_python() -> pathlib.Path:
    """The interpreter of the compiler's environment, made on first use."""
    home = ROOT / "build" / "protoc-1.64.3"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *COMPILER], check=True
        )
        (home / "complete").touch()
    return python


def generate(destination: pathlib.Path) -> list[pathlib.Path]:
    """Compile every proto into ``destination``; the generated files, relative to it."""
    sources = sorted(path.relative_to(PROTOS) for path in PROTOS.glob("kvxfer/_pb/*.proto"))
    command: list[str | pathlib.Path] = [
        compiler_python(),
        "-W",
        "ignore",
        "-m",
        "grpc_tools.protoc",
        "-I",
        ".",
        f"--python_out={destination}",
        f"--pyi_out={destination}",
    ]
    subprocess.run([*command, *sources], cwd=PROTOS, check=True)
    services = [path for path in sources if "\nservice " in (PROTOS / path).read_text()]
    subprocess.run([*command, f"--grpc_python_out={destination}", *services], cwd=PROTOS, check=True)
    return sorted(path.relative_to(destination) for path in destination.rglob("*") if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the committed files are stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(pathlib.Path(scratch))
        expected = {ROOT / path for path in fresh}
        present = {path for path in TARGET.iterdir() if path.name.endswith(SUFFIXES)}
        stale = [
            path
            for path in expected
            if not path.exists() or not filecmp.cmp(pathlib.Path(scratch) / path.relative_to(ROOT), path, shallow=False)
        ]
        stale += present - expected
        if check:
            for path in sorted(stale):
                print(f"stale: {os.path.relpath(path, ROOT)} (run: python protos/generate.py)", file=sys.stderr)
            return 1 if stale else 0
        for path in present - expected:
            path.unlink()
        for path in fresh:
            shutil.copyfile(pathlib.Path(scratch) / path, ROOT / path)
        print(f"{len(fresh)} files, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
