"""A classifier over many kinds of models: what it computes, what is trained, and that it is saved whole."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from regard.errors import UserError
from regard.hooks import watching
from regard.models.classifier import Classifier, ClassifierConfig, add_lora, extract_encoder
from regard.models.heads import HEADS, LABEL_SCALE, LabelTextHead, LinearHead, sample_background_words
from regard.models.pretrained import Loaded
from tests.continual import small_tasks
from tests.models.conftest import made, tokenizer

CLASSES = ("a", "b", "c")
PAD = 1
WORDS = {"a": "w3", "b": "w5 w4", "c": "w6"}
"""Those of the classes, for the head that reads them: the tokenizer knows no others."""
_SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
READING = {
    "bert": "first",
    "minilm": "first",
    "roberta": "first",
    "electra": "first",
    "deberta": "first",
    "llama": "last",
    "gpt2": "last",
    "t5": "mean",
    "bart": "mean",
}
"""Families, and the token that a linear head reads of each."""


def below(kind: str) -> Any:
    """A tiny random model without a head, dropout in it as usual."""
    torch.manual_seed(0)
    if kind == "minilm":  # BERT with small heads and a wide inner layer
        sizes = _SIZES | {"intermediate_size": 64, "num_attention_heads": 4}
        return transformers.BertModel(transformers.BertConfig(vocab_size=40, max_position_embeddings=24, **sizes))
    if kind == "electra":
        config = transformers.ElectraConfig(vocab_size=40, embedding_size=8, max_position_embeddings=24, **_SIZES)
        return transformers.ElectraModel(config)
    if kind == "deberta":
        relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
        config = transformers.DebertaV2Config(vocab_size=40, max_position_embeddings=24, **_SIZES, **relative)
        return transformers.DebertaV2Model(config)
    return made(kind).base_model


def loaded(kind: str) -> Loaded:
    return Loaded(below(kind).eval(), tokenizer(30), kind, "of the weights")


def rows() -> dict[str, Tensor]:
    """Three rows of which the last two are padded on the right, as the stream's rows are."""
    ids = torch.randint(2, 30, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) < torch.tensor([[9], [5], [3]])
    return {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}


def over(kind: str, **options: Any) -> Classifier:
    """In evaluation mode, the key map of its head not zero."""
    if options.get("head") == "labels":
        options = {"label_texts": WORDS, **options}
    model = Classifier.from_loaded(loaded(kind), CLASSES, **options).eval()
    key = getattr(model.head, "key", None)
    if key is not None:
        torch.manual_seed(1)
        nn.init.normal_(key)
    return model


@pytest.mark.parametrize("kind", READING)
def test_the_head_reads_the_last_hidden_states(kind: str) -> None:
    """Those that the model itself gives for the same rows."""
    batch, model = rows(), over(kind)
    theirs: Any = below(kind).eval()
    encoder = theirs.get_encoder() if theirs.config.is_encoder_decoder else theirs
    with torch.no_grad():
        states = encoder(**batch).last_hidden_state
        logits = model(**batch).logits
        expected = model.head(states, batch["attention_mask"].bool())
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    assert isinstance(model.head, LinearHead)
    assert model.head.pooling == READING[kind]
    assert logits.shape == (3, 3)
    apart = extract_encoder(below(kind))
    assert all(torch.equal(one, model.encoder.state_dict()[name]) for name, one in apart.state_dict().items())


