"""Lets Mooncake start on a host without RDMA: links to the libibverbs that NIXL's wheel brings, in a directory for it.

Mooncake's wheel is linked with libibverbs.so.1 and does not bring it; its TCP transport never calls it. Where the host
has the library, that one is found first and nothing here matters.

    python benchmarks/peers/link_verbs.py DIRECTORY     with the peers' own Python
"""

from __future__ import annotations

import pathlib
import sys
import sysconfig


def main() -> None:
    directory = pathlib.Path(sys.argv[1])
    libraries = pathlib.Path(sysconfig.get_path("platlib")) / "nixl_cu12.libs"
    links = {"libibverbs.so.1": next(iter(libraries.glob("libibverbs-*")))}
    # It looks for its own dependencies beside itself, which is beside the link.
    links |= {library.name: library for library in libraries.glob("libnl-*")}
    for name, library in links.items():
        link = directory / name
        link.unlink(missing_ok=True)
        link.symlink_to(library.resolve())


if __name__ == "__main__":
    main()
