"""Tokens for which a grammar leaves no choice: they need not be sampled, and are run together."""

from __future__ import annotations

from collections.abc import Sequence

from ..inputs.options import Options
from ..planning.requests_and_prefixes import Request
from .grammar_masks import GrammarMasks
from .stop_rules import StopRules

# These may forbid a token that the grammar asks for, and then the call is to end with an error; or they keep state from
# token to token.
_LOOK_AT_EACH = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "encoder_no_repeat_ngram_size",
    "no_repeat_ngram_size",
    "sequence_bias",
    "suppress_tokens",
    "watermarking_config",
)
_ARGUMENTS_THAT_DO = ("logits_processor", "logprobs", "prefix_allowed_tokens_fn", "prompt_logprobs")


class ForcedTokens:
    """``rules``, ``options``: of each prompt, by a request's ``index``."""

    def __init__(self, masks: GrammarMasks, rules: Sequence[StopRules], options: Sequence[Options]) -> None:
        self._masks = masks
        self._rules = rules
        self._options = options
        self._may: dict[tuple[StopRules, Options], bool] = {}

    def __call__(self, request: Request) -> int:
        """Append the tokens that must come next. Returns how many these are."""
        rules, options = self._rules[request.index], self._options[request.index]
        if (rules, options) not in self._may:
            self._may[rules, options] = may_jump(rules, options)
        if not self._may[rules, options]:
            return 0
        room = request.max_new_tokens - len(request.generated)
        tokens = self._masks.forced(request)[:room]
        last = next((place for place, token in enumerate(tokens) if token in rules.stop_tokens), len(tokens))
        tokens = tokens[:last]
        if tokens:
            request.jump(tokens)
        return len(tokens)


def may_jump(rules: StopRules, options: Options) -> bool:
    """Whether nothing but the grammar looks at a token that must come."""
    if rules.looks_back:
        return False
    config, given = options.config, options.arguments
    asked = [config.guidance_scale not in (None, 1), *(getattr(config, name, None) for name in _LOOK_AT_EACH)]
    return not any(asked) and all(getattr(given, name) is None for name in _ARGUMENTS_THAT_DO)
