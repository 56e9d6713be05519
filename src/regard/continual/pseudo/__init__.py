"""Pseudo samples: texts that stand for the rows of a task that has been learnt, written by a model or read."""
