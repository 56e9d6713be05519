"""Tasks of lm-evaluation-harness on the taught language model, adapters and routers among it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from regard.continual.evaluation_files import YAML
from regard.continual.learner import IGNORE_INDEX, Learner, Row
from regard.continual.network import as_float32
from regard.continual.scoring import NO_TASK
from regard.continual.text_learner import TextLearner, make_batch
from regard.data.tokenizers import drop_prefix, tokenize_once, tokenize_text
from regard.errors import UserError, describe_error, warn_user
from regard.models.limits import maximum_length
from regard.runs.quiet import suppress_logging

MAX_NEW_TOKENS = 256
"""Tokens of an answer, if a task does not say how many."""


def make_evaluation(
    learner: Learner, names: Sequence[str], *, max_samples: int | None
) -> Callable[[Learner, int], list[Row]]:
    """Return a function that scores the taught model on tasks of lm-evaluation-harness.

    It gives a row for each task and metric, `statistic` "TASK METRIC". A text is scored or continued as the rows of the
    stream are: a router reads the context, soft prompts stand before it.

    Args:
        learner: The run.
        names: Names of tasks or groups, or YAML files of tasks.
        max_samples: Rows of each task, at most.

    Returns:
        A function of the run and its number of trained tasks.

    Raises:
        UserError: The package is missing, a task cannot be read, or the stream is not text to text.
    """
    if not isinstance(learner, TextLearner):
        problem = "a classifier cannot continue a text"
        raise UserError(f"evaluate: expected tasks from text to text (--task-type generation), {problem}")
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError("evaluate: needs the package lm_eval: pip install 'regard[evaluate]'") from error
    files = [str(Path(name).absolute()) if name.endswith(YAML) else name for name in names]
    missing = next((file for file in files if file.endswith(YAML) and not Path(file).is_file()), None)
    if missing is not None:
        raise UserError(f"evaluate: expected names of tasks or YAML files of them, there is no {missing}")
    try:
        with suppress_logging():
            manager, tasks = _read_tasks(TaskManager, files, has_names=not all(file.endswith(YAML) for file in files))
    except Exception as error:  # a task may have code of its own, and its data may be anywhere
        raise UserError(f"evaluate: cannot read the tasks {', '.join(names)}: {describe_error(error)[:300]}") from error

    def evaluate(current: Learner, _: int) -> list[Row]:
        seeds: dict[str, Any] = {f"{name}random_seed": None for name in ("", "numpy_", "torch_")}
        with suppress_logging(), current.evaluation_mode(), torch.no_grad():
            results = simple_evaluate(
                _make_model(cast(TextLearner, current)),
                tasks=tasks,
                task_manager=manager,  # without it each call reads the thousands of files of all tasks
                limit=max_samples,
                bootstrap_iters=0,
                log_samples=False,
                **seeds,
            )
        return _make_rows(results)

    return evaluate


def _read_tasks(manager_class: Any, files: Sequence[str], *, has_names: bool) -> tuple[Any, list[Any]]:
    """Return the manager and the tasks; the files of lm_eval's own, thousands of them, are read if any is named."""
    try:
        manager = manager_class(include_defaults=has_names)
        return manager, list(manager.load(files)["tasks"].values())
    except (KeyError, ValueError, OSError, TypeError):  # a group of one's own may name tasks of lm_eval
        if has_names:
            raise
        return _read_tasks(manager_class, files, has_names=True)


def _make_rows(results: Any) -> list[Row]:
    """Return a row for each task and metric; lm_eval names metrics METRIC,FILTER."""
    rows = []
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            name = f"{task} {metric}" + ("" if filtered == "none" else f" ({filtered})")
            rows.append(
                {
                    "statistic": name,
                    "value": float(value),
                    "standard_error": float(error) if isinstance(error, (int, float)) else None,
                    "n": int(results["n-samples"][task]["effective"]),
                }
            )
    return rows


