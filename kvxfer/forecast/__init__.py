"""The pure model of an inference engine: which tokens a step computes, and how long it takes.

``step`` is the scheduler, ``paged_cache`` its KV blocks, ``cost`` its time. The mock engine runs it on a real clock.
"""
