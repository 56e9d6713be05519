"""Run a command for every combination of some settings."""
