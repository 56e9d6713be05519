"""Tasks with a definition, and tiny language models that can write pseudo samples of them."""

from dataclasses import replace
from typing import Any, cast

import torch

from regard.continual.learner import Learner
from regard.continual.methods.sapt import Sapt, SaptConfig
from regard.continual.pseudo.parsing import INPUT_MARK, QUESTION
from regard.continual.run import make_learner
from regard.continual.text_learner import TextLearner
from regard.data.stream import Stream, TextPairs, TextTask
from regard.models.pretrained import Loaded
from tests.continual.small_tasks import learnt_router
from tests.continual.small_text_tasks import BUDGET, loaded, stream, task

SMALL: dict[str, Any] = {
    "r": 2,
    "router_warmup_steps": 5,
    "generator_steps": 60,
    "generator_lr": 2e-2,
    "generator_batch_size": 8,
}


def defined(name: str) -> TextTask:
    """A task whose prompts have its definition, as those of Long Sequence do."""
    plain = task(name, 8)
    train, dev, test = (_framed(one, f"{name} :") for one in (plain.train, plain.dev, plain.test))
    return replace(plain, train=train, dev=dev, test=test, definition=f"{name} :")


def _framed(pairs: TextPairs, definition: str) -> TextPairs:
    words = (one.removeprefix(definition).removesuffix("say :").strip() for one in pairs.inputs)
    return replace(pairs, inputs=tuple(f"{definition}\n{one}\nOutput: " for one in words))


def tasks(many: int = 2) -> Stream:
    """The first tasks of the stream."""
    named = tuple(defined(one.name) for one in stream().tasks[:many])
    return Stream(name="defined", tasks=named, order=tuple(range(many)), seed=0)


def writer(kind: Any = "t5", **options: Any) -> Loaded:
    """A tiny model whose tokenizer has the words that generators are asked with."""
    found = loaded(kind, width=32, **options)
    found.tokenizer.add_tokens([QUESTION, INPUT_MARK])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        cast(Any, found.model).resize_token_embeddings(len(found.tokenizer), mean_resizing=False)
    return found


def begun(kind: Any = "t5", *, of: Stream | None = None, **config: Any) -> tuple[Learner, Sapt]:
    """A run before its first task."""
    said = {**SMALL, "reflection": "generated", **config}
    if said["reflection"] != "generated" or "pseudo_samples_dir" in config:
        said = {name: value for name, value in said.items() if not name.startswith("generator_")}
    method = Sapt(SaptConfig(**learnt_router(**said)))
    return make_learner(of or tasks(), method, writer(kind), replace(BUDGET, eval_batch_size=32), seed=1), method


def texts(learner: Learner) -> TextLearner:
    """The learner as what it is."""
    assert isinstance(learner, TextLearner)
    return learner
