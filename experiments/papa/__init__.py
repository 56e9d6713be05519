"""PAPA (Hassid et al. 2022) on a small encoder."""
