"""Our decoder under torch.export. A process of its own: the type checks of the tests do not know symbolic sizes."""

import sys

import torch
from torch import Tensor, nn
from torch.export import Dim

from regard.models import RegardConfig, RegardForCausalLM
from tests.processes import run_python

NAMES = ("softmax", "top-8", "sink-token", "stable-mask")
"""A fused kernel without a mask; a limit of keys; a token that is put in front; a column of each row."""


class Forward(nn.Module):
    def __init__(self, model: RegardForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def check(name: str) -> None:
    """A program serves other numbers of rows and tokens, fewer than `top_k` among them, with and without padding."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = RegardConfig(**sizes, num_attention_heads=2, max_position_embeddings=24, attention=name)
    module = Forward(RegardForCausalLM(config)).eval()
    dynamic = {0: Dim("rows", min=1, max=8), 1: Dim("tokens", min=2, max=24)}
    for used in (("input_ids",), ("input_ids", "attention_mask")):
        example = {key: torch.ones(3, 12, dtype=torch.long) for key in used}  # not the same tensor twice
        program = torch.export.export(module, (), example, dynamic_shapes=dict.fromkeys(used, dynamic), strict=False)
        for rows, tokens in ((2, 5), (1, 24)):
            mask = torch.ones(rows, tokens, dtype=torch.long)
            mask[0, :2] = 0
            given = {"input_ids": torch.randint(2, 30, (rows, tokens)), "attention_mask": mask}
            inputs = {key: given[key] for key in used}
            real = mask.bool() if "attention_mask" in used else slice(None)
            found, expected = program.module()(**inputs), module(**inputs)
            torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


def test_a_program_serves_other_sizes() -> None:
    answer = run_python(["-m", "tests.models.test_export", *NAMES])
    assert answer.returncode == 0, answer.stderr[-3000:]


if __name__ == "__main__":
    with torch.no_grad():
        for name in sys.argv[1:]:
            check(name)
