"""Variables of chat templates that say whether the model thinks before its answer, and how much; the same in every API.

Knows no template: one that does not have a variable ignores it.
"""

from typing import Any

_NO_EFFORT = "none"


def thinking_variables(*, is_on: bool) -> dict[str, Any]:
    """Variables that switch thinking on or off: Qwen and GLM have the first, DeepSeek and Granite the second."""
    return {"enable_thinking": is_on, "thinking": is_on}


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Variables for an effort, of which `none` switches thinking off; None: the template decides."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **(thinking_variables(is_on=False) if effort == _NO_EFFORT else {})}
