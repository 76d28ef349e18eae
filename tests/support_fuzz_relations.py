"""What makes no difference to a prompt's results: each relation runs the prompts of a case in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import support_fuzz_models as models
import torch
from support_families import logits_of_rows
from support_fuzz_bench import Bench, Rows, close
from support_fuzz_calls import Calls, Mismatch, by_ask, expect, without
from support_fuzz_cases import Ask, as_invariant, draw_config, draw_prompts
from support_fuzz_exactness import is_as_exact_as_the_model
from support_fuzz_oracle import NEAR_TIE, Oracle

from hf_batchllm import BatchGenerator, Generation

PAD = 3  # a search of `generate` takes 0 for none


# -- other places in the list ----------------------------------------------------------------------------------


def permuted(bench: Bench) -> None:
    order = list(range(len(bench.case.asks)))
    bench.dice.shuffle(order)
    asks = [bench.case.asks[index] for index in order]
    bench.same(asks, bench.calls.rows(asks), order, f"in the order {order}")


def split(bench: Bench) -> None:
    """In two calls, of one generator or of two; or each prompt in a call of its own."""
    every = bench.case.asks
    at = bench.dice.randint(0, len(every))
    parts = [range(at), range(at, len(every))] if bench.dice.random() < 0.6 else [[each] for each in range(len(every))]
    generator = (
        bench.calls.generator(without(bench.case.config, "kv_pages"), every) if bench.dice.random() < 0.5 else None
    )
    for part in filter(None, parts):
        asks = [every[index] for index in part]
        bench.same(asks, bench.calls.rows(asks, generator), list(part), f"the part {list(part)}")
    if generator is not None:
        generator.close()


def strangers(bench: Bench) -> None:
    """Other prompts stand between them, some of which begin as they do."""
    case, dice = bench.case, bench.dice
    among: list[tuple[Ask, int | None]] = [(ask, index) for index, ask in enumerate(case.asks)]
    others = draw_prompts(dice) + [[*dice.choice(case.asks).ids, dice.randrange(97)] for _ in range(3)]
    for ids in others:
        like = dice.choice(case.asks)
        longest = case.options_of(like).get("max_length", 10**6)
        stranger = replace(like, ids=ids[: longest - 1], seed=dice.randrange(2**32))
        among.insert(dice.randint(0, len(among)), (stranger, None))
    rows = bench.calls.rows([ask for ask, _ in among])
    kept = [(ask, row, index) for (ask, index), row in zip(among, rows, strict=True) if index is not None]
    asks, found, of = (list(each) for each in zip(*kept, strict=True))
    bench.same(asks, found, of, f"among {len(others)} strangers")


def duplicates(bench: Bench) -> None:
    """Some prompts stand in the list twice or more, with the same seed."""
    of = [index for index in range(len(bench.case.asks)) for _ in range(bench.dice.choice((1, 2, 2, 4)))]
    bench.dice.shuffle(of)
    asks = [bench.case.asks[index] for index in of]
    bench.same(asks, bench.calls.rows(asks), of, f"in the list {of}")


def record(bench: Bench) -> None:
    """Prompts that cannot be run stand between them, and are named in their rows."""
    dice, of = bench.dice, list(range(len(bench.case.asks)))
    asks, places = list(bench.case.asks), of
    for bad in ([], [101_000], [5, -3]):
        at = dice.randint(0, len(asks))
        asks.insert(at, replace(dice.choice(bench.case.asks), ids=bad))
        places = [*places[:at], -1, *places[at:]]
    with bench.calls.generator(without(bench.case.config, "kv_pages"), asks) as generator:
        result = generator.generate(**bench.calls.arguments(asks), on_error="record")
    rows: Rows = [[] for _ in asks]
    for generation in result:
        rows[generation.index].append(generation)
    for row, place in zip(rows, places, strict=True):
        expect(bool(row), "a prompt has no row")
        wrong = [each.error is not None and each.finish_reason == "error" for each in row]
        expect(all(wrong) if place < 0 else not any(wrong), f"errors of prompt {place}: {[each.error for each in row]}")
    good = [at for at, place in enumerate(places) if place >= 0]
    bench.same([asks[at] for at in good], [rows[at] for at in good], [places[at] for at in good], "among bad prompts")


# -- another way to run ----------------------------------------------------------------------------------------


def settings(bench: Bench) -> None:
    """Other budgets, pages, memory, schedulers, backends; sharing or not."""
    case = bench.case
    for _ in range(2):
        config = draw_config(bench.dice, case.device, case.device_loop, case.kind == "beams", case.tokens)
        if not case.device_loop and case.device == "cpu" and case.kind != "greedy":
            config.pop("steps_per_sync", None)
        if "invariant" in case.config:
            config = as_invariant(config, case.device, case.device_loop)
        with bench.calls.generator(config, case.asks) as generator:
            rows = bench.calls.rows(case.asks, generator)
        bench.same(case.asks, rows, range(len(rows)), f"with {config}")


def kept(bench: Bench) -> None:
    """Several calls in a row whose prefixes are kept; between two of them the weights may change in place."""
    case, dice = bench.case, bench.dice
    peft = case.family.startswith(models.PEFT)
    model = bench.calls.model if peft else models.changeable(case.family, case.device)
    calls, config = Calls(case, model), {**case.config, "keep_prefixes": dice.randint(1, 6)}
    config |= {"min_shared_tokens": dice.choice((0, 1, 4))}
    all_of_them = list(range(len(case.asks)))
    with calls.generator(without(config, "kv_pages"), case.asks) as generator:
        for number in range(dice.randint(2, 4)):
            of = all_of_them
            if case.one_seed is None or case.kind == "greedy":
                of = dice.sample(all_of_them, dice.randint(1, len(all_of_them)))
            asks = [case.asks[index] for index in of]
            bench.same(asks, calls.rows(asks, generator), of, f"call {number} with kept prefixes")
        if peft or dice.random() < 0.4:
            return
        changed = _change(model, dice)
        try:
            rows = calls.rows(case.asks, generator)
            oracle = Oracle(case, model)
            for index in dice.sample(all_of_them, min(3, len(all_of_them))):
                bench.ties += oracle.check(index, case.asks[index], rows[index])
        except Mismatch as error:
            raise Mismatch(f"after {changed[0]} was changed in place: {error}") from error
        finally:
            _change_back(changed)
        bench.same(case.asks, calls.rows(case.asks, generator), all_of_them, "after a weight was changed back")


@torch.no_grad()
def _change(model: Any, dice: Random) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The name of a weight, the weight, and what it was."""
    name, weight = dice.choice([pair for pair in model.named_parameters() if pair[1].ndim > 1])
    before = weight.detach().clone()
    way = dice.choice(("mul", "data", "copy", "row"))
    if way == "mul":
        weight.mul_(1.3)
    elif way == "data":
        weight.data.add_(0.05 * before.std())
    elif way == "copy":
        weight.data.copy_(before.flip(0))
    else:
        weight[0].neg_()
    return f"{name} ({way})", weight, before


