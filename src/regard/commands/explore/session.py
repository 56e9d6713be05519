"""A request of the page, and its answer: JSON both, and nothing is kept between two of them but what was computed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from regard import models
from regard.attention.spec import ATTENTIONS
from regard.commands.explore.prediction import Prediction, predict, tabulate
from regard.commands.explore.stages import Stage, Stages
from regard.commands.look.config import LookConfig
from regard.commands.look.run import look_at_inputs
from regard.constants import Constants, Head
from regard.constants.constants import SOURCES
from regard.errors import UserError
from regard.hooks.head_operations import ConstantHead, HeadOperation, list_heads, replacing_each_head
from regard.hooks.layers import eval_no_grad, model_fingerprint
from regard.hooks.operation import parse_attention

MAX_CHARACTERS = 20_000
MAX_NAME = 80
"""Characters of a text, and of the name of an operation."""
AVERAGE = "average"


@dataclass(frozen=True)
class Request:
    """What the page asks for: a text (or two), what heads compute instead, by site.layer.head, and which stage."""

    text: str
    pair: str
    heads: Mapping[Head, str]
    stage: int

    @classmethod
    def parse(cls, data: Any, stages: int) -> Request:
        """Return a request of parsed JSON. Raises UserError for anything else."""
        if not isinstance(data, dict) or data.keys() - {"text", "pair", "heads", "stage"}:
            raise UserError("request: expected an object of text, pair, heads and stage")
        text, pair, heads, stage = (data.get(name, other) for name, other in _DEFAULTS.items())
        for name, value in (("text", text), ("pair", pair)):
            if not isinstance(value, str):
                raise UserError(f"{name}: expected a text, got {value!r:.40}")
            if len(value) > MAX_CHARACTERS:
                raise UserError(f"{name}: expected at most {MAX_CHARACTERS:,} characters, got {len(value):,}")
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise UserError(f"{name}: expected whole characters, got half of a surrogate pair")
        if not text.strip():
            raise UserError("text: expected a text, got none")
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < stages:
            raise UserError(f"stage: expected a number from 0 to {stages - 1}")
        if not isinstance(heads, dict):
            raise UserError("heads: expected an object of operations by site.layer.head")
        return cls(text, pair.strip() and pair, {_parse_head(key): _parse_name(heads[key]) for key in heads}, stage)


_DEFAULTS: dict[str, Any] = {"text": "", "pair": "", "heads": {}, "stage": 0}


def _parse_head(key: str) -> Head:
    site, *numbers = key[:MAX_NAME].rsplit(".", 2)
    if len(numbers) != 2 or not all(number.isascii() and number.isdecimal() and len(number) < 6 for number in numbers):
        raise UserError("heads: expected keys such as encoder.0.3")
    return site, int(numbers[0]), int(numbers[1])


def _parse_name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise UserError(f"heads: expected the name of an operation, of at most {MAX_NAME} characters")
    return value


def operation_names() -> list[str]:
    """Return the operations that every trained model can be given, without softmax itself."""
    names = []
    for name in ATTENTIONS:
        try:
            parse_attention(name)
        except UserError:
            continue
        names.append(name)
    return [name for name in names if name != "softmax"]


class Session:
    """A model, or the stages of a run, with averages from a file if there are any.

    `length` is the number of tokens that are read of a text.
    """

    def __init__(self, stages: Stages, constants: Path | None, length: int) -> None:
        self.stages, self.length = stages, length
        self.constants = None if constants is None else Constants.load(constants)
        if self.constants is not None and self.constants.has_fixed_columns:
            raise UserError(
                "constants: expected averages of the layout natural, got those of the layout paper; `regard replace "
                "--special-token-layout natural` makes such"
            )
        self._plain = lru_cache(maxsize=8)(self._predict_plain)
        stage = stages.get(len(stages.names) - 1)
        if self.constants is not None:
            self.constants.check_model(model_fingerprint(stage.loaded.model, stage.layers))
        self.heads = list_heads(stage.layers)
        self.reads_pairs = stage.reads_pairs
        self.mask_token = stage.loaded.tokenizer.mask_token if stage.kind == "mask" else None

    def settings(self) -> dict[str, Any]:
        """Return what the page is made of."""
        words = ["The", "cat", "sat", "on", "the", self.mask_token or "mat", "because", "it", "was"]
        return {
            "title": self.stages.title,
            "text": " ".join(words),
            "heads": [[site, layer, number] for (site, layer), number in self.heads.items()],
            "constants": [*SOURCES, *([AVERAGE] if self.constants else [])],
            "operations": operation_names(),
            "stages": list(self.stages.names),
            "reads_pairs": self.reads_pairs,
            "characters": MAX_CHARACTERS,
        }

    def answer(self, data: Any) -> dict[str, Any]:
        """Return the look at a text with heads replaced, and predictions with and without. Raises UserError.

        What Regard warns of meanwhile are notes of the look, and of a refusal.
        """
        refusal: UserError | None = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                answer = self._answer(data)
            except UserError as error:
                refusal = error
        told = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
        if refusal is not None:
            raise UserError("; warned of: ".join([str(refusal), *dict.fromkeys(told)])) from refusal
        look = {**answer["look"], "notes": list(dict.fromkeys([*answer["look"]["notes"], *told]))}
        return {**answer, "look": look}

    def _answer(self, data: Any) -> dict[str, Any]:
        start, request = time.perf_counter(), Request.parse(data, len(self.stages.names))
        stage = self.stages.get(request.stage)
        if request.pair and not self.reads_pairs:
            raise UserError("pair: this model reads one text")
        inputs, pair_inputs, number = self._encode(stage, request.text, request.pair)
        read = inputs["input_ids"].shape[1]
        notes = [f"There are {number:,} tokens, of which the first {read:,} are read."] if number > read else []
        columns = {}
        if request.stage:
            columns["before the task"] = self._plain(request.stage - 1, request.text, request.pair)
        columns["after the task" if len(self.stages.names) > 1 else "unchanged"] = self._plain(
            request.stage, request.text, request.pair
        )
        tokens = max(value.shape[1] for value in inputs.values() if isinstance(value, Tensor))
        operations = self._operations(stage, request, max(tokens, self.length))
        config = LookConfig(length=self.length, skip_verification=True)
        source = {"text": request.text[:200], "notes": notes}
        model = stage.loaded.model
        outputs: list[Any] = []
        with eval_no_grad(model), stage.adapters(inputs), replacing_each_head(model, operations, stage.layers):
            of_pair = stage.answerer(**pair_inputs) if pair_inputs else None
            look = look_at_inputs(
                stage.loaded, inputs, source, config, lambda: outputs.append(stage.answerer(**inputs))
            )
            look["router"] = stage.shares()
            columns["with replaced heads"] = predict(stage, inputs, outputs[0], of_pair)
        look["title"] = stage.name
        return {"look": look, "prediction": tabulate(stage, columns), "seconds": time.perf_counter() - start}

    def _encode(self, stage: Stage, text: str, pair: str) -> tuple[dict[str, Any], dict[str, Any] | None, int]:
        limits = (self.length, models.maximum_length(stage.loaded.model, stage.loaded.tokenizer))
        limit = min(limit for limit in limits if limit is not None)
        if stage.kind != "states" or not pair:
            inputs, number = stage.encode(text, pair, limit)
            return inputs, None, number
        inputs, number = stage.encode(text, "", limit)
        pair_inputs, pair_number = stage.encode(pair, "", limit)
        return inputs, pair_inputs, max(number, pair_number)

    def _predict_plain(self, index: int, text: str, pair: str) -> Prediction:
        stage = self.stages.get(index)
        inputs, pair_inputs, _ = self._encode(stage, text, pair)
        with eval_no_grad(stage.loaded.model), stage.adapters(inputs):
            of_pair = stage.answerer(**pair_inputs) if pair_inputs else None
            return predict(stage, inputs, stage.answerer(**inputs), of_pair)

    def _operations(self, stage: Stage, request: Request, tokens: int) -> dict[Head, HeadOperation]:
        constants = self.constants
        if AVERAGE in request.heads.values():
            if constants is None:
                raise UserError("average: expected averages, which --constants FILE gives")
            constants.check_model(model_fingerprint(stage.loaded.model, stage.layers))
            constants = constants.note_row_sums(layer.key for layer in stage.layers if layer.open_rows)
        return {head: self._operation(constants, head, name, tokens) for head, name in request.heads.items()}

    def _operation(self, constants: Constants | None, head: Head, name: str, tokens: int) -> HeadOperation:
        if name in SOURCES:
            return name
        if name != AVERAGE:
            spec = parse_attention(name)
            if max(spec.window or 0, spec.prefix) > MAX_CHARACTERS:
                raise UserError(f"attention: expected a window of at most {MAX_CHARACTERS:,} tokens")
            return name
        assert constants is not None
        matrix = constants.matrices.get(head[:2])
        if matrix is None or head[2] >= len(matrix):
            raise UserError(f"average: the constants have no head {head[2]} in layer {head[1]} ({head[0]})")
        return ConstantHead(matrix[head[2]], constants.sums_of(head[:2])[head[2]])
