"""OSF: full matrices are trained, but for the directions in which they are strong, of which each task holds more."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.lora import weight_shape
from regard.adapters.lora_pool import ALL_LINEAR, target_layers
from regard.continual import method
from regard.continual.learner import Learner
from regard.continual.network import Network
from regard.errors import UserError
from regard.models.classifier import Classifier


@dataclass(frozen=True, kw_only=True)
class OsfConfig(method.MethodConfig):
    """Settings of OSF.

    The frozen fraction grows linearly over the tasks, by default to (t − 1)/n in task t of n, as PEFT's guide advises.
    The authors' runs with T5 freeze 7 % more of the larger side with each task, decompose self-attention and
    feed-forward layers alone, and train all else freely. Here all other layers are frozen.

    Args:
        target_modules: Names of layers, "auto" (queries and values), or "all-linear" (but for a language model's head).
        frozen_fraction: Share of a matrix's directions that is frozen in the last task; 0 for 1 − 1/n.
        initial_frozen_fraction: The same in the first task.
    """

    target_modules: str = ALL_LINEAR
    frozen_fraction: method.Fraction = 0.0
    initial_frozen_fraction: method.Fraction = 0.0

    def share(self, task: int, tasks: int) -> float:
        last = self.frozen_fraction or 1 - 1 / tasks
        return self.initial_frozen_fraction + (last - self.initial_frozen_fraction) * task / max(tasks - 1, 1)


class SubspaceLayer(nn.Module):
    """A linear layer whose matrix is W = K + Û diag(S) V̂, of which K is held and U, S and V are trained.

    K = Σ_{i<k} σ_i u_i v_iᵀ are the k strongest directions when the matrix was last decomposed; U, S, V (outputs, n),
    (n,), (n, inputs) begin as the others. Û and V̂ are U and V without what they have of the held u_i and v_i.
    """

    kept: Tensor
    U_held: Tensor
    V_held: Tensor

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        inputs, outputs = weight_shape(layer)
        self.base_layer, narrow = layer, min(inputs, outputs)
        matrix: Tensor = layer.weight  # type: ignore[assignment]  # as linear layers have
        weight = (matrix if isinstance(layer, nn.Linear) else matrix.T).detach()
        options: dict[str, Any] = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32)}
        self.register_buffer("kept", weight.to(options["dtype"], copy=True))
        self.register_buffer("U_held", torch.zeros(outputs, narrow, **options))
        self.register_buffer("V_held", torch.zeros(narrow, inputs, **options))
        self.U = nn.Parameter(torch.zeros(outputs, narrow, **options))
        self.S = nn.Parameter(torch.zeros(narrow, **options))
        self.V = nn.Parameter(torch.zeros(narrow, inputs, **options))

    @property
    @torch.no_grad()
    def weight(self) -> Tensor:
        """The matrix (outputs, inputs) as it is now, without a gradient."""
        output_side, input_side = self.trainable_factors()
        return self.kept + (output_side * self.S) @ input_side

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias  # type: ignore[return-value]

    def trainable_factors(self) -> tuple[Tensor, Tensor]:
        """Û (outputs, n) and V̂ (n, inputs): U and V without what they have of directions that are held."""
        output_side = self.U - self.U_held @ (self.U_held.T @ self.U)
        return output_side, self.V - (self.V @ self.V_held.T) @ self.V_held

    def forward(self, states: Tensor) -> Tensor:
        output_side, input_side = self.trainable_factors()
        bias = None if self.bias is None else self.bias.to(self.kept.dtype)
        inputs = states if torch.is_autocast_enabled(states.device.type) else states.to(self.kept.dtype)
        low = nn.functional.linear(nn.functional.linear(inputs, input_side) * self.S, output_side)
        outputs = nn.functional.linear(inputs, self.kept, bias) + low
        return outputs if torch.is_autocast_enabled(states.device.type) else outputs.to(states.dtype)

    @torch.no_grad()
    def decompose(self, num_frozen: int) -> None:
        """Decompose the matrix as it is now, and hold its strongest directions, so many; the others are trained."""
        left, values, right = torch.linalg.svd(self.weight.double(), full_matrices=False)
        sides = ((self.U, self.U_held, left), (self.V.T, self.V_held.T, right.T))
        for factor, frozen_factor, singular_vectors in sides:
            frozen_factor.zero_()
            frozen_factor[:, :num_frozen] = singular_vectors[:, :num_frozen]
            factor.zero_()
            factor[:, num_frozen:] = singular_vectors[:, num_frozen:]
        self.S.zero_()
        self.S[num_frozen:] = values[num_frozen:]
        self.kept.copy_((left[:, :num_frozen] * values[:num_frozen]) @ right[:num_frozen])


class OsfNetwork(Network):
    """A model whose linear layers are held in their strong directions; the rest of it, but for its head, is frozen."""

    needs_wrapper = True
    trains_model = False  # but weights of its own, which the model's are decomposed into

    def __init__(self, classifier: Classifier, *, tasks: int, config: OsfConfig, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        encoder = classifier.encoder
        if any("lora_" in name for name, _ in encoder.named_parameters()):
            raise UserError("lora: expected none with osf, which trains the model's own matrices")
        names = target_layers(encoder, config.target_modules)
        encoder.requires_grad_(False)
        layers = []
        for name in names:
            parent, _, attribute = name.rpartition(".")
            layer = SubspaceLayer(encoder.get_submodule(name))
            setattr(encoder.get_submodule(parent), attribute, layer.train(encoder.training))
            layers.append(layer)
        self.layers = tuple(layers)


class Osf(method.Method):
    """Orthogonal subspace fine-tuning (arXiv 2504.07097), which peft has as OSF.

    Before each task every matrix is decomposed, W = U diag(S) V; its strongest directions are held, and in the rest U,
    S and V are trained with gradients orthogonal to these. The paper's other schedule, by how little a layer turns its
    input, is not here. peft projects gradients alone, after which AdamW's steps leave the subspace a little; here what
    has left it has no effect.
    """

    Config = OsfConfig
    Network = OsfNetwork
    supports_text = True
    plans_ahead = True

    def before_task(self, learner: Learner, task: int) -> None:
        share = self.config.share(task, len(learner.stream))
        for layer in learner.network_as(OsfNetwork).layers:
            layer.decompose(round(share * len(layer.S)))
