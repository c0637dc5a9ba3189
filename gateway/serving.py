"""The front's one door to the core, the same for HTTP and gRPC: check, tokenise, generate. Knows no protocol.

Ask ──prepare()──► Answer ──chunks()──► TextChunk ... TextChunk(finish_reason) of each choice; then usage, timing
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.tracing import NO_TRACING, Span, Tracing
from core.block_hash import cache_salt, hash_chain
from core.errors import Busy, InvalidRequest, ModelNotFound, TandemError, Unauthenticated, Unavailable
from core.ids import BlockHash
from core.logs import serve_request
from core.sampling import SamplingParams
from core.worker import Role
from gateway.answer import Answer
from gateway.ask import Arrival, Ask, Prompt
from gateway.generation import GenerationRequest
from gateway.metrics import GatewayMetrics
from gateway.routing.fleet import Fleet
from gateway.routing.orchestrator import Generation, Orchestrator
from gateway.tenants import Tenants
from gateway.text.chat import Chat
from gateway.text.grammar import OutputForm
from gateway.text.grammar_checker import GrammarChecker
from gateway.text.text_stream import TextStream
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tool_calls import ToolCallParser
from gateway.text.tool_grammar import tool_form
from gateway.text_generation import TextGeneration

NO_TENANTS = Tenants()
DEFAULT_MAX_TOKENS = 16
MAX_PROMPT_SCORES = 1 << 20
"""Log-probabilities of prompts that one answer tells: each choice has those of its prompt."""


class Serving:
    """Everything a front needs. One per gateway."""

    def __init__(
        self,
        model_id: str,
        tokenizer: TextTokenizer,
        fleet: Fleet,
        orchestrator: Orchestrator,
        metrics: GatewayMetrics,
        grammars: GrammarChecker,
        timeout_s: float,
        tracing: Tracing = NO_TRACING,
        tenants: Tenants = NO_TENANTS,
    ) -> None:
        self.model_id = model_id
        self.tokenizer = tokenizer
        self.fleet = fleet
        self.orchestrator = orchestrator
        self.metrics = metrics
        self.grpc_address = ""
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._tracing = tracing
        self._tenants = tenants

    def tenant(self, authorization: str) -> str:
        """Whose a call with that Authorization header is: asked before anything else is done for it. Raises
        Unauthenticated, which is counted."""
        try:
            return self._tenants.of(authorization)
        except Unauthenticated:
            self.metrics.unauthenticated.inc()
            raise

    def check_model(self, model: str) -> None:
        """Raises ModelNotFound."""
        if model != self.model_id:
            raise ModelNotFound(model)

    @property
    def context_len(self) -> int:
        """Tokens that prompt and output may have together on the workers known now. Raises Unavailable."""
        limits = []
        for role in Role:
            records = [candidate.record for candidate in self.fleet.candidates(role)]
            if not records and role is Role.DECODE:
                raise Unavailable("no decode worker is connected")
            if records:
                pools = max(record.num_blocks * record.kv_spec.block_size for record in records)
                limits.append(min(pools, *(record.context_len for record in records)))
        return min(limits)

    @property
    def vocab_size(self) -> int:
        """Token ids that both the tokenizer and the workers known now have."""
        records = [candidate.record for role in Role for candidate in self.fleet.candidates(role)]
        return min([self.tokenizer.vocab_size, *(record.vocab_size for record in records)])

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Off the event loop. Raises InvalidRequest naming the prompt's field."""
        if prompt.token_ids is not None:
            return self._check_ids(prompt, prompt.token_ids)
        self._check_len(prompt)
        if prompt.chat is not None:
            ids = await asyncio.to_thread(self.tokenizer.encode_chat, prompt.chat)
        else:
            ids = await asyncio.to_thread(self.tokenizer.encode_text, prompt.text or "")
        if not ids:
            raise InvalidRequest(prompt.field, "the prompt is empty")
        return ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Control tokens included. Raises InvalidRequest for an id outside the vocabulary, or more than the context
        holds."""
        if len(token_ids) > self.context_len:
            raise InvalidRequest(
                "tokens", f"{len(token_ids)} tokens are more than the context's {self.context_len}"
            )
        self._check_vocabulary("tokens", token_ids)
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, skips_special_tokens=False)

    async def prepare(self, ask: Ask, arrival: Arrival | None = None) -> Answer:
        """Everything a client can get wrong is refused here, before any work. It arrives now unless said otherwise;
        the gateway's own limit of its time holds whatever the client allows."""
        arrival = arrival or Arrival()
        span = self._tracing.request("request", arrival.trace_parent, arrival.at_s)
        try:
            answer = await self._admit(ask, arrival, span)
        except TandemError as error:
            self.refused(error)
            span.end(attributes={"tandem.outcome": error.code.value}, error=str(error))
            raise
        self.metrics.admissions.labels(outcome="admitted", tier="").inc()
        serve_request(answer.request_id, arrival.tenant)
        return answer

    def refused(self, error: TandemError) -> None:
        """Count a request that came to nothing, here or before it got here."""
        self.metrics.requests.labels(outcome=error.code.value).inc()
        if isinstance(error, Busy | Unavailable):
            tier = error.tier if isinstance(error, Busy) else ""
            self.metrics.admissions.labels(outcome=error.code.value, tier=tier or "gateway").inc()
            self.orchestrator.recent.rates.now().num_refused += 1

    async def _admit(self, ask: Ask, arrival: Arrival, span: Span) -> Answer:
        self.check_model(ask.model)
        self.orchestrator.check_room()
        sampling = await self._sampling(ask)
        salt = cache_salt(arrival.tenant, ask.cache_salt)
        prompts = [await self._prepare_prompt(ask, prompt, salt) for prompt in ask.prompts]
        _check_scores(ask, _repeated(prompts, ask))
        requests = self._requests(ask, sampling, prompts, arrival, span.trace_parent)
        generations = self.orchestrator.begin(requests)
        choices = [
            self._text_generation(ask, prompt, index, generation)
            for index, (generation, prompt) in enumerate(
                zip(generations, _repeated(prompts, ask), strict=True)
            )
        ]
        prompt_lens = [len(prompt.ids) for prompt in prompts]
        return Answer(choices, prompt_lens, ask.n, self.metrics, span, ask.client_request_id)

    def _allowed_s(self, arrival: Arrival) -> float:
        return self._timeout_s if arrival.allowed_s is None else min(self._timeout_s, arrival.allowed_s)

    async def _prepare_prompt(self, ask: Ask, prompt: Prompt, salt: bytes) -> "PreparedPrompt":
        ids = await self.tokenize(prompt)
        room = self._check_room(prompt, ids)
        chain = await asyncio.to_thread(hash_chain, ids, self.fleet.fingerprint, salt=salt)
        default = room if prompt.chat is not None else DEFAULT_MAX_TOKENS
        max_tokens = default if ask.max_tokens is None else ask.max_tokens
        echoed = await self._echoed(prompt, ids) if ask.echoes else None
        return PreparedPrompt(prompt, tuple(ids), salt, tuple(chain), max(min(max_tokens, room), 1), echoed)

    async def _echoed(self, prompt: Prompt, ids: Sequence[int]) -> str:
        return await asyncio.to_thread(self.tokenizer.decode, ids) if prompt.text is None else prompt.text

    def _requests(
        self,
        ask: Ask,
        sampling: SamplingParams,
        prompts: Sequence["PreparedPrompt"],
        arrival: Arrival,
        trace_parent: str,
    ) -> list[GenerationRequest]:
        """One for each choice. A prompt's first one is its leader: the others wait until its blocks are on a decode
        worker, and find them cached on both tiers."""
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            leader: GenerationRequest | None = None
            for choice in range(max(ask.n, ask.best_of)):
                own = replace(sampling, max_tokens=prompt.max_tokens, seed=sampling.choice_seed(choice))
                if leader is not None:
                    own = replace(own, num_prompt_logprobs=-1)
                request = GenerationRequest(
                    prompt.ids,
                    own,
                    prompt.chain,
                    self._allowed_s(arrival),
                    ask.client_request_id,
                    leader,
                    arrival.at_s,
                    trace_parent,
                    arrival.tenant,
                    prompt.salt,
                )
                leader = leader or request
                requests.append(request)
        return requests

    def _text_generation(
        self, ask: Ask, prompt: "PreparedPrompt", index: int, generation: Generation
    ) -> TextGeneration:
        return TextGeneration(
            index,
            generation,
            TextStream(self.tokenizer, ask.text, ask.sampling.min_tokens),
            frozenset(ask.sampling.stop_token_ids),
            prompt.echoed,
            ask.max_tokens == 0,
            self._call_parser(prompt.asked.chat),
        )

    def _call_parser(self, chat: Chat | None) -> ToolCallParser | None:
        if chat is None or chat.tools is None:
            return None
        tools = chat.tools
        return ToolCallParser(self.tokenizer.tool_format, tools.callable_names, tools.allows_several)

    def _check_len(self, prompt: Prompt) -> None:
        """Text that cannot fit however it is cut into tokens is not worth cutting."""
        num_characters = len(prompt.text or "") if prompt.chat is None else prompt.chat.num_characters
        limit = self.context_len * self.tokenizer.longest_token_len
        if num_characters > limit:
            message = (
                f"the prompt has {num_characters} characters, more than {self.context_len} tokens can hold"
            )
            raise InvalidRequest(prompt.field, message)

    def _check_ids(self, prompt: Prompt, ids: Sequence[int]) -> list[int]:
        if not ids:
            raise InvalidRequest(prompt.field, "the prompt is empty")
        self._check_room(prompt, ids)
        self._check_vocabulary(prompt.field, ids)
        return list(ids)

    def _check_room(self, prompt: Prompt, ids: Sequence[int]) -> int:
        """How many tokens may follow. Raises InvalidRequest when not even one may."""
        room = self.context_len - len(ids)
        if room < 1:
            message = (
                f"the prompt has {len(ids)} tokens; with at least 1 of output the limit is {self.context_len}"
            )
            raise InvalidRequest(prompt.field, message)
        return room

    async def _sampling(self, ask: Ask) -> SamplingParams:
        """Raises InvalidRequest naming the field with an id outside the vocabulary, or a form that has no grammar.
        Where the form is complete the output ends, and the model says so with an end-of-sequence id."""
        given = ask.sampling
        self._check_vocabulary("stop_token_ids", given.stop_token_ids)
        self._check_vocabulary("allowed_token_ids", given.allowed_token_ids)
        self._check_vocabulary("logit_bias", [token_id for token_id, _ in given.logit_bias])
        form = self._form(ask)
        grammar = await self._grammars.check(form, ask.num_choices) if form is not None else ""
        ends = () if ask.ignores_eos and not grammar else self.tokenizer.eos_token_ids
        return replace(
            given,
            grammar=grammar,
            seed=secrets.randbits(64) if ask.seed is None else ask.seed & 0xFFFFFFFFFFFFFFFF,
            stop_token_ids=tuple(dict.fromkeys((*given.stop_token_ids, *ends))),
            bad_words=await asyncio.to_thread(self.tokenizer.spellings, ask.bad_words)
            if ask.bad_words
            else (),
        )

    def _form(self, ask: Ask) -> OutputForm | None:
        """With functions to call: of calls too. Raises InvalidRequest."""
        chat = ask.prompts[0].chat if ask.prompts else None
        if chat is None or chat.tools is None:
            return ask.form
        known = self.tokenizer
        return tool_form(known.tool_format, chat.tools, ask.form, known.added_tokens, known.markup_tokens)

    def _check_vocabulary(self, field: str, token_ids: Sequence[int]) -> None:
        limit = self.vocab_size
        ends = (min(token_ids, default=0), max(token_ids, default=0))
        for wrong in (end for end in ends if not 0 <= end < limit):
            raise InvalidRequest(field, f"token id {wrong} is outside the vocabulary [0, {limit})")


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt of `asked` as tokens, the hashes of its full blocks under `salt`, how many tokens may follow, and its
    text if that is to be part of the answer."""

    asked: Prompt
    ids: tuple[int, ...]
    salt: bytes
    chain: tuple[BlockHash, ...]
    max_tokens: int
    echoed: str | None = None


def _check_scores(ask: Ask, prompts: Sequence[PreparedPrompt]) -> None:
    """Raises InvalidRequest for more log-probabilities of the choices' `prompts` than an answer may have."""
    num_scores = sum(len(prompt.ids) for prompt in prompts) * (1 + ask.sampling.num_prompt_logprobs)
    if num_scores > MAX_PROMPT_SCORES:
        field = "logprobs" if ask.echoes and ask.wants_logprobs else "prompt_logprobs"
        message = f"{num_scores} log-probabilities of prompts are more than the {MAX_PROMPT_SCORES} allowed"
        raise InvalidRequest(field, message)


def _repeated(prompts: Sequence[PreparedPrompt], ask: Ask) -> list[PreparedPrompt]:
    """The prompt of each choice."""
    return [prompt for prompt in prompts for _ in range(max(ask.n, ask.best_of))]
