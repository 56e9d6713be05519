"""Averages and what is kept with them: merging, input dependence, the file, and what it does not fit."""

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForTokenClassification, BertModel

import regard
from regard.constants import SOURCES, Constants, Origin, make_data_free, to_length
from regard.errors import UserError
from regard.hooks import average_attention, model_fingerprint, watching
from regard.hooks.replace import select_heads
from regard.statistics.dependence import InputDependence
from tests.processes import run_python

LENGTH, SAMPLES = 14, 10
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert(seed: int = 0, implementation: str = "sdpa", **sizes: int) -> Any:
    torch.manual_seed(seed)
    config = BertConfig(vocab_size=60, max_position_embeddings=32, initializer_range=0.5, **{**SIZES, **sizes})
    return BertModel._from_config(config, attn_implementation=implementation).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return bert()


def inputs(samples: int = SAMPLES, least: int = 5) -> dict[str, Tensor]:
    """Samples of `least` to LENGTH tokens, padded on the right; the first fills the length."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(least, LENGTH + 1, (samples,), generator=generator)
    lengths[0] = LENGTH
    real = torch.arange(LENGTH) < lengths[:, None]
    ids = torch.randint(1, 60, (samples, LENGTH), generator=generator)
    return {"input_ids": ids * real, "attention_mask": real.long()}


def part(whole: dict[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    return {name: values[list(rows)] for name, values in whole.items()}


def assert_same(found: Constants, expected: Constants) -> None:
    """The same averages to the rounding of float32, of the same counts."""
    assert found.layers == expected.layers
    for place, matrix in expected.matrices.items():
        torch.testing.assert_close(found.matrices[place], matrix, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.squares[place], expected.squares[place], rtol=1e-9, atol=0)
    for site, count in expected.counts.items():
        assert torch.equal(found.counts[site], count)


# -- merging --------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
def test_merging_is_averaging_at_once_however_samples_are_split(model: Any, seed: int) -> None:
    draw = random.Random(seed)
    whole = inputs()
    order = draw.sample(range(SAMPLES), SAMPLES)
    cuts = [0, *sorted(draw.sample(range(1, SAMPLES), 3)), SAMPLES]
    parts = [order[a:b] for a, b in itertools.pairwise(cuts)]
    found = [regard.average_attention(model, [part(whole, rows)], LENGTH, source=f"part {seed}") for rows in parts]
    draw.shuffle(found)
    left = found[0].merge(found[1]).merge(found[2]).merge(found[3])
    balanced = found[3].merge(found[1]).merge(found[0].merge(found[2]))
    once = regard.average_attention(model, [whole], LENGTH)
    assert_same(left, once)
    assert_same(balanced, once)
    for place, expected in once.input_dependence().items():
        torch.testing.assert_close(left.input_dependence()[place], expected, rtol=1e-4, atol=1e-5)
    assert [one["samples"] for one in left.origin.data["merged"]] == [one.origin.data["samples"] for one in found]


def test_what_one_part_never_saw_is_that_of_the_other(model: Any) -> None:
    short = part(inputs(), [1])
    short = {name: values[:, :4] for name, values in short.items()}
    long = part(inputs(), [0])
    merged = regard.average_attention(model, [short], LENGTH).merge(regard.average_attention(model, [long], LENGTH))
    whole = regard.average_attention(model, [long], LENGTH)
    for place, matrix in whole.matrices.items():
        torch.testing.assert_close(merged.matrices[place][:, 4:], matrix[:, 4:])
        assert not torch.allclose(merged.matrices[place][:, :4, :4], matrix[:, :4, :4])


def test_a_crop_merges_with_averages_of_its_length(model: Any) -> None:
    """Σ A² of a crop is not known, so that of the whole is not either."""
    crop = to_length(regard.average_attention(model, [inputs()], LENGTH), 5)
    whole = regard.average_attention(model, [{"input_ids": inputs()["input_ids"][:, :5].clamp(min=1)}], 5)
    for merged in (crop.merge(whole), whole.merge(crop)):
        assert merged.squares == {}
        assert torch.equal(merged.counts["encoder"], crop.counts["encoder"] + whole.counts["encoder"])


def changed(constants: Constants, **origin: Any) -> Constants:
    return replace(constants, origin=replace(constants.origin, **origin))


UNLIKE: dict[str, Callable[[Constants], Constants]] = {
    "length": lambda one: to_length(one, 5),
    "layout": lambda one: changed(one, layout="paper"),
    "special tokens": lambda one: changed(one, separators=(0, 3)),
    "tokenizer": lambda one: changed(one, tokenizer="another"),
    "layers": lambda one: replace(one, matrices={("encoder", 0): one.matrices["encoder", 0]}),
    "only averages": lambda one: replace(one, counts={}),
    "heads": lambda one: changed(one, model={**one.origin.model, "heads": {"encoder.0": 3}}),
    "another one": lambda one: changed(one, model=model_fingerprint(bert(seed=5))),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_averages_that_do_not_belong_together_are_not_merged(model: Any, what: str) -> None:
    one = regard.average_attention(model, [inputs()], LENGTH)
    with pytest.raises(UserError, match=what) as told:
        one.merge(UNLIKE[what](one))
    assert "\n" not in str(told.value)


# -- input dependence -----------------------------------------------------------------------------------


def test_one_sample_tells_no_input_dependence(model: Any) -> None:
    constants = regard.average_attention(model, [torch.randint(1, 30, (1, LENGTH))], LENGTH)
    with pytest.raises(regard.UserError, match="expected averages of at least 2 samples, got 1"):
        constants.input_dependence()
    with pytest.raises(regard.UserError, match=r"^heads: expected averages of at least 2 samples, got 1"):
        select_heads(constants, 0.5)
    assert [len(select_heads(constants, share)) for share in (0.0, 1.0)] == [0, len(constants.heads)]


def test_two_samples_tell_an_input_dependence() -> None:
    """Of a head whose two matrices have no pair in common, and of one that had the identity twice: Σ A² is 4."""
    averages = torch.stack([torch.full((2, 2), 0.5), torch.eye(2)])
    constants = Constants(
        matrices={("encoder", 0): averages},
        origin=Origin(source="average"),
        counts={"encoder": torch.full((2, 2), 2)},
        squares={("encoder", 0): torch.tensor([4.0, 4.0], dtype=torch.float64)},
    )
    assert constants.input_dependence()["encoder", 0].tolist() == [1.0, 0.0]


def test_input_dependence_of_whole_samples_is_that_of_the_statistic(model: Any) -> None:
    ids = inputs()["input_ids"].clamp(min=1)
    measured = InputDependence()
    with torch.no_grad(), watching(model, [measured]):
        model(input_ids=ids)
    found = regard.average_attention(model, [ids], LENGTH).input_dependence()
    rows = measured.result()
    assert len(rows) == 8
    for row in rows:
        assert float(found[row.site, row.layer][row.head]) == pytest.approx(row.value, abs=1e-5)


@torch.no_grad()
def test_averages_and_input_dependence_of_padded_samples_are_those_of_the_plain_formulas() -> None:
    whole = inputs()
    mask = whole["attention_mask"].double()
    plain = bert(implementation="eager").double()
    weights = plain(**whole, output_attentions=True).attentions
    found = regard.average_attention(bert(), [part(whole, range(4)), part(whole, range(4, SAMPLES))], LENGTH)
    assert found.origin.data["samples"] == SAMPLES
    both = mask[:, :, None] * mask[:, None, :]
    count = both.sum(0)
    for layer, matrices in enumerate(weights):
        seen = matrices * both[:, None]
        average = seen.sum(0) / count
        torch.testing.assert_close(found.matrices["encoder", layer].double(), average, rtol=1e-4, atol=1e-6)
        missed = ((seen - average).square() * both[:, None]).sum((0, 2, 3))
        expected = missed / seen.square().sum((0, 2, 3)) * SAMPLES / (SAMPLES - 1)
        torch.testing.assert_close(found.input_dependence()["encoder", layer], expected, rtol=1e-4, atol=1e-6)


def test_input_dependence_needs_averages_with_their_squares(model: Any) -> None:
    constants = regard.average_attention(model, [inputs()], LENGTH)
    with pytest.raises(UserError, match="input-dependence: expected averages"):
        replace(constants, squares={}).input_dependence()


# -- the file -------------------------------------------------------------------------------------------


@pytest.fixture
def constants(model: Any) -> Constants:
    return regard.average_attention(model, [inputs()], LENGTH, source="somewhere")


def test_the_same_content_is_the_same_bytes(constants: Constants) -> None:
    turned = replace(
        constants,
        matrices=dict(reversed(constants.matrices.items())),
        squares=dict(reversed(constants.squares.items())),
        origin=replace(constants.origin, model=dict(reversed(constants.origin.model.items()))),
    )
    assert turned.to_bytes() == constants.to_bytes() == constants.to_bytes()
    other = {**constants.matrices, ("encoder", 0): constants.matrices["encoder", 0] + 1e-3}
    assert replace(constants, matrices=other).to_bytes() != constants.to_bytes()


def test_the_same_content_is_the_same_bytes_in_another_process(constants: Constants, tmp_path: Path) -> None:
    path = constants.save(tmp_path / "c.safetensors")
    code = (
        "import hashlib, sys; from regard.constants import Constants; "
        "print(hashlib.sha256(Constants.load(sys.argv[1]).to_bytes()).hexdigest() + "
        "hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())"
    )
    told = run_python(["-c", code, str(path)]).stdout
    assert told[:64] == told[64:].strip()


def test_what_was_saved_is_loaded(constants: Constants, model: Any, tmp_path: Path) -> None:
    origin = replace(constants.origin, separators=(0, 3), notes=("one", "two"))
    whole = replace(constants, origin=origin)
    path = whole.save(tmp_path / "deep" / "constants.safetensors")
    assert path.parent.joinpath(path.name).exists()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    found = Constants.load(path, model=model_fingerprint(model), length=LENGTH)
    assert found.origin == whole.origin
    assert found.layers == whole.layers
    for name in ("matrices", "counts", "squares"):
        one, other = getattr(found, name), getattr(whole, name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)


def refused(what: str, path: Path, **fits: Any) -> None:
    with pytest.raises(UserError, match=what) as told:
        Constants.load(path, **fits)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(constants: Constants, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(constants.to_bytes()[:kept])
    refused("cannot read", path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    refused("cannot read", tmp_path / "nowhere.safetensors")
    refused("cannot read", tmp_path)
    (tmp_path / "text").write_text("constants\n" * 99, encoding="utf-8")
    refused("cannot read", tmp_path / "text")
    safetensors.torch.save_file({"weight": torch.ones(2)}, tmp_path / "weights.safetensors", {"format": "pt"})
    refused("expected a file that Constants.save wrote", tmp_path / "weights.safetensors")
    safetensors.torch.save_file(
        {"weight": torch.ones(2)}, tmp_path / "odd.safetensors", {"regard.constants": "no JSON"}
    )
    refused("expected a file that Constants.save wrote", tmp_path / "odd.safetensors")


def test_constants_of_another_model_or_for_shorter_inputs_are_refused(constants: Constants, tmp_path: Path) -> None:
    path = constants.save(tmp_path / "constants.safetensors")
    refused("serves up to 14 tokens, expected 15", path, length=15)
    refused("heads", path, model=model_fingerprint(bert(num_attention_heads=2)))
    refused("heads", path, model=model_fingerprint(bert(num_hidden_layers=3)))
    refused("weights are alike", path, model=model_fingerprint(bert(seed=7)))
    refused("type", path, model={**model_fingerprint(bert()), "type": "roberta"})
    fewer = model_fingerprint(bert())
    refused("it has other weights, such as adapters", path, model={**fewer, "weights": fewer["weights"][:-4]})


def tuned(model: Any, by: float = 0.01, among: str = "") -> Any:
    """A copy whose weights, those with `among` in their names, are a little different."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if among in name:
                parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return copied


