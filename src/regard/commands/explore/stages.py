"""What is explored: one model, or a run's network as it was after each of its tasks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor, nn

from regard import models
from regard.commands.learn.rollback import restore
from regard.continual.adapter_network import AdapterNetwork
from regard.continual.learnt_model import LearntModel
from regard.continual.methods.sapt import SaptNetwork
from regard.continual.models import LINEAGE
from regard.continual.network import Network
from regard.data.tokenizers import encode_beginning
from regard.errors import UserError
from regard.hooks import find_attention_layers
from regard.hooks.fidelity import verify_routing
from regard.hooks.modules import AttentionLayer
from regard.hooks.operation import check_computes_softmax
from regard.models.generator import Generator
from regard.models.inputs import text_inputs
from regard.models.model_files import Loaded
from regard.runs.arguments import changed_model_options
from regard.runs.output_dir import RESULTS

Kind = Literal["class", "mask", "next", "first", "states"]
"""What a stage predicts: a class, the word at a mask, the next word, the first word of an answer; or nothing."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A model as it is explored.

    Attributes:
        name: What the page calls it.
        loaded: The model whose attention is shown and replaced, and its tokenizer.
        answerer: What is called: the model itself, or a classifier around it.
        kind: What it predicts.
        classes: Names of classes; None for one that is not possible here.
        adapters: Puts the adapters of inputs into the model.
        shares: Tells the share that each adapter has now, by the name of its task; None where no router decides.
    """

    name: str
    loaded: Loaded
    answerer: Any
    kind: Kind
    classes: tuple[str | None, ...] = ()
    adapters: Callable[[dict[str, Tensor]], AbstractContextManager[None]] = lambda rows: nullcontext()
    shares: Callable[[], list[list[Any]] | None] = lambda: None

    @cached_property
    def layers(self) -> list[AttentionLayer]:
        """The attention layers, of a model that computes softmax."""
        layers = find_attention_layers(self.loaded.model)
        check_computes_softmax(self.loaded.model, layers)
        return layers

    @property
    def reads_pairs(self) -> bool:
        return self.kind in ("class", "mask", "states")

    def encode(self, text: str, pair: str, limit: int) -> tuple[dict[str, Any], int]:
        """Return the arguments of a forward for a text, or two in one input, and how many tokens there are in all."""
        encoded, number = encode_beginning(self.loaded.tokenizer, text, *([pair] if pair else []), limit=limit)
        encoded = encoded.to(self.loaded.model.device)
        if self.kind == "class":
            inputs = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
        else:
            inputs = text_inputs(self.loaded.model, encoded["input_ids"])
        if pair and "token_type_ids" in encoded:
            inputs["token_type_ids"] = encoded["token_type_ids"]
        return inputs, number


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages by name, in order, each made when it is asked for; at most two are kept. `title` names the whole."""

    title: str
    names: Sequence[str]
    get: Callable[[int], Stage]


def open_stages(name: str, method: str | None, seed: int | None, options: Mapping[str, Any]) -> Stages:
    """Return the stages of a run, or the only one of a model or of a folder that `regard rollback` wrote."""
    is_run, is_learnt = (Path(name) / RESULTS).is_file(), (Path(name) / LINEAGE).is_file()
    if (is_run or is_learnt) and (changed := changed_model_options(options)):
        raise UserError(f"{changed[0]}: expected none with {name}, which is loaded as it was trained")
    if is_run:
        stages = _open_run(Path(name), method, seed)
    elif method is not None or seed is not None:
        raise UserError(f"--method and --seed are for runs of `regard learn`; {name} is none")
    else:
        if is_learnt:
            learnt = LearntModel.from_pretrained(name)
            stage = _of_network(name, learnt.network, learnt.tokenizer, learnt.labels(), Path(name).name)
        else:
            stage = make_stage(models.load(name, **options, head=True))
        stages = Stages(stage.name, [stage.name], lambda index: stage)
    stages.get(len(stages.names) - 1)  # what cannot be explored is refused before anything is served
    return stages


def make_stage(loaded: Loaded) -> Stage:
    """Return the only stage of a model. Raises UserError if its attention cannot be shown."""
    model, config = loaded.model, cast(Any, loaded.model.config)
    architecture, classes = type(model).__name__, tuple[str, ...]()
    kind: Kind = "states"
    if model.base_model is not model or architecture.endswith("ForConditionalGeneration"):
        kind = "first" if config.is_encoder_decoder else "next"
    if architecture.endswith("ForMaskedLM"):
        kind = "mask"
    elif architecture.endswith("ForSequenceClassification"):
        kind, classes = "class", tuple(config.id2label[index] for index in range(config.num_labels))
    verify_routing(model)
    return Stage(loaded.name, loaded, model, kind, classes)


def _open_run(run: Path, method: str | None, seed: int | None) -> Stages:
    last, lineage, base = restore(run, None, method=method, seed=seed)
    tasks = [task["name"] for task in lineage["tasks"]]

    @lru_cache(maxsize=2)
    def get(index: int) -> Stage:
        network = last if index == len(tasks) - 1 else restore(run, index + 1, method=method, seed=seed, model=base)[0]
        learnt = network.classifier.config.lineage["tasks"]
        labels = tuple(dict.fromkeys(label for task in learnt for label in task["labels"]))
        return _of_network(f"after {tasks[index]}", network, base.tokenizer, labels, base.name)

    return Stages(
        f"{run.name} after each task", [f"{number}: after {name}" for number, name in enumerate(tasks, 1)], get
    )


def _of_network(name: str, network: Network, tokenizer: Any, labels: Sequence[str], base: str) -> Stage:
    adapters = network.use_adapters if isinstance(network, AdapterNetwork) else None
    if network.needs_wrapper and (adapters is None or cast(AdapterNetwork, network).lengthens_input):
        expected = "one whose texts are read as they are (LoRA, SAPT with LoRA, or a whole model)"
        raise UserError(f"method: expected {expected}, got {network.classifier.config.lineage['method']['name']}")
    answerer: Any = cast(nn.Module, network.classifier)
    model = answerer.encoder
    verify_routing(model)
    loaded = Loaded(model, tokenizer, base, None)
    more: dict[str, Any] = {} if adapters is None else {"adapters": adapters}
    if isinstance(network, SaptNetwork):
        more["shares"] = partial(_read_shares, network)
    if isinstance(answerer, Generator):
        return Stage(name, loaded, model, "first" if answerer.is_encoder_decoder else "next", **more)
    possible = tuple(label if label in labels else None for label in answerer.config.classes)
    return Stage(name, loaded, answerer, "class", possible, **more)


def _read_shares(network: SaptNetwork) -> list[list[Any]] | None:
    """Return the name of the task of each adapter with its weight for the first row under way, as `look` shows them."""
    weights, tasks = network.pool.mixture.weights, network.classifier.config.lineage["tasks"]
    if weights is None:
        return None
    weights = weights[0] if weights.dim() > 1 else weights
    names = {network.adapter_of(number): task["name"] for number, task in enumerate(tasks)}
    return [[names[adapter], round(float(weight), 4)] for adapter, weight in enumerate(weights) if adapter in names]
