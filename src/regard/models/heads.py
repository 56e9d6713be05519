"""Classification heads on hidden states: linear, pre-scaling (which weights tokens), and by the labels' words."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.errors import UserError, check_choice
from regard.models.limits import maximum_length
from regard.models.model_files import Loaded, eval_mode

HeadName = Literal["linear", "full", "uniform", "sink", "labels"]
HEADS: tuple[HeadName, ...] = get_args(HeadName)
Pooling = Literal["first", "last", "mean"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
LABEL_SCALE = 20.0  # factor of cosines: the inverse temperature with which sentence models are usually trained
_MASKED = -1e30
_BATCH_SIZE = 64
_MIN_LETTERS = 3  # minimum letters of a background word
_SPACE_MARKS = "\u0120\u2581"  # how byte-level and SentencePiece vocabularies write the space before a word


class ClassVectorHead(nn.Module):
    """A head with a trained vector (width,) and a bias for each class."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.vectors = nn.Parameter(torch.empty(classes, width))
        self.bias = nn.Parameter(torch.zeros(classes))
        self.reset()

    def reset(self) -> None:
        """Initialize the class vectors with N(0, 0.02), like BERT, and all else with zero."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        nn.init.normal_(self.vectors, std=0.02)


class LinearHead(ClassVectorHead):
    """A linear layer on the state of the first token ([CLS]) or the last (causal models), or on their mean."""

    def __init__(self, width: int, classes: int, *, pooling: Pooling = "first", dropout: float = 0.1) -> None:
        super().__init__(width, classes, dropout)
        self.pooling = pooling

    def forward(self, states: Tensor, mask: Tensor, common: Tensor | None = None) -> Tensor:
        """Return the logits (row, class) of states (row, token, width); `mask` (row, token) is False at padding."""
        return self.dropout(pool_states(states, mask, self.pooling)) @ self.vectors.T + self.bias


class PreScalingHead(ClassVectorHead):
    """Class vectors that weight the tokens of a text before they read it.

    A = softmax over tokens of V f(H)ᵀ / √d and s_c = ⟨V_c, (A H)_c⟩ + b_c. V is both query and read-out; f is a linear
    map initialized to zero, so that all tokens start with the same weight. `kind`: "full" as above, "uniform" with
    A = 1/n, "sink" with the softmax over common tokens only (over all tokens of a text without any). Dropout is on A.

    Since f(h) = W h + b, V f(H)ᵀ = (V W) Hᵀ + V b, and V b cancels in the softmax. So no token is mapped.

    Source: Pre-scaling (arXiv 2410.05648, section 4).
    """

    def __init__(
        self, width: int, classes: int, *, kind: Literal["full", "uniform", "sink"] = "full", dropout: float = 0.1
    ) -> None:
        super().__init__(width, classes, dropout)
        self.kind = kind
        self.key = None if kind == "uniform" else nn.Parameter(torch.zeros(width, width))

    def forward(self, states: Tensor, mask: Tensor, common: Tensor | None = None) -> Tensor:
        """Return the logits (row, class) of states; `common` (row, token) marks common tokens, for the kind "sink"."""
        scores = self.vectors @ states.transpose(1, 2)
        return (self.dropout(self.scales(states, mask, common)) * scores).sum(-1) + self.bias

    def scales(self, states: Tensor, mask: Tensor, common: Tensor | None = None) -> Tensor:
        """Return A, the weights (row, class, token), which sum to 1 over the tokens and are 0 at padding."""
        allowed = self._allowed_tokens(mask, common)
        if self.key is None:
            uniform = allowed.to(states.dtype) / allowed.sum(-1, keepdim=True)
            return uniform[:, None].expand(-1, len(self.vectors), -1)
        scores = (self.vectors @ self.key) @ states.transpose(1, 2) / math.sqrt(states.shape[-1])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return scores.masked_fill(~allowed[:, None], _MASKED).softmax(-1).to(states.dtype)

    def _allowed_tokens(self, mask: Tensor, common: Tensor | None) -> Tensor:
        if self.kind != "sink":
            return mask
        if common is None:
            raise UserError("head: sink scaling needs to know which tokens are common, got none")
        common = mask & common
        return torch.where(common.any(-1, keepdim=True), common, mask)


class LabelTextHead(nn.Module):
    """Classes by their labels' words: scale · cos(h, E_c) for a text's pooled state h and the label's state E_c.

    `vectors` (class, width) are the states E of the untrained model: buffers, NaN until they are set. Everything is
    computed in float32 or wider. `others` (word, width) are the states of words that are no labels. In training they
    form one more class, the last, so that a text comes to be near its label, not only nearer than to other labels.
    """

    vectors: Tensor
    others: Tensor

    def __init__(
        self, width: int, classes: int, *, pooling: Pooling = "mean", scale: float = LABEL_SCALE, words: int = 0
    ) -> None:
        super().__init__()
        self.pooling, self.scale = pooling, scale
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("vectors", torch.empty(classes, width, dtype=dtype))
        self.register_buffer("others", torch.empty(words, width, dtype=dtype))
        self.reset()

    def reset(self) -> None:
        nn.init.constant_(self.vectors, math.nan)
        nn.init.constant_(self.others, math.nan)

    def forward(self, states: Tensor, mask: Tensor, common: Tensor | None = None) -> Tensor:
        """Return the logits (row, class), from −scale to scale; in training log Σ exp of other words follows."""
        with torch.autocast(states.device.type, enabled=False):
            states = states.to(torch.promote_types(states.dtype, torch.float32))
            pooled = nn.functional.normalize(pool_states(states, mask, self.pooling), dim=-1)
            logits = self._scaled_cosines(pooled, self.vectors)
            if not self.training or not len(self.others):
                return logits
            return torch.cat([logits, self._scaled_cosines(pooled, self.others).logsumexp(-1, keepdim=True)], dim=-1)

    def _scaled_cosines(self, pooled: Tensor, vectors: Tensor) -> Tensor:
        return self.scale * pooled @ nn.functional.normalize(vectors.to(pooled.dtype), dim=-1).T


def split_label(label: str) -> str:
    """Split a label into words at underscores and at capitals within a word.

    "EducationalInstitution" becomes "Educational Institution", "not_entailment" becomes "not entailment".
    """
    signs = []
    for index, sign in enumerate(label):
        previous, following = label[index - 1 : index], label[index + 1 : index + 2]
        begins = previous.islower() or previous.isdigit() or (previous.isupper() and following.islower())
        signs.append(f" {sign}" if sign.isupper() and begins else sign)
    return " ".join("".join(signs).replace("_", " ").split())


def pool_states(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool states (row, token, width) to (row, width): those of the first or last real token, or their mean."""
    if pooling == "mean":
        weights = mask.to(states.dtype) / mask.sum(-1, keepdim=True)
        return (weights[:, None] @ states).squeeze(1)
    position = torch.arange(mask.shape[1], device=mask.device)
    length = mask.shape[1]
    index = (position - length * ~mask).argmax(-1) if pooling == "last" else (position + length * ~mask).argmin(-1)
    return states[torch.arange(len(states), device=states.device), index]


