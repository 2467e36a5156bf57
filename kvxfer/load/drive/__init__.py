"""The native driver: sends a workload in open loop and notes what became of each request.

``start`` is the entry, in the process of the command; ``process`` is one sending process with its loop in ``sender``.
``schedule`` says what is due, ``bodies`` makes bodies before they are due, ``wires`` has the connections, ``answer``
reads what comes back. ``endpoint`` is where it goes. docs/load-test.md has the definitions.
"""
