"""What CTR trains: plug-ins behind the layers of an encoder that stays as it is."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.continual.methods.ctr_layers import Plugin, PluginInput, Sizes
from regard.continual.network import Network
from regard.errors import UserError
from regard.models.classifier import Classifier
from regard.models.heads import LinearHead


class CtrNetwork(Network):
    """A classifier over a frozen encoder with a plug-in after the attention and the feed-forward part of each layer.

    Plug-ins see the output of the linear layer that ends either part, before its dropout, residual and normalization.
    `rows["tasks"]` says of which task each row is; `rows["slope"]` (row,) how steep masks are, which is the settings'
    `max_slope` where it is not said; `rows["noise"]` (row, plug-in, task, 2) what is added to the routers' logits.

    An encoder that is called on its own computes for the task that was begun last.

    Raises UserError for models without such layers, for LoRA, and for another head than a linear one.
    """

    needs_wrapper = True
    latest: Tensor

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        if classifier.config.lora:
            raise UserError("lora: expected none with ctr, which trains plug-ins of its own beside frozen weights")
        if not isinstance(classifier.head, LinearHead):
            raise UserError(f"head: expected linear with ctr, got {classifier.config.head}")
        layers = find_end_layers(classifier.encoder)
        sizes = Sizes(
            config.adapter_size,
            config.capsule_size,
            config.capsule_hidden_size,
            config.num_transfer_capsules,
            config.num_filters,
        )
        classifier.encoder.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.plugins = nn.ModuleList(Plugin(layer.out_features, tasks, sizes).to(layer.weight) for layer in layers)
        self.register_buffer("latest", torch.zeros((), dtype=torch.long))
        self.slope: float = config.max_slope
        self._rows: dict[str, Tensor] | None = None
        self._site: PluginInput | None = None
        classifier.encoder.register_forward_pre_hook(self._enter, with_kwargs=True)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._plug, index))

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        self._rows = rows
        try:
            return super().forward(rows)
        finally:
            self._rows = self._site = None

    def _enter(self, encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note of which tasks the rows of a forward are, and which tokens are real."""
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        mask = kwargs.get("attention_mask")
        real_mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        batch = self._rows or {"tasks": self.latest.expand(len(ids))}
        slope = batch.get("slope", torch.full((len(ids),), self.slope, device=ids.device))
        self._site = PluginInput(real_mask, batch["tasks"], slope, int(batch["tasks"].max()), batch.get("noise"))

    def _plug(self, index: int, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        assert self._site is not None, "a layer was called without its encoder"
        noise = self._site.noise
        states: Tensor = self.plugins[index](
            output, self._site._replace(noise=None if noise is None else noise[:, index])
        )
        return states

    # -- tasks ------------------------------------------------------------------------------------------

    @property
    def typed_plugins(self) -> tuple[Plugin, ...]:
        """The plug-ins: of each layer that behind the attention, and that behind the feed-forward part."""
        return tuple(cast(Plugin, plugin) for plugin in self.plugins)

    def begin_task(self, task: int, used: list[list[Tensor]]) -> None:
        """Let a task train what is its own to train: `used` says how far earlier ones use the neurons of each plug-in.

        Its own embeddings, the capsules of the tasks so far, what all share, and neurons that are not in use.
        """
        self.latest.fill_(task)
        for plugin in self.typed_plugins:
            for embeddings in plugin.specific.tasks:
                for index, embedding in enumerate(cast(nn.ParameterList, embeddings)):
                    embedding.requires_grad_(index == task)
            for index, route in enumerate(plugin.sharing.routes):
                plugin.sharing.capsules[index].requires_grad_(index <= task)
                route.requires_grad_(index <= task)
            plugin.sharing.router.requires_grad_(task > 0)
        for plugin, masks in zip(self.typed_plugins, used, strict=False):
            plugin.specific.guard(masks)

    def masks(self, task: int) -> list[list[Tensor]]:
        """Return how open the neurons of each plug-in are for a task when it has been learnt, of either layer."""
        return [plugin.specific.masks(task, self.slope) for plugin in self.typed_plugins]

    def release(self) -> None:
        for plugin in self.typed_plugins:
            plugin.specific.release()


def find_end_layers(encoder: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that end the attention and the feed-forward part of each layer, in their order.

    Raises UserError where there are none by the names that BERT gives them.
    """
    end_layers: list[nn.Linear] = []
    for layer in encoder.modules():
        try:
            layer_ends = [layer.get_submodule(name) for name in ("attention.output.dense", "output.dense")]
        except AttributeError:
            continue
        end_layers += cast("list[nn.Linear]", layer_ends)
    if not end_layers:
        raise UserError(
            f"model: expected layers as BERT, RoBERTa, ELECTRA or MiniLM have them, got {type(encoder).__name__}; "
            "ctr has no place for its plug-ins in it"
        )
    return end_layers
