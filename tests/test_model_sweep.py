"""The sweep in short: its own path on some served classes, every reason to refuse once, and that it sees what is wrong.

``make sweep`` runs the whole.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import support_sweep_workers as workers
import transformers
from support_sweep_compare import (
    EXACT,
    LATE,
    NEW_TOKENS,
    NOT_BUILT,
    REFUSED,
    WRONG,
    Outcome,
    compared,
    outcome_of,
    prompts,
)
from support_sweep_models import Case, cases, tiny_config, tiny_model
from support_sweep_page import PAGE, page
from support_sweep_workers import Kept, Row, swept

from hf_batchllm import BatchGenerator

CASES = cases()
LLAMA = Case("LlamaForCausalLM", "llama")

# A plain decoder, windows, sinks and experts, latent K and V, learned positions, a language model inside another model.
SERVED = [
    LLAMA,
    Case("Gemma3ForCausalLM", "gemma3_text"),
    Case("GptOssForCausalLM", "gpt_oss"),
    Case("DeepseekV3ForCausalLM", "deepseek_v3"),
    Case("OPTForCausalLM", "opt"),
    Case("Qwen2VLForConditionalGeneration", "qwen2_vl"),
]
REASONS = [
    ("T5Gemma2ForConditionalGeneration", "t5gemma2", "default", "is an encoder-decoder"),
    ("BlipForConditionalGeneration", "blip", "default", "no language-model head"),
    ("BloomForCausalLM", "bloom", "default", "an attention of its own"),
    ("MiniMaxForCausalLM", "minimax", "default", "should carry a state through"),
    ("DiffLlamaForCausalLM", "diffllama", "default", "several times|attends .* times"),
    ("Llama4ForCausalLM", "llama4_text", "default", "chunked_attention|mask alone"),
    ("PhimoeForCausalLM", "phimoe", "other", "mask alone"),
    ("RobertaForCausalLM", "roberta", "default", "both directions"),
    ("Kosmos2_5ForConditionalGeneration", "kosmos-2.5", "default", "positions in a way of its own"),
    ("MusicgenForCausalLM", "musicgen", "default", "cannot be run with an attention function from outside"),
]


@pytest.mark.some_cases
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_served_classes_are_exact(case: Case) -> None:
    for pattern in ("default", "other"):
        outcome = outcome_of(case, pattern)
        assert outcome.kind == EXACT, f"{pattern}: {outcome}"
        assert outcome.places >= 9 * NEW_TOKENS and outcome.worst < 1e-3


@pytest.mark.parametrize(("name", "model_type", "pattern", "says"), REASONS)
def test_each_reason_to_refuse(name: str, model_type: str, pattern: str, says: str) -> None:
    outcome = outcome_of(Case(name, model_type), pattern)
    assert outcome.kind == REFUSED and re.search(says, outcome.why), outcome


def test_a_wrong_answer_is_seen() -> None:
    """A generator over one model, held against another that differs in one weight."""
    served, other = tiny_model(LLAMA), tiny_model(LLAMA)
    other.model.layers[0].self_attn.v_proj.weight.data[0, 0] += 1.0
    outcome = compared(other, BatchGenerator(served), prompts(), NEW_TOKENS)
    assert outcome.kind == WRONG and "prompt" in outcome.why


def test_an_error_of_the_engine_is_seen() -> None:
    model = tiny_model(LLAMA)
    generator = BatchGenerator(model)
    generator.close()
    assert compared(model, generator, prompts(brief=True), 2).kind == LATE


def test_a_process_that_ends_or_hangs_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(case: Case) -> dict[str, Outcome]:
        if case.model_type == "ends":
            os._exit(3)
        if case.model_type == "hangs":
            time.sleep(60)
        return {"default": Outcome(EXACT)}

    monkeypatch.setattr(workers, "outcomes", outcomes)
    monkeypatch.setattr(workers, "SECONDS", 2)
    rows = {row.case.model_type: row for row in swept([Case("X", kind) for kind in ("hangs", "ends", "runs")], 2)}
    assert {kind: row.outcomes["default"].kind for kind, row in rows.items()} == {
        "hangs": NOT_BUILT, "ends": NOT_BUILT, "runs": EXACT,
    }  # fmt: skip
    assert "ended with 3" in rows["ends"].outcomes["default"].why
    assert "not done" in rows["hangs"].outcomes["default"].why


def test_every_config_shrinks() -> None:
    for model_type in dict.fromkeys(case.model_type for case in CASES):
        text = tiny_config(model_type).get_text_config(decoder=True)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
            value = vars(text).get(text.attribute_map.get(name, name))
            assert value is None or value <= 128, f"{model_type}: {name} is {value}"


def test_the_page_names_every_class() -> None:
    text = PAGE.read_text("utf-8")
    made_with = re.search(r"transformers (5\.[\d.]*\d)", text)
    assert made_with, "docs/models.md does not say with which transformers it was made"
    if made_with.group(1) != transformers.__version__:
        pytest.skip(f"the page is about transformers {made_with.group(1)}")
    lacking = [str(case) for case in CASES if f"| `{case.class_name}` ({case.model_type}) |" not in text]
    assert not lacking, f"docs/models.md is older than transformers: `make sweep`. It lacks {', '.join(lacking)}"
    assert not re.search(r"\| .*\b(wrong|refused late):", text), "docs/models.md names a wrong class"


def test_the_page_says_what_was_found() -> None:
    rows = [Row(LLAMA, {"default": Outcome(EXACT, worst=2e-6), "other": Outcome(REFUSED, "it may not")}, 1.0)]
    text = page(rows)
    assert f"transformers {transformers.__version__}" in text and "at most 2e-06" in text
    assert "| `LlamaForCausalLM` (llama) | by default: exact; with other layers: refused: it may not |" in text


def test_a_sweep_goes_on_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "rows.jsonl")
    row = Row(LLAMA, {"shared": Outcome(EXACT)}, 1.5)
    kept.add(row)
    whole = kept.path.read_text("utf-8")
    for cut in ("", whole):
        kept.path.write_text(cut + whole[:20], "utf-8")
        assert list(kept.rows()) == ([LLAMA] if cut else [])
        kept.add(row)
        assert kept.rows() == {LLAMA: row}
