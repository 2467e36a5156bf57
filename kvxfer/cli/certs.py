"""``kvxfer certs init | issue | show``: a development CA, certificates of it, and what a certificate says.

Decides what is asked and printed; what a certificate says is :mod:`kvxfer.trust.authority`'s.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib

from kvxfer.trust import authority
from kvxfer.trust.identity import DEFAULT_CLUSTER, CertIdentity, CertRole

CA_DAYS, DAYS = 365.0, 90.0
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    init = commands.add_parser("init", help="make a CA", allow_abbrev=False)
    issue = commands.add_parser("issue", help="make a certificate of that CA", allow_abbrev=False)
    show = commands.add_parser("show", help="print what certificates say", allow_abbrev=False)
    for child, days in ((init, CA_DAYS), (issue, DAYS)):
        child.add_argument(
            "--dir", type=pathlib.Path, default=pathlib.Path("certs"), help="directory of the CA (default: certs)"
        )
        child.add_argument("--days", type=float, default=days, metavar="N", help=f"how long it is valid ({days:g})")
    init.add_argument(
        "--cluster", default=DEFAULT_CLUSTER, metavar="NAME", help=f"the cluster's name (default: {DEFAULT_CLUSTER})"
    )
    issue.add_argument("role", choices=tuple(map(str, CertRole)), metavar="ROLE", help=", ".join(CertRole))
    issue.add_argument("name", metavar="NAME", help="the holder's name: of a worker its agent's id, as --agent-id")
    issue.add_argument(
        "--host",
        action="append",
        metavar="HOST",
        help=f"name or address by which others reach the holder, repeatable (default: {', '.join(LOCAL_HOSTS)})",
    )
    issue.add_argument("--out", type=pathlib.Path, metavar="DIR", help="where the files go (default: --dir)")
    show.add_argument("files", nargs="+", metavar="FILE", help="a certificate in PEM form")


def run(args: argparse.Namespace) -> int:
    """Print what was written or found; 1 where a certificate that was shown is past its end."""
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    if args.action == "show":
        return _show(args.files, now)
    if args.action == "init":
        issued = authority.init(args.dir, args.cluster, days=args.days, now=now)
        print(f"wrote the CA {issued.cert_file} and its key {issued.key_file} (keep the key away from the cluster)")
        return 0
    identity = CertIdentity(authority.cluster_of(args.dir), CertRole(args.role), args.name)
    issued = authority.issue(args.dir, identity, hosts=args.host or LOCAL_HOSTS, days=args.days, now=now, out=args.out)
    print(f"wrote {issued.cert_file} and its key {issued.key_file}: {identity}, {args.days:g} days")
    return 0


def _show(files: list[str], now: datetime.datetime) -> int:
    is_any_over = False
    for path in files:
        shown = authority.show(path)
        left = shown.ends - now
        is_over = left <= datetime.timedelta()
        is_any_over = is_any_over or is_over
        state = "it has ended" if is_over else f"{left.total_seconds() / 86400:.1f} days left"
        if not is_over and shown.is_near_end(now):
            state += ": near its end"
        who = str(shown.identity or ("a CA" if shown.is_ca else "no identity of a cluster"))
        print(
            f"{path}\n  subject      {shown.subject}\n  identity     {who}\n"
            f"  hosts        {', '.join(shown.hosts) or 'none'}\n"
            f"  ends         {shown.ends:%Y-%m-%d %H:%M:%S} UTC ({state})\n  fingerprint  {shown.fingerprint}",
            flush=True,
        )
    return 1 if is_any_over else 0
