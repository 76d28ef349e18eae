"""The elementwise work of a layer in three Triton kernels; their references are in ``layer_ops_torch``.

Their time is reading and writing, so each reads its inputs once, in 16-byte pieces, and writes its results where they
are needed: rotated keys straight into the cache, the residual in place. They round to the tensors' dtype wherever the
modules of transformers do. Then only the order of a sum, and the last bit of exp or rsqrt, can make a difference. The
compiler alone would not keep the rounding: it makes a product that is rounded to half precision in half precision, and
fuses it with the sum that follows, which drops the rounding. ``enable_fp_fusion=False`` forbids that wherever there is
such a sum. The figures behind the choices are in docs/attention-notes.md.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl

LINE_ELEMENTS = 1024  # of the heads that one block of ``rope_and_write`` turns
NORM_ELEMENTS = 16  # for each thread
ACT_BLOCK = 1024  # elements for each block of 4 warps

# The forms of norms and rotations, as the kernels know them.
_FORMS = ("llama", "olmo", "gemma", "cohere", "gpt_oss", "glm", "ernie")
_LLAMA, _GEMMA, _COHERE, _GPT_OSS, _GLM, _ERNIE = (
    tl.constexpr(_FORMS.index(name)) for name in ("llama", "gemma", "cohere", "gpt_oss", "glm", "ernie")
)
_TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def _weighted(x, weight, FORM: tl.constexpr):
    """A normalised float32 tile times its weight, rounded as modules of that form do."""
    if FORM == _GEMMA:
        return (x * (1.0 + weight.to(tl.float32))).to(weight.dtype)
    if FORM == _LLAMA:
        x = x.to(weight.dtype).to(tl.float32)
    return (x * weight.to(tl.float32)).to(weight.dtype)


@triton.jit
def _normed(row, weight, inside, eps, HIDDEN: tl.constexpr, FORM: tl.constexpr):
    wide = row.to(tl.float32)
    if FORM == _COHERE:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / HIDDEN, 0.0)
    return _weighted(wide * tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps), weight, FORM)


@triton.jit
def _rounded_product(a, b):
    """Rounded to b's dtype, as a product of tensors is."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(b.dtype).to(tl.float32)


@triton.jit
def _turned_product(a, b, TURN: tl.constexpr):
    if (TURN == _COHERE) | (TURN == _ERNIE):
        return a.to(tl.float32) * b.to(tl.float32)
    return _rounded_product(a, b)


