"""A case of the fuzzer: a model, prompts, options, a config, and what is tried with them. Drawn from its number."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import support_fuzz_models as models
from support_fuzz_options import Options, draw_how, draw_options

# Relations that give prompts another place in the list: samples then need a seed for each prompt.
MOVES_PROMPTS = ("permuted", "split", "strangers", "duplicates", "record")
STAYS = ("settings", "kept", "stream", "tensors", "accelerated", "score", "forms")
_TOKENS = 97
_MOST_STEPS = 60  # over the prompts; a step takes some milliseconds
_MOST_FOR_REFERENCES = 120
_PAGES = (1, 2, 3, 4, 7, 8, 16, 33, 64)
_PAGES_OF_KERNELS = (16, 32, 64)  # plain PyTorch attends over others


@dataclass(frozen=True)
class Ask:
    """One prompt, and what is asked for it alone."""

    ids: list[int]
    seed: int = 0
    own: Options | None = None  # fields of its own GenerationConfig
    adapter: str | None = None


@dataclass(frozen=True)
class Case:
    """``config``: fields of BatchConfig; ``kv_pages`` among them: so many pages more than the least that will do."""

    name: str
    family: str
    asks: list[Ask]
    options: Options
    relation: str
    config: dict[str, Any] = field(default_factory=dict)
    one_seed: int | None = None  # for all prompts; None: each has its own
    device: str = "cpu"
    device_loop: bool = False  # on a CPU: the loop of a GPU, over the kernels' references
    every_row: bool = False  # is held against ``generate``, not some only

    @property
    def kind(self) -> str:
        each = [self.options | (ask.own or {}) for ask in self.asks]
        if any(options.get("num_beams", 1) > 1 for options in each):
            return "beams"
        return "sampled" if any(options.get("do_sample") for options in each) else "greedy"

    @property
    def exact(self) -> bool:
        """Whether results must be equal to the last bit."""
        return bool(self.config.get("invariant")) and (not self.device_loop or self.family in models.ALIGNED)

    @property
    def tokens(self) -> int:
        return sum(len(ask.ids) for ask in self.asks)

    def options_of(self, ask: Ask) -> Options:
        """All that is asked of ``generate`` for this prompt."""
        return {**(ask.own or {}), **self.options}

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.family}, {self.kind}, {self.relation}"]
        lines += [f"  {name} = {getattr(self, name)!r}" for name in ("options", "config", "one_seed", "device_loop")]
        return "\n".join([*lines, *(f"  {ask}" for ask in self.asks)])


def _logprobs(options: Options, own: bool) -> Options:
    """To be compared, too; a search of beams gives none."""
    beams = own or options.get("num_beams", 1) > 1
    return {} if beams else {"logprobs": 1, "prompt_logprobs": 0}


def draw_prompts(dice: Random) -> list[list[int]]:
    """Grown on one another, over few different tokens or many; some equal, some of one token, some long."""
    count, letters = dice.choice((1, 2, 3, 4, 5, 6, 8, 12)), dice.choice((1, 2, 3, 8, _TOKENS, _TOKENS))
    alphabet = dice.sample(range(_TOKENS), letters)
    longest = dice.choice((3, 10, 30, 30, 60, 150))
    prompts: list[list[int]] = []
    for _ in range(count):
        start: list[int] = []
        if prompts and dice.random() < 0.7:
            earlier = dice.choice(prompts)
            start = earlier[: dice.randint(0, len(earlier))] if dice.random() < 0.6 else earlier
        more = [dice.choice(alphabet) for _ in range(dice.choice((0, 1, 2, dice.randint(0, longest))))]
        prompts.append((start + more)[:220] or [dice.choice(alphabet)])
    dice.shuffle(prompts)
    return prompts


def draw_config(dice: Random, device: str, device_loop: bool, beams: bool, tokens: int) -> dict[str, Any]:
    """Each field is drawn in some of the cases. ``tokens``: of all prompts."""
    budgets = [budget for budget in (1, 2, 3, 5, 8, 16, 64, 512) if tokens < _MOST_STEPS * budget]
    fields: dict[str, Any] = {
        "page_size": dice.choice(_PAGES),
        "max_batch_tokens": dice.choice(budgets),
        "share_prefixes": False,
        "min_shared_tokens": dice.choice((0, 1, 2, 4, 16)),
        "fuse": False,
        "kv_pages": dice.choice((0, 0, 1, 2, 5, 20)),
        "keep_prefixes": dice.randint(1, 5),
        "steps_per_sync": dice.choice((1, 2, 3, 8, 32)),
        "cuda_graphs": False,
    }
    often = {"page_size": 0.7, "min_shared_tokens": 0.7, "kv_pages": 0.35, "share_prefixes": 0.1, "fuse": 0.15}
    config = {name: value for name, value in fields.items() if dice.random() < often.get(name, 0.25)}
    if not beams and dice.random() < 0.2:
        config["scheduler"] = "fifo"
    if device != "cpu" and dice.random() < 0.3:
        config["backend"] = dice.choice(("torch", "triton"))
    if device != "cpu" and (config.get("backend") == "triton" or dice.random() < 0.7):
        config["page_size"] = dice.choice(_PAGES_OF_KERNELS)
    if device == "cpu" and device_loop:
        config.setdefault("steps_per_sync", dice.choice((2, 8, 32)))
    return config


def as_invariant(config: dict[str, Any], device: str, device_loop: bool) -> dict[str, Any]:
    """In a GPU's loop with pages of one size, and with all fused, as there it must be."""
    config = {**config, "invariant": True}
    if device_loop or device != "cpu":  # there K and V are read in boxes of a page, whose size changes the bits
        config["page_size"] = 64 if device != "cpu" else 16
    if device != "cpu" and config.get("backend") == "torch":
        del config["backend"]
    if device_loop or device != "cpu":
        config.pop("fuse", None)
    return config


