"""Reinforcement learning: rollouts, a reward, an update of the weights, rollouts again, with the same model object.

    python examples/rollouts.py     # the model needs the extra `demo`; a minute on one CPU core

The reward is the share of different words that begin with an s, and the update is GRPO's: the samples of a prompt are
compared with each other. Nothing is copied to a serving engine and back: the optimizer changes the weights in place,
and the next call runs with them. ``keep_prefixes`` keeps the prompts from call to call *while the weights stay*: each
step proves that none is used that older weights computed.

    cached    prompt tokens that a call found in the cache: none right after an update, nearly all in a second call
    ratio     how far the likelihood that a rollout's token had when it was drawn is from what the model that is trained
              says of it, in the largest case; anything but 0 would be rollouts of another model
    greedy    whether the tokens are those of model.generate with the new weights
    stale     how far log-probabilities of the next token would be off with a prefix from before the update
"""

from __future__ import annotations

import re

import torch
from small_model import load
from transformers import DynamicCache

from hf_batchllm import BatchGenerator, BatchResult

DIARY = """\
The captain kept a diary. Every evening, when the ship lay at anchor and the crew had gone to sleep, she lit the lamp \
and wrote a few lines about the day, about the wind and the water.

"""
PROMPTS = [f"{DIARY}Monday. We saw", f"{DIARY}Friday. At noon"]
SAMPLES, NEW_TOKENS, UPDATES, LEARNING_RATE, CLIP = 8, 8, 4, 1e-4, 0.2
TRAINED_LAYERS = 6  # the last ones, as this is a CPU


def reward(text: str | None) -> float:
    words = re.findall(r"[a-z]+", (text or "").lower())
    return len({word for word in words if word.startswith("s")}) / max(len(words), NEW_TOKENS // 2)


def loss_of(model: torch.nn.Module, group: BatchResult, advantages: torch.Tensor) -> tuple[torch.Tensor, float]:
    """GRPO's clipped loss for the samples of one prompt; and the largest | likelihood now / when drawn - 1 |."""
    ids = torch.tensor([sample.prompt_token_ids + sample.token_ids for sample in group])  # [samples, tokens]
    chosen = ids[:, -NEW_TOKENS:, None]
    logits = model(ids, logits_to_keep=NEW_TOKENS + 1).logits[:, :-1]  # [samples, new tokens, vocabulary]
    now = logits.log_softmax(dim=-1).gather(2, chosen).squeeze(2)
    drawn = torch.tensor([[each[token] for each, token in zip(g.logprobs, g.token_ids)] for g in group])
    ratio = (now - drawn).exp()  # [samples, new tokens]
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean()
    return loss, (ratio - 1).abs().max().item()


@torch.no_grad()
def remembered(model: torch.nn.Module, ids: torch.Tensor) -> DynamicCache:
    """Keys and values of a prompt but for its last token, as the weights are now."""
    return model(ids[:, :-1], past_key_values=DynamicCache(config=model.config), logits_to_keep=1).past_key_values


def greedy(model: torch.nn.Module, ids: torch.Tensor, cache: DynamicCache | None = None) -> list[int]:
    output = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=NEW_TOKENS)
    return output[0, ids.shape[1] :].tolist()


def main() -> None:
    model, tokenizer = load()
    model.requires_grad_(False)
    model.model.layers[-TRAINED_LAYERS:].requires_grad_(True)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids

    # Samples of the model's own distribution, all of one length: nothing is cut off, and nothing ends early.
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_new_tokens": NEW_TOKENS}
    sampling |= {"num_return_sequences": SAMPLES, "logprobs": 0}  # 0: of the drawn tokens alone
    stale: DynamicCache | None = None
    print(f"\\n{len(PROMPTS)} prompts, {SAMPLES} samples of each, {UPDATES} updates\\n")
    print("  update  reward  cached   ratio  greedy   cached  stale    one of the samples")
    with BatchGenerator(model, tokenizer, keep_prefixes=8) as gen:
        for update in range(UPDATES + 1):
            rollouts = gen.generate(PROMPTS, max_new_tokens=NEW_TOKENS, seed=update, **sampling)
            best = gen.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS, do_sample=False)  # the same weights once more
            expected = greedy(model, ids)
            same = "same" if best[0].token_ids == expected else "OTHER"
            would_be = "" if stale is None else "other" if greedy(model, ids, stale) != expected else "same"

            rewards = torch.tensor([reward(text) for text in rollouts.texts]).view(len(PROMPTS), SAMPLES)
            spread = rewards.std(dim=1, keepdim=True) + 1e-4
            advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / spread
            stale = remembered(model, ids)
            ratio = 0.0
            for place, advantage in enumerate(advantages):  # a prompt at a time: logits are large
                group = rollouts[place * SAMPLES : (place + 1) * SAMPLES]
                loss, off = loss_of(model, group, advantage)
                ratio = max(ratio, off)
                if update < UPDATES:
                    (loss / len(PROMPTS)).backward()
            shown = " ".join((rollouts[0].text or "").split())
            print(
                f"  {update:<7}{rewards.mean():7.2f}{rollouts.report.cached_tokens:8}{ratio:9.0e}  {same:<7}"
                f"{best.report.cached_tokens:8}  {would_be:<7}  ... {shown}",
                flush=True,
            )
            if update < UPDATES:
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
