"""JSON that people can read, with an array for each fact of many files, and last the digest of all before it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zb_hdf5.errors import FormatError, Remedy
from zb_hdf5.files.paths import read_whole

#: Before the digest of all that stands before it: the last key of the file.
_CHECK: Final = ',\n "check": "'
_RESTORE: Final = "restore it from a copy, or make it again"


def sealed_text(facts: Mapping[str, Any], sections: Mapping[str, dict[str, Any]]) -> str:
    """Return the text of a JSON object: each array on one line, and last the key "check".

    Parameters
    ----------
    facts
        The first keys.
    sections
        The other keys; each has an array for each of its own keys.
    """
    head = json.dumps(facts, indent=1).removesuffix("\n}")
    body = f"{head},\n " + ",\n ".join(_section_text(name, arrays) for name, arrays in sections.items())
    return f'{body}{_CHECK}{_digest(body)}"\n}}\n'


def _section_text(name: str, arrays: dict[str, Any]) -> str:
    if not arrays:
        return f'"{name}": {{}}'
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in arrays.items()]
    return f'"{name}": {{\n  ' + ",\n  ".join(lines) + "\n }"


def read_text(path: Path) -> str:
    """Read the text of a file or object; `FormatError` if it is not text."""
    try:
        return read_whole(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not JSON: {error}; {_RESTORE}") from error


def parse_sealed(text: str, path: object, remedy: Remedy | None = None) -> Any:
    """Parse such a text. If it has a digest, it must be the right one.

    Parameters
    ----------
    path
        The file, for messages.
    remedy
        The cure of a text that has another digest; None: to restore it.

    Raises
    ------
    FormatError
        If the text is not JSON, or has another digest.
    """
    body, check, digest = text.rpartition(_CHECK)
    if check and digest[:64] != _digest(body):
        facts = (
            f'{path}: damaged, or edited by hand (then remove the key "check"): its text does not have the digest in '
            "its last key"
        )
        raise FormatError(facts if remedy else f"{facts}; {_RESTORE}", remedy=remedy)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        facts = f"{path}: not JSON: {error}"
        raise FormatError(facts if remedy else f"{facts}; {_RESTORE}", remedy=remedy) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
