"""How far the probabilities of sampled tokens are from those that a trainer computes for the same tokens.

    python examples/benchmarks/bench_agreement.py --config qwen3-0.6b

A trainer runs a plain forward pass over each prompt and its answer, and weighs tokens by the ratio of that probability
to the one at which the token was sampled. In exact arithmetic the ratio is 1. The table gives the share of tokens whose
ratio is more than 10 % off, the mean and the largest distance of the logarithms, and the mean of the trainer's
logarithm minus the sampler's: a bias there pulls all weights to one side.

Random weights give every token about the same probability, which no rounding changes. So the head is scaled until the
distributions are as narrow as those of trained models: --entropy nats on average. --dtype float32 shows the noise of
the measure itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.contenders import padded
from hf_batchllm.bench.workload import Workload, words_of

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
_OFF = 0.1  # of the ratio of two probabilities
_ROWS = 8  # prompts of a batch of `generate`, which keeps the logits of all steps


@dataclass
class Sampled:
    """An answer, and the log-probability of each of its tokens as the sampler has it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def by_us(model: Any, prompts: Sequence[list[int]], new: int, samples: int) -> list[Sampled]:
    given = {"num_return_sequences": samples, "logprobs": 0, "eos_token_id": None, "seed": 0, "progress": False}
    with BatchGenerator(model) as generator:
        result = generator.generate(prompts, max_new_tokens=new, **given, **SAMPLED)
    return [
        Sampled(row.prompt_token_ids, row.token_ids, [next(iter(each.values())) for each in row.logprobs])
        for row in result
    ]


def by_generate(model: Any, prompts: Sequence[list[int]], new: int, samples: int) -> list[Sampled]:
    given = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    config = GenerationConfig(max_new_tokens=new, eos_token_id=None, **given, **SAMPLED)
    every = [prompt for prompt in prompts for _ in range(samples)]
    found = []
    for begin in range(0, len(every), _ROWS):
        some = every[begin : begin + _ROWS]
        ids, mask = padded(some, model.device)
        out = model.generate(ids, attention_mask=mask, generation_config=config)
        tokens = out.sequences[:, ids.shape[1] :]
        logprobs = torch.stack(out.logits, dim=1).float().log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        found += [Sampled(*each) for each in zip(some, tokens.tolist(), logprobs.tolist(), strict=True)]
    return found


def by_generate_batch(model: Any, prompts: Sequence[list[int]], new: int, samples: int) -> list[Sampled]:
    config = GenerationConfig(max_new_tokens=new, eos_token_id=-1, pad_token_id=0, **SAMPLED)
    every = [prompt for prompt in prompts for _ in range(samples)]
    out = model.generate_batch(every, config, ContinuousBatchingConfig(return_logprobs=True))
    return [Sampled(each.prompt_ids, each.generated_tokens, each.logprobs) for each in out.values()]


@torch.no_grad()
def of_a_forward(model: Any, row: Sampled) -> torch.Tensor:  # [tokens]
    """The log-probabilities of the answer by a plain forward pass."""
    ids = torch.tensor([row.prompt + row.tokens], device=model.device)
    logits = model(ids).logits[0, len(row.prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(row.prompt) :, None])[:, 0].cpu()


@torch.no_grad()
def narrow(model: Any, prompts: Sequence[list[int]], entropy: float) -> float:
    """Scale the head until the distributions have so many nats on average. Gives the scale."""
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    logits = torch.cat([model(torch.tensor([prompt], device=model.device)).logits[0].float() for prompt in prompts[:4]])

    def nats(scale: float) -> float:
        return float(torch.distributions.Categorical(logits=logits * scale).entropy().mean())

    low, high = 0.0, 1.0
    while nats(high) > entropy:
        high *= 2
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if nats(middle) > entropy else (low, middle)
    head.weight.mul_(high)
    return high


WAYS: dict[str, Callable[..., list[Sampled]]] = {
    "BatchGenerator": by_us,
    "generate": by_generate,
    "generate_batch": by_generate_batch,
}


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--entropy": {"type": float, "default": 1.5, "help": "nats (default: 1.5); 0: weights as they are"},
        "--ways": {"nargs": "+", "default": list(WAYS), "choices": list(WAYS)},
    }
    asked = common.read(
        __doc__, arguments, flags, model="bfloat16", prompts=(32, "prompts"), samples=(8, "answers to each"),
        prompt=(128, "tokens of each"), new=(128, "new tokens of each answer"),
    )  # fmt: skip
    model = common.model_of(asked)
    prompts = Workload(asked.prompts, 0, asked.prompt, asked.new, 1).prompts(words_of(model))
    scale = narrow(model, prompts, asked.entropy) if asked.entropy and not asked.model else 1.0
    print(f"{asked.prompts} prompts of {asked.prompt} tokens, {asked.samples} answers of {asked.new} tokens to each")
    print(f"head scaled by {scale:.2f}\n")
    columns = {"sampled by": "<16", "tokens": "8,", "over 10 % off": "13.2%", "mean distance": "13.5f"}
    table = common.Table({**columns, "largest": "8.3f", "bias": "+10.5f"})
    for name in asked.ways:
        try:
            rows = WAYS[name](model, prompts, asked.new, asked.samples)
        except Exception as error:
            print(f"{name:<16} {type(error).__name__}: {str(error)[:90]}", flush=True)
            continue
        far = torch.cat([of_a_forward(model, row) - torch.tensor(row.logprobs) for row in rows])
        off, mean = ((far.exp() - 1).abs() > _OFF).float().mean().item(), far.abs().mean().item()
        found = {"sampled by": name, "tokens": len(far), "over 10 % off": off, "mean distance": mean}
        table.add({**found, "largest": far.abs().max().item(), "bias": far.mean().item()})


if __name__ == "__main__":
    main()
