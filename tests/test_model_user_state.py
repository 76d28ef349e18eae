"""What a user has set on a model: compiled modules, hooks, weights in parts, quantisation, forwards of modules."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support_families import FAMILIES
from support_fused import fusing as fusing  # a fixture
from support_users import GREEDY, PROMPTS, assert_refused, tokens, tokens_alone
from torch import distributed, nn

from hf_batchllm import BatchGenerator, UnsupportedModelError
from hf_batchllm.model.inspection.batch_dependent import depends_on_batch
from hf_batchllm.model.inspection.user_state import not_in_graphs, stamp_of


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if each.category is UserWarning]


# -- torch.compile -----------------------------------------------------------------------------------------------


def forwards_below(model: Any, compiled: Any) -> None:
    model.model.forward = compiled(model.model.forward)
    for layer in model.model.layers:
        layer.self_attn.forward = compiled(layer.self_attn.forward)


COMPILED: dict[str, Callable[[Any, Any], Any]] = {  # gives the model to call, or None for the same
    "its forward": lambda model, compiled: setattr(model, "forward", compiled(model.forward)),
    "itself": lambda model, compiled: model.compile(backend=compiled.keywords["backend"]),
    "forwards below": forwards_below,
    "a wrapper": lambda model, compiled: compiled(model),
    "a layer": lambda model, compiled: model.model.layers.__setitem__(1, compiled(model.model.layers[1])),
    "around adapters": lambda model, compiled: compiled(
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    ),
}
LATE = [("its forward", True), ("itself", True), ("forwards below", True), ("its forward", False), ("a wrapper", False)]


@pytest.mark.parametrize(("how", "late"), [*LATE, ("a layer", False), ("around adapters", False)])
def test_compiled_modules_run_as_they_were_written(how: str, late: bool) -> None:
    """Compiled before the generator is made, or between two of its calls."""
    ran: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        ran.append(graph)
        return graph.forward

    compiled = functools.partial(torch.compile, backend=backend)
    model: Any = FAMILIES["llama"]()
    expected = tokens(BatchGenerator(model))
    if late:
        generator = BatchGenerator(model)
        tokens(generator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = COMPILED[how](model, compiled)
        model = model if made is None else made
        if not late:
            generator = BatchGenerator(model)
        before = {path: dict(vars(module)) for path, module in model.named_modules()}
        assert tokens(generator) == expected
        assert tokens(generator) == expected
    assert not ran
    assert [message for message in messages(caught) if "compiled with torch.compile" in message] == messages(caught)
    assert len(messages(caught)) == 1
    after = {path: dict(vars(module)) for path, module in model.named_modules()}
    assert all(
        after[path].get(key) is held.get(key)
        for path, held in before.items()
        for key in ("forward", "_compiled_call_impl")
    )
    assert not_in_graphs(generator.model) is None


def test_a_compiled_model_is_still_compiled_between_results_and_after_an_error() -> None:
    model: Any = FAMILIES["llama"]()
    model.forward = compiled = torch.compile(model.forward, backend="eager")
    generator = BatchGenerator(model)
    with pytest.warns(UserWarning, match="compiled"):
        next(stream := generator.stream(PROMPTS, **GREEDY))
    assert model.forward is compiled
    stream.close()

    def broken(*args: Any) -> None:
        raise RuntimeError("broken")

    model.lm_head.register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="broken"):
        tokens(generator)
    assert model.forward is compiled


# -- hooks -------------------------------------------------------------------------------------------------------


def test_hooks_run_and_what_they_see_is_said_once() -> None:
    model: Any = FAMILIES["llama"]()
    plain = tokens(BatchGenerator(model))
    generator = BatchGenerator(model)
    vector = torch.linspace(-1, 1, 48)
    model.model.layers[1].register_forward_hook(lambda module, given, out: out + vector)
    with pytest.warns(UserWarning, match=r"hooks on `model\.layers\.1`, and they see other tensors") as caught:
        assert plain != tokens(generator) == tokens_alone(model) == tokens(generator)
    assert len(caught) == 1


def test_a_hook_that_picks_a_place_is_told_what_it_gets() -> None:
    generator = BatchGenerator(FAMILIES["llama"]())
    picked: list[torch.Tensor] = []
    generator.model.lm_head.register_forward_pre_hook(lambda module, given: picked.append(given[0][:, -1]))
    with pytest.warns(UserWarning, match=r"picks a place, such as h\[:, -1\].*other prompt.*Use model\.generate"):
        generator.generate([[5, 6], [7, 8, 9]], max_new_tokens=1)
    assert [len(each) for each in picked] == [1], "of two prompts one"


def test_a_hook_on_all_modules_is_named() -> None:
    generator = BatchGenerator(FAMILIES["llama"]())
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, given: None)
    try:
        with pytest.warns(UserWarning, match="hooks on all modules"):
            tokens(generator)
    finally:
        handle.remove()


def test_hooks_of_libraries_that_change_nothing_are_not_mentioned() -> None:
    model: Any = FAMILIES["llama"]()
    model.enable_input_require_grads()
    model(torch.tensor([[3, 4]]), output_hidden_states=True)
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens(BatchGenerator(model))


# -- weights in parts ----------------------------------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_weights_sharded_by_fsdp_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))  # type: ignore[arg-type]
    assert_refused(model, generator, "several processes, .*FSDP; that is not supported: load")


def test_weights_sharded_otherwise_are_refused() -> None:
    for name, value, how in (("_tp_size", 2, "tensor parallelism"), ("ds_id", 0, "ZeRO-3")):
        model = FAMILIES["llama"]()
        generator = BatchGenerator(model)
        setattr(model if name == "_tp_size" else next(model.parameters()), name, value)
        with pytest.raises(UnsupportedModelError, match=f"Llama.*several processes, by .*{how}"):
            tokens(generator)


def test_weights_that_zero_3_has_gathered_run_where_they_are(fusing: list[int]) -> None:
    """As in a block of ``deepspeed.zero.GatheredParameters``: their memory is DeepSpeed's."""
    model = copy.deepcopy(FAMILIES["llama"]())
    generator = BatchGenerator(model)
    wanted, places = tokens(generator), [each.data_ptr() for each in model.parameters()]
    generator.close()
    places = [each.data_ptr() for each in model.parameters()]
    for number, each in enumerate(model.parameters()):
        each.ds_id, each.ds_shape = number, each.shape  # type: ignore[attr-defined]
    with BatchGenerator(model) as generator:
        assert tokens(generator) == wanted
        assert [each.data_ptr() for each in model.parameters()] == places
        next(model.parameters()).ds_shape = (7, 7)  # type: ignore[attr-defined]
        with pytest.raises(
            UnsupportedModelError, match=r"ZeRO-3: generate while they are gathered, in a block `with d"
        ):
            tokens(generator)


