"""The ranges of numbers that hold for every model, and the words for a number outside of them. No torch."""

from __future__ import annotations

from typing import Any

ZERO_TEMPERATURE = "is 0, and sampling needs a temperature above 0: for greedy decoding set `do_sample=False`"

_PROBABILITIES = ("top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
# In tokens. Longer ones hardly ever come again, and memory and time grow with the number.
LONGEST_NGRAMS = {"no_repeat_ngram_size": 1000, "encoder_no_repeat_ngram_size": 1000}


def out_of_range(name: str, value: Any) -> str | None:
    """What is wrong with a number, in words that follow its name; None if nothing is."""
    if name == "top_k" and value < 0:
        return f"is {value}: pass a whole number above 0, or 0 for none"
    if name in _PROBABILITIES and not 0 <= value <= 1:
        return f"is {value:g}: it is a probability, from 0 to 1"
    if name == "repetition_penalty" and value <= 0:
        return f"is {value:g}: it must be above 0"
    if name in LONGEST_NGRAMS and value > LONGEST_NGRAMS[name]:
        return (
            f"is {value:,}, and transformers makes a list for each of so many tokens: it must be at most "
            f"{LONGEST_NGRAMS[name]:,}, or 0 for none"
        )
    if name in ("min_new_tokens", "min_length", "no_repeat_ngram_size") and value < 0:
        return f"is {value}: it must be at least 0"
    return None
