"""Traces, from lines of text to planned requests. Each reader is total: any lines give a trace, or one TraceRowError
that names the line. ``detect`` finds the format; docs/load-test.md has a table of them. No reader opens a file.
"""
