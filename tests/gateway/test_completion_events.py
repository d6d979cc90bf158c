"""Events of completions, whose bytes are put together from parts that are made once: they are those of the object."""

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire
from gateway_svc.openai.completion_call import CompletionCall
from gateway_svc.openai.completions import CompletionRequest

OPTIONS: list[Any] = [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]


class PlainCall(CompletionCall):
    """A call whose events are its chunks' texts."""

    async def whole(self, completions: Sequence[quire.Completion], usage: quire.Usage) -> bytes:
        """The whole answer."""
        return self.to_json([], usage)

    def event(self, output: int, chunk: quire.Chunk) -> bytes:
        """The event of a chunk."""
        return self.choice_event({"index": output, "text": chunk.text})


@pytest.mark.parametrize("options", OPTIONS)
@given(text=st.text(), output=st.integers(0, 127), model=st.text(max_size=9), num_tokens=st.integers(0, 2**40))
def test_an_event_is_the_object_of_its_choice(
    options: Any, text: str, output: int, model: str, num_tokens: int
) -> None:
    fields = CompletionRequest.model_validate({"prompt": "x", "stream": True, "stream_options": options})
    call = PlainCall(fields, "text_completion", model, "cmpl-1")
    call.num_prompt_tokens, call.num_output_tokens = 7, num_tokens
    made = call.event(output, quire.Chunk(position=0, num_tokens=1, text=text))
    assert made.startswith(b"data: ") and made.endswith(b"\n\n")
    read = orjson.loads(made.removeprefix(b"data: "))
    assert made == b"data: " + orjson.dumps(read) + b"\n\n", "no byte more than it takes"
    assert read["choices"] == [{"index": output, "text": text}]
    names = ["id", "object", "created", "model", "choices", *([] if options is None else ["usage"])]
    assert [*read] == names and (read["id"], read["model"]) == ("cmpl-1", model)
    if options is not None:
        usage = read["usage"]
        assert usage is None or usage["total_tokens"] == 7 + num_tokens
        assert (usage is None) == ("continuous_usage_stats" not in options)
