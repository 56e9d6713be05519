"""Query vectors of rows that are read once, and again whenever they may be others."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.adapters import known_vectors
from regard.adapters.known_vectors import KnownVectors
from regard.adapters.queries import StateReader
from regard.adapters.shared import SharedAdapters
from tests.adapters.model_families import made
from tests.adapters.test_task_training import batches

EPOCHS = 3


class Counted(StateReader):
    """A reader that counts the batches that it reads."""

    read = 0

    def __call__(self, *args: Any) -> Tensor:
        self.read += 1
        return super().__call__(*args)


def counted(model: Any) -> Counted:
    return Counted(model.base_model)


def words(rows: int = 3, tokens: int = 6) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (rows, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def trained(family: str, *, by_row: bool = False, **options: Any) -> tuple[Counted, SharedAdapters, list[Any]]:
    """Two tasks taught with `fit_task`, and what it returned; `by_row`: batches with other rows in each epoch."""
    adapters = SharedAdapters(made(family), r=4, **options)
    reader = counted(adapters.model) if family != "t5" else Counted(adapters.model.get_encoder())
    adapters._routing.query_reader = reader
    results = []
    for task, name in enumerate(("one", "two")):
        rows: Any = batches(family if family == "bert" else "llama", task)
        if by_row:
            table = [{key: value[row] for key, value in batch.items()} for batch in rows for row in range(8)]
            order = torch.Generator().manual_seed(task)
            rows = torch.utils.data.DataLoader(table, batch_size=8, shuffle=True, generator=order)  # type: ignore[arg-type]
        results.append(adapters.fit_task(name, rows, epochs=EPOCHS, learning_rate=1e-2))
    return reader, adapters, results


@pytest.mark.parametrize("family, by_row", [("bert", False), ("bert", True), ("llama", False), ("t5", False)])
def test_a_task_is_read_once_with_the_same_result(monkeypatch: pytest.MonkeyPatch, family: str, by_row: bool) -> None:
    reader, adapters, results = trained(family, by_row=by_row)
    assert reader.read == 2 * 4  # batches of two tasks
    assert adapters._routing.query_reader is reader
    monkeypatch.setattr(known_vectors.KnownVectors, "_row_keys", lambda *_: None)
    other, expected, others = trained(family, by_row=by_row)
    assert other.read == 2 * 4 * (1 + EPOCHS + 1)
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if by_row else {"rtol": 0, "atol": 0}  # rows were read beside others
    for one, two in zip(results, others, strict=True):
        torch.testing.assert_close(one.losses, two.losses, **tolerance)
        torch.testing.assert_close(one.own_weights, two.own_weights, **tolerance)
    for mine, theirs in zip(adapters.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, **(tolerance | ({"atol": 1e-4} if by_row else {})))


def test_rows_are_read_again_if_anything_of_them_is_other() -> None:
    reader = counted(made("bert"))
    known, given = KnownVectors(reader), words()
    valid = given["attention_mask"].bool()
    first = known(given, valid)
    shuffled = {name: value[[2, 0, 1]] for name, value in given.items()}
    again = known({**shuffled, "return_dict": True, "labels": torch.zeros(3)}, valid[[2, 0, 1]])
    assert reader.read == 1
    assert torch.equal(again, first[[2, 0, 1]])
    part = valid.clone()
    part[1, :2] = False  # as the prompt of a row
    padded = {name: nn.functional.pad(value, (0, 1)) for name, value in given.items()}
    changed = [
        (given, part),
        (padded, nn.functional.pad(valid, (0, 1))),
        ({**given, "input_ids": given["input_ids"].roll(1, 0)}, valid),
        ({**given, "attention_mask": torch.ones_like(given["input_ids"])}, valid),
        ({**given, "token_type_ids": torch.ones_like(given["input_ids"])}, valid),
        ({"input_ids": given["input_ids"]}, valid),
        ({**given, "position_ids": torch.arange(6).flip(0)[None]}, valid),
        ({**given, "position_ids": torch.arange(6).expand(3, -1)}, valid),
        ({**given, "position_ids": torch.arange(6).roll(1).expand(3, -1)}, valid),
    ]
    for number, (inputs, mask) in enumerate(changed):
        actual = known(inputs, mask)
        assert reader.read == 2 * number + 2
        assert torch.equal(actual, reader(inputs, mask))


def test_a_base_whose_buffers_have_changed_is_read_again() -> None:
    model = made("bert")
    model.base_model.register_buffer("running", torch.zeros(2))
    reader = counted(model)
    known, given = KnownVectors(reader), words()
    for read in (1, 2):
        for _ in range(2):
            known(given, given["attention_mask"].bool())
            assert reader.read == read
        model.base_model.running += 1


def test_no_more_is_kept_than_is_allowed_and_several_processes_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, given = counted(made("bert")), words()
    valid = given["attention_mask"].bool()
    known = KnownVectors(reader, max_bytes=4 * reader.width * 2)  # two of three rows
    for read in (1, 2):
        known(given, valid)
        assert reader.read == read
    known({name: value[:2] for name, value in given.items()}, valid[:2])
    assert reader.read == 2
    monkeypatch.setattr(known_vectors, "num_processes", lambda: 2)
    known({name: value[:2] for name, value in given.items()}, valid[:2])
    assert reader.read == 3
