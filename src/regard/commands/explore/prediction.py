"""What a forward predicts, and a table that sets several forwards side by side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from regard.commands.explore.stages import Stage
from regard.report.labels import visible

TOP = 5
BLANK = "\u2581"  # how SentencePiece writes the blank before a word
TITLES = {
    "class": "Class",
    "mask": "Word at the first mask",
    "next": "Next word",
    "first": "First word of the answer",
    "states": "",
}


@dataclass(frozen=True)
class Prediction:
    """What one forward says; nothing of what it does not.

    Attributes:
        probabilities: Of classes or words; NaN for a class that is not possible.
        outputs: Of a regression, or a model with one output: its numbers.
        loss: Mean cross-entropy of the text's own words after the first, in nats.
        state: Mean of the last hidden states (width).
        cosine: Of the mean states of two texts.
    """

    probabilities: Tensor | None = None
    outputs: Tensor | None = None
    loss: float | None = None
    state: Tensor | None = None
    cosine: float | None = None


def predict(stage: Stage, inputs: dict[str, Any], outputs: Any, of_pair: Any = None) -> Prediction:
    """Return what the outputs of a stage say of its inputs, and of those of a second text that is read by itself."""
    if stage.kind == "states":
        state = _mean_state(outputs)
        cosine = None if of_pair is None else float(cosine_similarity(state, _mean_state(of_pair), dim=0))
        return Prediction(state=state, cosine=cosine)
    logits = outputs.logits[0].cpu().double()
    if stage.kind == "class":
        own_head = stage.answerer is stage.loaded.model  # else a learnt classifier around it, of one label
        problem_type = getattr(stage.loaded.model.config, "problem_type", None) if own_head else None
        if len(stage.classes) == 1 or problem_type == "regression":
            return Prediction(outputs=logits)
        if problem_type == "multi_label_classification":
            return Prediction(probabilities=logits.sigmoid())
        banned = torch.tensor([name is None for name in stage.classes])
        shares = logits.masked_fill(banned, -torch.inf).softmax(-1)
        return Prediction(probabilities=shares.masked_fill(banned, torch.nan))
    ids = inputs["input_ids"][0].cpu()
    if stage.kind == "mask":
        masks = (ids == stage.loaded.tokenizer.mask_token_id).nonzero()[:, 0]
        return Prediction(probabilities=logits[int(masks[0])].softmax(-1) if len(masks) else None)
    if stage.kind == "first":
        return Prediction(probabilities=logits[0].softmax(-1))
    return Prediction(probabilities=logits[-1].softmax(-1), loss=float(cross_entropy(logits[:-1], ids[1:])))


def _mean_state(outputs: Any) -> Tensor:
    return outputs.last_hidden_state[0].cpu().double().mean(0)


def tabulate(stage: Stage, columns: Mapping[str, Prediction]) -> dict[str, Any]:
    """Return the table of predictions by column, the last with replaced heads and the one before it without.

    It has the `TOP` most probable of each column, the most probable anywhere first.
    """
    predictions = list(columns.values())
    rows, notes = _most_probable(stage, predictions), []
    if stage.kind == "mask" and all(prediction.probabilities is None for prediction in predictions):
        notes.append(f"Put {stage.loaded.tokenizer.mask_token} into the text to see which word the model puts there.")
    more = _other_numbers(stage, predictions)
    return {"title": TITLES[stage.kind], "columns": list(columns), "rows": rows, "more": more, "notes": notes}


def _most_probable(stage: Stage, predictions: Sequence[Prediction]) -> list[list[Any]]:
    """Return a row, a name and a value by column, for each class or word that is among the first of a column."""
    columns = [prediction.probabilities for prediction in predictions]
    possible = [shares.nan_to_num(-1) for shares in columns if shares is not None]
    if not possible:
        return []
    first = {int(index) for shares in possible for index in shares.topk(min(TOP, len(shares))).indices}
    best = torch.stack(possible).amax(0)
    indices = sorted((index for index in first if best[index] >= 0), key=lambda index: -float(best[index]))
    return [[_name(stage, index), [_number(shares, index) for shares in columns]] for index in indices]


def _other_numbers(stage: Stage, predictions: Sequence[Prediction]) -> list[list[Any]]:
    """Return a row, a name and a value by column, for each number that is no probability."""
    rows: list[list[Any]] = []
    if any(prediction.outputs is not None for prediction in predictions):
        for index, name in enumerate(stage.classes):
            rows.append([f"Output ({name})", [_number(prediction.outputs, index) for prediction in predictions]])
    if any(prediction.loss is not None for prediction in predictions):
        rows.append(["Mean loss of the text, in nats a token", [_number(one.loss) for one in predictions]])
    if stage.kind == "states":
        reference = predictions[-2].state
        assert reference is not None
        same = [_number(cosine_similarity(one.state, reference, dim=0)) for one in predictions if one.state is not None]
        rows.append(["Cosine of the text's mean state to that of the unchanged model", same])
        if predictions[-1].cosine is not None:
            rows.append(["Cosine of the two texts' mean states", [_number(one.cosine) for one in predictions]])
    return rows


def _number(value: Tensor | float | None, index: int | None = None) -> float | None:
    """Return a number, or one of a tensor by its index, as JSON has it."""
    if isinstance(value, Tensor) and index is not None:
        value = value[index]
    return float(value) if value is not None and math.isfinite(value) else None


def _name(stage: Stage, index: int) -> str:
    if stage.kind == "class":
        return str(stage.classes[index])
    text, token = stage.loaded.tokenizer.decode([index]), str(stage.loaded.tokenizer.convert_ids_to_tokens(index))
    if "\ufffd" in text:  # a part of a character: several tokens would read the same
        text = token
    elif token.startswith(BLANK) and not text.startswith(" "):  # SentencePiece decodes no blank at the beginning
        text = f" {text}"
    return visible(text) or f"#{index}"
