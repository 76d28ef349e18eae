"""Which backend is taken on which machine, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_batchllm import BatchConfig, ConfigError
from hf_batchllm.kernel_check import trust
from hf_batchllm.kernel_check.outcomes import PASSED, WRONG, Outcome
from hf_batchllm.model.attention import varlen_attention
from hf_batchllm.model.attention.choose_backend import check_backend, why_not_invariant
from hf_batchllm.notices import Notices

CUDA = torch.device("cuda")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A GPU as it is described here."""
    made = {"name": "NVIDIA H200", "capability": (9, 0), "verdict": PASSED}
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: made["capability"])
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(name=made["name"], major=made["capability"][0], minor=made["capability"][1]),
    )
    monkeypatch.setattr(varlen_attention, "why_not", lambda device: "this card is made up")
    monkeypatch.setattr(trust, "_answers", {})
    monkeypatch.setattr(trust, "outcomes", lambda group, device: iter([Outcome("decode", made["verdict"], "why")]))
    monkeypatch.setenv("HF_BATCHLLM_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_BATCHLLM_CHECK", "always")
    return made


def said(config: BatchConfig, device: torch.device = CUDA) -> str | None:
    """The warning, if there is one."""
    messages: list[str] = []
    notices = Notices()
    notices.__class__ = type("Heard", (Notices,), {"__call__": lambda self, kind, message: messages.append(message)})
    check_backend(config, device, notices)
    return messages[0] if messages else None


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_card_from_ampere_on_gets_the_kernels_that_pass(card: dict[str, Any], capability: tuple[int, int]) -> None:
    card["capability"] = capability
    with pytest.warns(UserWarning, match="tried on NVIDIA H200, .* for the first time"):
        assert said(BatchConfig()) is None
    assert said(BatchConfig(backend="triton")) is None


def test_a_card_whose_kernels_fail_gets_plain_pytorch_and_is_told(card: dict[str, Any]) -> None:
    card.update(name="NVIDIA GeForce RTX 3090", capability=(8, 6), verdict=WRONG)
    with pytest.warns(UserWarning, match="for the first time"):
        message = said(BatchConfig()) or ""
    assert "plain PyTorch" in message and "RTX 3090, 8.6" in message and "decode: wrong (why)" in message
    with pytest.raises(ConfigError, match="RTX 3090"):
        said(BatchConfig(backend="triton"))
    assert "that is what" in (said(BatchConfig(backend="torch")) or "")


def test_older_cards_get_plain_pytorch_and_are_told(card: dict[str, Any]) -> None:
    card.update(name="Tesla T4", capability=(7, 5))
    message = said(BatchConfig()) or ""
    assert "plain PyTorch" in message and "Tesla T4 is older" in message and "8.0" in message
    with pytest.raises(ConfigError, match="Tesla T4"):
        said(BatchConfig(backend="triton"))


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_kernels_that_would_be_interpreted_are_not_taken_on_a_gpu(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert "TRITON_INTERPRET is set" in (said(BatchConfig()) or "")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("HF_BATCHLLM_CHECK", "never")
    assert said(BatchConfig()) is None


@pytest.mark.parametrize(("missing", "says"), [("triton", "not installed"), ("triton.tools.tensor_descriptor", "old")])
def test_without_a_triton_that_will_do(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, missing: str, says: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    assert says in (said(BatchConfig()) or "")


@pytest.mark.filterwarnings("ignore:.*for the first time")
def test_amds_cards_get_kernels_only_where_they_are_asked_for(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    message = said(BatchConfig()) or ""
    assert "AMD" in message and '`backend="triton"` checks and uses them' in message
    assert said(BatchConfig(backend="triton")) is None
    monkeypatch.setattr(trust, "_answers", {})
    card["verdict"] = WRONG
    monkeypatch.setenv("HF_BATCHLLM_CACHE", str(tmp_path / "another"))
    with pytest.raises(ConfigError, match="decode: wrong"):
        said(BatchConfig(backend="triton"))


def test_nothing_is_said_on_a_cpu_and_on_other_devices_it_is() -> None:
    assert said(BatchConfig(), torch.device("cpu")) is None
    assert "on mps runs in plain PyTorch" in (said(BatchConfig(), torch.device("mps")) or "")


def test_page_sizes(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_BATCHLLM_CHECK", "never")
    assert "not 100" in (said(BatchConfig(page_size=100)) or "")
    assert all(said(BatchConfig(page_size=size)) is None for size in (16, 32, 64, 128))


def test_where_a_gpu_can_give_the_same_bits_in_any_list(card: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="for the first time"):
        assert why_not_invariant(BatchConfig(invariant=True), CUDA) is None
    assert why_not_invariant(BatchConfig(invariant=True, backend="triton"), CUDA) is None
    reasons = {
        "norms depend on the number of rows: leave `fuse=False` out": {"fuse": False},
        'leave `backend="torch"` out': {"backend": "torch"},
        "`page_size` of 16, 32, 64 or 128, not 48": {"page_size": 48},
    }
    for words, settings in reasons.items():
        assert words in (why_not_invariant(BatchConfig(invariant=True, **settings), CUDA) or ""), words
    assert "CUDA GPUs and CPUs alone" in (why_not_invariant(BatchConfig(invariant=True), torch.device("mps")) or "")
    assert why_not_invariant(BatchConfig(invariant=True, page_size=48), torch.device("cpu")) is None


@pytest.mark.parametrize("group", ["parts", "attention", "layers"])
def test_a_card_whose_kernels_fail_cannot(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """A failure of any of three groups counts: nothing else can take the place of these kernels."""
    monkeypatch.setattr(
        trust, "outcomes", lambda of, device: iter([Outcome("a case", WRONG if of == group else PASSED, "why")])
    )
    with pytest.warns(UserWarning, match="for the first time"):
        assert "a case: wrong (why)" in (why_not_invariant(BatchConfig(invariant=True), CUDA) or "")
