"""What the HTTP servers of the router and of the workers share: connections, bodies, starting and stopping.

Knows no route and no engine. ``limits`` and ``bodies`` say what a client may cost; ``protocol``, ``connections`` and
``accepting`` hold it against sockets; ``heads`` and ``incoming`` read bytes. A request is served over ASGI (``cycle``),
or by a handler of ``exchange``: on the socket (``direct``), or under any ASGI server (``asgi_exchange``). ``server``
starts and stops all of it.
"""