def make_head(
    name: HeadName, width: int, classes: int, *, pooling: Pooling, dropout: float, **label_options: Any
) -> nn.Module:
    """Make a head by name; `label_options` (`scale`, `words`) are of the head "labels"."""
    check_choice("head", name, HEADS)
    if name == "linear":
        return LinearHead(width, classes, pooling=pooling, dropout=dropout)
    if name == "labels":
        return LabelTextHead(width, classes, pooling=pooling, **label_options)
    return PreScalingHead(width, classes, kind=name, dropout=dropout)


def resolve_label_texts(classes: Sequence[str], texts: Mapping[str, str]) -> dict[str, str]:
    """Return the words of each class: from `texts`, or else those of its name."""
    for name in classes:
        if list(classes).count(name) > 1:
            raise UserError(f"labels collide: {name!r} and {name!r} are the same class; expected each once")
    for name in texts:
        if name not in classes:
            raise UserError(f"label_texts: expected names out of {', '.join(classes)}, got {name!r}")
    resolved = {name: texts.get(name, split_label(name)) for name in classes}
    for name, words in resolved.items():
        if not words.strip():
            raise UserError(f"label_texts: expected words for the class {name!r}, got none")
    return resolved


def find_same_words(classes: Sequence[str], tokenizer: Any) -> tuple[str, str] | None:
    """Return the first two class names whose words are the same tokens; None if all differ."""
    words = [split_label(name) for name in classes]
    return _find_same_tokens(classes, tokenizer(words, padding=False, truncation=False, verbose=False)["input_ids"])


def find_longer_words(classes: Sequence[str], tokenizer: Any, max_length: int) -> str | None:
    """Return the first class name whose words are more tokens than a model takes; None without one."""
    words = [split_label(name) for name in classes]
    ids = tokenizer(words, padding=False, truncation=False, verbose=False)["input_ids"]
    return next((name for name, row in zip(classes, ids, strict=True) if len(row) > max_length), None)