@triton.jit
def _turn_lines(
    source,  # [lines, 1] pointers to each line's first element, as is target
    target,
    valid,  # [lines, 1]
    weight,
    cos,  # pointers to the token's row of the table, as is sin
    sin,
    step,  # from one number of a table to the next
    eps,
    factor,
    MULTIPLY: tl.constexpr,  # by the factor, at the end
    NORM: tl.constexpr,
    FORM: tl.constexpr,
    TURN: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """Load heads, normalise, turn and store them. A thread holds both halves of what it turns: in place is safe."""
    HALF: tl.constexpr = ROTARY // 2
    REST: tl.constexpr = DIM - ROTARY
    total = tl.zeros([source.shape[0], 1], tl.float32)
    # Weights and tables are read for each line: a thread then has what its own elements need, and nothing moves.
    line = tl.zeros([source.shape[0], 1], tl.int32)
    if HALF > 0:
        pair = line + tl.arange(0, triton.next_power_of_2(HALF))[None, :]
        turned = pair < HALF
        # Where both numbers of a pair stand, and their angles.
        if (TURN == _COHERE) | (TURN == _GLM) | (TURN == _ERNIE):
            at, against = 2 * pair, 2 * pair + 1
        else:
            at, against = pair, HALF + pair
        inside = valid & turned
        low = tl.load(source + at, mask=inside, other=0.0)
        high = tl.load(source + against, mask=inside, other=0.0)
    if REST > 0:
        beyond = line + tl.arange(0, triton.next_power_of_2(REST))[None, :]
        outside = valid & (beyond < REST)
        rest = tl.load(source + ROTARY + beyond, mask=outside, other=0.0)

    if NORM:
        if HALF > 0:
            low, high = low.to(tl.float32), high.to(tl.float32)
            total += tl.sum(low * low, 1, keep_dims=True) + tl.sum(high * high, 1, keep_dims=True)
        if REST > 0:
            rest = rest.to(tl.float32)
            total += tl.sum(rest * rest, 1, keep_dims=True)
        scale = tl.rsqrt(total / DIM + eps)
        if HALF > 0:
            low = _weighted(low * scale, tl.load(weight + at, mask=turned, other=0.0), FORM)
            high = _weighted(high * scale, tl.load(weight + against, mask=turned, other=0.0), FORM)
        if REST > 0:
            rest = _weighted(rest * scale, tl.load(weight + ROTARY + beyond, mask=beyond < REST, other=0.0), FORM)

    if HALF > 0:
        angle = at
        if (TURN == _GLM) | (TURN == _ERNIE):
            angle = pair
        low_cos = tl.load(cos + angle * step, mask=turned, other=0.0)
        low_sin = tl.load(sin + angle * step, mask=turned, other=0.0)
        if (TURN == _GPT_OSS) | (TURN == _GLM) | (TURN == _ERNIE):
            high_cos, high_sin = low_cos, low_sin
        else:
            high_cos = tl.load(cos + against * step, mask=turned, other=0.0)
            high_sin = tl.load(sin + against * step, mask=turned, other=0.0)
        new_low = _turned_product(low, low_cos, TURN) - _turned_product(high, low_sin, TURN)
        new_high = _turned_product(high, high_cos, TURN) + _turned_product(low, high_sin, TURN)
        new_low, new_high = new_low.to(target.dtype.element_ty), new_high.to(target.dtype.element_ty)
        if MULTIPLY:
            new_low, new_high = _rounded_product(factor, new_low), _rounded_product(factor, new_high)
        tl.store(target + at, new_low.to(target.dtype.element_ty), mask=inside)
        tl.store(target + against, new_high.to(target.dtype.element_ty), mask=inside)
    if REST > 0:
        rest = rest.to(target.dtype.element_ty)
        if MULTIPLY:
            rest = _rounded_product(factor, rest).to(target.dtype.element_ty)
        tl.store(target + ROTARY + beyond, rest, mask=outside)


@triton.jit
def _rope_and_write(
    q, k, v, cos, sin, k_cache, v_cache, slots, q_out, q_weight, k_weight, q_factor,
    eps,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, table_token, table_step,  # strides
    q_blocks,  # of each token; the next ones are those of k and v
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    NORM_V: tl.constexpr,
    MULTIPLY: tl.constexpr,
    FORM: tl.constexpr,
    TURN: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot < 0) & (block >= q_blocks):
        return
    cos += token * table_token
    sin += token * table_token
    if block < q_blocks:
        head = (block * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        source = q + token * q_token + head * q_head
        target = q_out + token * out_token + head * out_head
        factor = 1.0
        if MULTIPLY:
            factor = tl.load(q_factor + token).to(tl.float32)
        _turn_lines(
            source, target, head < HEADS, q_weight, cos, sin, table_step, eps, factor, MULTIPLY, NORM_Q, FORM, TURN,
            DIM, ROTARY,
        )  # fmt: skip
    else:
        head = ((block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        valid = head < KV_HEADS
        source = k + token * k_token + head * k_head
        target = k_cache + (slot * KV_HEADS + head) * DIM
        _turn_lines(
            source, target, valid, k_weight, cos, sin, table_step, eps, 1.0, False, NORM_K, FORM, TURN, DIM, ROTARY
        )  # fmt: skip
        at = tl.arange(0, triton.next_power_of_2(V_DIM))[None, :]
        inside = valid & (at < V_DIM)
        value = tl.load(v + token * v_token + head * v_head + at, mask=inside, other=0.0)
        if NORM_V:
            wide = value.to(tl.float32)
            total = tl.sum(wide * wide, 1, keep_dims=True)
            value = (wide * tl.rsqrt(total / V_DIM + eps)).to(value.dtype)
        tl.store(v_cache + (slot * KV_HEADS + head) * V_DIM + at, value, mask=inside)


def rope_and_write(
    q: torch.Tensor,  # [tokens, heads, dim]  any strides, but for each head's dim in a row, as with k and v
    k: torch.Tensor,  # [tokens, kv_heads, dim]
    v: torch.Tensor,  # [tokens, kv_heads, v_dim]
    cos: torch.Tensor | None,  # [tokens, rotary_dim]  any strides, of q's dtype or float32; None: no rotation
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,  # [slots, kv_heads, dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, v_dim]
    slots: torch.Tensor,  # [tokens] int64  where a token's k and v go; negative: nowhere, and only its q is made
    *,
    q_out: torch.Tensor | None = None,  # [tokens, heads, dim]  by default q itself
    q_weight: torch.Tensor | None = None,  # [dim]  an RMSNorm over each head before the rotation
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm: str = "llama",  # its form: all but "cohere"
    turn: str = "llama",  # or "gpt_oss", whose tables are half as wide, "cohere", "glm" or "ernie"
    v_norm: bool = False,  # whether each head of v is normalised as well, without a weight
    q_factor: torch.Tensor | None = None,  # [tokens]  by which q is multiplied at the end, of q's dtype
) -> None:
    """Normalise and rotate q and k; q goes to ``q_out``, k and v to their slots. The forms: see the reference."""
    if norm not in _FORMS[:3] or turn not in ("llama", *_FORMS[3:]):
        raise ValueError(f"there is no norm of heads {norm!r}, or no rotation {turn!r}")
    tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[1:]
    q_out = q if q_out is None else q_out
    rotary = 0 if cos is None else cos.shape[-1] * (2 if turn == "gpt_oss" else 1)
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and {q.dtype} == {k.dtype, v.dtype, k_cache.dtype}
    assert all(each.stride(-1) == 1 for each in (q, k, v, q_out))
    if cos is not None and sin is not None:
        assert cos.stride() == sin.stride()
        assert cos.dtype == sin.dtype and cos.dtype in (q.dtype, torch.float32)
    assert all(weight is None or weight.dtype == q.dtype for weight in (q_weight, k_weight, q_factor))
    assert q_factor is None or q_factor.is_contiguous()
    if tokens == 0:
        return
    # As many heads as a block of k and v has, so that few lines stand empty.
    lines = min(triton.next_power_of_2(kv_heads), max(1, LINE_ELEMENTS // triton.next_power_of_2(dim)))
    q_blocks = triton.cdiv(heads, lines)
    _rope_and_write[(tokens, q_blocks + triton.cdiv(kv_heads, lines))](
        q, k, v, q if cos is None else cos, q if sin is None else sin, k_cache, v_cache, slots, q_out,
        q if q_weight is None else q_weight, q if k_weight is None else k_weight,
        q if q_factor is None else q_factor, eps,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *q_out.stride()[:2],
        *((0, 1) if cos is None else cos.stride()),
        q_blocks,
        NORM_Q=q_weight is not None, NORM_K=k_weight is not None, NORM_V=v_norm, MULTIPLY=q_factor is not None,
        FORM=_FORMS.index(norm), TURN=_FORMS.index(turn),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, V_DIM=v_dim, ROTARY=rotary, BLOCK_H=lines,
        num_warps=max(1, min(4, lines * dim // 512)),  # 8 elements of each half for a thread
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _add_rms_norm(
    x, residual, first, weight, inner_weight, scale, summed, out,
    eps, inner_eps, multiplier,
    x_token, residual_token, first_token, summed_token, out_token,  # strides
    HIDDEN: tl.constexpr,
    ADD: tl.constexpr,
    FIRST: tl.constexpr,
    KEEP: tl.constexpr,
    INNER: tl.constexpr,
    MULTIPLY: tl.constexpr,
    SCALE: tl.constexpr,
    NORM: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, triton.next_power_of_2(HIDDEN))
    inside = at < HIDDEN
    row = tl.load(x + token * x_token + at, mask=inside, other=0.0)
    if NORM:
        gain = tl.load(weight + at, mask=inside, other=0.0)  # on its way while the sum is made
    if ADD:
        before = tl.load(residual + token * residual_token + at, mask=inside, other=0.0)
        if FIRST:
            earlier = tl.load(first + token * first_token + at, mask=inside, other=0.0)
            before = (before.to(tl.float32) + earlier.to(tl.float32)).to(row.dtype)
    if INNER:
        row = _normed(row, tl.load(inner_weight + at, mask=inside, other=0.0), inside, inner_eps, HIDDEN, FORM)
    if MULTIPLY:
        row = (row.to(tl.float32) * multiplier).to(row.dtype)
    if ADD:
        row = (row.to(tl.float32) + before.to(tl.float32)).to(row.dtype)
        if SCALE:
            row = (row.to(tl.float32) * tl.load(scale).to(tl.float32)).to(row.dtype)
        if KEEP:
            tl.store(summed + token * summed_token + at, row, mask=inside)
    if NORM:
        row = _normed(row, gain, inside, eps, HIDDEN, FORM)
    tl.store(out + token * out_token + at, row, mask=inside)


def add_rms_norm(
    x: torch.Tensor,  # [tokens, hidden]
    residual: torch.Tensor | None,  # [tokens, hidden]  in place: becomes the sum
    weight: torch.Tensor | None,  # [hidden]  None: no norm; the sum is the result, and the residual stays as it is
    eps: float,
    *,
    form: str = "llama",  # of the norms; the reference says what each is
    inner_weight: torch.Tensor | None = None,  # [hidden]  x is normalised with it before it is added
    inner_eps: float | None = None,  # by default eps
    multiplier: float = 1.0,  # of x, before it is added
    first: torch.Tensor | None = None,  # [tokens, hidden]  is added to the residual before x is
    scale: torch.Tensor | None = None,  # [1]  multiplies the sum
    keep: bool = True,  # else the residual stays as it is, and the sum is lost
    summed: torch.Tensor | None = None,  # [tokens, hidden]  is where a sum is kept, instead of the residual
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [tokens, hidden]
    """The norm of ``residual + x``, which the residual becomes; or of x alone."""
    if form not in _FORMS[:4]:
        raise ValueError(f"form {form!r} is none of {', '.join(_FORMS[:4])}")
    tokens, hidden = x.shape
    out = x.new_empty(x.shape) if out is None else out
    summed = residual if summed is None else summed
    given = [each for each in (x, residual, first, weight, inner_weight, summed, out) if each is not None]
    assert all(each.dtype == x.dtype and each.stride(-1) == 1 for each in given)
    if tokens:
        _add_rms_norm[(tokens,)](
            x, *(x if each is None else each for each in (residual, first, weight, inner_weight, scale, summed)), out,
            eps, eps if inner_eps is None else inner_eps, multiplier,
            x.stride(0), *(0 if each is None else each.stride(0) for each in (residual, first, summed)), out.stride(0),
            HIDDEN=hidden, ADD=residual is not None, FIRST=first is not None, KEEP=keep and weight is not None,
            INNER=inner_weight is not None, MULTIPLY=multiplier != 1, SCALE=scale is not None,
            NORM=weight is not None, FORM=_FORMS.index(form),
            num_warps=max(1, min(16, triton.next_power_of_2(hidden) // (32 * NORM_ELEMENTS))),
            # A product that is added to the residual would lose its rounding: Llama's form of it, and a multiplied one.
            # The other forms are made in float32, and their rounding stays.
            enable_fp_fusion=multiplier == 1 and (inner_weight is None or form != "llama"),
        )  # fmt: skip
    return out


@triton.jit
def _act_and_mul(
    gate, up, out,
    gate_token, up_token, out_token,  # strides
    INTER: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # One axis: the others of a grid end at 65,535.
    token = (tl.program_id(0) // triton.cdiv(INTER, BLOCK)).to(tl.int64)
    at = tl.program_id(0) % triton.cdiv(INTER, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    inside = at < INTER
    x = tl.load(gate + token * gate_token + at, mask=inside, other=0.0)
    times = tl.load(up + token * up_token + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    if GELU:  # tanh(u) = 2 sigmoid(2u) - 1; 1 + tanh(u) loses digits where u is negative, and is to lose them here too
        tanh = 2.0 * tl.sigmoid((wide + 0.044715 * (wide * wide * wide)) * _TWO_SQRT_2_OVER_PI) - 1.0
        active = 0.5 * wide * (1.0 + tanh)
    else:
        active = wide / (1.0 + tl.exp(-wide))
    tl.store(out + token * out_token + at, _rounded_product(active.to(x.dtype), times).to(x.dtype), mask=inside)


def act_and_mul(
    gate: torch.Tensor,  # [tokens, inter], or [tokens, 2 * inter] with up in the second half
    up: torch.Tensor | None = None,  # [tokens, inter]
    *,
    activation: str = "silu",  # or "gelu_tanh"
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [tokens, inter]
    """``activation(gate) * up``."""
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {activation!r} is neither 'silu' nor 'gelu_tanh'")
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    tokens, inter = gate.shape
    out = gate.new_empty(gate.shape) if out is None else out
    assert all(each.dtype == gate.dtype and each.stride(-1) == 1 for each in (up, out)) and gate.stride(-1) == 1
    if tokens:
        _act_and_mul[(tokens * triton.cdiv(inter, ACT_BLOCK),)](
            gate, up, out, gate.stride(0), up.stride(0), out.stride(0),
            INTER=inter, GELU=activation == "gelu_tanh", BLOCK=ACT_BLOCK, num_warps=4,
        )  # fmt: skip
    return out
