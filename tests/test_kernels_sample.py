"""The kernels of ``sample_triton`` against their plain references, and the references against what they are to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support_kernels import DEVICE, copies, draw, kernel, plain
from support_sampling_cases import PAGE, gap, keys, random_rows

from hf_batchllm.kernels.reference import sample_torch
from hf_batchllm.kernels.reference.sample_torch import FULL, NO_PAGE, NO_TOKEN, RUNNING, STOPPED, Rows
from hf_batchllm.kernels.triton import sample_triton

NAN = float("nan")


# -- greedy ----------------------------------------------------------------------------------------------------

VOCABULARIES = [1, 37, 512, 1500, 4096, 5003, 32000, 50257, 128256, 262144]


def check_greedy(seed: int, vocabulary: int, dtype: torch.dtype, most: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, most))
    logits = draw(rng, rows, vocabulary, dtype=dtype)
    kind = rng.integers(0, 4)
    if kind == 1:  # many equals, zeros of both signs among them
        logits = torch.where(logits > 0, 1.0, -0.0).to(dtype) * torch.from_numpy(rng.integers(0, 2, (rows, 1))).to(
            dtype
        )
    elif kind == 2:  # the best one stands twice, anywhere
        for row in range(rows):
            logits[row, torch.from_numpy(rng.integers(0, vocabulary, 2))] = 9.0
    elif kind == 3:
        logits[torch.from_numpy(rng.random(logits.shape) < 2 / vocabulary)] = NAN
        logits[torch.from_numpy(rng.random(logits.shape) < 2 / vocabulary)] = float("inf")
        logits[rng.integers(0, rows)] = -float("inf")
    got = sample_triton.greedy(logits.to(DEVICE), out=torch.full((rows,), -7, device=DEVICE))
    assert got.tolist() == sample_torch.greedy(logits).tolist()
    if kind != 3:
        assert got.tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("vocabulary", VOCABULARIES[:7])
@pytest.mark.parametrize("seed", range(4))
def test_greedy(vocabulary: int, seed: int) -> None:
    check_greedy(seed, vocabulary, [torch.float32, torch.float16][seed % 2], most=5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(300))
def test_greedy_native(case: int) -> None:
    dtype = torch.float32 if case % 7 == 0 else torch.bfloat16
    check_greedy(case, VOCABULARIES[case % 10], dtype, most=[2, 9, 40][case % 3])


# -- gumbel_sample ---------------------------------------------------------------------------------------------


def check_gumbel(seed: int, vocabulary: int, dtype: torch.dtype, most: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, most))
    logits = draw(rng, rows, vocabulary, dtype=dtype)
    if seed % 3 == 1:  # what a processor leaves of a vocabulary
        logits[torch.from_numpy(rng.random(logits.shape) < 0.9)] = -float("inf")
    temperature, given = float(rng.choice([0.3, 1.0, 2.5])), keys(rng, rows)
    if seed % 2:
        given["seed"] = torch.from_numpy(rng.integers(-(2**63), 2**63, rows))
    out = torch.full((rows,), -7, device=DEVICE)
    got = sample_triton.gumbel_sample(logits.to(DEVICE), temperature, **copies(given, DEVICE), out=out).cpu()
    want = sample_torch.gumbel_sample(logits, temperature, **given)
    for row in (got != want).nonzero().flatten().tolist():  # float32 may see two as equal
        assert gap(logits[row].double() / temperature, given, row, int(got[row]), int(want[row])) < 3e-5


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("vocabulary", [1, 37, 4096, 5003])
@pytest.mark.parametrize("seed", range(3))
def test_gumbel_sample(vocabulary: int, seed: int) -> None:
    check_gumbel(seed, vocabulary, [torch.float32, torch.float16][seed % 2], most=5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(300))
def test_gumbel_sample_native(case: int) -> None:
    dtype = torch.float32 if case % 7 == 0 else torch.bfloat16
    check_gumbel(case, VOCABULARIES[case % 10], dtype, most=[2, 4, 7][case % 3])


@kernel
def test_there_may_be_nothing_to_draw_from() -> None:
    logits = torch.zeros(5, 2100)
    logits[0, 3] = NAN
    logits[1, 2090] = float("inf")
    logits[2] = -float("inf")
    logits[3, 1:] = -float("inf")
    given = keys(np.random.default_rng(0), 5)
    for module, device in ((sample_torch, "cpu"), (sample_triton, DEVICE)):
        got = module.gumbel_sample(logits.to(device), 1.0, **copies(given, device)).tolist()
        assert got[:4] == [-1, -1, -1, 0]
        assert got[4] >= 0


@kernel
def test_noise_does_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(4)
    logits, given = draw(rng, 6, 2100, dtype=torch.float32), keys(rng, 6)

    def drawn(rows: list[int]) -> list[int]:
        some = {name: each if name == "seed" else each[rows] for name, each in given.items()}
        return sample_triton.gumbel_sample(logits[rows].to(DEVICE), 1.0, **copies(some, DEVICE)).tolist()

    every = drawn([0, 1, 2, 3, 4, 5])
    assert drawn([5, 2, 0]) == [every[5], every[2], every[0]]
    assert drawn([3]) == [every[3]]
    for name in ("seed", "prompt", "sample", "position"):
        before = given[name].clone()
        given[name] += 1
        assert drawn([0, 1, 2, 3, 4, 5]) != every, name
        given[name] = before


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def check_distribution(module: Any, rows: int, device: str, vocabulary: int = 30) -> None:
    """Draws at ``rows`` positions of a prompt, against the softmax: 30 tokens that are spread over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    some = torch.randperm(vocabulary, generator=generator)[:30]
    logits = torch.full((vocabulary,), -float("inf"))
    logits[some] = torch.linspace(-4, 3, 30)
    position = torch.arange(rows, device=device)
    same = torch.full_like(position, 5)
    tokens = module.gumbel_sample(
        logits.to(device).expand(rows, -1), 0.8, torch.tensor([11], device=device), same, same, position
    )
    number = torch.full((vocabulary,), -1)
    number[some] = torch.arange(30)
    tokens = number[tokens.cpu()]
    assert (tokens >= 0).all(), "a token of no probability"
    counts = torch.bincount(tokens, minlength=30).double()
    # 29 degrees of freedom: beyond 63 once in five thousand. The seed is fixed: it passes or it does not.
    assert chi_square(counts, torch.softmax(logits[some].double() / 0.8, 0)) < 63
    pairs = torch.bincount(tokens[:-1] * 30 + tokens[1:], minlength=900).double()
    frequency = counts / rows
    both = torch.outer(frequency, frequency).flatten()
    often = both * rows > 5
    assert (
        chi_square(pairs[often], both[often] / both[often].sum())
        < int(often.sum()) + 4.5 * (2 * int(often.sum())) ** 0.5
    )


