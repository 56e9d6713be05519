"""Claims about attention sinks (Gu et al. 2025, arXiv 2410.10781).

A part about a sink is decided where all seeds agree, two or more; a part about a difference as in `common.claims`.
"""

import math
from collections.abc import Callable, Sequence

from experiments.common.claims import (
    Claim,
    Judgment,
    Part,
    above,
    at_most,
    below,
    format_interval,
    negate,
)
from experiments.common.comparison import mean_of, paired
from experiments.common.parts import join_words
from experiments.sinks.tables import BASELINE, SINK, SINKING, STAR, Tables, format_mean, format_positions

MARGIN = 0.05
"""Nats a token, about a hundredth of these losses: a loss that is surely less than this higher counts as no higher."""
Judge = Callable[[Tables, str], Judgment]
NORMS = {"key_norm": "The key", "value_norm": "The value"}
ARCHITECTURE = ("positions", "norm", "ffn", "num_heads", "num_kv_heads")


def agree(flags: Sequence[bool]) -> Part:
    """Return the flag of all seeds if two or more agree, else None."""
    return flags[0] if len(flags) > 1 and len(set(flags)) == 1 else None


def _name(rows: Sequence[str]) -> str:
    return join_words(f"`{row}`" for row in rows)


# -- sentences -------------------------------------------------------------------------------------------------------


def rate(tables: Tables, row: str, column: str = "sink_rate") -> str:
    """Return a sentence with the sink rate of a row and the seeds in which it counts as a sink."""
    name = "virtual sink" if column == "virtual_sink_rate" else "Sink₁"
    flags = tables.has_sink(row, column)
    if not flags:
        return f"`{row}`: no {name}."
    return f"`{row}`: {name} {format_mean(tables, row, column, 1)} %, at least {SINK:g} % in {_count(flags)}."


def anywhere(tables: Tables, row: str) -> str:
    """Return a sentence with the seeds in which any position is a sink, and the strongest positions."""
    flags, positions = tables.has_sink(row, "sink_rate_max"), tables.sink_positions(row)
    where = f" (the strongest: {format_positions(positions)})" if positions else ""
    return f"`{row}`: some position is a sink in {_count(flags)}{where}."


def loss(tables: Tables, row: str) -> str:
    """Return a sentence with the validation loss of a row against its reference."""
    reference = tables.reference(row)
    difference = tables.difference(row, reference, "valid_loss")
    if difference is None:
        return f"`{row}` and `{reference}` have no seed in common."
    kinds = {None: "one seed, no interval", True: "within noise", False: "beyond noise"}
    kind = kinds[difference.overlaps] + ("" if tables.is_comparable(row) else ", of other inputs or targets")
    return f"Its validation loss differs from `{reference}` by {format_interval(difference, 3, signed=True)} ({kind})."


def _count(flags: Sequence[bool]) -> str:
    return f"{sum(flags)} of {len(flags)} {'seed' if len(flags) == 1 else 'seeds'}"


# -- judges ----------------------------------------------------------------------------------------------------------


def grows(row: str) -> Judge:
    """Return the judge of whether the first token is a sink."""
    return lambda tables, _: ([agree(tables.has_sink(row))], [rate(tables, row)])


def stays(row: str) -> Judge:
    """Return the judge of whether the first token is a sink, as in softmax."""

    def judge(tables: Tables, _: str) -> Judgment:
        sentences = [rate(tables, row), loss(tables, row)]
        if agree(tables.has_sink(BASELINE)) is not True:
            return [None], [*sentences, _nothing(BASELINE)]
        return [agree(tables.has_sink(row))], sentences

    return judge


def without(row: str, *, dearer: bool) -> Judge:
    """Return the judge of whether no position is a sink where softmax has one, and the loss is higher, or is not."""

    def judge(tables: Tables, _: str) -> Judgment:
        sentences = [rate(tables, row), anywhere(tables, row), loss(tables, row)]
        if agree(tables.has_sink(BASELINE)) is not True:
            return [None], [*sentences, _nothing(BASELINE)]
        difference = tables.difference(row, BASELINE, "valid_loss")
        none = negate(agree(tables.has_sink(row, "sink_rate_max")))
        return [none, above(difference) if dearer else at_most(difference, MARGIN)], sentences

    return judge


def _nothing(row: str) -> str:
    return f"`{row}` has no sink in all of two or more seeds, so this decides nothing."


