"""Names in a GenerationConfig that transformers does not know: honoured, refused or warned of, never passed over."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support_accelerated import word_tokenizer
from support_families import build
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, accelerated, run_file
from hf_batchllm.errors import BatchLLMError

FAMILY = "llama"
PROMPTS = ["w5 w6", "w1"]


@pytest.fixture
def generator() -> BatchGenerator:
    return BatchGenerator(build(FAMILY), word_tokenizer())


def test_a_known_name_means_what_it_means_as_a_keyword(generator: BatchGenerator) -> None:
    free = generator.generate(PROMPTS, max_tokens=8).token_ids
    end = free[0][3]
    asked: dict[str, Any] = {"max_tokens": 8, "stop_token_ids": [end], "min_tokens": 2}
    cut = generator.generate(PROMPTS, **asked).token_ids
    assert cut != free
    assert generator.generate(PROMPTS, GenerationConfig(**asked)).token_ids == cut
    sampled = GenerationConfig(max_tokens=2, n=3, do_sample=True, ignore_eos=True)
    assert len(generator.generate(PROMPTS, sampled, seed=1)) == 6
    each = [GenerationConfig(max_tokens=2), GenerationConfig(max_tokens=4, stop_token_ids=[])]
    assert [len(row) for row in generator.generate(PROMPTS, each).token_ids] == [2, 4]
    assert len(generator.generate(PROMPTS, GenerationConfig(max_tokens=8), max_tokens=3)[0].token_ids) == 3


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        ({"presence_penalty": 1.0}, "`presence_penalty` is not an option of transformers"),
        ({"logprobs": 2}, "`logprobs` is an option of generate"),
        ({"seed": 2}, "`seed` is an option of generate.* pass seed= beside it, once for all prompts or as a list"),
        ({"kv_memory": 0.5}, "`kv_memory` is a field of BatchConfig"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "`max_tokens` contradicts `max_new_tokens`"),
        ({"stop_token_ids": ["x"]}, "`stop_token_ids` must be a list of token ids"),
        ({"n": 3}, "`num_return_sequences` is 3, and greedy decoding gives one"),
    ],
)
def test_what_cannot_be_honoured_there_is_refused(
    foreign: dict[str, Any], words: str, generator: BatchGenerator, tmp_path: Path
) -> None:
    with pytest.raises(BatchLLMError, match=words):
        generator.generate(PROMPTS, GenerationConfig(**foreign))
    with pytest.raises(BatchLLMError, match=rf"generation_config\[1\]: {words}"):
        generator.generate(PROMPTS, [GenerationConfig(max_tokens=1), GenerationConfig(**foreign)])


def test_a_config_of_a_run_goes_the_same_way(generator: BatchGenerator, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "w5"}\n')
    run_file(generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl", generation_config=GenerationConfig(max_tokens=2))
    assert '"new_tokens": 2' in (tmp_path / "out.jsonl").read_text()
    config = GenerationConfig(presence_penalty=1.0)
    with pytest.raises(BatchLLMError, match="`presence_penalty` is not"):
        run_file(generator, tmp_path / "in.jsonl", tmp_path / "other.jsonl", generation_config=config)


def test_an_unknown_name_is_warned_of_once_and_a_neutral_value_is_not(generator: BatchGenerator) -> None:
    config = GenerationConfig(max_tokens=1, stop_token_id=3, chat_format="x", presence_penalty=0, stop=[])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            generator.generate(PROMPTS, config)
    said = sorted(str(each.message) for each in warned)
    assert len(said) == 2 and "`chat_format` in the generation_config is the name of no option" in said[0]
    assert "did you mean `stop_token_ids`?" in said[1]


def test_what_the_checkpoint_says_is_not_the_callers_wish() -> None:
    model = copy.deepcopy(build(FAMILY))
    for name, value in {"n": 3, "stop_token_ids": [1, 2], "chat_format": "x", "ignore_eos": True}.items():
        setattr(model.generation_config, name, value)
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gen = BatchGenerator(model)
        assert len(gen.generate([[5, 6]], config)) == len(gen.generate([[5, 6]], max_new_tokens=2)) == 1


def test_an_accelerated_generate_reads_a_config_as_generate_does() -> None:
    model, ids = build(FAMILY), torch.tensor([[5, 6]])
    config = GenerationConfig(max_new_tokens=4, n=3, stop_token_ids=list(range(90)), logprobs=2)
    expected = model.generate(ids, generation_config=config)
    with accelerated(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.generate(ids, generation_config=config), expected)
        model.generate(ids, max_new_tokens=1, temperature=1.0)  # nor is it warned of


# -- what ends an answer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [None, 7, [7, 9]])
@pytest.mark.parametrize("more", [{}, {"min_new_tokens": 3}])
def test_end_tokens_are_the_models_own_and_more(own: Any, more: dict[str, int]) -> None:
    model = copy.deepcopy(build(FAMILY))
    model.generation_config.eos_token_id = own
    model.generation_config.pad_token_id = 0
    gen, ids = BatchGenerator(model), torch.tensor([[5, 6, 7], [1, 2, 3]])
    free = gen.generate(input_ids=ids, max_new_tokens=8, eos_token_id=None)
    end = int(free[0, 5])
    listed = [] if own is None else [own] if isinstance(own, int) else own
    for asked, eos in (
        ({"stop_token_ids": [end]}, [*listed, end]),
        ({"ignore_eos": True}, None),
        ({"ignore_eos": True, "stop_token_ids": [end]}, [end]),
    ):
        expected = model.generate(ids, max_new_tokens=8, eos_token_id=eos, **more)
        found = gen.generate(input_ids=ids, max_new_tokens=8, **asked, **more)
        assert torch.equal(found, expected), asked


# -- greedy where sampling seems to be meant -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"temperature": 1.0}, "`temperature` has"),
        ({"temperature": 0.7}, "`temperature` has"),
        ({"seed": 5}, "`seed` has"),
        ({"temperature": 1.0, "seed": 5}, "`temperature` and `seed` have"),
        ({"temperature": 1.0, "seed": 5, "do_sample": False}, None),
        ({"temperature": 0}, None),
        ({"min_p": 0.0}, None),
        ({"seed": 5, "do_sample": True}, None),
        ({"generation_config": [GenerationConfig(temperature=1.0)]}, "`temperature` has"),
        ({"generation_config": GenerationConfig(temperature=1.0, do_sample=False), "seed": 5}, None),
    ],
)
def test_a_greedy_call_that_seems_to_be_meant_for_sampling(asked: dict[str, Any], named: str | None) -> None:
    gen = BatchGenerator(build(FAMILY))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            gen.generate([[5, 6]], max_tokens=1, **asked)
    said = [str(each.message) for each in warned]
    assert said == ([] if named is None else [f"{named} no effect on greedy decoding: set `do_sample=True` to sample"])
