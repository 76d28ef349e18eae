"""A step of a datatrove pipeline that generates: ``GenerateStep``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

try:
    from datatrove.data import Document
    from datatrove.pipeline.base import PipelineStep
except ModuleNotFoundError as gone:
    raise ModuleNotFoundError("this needs datatrove: pip install 'hf-batchllm[datatrove]'", name=gone.name) from gone

from .config import BatchConfig
from .errors import ConfigError
from .files.templates import MissingField, Template
from .generator import BatchGenerator
from .pool.loaders import load_in_worker, loader_for, sendable_tokenizer
from .results.generations import Generation
from .wording import a_kind, is_whole, shown


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
        prompt: str | Callable[[Document], Any] | None = None,
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
        if not (prompt is None or isinstance(prompt, str) or callable(prompt)):
            raise ConfigError(f"`prompt` is {a_kind(prompt)}: it is a template, or a function of a document")
        if not is_whole(window) or window < 1:
            raise ConfigError(f"`window` is {shown(window)}: it is a whole number of documents, at least 1")
        if seed is not None and not is_whole(seed):
            raise ConfigError(f"`seed` is {shown(seed)}: it is a whole number")
        self._load = loader_for(model, model_options, "GenerateStep({})")
        self._tokenizer = sendable_tokenizer(tokenizer)
        self._prompt = Template(prompt) if isinstance(prompt, str) else prompt
        self._chat, self._system = chat or system is not None, system
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
                self._answer(some)
                yield from some
        finally:
            if self._gen is not None:
                self._gen.close()
                self._gen = None

    def _answer(self, documents: Sequence[Document]) -> None:
        if self._gen is None:
            with self.track_time("model"):
                device = "cuda" if torch.cuda.is_available() else "cpu"
                self._gen = BatchGenerator(*load_in_worker(self._load, self._tokenizer, device), self._config)
        asked: list[tuple[Document, Any]] = []
        for document in documents:
            try:
                asked.append((document, self._prompt_of(document)))
            except MissingField as problem:
                document.metadata[self._into] = {"error": f"this document {problem}"}
        seeds = None if self._seed is None else [_seed_of(self._seed, document.id) for document, _ in asked]
        with self.track_time("window"):
            prompts = [prompt for _, prompt in asked]
            result = self._gen.generate(prompts, seed=seeds, on_error="record", progress=False, **self._options)
        for (document, _), samples in zip(asked, result.by_prompt, strict=True):
            for sample in samples:
                self.stat_update("errors" if sample.error is not None else "answers")
                self.stat_update("prompt_tokens", value=len(sample.prompt_token_ids))
                self.stat_update("new_tokens", value=len(sample.token_ids))
            answers = list(map(_as_dict, samples))
            document.metadata[self._into] = answers[0] if len(answers) == 1 else answers

    def _prompt_of(self, document: Document) -> Any:
        if isinstance(self._prompt, Template):
            made: Any = self._prompt.fill({**document.metadata, "text": document.text, "id": document.id})
        else:
            made = document.text if self._prompt is None else self._prompt(document)
        if not self._chat or not isinstance(made, str):
            return made
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
