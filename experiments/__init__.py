"""Published tables and figures, done again at the scale of a laptop: one file a paper."""
