"""Stand-alone workers of benchmarks/transfer.py: one process at one end, driven by JSON lines on pipes.

Each module here that ends in ``_worker`` is a contender. A peer's library is imported only by its own worker, which the
peers' own virtual environment runs, so no peer library is ever in a process with kvxfer.
"""
