"""The backend over torch's attention for sequences of any length: without a GPU over a stand-in with its meaning."""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from functools import wraps
from typing import Any

import pytest
import torch
from support_families import build, family_params, random_prompts
from support_parity import assert_parity
from support_varlen import varlen as varlen
from support_varlen import varlen_attn as stand_in

from hf_batchllm import BatchConfig, BatchGenerator, BatchResult
from hf_batchllm.model.attention import varlen_attention
from hf_batchllm.model.attention.choose_backend import check_backend, make_backend
from hf_batchllm.notices import Notices

CPU = torch.device("cpu")


def generate(family: str, prompts: list[list[int]], new_tokens: int, **config: Any) -> BatchResult:
    with BatchGenerator(build(family), **config) as generator:
        return generator.generate(prompts, max_new_tokens=new_tokens)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["llama", "gemma3", "gpt_oss", "qwen3_next"]))
@pytest.mark.parametrize("kind", ["prefix", "nested", "window", "mixed"])
def test_tokens_are_those_of_generate(family: str, kind: str, varlen: dict[str, int]) -> None:
    prompts = random_prompts(random.Random(3), 97, kind, 9)
    result = generate(family, prompts, 6, page_size=16, min_shared_tokens=1)
    assert_parity(family, prompts, result, 6)
    assert varlen["calls"] and varlen["most_sequences"] > 1