@torch.no_grad()
def _change_back(changed: tuple[str, torch.Tensor, torch.Tensor]) -> None:
    changed[1].copy_(changed[2])


def stream(bench: Bench) -> None:
    """Each result as it is finished; before that, sometimes, a stream that is left in the middle."""
    case = bench.case
    with bench.calls.generator(case.config, case.asks) as generator:
        if bench.dice.random() < 0.5:
            left = generator.stream(**bench.calls.arguments(case.asks))
            for _ in range(bench.dice.randint(0, len(case.asks))):
                next(left, None)
            left.close()
        finished = list(_interleaved(bench, generator.stream(**bench.calls.arguments(case.asks))))
    finished.sort(key=lambda each: (each.index, each.sample))
    bench.same(case.asks, by_ask(case.asks, finished), range(len(case.asks)), "as a stream")


def _interleaved(bench: Bench, results: Iterator[Generation]) -> Iterator[Generation]:
    """Between two results, sometimes, the model's user calls ``generate``, or another generator of the same model."""
    case, dice = bench.case, bench.dice
    for result in results:
        yield result
        if dice.random() < 0.15:
            index = dice.randrange(len(case.asks))
            bench.ties += bench.oracle.check(index, case.asks[index], bench.base[index])
        if dice.random() < 0.1:
            rows = bench.calls.rows(case.asks)
            bench.same(case.asks, rows, range(len(rows)), "beside an open stream")


def forms(bench: Bench) -> None:
    """Prompts as text, as tensors and as lists, or from an iterator."""
    case, dice = bench.case, bench.dice
    ways: list[Callable[[list[int]], Any]] = [
        models.as_text, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32), list, tuple,
    ]  # fmt: skip
    prompts: Any = [dice.choice(ways[:4])(ask.ids) for ask in case.asks]
    if dice.random() < 0.3:
        prompts = iter(prompts) if dice.random() < 0.5 else tuple(prompts)
    with bench.calls.generator(case.config, case.asks) as generator:
        result = generator.generate(**bench.calls.arguments(case.asks, prompts))
    bench.same(case.asks, by_ask(case.asks, result), range(len(case.asks)), "in other forms")