@pytest.mark.parametrize("head", ["linear", "full", "labels"])
@pytest.mark.parametrize("kind", READING)
def test_padding_never_counts(kind: str, head: Any) -> None:
    """A row alone has the logits that it has in a batch."""
    batch, model = rows(), over(kind, head=head, common=range(2, 9))
    with torch.no_grad():
        together = model(**batch).logits
        alone = [
            model(**{name: value[row : row + 1, :count] for name, value in batch.items()}).logits
            for row, count in enumerate((9, 5, 3))
        ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def test_positions_of_roberta_begin_behind_that_of_padding() -> None:
    """At 2 for tokens and 1 for padding; the released code begins at 0."""
    batch, model = rows(), over("roberta")
    seen: list[Tensor] = []
    table = model.encoder.get_submodule("embeddings.position_embeddings")
    table.register_forward_pre_hook(lambda module, given: seen.append(given[0].clone()))
    with torch.no_grad():
        model(**batch)
    (positions,) = seen
    expected = (torch.arange(9) + PAD + 1).where(batch["attention_mask"].bool(), torch.tensor(PAD))
    assert torch.equal(positions.broadcast_to(3, 9), expected)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", ["bert", "roberta", "llama", "t5"])
def test_saved_and_loaded(kind: str, head: Any, tmp_path: Path) -> None:
    model = over(kind, head=head, common=(5, 3), seed=4)
    model.save_pretrained(tmp_path)
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(back) is Classifier
    assert back.config.classes == ["a", "b", "c"]
    assert back.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert back.config.lineage == {"base": kind, "sha256": "of the weights", "tasks": []}
    assert back.config.common == [3, 5]
    assert not back.training
    with torch.no_grad():
        assert torch.equal(back(**rows()).logits, model(**rows()).logits)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize("head", ["linear", "full", "labels"])
@pytest.mark.parametrize("kind", READING)
def test_every_parameter_is_used(kind: str, head: Any) -> None:
    """As several processes that train together need it; a decoder or a pooler would not be."""
    model = over(kind, head=head, common=range(2, 30)).train()
    nn.functional.cross_entropy(model(**rows()).logits, torch.tensor([0, 1, 2])).backward()
    unused = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    assert unused == []


def test_the_loss_is_the_mean_cross_entropy() -> None:
    model, labels = over("bert"), torch.tensor([0, 2, 1])
    with torch.no_grad():
        found = model(**rows(), labels=labels)
    by_hand = [row.exp().sum().log() - row[label] for row, label in zip(found.logits, labels, strict=True)]
    assert float(found.loss) == pytest.approx(float(sum(by_hand)) / 3, rel=1e-6)
    assert model(**rows()).loss is None


def test_all_tokens_are_real_where_nothing_is_said() -> None:
    model, ids = over("bert", head="full"), rows()["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_token_types_are_handed_on() -> None:
    model, batch = over("bert"), rows()
    with torch.no_grad():
        plain, other = (model(**batch, token_type_ids=torch.full((3, 9), kind)).logits for kind in (0, 1))
        assert torch.equal(plain, model(**batch).logits)
    assert not torch.allclose(plain, other)


def test_sinks_are_the_common_tokens() -> None:
    model, batch = over("bert", head="sink", common=(4, 7)), rows()
    batch["input_ids"][0, 2], batch["input_ids"][0, 6] = 4, 7
    batch["input_ids"][1:] = 9
    with torch.no_grad():
        scales = model.scales(**batch)
    common = torch.isin(batch["input_ids"], torch.tensor([4, 7]))
    assert torch.equal(scales[0] > 0, common[0].expand(3, -1))
    assert torch.equal(scales[1:] > 0, batch["attention_mask"].bool()[1:, None].expand(-1, 3, -1))
    assert over("bert", head="full").common(batch["input_ids"]) is None
    with pytest.raises(UserError, match="head: expected one that scales, got linear"):
        over("bert").scales(**batch)


def test_the_head_is_drawn_from_the_seed() -> None:
    """And the model given stays as it is, as do the random numbers of others."""
    given = loaded("bert")
    before = {name: value.clone() for name, value in given.model.state_dict().items()}
    torch.manual_seed(7)
    heads = [Classifier.from_loaded(given, CLASSES, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(7)))
    first, same, other = (model.head.vectors for model in heads)
    assert torch.equal(first, same)  # type: ignore[arg-type]
    assert not torch.equal(first, other)  # type: ignore[arg-type]
    next(heads[0].parameters()).data.zero_()
    assert all(torch.equal(before[name], value) for name, value in given.model.state_dict().items())


def test_a_model_in_float64_has_a_head_in_float64() -> None:
    given = loaded("bert")
    given.model.double()
    assert {one.dtype for one in Classifier.from_loaded(given, CLASSES, head="full").parameters()} == {torch.float64}


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_measuring_works_on_the_encoder(kind: str) -> None:
    """In a forward of the whole classifier, and what is found is what is found in the model alone."""
    model, theirs, batch = over(kind), below(kind).eval(), rows()
    with torch.no_grad():
        before = model(**batch).logits
        with watching(model.encoder, "entropy") as inside:
            during = model(**batch).logits
        with watching(theirs, "entropy") as alone:
            theirs(**batch)
    torch.testing.assert_close(during, before, rtol=0, atol=1e-5)
    found, expected = (pd.DataFrame(one.rows()) for one in (inside, alone))
    assert len(found) > 0
    pd.testing.assert_frame_equal(found, expected, rtol=0, atol=1e-6)


# -- adapters -------------------------------------------------------------------------------------------


def adapted(kind: str, **options: Any) -> Classifier:
    """With adapters that are not as new ones, which change nothing."""
    model = over(kind, lora={"rank": 2}, **options)
    torch.manual_seed(2)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(one)
    return model


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "deberta", "llama", "gpt2", "t5", "bart"])
def test_below_adapters_the_model_is_frozen(kind: str) -> None:
    """Bit for bit, after steps that train whatever can be trained."""
    model = over(kind, lora={"rank": 2}, head="full")
    with torch.no_grad():
        torch.testing.assert_close(model(**rows()).logits, _plain(kind, model), rtol=0, atol=1e-6)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert {name.startswith("head.") or "lora_" in name for name in trained} == {True}
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = torch.optim.AdamW(list(trained.values()), 0.1)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(**rows()).logits, torch.tensor([0, 1, 2])).backward()
        assert [name for name, one in trained.items() if one.grad is None] == []
        optimizer.step()
    moved = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == set(trained)


