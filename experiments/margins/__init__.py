"""How far the thresholds by which Regard recognises what a model computes are from where a model would tell."""
