"""What a run did to abilities beyond its stream: in its table, in its folder, on its page."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from regard.commands.learn.page import learn_page
from regard.commands.learn.result import COLUMNS, LearnResult, make_table
from regard.commands.learn.run import learn
from regard.data.examples import Examples
from regard.data.stream import SPLITS, ClassificationTask
from regard.errors import UserError
from tests.commands.learn import learned
from tests.continual import small_tasks, small_text_tasks
from tests.report.parsed import Parsed

TEXT = "the cat . the dog on red , it is slow . say blue run sit the cat of dog red " * 8


def test_the_divergence_is_a_row_after_each_task_of_each_method(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text(TEXT, encoding="utf-8")
    options = {"num_epochs": 1, "learning_rate": 5e-3, "batch_size": 4, "length": 16, "target_length": 5}
    found = learn(
        small_text_tasks.stream(many=2),
        ["finetune", "sequential-lora"],
        small_text_tasks.lively("gpt2"),
        seeds=[1],
        held_out=str(tmp_path / "held.txt"),
        held_out_samples=4,
        **options,  # type: ignore[arg-type]
    )
    assert tuple(found.general) == COLUMNS["general"]
    kept = [(row.method, row.after_task, row.n) for row in found.general.itertuples()]
    assert kept == [(method, after, 4) for method in ("finetune", "sequential-lora") for after in (1, 2)]
    assert (found.general["value"] > 0).all()
    found.save(tmp_path / "out")
    pd.testing.assert_frame_equal(LearnResult.load(tmp_path / "out").general, found.general)


def test_held_out_text_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="held-out: expected tasks from text to text"):
        learn(small_tasks.stream(), "finetune", small_tasks.loaded(), held_out="python", work_dir=tmp_path / "work")
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_special_tokens_written_in_texts_or_answers_are_told(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_epochs": 1, "length": 12, "diagnostic_samples": 0, "save_models": False}
    for module, tokens in ((small_tasks, ("[SEP]", "[CLS]")), (small_text_tasks, ("[EOS]", "[BOS]"))):
        stream, said = (
            module.stream(),
            r"texts: the names of special tokens \({}\) are written in them; they are read as",
        )
        task = stream.tasks[1]
        if isinstance(task, ClassificationTask):
            test = replace(task.test, texts=((f"{tokens[0]} the",), *task.test.texts[1:]))
            model = small_tasks.loaded()
        else:
            test = replace(task.test, targets=((f"{tokens[0]} it",), *task.test.targets[1:]))
            model = small_text_tasks.lively("t5")
        changed = replace(stream, tasks=(stream.tasks[0], replace(task, test=test)), order=(0, 1))
        with pytest.warns(UserWarning, match=said.format(re.escape(tokens[0]))):
            learn(changed, "finetune", model, seeds=[1], **options)


def test_a_task_of_unknown_tokens_is_told_once_for_all_methods() -> None:
    options: dict[str, Any] = {"num_epochs": 1, "length": 12, "diagnostic_samples": 0, "save_models": False}
    stream = small_tasks.stream(2)
    foreign = {}
    for split in SPLITS:
        rows = stream.tasks[1].split(split)
        assert isinstance(rows, Examples)
        foreign[split] = replace(rows, texts=tuple(("xx the",) for _ in rows.texts))
    changed = replace(stream, tasks=(stream.tasks[0], replace(stream.tasks[1], **foreign)), order=(0, 1))
    said = rf"texts: 50% of the tokens of {changed.tasks[1].name} are \[UNK\], which stands for whatever"
    with pytest.warns(UserWarning, match=said) as warned:
        learn(changed, "finetune,probe", small_tasks.loaded(), seeds=[1, 2], **options)
    assert len(warned) == 1


@pytest.mark.exhaustive
def test_the_page_has_a_row_for_each_statistic() -> None:
    tables = learned.tables(learned.matrix(("finetune", "prescale"), (39, 123), learned.TASKS[:2], ("til",)))
    run = {"stream": "s", "method": "prescale", "seed": 1, "order": "0-1"}
    rows = [
        {**run, "after_task": after, "statistic": name, "value": value + after / 10, "standard_error": None, "n": 4}
        for name, value in (("held_out_kl", 0.0), ("arc_easy acc", 0.5))
        for after in range(name == "held_out_kl", 3)
    ]
    page = Parsed(learn_page({**tables, "general": make_table("general", rows)}, learned.record()))
    assert "Beyond the stream" in page.text
    assert "arc_easy acc" in page.text
    assert "+0.2" in page.text
    assert "Beyond the stream" not in Parsed(learn_page(tables, learned.record())).text
