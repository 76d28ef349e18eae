"""Plain PyTorch twins of ``small_triton`` and ``sample_triton``: same signatures, same results, also in place.

They round where transformers' modules round: what these give in bfloat16 is what the twins give, bit for bit. They are
the CPU backend of the fused operations, and the oracle of the kernels' tests.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch.nn import functional

from .recipes import Recipe, RowRecipes

# A row's status. Whoever is not RUNNING is left alone by ``advance``.
RUNNING, STOPPED, FULL, NO_PAGE, NO_TOKEN, PADDING = range(6)

NORM_FORMS = ("llama", "olmo", "gemma", "cohere")
TURNS = ("llama", "gpt_oss", "cohere")

PHILOX_ROUNDS = 10
SAMPLE_BLOCK = 2048  # tokens of the vocabulary: which block is drawn first, then which of its tokens
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


# -- layers ----------------------------------------------------------------------------------------------------


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
    slots: torch.Tensor,  # [tokens] int64  where a token's k and v go; negative: nowhere; its q is made all the same
    *,
    q_out: torch.Tensor | None = None,  # [tokens, heads, dim]  by default q itself
    q_weight: torch.Tensor | None = None,  # [dim]  a norm over each head before the rotation
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm: str = "llama",  # its form
    turn: str = "llama",
) -> None:
    """Normalise and rotate q and k; q goes to ``q_out``, k and v to their slots.

    "llama" turns the first half of a head's numbers against the second. So does "gpt_oss", from tables that hold each
    angle once. "cohere" turns each number against its neighbour, in float32.
    """
    if turn not in TURNS:
        raise ValueError(f"turn {turn!r} is none of {', '.join(TURNS)}")
    written = slots >= 0
    at = slots[written]
    if turn == "gpt_oss" and cos is not None and sin is not None:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def made(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = rms_norm(x, weight, eps, norm)
        if cos is None or sin is None:
            return x
        rotary = cos.shape[-1]
        turning = x[..., :rotary]
        if turn == "cohere":
            turning = turning.float()
            turned = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
        else:
            turned = torch.cat((-turning[..., rotary // 2 :], turning[..., : rotary // 2]), dim=-1)
        rotated = turning * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
        return torch.cat((rotated.to(x.dtype), x[..., rotary:]), dim=-1)

    k_cache[at] = made(k, k_weight)[written]
    v_cache[at] = v[written]
    (q if q_out is None else q_out).copy_(made(q, q_weight))


def add_rms_norm(
    x: torch.Tensor,  # [tokens, hidden]
    residual: torch.Tensor | None,  # [tokens, hidden]  in place: what x makes of it
    weight: torch.Tensor | None,  # [hidden]  None: no norm; the sum is the result, and the residual stays as it is
    eps: float,
    *,
    form: str = "llama",  # of the norms
    inner_weight: torch.Tensor | None = None,  # [hidden]  x is normalised with it before it is added
    inner_eps: float | None = None,  # by default eps
    multiplier: float = 1.0,  # of x, before it is added
    first: torch.Tensor | None = None,  # [tokens, hidden]  is added to the residual before x is
    keep: bool = True,  # else the residual stays as it is, and the sum is lost
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [tokens, hidden]
    """The norm of ``residual + x``, which the residual becomes; or of x alone."""
    if inner_weight is not None:
        x = rms_norm(x, inner_weight, eps if inner_eps is None else inner_eps, form)
    if multiplier != 1:
        x = x * multiplier
    if residual is not None:
        before = residual
        x = (residual if first is None else residual + first) + x
        if keep and weight is not None:
            before.copy_(x)
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


# -- sampling --------------------------------------------------------------------------------------------------


def greedy(
    logits: torch.Tensor,  # [rows, vocabulary]
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [rows] int64
    """The best token of each row, the lowest among equals; NaN counts as infinity."""
    tokens = torch.where(logits.isnan(), float("inf"), logits).argmax(dim=-1)
    return tokens if out is None else out.copy_(tokens)


def gumbel_sample(
    logits: torch.Tensor,  # [rows, vocabulary]
    temperature: float | RowRecipes,  # or of each row what it is picked by
    seed: torch.Tensor,  # [1] or [rows] int64  of all rows, or of each
    prompt: torch.Tensor,  # [rows] int64 or int32  of each row, as are the next two
    sample: torch.Tensor,
    position: torch.Tensor,
    *,
    threshold: torch.Tensor | None = None,  # [rows] float32  tokens with a logit below it never come
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [rows] int64
    """One token a row from softmax(logits / temperature); -1 where a logit is NaN or infinite, or all are -inf.

    The noise of a token depends on (seed, prompt, sample, position, token) alone. First a block of the vocabulary is
    drawn, by what its tokens weigh together, then one of its tokens: noise is made for few tokens, not for all.
    Rows whose recipe is to take the best token have what ``greedy`` gives.
    """
    rows, vocabulary = logits.shape
    size = min(SAMPLE_BLOCK, vocabulary)
    recipes = temperature
    if not isinstance(recipes, RowRecipes):
        recipes = RowRecipes.same(Recipe(temperature=recipes), logits)
    temperatures = recipes.table.temperature[recipes.which]
    drawing, best_tokens = temperatures > 0, greedy(logits)
    temperatures = torch.where(drawing, temperatures, 1.0)[:, None]
    if threshold is not None:
        logits = torch.where(logits < threshold[:, None], -float("inf"), logits.float())
    scores = functional.pad(logits.double() / temperatures, (0, -vocabulary % size), value=-float("inf"))
    scores = scores.view(rows, -1, size)  # [rows, blocks, size]
    keys = [each.long().unsqueeze(1) for each in (seed, prompt, sample, position)]
    begin = torch.arange(0, vocabulary, size, device=logits.device)
    # Of exponential variables divided by weights, each is the smallest in proportion to its weight.
    heavy = scores.logsumexp(dim=2) - exponential(begin.expand(rows, -1), *keys, second=True).log()  # [rows, blocks]
    best, block = torch.where(heavy.isnan(), float("inf"), heavy).max(dim=1)
    inside = scores[torch.arange(rows, device=logits.device), block]  # [rows, size]
    token = begin[block].unsqueeze(1) + torch.arange(size, device=logits.device)
    tokens = begin[block] + (inside - exponential(token, *keys).log()).argmax(dim=1)
    tokens = torch.where(drawing, torch.where(best.isfinite(), tokens, -1), best_tokens)
    return tokens if out is None else out.copy_(tokens)


def exponential(
    token: torch.Tensor,  # int64, as the others, which are broadcast to it
    seed: torch.Tensor,
    prompt: torch.Tensor,
    sample: torch.Tensor,
    position: torch.Tensor,
    *,
    second: bool = False,  # another one, with the other two words of the token's draw
) -> torch.Tensor:  # float64
    """Exponential variables, never 0 and never infinite, exact in both tails down to probabilities of 2^-64."""
    counter = torch.broadcast_tensors(token, position, sample, prompt)
    words = philox(counter, (seed & _WORD, seed >> 32 & _WORD))
    high, low = words[2:] if second else words[:2]
    # 63 bits make a number below one half, the last bit says at which end of (0, 1) it lies.
    half = (high >> 1).double() * 2.0**-32 + (low.double() + 0.5) * 2.0**-64
    return -torch.where(high & 1 == 1, torch.log1p(-half), half.log())


def philox(
    counter: tuple[torch.Tensor, ...] | list[torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> list[torch.Tensor]:
    """Philox 4x32: four words from four and a key of two, each in the low half of an int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        (high0, low0), (high1, low1) = _times(c0, _MULTIPLIERS[0]), _times(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return [c0, c1, c2, c3]


def _times(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of a product, without passing int64's sign."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


# -- state -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """What the device keeps of the decode rows between steps. All is of shape [rows] but for the last two."""

    token: torch.Tensor  # int64  the model's next input
    position: torch.Tensor  # int64  of that token
    length: torch.Tensor  # int32  positions that the row sees: up to that token's; 0 once the row has ended
    slot: torch.Tensor  # int64  where that token's K and V go; -1 once the row has ended
    made: torch.Tensor  # int32  tokens generated so far
    remaining: torch.Tensor  # int32  tokens that it may still generate
    status: torch.Tensor  # int32
    start: torch.Tensor  # int32  position of the first token of the row's own pages
    pages: torch.Tensor  # [rows, most] int32  its own pages; -1 where there is none yet
    produced: torch.Tensor  # [rows, steps] int64  a ring: generated token i stands at i modulo steps

    def to(self, device: torch.device | str) -> Rows:
        return Rows(*(getattr(self, field.name).to(device) for field in fields(self)))


def advance(
    rows: Rows, sampled: torch.Tensor, eos: torch.Tensor, page_size: int, which: torch.Tensor | None = None
) -> None:
    """Append each row's ``sampled`` token ([rows] int64), see whether that ends it, and move on to it.

    ``eos`` ([any] int64) may be padded with -1. With ``which`` ([rows] int32) it is several such sets ([sets, any]).
    A row that ends keeps its last input, no slot, and sees nothing more. One that needs a page that it does not have
    moves on without a slot: with a page and a slot given, it can run again.
    """
    running = rows.status == RUNNING
    real = running & (sampled >= 0)
    at = real.nonzero().squeeze(1)
    rows.produced[at, (rows.made[at] % rows.produced.shape[1]).long()] = sampled[at]
    rows.made[at] += 1
    rows.remaining[at] -= 1
    stopped = real & (sampled[:, None] == (eos if which is None else eos[which])).any(dim=1)
    full = real & ~stopped & (rows.remaining <= 0)

    moving = (real & ~stopped & ~full).nonzero().squeeze(1)
    rows.token[moving] = sampled[moving]
    rows.position[moving] += 1
    seen = rows.length[moving] + 1
    rows.length[running] = 0
    rows.length[moving] = seen
    offset = rows.position[moving] - rows.start[moving]
    index = offset // page_size
    page = rows.pages[moving, index.clamp(max=rows.pages.shape[1] - 1)].long()
    page = torch.where(index < rows.pages.shape[1], page, -1)
    rows.slot[running] = -1
    rows.slot[moving] = torch.where(page >= 0, page * page_size + offset % page_size, -1)
    rows.status[running & ~real] = NO_TOKEN
    rows.status[stopped] = STOPPED
    rows.status[full] = FULL
    rows.status[moving[page < 0]] = NO_PAGE
