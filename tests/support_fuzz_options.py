"""Options of ``generate``, drawn at random: of every kind that the library honours, with random values."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from support_options import VOCABULARY, Lift, Multiple, even_after_odd
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

Options = dict[str, Any]
Draw = Callable[[Random], Any]

_LETTERS = "abcdef"


def _tokens(dice: Random, most: int) -> list[int]:
    return dice.sample(range(VOCABULARY), dice.randint(1, most))


def _eos(dice: Random) -> int | list[int]:
    """Of a hundred tokens so many that some come."""
    return dice.randrange(VOCABULARY) if dice.random() < 0.3 else _tokens(dice, 30)


def _words(dice: Random, most: int) -> list[list[int]]:
    return [
        [dice.randrange(VOCABULARY) for _ in range(dice.choice((1, 1, 2, 3)))] for _ in range(dice.randint(1, most))
    ]


def _bias(dice: Random) -> Any:
    pairs = {tuple(word): round(dice.uniform(-6, 6), 2) for word in _words(dice, 6)}
    return pairs if dice.random() < 0.5 else [[list(word), bias] for word, bias in pairs.items()]


def _stop_strings(dice: Random) -> str | list[str]:
    strings = ["".join(dice.choices(_LETTERS, k=dice.choice((1, 2, 2, 3, 4)))) for _ in range(dice.randint(1, 4))]
    return strings if len(strings) > 1 or dice.random() < 0.5 else strings[0]


def _watermark(dice: Random) -> Any:
    if dice.random() < 0.3:
        return SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=dice.randint(2, 4))
    scheme = dice.choice(("lefthash", "selfhash"))
    return WatermarkingConfig(
        bias=round(dice.uniform(1, 4), 1), context_width=dice.randint(1, 2), seeding_scheme=scheme
    )


def _number(low: float, high: float) -> Draw:
    return lambda dice: round(dice.uniform(low, high), 2)


def _whole(low: int, high: int) -> Draw:
    return lambda dice: dice.randint(low, high)


# How often each is drawn, and its value.
CHANGES_SCORES: dict[str, tuple[float, Draw]] = {
    "eos_token_id": (3.0, _eos),
    "min_new_tokens": (1.0, _whole(1, 9)),
    "min_length": (0.7, _whole(2, 40)),
    "repetition_penalty": (1.5, _number(0.7, 1.8)),
    "stop_strings": (1.0, _stop_strings),
    "encoder_repetition_penalty": (0.5, _number(0.7, 1.6)),
    "no_repeat_ngram_size": (0.7, _whole(1, 3)),
    "encoder_no_repeat_ngram_size": (0.5, _whole(1, 3)),
    "bad_words_ids": (0.6, lambda dice: _words(dice, 20)),
    "sequence_bias": (0.6, _bias),
    "forced_bos_token_id": (0.3, _whole(0, VOCABULARY - 1)),
    "forced_eos_token_id": (0.4, lambda dice: dice.choice((9, [9, 5]))),
    "exponential_decay_length_penalty": (0.4, lambda dice: (dice.randint(0, 6), round(dice.uniform(1.05, 1.6), 2))),
    "suppress_tokens": (0.6, lambda dice: _tokens(dice, 90)),
    "begin_suppress_tokens": (0.5, lambda dice: _tokens(dice, 90)),
    "renormalize_logits": (0.4, lambda dice: True),
    "remove_invalid_values": (0.3, lambda dice: True),
    "guidance_scale": (0.3, _number(1.1, 2.5)),
    "watermarking_config": (0.4, _watermark),
}
# Arguments of the call: a generation config does not hold them.
ARGUMENTS: dict[str, tuple[float, Draw]] = {
    "logits_processor": (0.5, lambda dice: [Lift()]),
    "stopping_criteria": (0.5, lambda dice: [Multiple()]),
    "prefix_allowed_tokens_fn": (0.4, lambda dice: even_after_odd),
    "max_time": (0.3, lambda dice: 10_000.0),
}
SAMPLING: dict[str, tuple[float, Draw]] = {
    "temperature": (2.0, _number(0.3, 2.0)),
    "top_k": (2.0, lambda dice: dice.choice((0, 1, 2, 5, 20, 60, 200))),
    "top_p": (2.0, _number(0.1, 0.99)),
    "min_p": (1.0, _number(0.01, 0.4)),
    "top_h": (0.4, _number(0.2, 0.95)),
    "typical_p": (0.5, _number(0.2, 0.95)),
    "epsilon_cutoff": (0.4, _number(0.01, 0.05)),
    "eta_cutoff": (0.4, _number(0.01, 0.05)),
}
BEAMS: dict[str, tuple[float, Draw]] = {
    "early_stopping": (2.0, lambda dice: dice.choice((False, True, "never"))),
    "length_penalty": (2.0, lambda dice: dice.choice((0.0, 0.5, 1.0, 2.0, -1.0, -0.3, 5.0))),
}
LENGTHS = frozenset({"max_new_tokens", "max_length"})
# What comes from how a case asks, not from a table.
ELSEWHERE = frozenset(
    "attention_mask do_sample generation_config input_ids inputs max_matching_ngram_size num_beams "
    "num_return_sequences negative_prompt_ids negative_prompt_attention_mask output_logits output_scores "
    "assistant_model num_assistant_tokens pad_token_id prompt_lookup_num_tokens return_dict_in_generate streamer "
    "tokenizer".split()
)


def _some(dice: Random, table: dict[str, tuple[float, Draw]], count: int) -> Options:
    names, chosen = sorted(table), {}
    for _ in range(count):
        name = dice.choices(names, [table[each][0] for each in names])[0]
        chosen[name] = table[name][1](dice)
    return chosen


def _length(dice: Random, longest: int) -> Options:
    if dice.random() < 0.75:
        return {"max_new_tokens": dice.choice((1, 2, 3, 4, 5, 6, 8, 8, 12, 20))}
    if dice.random() < 0.95:
        return {"max_length": longest + dice.randint(1, 10)}
    return {}  # twenty


def draw_options(dice: Random, longest: int, how: str | None = None, arguments: bool = True) -> Options:
    """Options of one call, or of one prompt (without ``arguments``). ``how``: "greedy", "sampled" or "beams".

    longest: tokens of the longest prompt.
    """
    how = how or draw_how(dice)
    options = _length(dice, longest) | _some(dice, CHANGES_SCORES, dice.choice((0, 0, 1, 1, 2, 3, 5)))
    if "guidance_scale" in options and dice.random() < 0.7:  # it takes ten times as long as all others
        del options["guidance_scale"]
    if arguments:
        options |= _some(dice, ARGUMENTS, dice.choice((0, 0, 0, 1, 2)))
    if "exponential_decay_length_penalty" in options:
        options.setdefault("eos_token_id", _eos(dice))
    if how == "sampled":
        options |= {"do_sample": True} | _some(dice, SAMPLING, dice.choice((0, 1, 2, 3)))
        if dice.random() < 0.4:
            options["num_return_sequences"] = dice.choice((2, 2, 3, 4))
    if how == "beams":
        width = dice.randint(2, 6)
        options |= {"num_beams": width} | _some(dice, BEAMS, dice.choice((0, 1, 2)))
        if dice.random() < 0.6:
            options["num_return_sequences"] = dice.randint(1, width)
        if dice.random() < 0.2:
            options["do_sample"] = True
    elif arguments and dice.random() < 0.25:
        options["logprobs"] = dice.choice((0, 1, 3, 8))
        if dice.random() < 0.4:
            options["prompt_logprobs"] = dice.choice((0, 2))
    return options


def draw_how(dice: Random) -> str:
    return dice.choices(("greedy", "sampled", "beams"), (4, 4, 2))[0]
