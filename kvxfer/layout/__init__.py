"""Where ranks keep keys and values, and which bytes of one layout make which bytes of another: block ids, layouts and
tensor parallel ranks become coalesced strided runs.

Standard library and numpy only; no clock, no randomness, no IO. docs/layouts.md shows how it is used.
"""