def _plain(kind: str, model: Classifier) -> Tensor:
    """What the same head makes of the model as it was given."""
    batch = rows()
    plain = over(kind)
    found: Tensor = model.head(
        plain.states(batch["input_ids"], batch["attention_mask"].bool()), batch["attention_mask"].bool()
    )
    return found


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_adapters_merged_into_the_weights(kind: str) -> None:
    from peft.tuners.lora import LoraLayer

    model = adapted(kind)
    with torch.no_grad():
        apart = model(**rows()).logits
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.merge()  # type: ignore[operator]
        merged = model(**rows()).logits
    torch.testing.assert_close(merged, apart, rtol=0, atol=1e-5)
    assert not torch.allclose(apart, _plain(kind, model), atol=1e-3)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_adapters_are_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model = adapted(kind)
    model.save_pretrained(tmp_path)
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert back.config.lora == {"rank": 2}
    with torch.no_grad():
        assert torch.equal(back(**rows()).logits, model(**rows()).logits)
    can = {name for name, one in model.named_parameters() if one.requires_grad}
    assert {name for name, one in back.named_parameters() if one.requires_grad} == can


def test_rank_alpha_and_targets() -> None:
    model = over("bert", lora={"rank": 3, "alpha": 12, "targets": ["dense"]})
    adapters = {name: one.shape for name, one in model.named_parameters() if "lora_A" in name}
    assert {name.split(".lora_A")[0].rsplit(".", 1)[1] for name in adapters} == {"dense"}
    assert {shape[0] for shape in adapters.values()} == {3}
    scalings = [one.scaling["default"] for one in model.modules() if hasattr(one, "scaling") and hasattr(one, "lora_A")]
    assert set(scalings) == {4.0}


def test_adapters_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"^lora: .*nowhere"):
        over("bert", lora={"rank": 2, "targets": ["nowhere"]})


