"""Passes: each takes a graph and options and gives a graph and a count. The order is in `pipeline.py`."""
