"""Tokens that say little: special tokens and punctuation."""

import unicodedata
from typing import Any


def common_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids of the special tokens, and of all tokens made of punctuation (Unicode category P) and white space alone.

    Bai et al. 2024 call these common: tokens that stand in every text whatever it is about.
    """
    found = set(tokenizer.all_special_ids)
    for token, number in tokenizer.get_vocab().items():
        if not any(map(str.isalnum, token)) and _is_punctuation(tokenizer.convert_tokens_to_string([token])):
            found.add(number)
    return frozenset(found)


def _is_punctuation(text: str) -> bool:
    letters = text.replace("#", "").strip() or text.strip()
    return bool(letters) and all(unicodedata.category(letter).startswith("P") for letter in letters)
