"""Learning task after task: methods, runs, and what they come to."""
