"""Pre-train a small decoder and watch sinks emerge."""
