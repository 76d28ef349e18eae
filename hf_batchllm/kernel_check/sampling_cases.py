"""Cases of picking tokens: the best one, draws, cutoffs, penalties, masks, and going on to the next step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..kernels import (
    likeliest_torch,
    penalties_torch,
    sample_torch,
    tails_torch,
    token_edits_torch,
    token_masks_torch,
    top_k_top_p_torch,
)
from ..kernels.sample_torch import RUNNING, Rows
from ..kernels.sampling_recipes import Recipe, RecipeTable, RowRecipes
from ..kernels.token_edits import Decays, Forced, History, Target, TargetLists
from .comparing import Where, Wrong, near, same

_ROWS, _VOCABULARY = 8, 5003
_CUTS: tuple[dict[str, Any], ...] = (
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
)
# Of rows that sample each in its own way, one of which takes the best token.
_TAILS = (Recipe(typical_p=0.6), Recipe(1.0, 0.7, epsilon=1e-3), Recipe(eta=0.01), Recipe(temperature=0.0))
_RECIPES = (Recipe(temperature=0.0), Recipe(1.3, 0.8, 40), Recipe(1.1, 0.7, top_p=0.9), Recipe(temperature=1.2))


def sampling(where: Where) -> dict[str, Callable[[], None]]:
    from ..kernels import (
        likeliest_triton,
        penalties_triton,
        sample_triton,
        tails_triton,
        token_edits_triton,
        token_masks_triton,
        top_k_top_p_triton,
    )

    numbers = torch.arange(_ROWS, device=where.device)

    def logits(dtype: torch.dtype | None = None) -> torch.Tensor:
        return where.random(where.generator(), _ROWS, _VOCABULARY, dtype=dtype) * 2

    def by_row() -> RowRecipes:
        return RowRecipes(RecipeTable(_RECIPES, _VOCABULARY, where.device), (numbers % len(_RECIPES)).int())

    def greedy() -> None:
        same(sample_triton.greedy(logits()), sample_torch.greedy(logits()))

    def drawn(temperature: float | RowRecipes, seed: torch.Tensor, threshold: torch.Tensor | None = None) -> None:
        given = seed, numbers, numbers % 3, 5 * numbers
        results = [
            module.gumbel_sample(logits(), temperature, *given, threshold=threshold)
            for module in (sample_triton, sample_torch)
        ]
        same(results[0], results[1], "the tokens", but=1)
        if threshold is not None:
            picked = logits().gather(1, results[0][:, None])[:, 0].float()
            if bool((picked < threshold).any()):
                raise Wrong("a token that was cut off was drawn")

    def draws(cut: bool) -> None:
        threshold = top_k_top_p_torch.cutoffs(logits(), temperature=0.8, top_k=5) if cut else None
        drawn(0.8, torch.tensor([7], device=where.device), threshold)

    def draws_by_row() -> None:
        threshold = top_k_top_p_torch.cutoffs(logits(), by_row=by_row())
        drawn(by_row(), 7 + numbers, threshold)

    def cutoffs(given: dict[str, Any]) -> None:
        results = [module.cutoffs(logits(), **given) for module in (top_k_top_p_triton, top_k_top_p_torch)]
        same(results[0], results[1], "the cutoffs", but=1)

    def penalties(each_its_own: bool) -> None:
        """``each_its_own``: penalties of each row, and tokens that may not come yet."""
        tokens = torch.arange(0, _VOCABULARY, 610, device=where.device)[:_ROWS]
        given: dict[str, Any] = {"penalty": 1.3}
        if each_its_own:
            eos = torch.tensor([[2, 7]] * len(_RECIPES), device=where.device)
            given = {"by_row": by_row(), "eos": eos, "made": numbers.int(), "minimum": (numbers * 0 + 4).int()}
        results = []
        for module in (penalties_triton, penalties_torch):
            seen = torch.zeros(_ROWS, -(-_VOCABULARY // 32), dtype=torch.int32, device=where.device)
            module.mark_seen(seen, tokens, _VOCABULARY)
            results.append((seen, module.penalise(logits(torch.float32), seen=seen, **given)))
        same(results[0][0], results[1][0], "the bits")
        near(results[0][1], results[1][1])

    def masks(in_place: bool) -> None:
        """Of which each row but the free ones has the line of another one."""
        lines = where.random(where.generator(), _ROWS, -(-_VOCABULARY // 32), dtype=torch.float32)
        bits, line = lines.view(torch.int32), (numbers.flip(0) % 5 - 1).int()
        results = []
        for module in (token_masks_triton, token_masks_torch):
            given = logits()
            results.append(module.mask_tokens(given, bits, line=line, out=given if in_place else None))
        same(results[0], results[1])

    def likeliest(k: int) -> None:
        picked, results = torch.arange(_ROWS, device=where.device) * 7 - 1, []
        for module in (likeliest_triton, likeliest_torch):
            ids = torch.zeros(_ROWS, 3, k, dtype=torch.int32, device=where.device)
            values = torch.zeros(_ROWS, 3, k + 1, dtype=torch.float32, device=where.device)
            module.note_likeliest(logits(), picked, ids, values, numbers)
            results.append((ids, values.nan_to_num(nan=7.0)))
        near(results[0][1], results[1][1])
        same(results[0][0], results[1][0], "the tokens", but=_ROWS)  # of equals that 16-bit logits have, either

    def tails(cut: bool) -> None:
        table = RecipeTable(_TAILS, _VOCABULARY, where.device)
        threshold = top_k_top_p_torch.cutoffs(logits(), top_k=900) if cut else None
        which, kept = (numbers % len(_TAILS)).int() if cut else None, []
        for module in (tails_triton, tails_torch):
            low, high = module.tail_cuts(logits(), table, which, threshold)
            stays = (logits().float() >= low[:, None]) & (logits().float() <= high[:, None])
            kept.append(stays.sum(dim=1).float())
            tokens = sample_triton.gumbel_sample(
                logits(), 1.0, numbers[:1], numbers, numbers, numbers, threshold=low, ceiling=high
            )
            if not bool(stays.gather(1, tokens[:, None]).all()):
                raise Wrong("a token that was cut off was drawn")
        if bool(((kept[0] - kept[1]).abs() > 0.02 * kept[1] + 2).any()):
            raise Wrong(f"{kept[0].tolist()} tokens are left, and {kept[1].tolist()} by the twin")

    def edits(of_each: bool) -> None:
        """``of_each``: rows of several kinds."""
        kinds = 3 if of_each else 1
        which = (numbers % 3).int() if of_each else None
        common = [Target(11, -float("inf"), at=2), Target(13, 0.0, sequences={(5, 6): 2.0, (6,): 1.0})]
        lists = TargetLists.of([[Target(7 + kind, 1.5), *common] for kind in range(kinds)], where.device)
        sizes = torch.tensor([[2, 3, 0][:kinds], [1, 0, 2][:kinds]], dtype=torch.int32, device=where.device)
        first = torch.tensor([9, -1, 12][:kinds], dtype=torch.int32, device=where.device)
        ends = TargetLists.of([[Target(4), Target(40)] for _ in range(kinds)], where.device)
        growth = torch.arange(4 * kinds, dtype=torch.float32, device=where.device).view(kinds, 4)
        decays, forced = Decays(ends, first * 0 + 1, growth), Forced(first, ends)
        results = []
        for module in (token_edits_triton, token_edits_torch):
            tokens = (torch.arange(60 * _ROWS, dtype=torch.int32, device=where.device) * 7 % 5 + 3).contiguous()
            made = (numbers % 4).int()
            history = History(tokens, (numbers * 60 - 60 * (numbers == 3)).int(), (numbers + 20).int(), made, 60)
            scores = logits(torch.float32)
            module.edit_tokens(scores, lists, which, made, history)
            module.ban_repeats(scores, sizes, which, history)
            module.grow_ends(scores, decays, which, made)
            module.force_tokens(scores, forced, which, made, (numbers * 0).int(), (numbers * 0 + 3).int())
            module.append_tokens(history, numbers + 70)
            results.append((scores.clamp(min=-1e30), tokens))
        near(results[0][0], results[1][0])
        same(results[0][1], results[1][1], "the tokens")

    def steps(sets: bool) -> None:
        """Rows of which some end at a token, some at a length, and some for want of a page.

        ``sets``: of tokens that end a row there are several, and each row has one of them.
        """
        count, page_size = 40, 16
        number = torch.arange(count, dtype=torch.int32, device="cpu")
        begun = Rows(
            token=number.long(), position=number.long() + 8, length=number + 9, slot=number.long() + 100,
            made=torch.ones_like(number), remaining=1 + number % 5, status=torch.full_like(number, RUNNING),
            start=number // 16 * 16, pages=torch.stack([number, number + 50, number % 4 - 1], dim=1).contiguous(),
            produced=torch.full((count, 4), -7, dtype=torch.int64, device="cpu"),
        )  # fmt: skip
        eos = torch.tensor([[2, 7, -1], [5, -1, -1]] if sets else [2, 7, -1], device=where.device)
        which = (number % 2).to(where.device) if sets else None
        both = [begun.to(where.device), Rows(*(each.clone() for each in vars(begun).values())).to(where.device)]
        for step in range(4):
            sampled = (number.long() * 3 + step).to(where.device) % 11
            for module, rows in zip((sample_triton, sample_torch), both, strict=True):
                module.advance(rows, sampled, eos, page_size, which)
        for name, wanted in vars(both[1]).items():
            same(getattr(both[0], name), wanted, name)

    made: dict[str, Callable[[], None]] = {
        "greedy": greedy,
        "draws": partial(draws, cut=False),
        "draws of what is left": partial(draws, cut=True),
        "draws, rows of their own": draws_by_row,
        "cutoffs, rows of their own": lambda: cutoffs({"by_row": by_row()}),
        "penalties": partial(penalties, each_its_own=False),
        "penalties, rows of their own": partial(penalties, each_its_own=True),
        "masks": partial(masks, in_place=False),
        "masks, in place": partial(masks, in_place=True),
        "tails": partial(tails, cut=False),
        "tails of what is left, rows of their own": partial(tails, cut=True),
        "single logits": partial(edits, of_each=False),
        "single logits, rows of their own": partial(edits, of_each=True),
        "log-probabilities": partial(likeliest, k=0),
        "log-probabilities of the likeliest": partial(likeliest, k=5),
        "steps of rows": partial(steps, sets=False),
        "steps of rows, ends of their own": partial(steps, sets=True),
    }
    for options in _CUTS:
        made[f"cutoffs, {', '.join(options)}"] = partial(cutoffs, {"temperature": 0.7, **options})
    return made