def test_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"lora needs the package peft: pip install 'regard\[learn\]'"):
        add_lora(below("bert"))


# -- bad input ------------------------------------------------------------------------------------------


def test_a_model_without_hidden_states() -> None:
    class Strange(transformers.PreTrainedConfig):
        model_type = "strange"

    transformers.AutoConfig.register("strange", Strange)

    class Empty(PreTrainedModel):
        config_class = Strange

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.table = nn.Embedding(4, 2)

    with pytest.raises(UserError, match="model: expected one with hidden states, the configuration of strange has no"):
        Classifier.from_loaded(Loaded(Empty(Strange()), tokenizer(3), "empty", None), CLASSES)


def test_a_configuration_that_cannot_be() -> None:
    with pytest.raises(UserError, match="head: expected one of linear, full, uniform, sink, labels, got 'mean'"):
        ClassifierConfig(head="mean")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="pooling: expected one of auto, first, last, mean, got 'second'"):
        ClassifierConfig(pooling="second")
    for scale in (0, -1.0, float("inf"), float("nan"), "20"):
        with pytest.raises(UserError, match="label_scale: expected a number over 0"):
            ClassifierConfig(label_scale=scale)  # type: ignore[arg-type]


# -- the words of labels --------------------------------------------------------------------------------


def vectors_of(model: Classifier) -> Tensor:
    assert isinstance(model.head, LabelTextHead)
    return model.head.vectors


