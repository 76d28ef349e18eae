"""A step of a datatrove pipeline: documents come out in their order, with answers in their metadata."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from support_families import build
from support_letter_tokenizers import letter_tokenizer

from hf_batchllm import BatchGenerator, ConfigError

pytest.importorskip("datatrove")

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor

from hf_batchllm.datatrove import GenerateStep

TEXTS = ["abc" * 14 + end for end in "defghijkl"]


def load() -> Any:
    return build("llama"), letter_tokenizer(97)


def documents(texts: list[str] = TEXTS) -> list[Document]:
    return [Document(text, f"id {number}", metadata={"end": text[-1:]}) for number, text in enumerate(texts)]


def wanted(prompts: list[str], **options: Any) -> list[str]:
    with BatchGenerator(*load()) as one:
        return one.generate(prompts, progress=False, **options).texts


def test_answers_are_those_of_generate() -> None:
    step = GenerateStep(load, max_new_tokens=5, window=4)
    found = list(step.run(iter(documents())))
    assert [document.text for document in found] == TEXTS
    assert [document.metadata["generation"]["text"] for document in found] == wanted(TEXTS, max_new_tokens=5)
    assert found[0].metadata == {
        "end": "d",
        "generation": found[0].metadata["generation"] | {"new_tokens": 5, "finish_reason": "length"},
    }
    assert step.stats["answers"].total == 9 and step.stats["new_tokens"].total == 45
    assert list(step.run(iter(()))) == [] and list(step.run(None)) == []


def test_prompts() -> None:
    made = list(GenerateStep(load, prompt="{end}{text}", max_new_tokens=3, into="answer").run(iter(documents())))
    expected = wanted([text[-1] + text for text in TEXTS], max_new_tokens=3)
    assert [document.metadata["answer"]["text"] for document in made] == expected
    by_function = GenerateStep(load, prompt=lambda document: document.metadata["end"] + document.text, max_new_tokens=3)
    assert [document.metadata["generation"]["text"] for document in by_function.run(iter(documents()))] == expected


def test_a_document_that_cannot_run_says_why() -> None:
    given = documents(["abc", ""])
    del given[1].metadata["end"]
    good, bad = GenerateStep(load, prompt="{text}{end}", max_new_tokens=2).run(iter(given))
    assert good.metadata["generation"]["new_tokens"] == 2
    assert "has no field 'end', which the template names" in bad.metadata["generation"]["error"]
    (much,) = GenerateStep(load, prompt=lambda document: [1, 400], max_new_tokens=2).run(iter(documents(["a"])))
    assert "outside the model's vocabulary" in much.metadata["generation"]["error"]


def test_a_documents_samples_do_not_depend_on_its_task() -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "num_return_sequences": 2}

    def run(given: list[Document], seed: int = 7) -> dict[str, Any]:
        step = GenerateStep(load, seed=seed, **options)
        return {document.id: document.metadata["generation"] for document in step.run(iter(given))}

    whole = run(documents())
    assert all(len(samples) == 2 for samples in whole.values())
    assert run(documents()[5:]) | run(documents()[:5]) == whole != run(documents(), seed=8)


def test_a_task_gets_a_copy_that_loads_a_model_of_its_own() -> None:
    step = GenerateStep(load, max_new_tokens=2)
    stream = step.run(iter(documents()))
    next(stream)
    assert step._gen is not None
    for other in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
        assert other._gen is None and len(list(other.run(iter(documents())))) == 9
    stream.close()
    assert step._gen is None


def test_in_a_pipeline(tmp_path: Path) -> None:
    def read(data: Any, rank: int, world_size: int) -> Any:
        yield from documents()[rank::world_size]

    def write(data: Any, rank: int, world_size: int) -> Any:
        rows = {document.id: document.metadata["generation"]["text"] for document in data}
        (tmp_path / f"{rank}.json").write_text(json.dumps(rows))

    step = GenerateStep(load, max_new_tokens=4)
    LocalPipelineExecutor([read, step, write], tasks=2, logging_dir=str(tmp_path / "logs")).run()
    rows = json.loads((tmp_path / "0.json").read_text()) | json.loads((tmp_path / "1.json").read_text())
    answers = wanted(TEXTS, max_new_tokens=4)
    assert rows == {f"id {number}": answer for number, answer in enumerate(answers)}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"prompt": 5}, "`prompt` is a int|`prompt` is an int"),
        ({"window": 0}, "`window` is 0"),
        ({"seed": "a"}, "`seed` is 'a'"),
        ({"model_options": {"dtype": "auto"}}, "`model_options` go with a path or name"),
    ],
)
def test_what_it_does_not_take(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        GenerateStep(load, **given)
