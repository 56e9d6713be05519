"""What a sweep needs to know of a command."""

import json
from pathlib import Path

from regard.runs.integrity import seal, sha256_of_files
from regard.runs.provenance import SCHEMA_VERSION
from tests.commands.sweep.sweeping import FAKE


def test_a_damaged_run_is_not_finished(tmp_path: Path) -> None:
    (tmp_path / "history.parquet").write_bytes(b"12345")
    record = {"command": "fake", "schema_version": SCHEMA_VERSION, "config": {"rate": 1.0}}
    text = json.dumps(seal({**record, "files": sha256_of_files(tmp_path)}))
    (tmp_path / "results.json").write_text(text, encoding="utf-8")
    assert FAKE.is_finished(tmp_path, {"rate": 1.0})
    assert not FAKE.is_finished(tmp_path, {"rate": 2.0})
    (tmp_path / "history.parquet").write_bytes(b"12344")
    assert not FAKE.is_finished(tmp_path, {"rate": 1.0})
