"""Cases of picking tokens: the best one, draws, cutoffs, penalties, masks, and going on to the next step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..kernels.lists.sampling_recipes import Recipe, RecipeTable, RowRecipes
from ..kernels.lists.token_edits import Decays, Forced, History, Target, TargetLists
from ..kernels.reference.sample_torch import RUNNING, Rows
from .comparing import Cases, Where, Wrong, both, held

_ROWS, _VOCABULARY = 8, 5003
_WORDS = -(-_VOCABULARY // 32)  # with a bit for each token
_CUTS: tuple[dict[str, Any], ...] = (
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
)
# Of rows that sample each in its own way, one of which takes the best token.
_TYPICAL_ETA = (Recipe(typical_p=0.6), Recipe(1.0, 0.7, epsilon=1e-3), Recipe(eta=0.01), Recipe(temperature=0.0))
_RECIPES = (Recipe(temperature=0.0), Recipe(1.3, 0.8, 40), Recipe(1.1, 0.7, top_p=0.9), Recipe(temperature=1.2))


def sampling(where: Where) -> Cases:
    numbers, one_seed = torch.arange(_ROWS, device=where.device), torch.tensor([7], device=where.device)

    def logits(dtype: torch.dtype | None = None) -> torch.Tensor:
        return where.random(where.generator(), _ROWS, _VOCABULARY, dtype=dtype) * 2

    def by_row() -> RowRecipes:
        return RowRecipes(RecipeTable(_RECIPES, _VOCABULARY, where.device), (numbers % len(_RECIPES)).int())

    def cut(**given: Any) -> torch.Tensor:
        """What the draws of what is left are given."""
        threshold: torch.Tensor = both("top_k_top_p")[1].cutoffs(logits(), **given)
        return threshold

    def draws(temperature: float | RowRecipes, seed: torch.Tensor, threshold: torch.Tensor | None = None) -> None:
        given = temperature, seed, numbers, numbers % 3, 5 * numbers
        tokens = held("sample", "gumbel_sample", logits(), *given, threshold=threshold, but=1)
        if threshold is not None and bool((logits().gather(1, tokens[:, None])[:, 0].float() < threshold).any()):
            raise Wrong("a token that was cut off was drawn")

    def cutoffs(**given: Any) -> None:
        held("top_k_top_p", "cutoffs", logits(), **given, exact=True, but=1)

    def penalties(**given: Any) -> None:
        tokens = torch.arange(0, _VOCABULARY, 610, device=where.device)[:_ROWS]
        seen = torch.zeros(_ROWS, _WORDS, dtype=torch.int32, device=where.device)
        held("penalties", "mark_seen", seen, tokens, _VOCABULARY)
        both("penalties")[1].mark_seen(seen, tokens, _VOCABULARY)
        held("penalties", "penalise", logits(torch.float32), seen=seen, **given)

    def penalties_by_row() -> None:
        """Penalties of each row, and tokens that may not come yet."""
        eos = torch.tensor([[2, 7]] * len(_RECIPES), device=where.device)
        penalties(by_row=by_row(), eos=eos, made=numbers.int(), minimum=(numbers * 0 + 4).int())

    def masks(in_place: bool) -> None:
        """Each row but the free ones has the line of another one."""
        bits = where.random(where.generator(), _ROWS, _WORDS, dtype=torch.float32).view(torch.int32)
        given, line = logits(), (numbers.flip(0) % 5 - 1).int()
        held("token_masks", "mask_tokens", given, bits, line=line, out=given if in_place else None, exact=True)

    def most_likely(k: int) -> None:
        ids = torch.zeros(_ROWS, 3, k, dtype=torch.int32, device=where.device)
        values = torch.zeros(_ROWS, 3, k + 1, dtype=torch.float32, device=where.device)
        # Of equals that 16-bit logits have, either token will do.
        held("top_logprobs", "note_top_logprobs", logits(), numbers * 7 - 1, ids, values, numbers, but=_ROWS)

    def typical_eta(each_its_own: bool) -> None:
        """``each_its_own``: ways of each row, of what a cutoff has left."""
        table = RecipeTable(_TYPICAL_ETA, _VOCABULARY, where.device)
        threshold = cut(top_k=900) if each_its_own else None
        which, kept = (numbers % len(_TYPICAL_ETA)).int() if each_its_own else None, []
        for module in both("typical_eta"):
            low, high = module.typical_eta_cuts(logits(), table, which, threshold)
            stays = (logits().float() >= low[:, None]) & (logits().float() <= high[:, None])
            kept.append(stays.sum(dim=1).float())
            given = numbers[:1], numbers, numbers, numbers
            tokens = both("sample")[0].gumbel_sample(logits(), 1.0, *given, threshold=low, ceiling=high)
            if not bool(stays.gather(1, tokens[:, None]).all()):
                raise Wrong("a token that was cut off was drawn")
        if bool(((kept[0] - kept[1]).abs() > 0.02 * kept[1] + 2).any()):
            raise Wrong(f"{kept[0].tolist()} tokens are left, and {kept[1].tolist()} by the reference")

    def edits(kinds: int) -> None:
        """``kinds``: so many kinds of rows."""
        which = (numbers % kinds).int() if kinds > 1 else None
        common = [Target(11, -float("inf"), at=2), Target(13, 0.0, sequences={(5, 6): 2.0, (6,): 1.0})]
        lists = TargetLists.of([[Target(7 + kind, 1.5), *common] for kind in range(kinds)], where.device)
        sizes = torch.tensor([[2, 3, 0][:kinds], [1, 0, 2][:kinds]], dtype=torch.int32, device=where.device)
        first = torch.tensor([9, -1, 12][:kinds], dtype=torch.int32, device=where.device)
        ends = TargetLists.of([[Target(4), Target(40)] for _ in range(kinds)], where.device)
        growth = torch.arange(4 * kinds, dtype=torch.float32, device=where.device).view(kinds, 4)
        decays, forced = Decays(ends, first * 0 + 1, growth), Forced(first, ends)

        tokens = (torch.arange(60 * _ROWS, dtype=torch.int32, device=where.device) * 7 % 5 + 3).contiguous()
        made, length = (numbers % 4).int(), (numbers + 20).int()
        history = History(tokens, (numbers * 60 - 60 * (numbers == 3)).int(), length, made, 60)
        edits: dict[str, tuple[Any, ...]] = {
            "edit_tokens": (lists, which, made, history),
            "ban_repeats": (sizes, which, history),
            "grow_ends": (decays, which, made),
            "force_tokens": (forced, which, made, (numbers * 0).int(), (numbers * 0 + 3).int()),
        }
        for name, given in edits.items():
            held("token_edits", name, logits(torch.float32), *given)
        held("token_edits", "append_tokens", history, numbers + 70)

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

        def moved_on(module: Any, rows: Rows) -> None:
            for step in range(4):
                module.advance(rows, (number.long() * 3 + step).to(where.device) % 11, eos, page_size, which)

        held("sample", moved_on, begun.to(where.device))

    return {
        "greedy": lambda: held("sample", "greedy", logits()),
        "draws": lambda: draws(0.8, one_seed),
        "draws of what is left": lambda: draws(0.8, one_seed, cut(temperature=0.8, top_k=5)),
        "draws, rows of their own": lambda: draws(by_row(), 7 + numbers, cut(by_row=by_row())),
        "cutoffs, rows of their own": lambda: cutoffs(by_row=by_row()),
        "penalties": partial(penalties, penalty=1.3),
        "penalties, rows of their own": penalties_by_row,
        "masks": partial(masks, in_place=False),
        "masks, in place": partial(masks, in_place=True),
        "typical, epsilon and eta": partial(typical_eta, each_its_own=False),
        "typical, epsilon and eta of what is left, rows of their own": partial(typical_eta, each_its_own=True),
        "single logits": partial(edits, kinds=1),
        "single logits, rows of their own": partial(edits, kinds=3),
        "log-probabilities": partial(most_likely, k=0),
        "log-probabilities of the most likely": partial(most_likely, k=5),
        "steps of rows": partial(steps, sets=False),
        "steps of rows, ends of their own": partial(steps, sets=True),
        **{f"cutoffs, {', '.join(options)}": partial(cutoffs, temperature=0.7, **options) for options in _CUTS},
    }
