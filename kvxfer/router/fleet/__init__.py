"""Which workers exist, how well they are, how loaded, and the connections to them.

Files, lowest first: ``worker`` (one engine), ``facts`` (what an engine says of itself), ``kinds`` (what a failure says
of it), ``entry`` (its place in the fleet), ``members``, ``roster`` (all sources as one list), ``pools``,
``statistics``, ``workers`` (the fleet), ``probe``, ``sources/``. The rules of health are in `policy.health` and
`policy.pairs`, the choice in `policy.place`.
"""
