"""Settings that a recorded run had by default, where the defaults are others by now."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from regard.commands.learn.config import LearnConfig
from regard.errors import UserError

BEFORE = {"target_modules": "auto", "r": 4, "joint_training": False, "gone": 3}


def record(folder: Path, *settings: dict[str, Any], **options: Any) -> Path:
    """Write what a run of sapt and replay-lora has recorded: options, and the settings of each."""
    runs = [
        {"method": " ".join([method, *options.get("set", ())]), "seed": 1, "settings": own}
        for method, own in zip(("sapt", "replay-lora"), settings, strict=False)
    ]
    folder.mkdir(exist_ok=True)
    metadata = {"command": "learn", "config": {"method": "sapt", **options}, "runs": runs}
    (folder / "results.json").write_text(json.dumps(metadata))
    return folder


def test_a_run_taken_from_another_keeps_defaults_of_then_and_says_so(tmp_path: Path) -> None:
    """As adapters of queries and values were: all linear layers were trained in their place without a word.

    A record from before known tasks had their adapters lacks the setting: its router answered them.
    """
    run = record(tmp_path, BEFORE, set=["init=nothing"])
    with pytest.warns(
        UserWarning, match=r"^config: sapt had joint_training=false known_task=router r=4 target_modules=auto in "
    ) as said:
        config = LearnConfig.from_options(run, {})
    assert len(said) == 1
    assert config.set == ("init=nothing", "joint_training=false", "known_task=router", "r=4", "target_modules=auto")
    settings = config.make_method().config.to_dict()
    assert {name: settings[name] for name in BEFORE if name != "gone"} | {"gone": 3} == BEFORE


def test_what_is_given_now_holds_and_what_was_given_then_is_no_default(tmp_path: Path) -> None:
    run = record(tmp_path, BEFORE | {"known_task": "adapter"}, set=["r=4"])
    with pytest.warns(UserWarning, match="had joint_training=false in "):
        config = LearnConfig.from_options(run, {"set": ("target_modules=all-linear",)})
    assert config.set == ("target_modules=all-linear", "joint_training=false"), "r=4 was replaced by the new list"


def test_without_other_defaults_methods_or_runs_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text(json.dumps({"method": "sapt", "set": ["r=4"]}))
    run = record(
        tmp_path / "run", LearnConfig(method="sapt", set=("r=4",)).make_method().config.as_recorded(), set=["r=4"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path, options in ((tmp_path / "options.json", {}), (run, {}), (run, {"method": "finetune", "set": ()})):
            assert LearnConfig.from_options(path, options).set == options.get("set", ("r=4",))


def test_values_that_one_item_cannot_say_are_refused(tmp_path: Path) -> None:
    run = record(tmp_path, {"r": 4, "known_task": "adapter"}, {"r": 2}, method="sapt,replay-lora")
    with pytest.raises(
        UserError, match=r"^config: r was 4 with sapt and 2 with replay-lora in .*; give --set r=VALUE$"
    ):
        LearnConfig.from_options(run, {})
    assert LearnConfig.from_options(run, {"set": ("r=2",)}).set == ("r=2",)
    with pytest.warns(UserWarning, match="replay-lora had r=2 in "):
        assert LearnConfig.from_options(run, {"method": "replay-lora"}).set == ("r=2",)
