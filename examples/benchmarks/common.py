"""What the scripts share: options, tables, models, timing on a GPU. Importing it makes a source checkout importable."""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from hf_batchllm.bench.floor import copy_rate, timed
from hf_batchllm.bench.workload import SHAPES, Workload, known_config, load_model, random_model, shape, words_of

Inputs = TypeVar("Inputs")

SHAPES |= {
    "llama-1b": shape("llama", 128256, 2048, 8192, 16, 32, 8, 131072, head_dim=64, rope_theta=5e5,
                      tie_word_embeddings=True),
    "llama-70b": shape("llama", 128256, 8192, 28672, 80, 64, 8, 131072, head_dim=128, rope_theta=5e5),
    "qwen2.5-7b": shape("qwen2", 152064, 3584, 18944, 28, 28, 4, 32768, rope_theta=1e6),
    "gemma3-1b": shape("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 32768, head_dim=256, query_pre_attn_scalar=256,
                       sliding_window=512),
    "gemma3-4b": shape("gemma3_text", 262208, 2560, 10240, 34, 8, 4, 131072, head_dim=256, query_pre_attn_scalar=256,
                       sliding_window=1024),
}  # fmt: skip
HYBRID = [name for name, fields in SHAPES.items() if "linear_attention" in fields.get("layer_types", ())]
WITH_EXPERTS = [name for name, fields in SHAPES.items() if "num_experts_per_tok" in fields and name not in HYBRID]
DENSE = [name for name in SHAPES if name not in (*HYBRID, *WITH_EXPERTS)]  # layers' matrices are met by all tokens