def states_of(kind: str, model: Any, ids: list[int], pooling: str) -> Tensor:
    """What a model itself makes of some tokens, read as `pooling` says."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    with torch.no_grad():
        states = encoder(input_ids=torch.tensor([ids])).last_hidden_state[0].double()
    return {"first": states[0], "last": states[-1], "mean": states.mean(0)}[pooling]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", READING)
def test_labels_are_read_as_texts_are(kind: str) -> None:
    """As the mean of all tokens, or in causal models as the last of them; by the model that was given."""
    model, batch, theirs = over(kind, head="labels"), rows(), below(kind).eval()
    pooling = "last" if READING[kind] == "last" else "mean"
    labels = [states_of(kind, theirs, ids, pooling) for ids in ([3], [5, 4], [6])]
    torch.testing.assert_close(vectors_of(model).double(), torch.stack(labels), rtol=0, atol=1e-5)
    with torch.no_grad():
        found = model(**batch).logits
    for row, count in enumerate((9, 5, 3)):
        text = states_of(kind, theirs, batch["input_ids"][row, :count].tolist(), pooling)
        by_hand = [LABEL_SCALE * float(text @ label / (text.norm() * label.norm())) for label in labels]
        assert found[row].tolist() == pytest.approx(by_hand, abs=1e-3)


def named(classes: tuple[str, ...], **options: Any) -> Classifier:
    """A BERT whose tokenizer puts [CLS] and [SEP] around words that it knows."""
    return Classifier.from_loaded(small_tasks.loaded(), classes, head="labels", **options)


def test_the_words_are_those_of_the_name_or_those_that_are_given() -> None:
    model = named(("cat_dog", "red", "other"), label_texts={"other": "green blue"}, label_scale=5)
    assert model.config.label_texts == {"cat_dog": "cat dog", "red": "red", "other": "green blue"}
    expected = [
        states_of("bert", small_tasks.loaded().model, [2, *map(small_tasks.WORDS.index, words), 3], "mean")
        for words in (("cat", "dog"), ("red",), ("green", "blue"))
    ]
    torch.testing.assert_close(vectors_of(model).double(), torch.stack(expected), rtol=0, atol=1e-5)
    assert model.head.scale == model.config.label_scale == 5.0


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_another_reading(pooling: str) -> None:
    model = named(("cat", "dog"), pooling=pooling)
    expected = [
        states_of("bert", small_tasks.loaded().model, [2, small_tasks.WORDS.index(word), 3], pooling)
        for word in ("cat", "dog")
    ]
    torch.testing.assert_close(vectors_of(model).double(), torch.stack(expected), rtol=0, atol=1e-5)


def test_labels_are_read_without_dropout_and_the_model_given_stays_in_training() -> None:
    given = small_tasks.loaded(dropout=0.5)
    given.model.train()
    found = [vectors_of(Classifier.from_loaded(given, ("cat", "dog", "red"), head="labels")) for _ in range(2)]
    assert torch.equal(*found)
    assert all(module.training for module in given.model.modules())
    apart = vectors_of(named(("red", "cat_dog", "dog")))
    torch.testing.assert_close(found[0][[2, 1]], apart[[0, 2]], rtol=0, atol=1e-6)


def test_the_encoder_learns_and_the_labels_stay() -> None:
    """Gradients reach every weight below; there is no other; and what is learnt is what is asked for."""
    model, drawn = named(("cat", "dog")), small_tasks.examples(("cat", "dog"), 8, random.Random(0))
    batch = dict(small_tasks.tokenizer()([text for (text,) in drawn.texts], padding=True, return_tensors="pt"))
    labels, before = torch.tensor(drawn.labels), vectors_of(model).clone()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert all(name.startswith("encoder.") for name in trained)
    optimizer = torch.optim.AdamW(list(trained.values()), 5e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(model(**batch, labels=labels).loss)
        losses[-1].backward()
        assert [name for name, one in trained.items() if one.grad is None] == []
        optimizer.step()
    assert torch.equal(vectors_of(model), before)
    assert float(losses[-1].detach()) < 0.3 * float(losses[0].detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_saved_with_their_labels(dtype: torch.dtype, lora: Any, tmp_path: Path) -> None:
    """In float32 at least, whatever the model is in; below adapters the same; read without a tokenizer."""
    classes = ("cat", "dog", "red")
    model = Classifier.from_loaded(
        small_tasks.loaded(dtype=dtype), classes, head="labels", lora=lora, label_scale=7
    ).eval()
    assert vectors_of(model).dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(
        vectors_of(model), vectors_of(Classifier.from_loaded(small_tasks.loaded(dtype=dtype), classes, head="labels"))
    )
    model.save_pretrained(tmp_path)
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert back.config.label_texts == {name: name for name in classes}
    assert torch.equal(vectors_of(back), vectors_of(model))
    assert vectors_of(back).dtype == vectors_of(model).dtype
    ids = torch.tensor([[2, 11, 5, 3], [2, 12, 13, 3]])
    with torch.no_grad():
        found, expected = back(ids).logits, model(ids).logits
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(found, expected)


def test_labels_that_were_not_saved(tmp_path: Path) -> None:
    named(("cat", "dog")).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["head.vectors"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model: expected the states of the labels' words, head.vectors, in "):
        Classifier.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "classes, options, told",
    [
        (
            ("cat_dog", "red", "catDog"),
            {"label_texts": {"catDog": "cat dog"}},
            "labels collide: 'cat_dog' and 'catDog'",
        ),
        (("cat", "red", "cat"), {}, "labels collide: 'cat' and 'cat'"),
        (("bird", "fish"), {}, "labels collide: 'bird' and 'fish'"),
        (("cat", "dog"), {"label_texts": {"cow": "dog"}}, "label_texts: expected names out of cat, dog, got 'cow'"),
        (("cat", "_"), {}, "label_texts: expected words for the class '_', got none"),
        (("cat", "dog"), {"label_texts": {"dog": "cat " * 20}}, "label_texts: expected at most 16 tokens for a class,"),
        (("cat", "dog"), {"pooling": "middle"}, "pooling: expected one of auto, first, last, mean, got 'middle'"),
    ],
)
def test_labels_that_cannot_be(classes: tuple[str, ...], options: Any, told: str) -> None:
    with pytest.raises(UserError) as raised:
        named(classes, **options)
    assert str(raised.value).startswith(told)


def test_words_that_no_head_reads() -> None:
    with pytest.raises(UserError, match="label_texts: expected none with the head linear, which does not read them"):
        over("bert", label_texts=WORDS)


def test_other_words_of_the_vocabulary_are_no_labels_and_are_saved(tmp_path: Path) -> None:
    classifier = Classifier.from_loaded(small_tasks.loaded(), ["blue", "green"], head="labels", label_words=100)
    words = sample_background_words(small_tasks.loaded().tokenizer, ["blue", "green"], 100)
    assert words == sample_background_words(small_tasks.loaded().tokenizer, ["green", "blue"], 100)
    assert set(words) == set(sample_background_words(small_tasks.loaded().tokenizer, ["not Green", "blue-green"], 1000))
    assert classifier.config.label_words == len(words) == len(classifier.head.others) > 0
    assert not {"blue", "green"} & set(words)
    assert all(word.isalpha() for word in words)
    classifier.save_pretrained(tmp_path)
    again = Classifier.from_pretrained(tmp_path)
    assert torch.equal(again.head.others, classifier.head.others)
    with pytest.raises(UserError, match="expected none with the head linear"):
        Classifier.from_loaded(small_tasks.loaded(), ["blue", "green"], label_words=3)


@pytest.mark.exhaustive
def test_a_trainer_takes_the_same_steps_however_batches_are_split(tmp_path: Path) -> None:
    history = []
    for size, steps in ((8, 1), (2, 4)):
        model = over("bert").eval()
        data = [{"input_ids": torch.arange(3, 11) + row, "labels": row % 2} for row in range(8)]
        options: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        options |= {"max_steps": 1, "logging_steps": 1, "max_grad_norm": 1e9, "report_to": [], "use_cpu": True}
        options |= {"disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        trainer = transformers.Trainer(
            model, transformers.TrainingArguments(str(tmp_path), **options), train_dataset=data
        )
        trainer.train()
        history.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])
    assert history[1] == pytest.approx(history[0], rel=1e-3)


def paligemma() -> Any:
    text = {"vocab_size": 40, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": PAD, **_SIZES}
    return transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**_SIZES, image_size=16, patch_size=8),
        text_config=transformers.GemmaConfig(**text), image_token_id=39, projection_dim=16,
    )  # fmt: skip


@pytest.mark.every_value
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_text_model_behind_images_is_read_at_its_last_token(implementation: str) -> None:
    """With eager attention the first token of PaliGemma sees itself alone: its state was the same for all texts."""
    base = transformers.PaliGemmaModel._from_config(paligemma(), attn_implementation=implementation).eval()
    model = Classifier.from_loaded(Loaded(base, tokenizer(30), "paligemma", "of the weights"), CLASSES).eval()
    assert model.head.pooling == "last"
    one, other = torch.tensor([[1, 5, 6, 7]]), torch.tensor([[1, 8, 9, 10]])
    with torch.no_grad():
        logits = [model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for ids in (one, other)]
    assert not torch.equal(*logits)


def test_the_width_of_a_model_that_reads_more_than_text_is_that_of_its_text_model() -> None:
    """That of PaliGemma's configuration is 2048 whatever the text model has: a traceback said that shapes differ."""
    config = paligemma()
    assert config.hidden_size == 2048
    model = Loaded(transformers.PaliGemmaModel(config).eval(), tokenizer(30), "paligemma", "of the weights")
    assert Classifier.from_loaded(model, CLASSES)(**rows()).logits.shape == (3, 3)
    sizes = {
        "vision_config": {"model_type": "siglip_vision_model", **_SIZES},
        "text_config": {"model_type": "llama", **_SIZES},
    }
    llava = transformers.LlavaModel(transformers.LlavaConfig(**sizes))
    with pytest.raises(UserError, match="llava has no width; of a model that reads more than text, save its text mode"):
        Classifier.from_loaded(Loaded(llava, tokenizer(30), "llava", "of the weights"), CLASSES)
