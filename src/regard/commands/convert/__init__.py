"""`regard convert`: give a trained language model another attention, and train it until it works again."""
