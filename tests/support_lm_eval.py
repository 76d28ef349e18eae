"""What the tests of the evaluation harness share: a tiny model, its tokenizer, and what the harness makes of both."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lm_eval import tasks as harness_tasks
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from support_families import FAMILIES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_batchllm.generator import BatchGenerator
from hf_batchllm.lm_eval import BatchLM

TASKS = Path(__file__).parent / "support_lm_eval_tasks"
VOCABULARY = 400
SPECIAL = ["<pad>", "<bos>", "<eos>", "<turn>", "</think>"]
PAD, BOS, EOS, TURN, THINK = range(5)


@cache
def eval_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """Bytes and some pairs of them: words take in the space before them, characters outside of ASCII are several."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [path.read_text(encoding="utf-8") for path in sorted(TASKS.glob("*.jsonl"))]
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>" if bos else None, eos_token="<eos>", pad_token="<pad>"
    )


@cache
def eval_model(**options: Any) -> PreTrainedModel:
    """The same object for the same options: leave it as you found it."""
    family = FAMILIES["llama"]
    config = {**family.config, "vocab_size": VOCABULARY, "max_position_embeddings": 300, "eos_token_id": EOS}
    return dataclasses.replace(family, config=config, **options)()


def pair(bos: bool = True, model: Any = None, ours: dict[str, Any] | None = None, **given: Any) -> tuple[HFLM, BatchLM]:
    """The harness's own model, and this library's."""
    given = {"pretrained": eval_model() if model is None else model, "tokenizer": eval_tokenizer(bos), **given}
    return HFLM(**given), BatchLM(**given, **(ours or {}))


def instances(kind: str, arguments: Sequence[Any]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=place) for place, each in enumerate(arguments)]


def asked(lm: Any, kind: str, arguments: Sequence[Any]) -> list[Any]:
    return getattr(lm, kind)(instances(kind, arguments), disable_tqdm=True)


ROOT = Path(__file__).resolve().parents[1]

NAMES = ["hb_choices", "hb_endings", "hb_pages", "hb_words"]

EXAMPLES = "The dog sat on the mat, and the cat sat on the dog.\nBees make honey. Dogs bark.\n日本の首都は東京\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # it asks other programs for seconds
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    yield
    logging.disable(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which methods of a generator run, one after the other."""
    made: list[str] = []
    for name in ("score", "stream", "generate"):
        inner = getattr(BatchGenerator, name)

        def noted(self: Any, *given: Any, _inner: Any = inner, _name: str = name, **more: Any) -> Any:
            made.append(_name)
            return _inner(self, *given, **more)

        monkeypatch.setattr(BatchGenerator, name, noted)
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    eval_model().save_pretrained(folder)
    eval_tokenizer().save_pretrained(folder)
    return folder


def task_manager() -> Any:
    return harness_tasks.TaskManager(include_path=TASKS, include_defaults=False)


def assert_close(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [each for each, _ in found] == pytest.approx([each for each, _ in expected], rel=1e-6, abs=1e-4)


PAIRS = [
    *[(f"{EXAMPLES}What sat on the mat?", answer) for answer in (" The dog", " the cat", " the", " bees")],
    *[(f"{EXAMPLES}What is it? ", answer) for answer in ("honey", " honey", "b", "東京", "🏔️")],
    *[(f"{EXAMPLES}Dogs", answer) for answer in (" b", " m", " bark", " bark. Cats")],  # a token, or several
    *[("", answer) for answer in ("The", " dog", "<bos>The")],
    *[("<bos>the dog", " sat"), ("the", "<eos>"), ("x \n ", "y"), ("x", " ")],
    *[("the dog " * 90, answer) for answer in ("sat", "sat on the mat", "and the cat " * 6)],  # too long by far
    *[("the dog", " sat")] * 2,
]