def test_chunks_of_prompts_and_little_memory(varlen: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(random.Random(5), 97, "prefix", 6)
    whole = generate("llama", prompts, 5, max_batch_tokens=24)
    assert_parity("llama", prompts, whole, 5)
    before = varlen["calls"]
    monkeypatch.setattr(varlen_attention, "_GATHERED_BYTES", 1)  # a call for each sequence
    alone = generate("llama", prompts, 5, max_batch_tokens=24)
    assert alone.token_ids == whole.token_ids and varlen["calls"] > 2 * before


def test_kept_prefixes_and_beams(varlen: dict[str, int]) -> None:
    prompts = random_prompts(random.Random(6), 97, "prefix", 4)
    with BatchGenerator(build("llama"), keep_prefixes=4) as kept:
        for _ in range(2):
            assert_parity("llama", prompts, kept.generate(prompts, max_new_tokens=4), 4)
        beams = kept.generate(prompts, max_new_tokens=4, num_beams=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_batchllm.model.model_in_use.make_backend", make_backend)
        with BatchGenerator(build("llama")) as plain:
            assert plain.generate(prompts, max_new_tokens=4, num_beams=3).token_ids == beams.token_ids


def test_what_torch_cannot_do_runs_in_plain_pytorch(varlen: dict[str, int]) -> None:
    prompts = random_prompts(random.Random(7), 97, "prefix", 4)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        result = generate("gemma2", prompts, 4)
    assert_parity("gemma2", prompts, result, 4)
    assert not varlen["calls"]
    assert sum("knows no soft cap" in str(each.message) for each in heard) == 1


@pytest.mark.parametrize(
    ("dtype", "dims", "softcap", "says"),
    [
        (torch.float16, (64, 64), None, None),
        (torch.float32, (64, 64), None, "runs in float32"),
        (torch.float16, (192, 128), None, "192 and 128"),
        (torch.float16, (264, 264), None, "at most 256"),
        (torch.bfloat16, (44, 44), None, "multiple of 8"),
        (torch.bfloat16, (64, 64), 30.0, "soft cap"),
    ],
)
def test_what_torch_takes(dtype: torch.dtype, dims: tuple[int, int], softcap: float | None, says: str | None) -> None:
    reason = varlen_attention.refusal(torch.zeros(1, 1, dims[0], dtype=dtype), dims[1], softcap)
    assert reason is None if says is None else says in str(reason)


def test_the_stand_in_has_torchs_signature() -> None:
    from torch.nn.attention.varlen import varlen_attn

    real, ours = inspect.signature(varlen_attn).parameters, inspect.signature(stand_in).parameters
    assert list(ours)[:7] == list(real)[:7]
    for name in set(ours) - {"enable_gqa"}:  # of later versions
        assert real[name].kind == ours[name].kind and real[name].default == ours[name].default, name


def test_a_wrong_one_is_not_trusted(varlen: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = varlen_attention._tried.__wrapped__
    assert tried(CPU) is None
    own, request = varlen_attention._torchs_own()

    @wraps(own)
    def ends_on_the_left(*given: Any, window_size: tuple[int, int], **named: Any) -> Any:
        return own(*given, window_size=(-1, -1), **named)

    def failing(*given: Any, **named: Any) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(varlen_attention, "_torchs_own", lambda: (ends_on_the_left, request))
    assert "failed its check on this card: it is off by" in tried(CPU)
    monkeypatch.setattr(varlen_attention, "_torchs_own", lambda: (failing, request))
    assert "RuntimeError: no kernel image" in tried(CPU)


def test_a_torch_that_knows_no_word_for_grouped_heads(varlen: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11: the kernels take grouped heads, and the function has no ``enable_gqa``."""

    def older(*given: Any, return_aux: Any, scale: Any = None, window_size: tuple[int, int] = (-1, -1)) -> Any:
        return stand_in(*given, return_aux=return_aux, scale=scale, window_size=window_size, enable_gqa=True)

    _, request = varlen_attention._torchs_own()
    monkeypatch.setattr(varlen_attention, "_torchs_own", lambda: (older, request))
    assert varlen_attention._tried.__wrapped__(CPU) is None


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this library's kernels cannot run, and torch's can; the warning says so."""
    monkeypatch.setattr(
        "hf_batchllm.model.attention.choose_backend._refused", lambda config, device: "Triton is not installed"
    )
    storage: Any = None
    for reason, kind, said in ((None, "VarlenBackend", "varlen"), ("no", "TorchBackend", None)):
        monkeypatch.setattr(varlen_attention, "why_not", lambda device, reason=reason: reason)
        assert type(make_backend(BatchConfig(), CPU, storage, Notices())).__name__ == kind
        assert type(make_backend(BatchConfig(backend="torch"), CPU, storage, Notices())).__name__ == "TorchBackend"
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            check_backend(BatchConfig(), CPU, Notices())
        assert [str(each.message) for each in heard] == [] if said is None else said in str(heard[0].message)


@pytest.mark.parametrize(("capability", "says"), [((7, 5), "8.0"), ((8, 0), None)])
def test_cards(capability: tuple[int, int], says: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(varlen_attention, "_tried", lambda device: None)
    reason = varlen_attention.why_not(torch.device("cuda"))
    assert reason is None if says is None else says in str(reason)
    assert varlen_attention.why_not(CPU) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_natively(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own kernels in bfloat16 are no further from float32 than plain PyTorch in bfloat16 is."""
    reason = varlen_attention.why_not(torch.device("cuda", 0))
    assert reason is None, reason
    monkeypatch.setattr(
        "hf_batchllm.model.attention.choose_backend._refused", lambda config, device: "Triton is not installed"
    )
    prompts = random_prompts(random.Random(8), 97, "prefix", 12)
    exact = logprobs(family, "cuda", torch.float32, "torch", prompts)
    ours, plain = (logprobs(family, "cuda", torch.bfloat16, backend, prompts) for backend in ("auto", "torch"))
    assert rms(ours - exact) < 1.5 * rms(plain - exact) + 1e-3


def logprobs(family: str, device: str, dtype: torch.dtype, backend: str, prompts: list[list[int]]) -> torch.Tensor:
    """Of each token of the prompts but the first ones, given those before it."""
    model = copy.deepcopy(build(family)).to(device, dtype)
    with warnings.catch_warnings(), BatchGenerator(model, backend=backend) as generator:  # type: ignore[arg-type]
        warnings.simplefilter("ignore")
        return torch.tensor([each for score in generator.score(None, prompts) for each in score.logprobs])


def rms(errors: torch.Tensor) -> float:
    return float(errors.square().mean().sqrt())
