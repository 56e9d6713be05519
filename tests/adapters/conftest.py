"""What tests of adapters share."""

import pytest


@pytest.fixture
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the steps that teach a learnt router a task, for tests that do not ask how well it tells tasks."""
    monkeypatch.setattr("regard.adapters.router_warmup.STEPS", 60)