def dear_sink(row: str) -> Judge:
    """Return the judge of whether the first token is a sink and the loss is higher."""

    def judge(tables: Tables, _: str) -> Judgment:
        parts = [agree(tables.has_sink(row)), above(tables.difference(row, BASELINE, "valid_loss"))]
        return parts, [rate(tables, row), loss(tables, row)]

    return judge


def brings_back(row: str, other: str) -> Judge:
    """Return the judge of whether the first token is a sink in one row and not in the other."""

    def judge(tables: Tables, _: str) -> Judgment:
        sentences = [rate(tables, row), rate(tables, other)]
        if agree(tables.has_sink(other)) is not False:
            return [None], [
                *sentences,
                f"`{other}` is not without a sink in all of two or more seeds, so this decides nothing.",
            ]
        return [agree(tables.has_sink(row))], sentences

    return judge


def takes_over(row: str) -> Judge:
    """Return the judge of whether the virtual sink is one and the first token no longer is."""

    def judge(tables: Tables, _: str) -> Judgment:
        other = tables.reference(row)
        sentences = [rate(tables, row, "virtual_sink_rate"), rate(tables, row), loss(tables, row)]
        has_reference = agree(tables.has_sink(other)) is True
        is_gone = negate(agree(tables.has_sink(row))) if has_reference else None
        parts = [agree(tables.has_sink(row, "virtual_sink_rate")), is_gone]
        return parts, sentences if has_reference else [*sentences, _nothing(other)]

    return judge


def weight_decay(tables: Tables, _: str) -> Judgment:
    """Judge whether the sink rate peaks at a middle weight decay and is gone at the highest."""
    decays = tables.changing("weight_decay")
    if BASELINE in tables.rows:
        decays[BASELINE] = tables.base("weight_decay")
    rows = sorted((row for row in decays if tables.has_sink(row)), key=lambda row: float(decays[row]))
    if len(rows) < 3:
        return [], []
    means = {row: float(tables.of(row)["sink_rate"].mean()) for row in rows}
    best, lowest, highest = max(means, key=lambda row: means[row]), rows[0], rows[-1]
    cells = (f"{format_mean(tables, row, 'sink_rate', 1)} % at {decays[row]:g}" for row in rows)
    sentences = [f"Sink₁ is {', '.join(cells)}."]
    rises: Part = False
    if best != lowest:
        difference = tables.difference(best, lowest, "sink_rate")
        rises = above(difference)
        text = format_interval(difference, 1, signed=True)
        sentences.append(f"The largest mean, at {decays[best]:g}, differs from that at {decays[lowest]:g} by {text}.")
    return [rises, negate(agree(tables.has_sink(highest)))], [*sentences, rate(tables, highest)]


def placed(tables: Tables, row: str, allowed: Sequence[int]) -> Part:
    """Decide whether the strongest position is an allowed one, over the seeds in which it is a sink."""
    return agree([position in allowed for position in tables.sink_positions(row)])


def prefixes(tables: Tables, _: str) -> Judgment:
    """Judge whether the strongest position is in the prefix."""
    rows = {row: int(tables.changes[row]["prefix"]) for row in tables.rows if "prefix" in tables.changes.get(row, {})}
    first = [
        f"In `{row}` that is the first token, as without a prefix."
        for row in rows
        if set(tables.sink_positions(row)) == {0}
    ]
    parts = [placed(tables, row, range(size)) for row, size in rows.items()]
    return parts, [*(anywhere(tables, row) for row in rows), *first]


def fixed_tokens(tables: Tables, _: str) -> Judgment:
    """Judge whether a fixed token at another position is the strongest."""
    rows = {row: at for row, at in tables.changing("fixed_token").items() if at is not None}
    return [placed(tables, row, [at]) for row, at in rows.items()], [anywhere(tables, row) for row in rows]


def windows(tables: Tables, _: str) -> Judgment:
    """Judge whether the first token is the strongest in a window; undecided where the window rules out more than ε."""
    parts: list[Part] = []
    sentences = []
    for row, size in tables.changing("window").items():
        sentences.append(anywhere(tables, row))
        if (most := size / tables.length) <= tables.epsilon:
            uniform = math.fsum(1 / n for n in range(1, size + 1)) / tables.length
            sentences.append(
                f"With {size} of {tables.length} queries that see it, the first token gets at most {most:.2f}, which "
                f"ε = {tables.epsilon:g} rules out; mean α₁ is {format_mean(tables, row, 'alpha_first', 3)}, "
                f"{uniform:.3f} with uniform attention."
            )
            parts.append(None)
        else:
            parts.append(placed(tables, row, [0]))
    return parts, sentences