# -- other doors -----------------------------------------------------------------------------------------------


def _padded(bench: Bench, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    every = [ask.ids for ask in bench.case.asks]
    width = max(map(len, every))
    ids, mask = torch.zeros(len(every), width, dtype=torch.long), torch.zeros(len(every), width, dtype=torch.long)
    for row, own in enumerate(every):
        begin = 0 if side == "right" else width - len(own)
        ids[row, begin : begin + len(own)] = torch.tensor(own)
        mask[row, begin : begin + len(own)] = 1
    return ids.to(bench.case.device), mask.to(bench.case.device)


def _tensor_arguments(bench: Bench) -> dict[str, Any] | None:
    """None where lengths count the padding, or endings are looked for in it, so that other results are right."""
    arguments = bench.calls.arguments(bench.case.asks)
    lengths = {len(ask.ids) for ask in bench.case.asks}
    if len(lengths) > 1 and arguments.keys() & {"max_length", "min_length", "stopping_criteria", "stop_strings"}:
        return None
    for name in ("prompts", "progress", "logprobs", "prompt_logprobs"):
        arguments.pop(name, None)
    return arguments | {"pad_token_id": PAD}


def _same_tokens(bench: Bench, sequences: torch.Tensor, width: int, base: Rows, what: str) -> None:
    rows = [row for each in base for row in each]
    expect(len(sequences) == len(rows), f"{what}: {len(sequences)} rows, and {len(rows)} before")
    made = sequences[:, width:].tolist()
    expect(max(len(row.token_ids) for row in rows) == sequences.shape[1] - width, f"{what}: {sequences.shape}")
    # A search of ``generate`` that has no EOS fills up with -1, whatever the padding is.
    fill = -1 if bench.case.kind == "beams" and "eos_token_id" not in bench.case.options else PAD
    for row, tokens in zip(rows, made, strict=True):
        padded = row.token_ids + [fill] * (len(tokens) - len(row.token_ids))
        if tokens == padded:
            continue
        ask = bench.case.asks[row.index]
        if len(base[row.index]) == 1 and bench.oracle.check(row.index, ask, [row]):
            bench.ties += 1
            continue
        raise Mismatch(f"{what}: prompt {row.index} gave {tokens} and before {row.token_ids}")


def tensors(bench: Bench) -> None:
    arguments = _tensor_arguments(bench)
    if arguments is None:
        return stream(bench)
    ids, mask = _padded(bench, bench.dice.choice(("left", "right")))
    more: dict[str, Any] = {}
    if bench.dice.random() < 0.4:
        more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with bench.calls.generator(bench.case.config, bench.case.asks) as generator:
        out = generator.generate(input_ids=ids, attention_mask=mask, **arguments, **more)
    if more:
        steps = out.sequences.shape[1] - ids.shape[1]
        beams = bench.case.kind == "beams"  # whose search may go on beyond its answers
        for each in (out.scores, out.logits):
            expect(len(each) >= steps if beams else len(each) == steps, f"{len(each)} scores, and {steps} steps")
        out = out.sequences
    return _same_tokens(bench, out, ids.shape[1], bench.base, "as tensors")


def accelerated(bench: Bench) -> None:
    from hf_batchllm import accelerated as accelerate

    arguments = _tensor_arguments(bench)
    if arguments is None:
        return stream(bench)
    arguments.pop("seed", None)
    ids, mask = _padded(bench, "left")
    case, base = bench.case, bench.base
    torch.manual_seed(bench.dice.randrange(2**32))
    with accelerate(bench.calls.model, models.words(), **without(case.config, "kv_pages")) as model:
        out = model.generate(input_ids=ids, attention_mask=mask, **arguments)
        report = model.generate.last_report
    if report is None:  # the model's own generate ran
        return None
    if case.options.get("do_sample"):
        seeded = replace(case, one_seed=report.seed)
        calls = Calls(seeded)
        with calls.generator(without(case.config, "kv_pages"), case.asks) as generator:
            base = calls.rows(case.asks, generator)
        bench = replace(bench, case=seeded, calls=calls, oracle=Oracle(seeded))
    return _same_tokens(bench, out, ids.shape[1], base, "under accelerated()")


def score(bench: Bench) -> None:
    """The results' own tokens, looked up after their prompts: what ``generate`` says of them."""
    case = bench.case
    if case.kind == "beams" or any("guidance_scale" in case.options_of(ask) for ask in case.asks):
        return stream(bench)
    options = {name: value for name, value in case.options.items() if name != "prompt_logprobs"} | {"logprobs": 0}
    calls = Calls(replace(case, options=options))
    with bench.calls.generator(without(case.config, "kv_pages"), case.asks) as generator:
        found = calls.rows(case.asks, generator)
        bare = [[_bare(each, bench.base) for each in row] for row in found]
        bench.same(case.asks, bare, range(len(found)), "again")
        more = {"adapter": [ask.adapter for ask in case.asks]} if case.family.startswith(models.PEFT) else {}
        several = [[each.token_ids for each in row] for row in found]
        scores = iter(generator.score([ask.ids for ask in case.asks], several, progress=False, **more))
        _score_others(bench, generator, more)
    for row in found:
        for one in row:
            looked_up = next(scores)
            expect(looked_up.token_ids == one.token_ids, f"score() looked up {looked_up.token_ids}")
            own = [step[token] for step, token in zip(one.logprobs or [], one.token_ids, strict=True)]
            _expect_close(bench, case.asks[one.index], one.token_ids, looked_up.logprobs, own, "generate")
    return None


def _score_others(bench: Bench, generator: BatchGenerator, more: dict[str, Any]) -> None:
    """Continuations at random, against one plain forward over each with its prompt."""
    case, dice = bench.case, bench.dice
    several = [[[dice.randrange(97) for _ in range(dice.choice((1, 1, 2, 6)))] for _ in range(3)] for _ in case.asks]
    scores = iter(generator.score([ask.ids for ask in case.asks], several, progress=False, **more))
    if models.HALVED:  # another forward pass is too far away
        return _score_alone(bench, generator, several, scores, more)
    for ask, continuations in zip(case.asks, several, strict=True):
        with models.as_its_user_runs_it(case.family, case.device, ask.adapter) as model:
            every = logits_of_rows(model, [ask.ids + continuation for continuation in continuations])
        for continuation, logits in zip(continuations, every, strict=True):
            found, raw = next(scores), logits[len(ask.ids) - 1 : -1].float().cpu()
            targets = torch.tensor(continuation)
            own = raw.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0].tolist()
            _expect_close(bench, ask, continuation, found.logprobs, own, "a forward pass")
            best = raw.topk(2, dim=-1).values
            if float((best[:, 0] - best[:, 1]).min()) > bench.rough * NEAR_TIE:
                greedy = bool((raw.argmax(dim=-1) == targets).all())
                expect(found.is_greedy == greedy, f"is_greedy is {found.is_greedy} of {continuation} after {ask.ids}")
    return None


