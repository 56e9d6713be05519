"""Each mutation still fits the library, and there are some of every core folder."""

import pytest

pytest.importorskip("tomllib", reason="tomllib is part of Python 3.11 and newer")

from tests.mutants.__main__ import check_mutants, read_mutants

CORE = {"attention", "statistics", "constants", "hooks", "data", "models", "adapters", "training", "continual", "runs"}


def test_the_mutations_fit_the_library() -> None:
    mutants = read_mutants()
    assert check_mutants(mutants) == []
    assert len(mutants) >= 60
    assert {mutant.file.split("/")[0] for mutant in mutants} == CORE | {"commands", "report", "cli.py"}
    assert all(mutant.tests or mutant.equivalent for mutant in mutants)
