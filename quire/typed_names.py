"""Settings in a message as whoever set them called them: a variable or a key of the file, where no flag was typed.

Messages are written with flags, which is also how a setting that nobody set is spoken of. Loads nothing.
"""

import re
from collections.abc import Mapping

_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?![\w-])")


def flag_of(name: str) -> str:
    """The flag that sets a field."""
    return f"--{name.replace('_', '-')}"


def as_typed(message: str, names: Mapping[str, str]) -> str:
    """The message with what `names` has, by field, in place of each flag; other flags stay as they are."""
    return _FLAG.sub(lambda found: names.get(found[1].replace("-", "_"), found[0]), message)
