"""Look at one text, token by token."""
