"""Replace attention by constants or another operation."""
