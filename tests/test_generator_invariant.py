"""``invariant=True``: a prompt's answer is the same to the last bit, whatever else is in the list."""

from __future__ import annotations

import copy
import gc
import importlib.util
import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import FAMILIES, build, family_params
from support_fuzz_cases import draw_case
from support_fuzz_check import check
from support_fuzz_models import missing
from support_interrupts import Stop
from support_invariant import (
    a_file_that_was_cut_off_is_the_same,
    alone,
    in_a_list,
    model_of,
    short_of_memory,
    strangers_and_mine,
    that_counts_rows,
    told,
)
from support_process_states import threads
from support_untouched import fingerprint
from support_word_tokenizer import word_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from hf_batchllm import BatchGenerator, ConfigError, UnsupportedModelError
from hf_batchllm.model.attention import fixed_attention, fixed_passes

SEED = 12


def answers(generator: BatchGenerator, prompt: Any = (5, 6, 7)) -> bool:
    return bool(generator.generate([list(prompt)], max_new_tokens=2, progress=False)[0].token_ids)


def llama(**config: Any) -> Any:
    """One layer, in sizes that the families do not have."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        model = LlamaForCausalLM(LlamaConfig(**{"vocab_size": 97, **sizes, **config})).eval()
    with torch.no_grad():
        for each in model.parameters():
            if each.ndim > 1:
                each.mul_(8)
    return model


# -- the promise -----------------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("first", range(0, 16, 4))
def test_some_cases_of_the_fuzzer(first: int) -> None:
    for number in range(first, first + 4):
        case = draw_case(SEED, number, invariant=True)
        if missing(case.family, case.device_loop, invariant=True):
            continue
        outcome = check(case)
        assert not outcome.error, f"{outcome.error}\n{case}"


@pytest.mark.some_cases("family")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", family_params(["llama", "qwen3", "gemma3", "mixtral"]))
def test_alone_and_among_strangers(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    expected = alone(model)
    with BatchGenerator(model, invariant=True, **short_of_memory(model)) as generator:
        found, result = in_a_list(generator)
        assert found == expected
        assert result.report.preemptions > 0 and result.report.saving > 0
    with BatchGenerator(model, invariant=True, share_prefixes=False) as generator:
        assert in_a_list(generator)[0] == expected
    with BatchGenerator(model, invariant=True, page_size=8, min_shared_tokens=4, keep_prefixes=8) as generator:
        assert in_a_list(generator)[0] == expected
        found, result = in_a_list(generator, prompt_logprobs=None)  # which are not kept
        assert found == alone(model, prompt_logprobs=None) and result.report.cached_tokens > 0


def test_without_the_flag_it_is_not_so() -> None:
    """What the test above compares would tell, of a model in which rows look at each other."""
    model = that_counts_rows(model_of("llama", torch.bfloat16))
    expected = alone(model, invariant=False)
    with BatchGenerator(model, **short_of_memory(model)) as generator:
        assert in_a_list(generator)[0] != expected


def test_beams_scores_and_calls_that_were_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", torch.bfloat16)
    prompts, mine = strangers_and_mine()
    none: dict[str, Any] = {"do_sample": None, "temperature": None, "top_p": None, "logprobs": None, "seed": None}
    beams = {**none, "prompt_logprobs": None, "num_beams": 40, "max_new_tokens": 3}  # more rows than a pass has
    settings = short_of_memory(model)
    with BatchGenerator(model, invariant=True, **{**settings, "kv_memory": None}) as generator:
        assert in_a_list(generator, **beams)[0] == alone(model, **beams)
        answers = [prompt[::-1][:9] for prompt in prompts]
        scores = generator.score(prompts, [[answer] for answer in answers], progress=False)
        for place in mine:
            (one,) = generator.score([prompts[place]], [[answers[place]]], progress=False)
            assert one.logprobs == scores[place].logprobs
    with BatchGenerator(model, word_tokenizer(97), invariant=True, **settings) as generator:
        a_file_that_was_cut_off_is_the_same(generator, tmp_path, monkeypatch)


@pytest.mark.parametrize("around", [nullcontext, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
@pytest.mark.parametrize("family", family_params(["mixtral", "gpt2"]))
def test_under_autocast_and_in_other_types(family: str, around: Callable[[], AbstractContextManager[Any]]) -> None:
    for dtype in (torch.float32,) if around is not nullcontext else (torch.float16, torch.float64):
        if family == "mixtral" and dtype == torch.float64:
            continue  # refused
        model = model_of(family, dtype)
        with around(), BatchGenerator(model, invariant=True, **short_of_memory(model)) as generator:
            assert in_a_list(generator)[0] == alone(model)


# -- sizes of real models --------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["llama", "qwen3", "gemma3", "mixtral"]))
def test_two_threads_and_three(family: str) -> None:
    options = {"max_new_tokens": 2, "num_return_sequences": 1}
    for count, dtype in ((2, torch.float32), (3, torch.bfloat16)):
        model = model_of(family, dtype)
        with threads(count), BatchGenerator(model, invariant=True, max_batch_tokens=64) as generator:
            assert in_a_list(generator, **options)[0] == alone(model, **options)
            assert torch.get_num_threads() == count


def test_functions_that_several_threads_share() -> None:
    """Each has a rest that other instructions may compute: of 1,101 numbers two threads', of 2,560 four threads' parts.

    So products alone are several threads' work.
    """
    for count, width in ((2, 1101), (4, 2560)):
        model = llama(intermediate_size=width)
        with threads(count), BatchGenerator(model, invariant=True) as generator:
            options = {"max_new_tokens": 2, "num_return_sequences": 1}
            assert in_a_list(generator, **options)[0] == alone(model, **options)
            with Watched() as seen:
                in_a_list(generator, **options)
            assert seen.threads["silu"] == {1} and seen.threads["linear"] == {count}


def test_a_large_vocabulary() -> None:
    """Two threads share a sum over one row of 40,000 numbers, and never share one over several."""
    model = llama(vocab_size=40_000)
    options = {"do_sample": True, "top_k": 0, "typical_p": 0.6, "max_new_tokens": 2, "logprobs": 1, "progress": False}
    prompts = [[number, 5] for number in range(16)]
    with threads(2), BatchGenerator(model, invariant=True) as generator:
        calls = [generator.generate([prompts[place]], **options, seed=[place]) for place in range(16)]
        found = told(generator.generate(prompts, **options, seed=list(range(16))), range(16))
        assert found == [told(call, [0])[0] for call in calls]


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_parts_that_end_elsewhere(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    expected = alone(build(family))
    monkeypatch.setattr(fixed_attention, "KEYS", 16)
    with BatchGenerator(build(family), invariant=True) as generator:
        assert in_a_list(generator)[0] != expected


def test_each_pass_has_all_its_rows() -> None:
    """Where there are fewer the rest is made up, and so are rows of the head: products always have the same shape."""
    with BatchGenerator(model_of("llama", torch.bfloat16), invariant=True) as generator, Watched() as seen:
        in_a_list(generator)
    assert seen.rows["linear"] == {fixed_passes.ROWS}


class Watched(TorchDispatchMode):
    """By the name of a function, what it ran with: how many threads there were, and how many rows it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.threads, self.rows = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        name = "linear" if function in _PRODUCTS else function.overloadpacket.__name__
        if name in ("linear", "silu"):
            self.threads[name].add(torch.get_num_threads())
            self.rows[name].add(given[function is torch.ops.aten.addmm.default].shape[-2])
        return function(*given, **(named or {}))


