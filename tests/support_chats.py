"""A chat model's tokenizer whose template shows all that it is given, and chats for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from support_word_tokenizer import word_tokenizer
from transformers import PreTrainedTokenizerFast

USER, ASSISTANT, END, TOOL, NO_THINKING = 41, 40, 42, 30, 31  # what the template writes, as token ids
TEMPLATE = (
    "{%- if tools -%}{%- for tool in tools -%}w30 {{ tool.function.name }} {% endfor -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ 'w40' if message.role == 'assistant' else 'w41' }} {{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %} w33 {{ call.function.arguments.x }}{% endfor %} w42 {% endfor -%}"
    "{%- if add_generation_prompt -%}w40 {% if enable_thinking is defined and not enable_thinking %}w31 {% endif %}"
    "{%- endif -%}"
)
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "w5 w6"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "w7 w8"}]
NO_THOUGHT = {"enable_thinking": False}
WEATHER = {"type": "function", "function": {"name": "w9", "description": "", "parameters": {}}}


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Words are their ids, as in ``word_tokenizer``; strings get a BOS (w1)."""
    tokenizer = word_tokenizer(words=101, bos=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def warned(call: Callable[..., Any], *given: Any, **named: Any) -> tuple[Any, list[str]]:
    """What the call gives, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call(*given, **named)
    return result, [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
