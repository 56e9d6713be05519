"""Tasks of lm-evaluation-harness on what a run has taught. Skipped without the package lm_eval."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from regard.continual import harness
from regard.continual.harness import _continue_texts, _score_continuations, _score_text, make_evaluation
from regard.continual.methods import METHODS
from regard.continual.run import make_learner, run_stream
from regard.continual.text_learner import TextLearner
from regard.continual.training_phase import TrainingBudget
from regard.errors import UserError
from tests.continual import small_tasks
from tests.continual.small_text_tasks import BUDGET, lively, stream

needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the package lm_eval")
PAIRS = [([4, 22, 5], [17, 9]), ([6], [23]), ([7, 24, 22, 8, 4], [9, 10, 11])]


def learner(kind: Any = "gpt2", name: str = "finetune", **settings: Any) -> TextLearner:
    method = METHODS[name](METHODS[name].Config.parse(settings))
    return cast(TextLearner, make_learner(stream(), method, lively(kind), replace(BUDGET, num_epochs=1), seed=1))


def by_hand(model: Any, context: list[int], answer: list[int]) -> tuple[float, bool]:
    total, greedy, ids = 0.0, True, list(context)
    for token in answer:
        scores = torch.log_softmax(model.double()(torch.tensor([ids])).logits[0, -1].double(), -1)
        total, greedy, ids = total + float(scores[token]), greedy and int(scores.argmax()) == token, [*ids, token]
    return total, greedy


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_continuations_are_scored_token_for_token(kind: Any) -> None:
    run = learner(kind)
    model = run.generator.encoder.eval()
    best = model.generate(torch.tensor([PAIRS[0][0]]), max_new_tokens=2)[0, 3:].tolist()
    pairs = [*PAIRS, (PAIRS[0][0], best)]
    with run.evaluation_mode():
        found = _score_continuations(run, pairs)
        text = _score_text(run, [3], [4, 22, 5])
    expected = [by_hand(model, *pair) for pair in pairs]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert found[-1][1]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-5)
    assert text == pytest.approx(by_hand(model, [3], [4, 22, 5])[0], rel=1e-5)


@torch.no_grad()
def test_texts_are_continued_up_to_what_ends_them() -> None:
    run = learner()
    ids = [4, 22, 5]
    with run.evaluation_mode():
        (whole,) = _continue_texts(run, [(ids, {"max_gen_toks": 6})])
        first = whole.split()[0]
        short = _continue_texts(run, [(ids, {"max_gen_toks": 6, "until": [" "]}), (ids, {"max_gen_toks": 6})])
        with pytest.raises(UserError, match="evaluate: expected tasks with greedy answers"):
            _continue_texts(run, [(ids, {"do_sample": True})])
    assert short == [first, whole]


@torch.no_grad()
def test_a_long_text_is_scored_in_windows_of_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of at most `limit` tokens, the last with as much context as fits beside it (lm_eval's rolling windows).

    BOS that a tokenizer puts before a text was scored behind BOS.
    """
    run, ids = learner(), [4, 22, 5, 17, 9, 6, 23, 7, 24, 8, 10]
    model = run.generator.encoder.eval()
    monkeypatch.setattr(harness, "_maximum_length", lambda _: 5)
    windows = [([3], ids[:4]), ([ids[3]], ids[4:8]), (ids[6:8], ids[8:])]
    with run.evaluation_mode():
        found = [_score_text(run, [3], one) for one in (ids, [3, *ids])]
    assert found == pytest.approx([sum(by_hand(model, *pair)[0] for pair in windows)] * 2, rel=1e-5)