_PRODUCTS = {torch.ops.aten.linear.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("lfm2", "layers that carry a state"),
        ("qwen3_next", "layers that carry a state"),
        ("jetmoe", "experts of JetMoeForCausalLM cannot be run one by one"),
        ("longcat_flash", "experts of LongcatFlashForCausalLM cannot be run one by one"),
    ],
)
def test_families_that_are_refused(family: str, why: str) -> None:
    if lacking := FAMILIES[family].missing():
        pytest.skip(lacking)
    model = build(family)
    before = fingerprint(model)
    with pytest.raises(UnsupportedModelError, match=f"`invariant=True` promises the same answers .*{why}"):
        BatchGenerator(model, invariant=True)
    assert fingerprint(model) == before
    with BatchGenerator(model) as generator:
        assert answers(generator)


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 1.0)


def of_the_user(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm

    class OwnNorm(type(norm)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * 1.0

    norm.__class__ = OwnNorm


def quantised(model: Any) -> None:
    model.config.quantization_config = {"quant_method": "none"}


def with_dropout(model: Any) -> None:
    model.model.layers[0].mlp.drop = torch.nn.Dropout(0.1)
    model.train()


OBSTACLES = {
    hooked: "there are hooks on",
    of_the_user: "code in LlamaForCausalLM that is not transformers'",
    quantised: "is quantised",
    with_dropout: r"is in training mode, with dropout: call model.eval\(\) first",
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_was_done_to_a_model_is_refused(obstacle: Callable[[Any], None]) -> None:
    model = copy.deepcopy(build("llama"))
    with BatchGenerator(model, invariant=True) as generator:
        assert answers(generator)
        obstacle(model)
        before = fingerprint(model)
        with pytest.raises(UnsupportedModelError, match=OBSTACLES[obstacle]):  # it is seen in the next call, too
            answers(generator)
    with pytest.raises(UnsupportedModelError, match=OBSTACLES[obstacle]):
        BatchGenerator(model, invariant=True)
    assert fingerprint(model) == before
    if obstacle is not quantised:
        with BatchGenerator(model) as generator:
            assert answers(generator)


def test_triton_and_odd_values_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match='leave `backend="triton"` out'):
        BatchGenerator(build("llama"), invariant=True, backend="triton")
    with pytest.raises(ConfigError, match="`invariant` must be True or False, not 1"):
        BatchGenerator(build("llama"), invariant=1)
    assert BatchGenerator(build("llama"), invariant=True, backend="torch").config.invariant


@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="needs Pillow")
def test_images_are_refused_and_text_is_not() -> None:
    from support_image_prompts import model_of as pictured
    from support_image_prompts import picture, processor_of, shows, user, words

    with BatchGenerator(pictured("qwen2_5_vl"), processor_of("qwen2_5_vl"), invariant=True) as generator:
        told_of = user(shows(picture(1)), words(5, 6))
        with pytest.raises(UnsupportedModelError, match="the vision tower reads as many images at once as fit"):
            answers(generator, told_of)
        assert answers(generator, user(words(5, 6)))


# -- plans, other ways in, interrupts --------------------------------------------------------------------------------


def test_what_is_beyond_a_shared_page_is_copied() -> None:
    """Log-probabilities of prompts need the logits of each token: then prefixes end at pages."""
    start = list(range(70))
    prompts = [[*start[:70], 90 + number, number] for number in range(4)]
    with BatchGenerator(build("llama"), invariant=True, page_size=16) as generator:
        plan = generator.plan(prompts)
        assert [(segment.start, segment.end) for segment in plan.segments] == [(0, 70)]
        assert plan.total_tokens - plan.computed_tokens == 3 * 70
        result = generator.generate(prompts, max_new_tokens=3, logprobs=0, progress=False)
        assert result.report.computed_tokens == plan.computed_tokens
        assert abs(result.report.saving - plan.saving) < 1e-9
        given: dict[str, Any] = {"max_new_tokens": 3, "logprobs": 0, "prompt_logprobs": 0, "progress": False}
        whole = generator.generate(prompts, **given)
        assert whole.report.plan.computed_tokens == plan.total_tokens - 3 * 64
        for place in range(4):
            (alone,) = generator.generate([prompts[place]], **given)
            assert alone.logprobs == result[place].logprobs == whole[place].logprobs
            assert alone.prompt_logprobs == whole[place].prompt_logprobs


def test_a_seed_makes_the_same_of_a_config_of_its_own() -> None:
    """Rows with options of their own are picked in groups."""
    model = model_of("qwen3", torch.bfloat16)
    prompts, mine = strangers_and_mine()
    kinds: list[dict[str, Any]] = [
        {"do_sample": True, "top_k": 5}, {"do_sample": True, "typical_p": 0.7, "repetition_penalty": 1.3}, {},
        {"do_sample": True, "top_h": 0.5}, {"do_sample": True, "min_p": 0.02, "no_repeat_ngram_size": 2},
    ]  # fmt: skip
    configs = [GenerationConfig(max_new_tokens=4, **kinds[place % len(kinds)]) for place in range(20)]
    with BatchGenerator(model, invariant=True, max_batch_tokens=24) as generator:
        every = generator.generate(prompts, configs, seed=list(range(20)), logprobs=1, progress=False)
        for place in mine:
            one = generator.generate([prompts[place]], configs[place], seed=[place], logprobs=1, progress=False)
            assert told(one, [0]) == told(every, [place])


def test_threads_and_experts_are_put_back_after_an_interrupt() -> None:
    model = model_of("mixtral")
    before = fingerprint(model)
    files = (
        "patches/fixed_products.py",
        "model/attention/fixed_passes.py",
        "patches/fixed_forwards.py",
        "contextlib.py",
    )
    with threads(3), BatchGenerator(model, invariant=True) as generator:

        def run() -> Any:
            return generator.generate([[5, 6, 7], [8, 9]], max_new_tokens=2, progress=False)

        run()  # the first call tries the model
        every = Stop(0, files)
        expected = told(every.during(run), [0, 1])
        for at in random.Random(4).sample(range(1, every.count), 25):
            stop = Stop(at, files)
            with pytest.raises(KeyboardInterrupt):
                stop.during(run)
            assert torch.get_num_threads() == 3, stop.place
            gc.collect()
            assert fingerprint(model) == before, stop.place
        assert told(run(), [0, 1]) == expected