@plain
def test_draws_follow_the_softmax() -> None:
    check_distribution(sample_torch, 100_000, "cpu")


@pytest.mark.gpu
def test_draws_follow_the_softmax_native() -> None:
    check_distribution(sample_triton, 4_000_000, "cuda")
    check_distribution(sample_triton, 400_000, "cuda", vocabulary=50_000)  # as good as each in a block of its own


@pytest.mark.gpu
def test_a_large_vocabulary_keeps_its_tail_native() -> None:
    """131,071 tokens of 2e-9 each beside one that has nearly all: noise of 24 bits would miss most of them."""
    rows, tail = 40_000, 131_071
    logits = torch.zeros(tail + 1, device="cuda")
    logits[1000] = 20.0
    position = torch.arange(rows, device="cuda")
    tokens = sample_triton.gumbel_sample(
        logits.expand(rows, -1), 1.0, torch.tensor([3], device="cuda"), position, position * 0, position
    )
    drawn = tokens[tokens != 1000]
    expected = rows * tail / (tail + float(torch.tensor(20.0).double().exp()))  # 10.8
    assert abs(len(drawn) - expected) < 4 * expected**0.5
    logits[1000] = 12.0  # half of the draws are of the tail
    tokens = sample_triton.gumbel_sample(
        logits.expand(rows, -1), 1.0, torch.tensor([3], device="cuda"), position, position * 0, position
    )
    drawn = tokens[tokens != 1000]
    share = tail / (tail + float(torch.tensor(12.0).double().exp()))
    assert abs(len(drawn) - rows * share) < 4 * (rows * share * (1 - share)) ** 0.5
    counts = torch.bincount(drawn.cpu() // 4096, minlength=32).double()
    size = torch.full((32,), 4096.0).double()
    size[0] -= 1
    assert chi_square(counts, size / size.sum()) < 66


@plain
def test_philox_is_philox() -> None:
    """The generator's published answers."""
    word = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((word,) * 4, (word,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, want in cases:
        given = [torch.tensor([each]) for each in (*counter, *key)]
        assert tuple(map(int, sample_torch.philox(*given))) == want
        assert tuple(map(int, np.concatenate(sample_torch.philox(*(each.numpy() for each in given))))) == want


@plain
def test_noise_is_never_0_or_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    for word in (0, 1, 0xFFFFFFFE, 0xFFFFFFFF):
        monkeypatch.setattr(sample_torch, "philox", lambda *_, word=word: [np.full(1, word)] * 4)
        noise = sample_torch.exponential(zero, zero, zero, zero, zero)
        assert 0 < float(noise) < 50


# -- advance ---------------------------------------------------------------------------------------------------

EOS = torch.tensor([2, 7, -1, -1])


def check_advance(seed: int, most: int, steps: int = 4) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, most))
    ours = random_rows(rng, count)
    theirs, ours = ours.to("cpu"), Rows(*(each.clone().to(DEVICE) for each in vars(ours).values()))
    for _ in range(steps):
        sampled = torch.from_numpy(rng.integers(-1 if rng.random() < 0.3 else 0, 12, count))
        sample_triton.advance(ours, sampled.to(DEVICE), EOS.to(DEVICE), PAGE)
        sample_torch.advance(theirs, sampled, EOS, PAGE)
        for name, want in vars(theirs).items():
            assert torch.equal(getattr(ours, name).cpu(), want), name


@kernel
@pytest.mark.parametrize("seed", range(6))
def test_advance(seed: int) -> None:
    check_advance(seed, most=200)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(300))
