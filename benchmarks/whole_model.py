"""A whole model's forward, watched, against the same model left alone, and against the peers that show attention.

BERT-base (padded) and a Llama of its shape (causal), random weights, float32. Contestants: the plain SDPA forward
(plain, the reference); watched for column mass, its square, entropy and the first four keys' mass in one pass (regard);
for the first four keys alone (first); for norms of keys, which need no weights (norms); Transformers' own
`output_attentions=True`, the same four reductions taken from its matrices (eager); TransformerLens with a hook on each
pattern (lens) and nnsight with each layer's weights (nnsight), both reduced layer by layer as they come, so that they
need not hold all matrices. Peers that are not installed are left out, and so is what would take over 6 GiB.

    python -m benchmarks.whole_model [--quick] [--full] [--threads N] [--out FILE]     about 10 minutes on one core
"""

import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel

import regard
from benchmarks.timing import device, keep, on_gpu, parser, prepared, race, row
from regard.statistics import STATISTICS, ColumnMass, FirstMass, SinkDeviation

LAYERS, HEADS, FIRST = 12, 12, 4
MOST_MEMORY = 6 * 2**30
LONGEST = 8192
CASES = [(1, 128), (8, 128), (1, 512), (1, 2048)]
FULL = [(1, 64), (8, 64), *CASES, (8, 512), (1, 4096), (8, 2048), (1, 8192)]
QUICK = [(2, 32)]
SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS},
    "base": {"hidden_size": 768, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
    "billion": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Sizes of the models, by name."""
Reduced = list[dict[str, Tensor]]


def reduced(weights: Tensor, real: Tensor | None) -> dict[str, Tensor]:
    """The four reductions of one layer's matrices (batch, head, query, key)."""
    counted = weights if real is None else weights * real[:, None, :, None]
    return {
        "column_mass": counted.sum(-2),
        "column_square": counted.square().sum(-2),
        "entropy": torch.special.entr(weights).sum(-1),
        "first_mass": weights[..., :FIRST].clone(),
    }


class Case:
    """One model, one batch, and everybody who looks at it."""

    def __init__(self, kind: str, batch: int, length: int, *, size: str = "base") -> None:
        self.batch, self.length = batch, length
        generator = torch.Generator(device()).manual_seed(0)
        shape = dict(SHAPES[size])
        torch.manual_seed(0)
        ids = torch.randint(100, 1000, (batch, length), generator=generator)
        self.inputs: dict[str, Any] = {"input_ids": ids}
        self.real: Tensor | None = None
        if kind == "bert":
            config: Any = BertConfig(max_position_embeddings=LONGEST, **shape)
            self.model: Any = BertModel(config, add_pooling_layer=False).eval()
            lengths = torch.linspace(length, length // 2, batch) if batch > 1 else torch.tensor([0.75 * length])
            self.real = torch.arange(length) < lengths.long()[:, None]
            self.inputs["attention_mask"] = self.real.long()
        else:
            shape.setdefault("intermediate_size", 2048)
            config = LlamaConfig(vocab_size=32000, max_position_embeddings=max(LONGEST, length), **shape)
            self.model = LlamaModel(config).eval()
            self.inputs["use_cache"] = False

    def plain(self) -> Tensor:
        """The forward as it is."""
        states: Tensor = self.model(**self.inputs).last_hidden_state
        return states

    def watched(self, *statistics: Callable[[], Any]) -> Any:
        """The forward, watched."""
        with regard.watching(self.model, [make() for make in statistics]) as seen:
            self.model(**self.inputs)
        return seen

    def eager(self) -> Reduced:
        """The reductions from all matrices, as Transformers returns them."""
        self.model.set_attn_implementation("eager")
        try:
            matrices = self.model(**self.inputs, output_attentions=True).attentions
            return [reduced(weights, self.real) for weights in matrices]
        finally:
            self.model.set_attn_implementation("sdpa")

    def contestants(self) -> dict[str, Callable[[], object]]:
        """Everybody who can run here."""
        found: dict[str, Callable[[], object]] = {
            "plain": self.plain,
            "regard": lambda: self.watched(ColumnMass, SinkDeviation, STATISTICS["entropy"], lambda: FirstMass(FIRST)),
            "first": lambda: self.watched(lambda: FirstMass(FIRST)),
            "norms": lambda: self.watched(STATISTICS["key_norm"]),
        }
        matrix = self.batch * HEADS * self.length**2 * 4
        if LAYERS * matrix <= MOST_MEMORY:
            found["eager"] = self.eager
        if 6 * matrix <= MOST_MEMORY:
            for name, peer in (("lens", self._lens()), ("nnsight", self._nnsight())):
                if peer is not None:
                    found[name] = peer
        return found

    def _lens(self) -> Callable[[], Reduced] | None:
        """TransformerLens' bridge over a model of the same weights, for the causal model."""
        if not isinstance(self.model, LlamaModel) or importlib.util.find_spec("transformer_lens") is None:
            return None
        from transformer_lens.model_bridge import TransformerBridge

        host = LlamaForCausalLM(self.model.config).to(device()).eval()
        host.model.load_state_dict(self.model.state_dict())
        host.set_attn_implementation("eager")
        host.lm_head = torch.nn.Linear(
            self.model.config.hidden_size, 2, bias=False, device=device()
        )  # the others have none
        place = {"device": str(device())} if on_gpu() else {}
        with tempfile.TemporaryDirectory() as folder:
            bridge = TransformerBridge.boot_transformers("llama", hf_model=host, tokenizer=_tokenizer(folder), **place)

        def run() -> Reduced:
            found: Reduced = []

            def keep(weights: Tensor, hook: object) -> None:
                found.append(reduced(weights, self.real))

            named = [(lambda name: name.endswith("hook_pattern"), keep)]
            bridge.run_with_hooks(self.inputs["input_ids"], fwd_hooks=named, return_type=None)
            return found

        return run

    def _nnsight(self) -> Callable[[], Reduced] | None:
        """The weights of nnsight's trace over the same model on its eager path."""
        if importlib.util.find_spec("nnsight") is None:
            return None
        import nnsight

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it renames some modules of BERT, and says so of each
            traced = nnsight.NNsight(self.model)
        is_bert = isinstance(self.model, BertModel)

        def run() -> Reduced:
            self.model.set_attn_implementation("eager")
            try:
                with traced.trace(**self.inputs):
                    layers = traced.encoder.layer if is_bert else traced.layers
                    found = nnsight.save(
                        [
                            reduced((one.attention.self if is_bert else one.self_attn).output[1], self.real)
                            for one in layers
                        ]
                    )
                return list(found)
            finally:
                self.model.set_attn_implementation("sdpa")

        return run


def _tokenizer(folder: str) -> Any:
    """A tokenizer that TransformerLens may hold and load again from its folder; nothing is tokenised."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    made = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    special = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "[UNK]")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def check(case: Case) -> None:
    """Everybody sees the same, and watching changes nothing."""
    expected = case.eager()
    for name, run in case.contestants().items():
        if name in ("lens", "nnsight"):
            found = run()
            assert isinstance(found, list)
            for mine, theirs in zip(expected, found, strict=True):
                torch.testing.assert_close(mine["column_mass"], theirs["column_mass"], rtol=1e-4, atol=1e-4)
    real = case.real if case.real is not None else case.inputs["input_ids"] >= 0
    degree = torch.stack([layer["column_mass"] for layer in expected]) / real.sum(-1)[:, None, None]
    table = case.watched(ColumnMass).frame("column_mass", position=0)
    torch.testing.assert_close(
        torch.tensor(table["value"].to_numpy(dtype=float)),
        degree[..., 0].mean(1).flatten().double().cpu(),
        rtol=1e-4,
        atol=1e-5,
    )
    before = case.plain()
    with regard.watching(case.model, [ColumnMass()]):
        after = case.plain()
    torch.testing.assert_close(after[real], before[real], rtol=1e-4, atol=1e-4)


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    options = parser(__doc__)
    options.add_argument("--full", action="store_true", help="up to 8192 tokens: about an hour")
    given = prepared(options, arguments)
    transformers.logging.set_verbosity_error()
    absent = [name for name in ("transformer_lens", "nnsight") if importlib.util.find_spec(name) is None]
    if absent:
        print(f"not installed, left out: {', '.join(absent)}", file=sys.stderr)
    for kind in ("bert", "llama"):
        with device():
            case = Case(kind, 2, 40, size="small")
        check(case)
    rows = []
    for batch, length in QUICK if given.quick else FULL if given.full else CASES:
        for kind in ("llama", "bert"):
            with device():
                case = Case(kind, batch, length, size="small" if given.quick else "base")
            figures = race(case.contestants(), least=2, most=3 if given.quick else 9, budget=15)
            keep(
                row({"model": kind, "batch": batch, "length": length}, figures, "plain"), rows, "whole_model", given.out
            )


if __name__ == "__main__":
    main()
