"""The rules of a beam search, held against the methods of transformers' own loop, score by score."""

from __future__ import annotations

import inspect
import random

import pytest
import torch
from transformers import GenerationMixin

from hf_batchllm.engine.beams.search_rules import NEVER, Searches, SearchRules

TOKENS = 12
_TAKES_VOCABULARY = "vocab_size" in inspect.signature(GenerationMixin._get_top_k_continuations).parameters  # 5.17


class Reference:
    """One search as ``GenerationMixin._beam_search`` has it, of candidates that are given."""

    def __init__(self, rules: SearchRules, longest: int) -> None:
        self.rules, self.longest = rules, longest
        width, shape = rules.width, (1, rules.width, longest)
        self.running_sequences = torch.full(shape, -1)
        self.sequences = self.running_sequences.clone()
        self.running = torch.zeros(1, width)
        self.running[:, 1:] = NEVER
        self.scores = torch.full((1, width), NEVER)
        self.finished = torch.zeros(1, width, dtype=torch.bool)
        self.improves = torch.ones(1, 1, dtype=torch.bool)
        self.indices = torch.full(shape, -1, dtype=torch.int32)
        self.running_indices = self.indices.clone()

    def step(self, made: int, accumulated: torch.Tensor, stops: set[int]) -> bool:
        rules, mixin = self.rules, GenerationMixin
        width = rules.width
        best, sequences, indices = mixin._get_top_k_continuations(
            mixin,
            accumulated_log_probs=accumulated,
            running_sequences=self.running_sequences,
            running_beam_indices=self.running_indices,
            cur_len=made,
            decoder_prompt_len=0,
            do_sample=False,
            beams_to_keep=rules.candidates,
            num_beams=width,
            batch_size=1,
            **({"vocab_size": TOKENS} if _TAKES_VOCABULARY else {}),
        )
        last = sequences[:, :, made]
        ends = torch.isin(last, torch.tensor(sorted(stops))) | (made + 1 >= self.longest)
        self.running_sequences, self.running, self.running_indices = mixin._get_running_beams_for_next_iteration(
            mixin, best, sequences, indices, ends, width
        )
        self.sequences, self.scores, self.indices, self.finished = mixin._update_finished_beams(
            mixin,
            sequences=self.sequences,
            topk_running_sequences=sequences,
            beam_scores=self.scores,
            topk_log_probs=best,
            beam_indices=self.indices,
            topk_running_beam_indices=indices,
            is_early_stop_heuristic_unsatisfied=self.improves,
            is_sent_finished=self.finished,
            next_token_hits_stopping_criteria=ends,
            top_num_beam_mask=torch.arange(rules.candidates) < width,
            num_beams=width,
            cur_len=made,
            decoder_prompt_len=0,
            length_penalty=rules.length_penalty,
            early_stopping=rules.early_stopping,
        )
        self.improves = mixin._check_early_stop_heuristic(
            self.improves,
            self.running,
            self.scores,
            self.finished,
            made + 1,
            self.longest,
            0,
            rules.early_stopping,
            rules.length_penalty,
        )
        return not mixin._beam_search_has_unfinished_sequences(self.improves, self.finished, ends, rules.early_stopping)


def scores_of(rng: random.Random, width: int) -> torch.Tensor:
    """[width, tokens] log-probabilities; now and then hardly any token is allowed, so that there are many equals."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    scores = (torch.randn(width, TOKENS, generator=generator) * rng.choice([0.5, 3.0])).log_softmax(-1)
    if rng.random() < 0.3:
        allowed = rng.sample(range(TOKENS), rng.choice([1, 1, 2, 4]))
        mask = torch.ones(TOKENS, dtype=torch.bool)
        mask[allowed] = False
        scores = scores.masked_fill(mask, -torch.inf)
    return scores


@pytest.mark.some_cases
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -1.0])
def test_searches_side_by_side_go_as_transformers_has_each_go_alone(early_stopping: bool | str, penalty: float) -> None:
    rng = random.Random(f"{early_stopping}{penalty}")
    for _ in range(25):
        width, stops = rng.randrange(2, 6), set(rng.sample(range(TOKENS), rng.randrange(0, 4)))
        rules = SearchRules.of(width, len(stops), early_stopping, penalty)
        if rules.candidates > width * TOKENS:
            continue
        longest = [rng.randrange(1, 9) for _ in range(4)]
        searches, references = Searches(rules, longest), [Reference(rules, length) for length in longest]
        made, going = [0] * 4, [0, 1, 2, 3]
        tokens = [[[] for _ in range(width)] for _ in range(4)]
        answers = [[[] for _ in range(width)] for _ in range(4)]
        while going:
            some = sorted(rng.sample(going, rng.randrange(1, len(going) + 1)))  # they need not be in step
            given = [scores_of(rng, width) for _ in some]
            for place, each in enumerate(some):
                if made[each] == 0:
                    given[place] = given[place][:1].expand(width, -1)
                given[place] = (given[place] + searches.running[each, :, None]).flatten()
            sums = torch.stack(given)
            best, index = sums.topk(rules.candidates)
            picked = index % TOKENS
            ends = torch.isin(picked, torch.tensor(sorted(stops), dtype=torch.long))
            ends |= torch.tensor([made[each] + 1 >= longest[each] for each in some])[:, None]
            choice = searches.step(some, [made[each] for each in some], best, ends)
            for place, each in enumerate(some):
                reference = references[each]
                over = reference.step(made[each], sums[place : place + 1], stops)
                found = [
                    [*tokens[each][parent], token]
                    for parent, token in zip((index[place] // TOKENS).tolist(), picked[place].tolist(), strict=True)
                ]
                before = answers[each]
                answers[each] = [before[at] if at < width else found[at - width] for at in choice.answers[place]]
                tokens[each] = [found[at] for at in choice.running[place]]
                made[each] += 1
                assert over == choice.over[place]
                assert torch.equal(reference.running[0], searches.running[each])
                assert torch.equal(reference.scores[0], searches.scores[each])
                assert torch.equal(reference.finished[0], searches.finished[each])
                assert reference.running_sequences[0, :, : made[each]].tolist() == tokens[each]
                for row, own in zip(reference.sequences[0].tolist(), answers[each], strict=True):
                    assert row == own + [-1] * (longest[each] - len(own))
                if over:
                    going.remove(each)
