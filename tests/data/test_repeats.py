"""How much of a held-out text is also trained on, held against sets of tuples."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.data import Source, prepare_corpus
from regard.data import repeats as module
from regard.data.blocks import TokenBlocks, pack
from regard.data.repeats import PIECE, repeated_shares


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(100)}" for _ in range(count))


def blocks(text: str, tokenizer: Any, length: int, folder: Path) -> TokenBlocks:
    return pack([text], tokenizer, length, folder)


def share(train: list[TokenBlocks], valid: TokenBlocks) -> float:
    """Return the share of pieces that occur in the training text, by their tokens."""
    runs = set()
    for part in train:
        ids = part.rows(torch.arange(len(part))).flatten().tolist()
        runs |= {tuple(ids[start : start + PIECE]) for start in range(len(ids) - PIECE + 1)}
    ids = valid.rows(torch.arange(len(valid))).flatten().tolist()
    pieces = [tuple(ids[start : start + PIECE]) for start in range(0, len(ids) - PIECE + 1, PIECE)]
    return sum(piece in runs for piece in pieces) / len(pieces)


@pytest.mark.parametrize("length", [7, 32, 50])
@pytest.mark.parametrize("chunk", [64, 1 << 22])
def test_a_share_is_that_of_pieces_anywhere_in_the_training_text(
    length: int, chunk: int, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk * length)  # no held-out piece is cut by the end of a chunk
    passage, ending = words(500, seed=1), words(300, seed=2)
    train = [
        blocks(f"{words(123, 3)} {passage} {words(500, 4)}", plain, length, tmp_path / "a"),
        blocks(f"{words(61, 5)} {ending}", plain, length, tmp_path / "b").select(torch.arange(5)),
    ]
    valid = blocks(f"{words(400, 6)} {passage} {words(77, 7)} {ending}", plain, length, tmp_path / "c")
    new = blocks(words(400, 8), plain, length, tmp_path / "d")
    expected = share(train, valid)
    assert 0.3 < expected < 0.7
    assert repeated_shares(train, [valid, new]) == [expected, 0.0]
    monkeypatch.setattr(module, "_FILTER_SHIFT", np.uint64(63))  # a filter that lets most of the others pass
    assert repeated_shares(train, [valid, new]) == [expected, 0.0]


def test_a_text_shorter_than_a_piece_has_no_share(plain: Any, tmp_path: Path) -> None:
    train = blocks(words(100, 1), plain, 10, tmp_path / "a")
    assert repeated_shares([train], [train.select(torch.arange(3))]) == [None]


def test_what_has_been_counted_is_kept_beside_the_text(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice, folder, counted = tmp_path / "twice.txt", tmp_path / "packed", []
    twice.write_text(f"{words(3001, 2)} {words(3001, 2)}")
    count = module._count
    monkeypatch.setattr(module, "_count", lambda *texts: counted.append(len(counted)) or count(*texts))

    def repeated(**options: Any) -> float | None:
        source = Source("twice", str(twice))
        made = prepare_corpus([source], plain, length=20, folder=folder, valid_fraction=0.2, **options)
        return made.domains[0].repeated

    assert [repeated(), repeated()] == [1.0, 1.0]
    assert counted == [0]
    assert repeated(fraction=0.25) < 0.7, "of other training text it is another share"
    assert counted == [0, 1]
    kept = sorted(folder.glob("repeats-*"))
    assert len(kept) == 2
    for content in ("", "[]", "{}"):
        for file in kept:
            file.write_text(content)
        assert repeated() == 1.0, "a damaged file counts for nothing"
    assert len(counted) == 5


def test_a_share_that_cannot_be_kept_is_counted(plain: Any, tmp_path: Path) -> None:
    train = blocks(words(100, 1), plain, 50, tmp_path / "a")
    assert repeated_shares([train], [train], tmp_path / "not there") == repeated_shares([train], [train]) == [1.0]


def test_a_text_that_is_there_twice_is_told_whatever_its_domain(plain: Any, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.txt", tmp_path / "twice.txt"
    once.write_text(words(3000, 1))
    twice.write_text(f"{words(3001, 2)} {words(3001, 2)}")
    sources = [Source("once", str(once)), Source("twice", str(twice))]
    made = prepare_corpus(sources, plain, length=20, folder=tmp_path / "packed", valid_fraction=0.2)
    assert [domain.split for domain in made.domains] == ["end", "end"]
    assert [domain.repeated for domain in made.domains] == [0.0, 1.0]
    assert [domain.metadata()["repeated"] for domain in made.domains] == [0.0, 1.0]
    borrowed = [Source("a", str(twice), valid=str(once)), Source("b", str(once))]
    made = prepare_corpus(borrowed, plain, length=20, folder=tmp_path / "packed", valid_fraction=0.2)
    assert made.domains[0].repeated == pytest.approx(0.8, abs=0.02), "text of another domain is trained on, too"
