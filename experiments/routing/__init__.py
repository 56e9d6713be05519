"""Continual learning on ordinary texts, which no instruction tells apart: whole runs, and routers alone."""
