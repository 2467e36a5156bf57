"""Pure policies: who takes a request, whether a remote prefill pays, how much is let in, how long to wait.

Standard library and numpy only; no clock, no randomness, no IO: all of it comes in as arguments.
"""
