"""What a load test sends, as values: requests with their due times, lengths, shared prefixes and sessions.

Pure: the load test sends it, and a forecast computes with it. ``request`` has the types; readers make them from traces,
``arrivals`` from distributions; ``prompts`` makes token ids and ``bodies`` the JSON bodies.
"""
