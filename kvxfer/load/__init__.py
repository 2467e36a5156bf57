"""The load test: sends a workload to an endpoint, and says what the endpoint held.

``drive`` sends, ``record`` is what is noted of each request, ``judge`` decides what the records say, ``search`` and
``sweep`` repeat runs, ``report`` draws them. docs/load-test.md has the definitions.
"""
