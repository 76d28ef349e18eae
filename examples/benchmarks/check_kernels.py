"""Whether each kernel agrees with its plain twin, on small random inputs.

    python examples/benchmarks/check_kernels.py                      # on a GPU; without one, under Triton's interpreter
    compute-sanitizer --tool memcheck python3 examples/benchmarks/check_kernels.py --cases 3

Each tensor is an allocation of its own, so that the sanitizer sees reads and writes beyond its end, and only the
kernels run on the GPU. Memory that must not be read holds NaN, and so does every output beforehand. Errors are
relative: to the result's norm for attention, and to a row's largest value for rope, norms and activations. Where tokens
are picked the error is the share of wrong ones. Exits with 1 if a kernel is off.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import bench_support  # noqa: F401  before hf_batchllm: finds the checkout
from support_attention_cases import TOLERANCE, Variant
from support_decode_cases import check_decode, decode_case
from support_prefill_cases import check_prefill, prefill_case

from hf_batchllm.kernels import (
    decode_triton,
    layer_ops_torch,
    layer_ops_triton,
    prefill_triton,
    sample_torch,
    sample_triton,
)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
F32, HALF = torch.float32, torch.bfloat16 if GPU else torch.float16  # the interpreter multiplies the bits of bfloat16
NAN = float("nan")
# The largest error that rounding explains, as a share of a row's largest value.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
Errors = Iterator[tuple[str, float, float]]  # kernel, error, largest error allowed

VARIANTS = [
    Variant(8, 2, 64, 64, 16, HALF), Variant(6, 2, 96, 80, 16, HALF, window=20), Variant(5, 1, 40, 24, 16, F32),
    Variant(8, 8, 64, 64, 32, HALF, softcap=5.0, sinks=True), Variant(4, 1, 128, 128, 64, torch.float16, window=50),
]  # fmt: skip


def attention(case: int) -> Errors:
    variant = VARIANTS[case % len(VARIANTS)]
    allowed = TOLERANCE[variant.dtype]
    plain = {"twins_on": "cpu", "guard": 0}
    decode = decode_case(case, variant, rows=16, most=3 * variant.page, prefixes=(1.0, 0.6), suffixes=case % 2 * 5)
    yield from ((name, error, allowed) for name, error in check_decode(decode_triton, decode, DEVICE, **plain).items())
    prefill = prefill_case(case, variant, chunks=3, most=2 * variant.page)
    tile = prefill_triton.launch_options(variant.group, variant.qk_dim, variant.v_dim, variant.dtype.itemsize)["tile"]
    found = check_prefill(prefill_triton, prefill, tile, DEVICE, **plain)
    yield "prefill", found["prefill"], allowed


def compare(name: str, kernel: Callable[..., Any], twin: Callable[..., Any], given: dict[str, Any]) -> Errors:
    """Compares the results of both, and what they write into the given tensors."""
    ours, theirs = (
        {key: each.to(device, copy=True) if isinstance(each, torch.Tensor) else each for key, each in given.items()}
        for device in (DEVICE, "cpu")
    )
    ours["returned"], theirs["returned"] = kernel(**ours), twin(**theirs)
    for key, want in theirs.items():
        if isinstance(want, torch.Tensor):
            got = ours[key].cpu()
            assert (got.isnan() == want.isnan()).all(), f"{name}, {key}: not written, or written where it must not be"
            if key in given and same(want, given[key]):
                assert same(got, want), f"{name} changes {key}"
            elif not want.is_floating_point():
                yield name, float((got != want).double().mean()), 0.0
            else:
                off = (got.double() - want.double()).nan_to_num().abs().amax(-1)
                largest = want.double().nan_to_num().abs().amax(-1).clamp(min=1e-30)
                yield name, float((off / largest).max()), ROUNDING[want.dtype]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def draw(rng: np.random.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(dtype)


# heads, kv_heads, dim, v_dim, rotary, the form of norms if there are any, that of the rotation
ROPE = [(8, 2, 64, 64, 64, "", "llama"), (4, 1, 256, 256, 256, "gemma", "llama"), (5, 5, 96, 80, 40, "llama", "llama")]
ROPE += [(8, 1, 64, 64, 64, "", "gpt_oss"), (3, 3, 128, 128, 128, "", "cohere")]


def rope(case: int) -> Errors:
    heads, kv_heads, dim, v_dim, rotary, norm, turn = ROPE[case % len(ROPE)]
    rng, dtype = np.random.default_rng(case), [HALF, F32][case % 2]
    tokens = int(rng.integers(1, 12))
    slots = rng.permutation(tokens + 2)[:tokens]
    slots[rng.random(tokens) < 0.2] = -1
    angle = draw(rng, tokens, rotary // 2 if turn == "gpt_oss" else rotary, dtype=F32)
    given = {
        "q": draw(rng, tokens, heads, dim, dtype=dtype),
        "k": draw(rng, tokens, kv_heads, dim, dtype=dtype),
        "v": draw(rng, tokens, kv_heads, v_dim, dtype=dtype),
        "cos": angle.cos().to(dtype),
        "sin": angle.sin().to(dtype),
        "k_cache": torch.full((tokens + 2, kv_heads, dim), NAN, dtype=dtype),
        "v_cache": torch.full((tokens + 2, kv_heads, v_dim), NAN, dtype=dtype),
        "slots": torch.from_numpy(slots),
        "norm": norm or "llama",
        "turn": turn,
    }
    if norm:
        given |= {"q_weight": draw(rng, dim, dtype=dtype), "k_weight": draw(rng, dim, dtype=dtype)}
    yield from compare("rope_and_write", layer_ops_triton.rope_and_write, layer_ops_torch.rope_and_write, given)


def norm(case: int) -> Errors:
    rng, dtype = np.random.default_rng(case), [HALF, F32][case % 2]
    tokens, hidden = int(rng.integers(1, 9)), [576, 75, 1152][case % 3]
    given = {
        "x": draw(rng, tokens, hidden, dtype=dtype),
        "residual": draw(rng, tokens, hidden, dtype=dtype) if case % 4 else None,
        "weight": draw(rng, hidden, dtype=dtype),
        "eps": 1e-5,
        "form": layer_ops_torch.NORM_FORMS[case // 2 % 4],
        "multiplier": [1.0, 0.7][case % 5 == 2],
        "inner_weight": draw(rng, hidden, dtype=dtype) if case % 3 == 1 else None,
        "out": torch.full((tokens, hidden), NAN, dtype=dtype),
    }
    yield from compare("add_rms_norm", layer_ops_triton.add_rms_norm, layer_ops_torch.add_rms_norm, given)


def activation(case: int) -> Errors:
    rng, dtype = np.random.default_rng(case), [HALF, F32][case % 2]
    tokens, inter, merged = int(rng.integers(1, 9)), [1536, 777, 128][case % 3], case % 3 == 0
    given = {
        "gate": draw(rng, tokens, inter * (1 + merged), dtype=dtype),
        "up": None if merged else draw(rng, tokens, inter, dtype=dtype),
        "activation": ["silu", "gelu_tanh"][case // 2 % 2],
        "out": torch.full((tokens, inter), NAN, dtype=dtype),
    }
    yield from compare("act_and_mul", layer_ops_triton.act_and_mul, layer_ops_torch.act_and_mul, given)


def sampling(case: int) -> Errors:
    rng, dtype = np.random.default_rng(case), [HALF, F32][case % 2]
    rows, vocabulary = int(rng.integers(1, 9)), [5003, 37, 32000][case % 3]
    logits = draw(rng, rows, vocabulary, dtype=dtype)
    out = torch.full((rows,), -7)
    yield from compare("greedy", sample_triton.greedy, sample_torch.greedy, {"logits": logits, "out": out})
    given = {
        "logits": logits,
        "temperature": 0.7,
        "seed": torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, 1)),
        **{key: torch.from_numpy(rng.integers(0, 10**6, rows)) for key in ("prompt", "sample", "position")},
        "out": out,
    }
    yield from compare("gumbel_sample", sample_triton.gumbel_sample, sample_torch.gumbel_sample, given)


def advancing(case: int) -> Errors:
    rng, page_size, most = np.random.default_rng(case), 4, 5
    rows = int(rng.integers(1, 100))
    start = rng.integers(0, 50, rows)
    offset = rng.integers(0, most * page_size, rows)
    pages = rng.permutation(rows * most).reshape(rows, most)
    pages[np.arange(most) > (offset // page_size + rng.integers(0, 2, rows))[:, None]] = -1

    def whole(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values)).to(dtype)

    given = {
        "token": whole(rng.integers(0, 99, rows), torch.int64),
        "position": whole(start + offset, torch.int64),
        "length": whole(start + offset + 1),
        "slot": whole(pages[np.arange(rows), offset // page_size] * page_size + offset % page_size, torch.int64),
        "made": whole(rng.integers(0, 9, rows)),
        "remaining": whole(rng.integers(1, 4, rows)),
        "status": whole(rng.integers(sample_torch.RUNNING, sample_torch.PADDING + 1, rows) * (rng.random(rows) < 0.5)),
        "start": whole(start),
        "pages": whole(pages),
        "produced": torch.full((rows, 3), -7),
        "sampled": whole(rng.integers(-1, 12, rows), torch.int64),
        "eos": torch.tensor([2, 7, -1]),
    }

    def by(advance: Callable[..., None]) -> Callable[..., None]:
        def called(sampled: torch.Tensor, eos: torch.Tensor, **state: torch.Tensor) -> None:
            advance(sample_torch.Rows(**state), sampled, eos, page_size)

        return called

    yield from compare("advance", by(sample_triton.advance), by(sample_torch.advance), given)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10, help="random cases of each kernel")
    cases = parser.parse_args().cases
    counts: dict[str, int] = {}
    worst: dict[str, tuple[float, float]] = {}  # the error nearest to what is allowed, and what is allowed
    wrong: list[str] = []
    for check in (attention, rope, norm, activation, sampling, advancing):
        for case in range(cases):
            seen = set()
            try:
                for name, error, allowed in check(case):
                    seen.add(name)
                    worst[name] = max(worst.get(name, (0.0, allowed)), (error, allowed), key=share)
            except AssertionError as problem:
                wrong.append(f"{check.__name__}, case {case}: {str(problem).splitlines()[0] or 'wrong'}")
            for name in seen:
                counts[name] = counts.get(name, 0) + 1
    print(f"{torch.cuda.get_device_name() if GPU else 'CPU, interpreted'}, torch {torch.__version__}")
    print(f"{'kernel':>16} {'cases':>6} {'worst error':>12} {'allowed':>9}  ok")
    for name, (error, allowed) in worst.items():
        good = share((error, allowed)) <= 1
        print(f"{name:>16} {counts[name]:6} {error:12.1e} {allowed:9.1e}  {'yes' if good else 'NO'}")
        if not good:
            wrong.append(f"{name}: off by {error}")
    for line in wrong:
        print(f"WRONG: {line}")
    return int(bool(wrong))


def share(found: tuple[float, float]) -> float:
    error, allowed = found
    return error / allowed if allowed else float("inf") * error if error else 0.0


if __name__ == "__main__":
    sys.exit(main())