def draw_case(seed: int, number: int, device: str = "cpu", invariant: bool = False) -> Case:
    """``invariant``: with ``invariant=True``, so that all results must be equal to the last bit."""
    name = f"case {number} of seed {seed}"
    dice = Random(f"{seed}:{number}")
    family, prompts = models.draw_family(dice), draw_prompts(dice)
    relation = dice.choice((*MOVES_PROMPTS, *STAYS, "settings", "settings"))
    peft, longest = family.startswith(models.PEFT), max(map(len, prompts))
    how = draw_how(dice)
    if invariant and device != "cpu" and how == "beams":  # refused there
        how = "sampled"
    if peft and relation == "accelerated":
        relation = "tensors"
    own = relation not in ("tensors", "accelerated") and dice.random() < 0.2
    asks = []
    for ids in prompts:
        one = dice.choice(("greedy", "sampled")) if how != "beams" else how
        settings = draw_options(dice, longest, one, arguments=False) if own else None
        adapter = dice.choice(models.ADAPTERS) if peft else None
        asks.append(Ask(ids, dice.randrange(2**32), settings, adapter))
    if own:
        options: Options = {} if how == "beams" or dice.random() < 0.8 else {"logprobs": 2}
    else:
        options = draw_options(dice, longest, how)
    # The references of the kernels take long over long prompts.
    device_loop = device == "cpu" and dice.random() < 0.2 and sum(map(len, prompts)) < _MOST_FOR_REFERENCES
    one_seed = None if relation in MOVES_PROMPTS or dice.random() < 0.5 else dice.randrange(2**63)
    config = draw_config(dice, device, device_loop, how == "beams", sum(map(len, prompts)))
    every_row = dice.random() < 0.15
    if invariant:
        device_loop = device_loop and how != "beams"
        config = as_invariant(config, device, device_loop)
        options = options if "logprobs" in options or dice.random() < 0.3 else options | _logprobs(options, own)
    return Case(name, family, asks, options, relation, config, one_seed, device, device_loop, every_row)
