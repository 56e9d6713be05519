"""Names of runs, made of what they are of."""

from pathlib import Path

import pytest

from regard.runs.arguments import file_slug


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
