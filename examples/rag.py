"""Questions over shared documents (RAG): plan first, then answer, then ask more about the same documents.

    python examples/rag.py          # the model needs the extra `demo`; half a minute on one CPU core

What to copy: put pages *before* questions in the prompts, so that questions share them; ``gen.plan`` shows beforehand
what that saves; ``keep_prefixes`` keeps the pages for the next round of questions.
"""

from __future__ import annotations

import re

from small_model import load

from hf_batchllm import BatchGenerator, BatchResult

PAGES = [
    "The Brisa is a coffee machine for small kitchens. It was designed in Lisbon by Ana Reis, weighs four kilograms "
    "and is sold in red, white and black. The tank holds one litre, which is enough for eight cups. A cup takes thirty "
    "seconds. The jug is made of glass, and a steel jug can be ordered. The cable is two metres long.",
    "Clean the Brisa every two months with citric acid. Fill the tank, add one sachet and hold the steam button for "
    "five seconds; the programme takes twenty minutes. Never use vinegar, because it attacks the seals. The drip tray "
    "may go into the dishwasher. When the red lamp blinks, the tank is empty. The filter lasts for sixty litres.",
    "Orders leave our warehouse in Porto on the same day. Delivery to Spain takes five days and costs nine euros. The "
    "warranty is three years. Repairs are made by our workshop in Braga and take ten days. You can send the machine "
    "back within thirty days; coffee beans cannot be returned. Questions are answered by Maria Sousa.",
]

# A question, how its answer begins (a base model continues a text), and what should come next.
QUESTIONS = [
    ("Who designed the machine?", "It was designed by", "Ana Reis"),
    ("How long is the warranty?", "The warranty is", "three years"),
    ("How long does the programme take?", "The programme takes", "twenty minutes"),
    ("Which colours is it sold in?", "It is sold in", "red, white and black"),
    ("What attacks the seals?", "The seals are attacked by", "vinegar"),
    ("Where are repairs made?", "Repairs are made in", "Braga"),
    ("How long is the cable?", "The cable is", "two metres"),
    ("Where is the warehouse?", "The warehouse is in", "Porto"),
    ("What does the red lamp say when it blinks?", "When the red lamp blinks,", "the tank is empty"),
    ("How many cups is the tank enough for?", "It is enough for", "eight cups"),
    ("How long does the filter last?", "The filter lasts for", "sixty litres"),
    ("How long does delivery to Spain take?", "Delivery to Spain takes", "five days"),
]
MORE = [  # asked later
    ("How many kilograms does it weigh?", "It weighs", "four kilograms"),
    ("What should I clean it with?", "You should clean it with", "citric acid"),
    ("Who are questions answered by?", "They are answered by", "Maria Sousa"),
]

INSTRUCTION = """\
Answer each question with words of the page.

Page: The town library opens at nine and closes at six. A card costs five euros a year. Dogs have to wait outside.
Question: When does the library open?
Answer: It opens at nine.
Question: What does a card cost?
Answer: A card costs five euros a year.

"""


def retrieve(question: str) -> str:
    """A stand-in for your own retriever: the page that shares the most long words with the question."""

    def long_words(text: str) -> set[str]:
        return set(re.findall(r"\w{5,}", text.lower()))

    return max(PAGES, key=lambda page: len(long_words(page) & long_words(question)))


def page_first(question: str, beginning: str) -> str:
    return f"{INSTRUCTION}Page: {retrieve(question)}\nQuestion: {question}\nAnswer: {beginning}"


def question_first(question: str, beginning: str) -> str:
    return f"{INSTRUCTION}Question: {question}\nPage: {retrieve(question)}\nAnswer: {beginning}"


def show(asked: list[tuple[str, str, str]], result: BatchResult) -> None:
    for (question, beginning, expected), answer in zip(asked, result, strict=True):
        mark = " " if expected in (answer.text or "") else "?"
        print(f"  {mark} {question:<44}{beginning}{(answer.text or '').rstrip()}")
    found = sum(expected in (answer.text or "") for (*_, expected), answer in zip(asked, result, strict=True))
    print(f"  {found} of {len(asked)} answers are what the page says\n")


def main() -> None:
    model, tokenizer = load()
    with BatchGenerator(model, tokenizer, keep_prefixes=16) as gen:
        print("\nThe plan, which runs no model: what would sharing save?")
        for layout in (question_first, page_first):
            plan = gen.plan([layout(question, beginning) for question, beginning, _ in QUESTIONS])
            share = f"{plan.computed_tokens:6,} of {plan.total_tokens:,} tokens to compute ({plan.saving:.0%} saved)"
            print(f"  {layout.__name__:<16}{share}")

        ends = tokenizer.convert_tokens_to_ids([".", "\n", "\n\n"])  # an answer is a sentence
        options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": ends}
        result = gen.generate([page_first(question, beginning) for question, beginning, _ in QUESTIONS], **options)
        print(f"\n{len(QUESTIONS)} questions about {len(PAGES)} pages, all at once")
        show(QUESTIONS, result)
        print(result.report)

        prompts = [page_first(question, beginning) for question, beginning, _ in MORE]
        again = gen.generate(prompts, **options)
        print(f"\n{len(MORE)} more questions, later: the pages are still there")
        show(MORE, again)
        report = again.report
        alone = gen.plan(prompts).computed_tokens
        print(f"  {report.computed_tokens} prompt tokens computed; {alone} without those kept, ", end="")
        print(f"{report.prompt_tokens} without any sharing")


if __name__ == "__main__":
    main()
