"""A simulated GPU: works out how long a step would take on an H200 with a model of Llama-8B's shape.

The engine, the plan, the scheduler and the cache are the real ones; only the model is simulated. It knows the length of
each answer, which they do not. It covers only what a schedule can change: it tells which of two schedules is better and
by about how much, not how fast a real run is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import common  # noqa: F401  before hf_batchllm: finds the checkout
import numpy as np

from hf_batchllm.bench.floor import Rates, Shape
from hf_batchllm.planning.requests_and_prefixes import Request, Unit
from hf_batchllm.planning.step import Step

LLAMA_8B = Shape(
    heads=32,
    head_dim=128,
    head_weights=4096 * 128_256,
    linear_weights=6_979_321_856,
    kv_bytes=131_072,
    windows=(None,) * 32,
)
H200 = Rates(operations=670e12, copy=4.2e12)

# Of a token: norms, rope and activations read and write these widths.
_ELEMENTWISE_BYTES = 32 * (8 * 4096 + 2 * 6144 + 3 * 14_336) * 2
# Measured: (rows, seconds of all layers' products for them). Beyond these they run at the rate above.
_FEW_ROWS = (0, 64, 256, 512), (4.3e-3, 4.6e-3, 6.3e-3, 9.9e-3)
_PROMPT_ATTENTION = 400e12  # operations a second
_READ_SHARE = 0.75  # of a copy's rate, at which decode rows read K and V
# The host launches a step with prompts layer by layer, and replays the graph of a step of rows.
_LAUNCH_MIXED, _LAUNCH_ROWS, _BETWEEN_STEPS = 15e-3, 2e-3, 0.1e-3  # seconds


class SimulatedGpu:
    """An engine's Launcher. ``answers``: how many tokens each request gets, by its index.

    ``stop``: the token that ends an answer, as the engine knows it.
    """

    replays = is_steady = True
    most_times = 3  # as engine/step_size.py has it for sixteen GB of weights

    def __init__(self, answers: Sequence[int], stop: int, shape: Shape = LLAMA_8B, rates: Rates = H200) -> None:
        self.answers = answers
        self.stop = stop
        self.shape = shape
        self.rates = rates
        self.now = 0.0  # what the host's clock says
        self.busy_until = 0.0

    def clock(self) -> float:
        return self.now

    def launch(self, step: Step, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        tokens = np.full((len(sampling), step.times), 1, dtype=np.int64)
        ends = np.array([self.answers[each.index] - each.made for each in sampling], dtype=np.int64)
        counts = np.arange(step.times)
        tokens[counts[None] >= ends[:, None]] = -1
        for row, (request, end) in enumerate(zip(sampling, ends.tolist(), strict=True)):
            if 0 < end <= step.times and request.made + end < request.max_new_tokens:
                tokens[row, end - 1] = self.stop
        at = max(self.busy_until, self.now)
        self.now += _LAUNCH_MIXED if step.chunks else _LAUNCH_ROWS
        for time in range(step.times):
            at += self._seconds(step, time, sampling)
        end = self.busy_until = max(at, self.now) + _BETWEEN_STEPS

        def wait() -> np.ndarray:
            self.now = max(self.now, end)
            return tokens

        return wait

    def tokens_were_seen(self) -> None:
        pass

    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        return False  # it never fails

    def put_back(self, step: Step) -> None:
        pass

    def _seconds(self, step: Step, time: int, sampling: Sequence[Request]) -> float:
        """The step's ``time``-th run."""
        shape, rates = self.shape, self.rates
        rows = len(step.rows)
        tokens = step.tokens if time == 0 else rows
        products = 2 * shape.linear_weights * tokens / rates.operations
        seconds = max(products, float(np.interp(tokens, *_FEW_ROWS)))
        samples = len(sampling) if time == 0 else rows
        head = 2 * shape.head_weights * samples / rates.operations
        seconds += max(head, shape.value_bytes * shape.head_weights / rates.copy) if samples else 0.0
        seconds += _ELEMENTWISE_BYTES * tokens / rates.copy
        keys, seen = 0, set[Unit]()
        for request in step.rows:
            if request.made + time >= self.answers[request.index]:
                continue  # a row that has ended reads nothing
            keys += request.length + time - request.start
            unit, start = request.base, request.start
            while unit is not None and unit not in seen:
                seen.add(unit)
                keys += start - unit.start
                unit, start = unit.base, unit.start
        seconds += keys * shape.kv_bytes / (_READ_SHARE * rates.copy)
        pairs = 0.0
        for chunk in step.chunks:
            count = chunk.end - chunk.begin
            pairs += count * chunk.begin + count * count / 2
        seconds += 4 * shape.heads * shape.head_dim * len(shape.windows) * pairs / _PROMPT_ATTENTION
        return seconds
