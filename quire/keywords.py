"""Keywords of the SDK by the paths of fields in messages: errors name the keyword that the caller typed.

`sampling.top_p` is the keyword `top_p`, `token_ids.ids[3]` the fourth token of the prompt.
"""

import re

from quire.errors import InvalidRequestError

_GROUPS = re.compile(r"^(submit\.)?((sampling|stopping|output|beam|structured_output)\.|chat\.(?!messages\b))?")
_PROMPTS = re.compile(r"^(text|token_ids\.ids|chat\.messages|chat|prompt|prefix)(?=\[|\.|$)")
_KEYWORDS = {"timeout_ms": "timeout_s", "from_positions": "from_position"}  # fields whose keyword has another name


def keyword_of(path: str, prompt: str | None = None) -> str:
    """The keyword that sets the field; `prompt` is "prompt", "prefix" or "text", None if the call has none of them."""
    bare = _GROUPS.sub("", path)
    if prompt is not None and not path.startswith("output."):
        bare = _PROMPTS.sub(lambda found: _prompt_keyword(found[1], prompt), bare)
    bare = bare.replace("choice.texts", "choice", 1)
    name, bracket, place = bare.partition("[")
    return _KEYWORDS.get(name, name) + bracket + place


def in_keywords(error: InvalidRequestError, prompt: str | None = None) -> InvalidRequestError:
    """The same error with keywords instead of fields."""
    return error.renamed(lambda path: keyword_of(path, prompt))


def _prompt_keyword(form: str, prompt: str) -> str:
    """The keyword of a prompt: a conversation has its own, except as a prefix."""
    return "messages" if form.startswith("chat") and prompt != "prefix" else prompt
