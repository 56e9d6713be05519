"""Experiments on attention sinks."""
