"""What the attention kernels use on each generation of NVIDIA's cards: how K and V are read, and in which launches.

Cards of Hopper's generation have a copy engine, which brings boxes of K and V to chip through descriptors. Elsewhere
plain loads are better, even on cards that have such an engine: there the compiler turns descriptors into loads that are
not fetched ahead. What a block may keep on chip differs, too: 227 KB on data-centre cards from Hopper on, 163 KB on an
A100, 99 KB on the rest. docs/cards.md says which of these figures were measured, and where.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

Capability = tuple[int, int]
_CPU = torch.device("cpu")
_NARROW = 128  # dimensions of a head: up to so many, launches are those for narrow heads


BOX_OF_DESCRIPTORS = 64  # tokens, at most


class Launch(NamedTuple):
    """How an attention kernel is launched."""

    lines: int  # of a block
    warps: int
    stages: int
    box: int = BOX_OF_DESCRIPTORS  # tokens of a page that are read at once, at most


class Tile(NamedTuple):
    """What a block of an experts' kernel computes, and how it is compiled. ``columns`` are those of its output."""

    columns: int
    depth: int
    warps: int
    stages: int


class ExpertTiles(NamedTuple):
    rows: int
    up: Tile
    down: Tile


@dataclass(frozen=True)
class _ByWidth:
    """Launches for heads of at most 128 dimensions, and for wider ones."""

    narrow: Launch
    wide: Launch

    def of(self, widest: int) -> Launch:
        return self.narrow if widest <= _NARROW else self.wide


@dataclass(frozen=True)
class Card:
    descriptors: bool  # whether K and V are read by the copy engine
    decode_16: _ByWidth  # items of up to 16 lines
    decode_16_brief: _ByWidth  # the same where items are many, of one page each
    decode_64: _ByWidth
    prefill: _ByWidth
    exact: _ByWidth  # all of these in float32
    # Of attention in parts, by tile (16, 64, 128). All of them read boxes of one size: the results depend on it.
    in_parts: tuple[_ByWidth, _ByWidth, _ByWidth]
    experts: tuple[tuple[float, ExpertTiles], ...]  # by the rows that an expert has on average, up to so many
    scan_tokens: int  # that a state space walks through at once, at most
    # What large products and copies reach in a second on a usual card, roughly: for the size of steps.
    operations: float
    bytes: float
    shared_memory: int  # bytes that a block may have, at most
    multiprocessor_memory: int  # bytes of shared memory of a multiprocessor

    def decode(self, tile: int, widest: int, itemsize: int, brief: bool = False) -> Launch:
        """For items of this tile, heads of at most ``widest`` dimensions, elements of this many bytes."""
        if itemsize == 4:
            return self.exact.of(widest)
        if tile == 16:
            return (self.decode_16_brief if brief else self.decode_16).of(widest)
        return self.decode_64.of(widest)

    def parts(self, tile: int, widest: int, itemsize: int) -> Launch:
        """The launch for attention in parts: a block holds what lines have so far, and what they have of a part."""
        if itemsize == 4:
            return self.exact.of(widest)._replace(warps=8)
        return self.in_parts[(16, 64, 128).index(tile)].of(widest)

    def prompts(self, widest: int, itemsize: int) -> Launch:
        return (self.exact if itemsize == 4 else self.prefill).of(widest)


_HOPPER = Card(
    descriptors=True,
    # Small blocks, several to a multiprocessor, for the short items. Beyond 128 dimensions two warps are slower.
    decode_16=_ByWidth(Launch(16, 2, 2), Launch(16, 4, 2)),
    # There is nothing to fetch ahead: rather twice as many blocks at once.
    decode_16_brief=_ByWidth(Launch(16, 1, 1), Launch(16, 4, 2)),
    # There is room to fetch ahead where a page is more work.
    decode_64=_ByWidth(Launch(64, 4, 3), Launch(64, 4, 3)),
    # Two or three blocks on a multiprocessor, so that one block's products hide another's softmax. The third stage
    # saves a quarter of the time and more; where it would cost the second block, one stage is better than two.
    prefill=_ByWidth(Launch(64, 4, 3), Launch(64, 4, 1)),
    # Tensor cores have no full precision, so float32 is slow with any choice. More lines, or fewer warps, would spill
    # kilobytes of registers.
    exact=_ByWidth(Launch(16, 4, 1), Launch(16, 8, 1)),
    in_parts=(
        _ByWidth(Launch(16, 4, 3), Launch(16, 4, 2)),
        _ByWidth(Launch(64, 4, 3), Launch(64, 8, 2)),
        _ByWidth(Launch(64, 4, 3), Launch(64, 8, 2)),  # two blocks to a multiprocessor; with 128 lines a quarter slower
    ),
    experts=(  # the best of a sweep (docs/experts-notes.md)
        (8, ExpertTiles(16, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3))),
        (20, ExpertTiles(32, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3))),
        (96, ExpertTiles(64, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4))),
        (float("inf"), ExpertTiles(128, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4))),
    ),
    scan_tokens=64,
    operations=6e14,
    bytes=3e12,
    shared_memory=227 << 10,
    multiprocessor_memory=228 << 10,
)


