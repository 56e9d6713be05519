"""`regard compare`: what differs between runs of one command."""
