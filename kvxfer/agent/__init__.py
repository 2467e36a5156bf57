"""The part of kvxfer inside one worker process: pools, grants, transfers and notifications as asyncio objects."""

from __future__ import annotations

from kvxfer.agent.agent import Agent
from kvxfer.agent.grant import Grant
from kvxfer.agent.notifications import Delivery, Notification
from kvxfer.agent.pool import Pool
from kvxfer.agent.statistics import AgentStatistics
from kvxfer.agent.transfer import AgentPost, Transfer
from kvxfer.transport.pull import TransferProgress, TransferResult

__all__ = [
    "Agent",
    "AgentPost",
    "AgentStatistics",
    "Delivery",
    "Grant",
    "Notification",
    "Pool",
    "Transfer",
    "TransferProgress",
    "TransferResult",
]