def test_advance_native(case: int) -> None:
    check_advance(case, most=[3, 80, 400][case % 3])


def one_row(**changes: Any) -> Rows:
    given = {
        "token": 5, "position": 10, "length": 11, "slot": 42, "made": 1, "remaining": 9, "status": RUNNING, "start": 8,
        "pages": [10, 3], "produced": [-7, -7],
    }  # fmt: skip
    wide = ("token", "position", "slot", "produced")
    return Rows(
        **{
            name: torch.tensor([value], dtype=torch.int64 if name in wide else torch.int32)
            for name, value in (given | changes).items()
        }
    )


@plain
def test_a_row_moves_on_until_it_ends() -> None:
    rows = one_row()
    sample_torch.advance(rows, torch.tensor([6]), EOS, PAGE)
    assert (int(rows.token), int(rows.position), int(rows.length), int(rows.slot)) == (6, 11, 12, 43)
    sample_torch.advance(rows, torch.tensor([8]), EOS, PAGE)
    assert (int(rows.token), int(rows.position), int(rows.slot)) == (8, 12, 12), "the first slot of its next page"
    assert rows.produced.tolist() == [[8, 6]], "the second and the third token"
    sample_torch.advance(rows, torch.tensor([7]), EOS, PAGE)
    assert (int(rows.status), int(rows.made), int(rows.slot), int(rows.token)) == (STOPPED, 4, -1, 8)
    assert int(rows.length) == 0, "it reads nothing more"
    assert rows.produced.tolist() == [[8, 7]], "the token that ends it is one of its tokens"
    frozen = one_row(**{name: value[0].tolist() for name, value in vars(rows).items()})
    sample_torch.advance(rows, torch.tensor([9]), EOS, PAGE)
    assert all(torch.equal(getattr(rows, name), value) for name, value in vars(frozen).items())


@plain
def test_how_a_row_ends() -> None:
    cases = [
        ({"remaining": 1}, 6, FULL), ({"remaining": 1}, 2, STOPPED), ({}, -1, NO_TOKEN),
        ({"position": 15, "length": 16}, 6, NO_PAGE), ({"pages": [10, -1], "position": 11, "length": 12}, 6, NO_PAGE),
    ]  # fmt: skip
    for changes, token, status in cases:
        rows = one_row(**changes)
        sample_torch.advance(rows, torch.tensor([token]), EOS, PAGE)
        assert (int(rows.status), int(rows.slot)) == (status, -1), changes
        assert int(rows.made) == (1 if status == NO_TOKEN else 2)
        moved = int(rows.position) - int(one_row(**changes).position)
        assert moved == (1 if status == NO_PAGE else 0), "without a page the token is kept: it is the next input"
