"""Variables of Quire that belong to no service's settings, and what a misspelt one means. Loads no other package."""

import difflib
from collections.abc import Iterable

from quire.access_variables import API_KEY, TLS_CLIENT_CERT, TLS_CLIENT_KEY, TLS_ROOT, TLS_SERVER_NAME

ADDRESS = "QUIRE_ADDRESS"
HIDDEN_URL = "_QUIRE_REDIS_URL_FLAG"  # --redis-url, from `quire serve` to itself: nobody may see its password
KNOWN = frozenset(
    {
        *(ADDRESS, API_KEY, TLS_CLIENT_CERT, TLS_CLIENT_KEY, TLS_ROOT, TLS_SERVER_NAME),
        *("QUIRE_CACHE_DIR", "QUIRE_CONFIG", "QUIRE_NATIVE"),
    }
)


def meant_variable(variable: str) -> str | None:
    """The known variable that a misspelt one is meant to be; None if none is close."""
    found = difflib.get_close_matches(variable, KNOWN, n=1, cutoff=0.85)
    return found[0] if found else None


def check_client_variables(names: Iterable[str]) -> None:
    """Raises ValueError for a variable that looks like a misspelt one; others may belong to other programs."""
    for name in sorted(names):
        meant = meant_variable(name) if name.startswith("QUIRE_") and name not in KNOWN else None
        if meant is not None:
            raise ValueError(f"{name} is not a setting of Quire; did you mean {meant}?")
