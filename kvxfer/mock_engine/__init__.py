"""An inference engine without a model: real HTTP, real scheduling, made-up answers, and faults on command.

``engine`` is one engine, ``exchange`` one request in it, ``http_protocol`` its sockets; ``pace`` and ``step_loop`` are
its two clocks; ``legs`` reads what a router asks of a prefill or decode engine, ``holds`` and ``claims`` are the KV
between them. docs/mock-engine.md is its page.
"""
