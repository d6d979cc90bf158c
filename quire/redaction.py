"""Passwords taken out of what is shown: of URLs, wherever in a text they stand. Pure."""

import re

_MASK = "***"
_USER_INFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<user>[^\s:/@'\"]*):\S*@", re.IGNORECASE)
_QUERY = re.compile(r"(?P<name>[?&](?:password|passwd|auth)=)[^&\s'\"]*", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """The text with *** for each password of a URL, before its @ or in its query.

    All up to the last @ of a word counts as password, so that one with unescaped characters does not show in part.
    """
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\g<name>{_MASK}", _USER_INFO.sub(rf"\g<scheme>\g<user>:{_MASK}@", text))


def has_password(url: str) -> bool:
    """Whether there is something to hide."""
    return without_passwords(url) != url
