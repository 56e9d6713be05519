"""Honest splits: rows known by their text, what splits have in common, rows drawn by a seed."""

import hashlib
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from regard.data.rows import (
    FREE_ANSWER,
    LabeledRow,
    LabeledRows,
    RawTask,
    TextKey,
    hash_words,
    make_classification_task,
)
from regard.data.splits import (
    clean_splits,
    divide_rows,
    sample_balanced,
    sample_proportional,
)
from regard.errors import UserError

SEEDS = some.integers(0, 2**31)


def rows(*written: str) -> LabeledRows:
    """Rows from 'class text'."""
    return tuple(LabeledRow.of([text], label) for label, _, text in (row.partition(" ") for row in written))


def many(label: str, count: int, what: str = "text") -> LabeledRows:
    return tuple(LabeledRow.of([f"{what} {label} {number}"], label) for number in range(count))


def task(
    name: str, train: LabeledRows, dev: LabeledRows | None, test: LabeledRows, labels: tuple[str, ...] = ("a", "b")
) -> RawTask:
    return RawTask(name=name, labels=labels, train=train, dev=dev, test=test, source="here")


def texts(part: LabeledRows) -> list[str]:
    return [row.texts[0] for row in part]


@some.composite
def pools(draw: some.DrawFn) -> LabeledRows:
    """Rows of two to four classes, mixed, some of them twice."""
    sizes = draw(some.lists(some.integers(3, 25), min_size=2, max_size=4))
    made = [row for label, size in zip("abcd", sizes, strict=False) for row in many(label, size)]
    made += made[: draw(some.integers(0, 3))]
    random.Random(draw(SEEDS)).shuffle(made)
    return tuple(made)


# -- keys ---------------------------------------------------------------------------------------------


SAME = [" THE cat  sat. ", "the\tcat\nsat.", "ｔｈｅ cat sat."]
NEAR = ["the cat, sat", "the “cat” sat", "the_cat_sat", "The cat sat :("]
OTHER_TEXTS = ["The cat sits.", "Thecat sat.", "The cat sat 2."]


@pytest.mark.parametrize("same", SAME)
def test_the_same_text_has_the_same_key(same: str) -> None:
    assert TextKey.of(["The cat sat."]) == TextKey.of([same])


@pytest.mark.parametrize("near", NEAR)
def test_texts_that_differ_in_signs_have_the_same_words_alone(near: str) -> None:
    one, other = TextKey.of(["The cat sat."]), TextKey.of([near])
    assert one.words == other.words
    assert one.text != other.text


@pytest.mark.parametrize("other", OTHER_TEXTS)
def test_another_text_has_another_key(other: str) -> None:
    assert not set(TextKey.of(["The cat sat."])) & set(TextKey.of([other]))


@pytest.mark.parametrize("one, other", [("12 + 5", "12 - 5"), ("ok :)", "ok :("), ("fine 😀", "fine 😡"), ("C", "C++")])
def test_signs_tell_rows_apart(one: str, other: str) -> None:
    """They decide on the answer in sums, moods and programs: no row is dropped as the copy of another."""
    train, test = rows(f"a {one}", "b left", f"a {one}"), rows(f"b {other}", "a right")
    (found,) = clean_splits([task("one", train, rows(f"a {other}!", "b up"), test)], "clean", 0)
    assert texts(found.train) == [one, "left"]
    assert len(found.dev or ()) == 2
    assert (found.overlaps["train_near_test"], found.overlaps["texts_with_several_labels"]) == (1, 0)


def test_marks_are_no_punctuation() -> None:
    assert hash_words(["कि"]) != hash_words(["की"])


def test_texts_of_signs_alone_differ() -> None:
    assert hash_words(["!?"]) != hash_words(["..."])


# -- drawing ------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(pools(), some.integers(1, 12), some.integers(0, 12), SEEDS)
def test_balanced_rows(pool: LabeledRows, least: int, more: int, seed: int) -> None:
    few, lots = sample_balanced(pool, least, seed), sample_balanced(pool, least + more, seed)
    sizes = Counter(row.label for row in pool)
    assert Counter(row.label for row in few) == {label: min(least, size) for label, size in sizes.items()}
    assert not Counter(few) - Counter(lots)
    after = iter(pool)
    assert all(row in after for row in few)
    assert few == sample_balanced(pool, least, seed)


