"""Fused experts and their routers against transformers' own code, for every class in the table and every family."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_families import family_params
from support_fused import FAMILIES_OF_EXPERTS, REFERENCES, new_model
from support_kernels import INTERPRETED

from hf_batchllm.patches.fusable_experts import mixtures
from hf_batchllm.patches.fused_experts import Handed, experts_forward, router_forward
from hf_batchllm.patches.routers import ROUTERS, Router

pytestmark = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
WITHOUT_A_ROW = ["phimoe"]  # chooses one expert after the other, each from what the last one has left
WITH_A_BIAS_OF_THE_CALLER = ("afmoe", "minimax_m2")
HIDDEN, EXPERTS = 24, 8
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "rms_norm_eps": 1e-6,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "route_scale": 1.5,
    "norm_topk_prob": True,
    "topk_method": "group_limited_greedy",
    "moe_norm_min": 1e-12,
    "expert_selection_fn": "softmax",
    "moe_router_logit_softcapping": 0.0,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k"), 3),
}
# Ways to set routers up, each for those that know it.
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "not normalised": {"norm_topk_prob": False},
    "no groups": {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "one expert": {"num_experts_per_tok": 1, "top_k_experts": 1, "moe_k": 1},
    "sigmoid": {"expert_selection_fn": "sigmoid"},
    "sigmoid, not normalised": {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    "capped": {"moe_router_logit_softcapping": 2.0},
    "a least sum": {"moe_norm_min": 0.9},
}
KNOWN_BY = {"sigmoid": "Cohere2", "sigmoid, not normalised": "Cohere2", "capped": "Laguna", "a least sum": "Ernie"}


def new_router(known: Router, setting: str, dtype: torch.dtype, ties: bool = False) -> Any:
    """With ties, experts 2 n and 2 n + 1 are equals, and nothing but their scores decides."""
    try:
        modeling = importlib.import_module(known.home)
    except ImportError:
        pytest.skip(f"this transformers has no {known.folder}")
    if not hasattr(modeling, known.name):
        pytest.skip(f"this transformers has no {known.name}")
    router = getattr(modeling, known.name)(SimpleNamespace(**CONFIG | SETTINGS[setting]))
    torch.manual_seed(3)
    for name, each in [*router.named_parameters(), *router.named_buffers()]:
        beside = "bias" in name or "per_expert" in name
        each.data.normal_(std=0.1 if beside else 0.5).add_(1.0 if "scale" in name else 0.0)
        if ties and beside:
            each.data.fill_(1.0 if "scale" in name else 0.0)
        elif ties and each.ndim == 2:
            each.data[1::2] = each.data[::2]
    return router.to(dtype)


def choices(router: Any, known: Router, tokens: int, dtype: torch.dtype) -> tuple[Any, Any, Handed]:
    """Of its own code and of ours, each as logits, shares and indices."""
    generator = torch.Generator().manual_seed(tokens)
    states = torch.randn(1, tokens, HIDDEN, generator=generator).to(dtype)
    states = states if known.folder == "afmoe" else states[0]
    given = (torch.randn(EXPERTS, generator=generator) * 0.1,) if known.folder in WITH_A_BIAS_OF_THE_CALLER else ()
    handed = Handed()
    with torch.no_grad():
        theirs = router(states, *given)
        ours = router_forward(router, known, REFERENCES.experts, handed)(states, *given)
    first = not theirs[0].is_floating_point()
    assert len(theirs) == len(ours) and first != ours[0].is_floating_point()
    return (theirs[::-1], ours[::-1], handed) if first else (theirs, ours, handed)


def by_expert(choice: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts in their order, and their shares."""
    indices, order = choice[2].long().sort(1)
    return indices, choice[1].gather(1, order)


WAYS = [
    pytest.param(known, setting, id=f"{known.name}-{setting}")
    for known in ROUTERS
    for setting in SETTINGS
    if known.name.startswith(KNOWN_BY.get(setting, ""))
]


@pytest.mark.some_cases
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize(("known", "setting"), WAYS)
def test_routers(known: Router, setting: str, dtype: torch.dtype) -> None:
    router = new_router(known, setting, dtype)
    for tokens in (1, 29):
        theirs, ours, _ = choices(router, known, tokens, dtype)
        (want, shares), (got, our_shares) = by_expert(theirs), by_expert(ours)
        assert torch.equal(got, want) and our_shares.dtype == shares.dtype
        assert torch.equal(ours[0], theirs[0]) and ours[0].dtype == theirs[0].dtype
        torch.testing.assert_close(our_shares, shares, rtol=8e-3 if shares.dtype == BFLOAT16 else 1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "known", [each for each in ROUTERS if each.folder not in WITH_A_BIAS_OF_THE_CALLER], ids=lambda known: known.name
)
def test_ties(known: Router) -> None:
    """The first of equals is chosen; which one transformers' own code chooses is the device's to say."""
    theirs, ours, handed = choices(new_router(known, "", FLOAT32, ties=True), known, 29, FLOAT32)
    pairs = lambda choice: (choice[2].long() // 2).sort(1)[0]  # noqa: E731
    assert torch.equal(pairs(ours), pairs(theirs))
    torch.testing.assert_close(ours[1].sort(1)[0], theirs[1].sort(1)[0], rtol=1e-6, atol=1e-7)
    indices = ours[2].long()
    second = indices % 2 == 1
    assert second.any() and ((indices - 1).unsqueeze(2) == indices.unsqueeze(1)).any(2)[second].all()
    rows = handed.take(ours[2])
    assert rows is not None and rows.counts.sum() == indices.numel()


@pytest.mark.parametrize("family", [*family_params(FAMILIES_OF_EXPERTS), "qwen3_vl_moe"])
def test_experts(family: str) -> None:
    """One token, so that most experts are met by nobody; many; and all tokens at the same expert."""
    found = list(mixtures(new_model(family)))
    assert found and all(each.why_not is None for each in found)
    assert all(bool(each.routers) == (family not in WITHOUT_A_ROW) for each in found)
    experts = found[0].module
    ours = experts_forward(found[0], REFERENCES.experts, Handed())
    count, width = len(experts.gate_up_proj), experts.gate_up_proj.shape[1 if experts.is_transposed else 2]
    torch.manual_seed(5)
    for tokens, spread in ((1, 1.0), (23, 1.0), (23, 0.0)):
        states, scores = torch.randn(tokens, width), torch.randn(tokens, count) * spread
        shares, indices = scores.softmax(-1).topk(2)
        with torch.no_grad():
            want, got = experts(states, indices, shares), ours(states, indices, shares)
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * float(want.abs().max()))


def test_a_router_that_is_set_up_otherwise_meanwhile() -> None:
    """What its kernel cannot do, its own code does; then the experts' kernels find out by themselves."""
    known = next(each for each in ROUTERS if each.folder == "cohere2_moe")
    router = new_router(known, "", BFLOAT16)
    _, ours, handed = choices(router, known, 5, BFLOAT16)
    assert handed.take(ours[2]) is not None
    router.expert_selection_fn = "sigmoid"
    theirs, ours, handed = choices(router, known, 5, BFLOAT16)
    assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True))
    assert handed.take(ours[2]) is None
