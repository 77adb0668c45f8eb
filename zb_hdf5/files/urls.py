"""URLs as people may see them, in messages, reports and files: `***` stands for passwords, tokens and signatures."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

#: In place of a secret.
HIDDEN: Final = "***"
#: The password of a URL may have what should be percent-encoded there; a port is none.
_PASSWORD: Final = r":(?!\d*(?:[/?#\s:,;)]|$))(?:[^/?#\n]*|\S*)"
#: A URL in a text, also one of HTTP that lost a slash as a path: its scheme, its user with a password or a token, its
#: place, and its query or fragment.
_URL: Final = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]*://|https?:/(?!/))"
    rf"((?:[^/?#\s]*|[^/?#\s:@]+{_PASSWORD})@)?"
    r"([^?#\s]*)"
    r"([?#][^\s)]*(?<![:;,.]))?"
)


def without_secrets(text: str) -> str:
    """Return a text with all secrets of the URLs in it hidden. A text without any is the same one.

    In `abfss://container@account...` the name before the "@" is not a secret.
    """
    return _URL.sub(_hide, text) if ":/" in text else text


def split_user(url: str) -> tuple[str, str]:
    """Return a URL without its user, and the user with the password as the server compares them; "": it has none."""
    scheme, between, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    user, _, host = place.rpartition("@")
    return f"{scheme}{between}{host}{slash}{path}", unquote(user)


def _hide(found: re.Match[str]) -> str:
    scheme, user, place, query = found.groups(default="")
    is_secret = user and (":" in user or scheme.lower().startswith("http"))
    return f"{scheme}{f'{HIDDEN}@' if is_secret else user}{place}{f'{query[0]}{HIDDEN}' if query else ''}"
