"""What ``generate`` refuses, by name and in the caller's words: a table for each topic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support_families import build
from support_generate_alone import SAMPLED
from support_llama_calls import FAMILY
from support_llama_calls import generator as generator  # a fixture
from support_step_tensors import batch
from support_stopping import TOKENIZER, Below
from transformers import LogitsProcessor

from hf_batchllm import BatchGenerator, ConfigError, PromptError, UnsupportedOptionError
from hf_batchllm.errors import OptionValueError, TokenizerError

IDS, MASK = batch(width=26)
FIVE: dict[str, Any] = {"prompts": [[5, 6]] * 5, "guidance_scale": 2.0}
NEGATIVE, NEGATIVE_MASK = torch.full((5, 6), 7), torch.ones(5, 6)


class Odd(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def plain(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


def nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> None:
    scores -= 1


Row = tuple[dict[str, Any], type[Exception], str]
OPTIONS: list[Row] = [
    ({"max_new_token": 5}, UnsupportedOptionError, "did you mean `max_new_tokens`"),
    ({"kv_memory": "1GiB"}, UnsupportedOptionError, "field of BatchConfig"),
    ({"temprature": 0.5}, UnsupportedOptionError, "did you mean `temperature`"),
    ({"num_beams": 4, "logprobs": 2}, UnsupportedOptionError, "`logprobs` .* `num_beams`"),
    ({"token_healing": True}, UnsupportedOptionError, r"`token_healing` .* model\.heal_tokens"),
    ({"dola_layers": "high"}, UnsupportedOptionError, "`dola_layers` .* call the model's own `generate`"),
    ({"no_repeat_ngram_size": 2.5}, ValueError, "`no_repeat_ngram_size` must be a whole number"),
    ({"stop_strings": ["x", ""]}, ValueError, "`stop_strings`"),
    ({"max_time": "1s"}, ValueError, "`max_time` must be a number"),
    ({"output_scores": True}, UnsupportedOptionError, "`output_scores` goes with tensors .* pass `logprobs=k`"),
    ({"output_attentions": True}, UnsupportedOptionError, "`output_attentions`"),
    ({"guidance_scale": "1.5"}, ValueError, "`guidance_scale` must be a number"),
    ({"do_sample": True, "typical_p": 0.0}, ValueError, "`typical_p`"),
    ({"assistant_ensemble_weight": 0.5}, UnsupportedOptionError, "`assistant_ensemble_weight`"),
    ({"streamer": object()}, ValueError, "`streamer` must have"),
    ({"custom_generate": "some/repository"}, UnsupportedOptionError, "`custom_generate`"),
    ({"inputs_embeds": torch.zeros(1, 2, 4)}, UnsupportedOptionError, "`inputs_embeds`"),
    ({"num_return_sequences": 2}, ValueError, "num_return_sequences"),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
    ({"max_length": 3}, PromptError, "`max_length`"),
    ({"generation_config": {"max_new_tokens": 3}}, UnsupportedOptionError, "GenerationConfig"),
    ({"do_sample": True, "num_return_sequences": 1.5}, ValueError, "`num_return_sequences` must be a whole number"),
    ({"max_new_tokens": 4.5}, ValueError, "`max_new_tokens` must be a whole number"),
    ({"do_sample": True, "temperature": 0.0}, ValueError, "temperature"),
    ({"do_sample": True, "top_k": -1}, ValueError, "top_k"),
    ({"do_sample": True, "min_p": 2.0}, ValueError, "min_p"),
    ({"repetition_penalty": -1.0}, ValueError, "penalty"),
    ({"seed": -1}, ValueError, "`seed`"),
    ({"seed": 2**64}, ValueError, "`seed`"),
    ({"on_error": "ignore"}, ValueError, "`on_error`"),
]
TENSORS: list[Row] = [
    ({"prompts": IDS, "input_ids": IDS}, ValueError, "`prompts` and `input_ids` were passed together"),
    ({"prompts": [[5, 6]], "input_ids": IDS}, ValueError, "`prompts` and `input_ids` were passed together"),
    ({"inputs": IDS, "input_ids": IDS}, ValueError, "`input_ids` and `inputs` were passed together"),
    ({"attention_mask": MASK}, ValueError, "`attention_mask` was passed without `input_ids`"),
    ({"prompts": [[5, 6], [7]], "attention_mask": MASK}, ValueError, "the prompts are a list: leave out"),
    ({"prompts": "w5", "attention_mask": MASK}, ValueError, "the prompts are a list: leave out"),
    ({"input_ids": IDS[0]}, ValueError, r"not shape \[26\]: for a batch of one row pass input_ids\[None\]"),
    ({"prompts": IDS[None]}, ValueError, r"`prompts` must have two dimensions.*not shape \[1, 6, 26\]"),
    ({"input_ids": IDS[:0]}, ValueError, r"`input_ids` is empty: its shape is \[0, 26\]"),
    ({"input_ids": IDS[:, :0]}, ValueError, r"`input_ids` is empty: its shape is \[6, 0\]"),
    ({"input_ids": IDS.tolist()}, TypeError, r"not list: pass lists and strings as prompts"),
    ({"input_ids": "some text"}, TypeError, r"not str: pass lists and strings as prompts"),
    ({"input_ids": {1, 2}}, TypeError, r"must be a 2-D tensor of token ids, not set"),
    ({"input_ids": IDS.float()}, TypeError, r"`input_ids` holds torch.float32; token ids are integers"),
    ({"input_ids": IDS.bool()}, TypeError, r"`input_ids` holds torch.bool; token ids are integers"),
    ({"input_ids": IDS.double().numpy()}, TypeError, r"`input_ids` holds float64; token ids are integers"),
    ({"prompts": np.array([["a", "b"]])}, TypeError, r"`prompts` holds <U1; token ids are integers"),
    ({"input_ids": IDS.to("meta")}, ValueError, "`input_ids` is on the meta device"),
    ({"input_ids": IDS, "attention_mask": MASK.to("meta")}, ValueError, "`attention_mask` is on the meta device"),
    ({"input_ids": IDS, "attention_mask": MASK[:, 1:]}, ValueError, r"shape \[6, 25\] and `input_ids` \[6, 26\]"),
    ({"input_ids": IDS, "attention_mask": MASK[0]}, ValueError, r"has shape \[26\] and"),
    ({"input_ids": IDS, "attention_mask": MASK[:1]}, ValueError, r"has shape \[1, 26\] and"),
    ({"input_ids": IDS, "attention_mask": MASK[:, None, None]}, ValueError, r"shape \[6, 1, 1, 26\] and"),
    ({"input_ids": IDS, "attention_mask": MASK.tolist()}, TypeError, "`attention_mask` must be a 2-D tensor"),
    ({"input_ids": IDS, "attention_mask": MASK * 2}, ValueError, "holds 2: 1 marks a token and 0 padding"),
    ({"input_ids": IDS, "attention_mask": MASK.float() - 1}, ValueError, "holds -1.0: 1 marks a token"),
    ({"input_ids": IDS, "attention_mask": MASK, "max_length": 26}, ValueError, "26 tokens wide, padding included"),
    ({"input_ids": IDS, "max_new_tokens": 0}, ValueError, "max_new_tokens"),
    ({"input_ids": IDS, "num_return_sequences": 2}, ValueError, "num_return_sequences"),
    ({"input_ids": IDS, "on_error": "record"}, ValueError, "a tensor has no place for an error"),
    ({"input_ids": IDS, "output_attentions": True}, UnsupportedOptionError, "`output_attentions`"),
    ({"input_ids": IDS, "output_hidden_states": True}, UnsupportedOptionError, "`output_hidden_states`"),
    ({"inputs_embeds": torch.zeros(1, 2, 48)}, UnsupportedOptionError, "`inputs_embeds` is not supported"),
    ({"input_ids": IDS, "position_ids": IDS}, UnsupportedOptionError, "`position_ids`"),
    ({"input_ids": IDS, "past_key_values": object()}, UnsupportedOptionError, "`past_key_values`"),
    ({"input_ids": IDS, "atention_mask": MASK}, UnsupportedOptionError, "did you mean `attention_mask`"),
    ({"prompts": [[5, 6]], "token_type_ids": [[0, 0]]}, UnsupportedOptionError, "`token_type_ids`"),
    ({"prompts": [[5]], "return_dict_in_generate": True}, UnsupportedOptionError, r"goes with tensors"),
    ({"input_ids": IDS, "logprobs": 1}, UnsupportedOptionError, "`logprobs` goes with a list .*`output_logits=True`"),
    ({"input_ids": IDS, "max_time": 3}, OptionValueError, "`pad_token_id` is None, and rows may end at different"),
    ({"input_ids": IDS, "stop_strings": "a", "tokenizer": TOKENIZER}, OptionValueError, "`pad_token_id` is None, and"),
]
STRINGS: list[Row] = [
    ({"stop_strings": "a"}, TokenizerError, "`stop_strings` need a tokenizer.*or pass `tokenizer=` here"),
    *(
        ({"stop_strings": wrong, "tokenizer": TOKENIZER}, OptionValueError, f"`stop_strings` {why}")
        for wrong, why in (
            ("", "is .* an empty string ends"),
            ([], "is .* which names no string"),
            (["a", ""], "is .* an empty string ends"),
            ("xyz", "cannot be looked for in tokens of this tokenizer"),
        )
    ),
]
LOGPROBS: list[Row] = [
    ({name: value}, OptionValueError, f"`{name}` must be")
    for name in ("logprobs", "prompt_logprobs")
    for value in (-1, 2.5, "5", [1])
]
PROCESSORS: list[Row] = [
    ({"logits_processor": given}, OptionValueError, f"`logits_processor` .*{says}")
    for given, says in (
        (Odd(), r"is a single processor \(Odd\): put it into a list"),
        (plain, r"is a single processor \(plain\): put it into a list"),
        (Odd, r"is the class Odd: make an object of it and put it into a list"),
        ([Odd], "holds the class Odd at place 0: make an object of it"),
        ([5], "holds an int at place 0, which is not a processor"),
        (5, "must be a list of processors, or a function that gives a list for each sequence, not an int"),
        (lambda index, ids: Odd(), "must give a list of processors, not an Odd"),
        (lambda index, ids: ["x"], "gave a list that holds a string at place 0, which is not a processor"),
        ([nothing], r"nothing gave None: it must return scores of shape \[1, 101\]"),
        ([lambda ids, scores: scores[:, :50]], r"gave scores of shape \[1, 50\]: it must return .* \[1, 101\]"),
    )
]
PROCESSORS += [
    (
        {**SAMPLED, "logits_processor": [lambda ids, scores: torch.full_like(scores, -torch.inf)]},
        *(RuntimeError, "processors left no token a chance"),
    ),
    (
        {"prompts": [[5, 6], [5]], "prefix_allowed_tokens_fn": lambda row, ids: [] if row else [1]},
        *(ValueError, r"`prefix_allowed_tokens_fn` gave no token for batch_id 1 \(after 1 tokens\)"),
    ),
    ({"prefix_allowed_tokens_fn": [1]}, OptionValueError, "must be a function of the prompt's index"),
]
CRITERIA: list[Row] = [
    ({"stopping_criteria": given}, OptionValueError, says)
    for given, says in (
        (Below(3), r"`stopping_criteria` is a single criterion \(Below\): put it into a list"),
        (5, "must be a list of criteria, or a function that gives a list for each sequence, not an int"),
        ([Below(3), "stop"], "holds a string at place 1, which is not a criterion"),
        (lambda ids, scores: False, r"is a single criterion \(<lambda>\): put it into a list"),
    )
]
GUIDANCE: list[Row] = [
    ({**FIVE, "negative_prompt_ids": NEGATIVE[:4]}, OptionValueError, "_ids` has 4 rows and there are 5 prompts"),
    (
        {**FIVE, "negative_prompt_ids": NEGATIVE[0]},
        OptionValueError,
        "_ids` must be a 2-D tensor, a row for each prompt",
    ),
    (
        {**FIVE, "negative_prompt_ids": NEGATIVE, "negative_prompt_attention_mask": NEGATIVE_MASK[:, 1:]},
        *(OptionValueError, "they must be the same"),
    ),
    (
        {**FIVE, "negative_prompt_attention_mask": NEGATIVE_MASK},
        *(OptionValueError, "masks `negative_prompt_ids`, which is missing"),
    ),
]
TOPICS = {
    "option": OPTIONS, "tensors": TENSORS, "strings": STRINGS, "logprobs": LOGPROBS, "processors": PROCESSORS,
    "criteria": CRITERIA, "guidance": GUIDANCE,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [pytest.param(*row, id=f"{topic}: {' '.join(row[0])}") for topic, rows in TOPICS.items() for row in rows],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    generator: BatchGenerator, given: dict[str, Any], kind: type[Exception], says: str
) -> None:
    prompts = {} if given.keys() & {"prompts", "inputs", "input_ids", "attention_mask"} else {"prompts": [[5, 6, 7, 8]]}
    length = {} if "max_length" in given else {"max_new_tokens": 4}
    with pytest.raises(kind, match=says):
        generator.generate(**prompts | length | given)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"page_sise": 16}, "did you mean `page_size`"),
        ({"page_size": 0}, "`page_size` must be a whole number of at least 1"),
        ({"page_size": 2.5}, "`page_size`"),
        ({"max_batch_tokens": -1}, "`max_batch_tokens`"),
        ({"kv_memory": "20 giraffes"}, "`kv_memory` must be a size such as"),
        ({"kv_memory": 1.5}, "fraction"),
        ({"kv_memory": 0}, "more than 0"),
        ({"share_prefixes": 1}, "True or False"),
        ({"scheduler": "group"}, 'did you mean "groups"'),
        ({"scheduler": 3}, "start"),
        ({"backend": "cuda"}, "`backend`"),
        ({"backend": "triton"}, "CUDA GPU, and the model is on cpu"),
        ({"keep_prefixes": -2}, "`keep_prefixes`"),
        ({"config": {"page_size": 4}}, "must be a BatchConfig"),
    ],
    ids=str,
)
def test_wrong_configs_say_what_is_wrong(fields: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=says):
        BatchGenerator(build(FAMILY), **fields)
