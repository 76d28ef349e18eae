"""Attributes that objects of other libraries have: what to write instead. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from ..wording import did_you_mean

OF_A_GENERATION = {
    "outputs": "a Generation is one answer: its text is `.text`. All answers to prompt i are result.by_prompt[i]",
    "cumulative_logprob": "with `logprobs=0` it is sum(p[t] for t, p in zip(g.token_ids, g.logprobs))",
    "stop_reason": "see `.finish_reason`; a token that ended it is `.token_ids[-1]`",
    "request_id": "the prompt's place in the list is `.index`",
    "generated_text": "it is called `.text` here",
}
OF_A_RESULT = {
    "outputs": "result[i] is an answer with `.text`, and result.by_prompt[i] holds all answers to prompt i",
    "text": "all of them are `.texts`, and one is result[i].text",
    "sequences": "the new tokens are `.token_ids`; tensors come back where tensors are passed",
}
OF_A_GENERATOR = {
    "chat": "generate() takes chats, as lists of messages: gen.generate(chats)",
    "get_tokenizer": "it is `.tokenizer`, without a call",
    "set_tokenizer": "pass it when it is made: BatchGenerator(model, tokenizer)",
    "beam_search": "generate() has beams: gen.generate(prompts, num_beams=4)",
    "generate_batch": "generate() takes a list of prompts: gen.generate(prompts)",
    "run_file": "it is a function: hf_batchllm.run_file(gen, source, target)",
}
OF_THE_PACKAGE = {
    "LLM": "it is BatchGenerator(model), with a transformers model that you have loaded (docs/from-vllm.md)",
    "SamplingParams": "options are keyword arguments of generate(), or a GenerationConfig (docs/from-vllm.md)",
}


def no_such(owner: object, name: str, instead: Mapping[str, str]) -> AttributeError:
    """The error of a ``__getattr__``: with what to write instead, if the name is one from elsewhere."""
    of_class = getattr(type(owner), name, None)
    if isinstance(of_class, property):
        of_class.__get__(owner)  # its own AttributeError says more, and is raised once more
    known = [each for each in dir(type(owner)) if not each.startswith("_")]
    hint = f": {instead[name]}" if name in instead else did_you_mean(name, known, cutoff=0.8, form="'{}'")
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=owner)
