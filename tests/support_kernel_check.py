"""What tests of the check share: a CPU that is taken for a card, and a process that remembers nothing."""

from __future__ import annotations

import pytest
import torch

from hf_batchllm.kernel_check import trust
from hf_batchllm.kernel_check.comparing import Where
from hf_batchllm.kernel_check.groups import GROUPS

CPU = torch.device("cpu")
LAYERS = list(GROUPS["layers"](Where(CPU)))  # the names of their cases
KEY = {"card": "a card", "driver": "1", "torch": "2", "triton": "3", "compiled for": "", "sources": "abc"}


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_answers", {})
    monkeypatch.setattr(trust, "_no_checks", {})


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process takes its CPU for a device that kernels run on; only the child knows that they are interpreted."""
    monkeypatch.setattr(trust, "unusable", lambda device, amd=False: None)
    monkeypatch.setattr("hf_batchllm.model.choose_backend.unusable", lambda device, amd=False: None)
    monkeypatch.setattr("hf_batchllm.model.choose_backend.is_interpreted", lambda: False)
