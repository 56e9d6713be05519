"""Streams one behind the other: earlier rows stay, later ones that would leak are dropped."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from regard.data.examples import Examples
from regard.data.joined_streams import PARTS, SHARED, first_part, join_streams
from regard.data.stream import ClassificationTask, Stream
from regard.data.streams import read_stream
from regard.errors import UserError


def examples(*texts: str) -> Examples:
    return Examples(texts=tuple((text,) for text in texts), labels=tuple(0 for _ in texts))


def stream(name: str, train: str, dev: str, test: str) -> Stream:
    splits = {"train": examples(*train), "dev": examples(*dev), "test": examples(*test)}
    task = ClassificationTask(name=name, labels=("x",), sha256={"train": "old", "dev": "old", "test": "old"}, **splits)
    return Stream(name=name, tasks=(task,), order=(0,), seed=1)


def texts(joined: Stream, task: int) -> dict[str, str]:
    splits = ("train", "dev", "test")
    return {split: "".join(text for (text,) in getattr(joined.tasks[task], split).texts) for split in splits}


def test_rows_that_an_earlier_part_has_in_another_split_are_dropped() -> None:
    joined = join_streams([stream("a", "abc", "d", "ef"), stream("b", "Eghd", "bi", "jka")])
    assert texts(joined, 0) == {"train": "abc", "dev": "d", "test": "ef"}
    assert texts(joined, 1) == {"train": "gh", "dev": "i", "test": "jk"}
    assert joined.metadata[SHARED] == {"b": {"train": 2, "dev": 1, "test": 1}}
    assert joined.metadata[PARTS] == [1, 1]
    assert joined.order == (0, 1)
    assert joined.tasks[0].sha256["train"] == "old" != joined.tasks[1].sha256["train"]
    assert first_part(joined).tasks == joined.tasks[:1]


def test_rows_that_both_parts_train_or_evaluate_on_stay() -> None:
    joined = join_streams([stream("a", "abc", "d", "ef"), stream("b", "agb", "de", "fd")])
    assert texts(joined, 1) == {"train": "agb", "dev": "de", "test": "fd"}
    assert not joined.metadata[SHARED]


def test_published_splits_stay_as_they_are() -> None:
    parts = [
        replace(stream(name, train, "d", test), protocol="paper")
        for name, train, test in (("a", "a", "b"), ("b", "b", "a"))
    ]
    assert texts(join_streams(parts), 1) == {"train": "b", "dev": "d", "test": "a"}


def test_a_split_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(UserError, match=r"^stream: all test rows of b are in other splits"):
        join_streams([stream("a", "abc", "d", "ef"), stream("b", "gh", "i", "ab")])


def test_tasks_of_the_same_name_are_refused() -> None:
    parts = [stream("a", "abc", "d", "ef"), replace(stream("a", "gh", "i", "jk"), name="more")]
    with pytest.raises(UserError, match=rf"'a' is in {parts[0].name} and more; give new tasks alone$"):
        join_streams(parts)


def test_what_was_counted_of_each_task_is_kept_of_all_parts() -> None:
    parts = [
        replace(stream(name, words, "d" + name, "e" + name), metadata={"overlaps": {name: 1}, "dev": "own", **more})
        for name, words, more in (("a", "bc", {}), ("f", "gh", {"missing": ("x",)}))
    ]
    metadata = join_streams(parts).metadata
    assert metadata["overlaps"] == {"a": 1, "f": 1}
    assert metadata["dev"] == "own"
    assert metadata["missing"] == ("x",)


def test_the_first_part_keeps_its_order() -> None:
    tasks = tuple(stream(name, name, "d", "t").tasks[0] for name in "abc")
    first = replace(stream("x", "q", "r", "s"), tasks=(tasks[2], tasks[0], tasks[1]), order=(2, 0, 1))
    part = first_part(join_streams([first, stream("y", "u", "v", "w")]))
    assert (part.order, [task.name for task in part.tasks]) == ((2, 0, 1), ["c", "a", "b"])
    assert [task.name for task in part.reorder((0, 1, 2)).tasks] == ["a", "b", "c"]


def test_a_text_names_several_with_commas_between(tmp_path: Path) -> None:
    """As `regard learn --stream` does; a name or indices of an order are of the first."""
    paths = []
    for name, tasks in (("first", "ab"), ("then", "cd")):
        rows = [{"task": task, "text": f"{task} {at}", "label": "xy"[at % 2]} for task in tasks for at in range(20)]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    joined = read_stream(", ".join(map(str, paths)), order="1-0", seed=3)
    expected = join_streams([read_stream(paths[0], order="1-0", seed=3), read_stream(paths[1], seed=3)])
    assert joined == expected
    assert [task.name for task in joined.tasks] == ["b", "a", "c", "d"]
    with pytest.raises(UserError) as error:
        read_stream(",".join(map(str, paths)), order="3-2-1-0")
    told = f"0 to 1 once, got 3-2-1-0; of several streams it is the order of the first ({paths[0]})"
    assert str(error.value) == f"order: expected each number from {told}"
    (tmp_path / "a, b.jsonl").write_bytes(paths[0].read_bytes())
    assert len(read_stream(tmp_path / "a, b.jsonl")) == 2
    with pytest.raises(UserError, match=r"^stream: expected one of .*; got 'c'$"):
        read_stream(f"{paths[0]},c")


def test_a_folder_of_published_files_is_refused_where_no_part_takes_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = [{"task": name, "text": f"{name} {number}", "label": number % 2} for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match="data: expected no folder of published files with tasks of your own"):
        read_stream(f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}", tmp_path)
    assert len(read_stream(f"stdlib-split,{tmp_path / 'b.jsonl'}").tasks) > 1
    with pytest.raises(UserError, match="data: expected no folder of published files with tasks of your own"):
        read_stream(f"stdlib-split,{tmp_path / 'b.jsonl'}", tmp_path)
