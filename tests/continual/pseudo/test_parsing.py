"""What a generator is to say, and what is understood of what it says."""

import pytest

from regard.continual.pseudo.parsing import PromptFrame, drop_duplicates, find_frame
from regard.data.benchmarks import LONG_SEQUENCE, SUPER_NI
from regard.data.stream import TextPairs, TextTask
from tests.continual.pseudo.small_pseudo import defined
from tests.continual.small_text_tasks import task

FRAME = PromptFrame("Is it warm?", "Is it warm?\n", "\nOutput: ")


def prompted(*prompts: str, definition: str) -> TextTask:
    pairs = TextPairs(inputs=prompts, targets=(("yes",),) * len(prompts))
    return TextTask(name="one", train=pairs, dev=pairs, test=pairs, metric="exact-match", definition=definition)


@pytest.mark.parametrize("benchmark", [LONG_SEQUENCE, SUPER_NI])
@pytest.mark.parametrize("definition", ["Is {it} warm?", ""])
def test_inputs_are_found_in_published_prompts_and_put_back(benchmark: object, definition: str) -> None:
    assert benchmark in (LONG_SEQUENCE, SUPER_NI)
    form = LONG_SEQUENCE if benchmark is LONG_SEQUENCE else SUPER_NI
    template = form.prompt if definition else form.prompt_without_definition
    inputs = ["sentence 1: a\nsentence 2: b {c}", "Output: is it\nOutput: "]
    prompts = [template.format(definition=definition, input=one) for one in inputs]
    frame = find_frame(prompted(*prompts, definition=definition))
    assert [frame.extract_input(one) for one in prompts] == inputs
    assert [frame.make_prompt(one) for one in inputs] == prompts
    assert frame.definition == definition


def test_of_other_prompts_the_definition_is_taken_off_where_all_have_it() -> None:
    assert find_frame(prompted("say: a", "say: b", definition="say:")) == PromptFrame("say:", "say:", "")
    assert find_frame(prompted("say: a", "b", definition="say:")) == PromptFrame("say:", "", "")
    assert find_frame(task("animals")) == PromptFrame("", "", "")
    assert find_frame(defined("animals")).make_prompt("the cat") == "animals :\nthe cat\nOutput: "


def test_what_is_told_is_parsed_again() -> None:
    assert FRAME.make_sample("the sun") == "Is it warm? __inp__ the sun"
    assert FRAME.parse(FRAME.make_sample("the sun")) == "the sun"
    assert FRAME.parse("Is is warm __inp__  ice ") == "ice"
    assert PromptFrame("", "", "").make_sample("ice") == "__inp__ ice"
    assert PromptFrame("", "", "").parse("__inp__ ice") == "ice"


@pytest.mark.parametrize(
    "said", ["ice", "__inp__ ice", "hot __inp__ ", "a __inp__ b __inp__ c", "a __inp__ __gen__", ""]
)
def test_what_does_not_parse_is_nothing(said: str) -> None:
    assert FRAME.parse(said) is None


def test_texts_that_differ_in_white_space_are_the_same() -> None:
    assert drop_duplicates(["a  b", "a b", "b", " a\nb ", "B", "b"]) == ["a  b", "b", "B"]
