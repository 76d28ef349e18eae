"""The KV cache takes a GPU's memory, all but what steps need, and gives it back."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from support_families import build
from support_kernels import alone_on_the_gpu, plain
from support_memory_device import FAMILY

from hf_batchllm import BatchGenerator
from hf_batchllm.model.kv_storage import KVStorage

pytestmark = plain


@pytest.mark.gpu
@alone_on_the_gpu
class TestOnAGpu:
    def model(self) -> Any:
        gc.collect()  # what earlier tests have left is not this one's
        model = copy.deepcopy(build(FAMILY)).to("cuda", torch.bfloat16)
        with BatchGenerator(model) as generator:  # what products of matrices need for themselves stays
            generator.generate([[5, 6, 7]], max_new_tokens=12)
        return model

    @pytest.fixture
    def little(self) -> Iterator[Callable[[int], int]]:
        """As if the GPU had only so much free: the rest is taken as long as the test runs."""
        taken: list[torch.Tensor] = []

        def leave(size: int) -> int:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
            taken.append(torch.empty(free - size, dtype=torch.uint8, device="cuda"))
            return torch.cuda.mem_get_info()[0]

        yield leave
        taken.clear()
        torch.cuda.empty_cache()

    @pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 1}])
    def test_the_largest_cache_leaves_room_for_the_call(self, little: Callable[[int], int], options: Any) -> None:
        model = self.model()
        free = little(3 << 30)
        prompts = [[5 + index % 80, 6 + index // 80, *range(7, 60)] for index in range(2000)]
        new_tokens = 4000  # so that all of them could use far more than there is; the end comes soon
        stops = list(range(0, 97, 3))
        before = torch.cuda.memory_allocated()
        with BatchGenerator(model, page_size=16) as generator:
            for _ in range(2):
                result = generator.generate(prompts, max_new_tokens=new_tokens, eos_token_id=stops, **options)
                report = result.report
                beside = report.device_memory - before - report.kv_memory
                print(f"\nfree {free:,} cache {report.kv_memory:,} beside {beside:,} {report.graphs}")
                assert report.kv_memory > 0.6 * free
                assert report.device_memory - before < free
                assert beside <= free - report.kv_memory, "more was taken than was left"
        assert torch.cuda.memory_allocated() == before

    def test_a_rehearsal_moves_no_noise(self, little: Callable[[int], int]) -> None:
        model = self.model()
        little(2 << 30)
        before = torch.cuda.get_rng_state(), torch.get_rng_state()
        BatchGenerator(model).generate([[5, 6, 7]] * 3000, max_new_tokens=3000, eos_token_id=list(range(97)))
        assert all(map(torch.equal, before, (torch.cuda.get_rng_state(), torch.get_rng_state())))

    def test_memory_taken_meanwhile(self, monkeypatch: pytest.MonkeyPatch, little: Callable[[int], int]) -> None:
        model, reserve, taken = self.model(), KVStorage.reserve, []
        free = little(3 << 30)

        def late(self: KVStorage, *given: Any) -> None:
            if not taken:
                torch.cuda.empty_cache()
                taken.append(torch.empty(torch.cuda.mem_get_info()[0] - (1 << 30), dtype=torch.uint8, device="cuda"))
            reserve(self, *given)

        monkeypatch.setattr(KVStorage, "reserve", late)
        prompts = [[5 + index % 80, 6, 7] for index in range(2000)]
        generator = BatchGenerator(model)
        with pytest.warns(UserWarning, match="KV cache has .* instead of") as warned:
            result = generator.generate(prompts, max_new_tokens=4000, eos_token_id=list(range(0, 97, 3)))
        assert sum("KV cache has" in str(each.message) for each in warned) == 1
        assert 0.2 * (1 << 30) < result.report.kv_memory < 1 << 30 < free
        assert len(result) == len(prompts)

    def test_close_gives_reserved_memory_back(self) -> None:
        model = self.model()
        torch.cuda.empty_cache()
        free, before = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        generator = BatchGenerator(model, keep_prefixes=4)
        prompts = [[*range(5, 90), index % 90] for index in range(2000)]
        generator.generate(prompts, max_new_tokens=2000, eos_token_id=list(range(97)))
        stream = generator.stream(prompts, max_new_tokens=20)
        list(islice(stream, 1))
        stream.close()
        generator.close()
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.mem_get_info()[0] > free - (256 << 20), "but for kernels that have been loaded"