@pytest.mark.parametrize(
    "among", ["", "query.weight", "key.bias", "layer.1.output.dense", "attention.output.LayerNorm"]
)
def test_constants_from_before_fine_tuning_pass_with_a_warning(
    among: str, constants: Constants, model: Any, tmp_path: Path
) -> None:
    path, other = constants.save(tmp_path / "constants.safetensors"), tuned(model, among=among)
    with pytest.warns(UserWarning, match="a little different, as before fine-tuning") as told:
        found = Constants.load(path, model=model_fingerprint(other))
    assert len(told) == 1
    assert found.origin == constants.origin
    with pytest.warns(UserWarning, match="a little different"), regard.replacing(other, found):
        pass
    with pytest.warns(UserWarning, match="a little different"):
        found.merge(regard.average_attention(other, [inputs()], LENGTH))


def test_constants_of_weights_that_are_no_numbers_are_refused() -> None:
    """Such a model is like no other."""
    origin = Origin(source="average", model={"weights": [1.0, float("nan")]})
    constants = Constants(matrices={("encoder", 0): torch.eye(2)[None]}, origin=origin)
    with pytest.raises(UserError, match=r"got those of another one: their weights are alike by nan"):
        constants.check_model({"weights": [1.0, 2.0]})


def test_constants_of_the_same_model_pass_without_a_warning(constants: Constants, model: Any, tmp_path: Path) -> None:
    """Also under another head, beside other embeddings, in another precision, and where any weights would do."""
    path = constants.save(tmp_path / "constants.safetensors")
    headed = BertForTokenClassification(model.config).eval()
    headed.bert.load_state_dict(model.state_dict(), strict=False)
    same = [copy.deepcopy(model), headed, tuned(model, among="embeddings"), tuned(model, among="pooler")]
    for other in (*same, copy.deepcopy(model).half(), copy.deepcopy(model).bfloat16()):
        assert Constants.load(path, model=model_fingerprint(other)).origin == constants.origin
    with regard.replacing(tuned(model), make_data_free("toeplitz", constants)):
        pass
    with regard.replacing(tuned(model), constants, any_model=True):
        pass