def weaker_below(field: str) -> Judge:
    """Return the judge of whether the sink rate is lower at lower values of a field."""

    def judge(tables: Tables, _: str) -> Judgment:
        base = float(tables.base(field))
        rows = [row for row, value in tables.changing(field).items() if float(value) < base]
        parts, sentences = [], [rate(tables, BASELINE)]
        for row in rows:
            difference = tables.difference(row, BASELINE, "sink_rate")
            parts.append(negate(above(difference)))
            text = format_interval(difference, 1, signed=True)
            sentences += [rate(tables, row), f"It differs from `{BASELINE}` by {text} points, at as many steps."]
        return parts, sentences

    return judge


def norms(tables: Tables, _: str) -> Judgment:
    """Judge whether the first token's state, relative to others, is larger with softmax than with sigmoid."""
    difference = tables.difference(BASELINE, "sigmoid", "norm_ratio")
    ratios = join_words(f"{format_mean(tables, row, 'norm_ratio', 2)} (`{row}`)" for row in (BASELINE, "sigmoid"))
    return [above(difference)], [
        f"The largest of all layers is {ratios}, a difference of {format_interval(difference, 2, signed=True)}."
    ]


def small_first(*columns: str) -> Judge:
    """Return the judge of whether norms of the first token are below the mean of the others', in heads with a sink."""

    def judge(tables: Tables, _: str) -> Judgment:
        means = {column: mean_of(tables.activation(BASELINE, SINKING, column)) for column in columns}
        known = {column: mean for column, mean in means.items() if mean is not None}
        return [below(mean, 1) for mean in known.values()], [
            f"{NORMS[column]} of the first token is {format_interval(mean, 2)} times the others' mean ({mean.n} seeds)."
            for column, mean in known.items()
        ]

    return judge


def by_angle(tables: Tables, _: str) -> Judgment:
    """Judge whether queries are nearer to the first key in angle, and not by longer vectors, in heads with a sink."""
    first, others = (tables.activation(BASELINE, SINKING, f"cosine_{keys}") for keys in ("first", "others"))
    norms = mean_of(tables.activation(BASELINE, SINKING, "qk_norm"))
    if norms is None:
        return [], []
    texts = [format_interval(mean_of(values), 2) for values in (first, others)]
    return [above(paired(first, others)), negate(above(norms, 1))], [
        f"The cosine of queries and the first key is {texts[0]}, with other keys {texts[1]}, a difference of "
        f"{format_interval(paired(first, others), 2, signed=True)}; |q||k| is {format_interval(norms, 2)} times theirs."
    ]


def undecided_by(*names: str) -> Judge:
    """Return the judge of whether the first token is a sink in every row that changes one of these fields."""

    def judge(tables: Tables, _: str) -> Judgment:
        parts = {row: agree(tables.has_sink(row)) for row in tables.changing(*names)}
        kinds: dict[Part, str] = {True: "a sink in every seed", False: "none in any seed", None: "undecided"}
        sentences = [
            f"{kind[0].upper()}{kind[1:]}: {_name(rows)}."
            for value, kind in kinds.items()
            if (rows := [row for row, part in parts.items() if part is value])
        ]
        if agree(tables.has_sink(BASELINE)) is not True:
            return [None] * len(parts), [*sentences, _nothing(BASELINE)]
        return list(parts.values()), sentences

    return judge


# -- claims ----------------------------------------------------------------------------------------------------------

_SIXTY = "60M: Sink₁ {} %, loss {}"
_VIRTUAL = "60M: virtual sink {} %, Sink₁ {} %, loss {}"
ACTIVATIONS_COMMAND = "python -m experiments.sinks.activations --work DIR"
OPERATIONS, BIASES, OPTIMIZATION = "Attention operations", "K/V biases", "Optimization"
DATA, LOSS, MODEL = "Data", "Loss function", "Architecture"


def _takes_over(name: str, row: str, virtual: str, first: str) -> Claim[Tables]:
    text = f"{name} takes the sink over."
    return Claim(BIASES, text, takes_over(row), (row, BASELINE), _VIRTUAL.format(virtual, first, "3.72"))


def _without(text: str, row: str, rate: str, loss: str, *, dearer: bool) -> Claim[Tables]:
    published = _SIXTY.format(rate + STAR, loss)
    return Claim(OPERATIONS, text, without(row, dearer=dearer), (row, BASELINE), published)


