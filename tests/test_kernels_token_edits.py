"""The kernels that change single logits, against their references: random lists, random rows, rows of several kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support_kernels import DEVICE, kernel

from hf_batchllm.kernels.lists.token_edits import AT_ANY_LENGTH, Decays, Forced, History, Target, TargetLists
from hf_batchllm.kernels.reference import token_edits_torch
from hf_batchllm.kernels.triton import token_edits_triton

INF = float("inf")


class Case:
    """Rows of random tokens over a small alphabet, so that stretches repeat."""

    def __init__(self, seed: int, rows: int, vocabulary: int, longest: int, kinds: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.vocabulary, self.kinds, self.rows = vocabulary, kinds, rows
        letters = min(vocabulary, int(rng.choice([3, 7, vocabulary])))
        self.scores = torch.from_numpy(rng.normal(size=(rows, vocabulary + 2)).astype(np.float32))[:, :vocabulary]
        self.scores[rng.integers(0, rows), rng.integers(0, vocabulary)] = -INF
        self.of_prompt = rng.integers(1, longest + 1, rows).astype(np.int32)
        self.made = rng.integers(0, longest + 1, rows).astype([np.int32, np.int64][seed % 2])
        begin, tokens = [], []
        for _ in range(rows):
            begin.append(-1 if rng.random() < 0.15 else len(tokens))
            tokens += rng.integers(0, letters, 2 * longest + 2).tolist()
        tokens[int(rng.integers(0, len(tokens)))] = vocabulary + 5  # an id beyond the logits
        self.letters = letters
        self.begin, self.tokens = np.array(begin, dtype=np.int32), np.array(tokens, dtype=np.int32)
        self.which = rng.integers(0, kinds, rows).astype(np.int32) if kinds > 1 else None
        self.most = 2 * longest + 1

    def on(self, device: str) -> dict[str, Any]:
        def sent(array: np.ndarray | None) -> Any:
            return None if array is None else torch.from_numpy(array).to(device)

        history = History(
            torch.from_numpy(self.tokens.copy()).to(device),
            *map(sent, (self.begin, self.of_prompt, self.made)),
            self.most,
        )
        padded = torch.zeros(self.rows, self.vocabulary + 2, device=device)
        padded[:, : self.vocabulary] = self.scores.to(device)
        scores = padded[:, : self.vocabulary]
        return {"scores": scores, "which": sent(self.which), "made": history.made, "history": history}

    def targets(self) -> list[list[Target]]:
        rng = self.rng

        def sequences() -> dict[tuple[int, ...], float] | None:
            count = int(rng.integers(0, 4))
            made = {
                tuple(rng.integers(0, self.letters, int(rng.integers(1, 4))).tolist()): float(rng.normal())
                for _ in range(count)
            }
            return made or None

        kinds = []
        for _ in range(self.kinds):
            count = int(rng.integers(0, min(150, self.vocabulary)))
            tokens = rng.choice(self.vocabulary, count, replace=False).tolist()
            kinds.append(
                [
                    Target(
                        token,
                        float(rng.choice([-INF, 1.5, -0.25])),
                        int(rng.choice([AT_ANY_LENGTH, AT_ANY_LENGTH, 0, 2])),
                        sequences(),
                    )
                    for token in tokens
                ]
            )
        return kinds


def same(run: Any, case: Case) -> None:
    """``run`` is given a module and what it is to work on."""
    results = []
    for module, where in ((token_edits_torch, "cpu"), (token_edits_triton, DEVICE)):
        given = case.on(where)
        run(module, where, given)
        results.append((given["scores"].cpu(), given["history"].tokens.cpu()))
    assert torch.equal(results[0][0].nan_to_num(nan=7.0), results[1][0].nan_to_num(nan=7.0))
    assert torch.equal(results[0][1], results[1][1])


def check(seed: int, rows: int, vocabulary: int, longest: int, kinds: int) -> None:
    case = Case(seed, rows, vocabulary, longest, kinds)
    targets, rng = case.targets(), case.rng
    sizes = torch.from_numpy(rng.integers(0, 4, (2, kinds)).astype(np.int32))
    spare = int(rng.integers(0, 2))
    first = torch.from_numpy(rng.integers(-1, vocabulary, kinds).astype(np.int32))
    last = [[Target(int(token)) for token in rng.integers(0, vocabulary, count)] for count in rng.integers(0, 3, kinds)]
    at = [torch.from_numpy(rng.integers(-1, 3, rows).astype(np.int32)) for _ in range(2)]
    starts = torch.from_numpy(rng.integers(0, 4, kinds).astype(np.int32))
    growth = torch.from_numpy(rng.normal(size=(kinds, 5)).astype(np.float32))
    picked = torch.from_numpy(rng.integers(-1, vocabulary, rows))

    def edit(module: Any, where: str, given: dict[str, Any]) -> None:
        lists = TargetLists.of(targets, where, spare)
        module.edit_tokens(given["scores"], lists, given["which"], given["made"], given["history"])

    def ban(module: Any, where: str, given: dict[str, Any]) -> None:
        module.ban_repeats(given["scores"], sizes.to(where), given["which"], given["history"])

    def force(module: Any, where: str, given: dict[str, Any]) -> None:
        forced = Forced(first.to(where), TargetLists.of(last, where))
        lengths = [each.to(where) for each in at]
        module.force_tokens(given["scores"], forced, given["which"], given["made"], *lengths)

    def grow(module: Any, where: str, given: dict[str, Any]) -> None:
        ends = [[Target(token) for token in dict.fromkeys(target.token for target in some)] for some in last]
        decays = Decays(TargetLists.of(ends, where), starts.to(where), growth.to(where))
        module.grow_ends(given["scores"], decays, given["which"], given["made"])

    def append(module: Any, where: str, given: dict[str, Any]) -> None:
        module.append_tokens(given["history"], picked.to(where))

    for run in (edit, ban, force, grow, append):
        same(run, case)


@kernel
@pytest.mark.parametrize("kinds", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_edits(seed: int, kinds: int) -> None:
    check(seed, 4, [60, 97, 5003][seed % 3], [3, 12, 300][seed % 3], kinds)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(100))
def test_edits_natively(seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(
        seed,
        int(rng.integers(1, 40)),
        int(rng.choice([60, 5003, 151_936])),
        int(rng.choice([3, 40, 900])),
        1 + seed % 4,
    )


def test_nothing_to_do_is_nothing() -> None:
    case = Case(1, 3, 50, 4, 1)
    given = case.on("cpu")
    lists = TargetLists.of([[]], "cpu")
    token_edits_torch.edit_tokens(given["scores"], lists, None, given["made"], None)
    assert torch.equal(given["scores"], case.scores) and not lists.looks_back and lists.most == 0
    nobody = replace(given["history"], begin=torch.full((3,), -1, dtype=torch.int32))
    token_edits_torch.ban_repeats(given["scores"], torch.tensor([[2], [1]], dtype=torch.int32), None, nobody)
    assert torch.equal(given["scores"], case.scores)
