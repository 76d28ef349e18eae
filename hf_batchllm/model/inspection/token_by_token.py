"""Code of a user's inside a model must treat every token by itself: the engine's row holds many prompts.

Only attention, which the engine does itself, may bring tokens together. A module may mix tokens (a shift by one place,
a mean over the row), count positions by itself, ask how much a cache holds, or pass over which rows of logits are asked
for. Its code does not say. So the model runs over some tokens, among other neighbours each time, with an attention that
sees none of them: each token must give the same logits. Models that run transformers' code alone are not run.

A trial counts for as long as the code is the same, and gives the same numbers for a long row at the start of each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ...errors import UnsupportedModelError
from ...notices import Notices
from ...patches.mask_probe import MASK_PROBE_NAME, attention_masks_noted
from ...patches.state_functions import mixers
from ..attention.kv_storage import kv_dtype
from ..float64 import in_float64
from ..matmul_precision import multiplies_exactly
from .batch_dependent import depends_on_batch
from .own_code import AsMade, OwnCode, find_own_code, shortest_table
from .trial_passes import (
    MadeUp,
    Row,
    each_by_itself,
    in_eval_mode,
    logits_after,
    logits_of,
    random_numbers_kept,
)

_TOKENS = 8
# The tokens of each pass, in their order in the row. Half of them are the same in all passes, at the same places in the
# first two.
_ORDERS = ((0, 4, 1, 5, 2, 6, 3, 7), (0, 4, 1, 5, 2, 6, 3, 7), (6, 3, 5, 2, 7, 1, 4, 0))
_KEPT = (2, 5)  # rows asked for by `logits_to_keep`
_LONG = 300  # tokens of a row in which code that acts in long rows alone does so
_NEAR = 16  # tokens at the first positions; as many lie further off
_PASTS = (0, 5, _LONG)  # tokens in a cache
# How far logits of the same token may be apart, of their size: rounding, which adds up over many layers.
_ROUNDING, _ROUNDING_OF_TF32, _ROUNDING_OF_HALF = 1e-4, 1e-2, 0.2
# The same, where passes are of one shape and the token is at one place: a product's rows are then rounded alike. Which
# kernel computes an expert may depend on how many of the tokens are sent to it; and some kernels add up in any order.
_ROUNDING_IN_PLACE, _ROUNDING_OF_CHANCE = 2e-3, 0.02
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in configs
_MIXED = "a token's logits depend on which other tokens stand beside it, or on its place in the row"
_BY_LENGTH = "a token's logits depend on how many other tokens there are, or on the longest position among them"
_BY_CACHE = "a token's logits depend on whether there is a cache, or on how much it holds; passes here are given none"
_CHANGING = (
    "it gives other logits for the same tokens from pass to pass: it counts passes, keeps another state, or draws "
    "random numbers that torch.manual_seed does not reach"
)


class TokenByToken:
    """Whether one model's code treats tokens so: tried where there is code of the user's, and again where it changed.

    longest: positions that the model knows; all lie below. ``found``: the code of the latest look, one in each call.
    """

    found: OwnCode

    def __init__(self, name: str, made: AsMade | None, longest: int, selects_rows: bool) -> None:
        self._name = name
        self._longest = max(longest, 1)
        self._selects_rows = selects_rows
        self._made = made
        self._good: tuple[object, torch.Tensor] | None = None  # the code of a good trial, and its numbers
        self._notices = Notices()

    def refuse_mixed_tokens(self, model: PreTrainedModel, modules: Sequence[nn.Module]) -> None:
        """modules: all of the model's."""
        own = self.found = find_own_code(model, modules, self._made)
        if not own or depends_on_batch(model, modules) is not None:
            return
        code, numbers = own.shows(), self._numbers(model, modules, own)
        if self._good is not None and self._good[0] == code and torch.equal(self._good[1], numbers):
            return
        self._good = None
        try:
            why = self._tried(model, modules, own)
        except _Unclear as unclear:
            if unclear.error is not None:
                self._notices(
                    "untried",
                    f"{self._name} runs code that is not transformers' own ({_place_of(model, own)}), and it could not "
                    f"be tried on a few tokens ({type(unclear.error).__name__}: {unclear.error}). Here many prompts "
                    "stand side by side in one row: if that code mixes tokens, results are wrong. Compare a few with "
                    "model.generate",
                )
            return  # not remembered: another call may tell
        if why is not None:
            raise UnsupportedModelError(
                f"{self._name} runs code that is not transformers' own ({_place_of(model, own)}). Tried on a few "
                f"tokens, {why}. Here many prompts stand side by side in one row, and only attention may bring tokens "
                "together: use model.generate, or take that code out"
            )
        self._good = code, numbers

    def _numbers(self, model: PreTrainedModel, modules: Sequence[nn.Module], own: OwnCode) -> torch.Tensor:
        """Numbers of a long row that change with nearly all that custom code reads; not numbers where it fails."""
        made_up = MadeUp(model, seed=1)
        spread = _spread(self._positions(model, own), _LONG)
        with each_by_itself(model, modules):
            try:
                positions = [spread[place] for place in made_up.places(_LONG, _LONG)]
                parts = logits_of(model, made_up.tokens(_LONG), positions).split(64)
                exact = (in_float64(part) for part in parts)
                return torch.cat([torch.stack([part.mean(-1), part.norm(dim=-1)]) for part in exact], dim=1).cpu()
            except UnsupportedModelError:
                raise
            except Exception:
                return torch.full((1,), torch.nan, dtype=torch.float64, device="cpu")

    def _positions(self, model: PreTrainedModel, own: OwnCode) -> int:
        """How many positions the model knows, and custom code with it."""
        return min(self._longest, shortest_table(model, own) or self._longest)

    def _tried(self, model: PreTrainedModel, modules: Sequence[nn.Module], own: OwnCode) -> str | None:
        """In words that follow "tried on a few tokens"; None if each token is treated by itself."""
        longest = self._positions(model, own)
        try:
            with each_by_itself(model, modules):
                why = _Trial(model, longest).difference(self._selects_rows)
        except _Unclear as unclear:
            if unclear.error is not None or not any(module.training for module in modules):
                raise
            # Random numbers, which dropout may draw: without it, the code shows what it does.
            with in_eval_mode(modules), each_by_itself(model, modules):
                why = _Trial(model, longest).difference(self._selects_rows)
            if why is None:
                raise
        if why is None and _hides_tokens(model, modules):
            why = "it hides tokens by an attention mask of its own making"
        return why


