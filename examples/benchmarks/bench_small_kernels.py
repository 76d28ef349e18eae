"""How fast the small fused kernels are on this GPU, beside the plain operations of transformers.

    python examples/benchmarks/bench_small_kernels.py                                   # Llama-3.1-8B's shapes
    python examples/benchmarks/bench_small_kernels.py --model qwen3-0.6b gemma3-1b --tokens 64 8192

Each line is one operation of one layer, or of the LM head's output, for so many tokens (rows, where it samples). Times
are medians of replays of a CUDA graph that goes over several sets of inputs in turn. Bytes are those of inputs and
outputs, each once; "share" compares them with the rate of a large copy. "differ" is the share of the elements in which
kernel and plain operations differ at all, and "far" the largest difference, as a share of the largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hf_batchllm.bench.workload import SHAPES
from hf_batchllm.kernels.reference.sample_torch import PADDING, Rows
from hf_batchllm.kernels.triton import layer_ops_triton, sample_triton

Tensors = tuple[torch.Tensor, ...]
EPS = 1e-6
SETS_BYTES = 128 << 20  # of all sets of inputs: more than the L2 cache holds


@dataclass(frozen=True)
class Model:
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inter: int
    vocabulary: int
    qk_norm: bool
    form: str  # of norms

    @classmethod
    def of(cls, name: str) -> Model:
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        fields, gemma = SHAPES[name], name.startswith("gemma")
        return cls(
            *(fields[each] for each in (*names, "vocab_size")),
            gemma or name.startswith("qwen3"),
            "gemma" if gemma else "llama",
        )


MODELS = {name: Model.of(name) for name in ("llama-8b", "qwen3-0.6b", "gemma3-1b")}


@dataclass(frozen=True)
class Operation:
    name: str
    make: Callable[[], Tensors]  # a set of inputs
    ours: Callable[..., Tensors]
    plain: Callable[..., Tensors] | None
    moved: int  # bytes


def norm_module(model: Model, size: int) -> torch.nn.Module:
    module = (Gemma3RMSNorm if model.form == "gemma" else LlamaRMSNorm)(size, eps=EPS).to("cuda", torch.bfloat16)
    module.weight.data.normal_()
    return module.requires_grad_(False)


def rope(model: Model, tokens: int) -> Operation:
    heads, kv_heads, dim = model.heads, model.kv_heads, model.dim
    q_norm, k_norm = norm_module(model, dim), norm_module(model, dim)
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens]

    def make() -> Tensors:
        angle = torch.rand(tokens, dim // 2, device="cuda").repeat(1, 2)
        merged = common.randn(tokens, heads + 2 * kv_heads, dim)
        caches = (common.randn(2 * tokens, kv_heads, dim), common.randn(2 * tokens, kv_heads, dim))
        return merged, angle.cos().bfloat16(), angle.sin().bfloat16(), *caches

    def ours(merged: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *caches: torch.Tensor) -> Tensors:
        q, k, v = merged.split([heads, kv_heads, kv_heads], dim=1)
        weights = {"q_weight": q_norm.weight, "k_weight": k_norm.weight} if model.qk_norm else {}
        layer_ops_triton.rope_and_write(q, k, v, cos, sin, *caches, slots, eps=EPS, norm=model.form, **weights)
        return q, *caches

    def plain(merged: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *caches: torch.Tensor) -> Tensors:
        q, k, v = (part[None].transpose(1, 2) for part in merged.split([heads, kv_heads, kv_heads], dim=1))
        if model.qk_norm:
            q, k = q_norm(q), k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, cos[None], sin[None])
        caches[0].index_copy_(0, slots, k[0].transpose(0, 1))
        caches[1].index_copy_(0, slots, v[0].transpose(0, 1))
        return q[0].transpose(0, 1), *caches

    name = "qk norm, rope, write" if model.qk_norm else "rope, write"
    return Operation(name, make, ours, plain, 2 * 2 * tokens * (heads + 2 * kv_heads) * dim + 4 * tokens * dim)


def norms(model: Model, tokens: int, inner: bool) -> Operation:
    hidden = model.hidden
    norm, inner_norm = norm_module(model, hidden), norm_module(model, hidden)

    def ours(x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        weight = inner_norm.weight if inner else None
        normed = layer_ops_triton.add_rms_norm(x, residual, norm.weight, EPS, form=model.form, inner_weight=weight)
        return normed, residual

    def plain(x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        residual = residual + (inner_norm(x) if inner else x)
        return norm(residual), residual

    name = "norm, add, norm" if inner else "add, norm"
    return Operation(
        name, lambda: (common.randn(tokens, hidden), common.randn(tokens, hidden)), ours, plain, 8 * tokens * hidden
    )


def activation(model: Model, tokens: int) -> Operation:
    kind = "gelu_tanh" if model.form == "gemma" else "silu"
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    function = gelu if model.form == "gemma" else torch.nn.functional.silu

    def plain(merged: torch.Tensor) -> Tensors:
        gate, up = merged.chunk(2, dim=1)
        return (function(gate) * up,)

    return Operation(
        "gelu x up" if model.form == "gemma" else "silu x up",
        lambda: (common.randn(tokens, 2 * model.inter),),
        lambda merged: (layer_ops_triton.act_and_mul(merged, activation=kind),),
        plain,
        2 * 3 * tokens * model.inter,
    )


def greedy(model: Model, rows: int) -> Operation:
    return Operation(
        "greedy",
        lambda: (common.randn(rows, model.vocabulary),),
        lambda logits: (sample_triton.greedy(logits),),
        lambda logits: (logits.float().argmax(dim=-1),),
        2 * rows * model.vocabulary,
    )


def gumbel(model: Model, rows: int) -> Operation:
    """Beside the operations of torch's multinomial. The noise is another, so results are not compared."""

    def plain(logits: torch.Tensor) -> Tensors:
        weights = torch.softmax(logits.float() / 0.7, dim=-1)
        return (weights.div_(torch.empty_like(weights).exponential_(1)).argmax(dim=-1),)

    numbers = torch.arange(rows, device="cuda")
    seed = torch.tensor([5], device="cuda")
    return Operation(
        "sample",
        lambda: (common.randn(rows, model.vocabulary),),
        lambda logits: (sample_triton.gumbel_sample(logits, 0.7, seed, numbers, numbers, numbers),),
        plain,
        2 * rows * model.vocabulary,
    )


