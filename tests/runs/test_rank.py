"""Which process writes and prints, and how many there are, by what launchers set."""

import pytest

from regard.errors import UserError
from regard.runs.rank import is_main_process, num_processes

pytestmark = pytest.mark.every_value


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "given, is_main, number",
    [
        ({}, True, 1),
        ({"RANK": "8"}, True, 1),
        ({"RANK": ""}, True, 1),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True, 1),
        ({"RANK": "0", "WORLD_SIZE": "4"}, True, 4),
        ({"RANK": "3", "WORLD_SIZE": "4"}, False, 4),
        ({"WORLD_SIZE": "2"}, True, 2),
        ({"RANK": " 0 ", "WORLD_SIZE": " 2 "}, True, 2),
        ({"RANK": "1", "WORLD_SIZE": " 1 "}, True, 1),
    ],
)
def test_the_first_of_several_writes_and_one_alone_does(
    given: dict[str, str], is_main: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert (is_main_process(), num_processes()) == (is_main, number)


@pytest.mark.parametrize("value", ["", "two", "0", "-1", "1.5"])
def test_what_is_no_number_of_processes_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(UserError, match=f"environment variable WORLD_SIZE: expected .*, got '{value}'$"):
        num_processes()
    is_main_process()  # which says errors, and has none itself
