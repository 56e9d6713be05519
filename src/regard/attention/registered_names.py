"""The names under which Regard's attention functions are registered in Transformers, by what masks a model passes."""

NAME = "regard"
EAGER_NAME = "regard-eager"
"""For models that do not support SDPA: they get the masks of eager attention, and without a mask all keys are seen."""
UNMASKED_NAME = "regard-unmasked"
"""For configs whose attention a user has registered without a mask function: like that one it gets no masks."""
NAMES = (NAME, EAGER_NAME, UNMASKED_NAME)