def advance(model: Model, rows: int) -> Operation:
    """Without plain operations beside it: transformers keeps this state on the host."""
    eos = torch.tensor([-2] * 4, device="cuda")

    def make() -> Tensors:
        wide = torch.full((3, rows), 1, device="cuda")
        narrow = torch.zeros(5, rows, dtype=torch.int32, device="cuda")
        narrow[2] = 1 << 30  # remaining
        narrow[3, ::9] = PADDING
        pages = torch.ones(rows, 64, dtype=torch.int32, device="cuda")
        return *wide, *narrow, pages, torch.zeros(rows, 16, dtype=torch.int64, device="cuda")

    def ours(token: torch.Tensor, position: torch.Tensor, slot: torch.Tensor, *rest: torch.Tensor) -> Tensors:
        length, made, remaining, status, start, pages, produced = rest
        state = Rows(token, position, length, slot, made, remaining, status, start, pages, produced)
        sample_triton.advance(state, token, eos, 64)
        return (token,)

    return Operation("advance", make, ours, None, rows * (4 * 8 + 8 + 8 * 4))


def measure(operation: Operation, copy: float, replays: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"operation": operation.name}
    inputs = operation.make()
    ours = operation.ours(*(each.clone() for each in inputs))
    if operation.plain is not None and operation.name != "sample":
        plain = operation.plain(*(each.clone() for each in inputs))
        pairs = [(a.double(), b.double()) for a, b in zip(ours, plain, strict=True)]
        differ = sum(int((a != b).sum()) for a, b in pairs)
        figures["differ"] = differ / sum(a.numel() for a, _ in pairs)
        figures["far"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        del pairs, plain
    size = sum(each.nbytes for each in inputs)
    sets = [operation.make() for _ in range(max(2, min(32, SETS_BYTES // size)))]
    for name, function in (("us", operation.ours), ("plain us", operation.plain)):
        if function is not None:
            figures[name] = 1e3 * common.graph_ms_of_each(sets, partial(_unpacked, function), replays)
    figures["GB/s"] = operation.moved / figures["us"] / 1e3
    figures["ratio"] = figures["plain us"] / figures["us"] if "plain us" in figures else None
    return {**figures, "share": figures["GB/s"] * 1e9 / copy}


def _unpacked(function: Callable[..., Tensors], inputs: Tensors) -> Tensors:
    return function(*inputs)


def operations(model: Model, tokens: int, sampled: int) -> list[Operation]:
    made = [rope(model, tokens), norms(model, tokens, inner=False), activation(model, tokens)]
    if model.form == "gemma":
        made.append(norms(model, tokens, inner=True))
    if tokens <= sampled:
        made += [greedy(model, tokens), gumbel(model, tokens), advance(model, tokens)]
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--model": {"nargs": "+", "choices": MODELS, "default": ["llama-8b"]},
        "--tokens": {"nargs": "+", "type": int, "default": [64, 256, 8192]},
        "--only": {"nargs": "+", "default": [""], "help": "parts of the operations' names"},
        **common.TUNE,
    }
    numbers = {"sampled": (512, "most rows through the LM head"), "replays": (15, "of each graph")}
    options = common.read(__doc__, arguments, flags, on="gpu", figures=True, **numbers)
    copy = common.begin_tuned(options.tune, (layer_ops_triton, sample_triton))
    columns = {"model": "<11", "tokens": "6", "operation": "<20", "us": "8.2f", "GB/s": "6.0f", "share": "6.1%"}
    table = common.Table({**columns, "plain us": "9.2f", "ratio": "6.1f", "differ": "8.1e", "far": "8.1e"})
    for name in options.model:
        for tokens in options.tokens:
            for operation in operations(MODELS[name], tokens, options.sampled):
                if any(part in operation.name for part in options.only):
                    found = measure(operation, copy, options.replays)
                    table.add({"model": name, "tokens": tokens, **found}, tune=options.tune)
                    torch.cuda.empty_cache()
    table.write(options.json)


if __name__ == "__main__":
    main()
