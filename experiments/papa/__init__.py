"""Experiments on constant attention."""
