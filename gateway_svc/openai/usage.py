"""Counts of tokens in OpenAI's form."""

from typing import Any

import quire


def usage_of(usage: quire.Usage) -> dict[str, Any]:
    """The object `usage` of a completion."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
