"""Removes the passwords of URLs from texts that are shown. Pure."""

import re

_MASK = "***"
_USER_INFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<user>[^\s:/@'\"]*):\S*@", re.IGNORECASE)
_QUERY = re.compile(r"(?P<name>[?&](?:\w*password|passwd|auth)=)[^&\s'\"]*", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """The text with *** for each password of a URL, before its @ or in its query.

    Everything up to the last @ of a word counts as password, so that one with unescaped characters is hidden whole.
    """
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\g<name>{_MASK}", _USER_INFO.sub(rf"\g<scheme>\g<user>:{_MASK}@", text))


def has_password(url: str) -> bool:
    """True if the URL has a password."""
    return without_passwords(url) != url
