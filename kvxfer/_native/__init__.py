"""The machine room: the native core and its protocol machines, as ``kvxfer._native._core``.

Decides nothing itself; the floors above decide which agent pulls what from which, and when. Its stub, ``_core.pyi``, is
the contract that they are written against.
"""
