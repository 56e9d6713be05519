"""What a run depends on is what was given, not what a version of a library adds to it."""

from typing import Any

from transformers import BertConfig

from regard.commands.learn.config import LearnConfig
from regard.commands.learn.identity import MODEL_CONFIG, run_identity
from regard.models.pretrained import Loaded
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
    return run_identity(LearnConfig(), found, stream(3), {})[MODEL_CONFIG]


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
