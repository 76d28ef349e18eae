"""A step's attention in parts equals plain attention, token by token, in float64: on random trees, with stale memory.

Every unit has a table of random K and V, one entry for each of its positions. What a token may see follows from the
tree alone; what the plan reads comes through pages. Slots that hold nothing valid hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hf_batchllm.kernels.reference.attention_parts_torch import write_kv
from hf_batchllm.model.attention import torch_attention
from hf_batchllm.model.attention.torch_attention import CascadePlan, Scratch
from hf_batchllm.model.batch import ModelBatch
from hf_batchllm.model.batch_builder import BatchBuilder
from hf_batchllm.planning.requests_and_prefixes import Prefix, Request, Unit
from hf_batchllm.planning.step import Chunk, Step

PAGE_SIZES = [1, 2, 3, 4, 7, 16, 64]


@dataclass
class Shape:
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int


SHAPES = [Shape(4, 2, 16, 16), Shape(2, 2, 8, 8), Shape(6, 1, 16, 16), Shape(4, 4, 24, 16), Shape(4, 2, 16, 24)]


class World:
    """Units with pages somewhere in a cache, and the K and V that every one of their positions has."""

    def __init__(self, seed: int, page_size: int, scattered: bool = True) -> None:
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.page_size = page_size
        self.shape = SHAPES[self.rng.integers(len(SHAPES))]
        self.scattered = scattered
        self.keys: dict[Unit, torch.Tensor] = {}  # [positions from start on, kv_heads, qk_dim]
        self.values: dict[Unit, torch.Tensor] = {}
        self.room: dict[Unit, int] = {}

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def add(self, unit: Unit, base: Prefix | None, end: int) -> None:
        """``unit`` stands on ``base`` and has room up to position ``end``."""
        assert base is None or base.start <= unit.start <= base.end
        unit.base = base
        self.room[unit] = end - unit.start
        self.keys[unit] = self.noise(self.room[unit], self.shape.kv_heads, self.shape.qk_dim)
        self.values[unit] = self.noise(self.room[unit], self.shape.kv_heads, self.shape.v_dim)

    def prefix(self, base: Prefix | None, start: int, end: int) -> Prefix:
        prefix = Prefix(self.rng.integers(0, 1000, end).astype(np.int32), start, end)
        self.add(prefix, base, end)
        return prefix

    def request(self, base: Prefix | None, start: int, prompt: int, generated: int = 0) -> Request:
        ids = self.rng.integers(0, 1000, prompt).astype(np.int32)
        request = Request(len(self.room), ids, 1000, start=start)
        request.generated = self.rng.integers(0, 1000, generated).tolist()
        self.add(request, base, request.length)
        return request

    def run(self, step: Step, stale: dict[Unit, int]) -> tuple[ModelBatch, torch.Tensor, torch.Tensor]:
        """Hands out pages, fills in what earlier steps computed (``stale``: up to which position), writes the step.

        Returns the batch, and the K and V of the cache.
        """
        counts = {unit: -(-room // self.page_size) for unit, room in self.room.items()}
        total = sum(counts.values()) + 3
        pages = self.rng.permutation(total) if self.scattered else np.arange(total)
        for unit, count in counts.items():
            unit.pages, pages = pages[:count].tolist(), pages[count:]
        slots = total * self.page_size
        k_cache = torch.full((slots, self.shape.kv_heads, self.shape.qk_dim), float("nan"))
        v_cache = torch.full((slots, self.shape.kv_heads, self.shape.v_dim), float("nan"))
        for unit, upto in stale.items():
            for position in range(unit.start, upto):
                offset = position - unit.start
                slot = unit.pages[offset // self.page_size] * self.page_size + offset % self.page_size
                k_cache[slot], v_cache[slot] = self.keys[unit][offset], self.values[unit][offset]
        batch = BatchBuilder(self.page_size).build(step)
        new = [(chunk.unit, slice(chunk.begin - chunk.unit.start, chunk.end - chunk.unit.start)) for chunk in step]
        k = torch.cat([self.keys[unit][own] for unit, own in new])
        v = torch.cat([self.values[unit][own] for unit, own in new])
        write_kv(k, v, k_cache, v_cache, batch.attention.slots)
        return batch, k_cache, v_cache

    def sequence(self, unit: Unit, end: int, table: dict[Unit, torch.Tensor]) -> torch.Tensor:
        """What a unit's token at position ``end - 1`` sees, from position 0 on."""
        parts = [table[part][: upto - part.start] for part, upto in [*unit.ancestors(), (unit, end)]]
        whole = torch.cat(parts)
        assert len(whole) == end
        return whole

    def expected(
        self,
        step: Step,
        q: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Every token against all that it sees: [tokens, heads, v_dim], float64."""
        group = self.shape.heads // self.shape.kv_heads
        rows, done = [], 0
        for chunk in step:
            k, v = (
                self.sequence(chunk.unit, chunk.end, table).double().repeat_interleave(group, dim=1)
                for table in (self.keys, self.values)
            )
            at = torch.arange(chunk.begin, chunk.end)[:, None]
            hidden = torch.arange(chunk.end) > at
            if window is not None:
                hidden |= torch.arange(chunk.end) <= at - window
            scores = torch.einsum("thd,khd->htk", q[done : done + len(at)].double(), k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(at), 1)], dim=2)
            weights = torch.softmax(scores, dim=2)[..., : len(k)]
            rows.append(torch.einsum("htk,khd->thd", weights, v))
            done += len(at)
        return torch.cat(rows)


def random_step(world: World) -> tuple[Step, dict[Unit, int]]:
    """Prefixes in prefixes, read to their ends or less far; requests on them at every stage of their lives."""
    rng = world.rng
    prefixes: list[Prefix | None] = [None]
    for _ in range(rng.integers(0, 7)):
        base = prefixes[rng.integers(len(prefixes))]
        start = cut(world, base)
        length = 0 if base is not None and rng.random() < 0.2 else int(rng.integers(1, 25))
        prefixes.append(world.prefix(base, start, start + length))
    # Requests that stand on the same prefix are mostly neighbours, as in a plan; not always, as with "fifo".
    places = [prefixes[rng.integers(len(prefixes))] for _ in range(rng.integers(1, 12))]
    if rng.random() < 0.7:
        places.sort(key=prefixes.index)
    stale: dict[Unit, int] = {}
    rows: list[Request] = []
    others: list[Request] = []
    for base in places:
        start = cut(world, base)
        prompt = start + int(rng.integers(1, 20))
        if rng.random() < 0.5:
            request = world.request(base, start, prompt, generated=int(rng.integers(1, 12)))
            rows.append(request)
            stale[request] = request.length - 1
            for prefix, upto in request.ancestors():
                stale[prefix] = max(stale.get(prefix, 0), upto)
        else:  # a prompt; or one that is computed again, with what it had generated
            others.append(world.request(base, start, prompt, generated=int(rng.integers(0, 2) * rng.integers(0, 9))))
    for prefix in prefixes:
        if prefix is not None and rng.random() < 0.5:  # an earlier step went some way
            stale[prefix] = max(stale.get(prefix, 0), int(rng.integers(prefix.start, prefix.end + 1)))
    chunks: list[Chunk] = []
    reached = dict(stale)
    for request in others:
        for prefix, upto in request.ancestors():
            begin = reached.get(prefix, prefix.start)
            if begin < upto:
                chunks.append(Chunk(prefix, begin, upto))
                reached[prefix] = upto
        begin = int(rng.integers(request.start, request.length)) if rng.random() < 0.5 else request.start
        stale[request] = begin
        if rng.random() < 0.8:
            chunks.append(Chunk(request, begin, int(rng.integers(begin + 1, request.length + 1))))
    for request in others:  # a second chunk of the same request, as no scheduler here makes but any may
        mine = [chunk for chunk in chunks if chunk.unit is request]
        if mine and mine[0].end < request.length and rng.random() < 0.2:
            chunks.append(Chunk(request, mine[0].end, request.length))
    if not rows and not chunks:
        chunks.append(Chunk(others[0], stale[others[0]], others[0].length))
    return Step(rows, chunks), stale


def cut(world: World, base: Prefix | None) -> int:
    """Where a unit on ``base`` begins: mostly at its end, sometimes inside it."""
    if base is None:
        return 0
    if base.end > base.start and world.rng.random() < 0.3:
        return int(world.rng.integers(base.start + 1, base.end + 1))
    return base.end


def assert_exact(world: World, step: Step, stale: dict[Unit, int], windows: list[int | None], softcap: bool) -> None:
    batch, k_cache, v_cache = world.run(step, stale)
    plan = CascadePlan(batch.attention, torch.device("cpu"))
    tokens = sum(chunk.end - chunk.begin for chunk in step)
    scale = world.shape.qk_dim**-0.5
    sinks = world.noise(world.shape.heads) if world.rng.random() < 0.5 else None
    cap = float(world.rng.choice([1.0, 20.0])) if softcap else None
    for window in windows:  # one plan for all layers of a step, whatever their windows
        q = world.noise(tokens, world.shape.heads, world.shape.qk_dim)
        got = plan.run(q, k_cache, v_cache, scale=scale, window=window, softcap=cap, sinks=sinks)
        want = world.expected(step, q, scale, window, cap, sinks)
        assert got.dtype == q.dtype and got.shape == want.shape
        assert bool(got.isfinite().all()), f"window {window}: a slot was read that holds nothing"
        error = (got.double() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2)).clamp(min=0.1)
        assert error.max() <= 1e-5, f"window {window}: token {int(error.argmax())} is off by {error.max():.1e}"


@pytest.mark.some_cases
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_any_step_of_any_tree(page_size: int) -> None:
    for seed in range(45):
        world = World(1000 * page_size + seed, page_size, scattered=seed % 3 > 0)
        step, stale = random_step(world)
        short = int(world.rng.integers(1, 30))
        assert_exact(world, step, stale, [None, short, 10_000, None], softcap=seed % 4 == 0)


def test_many_rows_of_very_different_length() -> None:
    """Rows that share nothing are padded into a few batches; a short one must not read another's keys."""
    world = World(5, 4)
    requests = [world.request(None, 0, int(length), 1) for length in world.rng.permutation(np.arange(1, 120, 3))]
    stale: dict[Unit, int] = {request: request.length - 1 for request in requests}
    assert_exact(world, Step(requests, []), stale, [None, 1, 16], softcap=False)


def test_decode_rows_copy_a_bounded_number_of_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows that share nothing: copies of all their keys would take as much memory as the cache itself."""
    world = World(12, 4)
    token_bytes = 4 * world.shape.kv_heads * (world.shape.qk_dim + world.shape.v_dim)
    monkeypatch.setattr(torch_attention, "_GATHERED_BYTES", {"cpu": 100 * token_bytes})
    requests = [world.request(None, 0, length, 1) for length in (20, 21, 22, 23, 24, 30, 2, 3, 200)]
    stale: dict[Unit, int] = {request: request.length - 1 for request in requests}
    gather, most = Scratch.gather, 0

    def measured(self: Scratch, name: str, cache: torch.Tensor, keys: torch.Tensor | slice) -> torch.Tensor:
        nonlocal most
        if isinstance(keys, torch.Tensor) and len(keys) > 1:
            most = max(most, keys.numel())
        return gather(self, name, cache, keys)

    monkeypatch.setattr(Scratch, "gather", measured)
    assert_exact(world, Step(requests, []), stale, [None, 9], softcap=False)
    assert 0 < most <= 100


def test_a_prefix_and_its_members_in_one_step() -> None:
    world = World(6, 8)
    outer = world.prefix(None, 0, 21)
    inner = world.prefix(outer, 21, 30)
    members = [world.request(inner, 30, 30 + own) for own in (1, 5, 9)]
    chunks = [Chunk(outer, 0, 21), Chunk(inner, 21, 30), *(Chunk(one, 30, one.length) for one in members)]
    assert_exact(world, Step([], chunks), {}, [None, 4, 25], softcap=False)


def test_chunks_of_one_token() -> None:
    """As under a budget of one: every chunk continues one from an earlier step."""
    world = World(7, 3)
    prefix = world.prefix(None, 0, 10)
    request = world.request(prefix, 10, 20)
    for position in range(10):
        assert_exact(world, Step([], [Chunk(prefix, position, position + 1)]), {prefix: position}, [None, 3], False)
    for position in range(10, 20):
        step = Step([], [Chunk(request, position, position + 1)])
        assert_exact(world, step, {prefix: 10, request: position}, [None, 3], softcap=False)


def test_a_chunk_longer_than_its_window() -> None:
    world = World(8, 16)
    prefix = world.prefix(None, 0, 40)
    request = world.request(prefix, 40, 140)
    for begin in (40, 41, 75):
        step = Step([], [Chunk(request, begin, 140)])
        assert_exact(world, step, {prefix: 40, request: begin}, [1, 2, 39, 64, 65, 99, 100, 101, None], softcap=False)


def test_deep_chains_need_no_recursion() -> None:
    world = World(9, 1)
    base: Prefix | None = None
    stale: dict[Unit, int] = {}
    for depth in range(2000):
        base = world.prefix(base, depth, depth + 1)
        stale[base] = depth + 1
    rows = [world.request(base, 2000, 2001, 1) for _ in range(3)]
    stale |= {row: row.length - 1 for row in rows}
    assert_exact(world, Step(rows[:2], [Chunk(rows[2], 2001, 2002)]), stale | {rows[2]: 2001}, [None, 700], False)


@pytest.mark.parametrize("shared", [True, False])
def test_keys_that_rows_share_are_read_once(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The point of it all: the cache slots gathered for a decode step are those of the prefix plus those of the rows,
    not those of the prefix for every row."""
    world = World(10, 16)
    prefix = world.prefix(None, 0, 160) if shared else None
    start = 160 if shared else 0
    rows = [world.request(prefix, start, 165, 3) for _ in range(20)]
    stale: dict[Unit, int] = {row: row.length - 1 for row in rows}
    if prefix is not None:
        stale[prefix] = 160
    step = Step(rows, [])
    batch, k_cache, v_cache = world.run(step, stale)
    read = 0
    gather = Scratch.gather

    def counted(self: Scratch, name: str, cache: torch.Tensor, keys: torch.Tensor | slice) -> torch.Tensor:
        nonlocal read
        read += keys.stop - keys.start if isinstance(keys, slice) else keys.numel()
        return gather(self, name, cache, keys)

    monkeypatch.setattr(Scratch, "gather", counted)
    plan = CascadePlan(batch.attention, torch.device("cpu"))
    q = world.noise(20, world.shape.heads, world.shape.qk_dim)
    plan.run(q, k_cache, v_cache, scale=0.3)
    once = 160 + 20 * 8 if shared else 20 * 168
    assert read == 2 * once  # K, and V


def test_what_the_model_is_called_with() -> None:
    """Ids, positions and rows to sample, packed in the order of the step."""
    world = World(11, 4)
    for seed in range(100, 160):
        world = World(seed, 4)
        step, stale = random_step(world)
        batch, _, _ = world.run(step, stale)
        ids: list[int] = []
        positions: list[int] = []
        sampled: list[int] = []
        for chunk in step:
            source = chunk.unit.ids.tolist() if isinstance(chunk.unit, Prefix) else whole(chunk.unit)
            ids += source[chunk.begin : chunk.end]
            positions += range(chunk.begin, chunk.end)
            if isinstance(chunk.unit, Request) and chunk.end == len(whole(chunk.unit)):
                sampled.append(len(ids) - 1)
        assert batch.tokens.input_ids.tolist() == ids
        assert batch.tokens.position_ids.tolist() == positions
        assert batch.tokens.logits_rows.tolist() == sampled
        assert len(step.sampling()) == len(sampled)
        assert batch.attention.rows == len(step.rows)


def whole(unit: Unit) -> list[int]:
    assert isinstance(unit, Request)
    return [*unit.prompt_ids.tolist(), *unit.generated]
