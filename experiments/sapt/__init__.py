"""Experiments on SAPT."""