# -- quantisation --------------------------------------------------------------------------------------------------


class PerTensor:
    pass


class Float8DynamicActivationFloat8WeightConfig:
    def __init__(self, granularity: Any) -> None:
        self.granularity = granularity


def of_groups(**activations: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"input_activations": activations}}}


@pytest.mark.parametrize(
    ("config", "depends"),
    [
        (SimpleNamespace(quant_method="bitsandbytes", load_in_8bit=True, llm_int8_threshold=6.0), "LLM.int8"),
        (SimpleNamespace(quant_method="bitsandbytes", load_in_8bit=True, llm_int8_threshold=0.0), ""),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, ""),
        (of_groups(dynamic=True, strategy="tensor"), "compressed-tensors"),
        (of_groups(dynamic=True, strategy="token"), ""),
        (of_groups(dynamic=False, strategy="tensor"), ""),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ""),
        (
            SimpleNamespace(
                quant_method="torchao",
                quant_type=Float8DynamicActivationFloat8WeightConfig([PerTensor(), PerTensor()]),
            ),
            "torchao",
        ),
        (SimpleNamespace(quant_method="torchao", quant_type=Float8DynamicActivationFloat8WeightConfig(None)), ""),
        (None, ""),
    ],
)
def test_which_quantisation_makes_answers_depend_on_the_batch(config: Any, depends: str) -> None:
    why = depends_on_batch(SimpleNamespace(config=SimpleNamespace(quantization_config=config)))  # type: ignore[arg-type]
    assert depends in why if why and depends else why is None and not depends


