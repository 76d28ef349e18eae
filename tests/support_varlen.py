"""``torch.nn.attention.varlen`` without a GPU: a stand-in with the same signature and meaning."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_batchllm.kernels.reference.attention_parts_torch import attend
from hf_batchllm.model.attention import varlen_attention
from hf_batchllm.model.attention.varlen_attention import VarlenBackend


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key) == len(value)
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    left, right = window_size
    assert right == 0 or (left, right) == (-1, -1)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
    for at in range(len(cu_seq_q) - 1):
        rows, keys = slice(*cu_seq_q[at : at + 2].tolist()), slice(*cu_seq_k[at : at + 2].tolist())
        window = None if right == -1 else left
        mask = varlen_attention._mask(rows.stop - rows.start, keys.stop - keys.start, window)
        made = attend(query[rows], key[keys], value[keys], scale or query.shape[2] ** -0.5, mask=mask)
        out[rows], lse[rows] = made[0].to(out.dtype), made[1].float()
    return out, lse.T


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls go through the stand-in, in any type. Gives how many calls there were, and the limit of their keys."""
    seen = {"calls": 0, "most_sequences": 0}

    @wraps(varlen_attn)  # the library looks at the signature
    def counted(*given: Any, **named: Any) -> Any:
        seen["calls"] += 1
        seen["most_sequences"] = max(seen["most_sequences"], len(given[3]) - 1)
        return varlen_attn(*given, **named)

    def make_backend(config: Any, device: Any, storage: Any, notices: Any) -> VarlenBackend:
        return VarlenBackend(storage, device, notices)

    of_layer = varlen_attention.refusal
    monkeypatch.setattr(varlen_attention, "_torchs_own", lambda: (counted, SimpleNamespace))
    monkeypatch.setattr(
        varlen_attention, "refusal", lambda q, v_dim, softcap: of_layer(q.to(torch.float16), v_dim, softcap)
    )
    monkeypatch.setattr(varlen_attention, "GATE", 4)
    monkeypatch.setattr("hf_batchllm.model.model_in_use.make_backend", make_backend)
    varlen_attention._rows_first.cache_clear()
    return seen
