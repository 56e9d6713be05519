"""Measure what the attention of a model does."""
