"""Reductions of a layer, joined over steps, and from rows of a batch to samples: by hand, on numbers of one digit."""

import torch
from torch import Tensor

from regard.hooks.accumulate import LayerAccumulator
from regard.hooks.alignment import SampleAlignment


def by_key(*numbers: float) -> Tensor:
    """Numbers of one sample and one head, (1, 1, key)."""
    return torch.tensor(numbers)[None, None]


def test_tokens_that_a_mask_does_not_reach_are_padding() -> None:
    mask = torch.tensor([[True, False, True], [True, True, True]])
    samples = SampleAlignment.from_masks(2, 5, mask, None, mask.device)
    values = torch.arange(10.0).reshape(2, 1, 5)
    assert samples.length.tolist() == [2, 3]
    assert samples.align_keys(values)[0, 0, :2].tolist() == [0, 2]
    assert samples.align_queries(values)[0, 0, :2].tolist() == [0, 2]
    assert samples.sum_tokens(values.mT).tolist() == [[2], [18]]


def test_a_mask_that_reaches_behind_the_tokens_is_cut_there() -> None:
    """As one that speaks of the room of a static cache."""
    mask = torch.tensor([[True, True, False], [False, True, True]])
    samples = SampleAlignment.from_masks(2, 2, mask, None, mask.device)
    assert samples.length.tolist() == [2, 1]
    assert samples.align_tokens(torch.tensor([[1, 2], [3, 4]]))[1, 0] == 4


def test_samples_of_a_packed_row_are_told_apart_up_to_its_last_token() -> None:
    segments = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1]])
    samples = SampleAlignment.from_masks(2, 4, None, segments, segments.device)
    values = torch.arange(8.0).reshape(2, 4, 1)
    expected = [[0, 1, 2], [3], [4], [5, 6, 7]]
    assert samples.length.tolist() == [len(sample) for sample in expected]
    aligned = samples.align_tokens(values)[..., 0]
    assert [row[: len(sample)].tolist() for row, sample in zip(aligned, expected, strict=True)] == expected
    assert samples.sum_tokens(values)[:, 0].tolist() == [sum(sample) for sample in expected]


def test_steps_of_a_layer_are_joined_where_their_keys_stand() -> None:
    layer, matrix = LayerAccumulator(), torch.ones(1, 3, 5)
    steps = {"column_mass": by_key(1, 2, 3, 0, 0), "key_norm": by_key(4, 5, 6, 0, 0), "entropy": by_key(1, 2, 3)}
    whole = {"weights": matrix, "spectral_bound": torch.ones(1, 1)}
    layer.add_attention(steps | whole, queries=slice(2, 5), first_key=0, keys=3, virtual_key=True)
    assert layer.tensors["weights"].shape == (1, 3, 3)  # behind the tokens is room of a static cache
    before = dict(layer.tensors)
    later = {"column_mass": by_key(7, 8, 9), "key_norm": by_key(1, 2, 3), "entropy": by_key(4)}
    layer.add_attention(later | whole, queries=slice(5, 6), first_key=1, keys=3, virtual_key=False)
    found = {name: tensor.flatten().tolist() for name, tensor in layer.tensors.items()}
    assert found == {"column_mass": [1, 9, 11, 9], "key_norm": [4, 1, 2, 3], "entropy": [1, 2, 3, 4]}
    assert (layer.steps, layer.first_query, layer.queries, layer.keys, layer.virtual_key) == (2, 2, 4, 4, False)
    layer.take_back(before, 1)
    assert (layer.steps, layer.queries, layer.tensors.keys()) == (1, 3, (steps | whole).keys())


def test_keys_before_the_first_and_behind_the_last_have_no_weight() -> None:
    layer = LayerAccumulator()
    layer.add_attention({"column_mass": by_key(1, 2)}, queries=slice(0, 1), first_key=2, keys=2, virtual_key=False)
    assert layer.tensors["column_mass"].flatten().tolist() == [0, 0, 1, 2]
    layer.add_attention({"column_square": by_key(3)}, queries=slice(1, 2), first_key=0, keys=1, virtual_key=False)
    samples = SampleAlignment.from_masks(1, layer.keys, None, None, layer.device)
    aligned = layer.align(samples, samples, packed=False)
    assert {name: tensor.flatten().tolist() for name, tensor in aligned.items()} == {
        "column_mass": [0, 0, 1, 2],
        "column_square": [3, 0, 0, 0],
    }


def test_parts_of_a_sample_see_themselves_alone() -> None:
    """The first keys of the sample are in the first part; of another part they have no weight."""
    sample = LayerAccumulator()
    for first, mass in ((0, [1.0, 2.0]), (1, [3.0, 4.0])):
        part = LayerAccumulator()
        tensors = {"first_mass": torch.tensor([[[mass]]]), "column_mass": by_key(5), "hidden_norm": torch.ones(1, 1)}
        part.add_attention(tensors, queries=slice(0, 1), first_key=0, keys=1, virtual_key=False)
        sample.append(part, first, num_first_keys=2)
    assert sample.tensors.keys() == {"first_mass", "column_mass"}
    assert sample.tensors["first_mass"].tolist() == [[[[1, 2], [0, 3]]]]
    assert sample.tensors["column_mass"].flatten().tolist() == [5, 5]
    assert (sample.queries, sample.keys) == (2, 2)
    packed = SampleAlignment.from_masks(1, 2, None, torch.tensor([[0, 1]]), torch.device("cpu"))
    assert sample.align(packed, packed, packed=True).keys() == {"column_mass"}


def test_hidden_states_of_a_sample_are_some_of_the_rows() -> None:
    rows, sample = LayerAccumulator(), LayerAccumulator()
    rows.add_tensors({"hidden_norm": torch.tensor([[1.0, 2, 3, 4]]), "direction": torch.arange(8.0).reshape(1, 4, 2)})
    sample.add_hidden_rows(rows, slice(1, 3))
    assert sample.tensors["hidden_norm"].tolist() == [[2, 3]]
    assert sample.tensors["direction"].tolist() == [[6, 8]]
    sample.add_tensors({"hidden_norm": torch.tensor([[5.0]]), "direction": torch.tensor([[1.0, 2]])})
    assert sample.tensors["hidden_norm"].tolist() == [[2, 3, 5]]
    assert sample.tensors["direction"].tolist() == [[7, 10]]
