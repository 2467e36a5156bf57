"""OpenAI's words on the wire: request schemas, server-sent events, error bodies, and the one object kvxfer adds.

Shared by the router and the built-in engine; knows no web framework, no worker and no socket.
"""