def test_constants_without_a_digest_pass_as_before(constants: Constants, model: Any, tmp_path: Path) -> None:
    """Such as files of earlier versions."""
    old = {name: value for name, value in constants.origin.model.items() if name != "digest"}
    path = changed(constants, model=old).save(tmp_path / "constants.safetensors")
    for other in (model, tuned(model)):
        assert Constants.load(path, model=model_fingerprint(other)).origin.model == old
        assert Constants.load(path, model={**model_fingerprint(other), "digest": None}).layers == constants.layers
    refused("weights are alike", path, model=model_fingerprint(bert(seed=7)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("entry", [0, 63])
def test_the_digest_sees_both_ends_of_each_weight(entry: int, model: Any) -> None:
    known = model_fingerprint(model)["digest"]
    assert known.startswith("float32:")
    assert model_fingerprint(copy.deepcopy(model).double())["digest"].startswith("float64:")
    for block in (model.encoder.layer[0], model.encoder.layer[1]):
        for parameter in block.parameters():
            flat = parameter.data.view(-1)
            at = entry * (len(flat) - 1) // 63
            before = flat[at].clone()
            flat[at] += 1e-3
            assert model_fingerprint(model)["digest"] != known
            flat[at] = before
    assert model_fingerprint(model)["digest"] == known


def test_a_file_that_cannot_be_written_leaves_nothing(constants: Constants, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="nothing was written"):
        constants.save(tmp_path / "file" / "constants.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="nothing was written"):
        constants.save(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(
    "matrices, what",
    [
        ({}, "at least one layer"),
        ({("encoder", 0): torch.ones(3, 3)}, "expected \\(head, query, key\\)"),
        ({("encoder", 0): torch.ones(2, 3, 3), ("encoder", 1): torch.ones(2, 4, 4)}, "one length"),
        ({("encoder", 0): torch.ones(2, 3, 4)}, "as many queries as keys"),
        ({("encoder", 0): torch.full((2, 3, 3), torch.nan)}, "finite"),
    ],
)
def test_matrices_of_no_use_are_refused(matrices: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        Constants(matrices=matrices, origin=Origin(source="test"))


def test_constants_without_data_are_those_of_the_paper() -> None:
    half, third = 1 / 2, 1 / 3
    assert SOURCES["identity"](2, 3).tolist() == [[1, 0, 0], [0, 1, 0]]
    assert SOURCES["zeros"](2, 3).tolist() == [[0, 0, 0], [0, 0, 0]]
    torch.testing.assert_close(SOURCES["toeplitz"](2, 3), torch.tensor([[1, half, third], [half, 1, half]]))


def small_bart() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, init_std=0.5,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


def test_a_decoder_reads_its_labels_behind_a_start_token() -> None:
    """Its inputs are the labels, shifted by one; it sees neither those that are ignored nor a row's last label."""
    model = small_bart()
    ids = torch.randint(4, 60, (2, 6))
    labels = torch.tensor([[7, 8, 9, 10, 11], [12, 13, -100, -100, -100]])
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
    decoder_ids = torch.tensor([[start, 7, 8, 9, 10], [start, 12, 13, pad, pad]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    read = {"decoder_input_ids": decoder_ids, "decoder_attention_mask": mask}
    averages = [average_attention(model, [{"input_ids": ids} | more], 6) for more in ({"labels": labels}, read)]
    assert_same(*averages)


def test_padding_of_the_encoder_does_not_move_what_the_decoder_reads() -> None:
    """Both are of one length; each has padding of its own, on another side."""
    model = small_bart()
    ids, decoder_ids = torch.randint(4, 60, (2, 2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    right = {"input_ids": ids, "attention_mask": mask}
    left = {"input_ids": torch.stack([ids[0], ids[1].roll(2)]), "attention_mask": mask.flip(1)}
    for read in ({"decoder_input_ids": decoder_ids, "decoder_attention_mask": mask}, {"labels": decoder_ids}):
        assert_same(*(average_attention(model, [encoded | read], 6) for encoded in (left, right)))


def test_a_model_is_saved_after_replacing_and_not_inside(tmp_path: Path) -> None:
    """Inside, a folder would lack the pruned projections, and could not be loaded."""
    model = bert()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    constants = regard.average_attention(model, [inputs()], LENGTH)
    with regard.replacing(model, constants), pytest.raises(UserError, match=r"regard\.replaced"):
        model.save_pretrained(tmp_path / "inside")
    assert not (tmp_path / "inside").exists()
    model.save_pretrained(tmp_path / "after")
    loaded = BertModel.from_pretrained(tmp_path / "after").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in before.items())


def test_layers_with_the_same_tensor_are_saved(tmp_path: Path) -> None:
    matrix = torch.full((2, 4, 4), 0.25)
    shared = Constants(matrices={("encoder", 0): matrix, ("encoder", 1): matrix}, origin=Origin(source="average"))
    found = Constants.load(shared.save(tmp_path / "c"))
    assert all(found.matrices["encoder", layer].equal(matrix) for layer in (0, 1))


def test_the_repr_of_constants_is_one_short_line(model: Any) -> None:
    shown = repr(average_attention(model, [inputs()], length=LENGTH))
    assert shown == f"Constants(average, 2 layers, 8 heads, length {LENGTH})"
