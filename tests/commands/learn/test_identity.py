"""What a run depends on is what was given, not what a version of a library adds to it."""

import importlib
from typing import Any

import pytest
from transformers import BertConfig

from regard import learn
from regard.commands.learn.config import LearnConfig
from regard.commands.learn.identity import MODEL_CONFIG, REASONS, TOKENIZER, run_identity
from regard.errors import UserError
from regard.models.pretrained import Loaded
from regard.runs.work_dir import check_same_identity
from tests.continual.small_tasks import loaded, stream

GIVEN = {
    "model_type": "bert",
    "vocab_size": 18,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}


class NewerConfig(BertConfig):
    """As of a version that knows one more field, which the file of a model does not name."""

    scale: float = 1.0


class PartsConfig(BertConfig):
    """As of a model of several parts, which is made of arguments alone."""

    def __init__(self, parts: dict[str, Any], **fields: Any) -> None:
        super().__init__(**fields)
        self.parts = parts


def configuration(found: Loaded) -> Any:
    return run_identity(LearnConfig(), found, stream(3), {}, "")[MODEL_CONFIG]


def test_a_configuration_is_what_it_has_beside_the_defaults_of_its_class() -> None:
    """A run could not be resumed by a version of Transformers that knows one more field."""
    found = loaded()
    assert configuration(found) == GIVEN
    found.model.config = NewerConfig(**GIVEN)
    assert configuration(found) == GIVEN
    found.model.config = NewerConfig(**GIVEN, scale=2.0)
    assert configuration(found) == GIVEN | {"scale": 2.0}


def test_parts_of_a_configuration_are_told_without_how_they_were_written() -> None:
    found = loaded()
    parts = {"text": {"width": 4, "dtype": "float16", "_name_or_path": "/here"}, "rates": [1, 2]}
    found.model.config = PartsConfig(parts, **GIVEN)
    told = configuration(found)
    assert told["parts"] == {"text": {"width": 4}, "rates": [1, 2]}
    assert told.items() >= GIVEN.items()


def test_another_tokenizer_may_be_another_version_of_its_library() -> None:
    """It was said to have changed and to be restored, where the file was as before and the library newer."""
    before, now = (run_identity(LearnConfig(), loaded(), stream(3), {}, sha256) for sha256 in ("a" * 64, "b" * 64))
    with pytest.raises(UserError, match=r"^cannot resume: the tokenizer is another .* package tokenizers, now \d"):
        check_same_identity(before, now, REASONS)


def test_the_hash_of_a_tokenizer_is_computed_once_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large vocabulary it takes a second."""
    hashed: list[Any] = []
    monkeypatch.setattr(
        importlib.import_module("regard.commands.learn.run"), "tokenizer_hash", lambda one: hashed.append(one) or "a"
    )
    found = learn(stream(2), "probe", loaded(), num_probing_epochs=1, diagnostic_samples=0)
    assert (found.metadata["model"][TOKENIZER], len(hashed)) == ("a", 1)
