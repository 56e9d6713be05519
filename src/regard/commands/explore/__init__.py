"""One text on a page of this machine: replace heads, and watch what the model predicts."""
