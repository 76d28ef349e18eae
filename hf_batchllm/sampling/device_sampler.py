"""From logits to tokens without the host: nothing is read back, and a CUDA graph can hold it.

Tokens are drawn from the same distribution as with transformers' processors; ``device_options`` says which options need
transformers' own code instead. Noise depends on (seed, prompt, sample, tokens made so far, token) alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..inputs.options import Options
from ..inputs.seeds import as_int64
from ..kernels.lists.sampling_recipes import Recipe, RecipeTable, RowRecipes
from ..kernels.lists.token_edits import History
from ..model.transfers import to_device
from .device_options import MOST_OF_TOP_H, recipe_of
from .logit_edits import EditTables, LogitEdits
from .sampling_kernels import SamplingKernels

_WORD = 32  # tokens in each word of a row's bits


@dataclass(frozen=True)
class RowsState:
    """What a DeviceSampler has to know of the rows of ``logits``, on their device. Each is [rows], but for ``seen``.

    ``kind``, ``minimum`` and ``seen`` are only needed where ``DeviceSampler.needs_...`` says so.
    """

    prompt: torch.Tensor  # int32 or int64  the prompt's number among those with the same seed
    sample: torch.Tensor  # int32 or int64  the number of the prompt's sample
    made: torch.Tensor  # int32 or int64  tokens generated so far
    kind: torch.Tensor | None = None  # int32  the number of the row's options in ``DeviceSampler.kinds``
    minimum: torch.Tensor | None = None  # int32  tokens that a row must have before EOS
    line: torch.Tensor | None = None  # int32  the row's line in ``seen``, -1 if it needs none; None: line i for row i
    seen: torch.Tensor | None = None  # [lines, words] int32  a bit for each token of the vocabulary
    seed: torch.Tensor | None = None  # int64  where rows have seeds of their own
    history: History | None = None  # the tokens of each row, where ``DeviceSampler.edits`` look back at them
    prompt_line: torch.Tensor | None = None  # int32  as ``line``, in ``prompt_seen``
    prompt_seen: torch.Tensor | None = None  # [lines, words] int32  as ``seen``, of the prompts alone
    first_at: torch.Tensor | None = None  # int32  the number of new tokens at which the first one is forced; -1: none
    last_at: torch.Tensor | None = None  # int32  the number of new tokens at which the last one is


class DeviceSampler:
    """Picks the next token of each row.

    ``kinds``: all options that rows may have; ``why_not_on_device`` is None for each. Options that pick tokens in the
    same way get the same number. ``seed``: of rows without a seed of their own. ``edits``: what is done to single
    logits, if anything is. ``longest``: new tokens of the longest row.
    ``keeps_scores``: whether ``scores`` [rows, vocabulary] are to hold what the latest tokens were drawn from.
    """

    def __init__(
        self,
        kinds: Iterable[Options],
        seed: int | None,
        vocabulary: int,
        device: torch.device | str,
        kernels: SamplingKernels,
        edits: Mapping[Options, LogitEdits] = MappingProxyType({}),
        longest: int = 1,
        keeps_scores: bool = False,
    ) -> None:
        self._kernels = kernels
        self.vocabulary = vocabulary
        self._keeps_scores = keeps_scores
        self.scores: torch.Tensor | None = None
        numbers: dict[tuple[Recipe, tuple[int, ...], LogitEdits, bool], int] = {}
        self.kinds: dict[Options, int] = {}
        for options in kinds:
            normalised = keeps_scores and bool(options.config.renormalize_logits)
            way = recipe_of(options), self._held_back(options), edits.get(options, LogitEdits()), normalised
            self.kinds[options] = numbers.setdefault(way, len(numbers))
        recipes = [recipe for recipe, *_ in numbers]
        each_edits = [each for _, _, each, _ in numbers]
        self.edits = EditTables(each_edits, vocabulary, longest, torch.device(device))
        self._recipe = recipes[0]
        self._table = RecipeTable(recipes, vocabulary, device) if len(recipes) > 1 else None
        self._draws = any(recipe.temperature for recipe in recipes)
        self._cuts = any(recipe.cuts(vocabulary) for recipe in recipes)
        typical_eta = any(recipe.has_typical_eta for recipe in recipes)
        self._typical_eta = (self._table or RecipeTable(recipes, vocabulary, device)) if typical_eta else None
        self.needs_kind = self._table is not None
        self.needs_seen = any(recipe.penalty != 1 for recipe in recipes)
        held_back = [tokens for _, tokens, *_ in numbers]
        most = max(map(len, held_back))
        self.needs_minimum = most > 0
        padded = [[*tokens, *[-1] * (most - len(tokens))] for tokens in held_back]
        device = torch.device(device)
        with torch.inference_mode(False):  # steps may run outside it
            self._eos = to_device(np.array(padded if self.needs_kind else padded[0], dtype=np.int64), device)
            self._seed = to_device(np.array([as_int64(seed or 0)], dtype=np.int64), device)
            warmth = np.array([recipe.temperature or 1.0 for recipe in recipes], dtype=np.float32)
            self._warmth = to_device(warmth, device)
            by_entropy = [recipe.top_h if recipe.temperature and recipe.top_h else 2.0 for recipe in recipes]
            top_h = np.array(by_entropy, dtype=np.float32)
            self._top_h: torch.Tensor | None = to_device(top_h, device) if min(by_entropy) <= 1 else None
            which = np.array([each for *_, each in numbers])
            self._normalised: torch.Tensor | None = to_device(which, device) if which.any() else None

    def _held_back(self, options: Options) -> tuple[int, ...]:
        """The tokens that may not come before a minimum length."""
        if not (options.config.min_new_tokens or options.config.min_length):
            return ()
        return tuple(token for token in sorted(options.eos_token_ids) if 0 <= token < self.vocabulary)

    def seen(self, ids: np.ndarray) -> np.ndarray:  # [words] int32
        """The bits of the tokens that a row starts with."""
        found = np.zeros(-(-self.vocabulary // _WORD) * _WORD, dtype=bool)
        found[ids[(ids >= 0) & (ids < self.vocabulary)]] = True
        return np.packbits(found, bitorder="little").view("<i4")

    def __call__(self, logits: torch.Tensor, rows: RowsState, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tokens [rows] int64 for ``logits`` [rows, vocabulary], which stay as they are; ``rows.seen`` gets them.

        Sampling gives -1 for a row whose logits are NaN, infinite, or all -inf; ``advance`` ends such a row. Greedy
        takes the lowest token of the best ones, and NaN counts as infinity.
        """
        assert logits.shape[1] == self.vocabulary
        recipe, kernels = self._recipe, self._kernels
        by_row = None
        if self._table is not None:
            assert rows.kind is not None
            by_row = RowRecipes(self._table, rows.kind)
        logits = self._edited(logits, rows, by_row)
        threshold = ceiling = None
        if not self._draws:
            tokens = kernels.greedy(logits, out=out)
        else:
            if self._cuts:
                threshold = kernels.cutoffs(
                    logits,
                    temperature=recipe.temperature,
                    top_k=recipe.top_k,
                    top_p=recipe.top_p,
                    min_p=recipe.min_p,
                    by_row=by_row,
                )
            if self._top_h is not None:
                each = slice(None) if by_row is None else by_row.which  # one recipe is all rows'
                edges = _top_h_edges(logits, self._top_h[each], self._warmth[each])
                threshold = edges if threshold is None else torch.maximum(threshold, edges)
            if self._typical_eta is not None:
                which = rows.kind if self.needs_kind else None
                threshold, ceiling = kernels.typical_eta_cuts(logits, self._typical_eta, which, threshold)
            tokens = kernels.gumbel_sample(
                logits,
                recipe.temperature if by_row is None else by_row,
                self._seed if rows.seed is None else rows.seed,
                rows.prompt,
                rows.sample,
                rows.made,
                threshold=threshold,
                ceiling=ceiling,
                out=out,
            )
        if self._keeps_scores:
            self.scores = self._scores_of(logits, rows.kind, threshold, ceiling)
        if self.needs_seen:
            kernels.mark_seen(rows.seen, tokens, self.vocabulary, rows.line)
        if self.edits.looks_back:
            kernels.append_tokens(rows.history, tokens)
        return tokens

    def _scores_of(
        self,
        edited: torch.Tensor,
        kind: torch.Tensor | None,
        threshold: torch.Tensor | None,
        ceiling: torch.Tensor | None,
    ) -> torch.Tensor:  # [rows, vocabulary] float32
        """What the tokens are drawn from, as ``generate`` has it: after temperature, -inf where something was cut off.

        Among equals at the edge of a nucleus all are left, where transformers leaves some.
        """
        scores = edited.float()
        if self._table is not None:
            assert kind is not None
            scores = scores / self._warmth[kind][:, None]
        elif self._recipe.temperature not in (0, 1):
            scores = scores / self._recipe.temperature
        elif scores is edited and threshold is not None:
            scores = scores.clone()  # the model's own stay as they are
        for edge, beyond in ((threshold, torch.lt), (ceiling, torch.gt)):
            if edge is not None:
                scores.masked_fill_(beyond(edited, edge[:, None]), -torch.inf)
        if self._normalised is not None:
            log_probs = scores.log_softmax(dim=-1)
            if kind is None or self._table is None:
                return log_probs
            scores = torch.where(self._normalised[kind][:, None], log_probs, scores)
        return scores

    def _edited(self, logits: torch.Tensor, rows: RowsState, by_row: RowRecipes | None) -> torch.Tensor:
        """Logits in which single ones are changed, in transformers' order: copies, unless nothing is."""
        edits, kernels = self.edits, self._kernels
        which = rows.kind if self.needs_kind else None
        scores = logits.to(torch.float32, copy=True) if edits.any else logits
        own = scores if edits.any else None
        if edits.biased is not None:
            kernels.edit_tokens(scores, edits.biased, which, rows.made, rows.history)
        if edits.prompt_penalties is not None:
            table, of_row = edits.prompt_penalties, torch.zeros_like(rows.prompt, dtype=torch.int32)
            given = RowRecipes(table, of_row if which is None else which)
            kernels.penalise(scores, seen=rows.prompt_seen, line=rows.prompt_line, by_row=given, out=own)
        if self.needs_seen or self.needs_minimum:
            looking_back: dict[str, Any] = {"by_row": by_row, "out": own}
            if self.needs_seen:
                assert rows.seen is not None
                looking_back |= {"seen": rows.seen, "line": rows.line, "penalty": self._recipe.penalty}
            if self.needs_minimum:
                assert rows.minimum is not None
                looking_back |= {"eos": self._eos, "made": rows.made, "minimum": rows.minimum}
            scores = kernels.penalise(scores, **looking_back)
        if edits.no_repeat is not None:
            kernels.ban_repeats(scores, edits.no_repeat, which, rows.history)
        if edits.forbidden is not None:
            kernels.edit_tokens(scores, edits.forbidden, which, rows.made, rows.history)
        if edits.forced is not None:
            kernels.force_tokens(scores, edits.forced, which, rows.made, rows.first_at, rows.last_at)
        if edits.repaired is not None:
            sound = scores.nan_to_num(nan=0.0)
            scores = sound if which is None else torch.where(edits.repaired[which][:, None], sound, scores)
        if edits.decays is not None:
            kernels.grow_ends(scores, edits.decays, which, rows.made)
        if edits.suppressed is not None:
            kernels.edit_tokens(scores, edits.suppressed, which, rows.made, rows.history)
        return scores


def _top_h_edges(
    logits: torch.Tensor,  # [rows, vocabulary]
    top_h: torch.Tensor,  # [rows], or [1] for all of them, float32  above 1: nothing is cut off
    temperature: torch.Tensor,  # the same
) -> torch.Tensor:  # [rows] float32
    """The logit from which up a row's tokens stay by top-h, as transformers has it; among equals at that edge all do.

    These are the best tokens whose shares of the entropy, added up, stay below a part of it.

    -inf where nothing is cut off, and in rows that hold NaN or infinity: the draw sees to these.
    """
    best, _ = logits.topk(min(MOST_OF_TOP_H, logits.shape[-1]), dim=-1)
    best = best.float()
    weights = (best / temperature[:, None]).softmax(dim=-1)
    terms = torch.where(weights > 0, -weights * weights.log(), 0.0)
    kept = (terms.cumsum(dim=-1) <= (terms.sum(dim=-1) * top_h)[:, None]) & (weights > 0)
    last = (kept.sum(dim=-1) - 1).clamp(min=0)
    edge = best.gather(1, last[:, None])[:, 0]
    return torch.where((top_h > 1) | ~best[:, 0].isfinite(), -torch.inf, edge)