def layer_products(name: str) -> list[tuple[int, int]]:
    """(values in, values out) of a layer's matrix products, merged as fused layers run them: q, k and v; o; gate and
    up; down. Of DENSE shapes."""
    fields = SHAPES[name]
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    dim, inner = fields.get("head_dim", hidden // heads), fields["intermediate_size"]
    query_key_value = (heads + 2 * fields["num_key_value_heads"]) * dim
    return [(hidden, query_key_value), (heads * dim, hidden), (hidden, 2 * inner), (inner, hidden)]


# Options


RFC = {
    "requests": (64, "prompts"), "degree": (16, "prompts that share each prefix"),
    "shared": (512, "tokens of a prefix"), "own": (32, "further tokens of a prompt"), "new": (32, "new tokens"),
}  # fmt: skip
RUNS = (3, "of which the median counts")
Flags = Mapping[str, Mapping[str, Any]]
FLOOR: Flags = {"--floor": {"action": argparse.BooleanOptionalAction, "default": torch.cuda.is_available()}}


def read(
    about: str | None,
    arguments: Sequence[str] | None,
    more: Flags | None = None,
    *,
    on: str = "any",
    model: str | None = None,
    figures: bool = False,
    **numbers: tuple[int, str],
) -> argparse.Namespace:
    """The options of a script.

    more: flags, with what ``add_argument`` takes. numbers: options that take a whole number, with default and help.
    on: "any": also --device; "gpu": ends the script where there is none; "host": neither. model: also the options of
    ``model_of``, with this default for --dtype. figures: also --json.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model is not None:
        parser.add_argument("--model", help="a folder or a name on the hub, in place of random weights")
        text = "a shape with random weights (default: %(default)s)"
        parser.add_argument("--config", type=known_config, default="tiny", help=text)
        text = f"default: {model or 'float32 on a CPU, else bfloat16'}"
        parser.add_argument("--dtype", default=model, choices=("bfloat16", "float16", "float32"), help=text)
        parser.add_argument("--threads", type=int, help="torch's threads on a CPU")
    if on == "any":
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, (default, text) in numbers.items():
        flag, text = "--" + name.replace("_", "-"), f"{text} (default: {default:,})"
        parser.add_argument(flag, type=int, default=default, metavar="N", help=text)
    for flag, given in (more or {}).items():
        parser.add_argument(flag, **given)
    if figures:
        parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    asked = parser.parse_args(arguments)
    if on == "gpu" and not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA GPU, and there is none here")
    return asked


def model_of(asked: argparse.Namespace) -> Any:
    """The model that was asked for. Prints what it is."""
    logging.set_verbosity_error()
    device = torch.device(getattr(asked, "device", "cuda"))
    dtype = asked.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if asked.threads:
        torch.set_num_threads(asked.threads)
    model = load_model(asked.model, asked.config, device, getattr(torch, dtype))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    print(f"{asked.model or asked.config}, {dtype}, on {where}, torch {torch.__version__}", flush=True)
    return model


def workload_of(asked: argparse.Namespace, kind: str = "rfc") -> Workload:
    """The workload that the options in RFC ask for."""
    return Workload(asked.requests, asked.shared, asked.own, asked.new, asked.degree, kind=kind)


def random_shape(
    name: str, layers: int = 0, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **less: Any
) -> Any:
    """A model of one of SHAPES, with so many layers if a number is given. ``less``: other values for its fields."""
    fields = SHAPES[name] | ({"num_hidden_layers": layers} if layers else {}) | less
    return random_model(AutoConfig.for_model(**fields), torch.device(device), dtype)


def end_at_random(model: Any, after: int) -> None:
    """Makes ``model`` draw its tokens, of which one in ``after`` ends an answer: with random weights all are alike."""
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=0, temperature=1.0, eos_token_id=list(range(0, words_of(model), after)), pad_token_id=0
    )


TUNE: Flags = {"--tune": {"nargs": "+", "default": [], "metavar": "NAME=VALUE", "help": "constants of the kernels"}}


def begin_tuned(settings: Sequence[str], modules: Sequence[ModuleType]) -> float:
    """Sets each ``NAME=VALUE`` in the first module that has such a constant. Returns the rate of a large copy."""
    for setting in settings:
        name, _, value = setting.partition("=")
        module = next((module for module in modules if isinstance(getattr(module, name, None), int)), None)
        if module is None:
            raise SystemExit(f"{name} is no constant of the kernels")
        setattr(module, name, int(value))
    torch.manual_seed(0)
    copy = copy_rate(torch.device("cuda"))
    print(f"{card()}; copy {copy / 1e12:.2f} TB/s; us", *settings)
    return copy


# Tables


class Table:
    """Prints rows below a head, and keeps them for --json.

    columns: of each its name and how a value is written, as in ``{"batch": "<16", "ms": "9.4f"}``. A row without a
    value has a "-" there, and may have values that no column shows.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = columns
        self.rows: list[dict[str, Any]] = []

    def add(self, row: Mapping[str, Any], **more: Any) -> None:
        self.rows.append({**row, **more})
        if len(self.rows) == 1:
            print(" ".join(f"{name:{self._width(spec)}}" for name, spec in self.columns.items()).rstrip())
        each = ((self.rows[-1].get(name), spec) for name, spec in self.columns.items())
        cells = [f"{'-':{self._width(spec)}}" if value is None else f"{value:{spec}}" for value, spec in each]
        print(" ".join(cells).rstrip(), flush=True)

    @staticmethod
    def _width(spec: str) -> str:
        found = re.match(r"([<>]?)[+]?(\d+)", spec)
        assert found is not None
        return (found[1] or ">") + found[2]

    def write(self, path: Path | None, **more: Any) -> None:
        """``path``: what was given as --json, if anything was."""
        write_json(path, {**more, "rows": self.rows} if more else self.rows)


def write_json(path: Path | None, figures: object) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


def print_pair(*rows: tuple[str, int, float]) -> None:
    """Print two contenders' speeds. A row: name, questions, seconds; ours comes first."""
    table, speeds = Table({"": "<24", "questions": "10,", "seconds": "10.2f", "a second": "10.2f", "x": "6.2f"}), []
    print()
    for name, count, seconds in rows:
        speeds.append(count / seconds)
        values = {"": name, "questions": count, "seconds": seconds, "a second": speeds[-1]}
        table.add(values, x=speeds[0] / speeds[-1] if len(speeds) > 1 else None)


# Timing


def median_run(name: str, runs: int, device: torch.device, work: Callable[[], Inputs]) -> tuple[float, Inputs]:
    """The median seconds of several runs, and what the last one gave."""
    print(f"{name} ...", end=" ", flush=True)
    taken = [timed(device, work) for _ in range(runs)]
    print(*(f"{seconds:.2f} s" for seconds, _ in taken), flush=True)
    return statistics.median(seconds for seconds, _ in taken), taken[-1][1]


def median_seconds(runs: int, work: Callable[[], object]) -> float:
    """The median of several runs after a first one, which compiles kernels; nothing is freed in between."""
    taken = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def randn(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*sizes, dtype=dtype, device="cuda")


def card() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def event_ms(function: Callable[[], object], count: int, wait: bool = False) -> float:
    """The median milliseconds of several calls, by the device's clock. ``wait``: each begins on an idle device."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in pairs:
        if wait:
            torch.cuda.synchronize()
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def graph_ms(function: Callable[[], object], replays: int, stream: torch.cuda.Stream | None = None) -> float:
    """The median milliseconds of a replay of a CUDA graph of ``function``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    for _ in range(3):
        graph.replay()
    return event_ms(graph.replay, replays)


def graph_ms_of_each(sets: Sequence[Inputs], function: Callable[[Inputs], object], replays: int) -> float:
    """Milliseconds for one set of inputs, from a graph that goes over several sets, so that none stays in a cache."""

    def over_all() -> None:
        for inputs in sets:
            function(inputs)

    over_all()  # kernels are compiled
    torch.cuda.synchronize()
    return graph_ms(over_all, replays) / len(sets)


def warm_branches() -> None:
    """Replays a tiny graph of two branches.

    The first such graph of a process may run its branches one after the other, in every replay until another graph
    has been launched (seen with CUDA 13.0, where much memory had been allocated before).
    """
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    one, other = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=main):
        side.wait_stream(main)
        one.add_(1)
        with torch.cuda.stream(side):
            other.add_(1)
        main.wait_stream(side)
    graph.replay()
    torch.cuda.synchronize()


