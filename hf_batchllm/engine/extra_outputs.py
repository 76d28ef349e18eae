"""What ``generate`` gives back beside tokens: scores and logits as its ModelOutput has them, and log-probabilities.

Log-probabilities are those of the model's raw logits in float32, or after processors, for code that is used to these.
The device finds them where it picks the tokens, and the host takes them down later. It puts scores and logits down
itself, if there is room for those of all steps; else the host does so, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..inputs.as_passed import AsPassed
from ..inputs.options import Options
from ..model.device_memory import device_memory, is_out_of_memory
from ..planning.requests_and_prefixes import Request
from ..planning.step import Chunk
from ..results.generations import Generation
from ..results.sharing_plan import SharingPlan
from ..sampling.device_logprobs import MOST_LIKELY, DeviceLogProbs
from ..sampling.host_sampler import RecordScores
from ..sampling.logprobs import LOGITS_AT_ONCE, NewTokenLogProbs, PickTokens, PromptLogProbs, SampledLogProbs
from ..sampling.sampling_kernels import SamplingKernels
from ..sampling.step_tensors import StepTensors
from ..wording import shown_size
from .call_outputs import MOST_LOGITS, CallOutputs, LogProbNotes, PromptWatcher
from .id_lists import IdLists


class ExtraOutputs(CallOutputs):
    """``options``: of each prompt of the call; what is asked for here is the same for all of them.

    ``of_scores``: log-probabilities of new tokens are those that they were drawn with, after processors.
    """

    def __init__(self, options: Sequence[Options], of_scores: bool = False) -> None:
        self._new_tokens: NewTokenLogProbs | None = None
        self._prompts: PromptLogProbs | None = None
        self._id_lists = IdLists()
        self._why_not_aside: str | None = None  # why there is no room for the scores and logits of all steps
        self._normalises = any(each.config.renormalize_logits for each in options)
        if not options:
            return
        config, given = options[0].config, options[0].arguments
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):  # as ``generate`` has it
            beams = options[0].num_beams  # each has its row, however many of them are answers in the end
            samples = beams if beams > 1 else options[0].num_return_sequences
            self.tensors = StepTensors(len(options), samples, bool(config.output_scores), bool(config.output_logits))
        if given.logprobs is not None:
            apart = of_scores and not all(each.scores_are_logits for each in options)
            kind = SampledLogProbs if apart else NewTokenLogProbs
            self._new_tokens = kind(int(given.logprobs))
        if given.prompt_logprobs is not None:
            self._prompts = PromptLogProbs(int(given.prompt_logprobs))

    @property
    def watcher(self) -> PromptWatcher | None:
        return self._prompts

    @property
    def top_logprobs(self) -> int:
        return max((each.k for each in (self._new_tokens, self._prompts) if each is not None), default=0)

    @property
    def record_prompts(self) -> Callable[[Sequence[Chunk], torch.Tensor], None] | None:
        return None if self._prompts is None else self._prompts.record

    def most_rows(self, vocabulary: int) -> int | None:
        return None

    def most_tokens(self, budget: int, vocabulary: int, plan: SharingPlan | None) -> int:
        return budget if self._prompts is None else max(1, min(budget, MOST_LOGITS // vocabulary))

    def step_bytes(self, tokens: int, vocabulary: int) -> int:
        logits = 0 if self._prompts is None else tokens * vocabulary
        return 4 * (logits + 3 * min(logits, LOGITS_AT_ONCE))

    def fit_into(self, free: int, steps: int, vocabulary: int) -> None:
        taken = self.results_bytes(steps, vocabulary)
        if taken > free // 2:
            self._why_not_aside = f"would take {shown_size(taken)} if all rows became as long as they may"

    def set_aside(self, steps: int, vocabulary: int | None, device: torch.device) -> None:
        if self.tensors is None:
            return
        if vocabulary is None:
            self._why_not_aside = "are of a number that this model does not tell beforehand"
            return
        try:
            self.tensors.make_room(steps, vocabulary, device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.tensors.release()
            device_memory(device).trim()
            taken = shown_size(self.results_bytes(steps, vocabulary))
            self._why_not_aside = f"would take {taken} if all rows became as long as they may, which is not free"

    def results_bytes(self, steps: int, vocabulary: int) -> int:
        return 0 if self.tensors is None else self.tensors.bytes(steps, vocabulary)

    @property
    def why_by_host(self) -> str | None:
        if self.tensors is not None and self._why_not_aside is not None:
            return (
                f"{' and '.join(f'`{name}`' for name in self.tensors.names)} {self._why_not_aside}, so the host puts "
                "them together as rows grow, for which it waits after each step"
            )
        if self._new_tokens is not None and self._new_tokens.k > MOST_LIKELY:
            many = f"`logprobs` of more than {MOST_LIKELY} tokens"
            return f"{many} are put together on the host, which waits for each step"
        return None

    @property
    def wants_scores(self) -> bool:
        in_tensors = self.tensors is not None and self.tensors.has_scores
        return in_tensors or isinstance(self._new_tokens, SampledLogProbs)

    @property
    def copies_of_logits(self) -> int:
        if self.wants_scores:  # one in the making, one that is put down; of both kinds of rows where these differ
            return 4 if self._normalises else 2
        return 0 if self.tensors is None else 1

    def notes(
        self, device: torch.device, kernels: SamplingKernels, scores: Callable[[], torch.Tensor]
    ) -> LogProbNotes | None:
        kept = self._new_tokens
        if kept is None:
            return None
        of = scores if isinstance(kept, SampledLogProbs) else None
        return LogProbNotes(DeviceLogProbs(kept.k, device, kernels, of), kept.put)

    @property
    def record_scores(self) -> RecordScores | None:
        return self._new_tokens.record if isinstance(self._new_tokens, SampledLogProbs) else super().record_scores

    def around(self, sample: PickTokens) -> PickTokens:
        """``sample``, with the log-probabilities of the tokens that it picks taken down."""
        return sample if self._new_tokens is None else self._new_tokens.around(sample)

    def generation(self, request: Request, text: str | None, prompt: AsPassed, adapter: str | None) -> Generation:
        """What comes of ``request``, which has ended. Can be asked for once. ``adapter``: that it ran with."""
        assert request.finish_reason is not None
        return Generation(
            index=request.index,
            sample=request.sample,
            text=text,
            token_ids=request.generated[:],  # a copy, as the user may change it while the call goes on
            prompt_token_ids=self._id_lists.of(request.prompt_ids),
            finish_reason=request.finish_reason.value,
            logprobs=None if self._new_tokens is None else self._new_tokens.take(request),
            prompt_logprobs=None if self._prompts is None else self._prompts.take(request),
            score=request.score,
            prompt=prompt,
            adapter=adapter,
        )

    def release(self) -> None:
        if self.tensors is not None:
            self.tensors.release()