@torch.no_grad()
def test_an_answer_that_is_cut_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five tokens four fit a decoder of five positions, behind the last token of the prompt."""
    run, prompt, answer = learner(), [4, 22], [5, 17, 9, 6, 23]
    monkeypatch.setattr(harness, "_maximum_length", lambda _: 5)
    with run.evaluation_mode():
        ((score, _),) = _score_continuations(run, [(prompt, answer[:4])])
        with pytest.warns(UserWarning, match="evaluate: 1 of 2 answers are longer than the model takes; their beginn"):
            (cut, _), (whole, _) = _score_continuations(run, [(prompt, answer), (prompt, answer[:4])])
    assert cut == whole == pytest.approx(score, rel=1e-6)
    assert score == pytest.approx(by_hand(run.generator.encoder.eval(), prompt[1:], answer[:4])[0], rel=1e-5)


@torch.no_grad()
def test_the_answer_takes_no_room_of_the_prompt_of_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_maximum_length", lambda _: 6)
    prompt = [4, 22, 5, 17, 9, 6, 23]
    read: dict[str, list[int]] = {}
    for kind in ("gpt2", "t5"):
        run = learner(kind)
        make = harness._make_batch

        def note(*arguments: Any, name: str = kind, make: Any = make) -> Any:
            read.setdefault(name, []).append(len(arguments[1][0]))
            return make(*arguments)

        with monkeypatch.context() as patch, run.evaluation_mode():
            patch.setattr(harness, "_make_batch", note)
            _score_continuations(run, [(prompt, [9, 10])])
            _continue_texts(run, [(prompt, {"max_gen_toks": 3})])
    assert read == {"gpt2": [4, 3], "t5": [6, 6]}


@torch.no_grad()
def test_an_answer_is_no_longer_than_the_positions_of_a_decoder() -> None:
    """BART has a table of them, whatever a task asks for."""
    run = learner("bart")
    limit = harness._maximum_length(run)
    assert limit is not None
    with run.evaluation_mode():
        assert len(_continue_texts(run, [([4, 22, 5], {"max_gen_toks": 4 * limit})])) == 1


@torch.no_grad()
def test_an_answer_ends_at_the_first_of_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it begins with one: white space is not cut before."""
    run = learner()
    monkeypatch.setattr(run.tokenizer, "decode", lambda *_, **__: "\nfirst line\nsecond", raising=False)
    with run.evaluation_mode():
        assert _continue_texts(run, [([4, 22], {"until": ["\n"]})]) == [""]
        assert _continue_texts(run, [([4, 22], {"until": ["second"]})]) == ["\nfirst line\n"]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task of its own data: which word goes on."""
    rows = [{"text": "the cat on red", "choices": ["a cat", "cold"], "gold": index % 2} for index in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lines = [
        "task: said",
        "dataset_path: json",
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}, cache_dir: {tmp_path / 'cache'}}}",
        "test_split: test",
        "output_type: multiple_choice",
        "doc_to_text: '{{text}}'",
        "doc_to_choice: '{{choices}}'",
        "doc_to_target: gold",
        "target_delimiter: ' '",
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]",
    ]
    (tmp_path / "said.yaml").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "said.yaml"


@needs_harness
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, settings", [("finetune", {}), ("sapt", {"r": 2})])
def test_a_task_of_ones_own_is_a_row_before_and_after_each_task(name: str, settings: Any, task: Path) -> None:
    run = learner("gpt2", name, **settings)
    method = METHODS[name](METHODS[name].Config.parse(settings))
    evaluate = make_evaluation(run, [str(task)], max_samples=4)
    rows = run_stream(run, method, evaluate=evaluate).rows["general"]
    assert [(row["after_task"], row["statistic"], row["n"]) for row in rows] == [(i, "said acc", 4) for i in range(4)]
    with run.evaluation_mode(), torch.no_grad():
        scores = _score_continuations(
            run,
            [
                (run.tokenizer("the cat on red")["input_ids"], ids)
                for ids in (run.tokenizer("a cat")["input_ids"], run.tokenizer("cold")["input_ids"])
            ],
        )
    best = max((0, 1), key=lambda index: scores[index][0])
    assert rows[-1]["value"] == pytest.approx(sum(index % 2 == best for index in range(4)) / 4)


@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_the_scores_are_those_of_the_harness_itself(task: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    run = learner()
    (row,) = make_evaluation(run, [str(task)], max_samples=None)(run, 0)
    model = HFLM(pretrained=run.generator.encoder, tokenizer=run.tokenizer, batch_size=2)
    expected = simple_evaluate(model, tasks=[str(task)], bootstrap_iters=0)["results"]["said"]["acc,none"]
    assert row["value"] == expected


@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_the_files_of_all_tasks_are_not_read_for_each_score(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are thousands, and take longer than the scores; a task of one's own needs none of them."""
    from lm_eval.tasks import TaskManager

    made: list[dict[str, Any]] = []
    original = TaskManager.__init__

    def note(self: Any, *arguments: Any, **options: Any) -> None:
        made.append(options)
        original(self, *arguments, **options)

    monkeypatch.setattr(TaskManager, "__init__", note)
    run = learner()
    evaluate = make_evaluation(run, [str(task)], max_samples=1)
    assert [len(evaluate(run, number)) for number in range(2)] == [1, 1]
    assert made == [{"include_defaults": False}]


@needs_harness
def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(UserError, match="evaluate: cannot read the tasks nowhere_to_be_found"):
        make_evaluation(learner(), ["nowhere_to_be_found"], max_samples=None)
    with pytest.raises(
        UserError, match=r"evaluate: expected names of tasks or YAML files of them, there is no .*x\.yaml"
    ):
        make_evaluation(learner(), ["x.yaml"], max_samples=None)


def test_a_classifier_cannot_continue_a_text() -> None:
    budget = TrainingBudget(num_epochs=1, batch_size=4, length=10)
    run = make_learner(small_tasks.stream(), METHODS["finetune"](), small_tasks.loaded(), budget, seed=1)
    with pytest.raises(UserError, match="evaluate: expected tasks from text to text"):
        make_evaluation(run, ["said"], max_samples=None)


def test_without_the_package_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"evaluate: needs the package lm_eval: pip install 'regard\[evaluate\]'"):
        make_evaluation(learner(), ["said"], max_samples=None)
