"""Fields that completions and chat completions share, besides those of every API. Names are OpenAI's, and vLLM's."""

from collections.abc import Mapping

from pydantic import Field

from common.bounds import MOST_SAMPLES
from gateway_svc.api_error import invalid
from gateway_svc.openai.response_format import FORMAT_NAMES, ResponseFormat
from gateway_svc.openai.vllm_fields import VllmFields
from gateway_svc.request_fields import ApiModel, Ignored, Items, RequestFields
from quire.params import GenerateParams

MAX_LOGPROBS = 20


class StreamOptions(ApiModel):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="End with an event that has the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Each event has the usage so far.")
    include_obfuscation: Ignored


class GenerationFields(RequestFields, VllmFields):
    """Fields of both kinds of completions."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_SAMPLES, description="Number of outputs for each prompt.")
    stop: str | Items[str] | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of the prompt's tokens; not in streams."
    )
    return_token_ids: bool | None = Field(None, description="Choices have token_ids; prompt_token_ids come, too.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Log-probabilities name tokens token_id:N instead of by their texts."
    )
    prompt_cache_key: str | None = Field(None, description="As session_key, where that is not given.")
    user: str | None = Field(None, description="As prompt_cache_key, where that is not given.")

    @property
    def names(self) -> Mapping[str, str]:
        """See RequestFields."""
        return super().names if self.response_format is None else {**super().names, **FORMAT_NAMES}

    @property
    def session(self) -> str | None:
        """See RequestFields."""
        return super().session or self.prompt_cache_key or self.user or None

    @property
    def num_outputs(self) -> int:
        """Outputs that come back for each prompt."""
        return self.n or 1

    @property
    def has_usage_event(self) -> bool:
        """True if the usage is an event of its own."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """True if each event has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def params(self, request_id: str) -> GenerateParams:
        """Keywords for the SDK. Raises ApiError for fields that contradict each other."""
        given = super().params(request_id)
        if self.n is not None:
            given["n"] = self.n
        if self.stop:
            given["stop"] = self.stop
        if self.prompt_logprobs is not None:
            if self.stream:
                raise invalid("prompt_logprobs", "comes with whole answers alone: leave out this or stream")
            given["prompt_logprobs"] = self.prompt_logprobs
        if self.response_format is not None:
            if self.structured_outputs is not None:
                raise invalid("structured_outputs", "leave it out where response_format is given")
            given.update(self.response_format.keywords())
        return given
