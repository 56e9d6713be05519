"""Experiments on pre-scaling."""
