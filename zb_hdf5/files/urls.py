"""URLs as people may see them, in messages, reports and files: `***` stands for passwords, tokens and signatures."""

from __future__ import annotations

import re
from typing import Final

#: In place of a secret.
HIDDEN: Final = "***"
#: A URL in a text: its scheme, its user with a password or a token, and its query.
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^/?#\s]*@)?([^?\s]*)(\?[^\s)]*)?")


def without_secrets(text: str) -> str:
    """Return a text with all secrets of the URLs in it hidden. A text without any is the same one.

    In `abfss://container@account...` the name before the "@" is no secret.
    """
    return _URL.sub(_hide, text) if "://" in text else text


def _hide(found: re.Match[str]) -> str:
    scheme, user, place, query = found.groups(default="")
    is_secret = user and (":" in user or scheme.lower().startswith("http"))
    return f"{scheme}{f'{HIDDEN}@' if is_secret else user}{place}{f'?{HIDDEN}' if query else ''}"
