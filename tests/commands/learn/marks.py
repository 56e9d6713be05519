"""Marks that tests of learn share."""

import pytest

READS_ENGLISH = pytest.mark.filterwarnings("ignore:texts. .* of the tokens:UserWarning")
"""Tests whose toy tokenizer reads English, of which it knows little."""
