"""Tiers: where blocks of KV go that an engine's own caches had to drop, and come back from. Engine-neutral: a store
of blocks in files, one in the memory of another host, and the service there."""
