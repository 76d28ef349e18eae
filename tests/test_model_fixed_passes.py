"""Passes of a fixed number of rows (``invariant=True`` on a CPU): wide ones for prompts, if they give the same bits."""

from __future__ import annotations

import copy
import gc
import random
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support_families import build, family_params
from support_invariant import OPTIONS, alone, in_a_list, model_of, strangers_and_mine, told

from hf_batchllm import BatchGenerator
from hf_batchllm.engine import invariance_trial
from hf_batchllm.model.attention import fixed_attention
from hf_batchllm.model.attention.fixed_attention import FixedAttention
from hf_batchllm.model.attention.fixed_passes import ROWS, WIDE_ROWS, cuts
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.patches.fixed_products import FixedThreads, WideProducts, kind_of, kinds_that_may_be_wide

IN_THE_TRIAL = invariance_trial._WIDE_TOKENS  # passes


@pytest.fixture
def threads() -> Iterator[None]:
    """Two, of which products take both."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the passes from now on. Wide ones are tried in the first call, however few its tokens are."""
    made: list[int] = []

    def noted(*given: Any) -> list[tuple[int, int, int]]:
        found = cuts(*given)
        made.extend(size for _, _, size in found)
        return found

    monkeypatch.setattr(fixed_attention, "cuts", noted)
    monkeypatch.setattr(invariance_trial, "_WIDE_FROM", 0)
    return made


def took_wide(model: Any, sizes: list[int]) -> bool:
    """Whether wide passes were taken wherever the trial allowed it, which is a matter of the processor."""
    (allowed,) = invariance_trial._wide[model].values()
    return (sizes.count(WIDE_ROWS) > IN_THE_TRIAL) == (allowed is not None)


def off_in_wide_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = FixedAttention.attend

    def attend(self: FixedAttention, call: Any) -> torch.Tensor:
        made = own(self, call)
        if len(made) == WIDE_ROWS:
            made[60, 0, 0] *= 1 + 1e-6
        return made

    monkeypatch.setattr(FixedAttention, "attend", attend)


# -- what a step is cut into -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 65, 128, 129, 192, 193, 300, 1000])
def test_passes_cover_a_step(rows: int, wide: bool) -> None:
    dice = random.Random(rows)
    for count in (0, 1, ROWS, ROWS + 1, rows):
        wanted = np.array(sorted(dice.sample(range(rows), min(count, rows))), dtype=np.int64)
        made = cuts(rows, wanted, wide)
        assert [begin for begin, _, _ in made] == [0, *(end for _, end, _ in made[:-1])] and made[-1][1] == rows
        assert {size for _, _, size in made} <= {ROWS, WIDE_ROWS if wide else ROWS}
        for begin, end, size in made:
            assert 0 < end - begin <= size and ((wanted >= begin) & (wanted < end)).sum() <= ROWS


