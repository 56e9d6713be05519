"""Every performance claim, each against a peer, in one run."""