CLAIMS: tuple[Claim[Tables], ...] = (
    Claim(
        OPERATIONS, "Softmax grows a sink on the first token.", grows(BASELINE), (BASELINE,), _SIXTY.format(18.18, 3.73)
    ),
    _without(
        "Sigmoid without normalization grows none, and its loss is no higher.", "sigmoid", "0.44", "3.70", dearer=False
    ),
    _without("ELU without normalization grows none, and its loss is no higher.", "elu", "0.80", "3.69", dearer=False),
    Claim(
        OPERATIONS,
        "Normalizing sigmoid brings the sink back.",
        brings_back("sigmoid, normalised", "sigmoid"),
        ("sigmoid, normalised", "sigmoid"),
        _SIXTY.format(30.24, 3.74),
    ),
    Claim(
        OPERATIONS,
        "A normalized kernel, that of ELU, has a sink too, at a higher loss.",
        dear_sink("elu kernel, normalised"),
        ("elu kernel, normalised", BASELINE),
        _SIXTY.format("53.65" + STAR, 4.19),
    ),
    _without(
        "The MLP kernel without normalization grows none, at a higher loss.", "mlp kernel", "0.74", "3.91", dearer=True
    ),
    _without("The linear kernel grows none, at a higher loss.", "linear", "0.00", "3.99", dearer=True),
    _takes_over("A learned key (K bias)", "K bias", "73.34", "0.00"),
    _takes_over("A learned key and value (KV bias)", "KV bias", "72.76", "0.04"),
    Claim(
        BIASES,
        "A learned value alone (V bias) leaves the sink where it is.",
        stays("V bias"),
        ("V bias", BASELINE),
        _SIXTY.format(17.53, 3.73),
    ),
    _takes_over("A learned token in front of the sequence", "sink token", "74.12", "0.00"),
    Claim(
        OPTIMIZATION,
        "The sink grows with weight decay, and is gone where that is too strong.",
        weight_decay,
        published="60M: Sink₁ 18.18 % at 0.1",
    ),
    Claim(OPTIMIZATION, "A lower learning rate weakens the sink.", weaker_below("learning_rate"), (BASELINE,)),
    Claim(
        OPTIMIZATION,
        "Batch size does not decide whether there is a sink.",
        undecided_by("batch_size"),
        (BASELINE,),
        "128, 256, 1024",
    ),
    Claim(LOSS, "In a prefix LM the sink is on one of the prefix's tokens.", prefixes),
    Claim(LOSS, "With a window the sink stays on the absolute first token.", windows),
    Claim(DATA, "A token fixed at another position draws the sink there.", fixed_tokens),
    Claim(DATA, "With less data the sink is weaker.", weaker_below("data_fraction"), (BASELINE,)),
    Claim(
        DATA,
        "Random tokens at some positions.",
        command="regard pretrain pico --random-tokens A:B",
        reason="The row `random tokens at 1 to 4` is in the table; the published number was not at hand.",
    ),
    Claim(
        "Activations",
        "The first token's hidden state is far larger than others' with softmax, not with sigmoid.",
        norms,
        (BASELINE, "sigmoid"),
        "1B: |h₁|/|hₜ| near 23 with softmax, 1 to 1.5 with sigmoid",
    ),
    *(
        Claim("Activations", f"In heads with a sink {text}", judge, command=ACTIVATIONS_COMMAND)
        for text, judge in (
            ("keys of the first token are shorter than others.", small_first("key_norm")),
            ("values of the first token are shorter than others.", small_first("value_norm")),
            ("queries are nearer to the first key in angle, and not by longer vectors.", by_angle),
        )
    ),
    *(
        Claim(MODEL, f"{name} not decide whether there is a sink.", undecided_by(*fields), (BASELINE,))
        for name, fields in (
            ("Positions do", ("positions",)),
            ("The place of the norm does", ("norm",)),
            ("The feed-forward layer does", ("ffn",)),
            ("The number of heads does", ("num_heads", "num_kv_heads")),
        )
    ),
    Claim("Scale", "The same with 1B parameters.", reason="Needs many GPU days: 20,000 steps of 1M tokens."),
    Claim(
        "Open models",
        "Sinks in pretrained models, on 17 domains, random and repeated tokens, with and without BOS.",
        command="regard measure MODEL",
        reason="The models and the Pile were not at hand.",
    ),
    Claim("Curves", "Sink rate during training.", figure="sinks-curves"),
)
"""Published rates are in per cent, losses in nats a token."""
