"""Fetches published traces whole, for ``kvxfer load --trace``, and checks each by size and SHA-256.

    python benchmarks/fetch_traces.py DIRECTORY [NAME ...] [--base-url URL] [--list]

A file that is there already and is the right one is kept. Nothing is resumed: a download that breaks off, or is not
what it should be, leaves nothing. What was fetched is printed with where it comes from and its licence.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import os
import pathlib
import sys
import tempfile
import urllib.error
import urllib.request

from kvxfer.workload.published import PUBLISHED, PublishedTrace

BYTES_MAX = 64 << 20
"""Of a trace whose size is not known beforehand."""
CHUNK = 1 << 16


class FetchError(Exception):
    """In one sentence, why a trace could not be fetched."""


def digest_of(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(trace: PublishedTrace, folder: pathlib.Path, url: str, timeout_s: float) -> str:
    """Puts the trace into ``folder`` under its name, and says what was done. Raises FetchError, and leaves none."""
    path = folder / trace.name
    if path.is_file() and digest_of(path) == trace.sha256:
        return "is there already"
    limit = BYTES_MAX if trace.bytes is None else trace.bytes
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{trace.name}.")
    part = pathlib.Path(name)
    try:
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(url, timeout=timeout_s) as answer:
            digest, count = hashlib.sha256(), 0
            while data := answer.read(CHUNK):
                count += len(data)
                if count > limit:
                    raise FetchError(f"{url} has more than the {limit} bytes of {trace.name}")
                digest.update(data)
                file.write(data)
        if trace.bytes is not None and count != trace.bytes:
            raise FetchError(f"{url} gave {count} bytes, and {trace.name} has {trace.bytes}")
        if digest.hexdigest() != trace.sha256:
            raise FetchError(f"{url} gave SHA-256 {digest.hexdigest()}, and {trace.name} has {trace.sha256}")
        part.chmod(0o644)
        part.replace(path)
    except urllib.error.HTTPError as error:
        raise FetchError(f"{url} answered {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise FetchError(f"{url} cannot be reached: {error.reason}") from None
    except http.client.HTTPException as error:
        raise FetchError(f"{url} broke off: {error or type(error).__name__}") from None
    except OSError as error:
        raise FetchError(f"{url} could not be fetched: {error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    return f"{count} bytes"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path, nargs="?")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which of them (default: all)")
    parser.add_argument("--base-url", help="fetch BASE/NAME in place of the address where each was published")
    parser.add_argument("--timeout-s", type=float, default=60.0)
    parser.add_argument("--list", action="store_true", help="print names, addresses and licences, and fetch nothing")
    given = parser.parse_args()
    if given.list:
        for trace in PUBLISHED:
            print(f"{trace.name}\n  {trace.url}\n  {trace.source}")
        return 0
    if given.directory is None:
        parser.error("a directory is needed")
    known = {trace.name: trace for trace in PUBLISHED}
    wrong = [name for name in given.names if name not in known]
    if wrong:
        parser.error(f"no trace is named {', '.join(wrong)}: there are {', '.join(known)}")
    try:
        given.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"fetch_traces: {given.directory} cannot be made: {error.strerror}", file=sys.stderr)
        return 1
    failed = 0
    for name in given.names or known:
        url = f"{given.base_url.rstrip('/')}/{name}" if given.base_url else known[name].url
        try:
            done = fetch(known[name], given.directory, url, given.timeout_s)
        except FetchError as error:
            print(f"fetch_traces: {error}", file=sys.stderr)
            failed += 1
        else:
            print(f"{given.directory / name}: {done}; {known[name].source}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
