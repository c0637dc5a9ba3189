"""What clients may ask of sampling, with every field's type and range: one list for HTTP and gRPC, which spell the
fields alike. Names and meanings are OpenAI's, and vLLM's where OpenAI has none."""

import logging
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from core.errors import InvalidRequest
from core.sampling import MAX_LOGPROBS, SamplingParams
from gateway.ask import MAX_CHOICES, MAX_STOP_LEN, MAX_STOP_STRINGS, Ask, Prompt, TextOptions
from gateway.text.grammar import GUIDED, OutputForm, only_form, response_format, structured_outputs

logger = logging.getLogger(__name__)
MAX_TOKENS = 2**31 - 1
MAX_BIASED = 1024
MAX_BIAS = 100.0
MAX_ALLOWED = 1 << 16
MAX_CACHE_SALT_LEN = 256
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Body(BaseModel):
    """Unknown fields are ignored, as OpenAI does."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class SamplingFields(Body):
    """None stands for the default, as in OpenAI's protocol."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=128)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_LEN)] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_bias(cls, bias: Any) -> Any:
        """Token ids are keys, which JSON spells as strings. Biases beyond ±MAX_BIAS are cut to that."""
        if not isinstance(bias, dict):
            return bias
        if len(bias) > MAX_BIASED:
            raise ValueError(f"at most {MAX_BIASED} tokens may have a bias")
        wrong = next((key for key in bias if not _is_token_id(key)), None)
        if wrong is not None:
            raise ValueError(f"{str(wrong)[:40]!r} is not a token id")
        return {
            str(key): max(-MAX_BIAS, min(MAX_BIAS, value)) if _is_number(value) else value
            for key, value in bias.items()
        }

    def to_ask(
        self,
        model: str,
        prompts: tuple[Prompt, ...],
        *,
        max_tokens: int | None = None,
        best_of: int | None = None,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        echoes: bool = False,
        is_stream: bool = False,
        client_request_id: str = "",
    ) -> Ask:
        """What fields say together. `max_tokens` wins over the field of that name; an echoed prompt is scored as the
        output is unless num_prompt_logprobs says otherwise. Raises InvalidRequest."""
        ask = Ask(
            model=model,
            prompts=prompts,
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            sampling=self._sampling(
                num_logprobs or 0,
                num_logprobs if num_prompt_logprobs is None and echoes else num_prompt_logprobs,
            ),
            seed=self.seed,
            ignores_eos=bool(self.ignore_eos),
            text=TextOptions(
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                includes_stop=bool(self.include_stop_str_in_output),
                skips_special_tokens=self.skip_special_tokens is not False,
                tells_calls=any(
                    prompt.chat is not None and prompt.chat.tools is not None for prompt in prompts
                ),
            ),
            bad_words=tuple(self.bad_words or ()),
            form=only_form([form for form in self._forms() if form is not None]),
            n=self.n or 1,
            best_of=best_of or self.n or 1,
            wants_logprobs=num_logprobs is not None,
            echoes=echoes,
            client_request_id=client_request_id,
            cache_salt=self.cache_salt or "",
        )
        _check_together(ask, is_stream)
        return ask

    def _forms(self) -> list[OutputForm | None]:
        """That the output must take, of which there may be one. Raises InvalidRequest."""
        older = {name: getattr(self, name) for name in GUIDED}
        return [
            response_format(self.response_format),
            structured_outputs("structured_outputs", self.structured_outputs),
            *(GUIDED[name](name, value) for name, value in older.items() if value is not None),
        ]

    def _sampling(self, num_logprobs: int, num_prompt_logprobs: int | None) -> SamplingParams:
        """All but what depends on the model, the prompt and the seed."""
        bias = {int(key): value for key, value in (self.logit_bias or {}).items()}
        return SamplingParams(
            max_tokens=1,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple(sorted(bias.items())),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=-1 if num_prompt_logprobs is None else num_prompt_logprobs,
            priority=self.priority or 0,
        )


def _check_together(ask: Ask, is_stream: bool) -> None:
    """Raises InvalidRequest."""
    if ask.best_of < ask.n:
        raise InvalidRequest("best_of", "best_of must not be less than n")
    if ask.best_of > ask.n and is_stream:
        raise InvalidRequest("best_of", "which of several is best is known at the end: do not stream them")
    if ask.num_choices > MAX_CHOICES:
        field = "prompt" if ask.best_of == 1 else "n" if ask.best_of == ask.n else "best_of"
        raise InvalidRequest(field, f"a request may have at most {MAX_CHOICES} choices in all")
    if ask.max_tokens == 0 and not ask.echoes and ask.sampling.num_prompt_logprobs < 0:
        raise InvalidRequest("max_tokens", "max_tokens 0 needs echo or prompt_logprobs")
    if ask.max_tokens is not None and ask.sampling.min_tokens > ask.max_tokens:
        raise InvalidRequest("min_tokens", "min_tokens must not be greater than max_tokens")


def validated(kind: type[Body], data: Any) -> Any:
    """`data` as `kind`. Raises InvalidRequest naming the first field at fault."""
    if logger.isEnabledFor(logging.DEBUG) and (unknown := data.keys() - kind.model_fields.keys()):
        logger.debug("ignored unknown fields: %s", ", ".join(sorted(map(repr, unknown)))[:1000])
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = str(first["loc"][0]) if first["loc"] else "body"
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(field, f"{where}: {first['msg']}"[:1000]) from error


def _is_token_id(key: Any) -> bool:
    text = str(key)
    return text.isascii() and text.isdigit() and len(text) <= 10


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
