"""The machine room: the native core and its protocol machines, as ``kvxfer._native._core``.

Decides nothing itself; who pulls what from whom, and when, is decided on the floors above. Its stub, ``_core.pyi``, is
the contract that they are written against.
"""
