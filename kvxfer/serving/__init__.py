"""What the HTTP servers of the router and of the workers share: connections, bodies, starting and stopping.

Knows no route and no engine. ``limits`` and ``bodies`` say what a client may cost; ``protocol``, ``connections`` and
``accepting`` hold it against sockets; ``server`` starts and stops all of it.
"""
