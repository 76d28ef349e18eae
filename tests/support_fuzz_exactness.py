"""Whether a log-probability is as exact as can be: where float32 is far from float64, two computations may differ."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import support_fuzz_models as models
import torch
from support_families import logits_of_rows
from support_fuzz_cases import Ask, Case

_AS_FAR = 4.0  # times as far from float64 as the model's own pass over the whole row


def is_as_exact_as_the_model(case: Case, ask: Ask, continuation: Sequence[int], found: Sequence[float | None]) -> bool:
    """``found``: a log-probability of each token of the continuation."""
    with models.as_its_user_runs_it(case.family, case.device, ask.adapter) as model:
        theirs, exact = (_looked_up(each, ask.ids, continuation) for each in (model, _in_float64(model)))
    ours = torch.tensor([float("nan") if each is None else each for each in found], dtype=torch.float64)
    return bool(((ours - exact).abs().max() <= _AS_FAR * (theirs - exact).abs().max()).item())


def _in_float64(model: torch.nn.Module) -> torch.nn.Module:
    exact = copy.deepcopy(model).to(torch.float64)
    for module in exact.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"  # type: ignore[union-attr]  # a GPU's grouped product has no float64
    return exact


def _looked_up(model: torch.nn.Module, ids: Sequence[int], continuation: Sequence[int]) -> torch.Tensor:  # [tokens]
    (logits,) = logits_of_rows(model, [[*ids, *continuation]])  # type: ignore[arg-type]
    shares = logits[len(ids) - 1 : -1].double().cpu().log_softmax(dim=-1)
    return shares[range(len(continuation)), list(continuation)]
