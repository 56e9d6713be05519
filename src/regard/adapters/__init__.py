"""Adapters for many tasks in one model, weighed for each row by a router."""