class _Unclear(Exception):
    """Nothing can be said: the code draws random numbers, or a pass fails."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error


@contextmanager
def _unclear_if_it_fails() -> Iterator[None]:
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise _Unclear(error) from error


class _Trial:
    """Passes of the model, compared. They run ``each_by_itself``."""

    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        self._model = model
        self._longest = longest
        self._made_up = MadeUp(model, seed=0)
        self._allowed = _rounding(model)
        config = model.config.get_text_config(decoder=True)
        self._exact = not any(getattr(config, each, 0) for each in _EXPERTS)
        self._loosely = min(self._allowed, _ROUNDING_OF_CHANCE)
        # In half precision rounding may send a token to another expert; what mixes tokens shows in most of them.
        self._share = 0.5 if self._allowed == _ROUNDING_OF_HALF else 0.0

    def difference(self, selects_rows: bool) -> str | None:
        return self._in_short_rows(selects_rows) or self._in_long_rows() or self._with_cache()

    def _in_short_rows(self, selects_rows: bool) -> str | None:
        same = self._made_up.tokens(_TOKENS // 2)
        found: list[torch.Tensor] = []  # of each pass, the logits of the tokens that are the same
        for order in _ORDERS:
            tokens = same + self._made_up.tokens(_TOKENS // 2)
            row = [(tokens[place], self._position(place)) for place in order]
            logits = self._run(row)
            if len(logits) != len(row):
                return f"its forward pass gives {len(logits)} rows of logits for {len(row)} tokens"
            found.append(logits[[order.index(place) for place in range(len(same))]])
            if (why := self._changes(row, logits)) is not None:
                return why
        if self._far(found[0], found[1], self._in_place) or self._far(found[0], found[2]):
            return _MIXED
        try:
            alone = [logits_of(self._model, [token], [self._position(place)]) for place, token in enumerate(same)]
        except Exception as error:  # steps of one token are usual
            return f"its forward pass fails with a single token ({error})"
        if self._far(found[0], torch.cat(alone)):
            return _MIXED
        return self._in_rows_asked_for(row, logits) if selects_rows else None

    def _in_rows_asked_for(self, row: Row, logits: torch.Tensor) -> str | None:
        for kept in (_KEPT[:1], _KEPT):
            places = torch.tensor(kept, device=self._model.device)
            tokens, positions = zip(*row, strict=True)
            try:
                rows = logits_of(self._model, tokens, positions, logits_to_keep=places)
            except Exception as error:
                return f"its forward pass fails with a tensor of places as `logits_to_keep` ({error})"
            if rows.shape[0] != len(kept) or self._far(logits[list(kept)], rows):
                return "its forward pass takes `logits_to_keep` and does not give the logits of those places"
        return None

    def _in_long_rows(self) -> str | None:
        near = list(zip(self._made_up.tokens(_NEAR), map(self._position, range(_NEAR)), strict=True))
        away = list(zip(self._made_up.tokens(_NEAR), _spread(self._longest, _NEAR), strict=True))
        same = near + away
        places, other_places = (self._made_up.places(_LONG, len(same)) for _ in range(2))

        def run(at: list[int]) -> tuple[list[tuple[int, int]], torch.Tensor]:
            row = self._made_up.row(_LONG, self._longest)
            for place, entry in zip(at, same, strict=True):
                row[place] = entry
            return row, self._run(row)

        row, logits = run(places)
        if (why := self._changes(row, logits)) is not None:
            return why
        first = logits[places]
        del logits  # as large as the vocabulary
        if self._far(first, run(places)[1][places], self._in_place):
            return _MIXED
        if self._far(first, run(other_places)[1][other_places]):
            return _MIXED
        # A shorter row, in which no position lies far off.
        few = [*reversed(near), *self._made_up.row(_TOKENS, min(_NEAR, self._longest))]
        if self._far(first[:_NEAR], self._run(few)[:_NEAR].flip(0)):
            return _BY_LENGTH
        return None

    def _with_cache(self) -> str | None:
        if any(mixers(self._model)):  # with a cache, they run functions for which nothing stands in
            return None
        for past in _PASTS:
            past = min(past, max(self._longest - _TOKENS, 0))
            tokens = self._made_up.tokens(_TOKENS)
            row = [(token, self._position(past + place)) for place, token in enumerate(tokens)]
            for part in (row, row[:1]) if past else (row,):
                with _unclear_if_it_fails():
                    cached = logits_after(self._model, past, part, self._made_up)
                if self._far(self._run(part), cached, self._in_place):
                    return _BY_CACHE
        return None

    def _run(self, row: Row) -> torch.Tensor:  # [tokens, vocabulary]
        tokens, positions = zip(*row, strict=True)
        with _unclear_if_it_fails():
            return logits_of(self._model, tokens, positions)

    def _position(self, place: int) -> int:
        return place % self._longest

    def _changes(self, row: Row, logits: torch.Tensor) -> str | None:
        """Whether another pass over the same row gives other logits."""
        again = self._run(row)
        self._exact = self._exact and torch.equal(logits, again)
        if not self._far(logits, again, self._loosely):
            return None
        with random_numbers_kept(self._model):
            one = self._run(row)
        with random_numbers_kept(self._model):
            other = self._run(row)
        if self._far(one, other, self._loosely):
            return _CHANGING
        raise _Unclear  # it draws random numbers, as dropout does: no two passes are alike, whatever the tokens

    @property
    def _in_place(self) -> float:
        return min(self._allowed, _ROUNDING_IN_PLACE) if self._exact else self._loosely

    def _far(self, one: torch.Tensor, other: torch.Tensor, allowed: float | None = None) -> bool:
        if one.shape != other.shape:
            return True
        one, other = one.float(), other.float()
        apart = (one - other).norm(dim=-1) > (self._allowed if allowed is None else allowed) * one.norm(dim=-1)
        return bool(apart.float().mean() > self._share)


def _spread(longest: int, count: int) -> list[int]:
    """Positions from the first to the last that the model knows."""
    return [place * (longest - 1) // (count - 1) for place in range(count)]


def _hides_tokens(model: PreTrainedModel, modules: Sequence[nn.Module]) -> bool:
    """No mask is given to it, so one that hides a token is of its own making; this library's attention has none."""
    config = model.config.get_text_config(decoder=True)
    special = (config.pad_token_id, config.eos_token_id, config.bos_token_id)
    flat = [each for given in special for each in (given if isinstance(given, list) else [given])]
    known = [each for each in flat if isinstance(each, int) and 0 <= each < config.vocab_size]
    tokens = [*MadeUp(model, seed=2).tokens(_TOKENS), *known]
    with _unclear_if_it_fails(), each_by_itself(model, modules, MASK_PROBE_NAME), attention_masks_noted() as masks:
        logits_of(model, tokens, range(len(tokens)), use_cache=True)
    return any(mask.given is not None and not bool(mask.given.bool().all()) for mask in masks.values())


def _rounding(model: PreTrainedModel) -> float:
    dtype = kv_dtype(model, model.device)
    if dtype not in (torch.float32, torch.float64):
        return _ROUNDING_OF_HALF
    return _ROUNDING if multiplies_exactly(model.device) else _ROUNDING_OF_TF32


def _place_of(model: nn.Module, own: OwnCode) -> str:
    known = {id(module) for module, _ in own.found}
    # The innermost first: what is around it may be a class of the user's as well.
    for path, module in reversed(list(model.named_modules())):
        if id(module) in known:
            return f"{f'`{path}`, ' if path else ''}{type(module).__module__}.{type(module).__qualname__}"
    return ", ".join(own.replacing) or type(model).__qualname__
