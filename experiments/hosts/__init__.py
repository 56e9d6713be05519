"""Which models of Transformers are measured exactly, and which are refused."""
