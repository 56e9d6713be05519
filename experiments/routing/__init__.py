"""Routers of SAPT on ordinary texts: whole runs, and routers alone."""