@settings(max_examples=40, deadline=None)
@given(pools(), some.integers(1, 80), some.integers(0, 20), SEEDS)
def test_proportional_rows(pool: LabeledRows, least: int, more: int, seed: int) -> None:
    few, lots = sample_proportional(pool, least, seed), sample_proportional(pool, least + more, seed)
    assert len(few) == min(least, len(pool))
    assert not Counter(few) - Counter(lots)
    drawn, sizes = Counter(row.label for row in few), Counter(row.label for row in pool)
    for label, size in sizes.items():
        assert abs(drawn[label] - size * len(few) / len(pool)) <= 0.5 * len(sizes) + 1


def test_a_quarter_stays_a_quarter() -> None:
    drawn = sample_proportional(many("a", 30) + many("b", 10), 12, 7)
    assert Counter(row.label for row in drawn) == {"a": 9, "b": 3}
    few = sample_proportional(many("a", 3) + many("b", 1), 3, 7)  # 2.25 and 0.75 to the nearest whole rows
    assert Counter(row.label for row in few) == {"a": 2, "b": 1}
    fewer = sample_proportional(many("a", 9) + many("b", 1), 2, 7)  # 1.8 and 0.2
    assert Counter(row.label for row in fewer) == {"a": 2}


def test_what_is_drawn_does_not_depend_on_the_order_of_the_file() -> None:
    pool = many("a", 20) + many("b", 20)
    for draw in (sample_balanced, sample_proportional):
        assert set(draw(pool, 7, 3)) == set(draw(pool[::-1], 7, 3))
        assert set(draw(pool, 7, 3)) != set(draw(pool, 7, 4))


@settings(max_examples=40, deadline=None)
@given(pools(), SEEDS)
def test_parts_of_a_division(pool: LabeledRows, seed: int) -> None:
    parts = divide_rows(pool, (0.1, 0.2), seed, "here")
    assert sorted(row for part in parts for row in part) == sorted(pool)
    keys = [{row.key for row in part} for part in parts]
    assert sum(map(len, keys)) == len(set.union(*keys))
    for label in {row.label for row in pool}:
        found = [len({row.key for row in part if row.label == label}) for part in parts]
        assert found[1:] == [max(1, int(share * sum(found))) for share in (0.1, 0.2)]
    assert parts == divide_rows(pool, (0.1, 0.2), seed, "here")
    assert [set(part) for part in divide_rows(pool[::-1], (0.1, 0.2), seed, "here")] == [set(part) for part in parts]


def test_a_class_too_small_to_divide() -> None:
    with pytest.warns(
        UserWarning, match="classes of here with fewer than 3 texts stay in train, none is held out: 'b'"
    ):
        parts = divide_rows(many("a", 9) + many("b", 2) + many("b", 2) + many("c", 9), (0.1, 0.2), 0, "here")
    assert [[row.label for row in part].count("b") for part in parts] == [4, 0, 0]
    assert [[row.label for row in part].count("a") for part in parts] == [7, 1, 1]
    expected = "at least 3 texts of two classes in here, one for each split, got fewer of 'b'"
    with pytest.raises(UserError, match=expected):
        divide_rows(many("b", 2) + many("c", 9), (0.1, 0.2), 0, "here")
    with pytest.raises(UserError, match="expected at least 3 texts in here, one for each split, got fewer"):
        divide_rows(many(FREE_ANSWER, 2), (0.1, 0.2), 0, "here")


def test_a_text_of_a_class_too_small_to_divide_is_held_out_under_no_label() -> None:
    """It was, for some seeds: the training rows lost it, and the stream was refused, as the class had no other."""
    pool = (*rows("c text a 4", "c text b 1", "d text a 6"), *many("a", 9), *many("b", 9))  # training has the first
    counts = []
    for seed in range(20):
        with pytest.warns(UserWarning, match="none is held out: 'c', 'd'"):
            parts = divide_rows(pool, (0.1, 0.2), seed, "here")
        assert sorted(row for part in parts for row in part) == sorted(pool)
        assert {"text a 4", "text b 1", "text a 6"} & {*texts(parts[1]), *texts(parts[2])} == set()
        counts.append([[row.label for row in part].count(label) for label in "abcd" for part in parts])
        train, dev, test = parts
        (cleaned,) = clean_splits([task("t", train, dev, test, ("a", "b", "c", "d"))], "clean", seed)
        assert {row.label for row in cleaned.train} == set("abcd")
    assert counts == [[7, 1, 1] * 2 + [2, 0, 0] + [1, 0, 0]] * 20


