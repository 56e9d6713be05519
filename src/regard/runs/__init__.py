"""What the runs of every command share."""
