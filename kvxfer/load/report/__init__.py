"""Draws a load test as one page that needs no network. Decides what is shown, never what is good."""
