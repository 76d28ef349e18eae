"""Plain PyTorch references of ``layer_ops_triton``: same signatures, same results, also in place.

They round where the modules of transformers round: in bfloat16 both give the same bits. They are the CPU backend of the
fused operations, and the reference in the kernels' tests.
"""

from __future__ import annotations

import torch
from torch.nn import functional

NORM_FORMS = ("llama", "olmo", "gemma", "cohere")
TURNS = ("llama", "gpt_oss", "cohere", "glm", "ernie")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: str = "llama") -> torch.Tensor:
    """Over the last dimension, rounded where modules of that form do.

    "llama" rounds to x's dtype before it multiplies by the weight. The others multiply in float32: "olmo" by the
    weight, "gemma" by 1 + weight, and "cohere" by the weight once it has taken the mean away.
    """
    wide = x.float()
    if form == "cohere":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form == "llama":
        return weight * wide.to(x.dtype)
    if form == "gemma":
        return (wide * (1.0 + weight.float())).to(x.dtype)
    if form in ("olmo", "cohere"):
        return (weight.float() * wide).to(x.dtype)
    raise ValueError(f"form {form!r} is none of {', '.join(NORM_FORMS)}")


def rope_and_write(
    q: torch.Tensor,  # [tokens, heads, dim]
    k: torch.Tensor,  # [tokens, kv_heads, dim]
    v: torch.Tensor,  # [tokens, kv_heads, v_dim]
    cos: torch.Tensor | None,  # [tokens, rotary_dim], of q's dtype or float32; None: no rotation
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,  # [slots, kv_heads, dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, v_dim]
    slots: torch.Tensor,  # [tokens] int64  where a token's k and v go; negative: nowhere, and only its q is made
    *,
    q_out: torch.Tensor | None = None,  # [tokens, heads, dim]  by default q itself
    q_weight: torch.Tensor | None = None,  # [dim]  a norm over each head before the rotation
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm: str = "llama",  # its form
    turn: str = "llama",
    v_norm: bool = False,  # whether each head of v is normalised as well, without a weight
    q_factor: torch.Tensor | None = None,  # [tokens]  by which q is multiplied at the end, of q's dtype
) -> None:
    """Normalise and rotate q and k; q goes to ``q_out``, k and v to their slots.

    "llama" turns the first half of a head's numbers against the second. So does "gpt_oss", from tables that hold each
    angle once. "cohere" turns each number against its neighbour, in float32. So does "ernie", with the first half
    of the tables, in which neighbours have the same angle, and so does "glm", which rounds where "llama" does.
    """
    if turn not in TURNS:
        raise ValueError(f"turn {turn!r} is none of {', '.join(TURNS)}")
    written = slots >= 0
    at = slots[written]
    if turn == "gpt_oss" and cos is not None and sin is not None:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    if turn in ("glm", "ernie") and cos is not None and sin is not None:
        cos, sin = (table[:, : table.shape[-1] // 2].repeat_interleave(2, dim=-1) for table in (cos, sin))

    def made(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = rms_norm(x, weight, eps, norm)
        if cos is None or sin is None:
            return x
        rotary = cos.shape[-1]
        turning = x[..., :rotary]
        if turn in ("cohere", "ernie"):
            turning = turning.float()
        if turn in ("cohere", "ernie", "glm"):
            turned = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
        else:
            turned = torch.cat((-turning[..., rotary // 2 :], turning[..., : rotary // 2]), dim=-1)
        rotated = turning * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
        return torch.cat((rotated.to(x.dtype), x[..., rotary:]), dim=-1)

    k_cache[at] = made(k, k_weight)[written]
    if v_norm:
        wide = v.float()
        v = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(v.dtype)
    v_cache[at] = v[written]
    new_q = made(q, q_weight)
    (q if q_out is None else q_out).copy_(new_q if q_factor is None else new_q * q_factor[:, None, None])


def add_rms_norm(
    x: torch.Tensor,  # [tokens, hidden]
    residual: torch.Tensor | None,  # [tokens, hidden]  in place: becomes the sum
    weight: torch.Tensor | None,  # [hidden]  None: no norm; the sum is the result, and the residual stays as it is
    eps: float,
    *,
    form: str = "llama",  # of the norms
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
    if inner_weight is not None:
        x = rms_norm(x, inner_weight, eps if inner_eps is None else inner_eps, form)
    if multiplier != 1:
        x = x * multiplier
    if residual is not None:
        x = (residual if first is None else residual + first) + x
        if scale is not None:
            x = (x * scale).to(x.dtype)
        if keep and weight is not None:
            (residual if summed is None else summed).copy_(x)
    made = x if weight is None else rms_norm(x, weight, eps, form)
    return made if out is None else out.copy_(made)


def act_and_mul(
    gate: torch.Tensor,  # [tokens, inter], or [tokens, 2 * inter] with up in the second half
    up: torch.Tensor | None = None,  # [tokens, inter]
    *,
    activation: str = "silu",  # or "gelu_tanh"
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [tokens, inter]
    """``activation(gate) * up``."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    if activation == "silu":
        product = functional.silu(gate) * up
    elif activation == "gelu_tanh":
        product = functional.gelu(gate, approximate="tanh") * up
    else:
        raise ValueError(f"activation {activation!r} is neither 'silu' nor 'gelu_tanh'")
    return product if out is None else out.copy_(product)
