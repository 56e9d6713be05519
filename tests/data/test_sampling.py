import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.blocks import BlocksMetadata, TokenBlocks
from regard.data.corpus import BatchSampler, Corpus, Domain, insert_tokens
from regard.errors import UserError


def blocks(first: int, rows: int, length: int = 2) -> TokenBlocks:
    """Blocks that begin with their number, from `first` on."""
    ids = np.repeat(np.arange(first, first + rows, dtype=np.uint16)[:, None], length, axis=1)
    about = {"dropped": 0, "dtype": "uint16", "sha256": "", "documents": 1, "source": "", "fingerprint": ""}
    return TokenBlocks(ids, BlocksMetadata(rows=rows, length=length, tokenizer="", vocab_size=60_000, **about))


def corpus(*rows: int, weights: tuple[float, ...] | None = None) -> Corpus:
    """Domains with so many blocks each; the blocks of domain n begin at 1000·n."""
    shares = weights or (1.0,) * len(rows)
    parts = [blocks(1000 * number, count) for number, count in enumerate(rows)]
    return Corpus(tuple(Domain(f"d{n}", shares[n], part, part) for n, part in enumerate(parts)))


def drawn(draw: BatchSampler, steps: range) -> list[int]:
    return torch.cat([draw.rows(step)[:, 0] for step in steps]).tolist()


def test_rows_are_a_function_of_seed_and_step() -> None:
    made = corpus(7, 5, weights=(0.6, 0.4))
    forward, single = BatchSampler(made, 4, 3), BatchSampler(made, 4, 3)
    rows = [forward.rows(step) for step in range(12)]
    assert all(torch.equal(single.rows(step), rows[step]) for step in reversed(range(12)))
    assert torch.equal(BatchSampler(made, 4, 3).rows(11), rows[11])
    assert drawn(BatchSampler(made, 4, 4), range(12)) != drawn(forward, range(12))


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 40), batch=st.integers(1, 60), seed=st.integers(0, 9))
def test_each_block_comes_once_an_epoch(count: int, batch: int, seed: int) -> None:
    found = drawn(BatchSampler(corpus(count), batch, seed), range(-(-3 * count // batch)))
    epochs = [found[start : start + count] for start in range(0, 3 * count, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert count < 10 or epochs[0] != epochs[1]


def test_each_block_of_each_domain_comes_once_an_epoch() -> None:
    sampler = BatchSampler(corpus(9, 4, weights=(0.3, 0.7)), 8, 0)
    found = drawn(sampler, range(20))
    for domain, count in enumerate((9, 4)):
        mine = [block % 1000 for block in found if block // 1000 == domain]
        assert sampler.passes(20)[domain] == len(mine) / count
        whole = len(mine) // count
        assert whole > 2
        for epoch in range(whole):
            assert sorted(mine[epoch * count : (epoch + 1) * count]) == list(range(count))


@pytest.mark.exhaustive
@settings(max_examples=15, deadline=None)
@given(weights=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_domains_come_by_weight(weights: list[float], seed: int) -> None:
    rows = 20_000
    domains, _ = BatchSampler(corpus(*[50] * len(weights), weights=tuple(weights)), rows, seed).block_indices(0)
    shares = np.array(weights) / sum(weights)
    found = np.bincount(domains.numpy(), minlength=len(weights)) / rows
    assert (np.abs(found - shares) < 6 * np.sqrt(shares * (1 - shares) / rows)).all()


@settings(max_examples=20, deadline=None)
@given(batch=st.integers(1, 7), factor=st.integers(2, 5), step=st.integers(0, 30))
def test_the_rows_of_training_do_not_depend_on_the_batch_size(batch: int, factor: int, step: int) -> None:
    made = corpus(11, 6, weights=(0.5, 0.5))
    whole = BatchSampler(made, batch * factor, 1).rows(step)
    parts = [BatchSampler(made, batch, 1).rows(step * factor + part) for part in range(factor)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.exhaustive
def test_beginning_in_the_middle_counts_what_was_drawn_before() -> None:
    made = corpus(13, 8, weights=(0.25, 0.75))
    steps, batch = range(70), 1000
    going = BatchSampler(made, batch, 2)
    before = [going.rows(step) for step in steps]
    assert batch * len(steps) > 1 << 16, "the rows reach over more than one chunk of draws"
    assert torch.equal(BatchSampler(made, batch, 2).rows(69), before[69])
    order = torch.cat([rows[:, 0] for rows in before])
    mine = order[order >= 1000]
    assert (mine[: len(mine) // 8 * 8].view(-1, 8).sort(dim=1).values == 1000 + torch.arange(8)).all()


def test_random_tokens_stand_at_their_positions_alone() -> None:
    ids = torch.zeros(4000, 6, dtype=torch.int64)
    allowed = torch.tensor([3, 4, 7, 9])
    made = insert_tokens(ids, step=5, seed=1, vocabulary=allowed, random_tokens=(1, 3))
    assert not made[:, [0, 3, 4, 5]].any()
    shares = torch.bincount(made[:, 1:3].flatten(), minlength=10) / 8000
    assert shares[allowed].tolist() == pytest.approx([0.25] * 4, abs=0.03)
    assert not ids.any(), "the rows that were given are as they were"
    again = insert_tokens(ids, step=5, seed=1, vocabulary=allowed, random_tokens=(1, 3))
    assert torch.equal(again, made)
    for step, seed in ((6, 1), (5, 2)):
        other = insert_tokens(ids, step=step, seed=seed, vocabulary=allowed, random_tokens=(1, 3))
        assert not torch.equal(other, made)


def test_a_fixed_token_is_put_in_last() -> None:
    ids = torch.arange(12).view(2, 6)
    made = insert_tokens(ids, step=0, seed=0, vocabulary=torch.tensor([40]), random_tokens=(0, 2), fixed_token=(1, 50))
    assert made.tolist() == [[40, 50, 2, 3, 4, 5], [40, 50, 8, 9, 10, 11]]
    assert torch.equal(insert_tokens(ids, step=0, seed=0, vocabulary=torch.tensor([40])), ids)


@pytest.mark.parametrize(
    "random_tokens,fixed_token,message",
    [
        ((2, 2), None, r"0 ≤ a < b ≤ 6, got 2:2"),
        ((0, 7), None, r"b ≤ 6, got 0:7"),
        ((-1, 3), None, r"got -1:3"),
        (None, (6, 1), "a position from 0 to 5, got 6"),
        (None, (-1, 1), "a position from 0 to 5, got -1"),
        (None, (0, -1), "a positive id, got -1"),
    ],
)
def test_positions_outside_of_a_row(random_tokens: tuple[int, int], fixed_token: tuple[int, int], message: str) -> None:
    ids, vocabulary = torch.zeros(1, 6, dtype=torch.int64), torch.ones(1).long()
    with pytest.raises(UserError, match=message):
        insert_tokens(ids, step=0, seed=0, vocabulary=vocabulary, random_tokens=random_tokens, fixed_token=fixed_token)


def test_a_batch_of_nothing() -> None:
    with pytest.raises(UserError, match="at least 1, got 0"):
        BatchSampler(corpus(3), 0, 0)
