"""Each kernel compiles for each generation of cards, within what such a card has on chip."""

from __future__ import annotations

import pytest
import torch
import triton
from compile_for_cards import PAGE
from support_card_compiler import TARGETS, Target, card_of, compiled_for, named
from support_kernel_recipes import BF16, RECIPES, zeros
from support_kernels import plain

from hf_batchllm.kernels import cards
from hf_batchllm.kernels.lists.fixed_lists import FIXED_TILES
from hf_batchllm.kernels.triton import experts_triton, pages_triton, prefill_triton

pytestmark = plain
needs_compiler = pytest.mark.skipif(
    not {"nvidia", "amd"} <= triton.backends.backends.keys(), reason="Triton cannot compile for other cards here"
)
MOST_SPILLED = 192  # bytes of a thread that may lie in slow memory
# Where results are taken apart at the end, once for a block.
MAY_SPILL = {("10.0", "experts of GPT-OSS, many rows"): 384}


@pytest.mark.some_cases
@needs_compiler
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("target", TARGETS, ids=named)
def test_it_fits(target: Target, recipe: str) -> None:
    with compiled_for(target) as made:
        RECIPES[recipe]()
    assert made
    for kernel in made:
        assert kernel.shared <= card_of(target).shared_memory, kernel.kernel
        assert kernel.spilled <= MAY_SPILL.get((named(target), recipe), MOST_SPILLED), kernel.kernel
        assert kernel.blocks != 0, kernel.kernel


@needs_compiler
@pytest.mark.parametrize("target", [each for each, card in cards.CARDS.items() if not card.descriptors], ids=named)
@pytest.mark.parametrize("recipe", ["decode, 16 lines, head 128", "experts, 8 rows each"])
def test_plain_loads_run_ahead(target: Target, recipe: str) -> None:
    """They are copies in the background, of which several are under way."""
    with compiled_for(target) as made:
        RECIPES[recipe]()
    for kernel in made:
        if kernel.kernel in ("_attend_items", "_up_products", "_down_products"):
            assert "cp.async.cg" in kernel.code


@plain
def test_the_page_has_each_kernel_for_each_card() -> None:
    """The figures are of one version of the compiler; which kernels there are must be true of any."""
    page = PAGE.read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [f"## {recipe}" for recipe in RECIPES]
    for target in TARGETS:
        assert page.count(f"| {named(target)} |") >= len(RECIPES), "run `make kernel-page`"


@pytest.mark.parametrize("target", TARGETS, ids=named)
def test_attention_in_parts_reads_boxes_of_one_size(target: Target) -> None:
    """Rows have the same bits in blocks of all sizes."""
    card = card_of(target)
    for width in (64, 128, 256):
        for size in (2, 4):
            assert len({card.parts(tile, width, size).box for tile in FIXED_TILES}) == 1


@pytest.mark.parametrize(
    ("capability", "like"),
    [((8, 7), (8, 6)), ((9, 0), (9, 0)), ((10, 3), (10, 0)), ((12, 1), (12, 0)), ((11, 0), (8, 6)), ((13, 0), (8, 6))],
)
def test_a_card_that_is_not_in_the_table(capability: cards.Capability, like: cards.Capability) -> None:
    assert cards.card_of(capability) == cards.CARDS[like]


@pytest.mark.parametrize(
    ("asked", "expected"), [("sm80", (8, 0)), ("sm90a", (9, 0)), ("sm120", (12, 0)), ("sm100a", (10, 0))]
)
def test_code_for_another_card_may_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, expected: cards.Capability
) -> None:
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", asked)
    assert cards.capability_on(torch.device("cpu")) == expected


def test_amds_cards_have_a_row_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their capability, (9, 4), would be Hopper's."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    cards.card_on.cache_clear()
    try:
        assert cards.card_on(torch.device("cpu")) == cards.INSTINCT
        monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "gfx942")
        assert cards.capability_on(torch.device("cpu")) is None, "so nothing is taken for a Hopper card"
    finally:
        cards.card_on.cache_clear()


def test_a_cpu_counts_as_a_hopper_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH", raising=False)
    assert cards.capability_on(torch.device("cpu")) is None
    cards.card_on.cache_clear()
    assert cards.card_on(torch.device("cpu")) == cards.CARDS[9, 0]


def test_without_a_copy_engine_no_descriptor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm86")
    cards.card_on.cache_clear()
    try:
        pages = zeros(2, 64, 2, 128)
        assert pages_triton.by_page(pages) is pages
        assert not experts_triton._in_boxes(zeros(4, 64, 64))
        assert prefill_triton.launch_options(4, 128, 128, BF16.itemsize) == {
            "tile": 64,
            "num_warps": 4,
            "num_stages": 1,
        }
    finally:
        cards.card_on.cache_clear()
