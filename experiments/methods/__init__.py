"""Which method `regard learn` has by default."""
