"""The manager of ``model.init_continuous_batching`` under ``accelerated``: its plain use is served."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from support_accelerated import model as model  # a fixture
from support_batches import PROMPTS, alone, config, said, served, small
from support_families import FAMILIES
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_batchllm import accelerated


def test_requests_go_in_and_results_come_out_as_they_finish(model: Any) -> None:
    with served(model), model.continuous_batching_context_manager(config()) as manager:
        names = manager.add_requests(PROMPTS)
        short = manager.add_request([30, 31], max_new_tokens=1)
        mine = manager.add_request([30, 31], request_id="mine", eos_token_id=alone(model, [30, 31])[1])
        assert (names, short, mine) == (["req_0", "req_1", "req_2", "req_3"], "req_4", "mine")
        found = {}
        for output in manager:
            found[output.request_id] = output.generated_tokens
            if len(found) == 6:
                break
        assert model.last_report.sequences == 6  # one list
    assert list(found)[:2] == ["req_4", "mine"]
    expected = alone(model, [30, 31])
    assert found.pop("req_4") == expected[:1] and found.pop("mine") == expected[:2]
    assert found == {name: alone(model, ids) for name, ids in zip(names, PROMPTS, strict=True)}


def test_a_plain_manager_and_its_end(model: Any) -> None:
    with served(model):
        manager = model.init_continuous_batching(generation_config=config())
        manager.add_requests(PROMPTS[:2])
        assert not manager.is_running() and manager.get_result() is None
        manager.warmup()
        manager.start()
        assert manager.is_running() and manager.get_result("req_1").generated_tokens == alone(model, PROMPTS[1])
        with manager.pause():
            pass
        manager.add_request(PROMPTS[2])
        manager.stop()  # computes what is there
        assert not manager.is_running() and list(manager) == []
        assert {manager.get_result().request_id for _ in range(2)} == {"req_0", "req_2"}
        assert manager.get_result() is None
        with pytest.warns(UserWarning, match="the manager has stopped, so the request is dropped"):
            assert manager.add_request([5]) is None
        manager.destroy()
        with pytest.raises(RuntimeError, match="was destroyed"):
            manager.start()
        with pytest.raises(AttributeError, match="has no `batch_processor`: it takes requests and gives results"):
            _ = manager.batch_processor


def test_a_hard_stop_and_cancelled_requests(model: Any) -> None:
    with served(model), model.continuous_batching_context_manager(config()) as manager:
        manager.add_request([5], max_new_tokens=1)
        manager.add_requests([[6], [7], [8]])
        manager.cancel_request("req_2")
        assert manager.get_result().request_id == "req_0"
        manager.cancel_request("req_3")  # which has begun
        manager.stop(hard_stop=True)
        output = manager.get_result()
        assert output.request_id == "req_1" and output.status is RequestStatus.FAILED
        assert output.error == "the manager was stopped before this request had finished"
        assert manager.get_result() is None


def test_other_calls_between_two_results(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, max_new_tokens=3)
    with served(model), model.continuous_batching_context_manager(config()) as manager:
        manager.add_request([5], max_new_tokens=1)
        manager.add_request([6])
        assert manager.get_result().generated_tokens == alone(model, [5])[:1]
        assert torch.equal(model.generate(ids, max_new_tokens=3), expected)
        assert model.generate_batch([[9]], config())["req_0"].generated_tokens == alone(model, [9])
        with model.continuous_batching_context_manager(config()) as other:
            other.add_request([7])
            assert other.get_result().generated_tokens == alone(model, [7])
        assert manager.get_result().generated_tokens == alone(model, [6])


def test_requests_with_settings_of_their_own(model: Any) -> None:
    batching, drawn = small(per_request_processors=True), config(do_sample=True, temperature=1.5)
    with served(model):
        with model.continuous_batching_context_manager(drawn, continuous_batching_config=batching) as manager:
            manager.add_request(PROMPTS[0], top_k=1)
            manager.add_request(PROMPTS[0], typical_p=0.5)
            outputs = sorted((manager.get_result() for _ in range(2)), key=lambda output: output.request_id)
        assert outputs[0].generated_tokens == alone(model, PROMPTS[0])
        assert outputs[1].error.startswith("`typical_p` is not an option of a single request")
        with model.continuous_batching_context_manager(drawn) as manager:
            manager.add_request(PROMPTS[0], top_k=1)
            assert "needs `per_request_processors=True`" in manager.get_result().error


def test_requests_of_another_thread(model: Any) -> None:
    def add() -> None:
        for ids in PROMPTS:
            time.sleep(0.02)
            manager.add_request(ids)

    with served(model), model.continuous_batching_context_manager(config()) as manager:
        assert manager.get_result(timeout=0.01) is None  # nobody has asked for anything
        thread = threading.Thread(target=add)
        thread.start()
        tokens = [manager.get_result().generated_tokens for _ in PROMPTS]
        thread.join()
    assert sorted(tokens) == sorted(alone(model, ids) for ids in PROMPTS)


def test_what_needs_single_tokens_is_done_by_transformers_own_manager() -> None:
    model = FAMILIES["llama"]()
    with accelerated(model), said() as found:
        manager = model.init_continuous_batching(config(), continuous_batching_config=small())
        manager.start()
        manager.add_request([5, 6, 7])
        manager.add_request([8, 9], streaming=True)
        assert isinstance(manager._theirs, ContinuousBatchingManager)
        streamed = list(manager.request_id_iter("req_1"))
        plain = next(manager.request_id_iter("req_0"))
        model.generate_batch([[5, 6]], config(), small())  # while its thread waits
        assert model.last_report is None
        manager.stop()
        model.generate_batch([[5, 6]], config(), small())
        assert model.last_report is not None
    assert [len(output.generated_tokens) for output in streamed] == [1, 2, 3, 4, 5, 6]
    assert plain.generated_tokens == alone(model, [5, 6, 7])
    assert len(found) == 2
    assert "transformers' own continuous batching runs instead: `streaming` is about single tokens" in found[0]
    assert "continuous batching runs instead: transformers' own manager runs on the model: stop() it" in found[1]


def test_the_block_ends_before_the_requests_do(model: Any) -> None:
    with served(model):
        manager = model.init_continuous_batching(config())
        manager.start()
        manager.add_request([5], max_new_tokens=1)
        manager.add_request([6])
        assert manager.get_result().request_id == "req_0"
        manager.add_request([7])
    found = [manager.get_result() for _ in range(2)]
    assert {output.request_id for output in found} == {"req_1", "req_2"} and not manager.is_running()
    assert {output.error for output in found} == {"accelerated(model) has ended, and this request had not"}
    assert manager.get_result() is None
    assert model.generate(torch.tensor([[5]]), max_new_tokens=1).shape == (1, 2)
