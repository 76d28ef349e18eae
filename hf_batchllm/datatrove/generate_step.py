"""``GenerateStep``: documents in, documents with answers in their metadata out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from ..config import BatchConfig
from ..errors import ConfigError
from ..files.records.templates import MissingField, Template
from ..generator import BatchGenerator
from ..pool.loaders import load_in_worker, loader_for, sendable_tokenizer
from ..results.generations import Generation
from ..wording import a_kind, is_whole, shown

Prompt = str | list[int] | list[dict[str, Any]]  # a text, token ids or a chat


class GenerateStep(PipelineStep):
    """Generates for each document, and puts the answer into ``document.metadata[into]``.

        pipeline = [JsonlReader("in/"), GenerateStep("path/or/name", max_new_tokens=100), JsonlWriter("out/")]

    model: a path or name for ``from_pretrained``, or a function that loads the model and returns it (or the model and
        its tokenizer). Each task of datatrove's loads its own, once it has a document.
    prompt: a template over the document's text, id and metadata, as in "{text}\\n\\nSummary:", or a function from the
        document to its prompt; by default the text.
    chat, system: prompts that are text become a user's message, after this system message if there is one.
    into: the name in the metadata. There is a dict with ``text``, ``finish_reason``, ``prompt_tokens`` and
        ``new_tokens``, or with ``error``; with several samples there is a list of them.
    window: how many documents run together. Prompts share their beginnings within a window.
    seed: of the sampling noise. A document's depends on it and on the document's id, so it is the same in whichever
        task the document runs.
    tokenizer, config, model_options, options: as for GeneratorPool, and for ``BatchGenerator.generate``.
    """

    name = "hf-batchllm"
    type = "Generation"

    def __init__(
        self,
        model: str | os.PathLike[str] | Callable[[], Any],
        tokenizer: Any = None,
        *,
        prompt: str | Callable[[Document], Prompt] | None = None,
        chat: bool = False,
        system: str | None = None,
        into: str = "generation",
        window: int = 8192,
        seed: int | None = None,
        config: BatchConfig | None = None,
        model_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._load = loader_for(model, model_options, "GenerateStep({})")
        self._tokenizer = sendable_tokenizer(tokenizer)
        if isinstance(prompt, str):
            self._template: Template | None = Template(prompt)
        elif prompt is None or callable(prompt):
            self._template = None
        else:
            raise ConfigError(f"`prompt` is {a_kind(prompt)}: it is a template, or a function of a document")
        self._prompt = prompt
        self._chat, self._system = chat or system is not None, system
        if not is_whole(window) or window < 1:
            raise ConfigError(f"`window` is {shown(window)}: it is a whole number of documents, at least 1")
        if seed is not None and not is_whole(seed):
            raise ConfigError(f"`seed` is {shown(seed)}: it is a whole number")
        self._into, self._window, self._seed = into, window, seed
        self._config, self._options = BatchConfig.of(config, {}), options
        self._gen: BatchGenerator | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A task gets a copy, which loads a model of its own."""
        return {**self.__dict__, "_gen": None}

    def run(self, data: Iterator[Document] | None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        documents = iter(data or ())
        try:
            while some := list(islice(documents, self._window)):
                yield from self._answered(some)
        finally:
            if self._gen is not None:
                self._gen.close()
                self._gen = None

    def _answered(self, documents: Sequence[Document]) -> Iterator[Document]:
        if self._gen is None:
            with self.track_time("model"):
                device = "cuda" if torch.cuda.is_available() else "cpu"
                self._gen = BatchGenerator(*load_in_worker(self._load, self._tokenizer, device), self._config)
        prompts: dict[int, Prompt] = {}
        for place, document in enumerate(documents):
            try:
                prompts[place] = self._prompt_of(document)
            except MissingField as problem:
                document.metadata[self._into] = {"error": f"this document {problem}"}
        places, seed = list(prompts), self._seed
        seeds = None if seed is None else [_seed_of(seed, documents[place].id) for place in places]
        with self.track_time("window"):
            results = self._gen.generate(
                list(prompts.values()), seed=seeds, on_error="record", progress=False, **self._options
            )
        found: dict[int, list[dict[str, Any]]] = {}
        for result in results:
            found.setdefault(places[result.index], []).append(_as_dict(result))
            self.stat_update("errors" if result.error is not None else "answers")
            self.stat_update("prompt_tokens", value=len(result.prompt_token_ids))
            self.stat_update("new_tokens", value=len(result.token_ids))
        for place, answers in found.items():
            documents[place].metadata[self._into] = answers[0] if len(answers) == 1 else answers
        yield from documents

    def _prompt_of(self, document: Document) -> Prompt:
        if self._template is not None:
            made: Any = self._template.fill({**document.metadata, "text": document.text, "id": document.id})
        else:
            made = self._prompt(document) if callable(self._prompt) else document.text
        if not self._chat or not isinstance(made, str):
            return made  # type: ignore[no-any-return]
        before = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*before, {"role": "user", "content": made}]


def _seed_of(seed: int, document_id: str) -> int:
    digest = hashlib.blake2b(f"{seed} {document_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _as_dict(result: Generation) -> dict[str, Any]:
    if result.error is not None:
        return {"error": result.error}
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": len(result.prompt_token_ids),
        "new_tokens": len(result.token_ids),
    }
