"""Limits far beyond any text cost nothing."""

from dataclasses import replace

import torch

from regard.continual.learner import ExampleRef
from regard.continual.methods import METHODS
from regard.continual.run import make_learner
from tests.continual.small_tasks import BUDGET, loaded, stream


def test_a_length_beyond_all_texts_pads_no_row_to_it() -> None:
    """Rows of all tasks and splits have as many columns as the longest text of any needs, so that they mix."""
    far, near = (
        make_learner(stream(3), METHODS["finetune"](), loaded(), replace(BUDGET, length=length), seed=1)
        for length in (10**12, 10)
    )
    widths = {one.input_ids.shape[1] for one in far.encoded.values()}
    assert widths == {max(int(one.attention_mask.sum(1).max()) for one in near.encoded.values())}
    items = [ExampleRef(task, row) for task in range(3) for row in (0, 1)]
    for name, column in near.rows(items).items():
        assert torch.equal(far.rows(items)[name], column), name
