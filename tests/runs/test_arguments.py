"""Names of runs, made of what they are of."""

from pathlib import Path

import pytest

from regard.cli import parser
from regard.runs.arguments import file_slug
from regard.runs.output_dir import cache_dir


@pytest.mark.parametrize(
    "name, slug",
    [
        ("org/model-7b", "org-model-7b"),
        ("../", "model"),
        (",".join(["finetune"] * 50), "-".join(["finetune"] * 50)[:80]),
    ],
    ids=["hub", "none", "long"],
)
def test_a_name_is_part_of_one_of_a_file(name: str, slug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    assert file_slug(name) == (tmp_path.name if name == "../" else slug.strip("-."))


@pytest.mark.every_value
@pytest.mark.parametrize(
    "line",
    [
        *("measure minilm", "replace minilm --task cola", "pretrain pico", "convert minilm", "learn"),
        *("look minilm hello", "compare first second", "merge first second", "rollback run 1"),
    ],
)
def test_a_tilde_that_a_shell_leaves_is_the_home_folder(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of --out=~/runs a folder named ~ was made where the command ran."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parser().parse_args([*line.split(), "--out=~/runs"]).out == tmp_path / "runs"


def test_a_tilde_in_the_variable_of_the_cache_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("REGARD_CACHE", "~/cache")
    assert cache_dir() == tmp_path / "cache"
    assert cache_dir("~/other") == tmp_path / "other"
