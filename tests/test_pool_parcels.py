"""What is the user's and cannot be sent, or not be read where it comes to, is an error in words. The pool goes on."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_families import build
from support_letter_tokenizers import letter_tokenizer
from support_pool import Load
from support_quick_workers import quick_workers, started_anew
from transformers import LogitsProcessor

from hf_batchllm import CacheMemoryError, ConfigError, GenerationInterrupted, GeneratorPool
from hf_batchllm.pool.messages import Parcel

quick_workers()

pytestmark = pytest.mark.xdist_group("pool_parcels")
PROMPTS = [[5, number] for number in range(8)]


@pytest.fixture(scope="module")
def pool() -> Iterator[GeneratorPool]:
    with GeneratorPool(Load(), gpus=["cpu", "cpu"]) as made:
        made.wait()
        yield made
        assert len(made) == 2, "all of this costs no process"


def goes_on(pool: GeneratorPool) -> None:
    assert len(pool.generate(PROMPTS, max_new_tokens=2, progress=False)) == len(PROMPTS)
    assert len(pool) == 2


class Raises(LogitsProcessor):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise self.error


class OnlyThere(Exception):
    """Of a module that the pool's process does not have."""


class RaisesOnlyThere(LogitsProcessor):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        module = types.ModuleType("only_there")
        sys.modules["only_there"] = module
        kind = type("OnlyThere", (Exception,), {"__module__": "only_there"})
        module.OnlyThere = kind  # type: ignore[attr-defined]
        raise kind("remote code failed")


def test_an_option_of_a_module_that_workers_do_not_have(pool: GeneratorPool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_here")
    kind = type(
        "Processor", (LogitsProcessor,), {"__module__": "only_here", "__call__": lambda self, ids, scores: scores}
    )
    module.Processor = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(ConfigError, match=r"cannot be read in another process \(ModuleNotFoundError.*only_here"):
        pool.generate(PROMPTS, logits_processor=[kind()], max_new_tokens=2, progress=False)
    goes_on(pool)


def test_an_error_of_a_module_that_only_workers_have(pool: GeneratorPool) -> None:
    with pytest.raises(RuntimeError, match="OnlyThere: remote code failed"):
        pool.generate(PROMPTS, logits_processor=[RaisesOnlyThere()], max_new_tokens=2, progress=False)
    goes_on(pool)


@pytest.mark.parametrize(
    ("error", "comes"),
    [
        (ZeroDivisionError("no luck"), ZeroDivisionError),
        (MemoryError("of the host"), MemoryError),
        (CacheMemoryError("too little"), CacheMemoryError),
        (KeyboardInterrupt(), GenerationInterrupted),
    ],
)
@pytest.mark.filterwarnings("ignore:the process on")
def test_errors_of_the_users_code(error: BaseException, comes: type[BaseException], pool: GeneratorPool) -> None:
    with pytest.raises(comes):
        pool.generate(PROMPTS, logits_processor=[Raises(error)], max_new_tokens=2, progress=False)
    goes_on(pool)


def test_a_tokenizer_that_cannot_be_sent() -> None:
    def load() -> Any:
        tokenizer = letter_tokenizer()
        tokenizer.lock = threading.Lock()  # type: ignore[attr-defined]
        return Load()(), tokenizer

    with GeneratorPool(load, gpus=["cpu"]) as pool:
        with pytest.raises(ConfigError, match="cannot be sent"):
            assert pool.tokenizer
        assert pool.generate(["abc"], max_new_tokens=2, progress=False).texts[0] is not None


@pytest.mark.filterwarnings("ignore:the process on")
def test_too_little_memory_for_any_cache() -> None:
    """An error of the call, and no loss of a process."""
    with GeneratorPool(Load(), gpus=["cpu", "cpu"], kv_memory=1000) as pool:
        pool.wait()
        for _ in range(2):
            with pytest.raises(CacheMemoryError):
                pool.generate(PROMPTS, max_new_tokens=2, progress=False)
        assert len(pool) == 2


def test_a_tokenizer_that_was_given_is_at_hand_in_a_stream() -> None:
    with GeneratorPool(Load(), letter_tokenizer(), gpus=["cpu"]) as pool:
        texts = [pool.tokenizer.decode(row.token_ids) for row in pool.stream(PROMPTS, max_new_tokens=2)]
        assert len(texts) == len(PROMPTS)


def test_generators_as_arguments(pool: GeneratorPool) -> None:
    assert len(pool.score((prompt for prompt in PROMPTS), [[1]] * len(PROMPTS), progress=False)) == len(PROMPTS)
    assert len(pool.generate((prompt for prompt in PROMPTS), max_new_tokens=1, progress=False)) == len(PROMPTS)
    assert pool.plan(prompt for prompt in PROMPTS).total_tokens == 16


def test_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a module of its own can be sent; for what has none, the error names the package."""
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "cloudpickle" else real(name))
    monkeypatch.delitem(sys.modules, "cloudpickle", raising=False)
    assert isinstance(Parcel.of(Load(), "it").open(), Load)
    own = type("Own", (), {"__module__": "__main__"})
    for content in (own, own(), [own()]):
        with pytest.raises(ConfigError, match=r"Own is defined in a script or a notebook.*pip install cloudpickle"):
            Parcel.of(content, "it")


def test_a_model_by_its_folder(tmp_path: Any) -> None:
    build("llama").save_pretrained(tmp_path / "tiny")
    letter_tokenizer().save_pretrained(tmp_path / "tiny")
    with (
        started_anew(),
        GeneratorPool(tmp_path / "tiny", gpus=["cpu"], model_options={"dtype": torch.float32}) as pool,
    ):
        assert pool.generate("abc", max_new_tokens=3, progress=False).texts[0] is not None
        assert pool.tokenizer.decode([5])
    with pytest.raises((OSError, ValueError), match="nowhere"):
        GeneratorPool(tmp_path / "nowhere", gpus=["cpu"])
