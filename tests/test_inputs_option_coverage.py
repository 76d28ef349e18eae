"""No row of the table goes without a comparison with ``generate``."""

from __future__ import annotations

from pathlib import Path

from support_options import ANY, DRAWN
from support_real_options import GREEDY

from hf_batchllm.inputs.option_row import Fate, OptionKind
from hf_batchllm.inputs.option_table import TABLE

# What does not change which tokens come, or comes with every test of the others: where it is looked at by itself.
ELSEWHERE = {
    "assistant_model": "test_engine_assistant.py",
    "num_assistant_tokens": "test_engine_assistant.py",
    "attention_mask": "test_generator_tensors.py",
    "early_stopping": "support_beam_cases.py",
    "length_penalty": "support_beam_cases.py",
    "num_beams": "support_beam_cases.py",
    "do_sample": "test_generator_option_combinations.py",
    "generation_config": "test_generator_generate.py",
    "input_ids": "test_generator_tensors.py",
    "inputs": "test_integrations_accelerated.py",
    "max_matching_ngram_size": "test_engine_drafts.py",
    "max_length": "test_generator_option_combinations.py",
    "max_new_tokens": "test_generator_option_combinations.py",
    "negative_prompt_attention_mask": "test_sampling_processor_chains.py",
    "negative_prompt_ids": "test_sampling_processor_chains.py",
    "num_return_sequences": "test_generator_option_combinations.py",
    "output_logits": "test_sampling_step_tensors.py",
    "output_scores": "test_sampling_step_tensors.py",
    "pad_token_id": "test_generator_tensors.py",
    "prompt_lookup_num_tokens": "test_engine_drafts.py",
    "return_dict_in_generate": "test_sampling_step_tensors.py",
    "streamer": "test_engine_streamer.py",
    "tokenizer": "test_sampling_stop_strings.py",
}
OF_THE_REAL_MODEL = {"negative_prompt_ids", "max_length"}  # beside those that tiny models are asked for


def test_every_honoured_option_is_compared_with_generate() -> None:
    honoured = {row.name for row in TABLE.values() if row.fate is Fate.HONOURED and row.kind is not OptionKind.ADDED}
    assert honoured == ANY.keys() | DRAWN.keys() | ELSEWHERE.keys()
    for name, file in ELSEWHERE.items():
        assert name in (Path(__file__).parent / file).read_text(encoding="utf-8"), f"{file} says nothing of {name}"


def test_the_real_model_is_asked_for_each_of_them() -> None:
    assert GREEDY.keys() - OF_THE_REAL_MODEL == ANY.keys()