def test_which_passes_are_wide() -> None:
    none, every = np.empty(0, dtype=np.int64), np.arange(1000)
    assert [size for _, _, size in cuts(300, none, True)] == [128, 128, 32, 32]
    assert [size for _, _, size in cuts(200, none, True)] == [128, 128], "made-up rows cost less than three passes"
    assert {size for _, _, size in cuts(1000, every, True)} == {32}, "all of which there are logits"
    assert {size for _, _, size in cuts(1000, none, False)} == {32}


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", family_params(["llama", "qwen3", "gemma3", "mixtral", "gpt_oss", "gpt2"]))
def test_wide_passes_change_nothing(family: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(model_of(family))
    few: dict[str, Any] = {"max_new_tokens": 4}
    without = few | {"prompt_logprobs": None}
    with monkeypatch.context() as patch:
        patch.setattr(invariance_trial, "_WIDE_FROM", 10**9)
        expected = alone(model, **without), alone(model, **few)
    assert set(sizes) == {ROWS}
    with BatchGenerator(model, invariant=True) as generator:
        assert in_a_list(generator, **without)[0] == expected[0]
        assert took_wide(model, sizes)
        assert in_a_list(generator, **few)[0] == expected[1], "beside log-probabilities of prompts"
    with BatchGenerator(model, invariant=True, share_prefixes=False, page_size=8) as generator:
        assert in_a_list(generator, **without)[0] == expected[0]


def test_where_they_give_other_bits_passes_stay_narrow(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(model_of("llama"))
    expected = alone(model, prompt_logprobs=None)
    model, sizes[:] = copy.deepcopy(model), []  # which has been tried
    off_in_wide_passes(monkeypatch)
    for first in (True, False):  # it is tried once, and said in each generator
        with BatchGenerator(model, invariant=True) as generator:
            with pytest.warns(UserWarning, match=f"passes of {ROWS} rows here.* LlamaForCausalLM gave other bits"):
                found, _ = in_a_list(generator, prompt_logprobs=None)
            assert found == expected and sizes.count(WIDE_ROWS) == IN_THE_TRIAL, first


def test_few_tokens_try_nothing(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model, tried = copy.deepcopy(model_of("llama")), []
    own = invariance_trial._wide_products
    monkeypatch.setattr(invariance_trial, "_wide_products", lambda *given: tried.append(None) or own(*given))
    with BatchGenerator(model, invariant=True) as generator:
        generator.generate([[1, 2, 3]] * 3, max_new_tokens=2, progress=False)
        assert not tried
        dice = random.Random(2)
        for _ in range(2):
            prompts = [[dice.randrange(97) for _ in range(100)] for _ in range(11)]
            generator.generate(prompts, max_new_tokens=2, progress=False)
        assert len(tried) == 1


def test_half_precision_has_no_wide_passes(sizes: list[int]) -> None:
    """There products differ in a few numbers of a million, which no trial is sure to find."""
    model = copy.deepcopy(model_of("llama", torch.bfloat16))
    expected = alone(model, prompt_logprobs=None)
    with BatchGenerator(model, invariant=True) as generator:
        assert in_a_list(generator, prompt_logprobs=None)[0] == expected
    with (
        torch.autocast("cpu", torch.bfloat16),
        BatchGenerator(copy.deepcopy(model_of("llama")), invariant=True) as each,
    ):
        in_a_list(each)
    assert set(sizes) == {ROWS}


def test_modules_that_come_later(sizes: list[int]) -> None:
    """What was tried holds for their shapes. One of another shape has not been tried."""
    model = copy.deepcopy(model_of("llama"))
    with BatchGenerator(model, invariant=True) as generator:
        in_a_list(generator, prompt_logprobs=None)
    mlp, calls = model.model.layers[0].mlp, list[int]()
    products = WideProducts(ROWS, WIDE_ROWS, {kind_of(mlp.up_proj)})
    for width, whole in ((mlp.up_proj.out_features, True), (mlp.up_proj.out_features + 8, False)):
        other = torch.nn.Linear(mlp.up_proj.in_features, width, bias=mlp.up_proj.bias is not None)
        assert (kind_of(other) == kind_of(mlp.up_proj)) == whole
        own = other.forward

        def forward(x: torch.Tensor, own: Any = own) -> torch.Tensor:
            calls.append(x.shape[1])
            return own(x)

        other.forward = forward  # type: ignore[method-assign]
        calls.clear()
        products.forward_of(other)(torch.randn(1, WIDE_ROWS, other.in_features))
        assert calls == ([WIDE_ROWS] if whole else [ROWS] * 4)
    replaced = weakref.ref(mlp.up_proj)
    mlp.up_proj = copy.deepcopy(mlp.up_proj)
    gc.collect()
    assert replaced() is None, "what was tried keeps no module"


def test_an_interrupt_in_the_trial(sizes: list[int], threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(model_of("llama"))
    own, count = ModelRunner.step, [0]

    def step(self: ModelRunner, batch: Any, *latest: Any) -> torch.Tensor:
        count[0] += self.backend.wide_products is not None
        if count[0] == 1:
            raise KeyboardInterrupt
        return own(self, batch, *latest)

    expected = alone(model_of("llama"), prompt_logprobs=None)
    with BatchGenerator(model, invariant=True) as generator:
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "step", step)
            with pytest.raises(KeyboardInterrupt):
                in_a_list(generator, prompt_logprobs=None)
        assert torch.get_num_threads() == 2
        assert in_a_list(generator, prompt_logprobs=None)[0] == expected


# -- keys that several rows of a pass read ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_token_is_never_met_by_those_before_it(family: str) -> None:
    """Rows of a prompt read the same keys at once. Those that a row does not see may be no numbers."""
    model = copy.deepcopy(build(family))
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    prompt = [11, 12, 13, 14, 15]
    options: dict[str, Any] = {"max_new_tokens": 1, "prompt_logprobs": 2, "do_sample": False, "progress": False}
    with BatchGenerator(model, invariant=True, page_size=4) as generator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = generator.generate([prompt], **options)[0].prompt_logprobs
        after = generator.generate([[*prompt, 7, 16], [*prompt, 17]], on_error="record", **options)
    assert before is not None
    for each in after:
        assert each.prompt_logprobs is not None and repr(each.prompt_logprobs[:5]) == repr(before)


def test_shared_keys_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all rows of a pass that read them: those of a prompt, and those on a shared prefix."""
    gathered: list[int] = []
    own = fixed_attention.Scratch.gather

    def gather(self: Any, name: str, cache: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        gathered.append(len(keys))
        return own(self, name, cache, keys)

    monkeypatch.setattr(fixed_attention.Scratch, "gather", gather)
    model = build("llama")
    with BatchGenerator(model, invariant=True) as generator:
        generator.generate([[1, 2]], max_new_tokens=1, progress=False)  # the first call has a trial
        gathered.clear()
        generator.generate([list(range(1, 30))], max_new_tokens=1, progress=False)
        assert set(gathered) == {1}
        gathered.clear()
        prefix = [place % 90 for place in range(128)]
        generator.generate([[*prefix, 3 + place] for place in range(8)], max_new_tokens=9, progress=False)
    assert max(gathered) == 8 and gathered.count(8) < gathered.count(1), "own keys, and those of the prefix"


def test_a_row_alone_and_a_row_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether keys are read together or row by row makes no difference to the last bit."""
    prompts, mine = strangers_and_mine()
    options = {**OPTIONS, "seed": list(range(20))}
    with BatchGenerator(model_of("gemma3"), invariant=True) as generator:
        expected = told(generator.generate(prompts, **options), mine)
    own = FixedAttention._attended

    def row_by_row(self: FixedAttention, call: Any) -> torch.Tensor:
        made = self.plan.parts

        def parts(*given: Any) -> list[Any]:
            return [each if len(each.keys) == len(each.rows) else each.row_by_row for each in made(*given)]

        self.plan.parts = parts  # type: ignore[method-assign]
        try:
            return own(self, call)
        finally:
            self.plan.parts = made  # type: ignore[method-assign]

    monkeypatch.setattr(FixedAttention, "_attended", row_by_row)
    with BatchGenerator(model_of("gemma3"), invariant=True) as generator:
        assert told(generator.generate(prompts, **options), mine) == expected


# -- several threads -------------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["llama", "mixtral", "gpt2"]))
def test_several_threads(family: str, sizes: list[int], threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(model_of(family))
    with monkeypatch.context() as patch:
        patch.setattr(invariance_trial, "_WIDE_FROM", 10**9)
        expected = alone(model, prompt_logprobs=None)
    assert set(sizes) == {ROWS}
    with BatchGenerator(model, invariant=True) as generator:
        assert in_a_list(generator, prompt_logprobs=None)[0] == expected
    assert took_wide(model, sizes)


def test_products_that_differ_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own, rows = copy.deepcopy(build("llama")), torch.nn.Linear.forward, list[int]()
    one, other = model.model.layers[0].mlp.down_proj, model.model.layers[0].mlp.up_proj

    def forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[1])
        off = 1e-6 if self.weight.shape == one.weight.shape and x.shape[1] == WIDE_ROWS else 0.0
        # In pieces, as a processor may add up otherwise in one go.
        return torch.cat([own(self, piece) for piece in x.split(ROWS, 1)], 1) * (1 + off)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    kinds = kinds_that_may_be_wide(model, ROWS, WIDE_ROWS, FixedThreads())
    assert kind_of(one) not in kinds and kind_of(other) in kinds
    products, x = WideProducts(ROWS, WIDE_ROWS, kinds), torch.randn(1, WIDE_ROWS, one.in_features)
    rows.clear()
    made = products.forward_of(one)(x)
    assert rows == [ROWS] * 4 and torch.equal(made, torch.cat([one(piece) for piece in x.split(ROWS, 1)], 1))
    rows.clear()
    products.forward_of(one)(x[:, :ROWS])
    products.forward_of(other)(torch.randn(1, WIDE_ROWS, other.in_features))
    assert rows == [ROWS, WIDE_ROWS]
    rows.clear()
    products.forward_of(other)(torch.randn(1, WIDE_ROWS, 3, other.in_features))
    assert rows == [ROWS] * 4, "three rows for each of the pass: that was not tried"