class Watch(threading.Thread):
    """Watches clock and power during a measurement."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, ...]] = []
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-i", "0"]
        with suppress(Exception):  # for information only
            while not self.ended.wait(0.5):
                said = subprocess.run(query, capture_output=True, text=True, timeout=5).stdout
                self.seen.append(tuple(map(float, said.split(","))))

    def end(self) -> dict[str, float]:
        """Medians of the second half."""
        self.ended.set()
        half = zip(*self.seen[len(self.seen) // 2 :], strict=True)
        return dict(zip(("MHz", "W"), (float(statistics.median(each)) for each in half), strict=False))


def turns(functions: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """The milliseconds of each function in the second half of the time, launched one behind the other."""
    times: dict[str, list[float]] = defaultdict(list)
    waiting: list[dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]] = []

    def collect(keep: bool) -> None:
        for name, (begin, end) in waiting.pop(0).items():
            end.synchronize()
            if keep:
                times[name].append(begin.elapsed_time(end))

    for function in [*functions.values()] * 2:  # kernels are compiled
        function()
    torch.cuda.synchronize()
    began, rounds = time.perf_counter(), 0
    while rounds < 6 or time.perf_counter() < began + seconds:
        waiting.append({name: (timing_event(), timing_event()) for name in functions})
        for name, function in functions.items():
            begin, end = waiting[-1][name]
            begin.record()
            function()
            end.record()
        rounds += 1
        if len(waiting) > 2:  # the host is at most two rounds ahead
            collect(time.perf_counter() > began + seconds / 2)
    while waiting:
        collect(True)
    return times


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


# Tokenizers


ONSETS = ["b", "br", "c", "ch", "d", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "pr", "r", "s", "st", "t", "v", "w"]
RIMES = ["a", "e", "i", "o", "u", "an", "en", "in", "on", "er", "or", "al", "ed", "ing", "ou", "ea", "ish", "ack"]


def made_up_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, and of words of syllables with a space before them or none."""
    rng = random.Random(0)
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(tokens) < vocabulary - 1:
        word = "".join(rng.choice(ONSETS) + rng.choice(RIMES) for _ in range(rng.randint(1, 4)))
        tokens[rng.choice(["", "Ġ", "Ġ"]) + rng.choice([word, word.title()])] = None
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def tokenizer_of_words(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Each word is a token, by its place. The first three are padding, what is unknown, and the end."""
    inner = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=words[1]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    given = dict(zip(("pad_token", "unk_token", "eos_token"), words, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **given)


def schema(row: int | None, bounded: bool = False) -> dict[str, Any]:
    """A small object with a name, numbers and some texts; with a number, one that no other row has."""
    text: dict[str, Any] = {"type": "string"} | ({"maxLength": 200} if bounded else {})
    own = {} if row is None else {f"field_{row}": {"type": "integer"}}
    fields = {"name": text, "age": {"type": "integer"}, **own, "notes": {"type": "array", "items": text}}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
