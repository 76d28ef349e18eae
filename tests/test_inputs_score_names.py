"""A wrong name of an argument of ``score`` is told the right one."""

from __future__ import annotations

from typing import Any

import pytest
from support_families import build

from hf_batchllm import BatchGenerator
from hf_batchllm.errors import PromptsTypeError, UnsupportedOptionError

MEANT = {
    "choice": "did you mean `choices`",
    "choises": "did you mean `choices`",
    "continuation": "did you mean `continuations`",
    "context": "did you mean `contexts`",
    "progres": "did you mean `progress`",
    "adapters": "did you mean `adapter`",
    "on_errors": "did you mean `on_error`",
    "prompts": "is called `contexts` in score()",
    "answers": "is called `choices` in score()",
    "logprobs": "each result has `.logprobs`, one for each of its tokens, and `.logprob`, their sum",
    "top_logprobs": "come with generate(texts, max_new_tokens=1, prompt_logprobs=5)",
    "length_normalization": "`.mean_logprob` of a result, and scores.best(per=",
    "batch_size": "is not needed: the batch is as large as memory allows",
    "max_new_tokens": "is not an option of score(), which takes contexts, continuations, choices, adapter, on_error, ",
}


@pytest.fixture(scope="module")
def generator() -> BatchGenerator:
    return BatchGenerator(build("llama"))


@pytest.mark.parametrize("name", MEANT)
@pytest.mark.parametrize("given", [([[5, 6]],), ()], ids=["contexts", "nothing else"])
def test_the_right_name_is_told(generator: BatchGenerator, name: str, given: tuple[Any, ...]) -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        generator.score(*given, **{name: [[7]]})
    assert str(caught.value).startswith(f"`{name}` ") and MEANT[name] in str(caught.value)


def test_contexts_left_out(generator: BatchGenerator) -> None:
    with pytest.raises(PromptsTypeError, match=r"^`contexts` is missing: .* or None to score whole texts$"):
        generator.score(choices=[[7], [8]])
    assert len(generator.score(None, [[5, 6, 7]])) == 1


def test_a_plan_too(generator: BatchGenerator) -> None:
    with pytest.raises(UnsupportedOptionError, match="did you mean `adapter`"):
        generator.plan([[5]], adapters="a")
