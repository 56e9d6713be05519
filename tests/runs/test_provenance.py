"""Where numbers come from: peaks of memory, of a GPU and of the process."""

from __future__ import annotations

import pytest
import torch

from regard.runs.provenance import peak_memory, reset_peak


def test_the_peak_of_a_gpu_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """At what is taken then."""
    now, most = 3 * 2**20, {"cuda:1": 7 * 2**20}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: most[str(device)])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: most.update({str(device): now}))
    device = torch.device("cuda", 1)
    assert peak_memory(device) == 7
    reset_peak(device)
    assert peak_memory(device) == 3


def test_that_of_the_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no GPU is asked for, which the machine may lack."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: pytest.fail("there is no GPU"))
    before = peak_memory(torch.device("cpu"))
    reset_peak(torch.device("cpu"))
    assert peak_memory(torch.device("cpu")) >= before > 0