def _make_model(learner: TextLearner) -> Any:
    from lm_eval.api.model import TemplateLM

    class TaughtModel(TemplateLM):
        tokenizer = learner.tokenizer
        backend = "seq2seq" if learner.generator.is_encoder_decoder else "causal"

        @property
        def eot_token_id(self) -> int:
            return int(learner.tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            bos = learner.tokenizer.bos_token_id
            return self.eot_token_id if bos is None else int(bos)

        @property
        def tokenizer_name(self) -> str:
            return str(learner.tokenizer.name_or_path)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is None:
                ids: list[int] = tokenize_once(learner.tokenizer, [string])["input_ids"][0]
            else:
                ids = tokenize_text(string, learner.tokenizer, special=add_special_tokens)
            ends = self.backend == "causal" and ids[-1:] == [self.eot_token_id]  # of a text that goes on
            return ids[:-1] if ends else ids

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return _score_continuations(learner, [(context, ids) for _, context, ids in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            return [_score_text(learner, [self.prefix_token_id], self.tok_encode(one.args[0])) for one in requests]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            arguments = [(self.tok_encode(one.args[0]), dict(one.args[1])) for one in requests]
            return _continue_texts(learner, arguments)

    return TaughtModel()


def _score_continuations(
    learner: TextLearner, pairs: Sequence[tuple[list[int], list[int]]]
) -> list[tuple[float, bool]]:
    """Return the log-likelihood of each continuation, and whether it is the greedy one; the longest are read first."""
    limit, results = _maximum_length(learner), dict[int, tuple[float, bool]]()
    shares = _shared_positions(learner)
    if limit is not None and (cut := sum(len(answer) > limit - shares for _, answer in pairs)):
        warn_user(f"evaluate: {cut} of {len(pairs)} answers are longer than the model takes; their beginning is scored")
    order = sorted(range(len(pairs)), key=lambda index: -len(pairs[index][0]) - len(pairs[index][1]))
    size = learner.budget.eval_batch_size
    for start in range(0, len(order), size):
        numbers = order[start : start + size]
        answers = [pairs[number][1][: None if limit is None else limit - shares] for number in numbers]
        prompts = [
            _keep_last(pairs[number][0], limit, shares * len(answer))
            for number, answer in zip(numbers, answers, strict=True)
        ]
        rows = _make_batch(learner, prompts, answers)
        scores = as_float32(learner.network(rows)).log_softmax(-1)
        labels = rows["labels"]
        real = labels != IGNORE_INDEX
        targets = labels.clamp(min=0)
        sums = (scores.gather(-1, targets[..., None])[..., 0].double() * real).sum(1)
        greedy = ((scores.argmax(-1) == targets) | ~real).all(1)
        results |= {number: (float(sums[row]), bool(greedy[row])) for row, number in enumerate(numbers)}
    return [results[number] for number in range(len(pairs))]


def _score_text(learner: TextLearner, prefix: list[int], ids: list[int]) -> float:
    """Return the log-likelihood of a text; a long one in parts, the last behind whole context.

    They are lm_eval's windows of one token less, since a decoder reads the last token of an answer as well. A text that
    begins with the prefix, as BOS of its tokenizer, has it once: it is context, and is not scored.
    """
    limit = _maximum_length(learner)
    ids = drop_prefix(ids, prefix)
    size = len(ids) if limit is None else limit - _shared_positions(learner)
    pairs = []
    for start in range(0, len(ids), size or 1):
        end = min(start + size, len(ids))
        pairs.append((ids[end - size - 1 : start] if start else prefix, ids[start:end]))
    return sum(score for score, _ in _score_continuations(learner, pairs))


def _continue_texts(learner: TextLearner, requests: Sequence[tuple[list[int], dict[str, Any]]]) -> list[str]:
    """Return the greedy continuation of each text, up to the first of the strings in `until`."""
    sampled = next((options for _, options in requests if options.get("do_sample")), None)
    if sampled is not None:
        raise UserError("evaluate: expected tasks with greedy answers, got one with do_sample")
    limit, answers = _maximum_length(learner), dict[int, str]()
    shares = _shared_positions(learner)
    lengths = [int(options.get("max_gen_toks", MAX_NEW_TOKENS)) for _, options in requests]
    order = sorted(range(len(requests)), key=lambda index: (lengths[index], len(requests[index][0])))
    while order:
        new_tokens = lengths[order[0]] if limit is None else min(lengths[order[0]], limit // (1 + shares))
        same = [index for index in order if lengths[index] == lengths[order[0]]][: learner.budget.eval_batch_size]
        order = order[len(same) :]
        prompts = [_keep_last(requests[index][0], limit, shares * new_tokens) for index in same]
        ids = learner.network.generate(_make_batch(learner, prompts, [[0]] * len(same)), new_tokens)
        for index, text in zip(same, learner.decode_answers(ids, strip=False), strict=True):
            until = requests[index][1].get("until") or []
            for end in [until] if isinstance(until, str) else until:
                text = text.split(end)[0] if end else text
            answers[index] = text
    return [answers[index] for index in range(len(requests))]


def _shared_positions(learner: TextLearner) -> int:
    """Return how many positions of the prompt a token of the answer takes: none of an encoder's."""
    return 0 if learner.generator.is_encoder_decoder else 1


def _maximum_length(learner: TextLearner) -> int | None:
    return maximum_length(learner.generator.encoder, learner.tokenizer)


def _keep_last(ids: list[int], limit: int | None, answer_tokens: int) -> list[int]:
    """Return the end of a context, as much as fits beside an answer."""
    return ids if limit is None else ids[-max(1, limit - answer_tokens) :]


def _make_batch(learner: TextLearner, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> dict[str, Tensor]:
    questions, replies = list(map(torch.tensor, prompts)), list(map(torch.tensor, answers))
    pad, rows = learner.pad_token_id, torch.arange(len(prompts))
    return make_batch(questions, replies, pad, task=NO_TASK, rows=rows, device=learner.device)
