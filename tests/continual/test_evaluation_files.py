"""Which files tasks of lm-evaluation-harness are made of."""

from pathlib import Path

import pytest

from regard.continual.evaluation_files import find_task_files

TASK = """include: [shared/base.yaml, _template, tasks/_other]
task: mine
dataset_path: json
dataset_kwargs:
  data_files: {test: data/test.jsonl, validation: [data/dev-*.jsonl, "https://host/x.jsonl"]}
  cache_dir: cached
doc_to_text: notes.txt
process_docs: !function steps.clean
"""


def test_they_are_those_that_a_task_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data are looked for where the run is started, all else beside the file that names it.

    What is included need not end as YAML does, and may be named from where the run is started. A folder that reading
    fills is none of the files.
    """
    (tmp_path / "cached").mkdir()
    (tmp_path / "tasks" / "shared").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "tasks" / "group.yaml").write_text("group: all\ntask: [own.yml, arc_easy, lost.yaml]\n")
    (tmp_path / "tasks" / "own.yml").write_text(TASK)
    (tmp_path / "tasks" / "shared" / "base.yaml").write_text("include: ../own.yml\ndataset_kwargs: {data_dir: data}\n")
    beside = ("_template", "_other", "steps.py")
    data = ("data/test.jsonl", "data/dev-1.jsonl", "data/dev-2.jsonl")
    for name in (*(f"tasks/{name}" for name in beside), *data, "notes.txt", "json"):
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    found = {path.resolve().relative_to(tmp_path).as_posix() for path in find_task_files(["tasks/group.yaml", "piqa"])}
    tasks = {f"tasks/{name}" for name in (*beside, "group.yaml", "own.yml", "shared/base.yaml")}
    assert found == tasks | {"data", *data, "json"}
    assert find_task_files(["arc_easy", "lost.yaml"]) == []


def test_what_is_no_yaml_is_a_file_all_the_same(tmp_path: Path) -> None:
    broken = tmp_path / "own.yaml"
    for content in (b"task: [", b"\xff", b"", b"- !other x"):
        broken.write_bytes(content)
        assert find_task_files([str(broken)]) == [broken]


def test_texts_that_can_be_no_file_are_left_out(tmp_path: Path) -> None:
    task = tmp_path / "own.yaml"
    for text in ("a" * 300, "a" * 300 + ".yaml", "a**b*.jsonl", "What is [this]?", "hf://a/*.jsonl"):
        task.write_text(f"dataset_kwargs: {{name: '{text}'}}\ndoc_to_text: '{text}'\n")
        assert find_task_files([str(task)]) == [task]


def test_absolute_patterns_are_expanded(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("x")
    task = tmp_path / "own.yaml"
    task.write_text(f"dataset_kwargs: {{data_files: '{tmp_path}/*.jsonl'}}\n")
    assert find_task_files([str(task)]) == [tmp_path / "a.jsonl", task]


def test_of_a_folder_with_named_files_these_alone_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files below the folder had a hash, of `.` those that the run itself writes: it could not be resumed."""
    (tmp_path / "data").mkdir()
    for name in ("data/a-1.jsonl", "data/a-2.jsonl", "data/b.jsonl", "b.jsonl", "weights.bin"):
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    task, found = Path("own.yaml"), {}
    for options in ("data_dir: ., data_files: b.jsonl", "data_dir: data, data_files: {test: [a-*.jsonl, b.jsonl]}"):
        task.write_text(f"dataset_kwargs: {{{options}}}\n")
        found[options] = {path.as_posix() for path in find_task_files(["own.yaml"])} - {"own.yaml"}
    assert list(found.values()) == [{"b.jsonl"}, {"data/a-1.jsonl", "data/a-2.jsonl", "data/b.jsonl"}]


@pytest.mark.parametrize("file", ["steps/own.py", "steps.own.py", "elsewhere/steps/own.py"])
@pytest.mark.every_value
def test_the_module_of_a_function_is_looked_for_as_by_lm_eval(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the task, in a folder or, by earlier versions, under the name with dots; else as Python imports it."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("def clean(documents): return documents\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    task = tmp_path / "own.yaml"
    task.write_text("process_docs: !function steps.own.clean\ndoc_to_text: !function json.tool.main\n")
    assert find_task_files([str(task)]) == sorted([tmp_path / file, task])
