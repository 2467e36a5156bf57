"""Pure policies: which pair serves a request, whether a remote prefill pays, how many requests are let in, which lane
moves the bytes, how long to wait.

Standard library and numpy only; no clock, no randomness, no IO: all of it comes in as arguments.
"""