def test_a_class_whose_texts_are_kept_for_others_is_none_that_is_held_out() -> None:
    """It was in some splits alone, or nothing was held out at all, and nothing was said."""
    pool = (*many("a", 3), *many("b", 9), *many("c", 3), *many("e", 9), *rows("d text a 0", "d text a 1", "f text c 0"))
    with pytest.warns(UserWarning, match="with fewer than 3 texts that no other such class has .*: 'a', 'd', 'f'$"):
        parts = divide_rows(pool, (0.1, 0.2), 0, "here")
    assert [[row.label for row in part].count("a") for part in parts] == [3, 0, 0]
    assert [[row.label for row in part].count("c") for part in parts] == [1, 1, 1]  # training has the text of f
    assert {"text a 0", "text a 1", "text c 0"} <= set(texts(parts[0]))
    shared = rows("c text a 0", "c text a 1", "d text a 2", "d text b 0", "e text b 1", "e text b 2")
    with pytest.raises(UserError, match=r"at least 3 texts of two classes in here.*'a', 'b', 'c', 'd', 'e'"):
        divide_rows((*many("a", 3), *many("b", 3), *shared), (0.1, 0.2), 0, "here")


# -- what splits have in common -----------------------------------------------------------------------

OVERLAPPING = task(
    "one",
    train=rows("a red", "a Red", "a dev", "b test", "b blue", "a elsewhere", "b far"),
    dev=rows("a dev", "a new", "b test", "b new too", "b new  too"),
    test=rows("a seen", "b test", "b Test"),
)
OTHER = task(
    "two",
    train=rows("a up", "b down"),
    dev=rows("a far", "b left"),
    test=rows("a elsewhere", "b right"),
    labels=("a", "b"),
)
COUNTS = {
    "train_in_dev": 2,
    "train_in_test": 1,
    "dev_in_test": 1,
    "copies_in_train": 1,
    "copies_in_dev": 1,
    "copies_in_test": 1,
    "train_in_other_tasks": 2,
    "dev_in_other_tasks": 0,
    "texts_with_several_labels": 0,
    "train_near_test": 0,
}


def test_clean_drops_and_counts() -> None:
    one, two = clean_splits([OVERLAPPING, OTHER], "clean", 0)
    assert texts(one.train) == ["red", "blue"]
    assert texts(one.dev) == ["dev", "new", "new too"]
    assert texts(one.test) == ["seen", "test", "Test"]
    assert one.overlaps == COUNTS | {"dropped_from_train": 5, "dropped_from_dev": 2}
    assert two == replace(OTHER, overlaps=dict.fromkeys(one.overlaps, 0))


def test_texts_with_several_labels_are_counted_over_all_splits() -> None:
    train = rows("a red", "b red", "b blue", "a up", "b down", "a up")
    (found,) = clean_splits([task("one", train, rows("a blue", "b left"), rows("b red", "a right"))], "paper", 0)
    assert found.overlaps["texts_with_several_labels"] == 2


def test_paper_counts_alone() -> None:
    one, _ = clean_splits([OVERLAPPING, OTHER], "paper", 0)
    assert (one.train, one.dev, one.test) == (OVERLAPPING.train, OVERLAPPING.dev, OVERLAPPING.test)
    assert one.overlaps == COUNTS | {"dropped_from_train": 0, "dropped_from_dev": 0}


def test_dev_is_held_out_of_clean_rows() -> None:
    train = many("a", 20) + many("b", 30) + many("a", 2) + rows("b seen")
    (found,) = clean_splits([task("one", train, None, rows("a seen", "b other"))], "clean", 0)
    assert Counter(row.label for row in found.dev) == {"a": 2, "b": 3}
    assert Counter(row.label for row in found.train) == {"a": 18, "b": 27}
    assert not {row.key for row in found.train} & {row.key for row in found.dev}
    assert (found.overlaps["train_in_test"], found.overlaps["copies_in_train"]) == (1, 2)
    assert found.overlaps["dropped_from_train"] == 3


def test_dev_is_test_where_it_was_published_so() -> None:
    given_task = task("one", many("a", 20) + many("b", 20), None, rows("a x", "b y"))
    (paper,) = clean_splits([given_task], "paper", 0, dev_is_test=True)
    assert (paper.train, paper.dev) == (given_task.train, given_task.test)
    assert paper.overlaps["dev_in_test"] == 2
    (own_dev,) = clean_splits([replace(given_task, dev=rows("a x", "b z"))], "paper", 0, dev_is_test=True)
    assert own_dev.overlaps["dev_in_test"] == 1
    (clean,) = clean_splits([given_task], "clean", 0, dev_is_test=True)
    assert not set(clean.dev) & set(clean.test)


