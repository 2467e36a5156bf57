"""Reads what other load tools wrote, so that their runs can be judged and drawn like our own.

``read.read_results`` is the entry. One module a tool; ``fields`` takes members out of a file and says where one is
wrong; ``made`` makes the run. What a tool does not tell stays untold: ``settings["not_told"]`` lists it, and
``settings["due_is"]`` says what stands for the time at which a request was due. A count that is not told is 0.
"""
