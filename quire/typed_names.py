"""Names of settings in messages: the variable or the key of the file that set one, instead of its flag.

Messages are written with flags, which also name settings that nobody set. Loads nothing.
"""

import re
from collections.abc import Mapping

_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?![\w-])")


def flag_of(name: str) -> str:
    """The flag that sets a field."""
    return f"--{name.replace('_', '-')}"


def as_typed(message: str, names: Mapping[str, str]) -> str:
    """The message with each flag replaced by its name in `names` (by field); other flags stay as they are."""
    return _FLAG.sub(lambda found: names.get(found[1].replace("-", "_"), found[0]), message)
