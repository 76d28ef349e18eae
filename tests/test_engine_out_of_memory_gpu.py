"""A GPU whose memory somebody takes in the middle of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_kernels import alone_on_the_gpu
from transformers import LlamaConfig, LlamaForCausalLM

from hf_batchllm import BatchGenerator
from hf_batchllm.model.runner import ModelRunner

pytestmark = [pytest.mark.gpu, alone_on_the_gpu]
LEFT = 192 << 20  # bytes: steps of 8,192 tokens take more


def take_all_but(left: int) -> list[torch.Tensor]:
    """Tensors in all of the card's free memory, but for about so many bytes."""
    taken, size = [], 1 << 34
    torch.cuda.empty_cache()
    while size >= 1 << 21:
        if torch.cuda.mem_get_info()[0] - size < left:
            size //= 2
            continue
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


@pytest.mark.filterwarnings("ignore:a step of .* ran out of memory", "ignore:decode steps run without CUDA graphs")
@pytest.mark.parametrize(("after", "invariant"), [(1, False), (2, False), (2, True)])
def test_memory_that_is_taken_between_two_steps(after: int, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=8192,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16 if invariant else torch.float32).eval()
    prompts = [torch.randint(5, 32_000, (1500,)).tolist() for _ in range(16)]
    generator = BatchGenerator(model, max_batch_tokens=8192, kv_memory="256MiB", invariant=invariant)
    expected = generator.generate(prompts, max_new_tokens=8).token_ids
    taken: list[torch.Tensor] = []
    steps, own = [0], ModelRunner.forward

    def forward(self: ModelRunner, *given: Any, **named: Any) -> Any:
        steps[0] += 1
        if steps[0] == after:  # others come
            taken.extend(take_all_but(LEFT))
        return own(self, *given, **named)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "forward", forward)
            result = generator.generate(prompts, max_new_tokens=8)
    finally:
        taken.clear()
        torch.cuda.empty_cache()
    assert generator._notices.was_given("smaller steps")
    # In float32 the order of sums depends on the size of steps, so a near tie may fall either way.
    alike = sum(own == other for own, other in zip(result.token_ids, expected, strict=True))
    assert alike >= len(prompts) - (0 if invariant else 1)
    assert generator.generate(prompts, max_new_tokens=8).token_ids == expected
