"""Which learning rate suits adapters at the scale of a laptop."""