def _with_plain_loads(
    narrow: dict[str, Launch], wide: dict[str, Launch], expert_depth: int, memory: int, rates: tuple[float, float]
) -> Card:
    """Addresses, and results of products on their way, take registers here that they do not take on Hopper."""
    launches = {kind: _ByWidth(narrow[kind], wide[kind]) for kind in narrow}
    few, some = Tile(64, expert_depth, 4, 3), Tile(64, 64, 4, 3)
    down = Tile(128, expert_depth, 4, 3)
    boxes = narrow["decode_16"].box, wide["decode_16"].box
    large = _ByWidth(Launch(64, 8, 2, boxes[0]), Launch(16, 8, 2, boxes[1]))
    return Card(
        descriptors=False,
        **launches,
        in_parts=(launches["decode_16"], large, large),
        experts=(
            (8, ExpertTiles(16, few, down)),
            (20, ExpertTiles(32, few, down)),
            (96, ExpertTiles(64, some, Tile(128, 64, 4, 3))),
            (float("inf"), ExpertTiles(128, Tile(128, 32, 8, 4), Tile(256, 32, 8, 4))),
        ),
        scan_tokens=32,
        operations=rates[0],
        bytes=rates[1],
        shared_memory=memory,
        multiprocessor_memory=memory + 1024,
    )


_AMPERE = _with_plain_loads(
    {
        "decode_16": Launch(16, 2, 2),
        "decode_16_brief": Launch(16, 2, 2),
        "decode_64": Launch(64, 4, 2),
        "prefill": Launch(64, 2, 2, box=32),
        "exact": Launch(16, 4, 1),
    },
    {
        "decode_16": Launch(16, 8, 2),
        "decode_16_brief": Launch(16, 8, 2),
        "decode_64": Launch(64, 8, 2),
        "prefill": Launch(64, 8, 2),
        "exact": Launch(16, 8, 1),
    },
    expert_depth=128,
    memory=163 << 10,
    rates=(2e14, 1.5e12),
)
_SMALL = _with_plain_loads(
    {
        "decode_16": Launch(16, 4, 2, box=32),
        "decode_16_brief": Launch(16, 4, 2, box=32),
        # Two blocks that fetch nothing ahead hide each other's loads. One block that does is slower.
        "decode_64": Launch(64, 4, 1),
        "prefill": Launch(64, 4, 1),
        "exact": Launch(16, 4, 1, box=32),
    },
    {
        "decode_16": Launch(16, 8, 2, box=32),
        "decode_16_brief": Launch(16, 8, 2, box=32),
        "decode_64": Launch(64, 8, 2, box=32),
        "prefill": Launch(64, 8, 2, box=32),
        "exact": Launch(16, 8, 1, box=32),
    },
    expert_depth=64,
    memory=99 << 10,
    rates=(6e13, 6e11),
)

# What Hopper's launches keep on chip is spilled here.
_IN_PARTS_ON_BLACKWELL = (
    _HOPPER.in_parts[0],
    _ByWidth(Launch(64, 8, 2), Launch(16, 8, 2)),
    _ByWidth(Launch(64, 8, 2), Launch(16, 8, 2)),
)

# By compute capability. A later one of the same generation (8.7, 10.3, 12.1) is taken for the last one before it.
CARDS: dict[Capability, Card] = {
    (8, 0): _AMPERE,  # A100, A30
    (8, 6): _SMALL,  # A10, A40, RTX 3060 to 3090, RTX A2000 to A6000
    (8, 9): replace(_SMALL, operations=1.2e14, bytes=7e11),  # L4, L40, RTX 4060 to 4090, RTX 6000 Ada
    (9, 0): _HOPPER,  # H100, H200, GH200
    (10, 0): replace(_HOPPER, in_parts=_IN_PARTS_ON_BLACKWELL, operations=1.2e15, bytes=6e12),  # B200, GB200
    (12, 0): replace(_SMALL, operations=1.6e14, bytes=1.3e12),  # RTX 5060 to 5090, RTX PRO 4000 to 6000 Blackwell
}
OLDEST = min(CARDS)
# AMD's MI300. It has 64 KB for a block; warps have 64 threads, so that fewer registers of each are taken.
INSTINCT = replace(
    _SMALL,
    operations=5e14,
    bytes=3.5e12,
    experts=(*_SMALL.experts[:-1], (float("inf"), ExpertTiles(128, Tile(128, 32, 8, 3), Tile(256, 32, 8, 3)))),
    shared_memory=64 << 10,
    multiprocessor_memory=64 << 10,
)


def card_of(capability: Capability) -> Card:
    known = [each for each in CARDS if each[0] == capability[0] and each <= capability]
    # Nothing is known of other generations: what asks the least of a card runs on most.
    return CARDS[max(known)] if known else _SMALL


def card_in_use() -> Card:
    """The card of the current device."""
    return card_on(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU)


@cache
def card_on(device: torch.device) -> Card:
    """The card of a device with an index. A CPU, which interprets kernels, counts as a Hopper card."""
    if torch.version.hip is not None:
        return INSTINCT
    capability = capability_on(device)
    return _HOPPER if capability is None else card_of(capability)


def capability_on(device: torch.device) -> Capability | None:
    """The compute capability for which Triton compiles; None on a CPU, and on AMD's cards.

    With ``TRITON_OVERRIDE_ARCH=sm80`` Triton compiles as for an A100, whatever the card is.
    """
    if torch.version.hip is not None:  # it counts MI300 as 9.4, which is nothing like Hopper's 9.0
        return None
    asked = os.environ.get("TRITON_OVERRIDE_ARCH")
    if asked:
        number = int(asked.removeprefix("sm").rstrip("af"))
        return number // 10, number % 10
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
