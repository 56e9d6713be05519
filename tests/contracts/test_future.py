"""No attention to the future, watched or not."""

from typing import Any

import pytest
import torch

from regard.hooks import watching

pytestmark = pytest.mark.sample(2)

CHANGED = 6
PER_QUERY = ("entropy", "distance", "row_sum", "virtual_sink_mass", "head_output_norm", "hidden_norm", "key_norm")


@pytest.mark.parametrize("padding", ["none", "right"])
def test_later_tokens_change_nothing_for_earlier_queries(
    causal: Any, padding: str, build: Any, inputs: Any, table: Any, assert_same: Any
) -> None:
    model, given = build(causal, dtype=torch.float64), inputs(causal, padding)
    name = "decoder_input_ids" if causal.kind == "both" else "input_ids"
    later = torch.arange(given[name].shape[1]) >= CHANGED
    changed = given | {name: torch.where(later, 3 + (given[name] + 11) % 90, given[name])}
    outputs, tables = [], []
    for arguments in (given, changed):
        with torch.no_grad(), watching(model, PER_QUERY) as seen:
            outputs.append(model(**arguments).logits)
        rows = table(seen)
        tables.append({k: v for k, v in rows.items() if k[1] == "decoder" and k[4] is not None and k[4] < CHANGED})
    assert not torch.equal(outputs[0][:, CHANGED:], outputs[1][:, CHANGED:])
    assert torch.allclose(outputs[0][:, :CHANGED], outputs[1][:, :CHANGED], rtol=1e-9, atol=1e-9)
    assert {key[0] for key in tables[0]} == {*PER_QUERY}
    assert_same(tables[1], tables[0])


def test_no_gradient_from_an_earlier_output_to_a_later_input(causal: Any, build: Any, inputs: Any) -> None:
    model, given = build(causal), inputs(causal, "right")
    name = "decoder_input_ids" if causal.kind == "both" else "input_ids"
    embedded = model.get_input_embeddings()(given.pop(name)).detach().requires_grad_()
    given[name.replace("input_ids", "inputs_embeds")] = embedded
    with watching(model, "default"):
        logits = model(**given).logits
    (gradient,) = torch.autograd.grad(logits[0, CHANGED].sum(), embedded)
    assert gradient[0, CHANGED].abs().max() > 0
    assert gradient[0, CHANGED + 1 :].abs().max() == 0
    assert gradient[1:].abs().max() == 0