def _score_alone(
    bench: Bench, generator: BatchGenerator, several: list[list[list[int]]], scores: Iterator[Any], more: dict[str, Any]
) -> None:
    """The same continuations, each by itself."""
    for place, (ask, continuations) in enumerate(zip(bench.case.asks, several, strict=True)):
        own = {name: [each[place]] for name, each in more.items()}
        for continuation in continuations:
            found = next(scores)
            (alone,) = generator.score([ask.ids], [[continuation]], progress=False, **own)
            now, then = ((each.logprobs, each.is_greedy) for each in (alone, found))
            expect(now == then, f"score() gives {now} of {continuation} alone, and {then} in a list")


def _expect_close(
    bench: Bench, ask: Ask, of: Sequence[int], found: Sequence[Any], own: Sequence[Any], whose: str
) -> None:
    if whose == "generate" and bench.case.exact:
        expect(list(own) == list(found), f"score() gives {found} and {whose} {own}")
    if not close(own, found, bench.rough):
        both = (is_as_exact_as_the_model(bench.case, ask, of, each) for each in (found, own))
        expect(all(both), f"score() gives {found} and {whose} {own}")
        bench.ties += 1


def _bare(row: Generation, base: Rows) -> Generation:
    """With the log-probabilities that the first call was asked for, and no others."""
    asked = base[row.index][row.sample]
    return replace(row, logprobs=asked.logprobs, prompt_logprobs=asked.prompt_logprobs)


RELATIONS: dict[str, Callable[[Bench], None]] = {
    each.__name__: each
    for each in (
        permuted, split, strangers, duplicates, record, settings, kept, stream, forms, tensors, accelerated, score,
    )
}  # fmt: skip