def test_llm_int8_is_said_once() -> None:
    model: Any = FAMILIES["llama"]()
    model.is_loaded_in_8bit = True
    generator = BatchGenerator(model)
    with pytest.warns(UserWarning, match=r"LLM\.int8.*answers depend on which other prompts") as caught:
        assert tokens(generator) == tokens(generator)
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_activations_that_torch_scales_for_a_whole_batch_are_warned_of() -> None:
    linear = {torch.nn.Linear}
    model: Any = torch.ao.quantization.quantize_dynamic(FAMILIES["llama"](), linear, dtype=torch.qint8)
    generator = BatchGenerator(model)
    with pytest.warns(UserWarning, match=r"torch\.ao.*answers depend on which other prompts"):
        tokens(generator)


def written_in(home: str, function: FunctionType) -> FunctionType:
    """The function, as if its code stood in another Python module."""
    return FunctionType(
        function.__code__, {**globals(), "__name__": home}, function.__name__, None, function.__closure__
    )


def test_a_packed_checkpoint_is_unpacked_before_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_batchllm.engine.call_memory import CallMemory

    model: Any = FAMILIES["llama"]()
    expected, generator = tokens_alone(model), BatchGenerator(model)
    happened: list[str] = []

    def ct_decompress_hook(module: Any, args: Any) -> None:
        happened.append("unpacked")
        handle.remove()

    hook = written_in("compressed_tensors.compressors.model_compressors.model_compressor", ct_decompress_hook)
    handle = model.register_forward_pre_hook(hook)
    opened = CallMemory.open
    monkeypatch.setattr(CallMemory, "open", lambda self: happened.append("measured") or opened(self))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(generator) == expected
    assert happened == ["unpacked", "measured"]


@pytest.mark.parametrize(
    ("home", "captured"),
    [
        ("compressed_tensors.quantization.lifecycle.forward", True),
        ("transformers.integrations.mxfp4", True),
        ("compressed_tensors.offload.module", False),
        ("__main__", False),
    ],
)
def test_forwards_that_quantisation_sets_are_no_obstacle_to_graphs(home: str, captured: bool) -> None:
    model: Any = FAMILIES["llama"]()

    def quantized_forward(self: Any, given: torch.Tensor) -> Any:
        return type(self).forward(self, given)

    linear = model.model.layers[0].mlp.up_proj
    linear.forward = MethodType(written_in(home, functools.wraps(linear.forward)(quantized_forward)), linear)
    assert (not_in_graphs(model) is None) == captured
    assert tokens(BatchGenerator(model)) == tokens_alone(model)


def test_a_step_in_another_thread_is_no_change_of_the_user() -> None:
    """It puts forwards in place for as long as it runs: here those that were compiled."""
    model: Any = FAMILIES["llama"]()
    mlp = model.model.layers[0].mlp
    mlp.forward = torch.compile(mlp.forward)
    compiled, found = mlp.forward, list[object]()
    looking = threading.Thread(target=lambda: found.append(stamp_of(model, model.device)))

    def look(*_: Any) -> None:
        assert mlp.__dict__["forward"] is not compiled
        if looking.ident is None:
            looking.start()
            looking.join(0.2)

    handle = mlp.register_forward_hook(look)
    tokens(BatchGenerator(model))
    looking.join()
    assert mlp.__dict__["forward"] is compiled and found[0] == stamp_of(model, model.device)
    handle.remove()
