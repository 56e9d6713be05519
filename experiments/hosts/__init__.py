"""Hosts: how near Regard comes to the eager attention of every model type of Transformers."""
