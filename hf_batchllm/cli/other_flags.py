"""Options that commands of other programs have: what to write instead. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection

from ..config import elsewhere
from ..files.records.setting_names import NAMES
from ..inputs.other_names import ALIASES, FROM_ELSEWHERE
from .flag_names import flag_of

_IN_OUT = "the files come without an option: `hf-batchllm run IN OUT --model M`"
_PARTS = "it is called --tp here, beside --gpus"
_NO_STAGES = "a model's layers are not spread over GPUs. --tp N gives each of N GPUs a part of every layer"
_LONGEST = "--max-prompt-tokens cuts long prompts, and a warning names the lines beyond the model's context"
_HINTS = {
    **dict.fromkeys(("i", "input", "input_file", "o", "out", "output", "output_file"), _IN_OUT),
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), _PARTS),
    **dict.fromkeys(("pipeline_parallel_size", "pp_size"), _NO_STAGES),
    **dict.fromkeys(("data_parallel_size", "dp", "dp_size", "num_gpus"), "it is called --gpus here"),
    **dict.fromkeys(("max_model_len", "context_length", "max_seq_len"), _LONGEST),
    "served_model_name": "responses have the name that --model has",
    "enable_prefix_caching": "it is always on: what prompts share is computed once",
    "enforce_eager": "did you mean --no-cuda-graphs?",
    "disable_cuda_graph": "did you mean --no-cuda-graphs?",
    "disable_radix_cache": "did you mean --no-share-prefixes?",
    **dict.fromkeys(("enable_lora", "lora_modules", "lora_path"), "pass --adapter NAME=PATH"),
}
_NAMED = re.compile(r"`([a-z_]+)`")


def what_instead(flag: str, known: Collection[str]) -> str | None:
    """What to write in the place of an option that this command does not have; None if nothing is known of it.

    ``known``: the options of the command.
    """
    if "--set" not in known:  # a command that generates nothing
        return None
    name = flag.lstrip("-").replace("-", "_")
    if name in _HINTS:
        return _HINTS[name]
    if name in NAMES:
        ours = flag_of(ALIASES.get(name, name))
        if ours.startswith("--set "):
            return f"it is a setting: pass {ours}=VALUE"
        return f"did you mean {ours}?"
    why = elsewhere(name) or FROM_ELSEWHERE.get(name)
    if why is None:
        return None

    def in_flags(found: re.Match[str]) -> str:
        own = f"--{found[1].replace('_', '-')}"
        return own if own in known else flag_of(found[1]) if found[1] in NAMES else found[0]

    return f"it {_NAMED.sub(in_flags, why)}"