@settings(max_examples=40, deadline=None)
@given(some.lists(some.tuples(pools(), pools(), pools()), min_size=1, max_size=3), some.booleans(), SEEDS)
def test_clean_splits_are_disjoint(parts: list[tuple[LabeledRows, ...]], with_dev: bool, seed: int) -> None:
    def named(number: int, part: LabeledRows, split: str) -> LabeledRows:
        """A third of the rows with words of their split, so that some overlap and every class keeps some."""
        own = many("a", 12, f"{number} {split}") + many("b", 12, f"{number} {split}")
        return own + tuple(row for row in part if row.label in ("a", "b"))

    tasks = [
        task(str(at), named(at, train, "train"), named(at, dev, "dev") if with_dev else None, named(at, test, "test"))
        for at, (train, dev, test) in enumerate(parts)
    ]
    settled = clean_splits(tasks, "clean", seed)
    tests = {row.key for found in settled for row in found.test}
    devs = {row.key for found in settled for row in found.dev}
    assert not tests & devs
    for raw, found in zip(tasks, settled, strict=True):
        keys = [row.key for row in found.train]
        assert len(set(keys)) == len(keys)
        assert not set(keys) & (tests | devs)
        assert found.test == raw.test
    assert settled == clean_splits(tasks, "clean", seed)


def test_nothing_left_to_train_or_choose_on() -> None:
    told = r"rows of 'b' in the train split of 'one' that no dev or test split has, got none: 'y' is a "
    for tasks, place in (
        ([task("one", rows("a x", "b y"), rows("a z"), rows("a s", "b y"))], "test row of 'one' as well;"),
        ([task("one", rows("a x", "b y"), rows("a z"), rows("a y", "b s"))], "test row of 'one' as well under 'a';"),
        ([task("one", rows("a x", "b y"), rows("a y"), rows("a s", "b s"))], "dev row of 'one' as well under 'a';"),
        ([task("one", rows("a x", "b y"), None, rows("a y", "b s"))], "test row of 'one' as well under 'a';"),
        (
            [task("one", rows("a x", "b y"), None, rows("a s")), task("two", rows("a u", "b v"), None, rows("a y"))],
            "test row of 'two' as well;",
        ),
        ([task("one", rows("a y", "b y"), rows("a u"), rows("a s", "b s"))], "train row of 'one' as well under 'a';"),
    ):
        with pytest.raises(UserError, match=f"{told}{place} keep such a text in one place, under one label, or"):
            clean_splits(tasks, "clean", 0)
    long = "b " + "y" * 50
    with pytest.raises(UserError, match=f"'{'y' * 40}…' is a test row"):
        clean_splits([task("one", rows("a x", long), rows("a z"), rows("a s", long))], "clean", 0)
    with pytest.raises(UserError, match="expected dev rows in 'one' that are not test rows, got none"):
        clean_splits([task("one", rows("a x", "b y"), rows("a s"), rows("a s", "b t"))], "clean", 0)


# -- tasks as read ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "train,dev,test,labels,said",
    [
        (rows("a x"), None, rows("a y"), ("a",), "at least two classes in 'one', got 'a'"),
        ((), None, rows("a y"), ("a", "b"), "rows in the train split of 'one', got none"),
        (rows("a x", "b y"), (), rows("a y"), ("a", "b"), "rows in the dev split of 'one', got none"),
        (rows("a x", "b y"), None, (), ("a", "b"), "rows in the test split of 'one', got none"),
        (rows("a x", "b y"), None, rows("c y"), ("a", "b"), r"labels of train \(a, b\) in 'one', got 'c'"),
        (rows("a x", "b y"), rows("d z"), rows("a y"), ("a", "b"), r"labels of train \(a, b\) in 'one', got 'd'"),
        (rows("a x"), None, rows("a y"), ("a", "b"), "rows of 'b' in the train split of 'one', got none"),
        (rows("a x", "b y"), None, (LabeledRow.of(("a", "b"), "a"),), ("a", "b"), "one text in each row of 'one'"),
    ],
)
def test_tasks_that_are_none(
    train: LabeledRows, dev: LabeledRows | None, test: LabeledRows, labels: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        task("one", train, dev, test, labels)


def test_class_indices_and_hashes() -> None:
    train = rows("b x", "a y")
    made = make_classification_task(task("one", train, train, train))
    assert (made.train.texts, made.train.labels) == ((("x",), ("y",)), (1, 0))
    lines = b'[["x"], "b"]\n[["y"], "a"]\n'
    assert made.sha256["train"] == hashlib.sha256(lines).hexdigest()
    different = [train, train[::-1], rows("a x", "b y"), rows("b X", "a y")]
    assert len({make_classification_task(task("one", other, None, other)).sha256["train"] for other in different}) == 4
