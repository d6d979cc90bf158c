"""Objects of answers as typed dicts without further keys, so that a description says all that an answer has.

Their JSON schemas are made of them; nothing here makes an answer.
"""

from typing import NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic reads that of 3.12 and later

__all__ = ["NotRequired", "TypedDict", "closed"]

closed = with_config(ConfigDict(extra="forbid"))
