"""One router in several processes: one that leads, and those that serve (docs/adr/0024).

Files, lowest first: ``plain`` (values as JSON), ``channel`` (frames between two processes), ``segment`` (shared
memory), ``messages``, ``seats`` (places in that memory), ``key_cells`` and ``keys`` (API keys and their use),
``samples`` (one ``/metrics`` of many), ``asking`` (control routes, asked of the leader), ``follower`` (the fleet as the
leader tells it), ``leader`` (the fleet of which it tells), ``children`` (processes), ``member`` and ``parent`` (the two
kinds of process). A router in one process imports nothing of this.
"""
