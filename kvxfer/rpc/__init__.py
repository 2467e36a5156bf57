"""The coordinator's wire: clients, the cluster token, and the conversion between protobuf messages and our values."""

from __future__ import annotations

from kvxfer.rpc.client import CoordinatorSession
from kvxfer.rpc.proof import coordinator_tls, token_beside
from kvxfer.rpc.token import default_token_path, load_or_create_token, load_token, member_token
from kvxfer.rpc.watch import MembershipWatch, drain, list_members

__all__ = [
    "CoordinatorSession",
    "MembershipWatch",
    "coordinator_tls",
    "default_token_path",
    "drain",
    "list_members",
    "load_or_create_token",
    "load_token",
    "member_token",
    "token_beside",
]
