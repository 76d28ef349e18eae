"""What an exception holds on to: a notebook keeps the last one, its traceback, and the locals of every frame."""

from __future__ import annotations

import gc
import pkgutil
import traceback
from typing import Any

import pytest
import torch
from support_calls import failing
from support_device_loop import run_over_references
from support_families import build
from support_live_tensors import Storages
from support_untouched import FAMILY, NEW_TOKENS, fingerprint, prompts

from hf_batchllm import BatchGenerator
from hf_batchllm.patches import merged_weights
from hf_batchllm.sampling.step_tensors import StepTensors

GIVEN = prompts(count=7)
OPTIONS = {"max_new_tokens": NEW_TOKENS}


def make(**fields: Any) -> BatchGenerator:
    return BatchGenerator(build(FAMILY), max_batch_tokens=24, page_size=8, min_shared_tokens=4, **fields)


@pytest.fixture(params=["torch", "kernels"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernels":
        run_over_references(monkeypatch)
    return request.param


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> Storages:
    found = Storages()
    found.watch(monkeypatch.setattr)
    return found


def fail_after(patch: pytest.MonkeyPatch, place: str, calls: int, error: type[BaseException]) -> None:
    where, _, name = place.rpartition(".")
    failing(patch, pkgutil.resolve_name(f"hf_batchllm.{where}"), name, {calls}, error, after=True)


PLACES = {
    "torch": (
        "model.runner.ModelRunner.step",
        "model.attention.torch_attention.attend_each",
        "model.attention.torch_attention.write_kv",
    ),
    "kernels": ("model.runner.ModelRunner.forward", "model.attention.triton_attention.KernelAttention._attend_rows"),
}


CASES = [(backend, place) for backend, places in PLACES.items() for place in places]


@pytest.mark.some_cases
@pytest.mark.parametrize(("backend", "place"), CASES, indirect=["backend"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("way", ["generate", "stream"])
def test_an_exception_that_is_kept_holds_no_memory(
    way: str,
    error: type[BaseException],
    backend: str,
    place: str,
    storages: Storages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = make()
    fail_after(monkeypatch, place, 12, error)
    with pytest.raises(error) as caught:
        list(getattr(generator, way)(GIVEN, **OPTIONS))
    assert len(storages.seen) > 20 and storages.alive() == 0
    if error is KeyboardInterrupt:
        assert caught.value.__context__ is None
        frames = list(traceback.walk_tb(caught.value.__traceback__))
        assert len(frames) == 2, "the way down to the step says nothing to whoever interrupted it"
    generator.close()  # merged weights stay so until then


@pytest.mark.some_cases
@pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")
@pytest.mark.parametrize("keep_prefixes", [0, 4])
def test_an_error_of_a_hook_leaves_its_frames_and_the_models_to_be_looked_at(
    keep_prefixes: int, backend: str, storages: Storages
) -> None:
    generator = make(keep_prefixes=keep_prefixes, fuse=False)  # fused layers are no code of the model's user
    before = fingerprint(build(FAMILY))
    if keep_prefixes:
        generator.generate(GIVEN, **OPTIONS)
        storages.note_kept(generator._resources.kv.storage)
        assert storages.alive()

    def hook(module: Any, args: Any) -> None:
        steps.append(len(storages.seen))
        if len(steps) > 5:
            raise ZeroDivisionError

    steps: list[int] = []
    last = build(FAMILY).model.layers[-1].self_attn
    with last.register_forward_pre_hook(hook), pytest.raises(ZeroDivisionError) as caught:
        generator.generate(GIVEN, **OPTIONS)
    frames = {frame.f_code.co_name: frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)}
    assert frames["hook"].f_locals["module"] is last
    layers = [
        frame.f_locals["hidden_states"]
        for frame, _ in traceback.walk_tb(caught.value.__traceback__)
        if frame.f_code.co_qualname.endswith("DecoderLayer.forward")
    ]
    assert len(layers) == 1 and layers[0].isfinite().all()
    generator.close()
    assert len(storages.seen) > 20 and storages.alive() == 0
    assert fingerprint(build(FAMILY)) == before


def merged(model: Any) -> list[Any]:
    return [whole for each in model.parameters() if (whole := merged_weights._whole(each)) is not None]


@pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_merged_weights_are_taken_apart_whatever_keeps_the_exception(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_over_references(monkeypatch)
    model, calls = build("llama"), [0]

    def fails(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise error

    generator = BatchGenerator(model, max_batch_tokens=24, page_size=8)
    generator.generate(GIVEN, **OPTIONS)
    wholes = merged(model)
    assert wholes
    with model.model.layers[-1].mlp.register_forward_hook(fails), pytest.raises(error) as caught:
        generator.generate(GIVEN, **OPTIONS)
    generator.generate(GIVEN[:2], **OPTIONS)
    wholes += merged(model)
    generator.close()
    assert caught.value.__traceback__ is not None
    assert all(whole.expired() for whole in wholes)


@pytest.mark.some_cases
@pytest.mark.parametrize("place", PLACES["kernels"])
@pytest.mark.parametrize("way", ["generate", "stream"])
def test_an_error_that_is_kept_does_not_hold_the_weights_a_second_time(
    way: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_over_references(monkeypatch)
    model = build("llama")
    generator = BatchGenerator(model, max_batch_tokens=24, page_size=8)
    fail_after(monkeypatch, place, 7, RuntimeError)
    with pytest.raises(RuntimeError) as caught:
        list(getattr(generator, way)(GIVEN, **OPTIONS))
    wholes = merged(model)
    assert wholes
    generator.close()
    gc.collect()
    assert all(whole.expired() for whole in wholes)
    assert caught.value.__traceback__ is not None


class Failed(Exception):
    pass


@pytest.mark.parametrize(
    "place",
    ["model.runner.ModelRunner.step", "sampling.step_tensors.StepTensors._of", "sampling.host_sampler.apply_blind"],
)
def test_an_error_that_is_kept_does_not_hold_scores(
    place: str, storages: Storages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take much memory, and would be in the way of a second attempt."""
    made = StepTensors._of

    def noted(self: StepTensors, *args: Any) -> torch.Tensor:
        step = made(self, *args)
        storages.note(step)
        return step

    monkeypatch.setattr(StepTensors, "_of", noted)
    fail_after(monkeypatch, place, 5, Failed)
    ids, scores = torch.tensor([[5, 6, 7], [8, 9, 10]]), {"return_dict_in_generate": True, "output_scores": True}
    with make() as generator, pytest.raises(Failed) as caught:
        generator.generate(ids, output_logits=True, **scores, **OPTIONS)
    assert caught.value.__traceback__ is not None
    assert len(storages.seen) > 20 and storages.alive() == 0


def test_an_error_out_of_code_from_nowhere_comes_out_as_it_is() -> None:
    made: dict[str, Any] = {"__name__": None}
    exec("def hook(*_): raise ZeroDivisionError('of the hook')", made)
    hooked = build(FAMILY).model.layers[0].register_forward_pre_hook(made["hook"])
    with hooked, pytest.raises(ZeroDivisionError, match="of the hook"):
        make().generate(GIVEN, **OPTIONS)
