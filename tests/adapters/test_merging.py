"""Merges of LoRA adapters against their definitions in float64, and against PEFT's own merged adapters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from regard.adapters.merging import COMBINATIONS, LoraFactors, make_merge, merge_layer
from regard.commands.learn.merge import merge
from regard.errors import UserError
from tests.adapters.model_families import filled, logits, made, rows

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
WEIGHTS = (0.5, -0.25, 0.8)


def drawn(scales: tuple[float, ...] = (2.0, 2.0, 0.5), rank: int = 2) -> list[LoraFactors]:
    random = torch.Generator().manual_seed(3)
    shapes = ((rank, 5), (4, rank))
    pairs = [[torch.randn(*shape, generator=random, dtype=torch.float64) for shape in shapes] for _ in scales]
    return [LoraFactors(down, up, scale) for (down, up), scale in zip(pairs, scales, strict=True)]


def merged(kind: str, adapters: list[LoraFactors], **options: Any) -> Tensor:
    merge = make_merge(kind, len(adapters), WEIGHTS, options.get("density"), options.get("rank"))
    return merge_layer(adapters, merge.weights, merge)[0].delta()


def defined_ties(tensors: list[np.ndarray], weights: Any, density: float) -> np.ndarray:
    """TIES, entry by entry: keep the largest, elect the sign of their sum, average those that have it."""
    kept = []
    for tensor in tensors:
        many = int(density * tensor.size)
        least = np.sort(np.abs(tensor), axis=None)[::-1][many - 1]
        kept.append(np.where(np.abs(tensor) >= least, tensor, 0.0))
    result = np.zeros_like(tensors[0])
    for place in np.ndindex(result.shape):
        values = [tensor[place] for tensor in kept]
        sign = 1 if sum(values) >= 0 else -1
        agreeing = [weight * value for weight, value in zip(weights, values, strict=True) if np.sign(value) == sign]
        result[place] = sum(agreeing) / max(len(agreeing), 1)
    return result


def test_cat_adds_the_weighted_sum_of_what_adapters_add() -> None:
    adapters = drawn()
    expected = sum(w * a.scale * a.up @ a.down for w, a in zip(WEIGHTS, adapters, strict=True))
    assert_close(merged("cat", adapters), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_svd_is_the_nearest_matrix_of_its_rank(rank: int) -> None:
    adapters = drawn()
    whole = sum(w * a.scale * a.up @ a.down for w, a in zip(WEIGHTS, adapters, strict=True))
    left, values, right = np.linalg.svd(whole.numpy())
    expected = torch.from_numpy(left[:, :rank] * values[:rank] @ right[:rank])
    merge = make_merge("svd", 3, WEIGHTS, None, rank)
    factors, cut = merge_layer(adapters, merge.weights, merge)
    assert len(factors.down) == rank
    assert_close(factors.delta(), expected, rtol=0, atol=1e-12)
    assert cut == pytest.approx((values[rank:] ** 2).sum() / (values**2).sum(), abs=1e-12)


def test_linear_multiplies_every_a_with_every_b() -> None:
    """PEFT's: not the sum of the products, from which it differs by all pairs of different adapters."""
    adapters = drawn()
    roots = [(abs(w * a.scale) ** 0.5, np.sign(w)) for w, a in zip(WEIGHTS, adapters, strict=True)]
    expected = sum(
        (r * a.up) @ (s * sign * b.down)
        for (r, _), a in zip(roots, adapters, strict=True)
        for (s, sign), b in zip(roots, adapters, strict=True)
    )
    assert_close(merged("linear", adapters), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(expected, merged("cat", adapters), atol=0.1)


def test_ties_svd_is_the_papers_on_what_adapters_add() -> None:
    adapters = drawn()
    expected = defined_ties([a.delta().numpy() for a in adapters], WEIGHTS, 0.35)
    assert_close(merged("ties_svd", adapters, density=0.35, rank=4), torch.from_numpy(expected), rtol=0, atol=1e-12)


def test_dare_keeps_entries_at_random_and_rescales_them() -> None:
    adapters, density = drawn(), 0.4
    torch.manual_seed(7)
    found = merged("dare_linear_svd", adapters, density=density, rank=4)
    torch.manual_seed(7)
    kept = [torch.bernoulli(torch.full_like(a.delta(), density)) for a in adapters]
    expected = sum(w * k * a.delta() / density for w, k, a in zip(WEIGHTS, kept, adapters, strict=True))
    assert_close(found, expected, rtol=0, atol=1e-12)
    assert 0 < float(torch.stack(kept).mean()) < 1


@pytest.mark.parametrize("kind", COMBINATIONS)
def test_every_kind_is_that_of_peft(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PEFT makes of the same adapters in the model, for a family whose weights are transposed too."""
    adapters = filled("gpt2", blocks=3)
    folder = adapters.export_peft_set(tmp_path / "set")
    mask = torch.Generator().manual_seed(1)

    def draw(input: Tensor) -> Tensor:
        """The same entries for a weight that PEFT holds the other way around."""
        random = torch.rand(sorted(input.shape), generator=mask)
        return ((random if random.shape == input.shape else random.T) < input).to(input)

    monkeypatch.setattr(torch, "bernoulli", draw)
    theirs = peft.PeftModel.from_pretrained(made("gpt2"), folder / "task0", adapter_name="task0")
    for name in ("task1", "task2"):
        theirs.load_adapter(folder / name, adapter_name=name)
    density = None if kind in ("cat", "svd", "linear") else 0.5
    rank = 3 if kind.endswith("svd") else None
    names = list(adapters.adapter_names)
    theirs.add_weighted_adapter(names, list(WEIGHTS), "merged", kind, svd_rank=rank, density=density)
    theirs.set_adapter("merged")
    mask.manual_seed(1)
    merge(folder, tmp_path / "one", method=kind, weights=WEIGHTS, density=density, rank=rank)
    ours = peft.PeftModel.from_pretrained(made("gpt2"), tmp_path / "one").eval()
    batch = rows("gpt2")
    assert_close(logits(ours, batch), logits(theirs.eval(), batch), atol=1e-4, rtol=1e-3)
    assert not torch.allclose(logits(ours, batch), logits(made("gpt2"), batch), atol=1e-2)


def test_adapters_of_different_ranks_have_no_entries_in_common() -> None:
    adapters = [drawn()[0], *drawn(rank=1)[:2]]
    with pytest.raises(UserError, match=r"expected adapters of one rank with ties, .* got 1, 2; cat and svd take any"):
        merged("ties", adapters)
    whole = sum(w * a.delta() for w, a in zip(WEIGHTS, adapters, strict=True))
    assert_close(merged("cat", adapters), whole, rtol=0, atol=1e-12)
    merge = make_merge("svd", 3, WEIGHTS, None, None)
    assert len(merge_layer(adapters, merge.weights, merge)[0].down) == 2, "by default the largest rank"


def test_default_weights_average_once() -> None:
    assert make_merge("cat", 4, None, None, None).weights == (0.25,) * 4
    assert make_merge("dare_linear_svd", 4, None, None, None)[1:3] == ((0.25,) * 4, 0.1)
    assert make_merge("ties_svd", 4, None, None, None)[1:3] == ((1.0,) * 4, 0.2)
    ones = merge_layer(drawn((1.0,)), [1.0], make_merge("ties", 1, None, 1.0, None))[0]
    assert_close(ones.delta(), drawn((1.0,))[0].delta())


@pytest.mark.parametrize(
    "options, message",
    [
        (("mean", None, None, None), "method: expected one of cat, svd, linear, ties,"),
        (("cat", [1.0], None, None), r"weights: expected a number for each of 2 adapters, got \[1.0\]"),
        (("cat", None, 0.5, None), "density: expected none with cat, which keeps all entries, got 0.5"),
        (("ties", None, 0.0, None), "density: expected a number above 0, at most 1, got 0.0"),
        (("ties", None, None, 4), "rank: expected none with ties, only the kinds with svd choose one; got 4"),
        (("svd", None, None, 0), "rank: expected a whole number of at least 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(options: Any, message: str) -> None:
    kind, *others = options
    with pytest.raises(UserError, match=f"^{message}"):
        make_merge(kind, 2, *others)