def _find_same_tokens(classes: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[str, str] | None:
    first_class: dict[tuple[int, ...], str] = {}
    pairs = ((first_class.setdefault(tuple(row), name), name) for name, row in zip(classes, ids, strict=True))
    return next(((other, name) for other, name in pairs if other != name), None)


def are_distinct_words(classes: Sequence[str], tokenizer: Any, max_length: int | None = None) -> bool:
    """Whether a model may know all class names as words that differ.

    No two are the same tokens, or the same but for digits, as "class 1" and "class 2"; none has a token that is
    unknown, no fewer tokens than letters (as single letters, and scripts that the vocabulary spells), or too many.
    """
    words = [split_label(name) for name in classes]
    texts = ["".join(sign for sign in name if not sign.isdigit()).casefold().strip() for name in words]
    ids: list[list[int]] = tokenizer(words, padding=False, truncation=False, verbose=False)["input_ids"]
    special, limit = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}, max_length or math.inf
    return (
        min(len(set(texts)), len(set(map(tuple, ids)))) == len(classes)
        and all(tokenizer.unk_token_id not in row and len(row) <= limit for row in ids)
        and all(
            sum(number not in special for number in row) < sum(map(str.isalpha, name))
            for row, name in zip(ids, words, strict=True)
        )
    )


def sample_background_words(tokenizer: Any, texts: Sequence[str], count: int) -> list[str]:
    """Return words of the vocabulary that are in none of the texts, always the same ones, whatever else is there.

    There may be fewer than `count`, since words within a longer text are excluded after sampling.
    """
    labels = {text.casefold() for text in texts}
    label_words = {word for text in labels for word in re.findall(r"\w+", text)}
    vocabulary = {token.lstrip(_SPACE_MARKS).casefold() for token in tokenizer.get_vocab()}
    words = [word for word in vocabulary if word.isalpha() and len(word) >= _MIN_LETTERS and word not in labels]
    words.sort(key=lambda word: hashlib.sha256(word.encode()).digest())
    return [word for word in words[:count] if word not in label_words]


def encode_labels(loaded: Loaded, encoder: PreTrainedModel, classes: Mapping[str, str], pooling: Pooling) -> Tensor:
    """Return the pooled states (class, width) of the words of classes, which are given by name."""
    texts = list(classes.values())
    ids = loaded.tokenizer(texts, padding=False, truncation=False, verbose=False)["input_ids"]
    _check_tokens(list(classes), ids, maximum_length(loaded.model, loaded.tokenizer))
    return encode_texts(loaded.tokenizer, encoder, texts, pooling)


@torch.no_grad()
def encode_texts(tokenizer: Any, encoder: PreTrainedModel, texts: Sequence[str], pooling: Pooling) -> Tensor:
    """Return the pooled states (text, width) in float32 or wider, each from its text alone: no batch has padding."""
    encoding = tokenizer(list(texts), padding=False, truncation=False, verbose=False)
    names = [name for name in ("input_ids", "token_type_ids") if name in encoding]
    lengths = [len(ids) for ids in encoding["input_ids"]]
    dtype = torch.promote_types(encoder.dtype, torch.float32)
    pooled: dict[int, Tensor] = {}
    with eval_mode(encoder):
        for length in sorted(set(lengths)):
            same_length = [index for index, other in enumerate(lengths) if other == length]
            for start in range(0, len(same_length), _BATCH_SIZE):
                batch = same_length[start : start + _BATCH_SIZE]
                inputs = {name: [encoding[name][index] for index in batch] for name in names}
                tensors = {name: torch.tensor(rows, device=encoder.device) for name, rows in inputs.items()}
                mask = torch.ones_like(tensors["input_ids"])
                states = encoder(**tensors, attention_mask=mask, return_dict=True).last_hidden_state
                pooled |= dict(zip(batch, pool_states(states.to(dtype), mask.bool(), pooling), strict=True))
    return torch.stack([pooled[index] for index in range(len(texts))])


def _check_tokens(classes: Sequence[str], ids: Sequence[Sequence[int]], max_length: int | None) -> None:
    """Raise UserError if two classes have the same tokens, or one has too many."""
    if same := _find_same_tokens(classes, ids):
        problem = f"{same[0]!r} and {same[1]!r} are the same words to the model's tokenizer"
        expected = "names of other words, label_texts of a Classifier, or another head"
        raise UserError(f"labels collide: {problem}; expected {expected}")
    for name, tokens in zip(classes, ids, strict=True):
        if max_length is not None and len(tokens) > max_length:
            expected = f"at most {max_length} tokens for a class"
            raise UserError(f"label_texts: expected {expected}, {name!r} has {len(tokens)}")
