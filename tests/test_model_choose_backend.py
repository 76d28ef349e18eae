"""Which backend is taken on which machine, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_batchllm import BatchConfig, ConfigError
from hf_batchllm.model.choose_backend import check_backend
from hf_batchllm.notices import Notices

CUDA = torch.device("cuda")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU as it is described here."""
    made = {"name": "NVIDIA H200", "capability": (9, 0), "shared": 232448}
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: made["capability"])
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(name=made["name"], shared_memory_per_block_optin=made["shared"]),
    )
    return made


def said(config: BatchConfig, device: torch.device = CUDA) -> str | None:
    """The warning, if there is one."""
    messages: list[str] = []
    notices = Notices()
    notices.__class__ = type("Heard", (Notices,), {"__call__": lambda self, kind, message: messages.append(message)})
    check_backend(config, device, notices)
    return messages[0] if messages else None


def test_a_card_of_hoppers_generation_gets_the_kernels(card: dict[str, Any]) -> None:
    assert said(BatchConfig()) is None
    assert said(BatchConfig(backend="triton")) is None
    card["capability"] = (10, 0)
    assert said(BatchConfig()) is None


@pytest.mark.parametrize(
    ("name", "capability", "shared"),
    [
        ("NVIDIA A100", (8, 0), 166912),
        ("NVIDIA GeForce RTX 3090", (8, 6), 101376),
        ("NVIDIA GeForce RTX 5090", (12, 0), 101376),
    ],
)
def test_other_cards_get_plain_pytorch_and_are_told(
    card: dict[str, Any], name: str, capability: tuple[int, int], shared: int
) -> None:
    card.update(name=name, capability=capability, shared=shared)
    message = said(BatchConfig()) or ""
    assert "plain PyTorch" in message and name in message and "Hopper" in message
    with pytest.raises(ConfigError, match=name):
        said(BatchConfig(backend="triton"))
    assert said(BatchConfig(backend="torch")) is not None


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_kernels_that_would_be_interpreted_are_not_taken_on_a_gpu(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert "TRITON_INTERPRET is set" in (said(BatchConfig()) or "")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert said(BatchConfig()) is None


@pytest.mark.parametrize(("missing", "says"), [("triton", "not installed"), ("triton.tools.tensor_descriptor", "old")])
def test_without_a_triton_that_will_do(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, missing: str, says: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    assert says in (said(BatchConfig()) or "")


def test_amds_cards_are_not_taken_for_nvidias(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA" in (said(BatchConfig()) or "")


def test_nothing_is_said_on_a_cpu_and_on_other_devices_it_is() -> None:
    assert said(BatchConfig(), torch.device("cpu")) is None
    assert "on mps runs in plain PyTorch" in (said(BatchConfig(), torch.device("mps")) or "")


def test_page_sizes(card: dict[str, Any]) -> None:
    assert "not 100" in (said(BatchConfig(page_size=100)) or "")
    assert all(said(BatchConfig(page_size=size)) is None for size in (16, 32, 64, 128))
