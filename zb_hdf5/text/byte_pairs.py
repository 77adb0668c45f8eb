"""Byte-level BPE in its two forms, a `tokenizer.json` and tiktoken's ranks: one digest for the same ids."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from itertools import count, pairwise
from typing import Any


def _byte_pair_digest(pattern: str, special_tokens: Mapping[str, int], ranks: Mapping[bytes, int]) -> str:
    """Return the sha256 of everything that decides the ids: the split of text, the special tokens, the merges."""
    sha256 = hashlib.sha256(json.dumps([pattern, sorted(special_tokens.items())]).encode())
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        sha256.update(base64.b64encode(token) + b" %d\n" % rank)
    return sha256.hexdigest()


def digest_of_encoding(encoding: Any) -> str:
    """Return the digest of a `tiktoken.Encoding`."""
    return _byte_pair_digest(encoding._pat_str, encoding._special_tokens, encoding._mergeable_ranks)


def digest_as_ranks(content: dict[str, Any]) -> str | None:
    """Return the digest of the tiktoken encoding of the same ids as a `tokenizer.json`; None if there is none.

    Tiktoken merges any two neighbours that form a token, the lowest rank first, without a list of merges. That is the
    same as the list if each token is made of the very two tokens that the lower ranks leave of its bytes, and the list
    has this pair, in the order of the ranks. A trained tokenizer is of this kind.
    """
    pattern = split_pattern(content)
    model = content["model"]
    added = content.get("added_tokens", [])
    extras = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    plain = model.get("type") == "BPE" and not any(model.get(name) for name in extras)
    if pattern is None or not plain or not all(token.get("special") for token in added):
        return None
    special = {token["content"]: int(token["id"]) for token in added}
    try:
        ranks = {token_bytes(token): int(rank) for token, rank in model["vocab"].items() if token not in special}
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        merges = [(token_bytes(left), token_bytes(right)) for left, right in pairs]
        made = [ranks[left + right] for left, right in merges]
    except KeyError:  # a token that is not spelt in bytes
        return None
    single = {bytes([byte]) for byte in range(256)}
    known = {*merges, *((byte,) for byte in single)}
    if made != sorted(made) or not single <= ranks.keys() or {_merged_below(each, ranks) for each in ranks} - known:
        return None
    return _byte_pair_digest(pattern, special, ranks)


def split_pattern(content: dict[str, Any]) -> str | None:
    """Return the regular expression of a `tokenizer.json` that splits text as tiktoken does; None if it does not."""
    match content:
        case {
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            },
        }:
            return pattern
    return None


@cache
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's way of writing bytes as printable characters: themselves, or the next ones from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


def byte_characters() -> frozenset[str]:
    """Return the characters as which bytes are written."""
    return frozenset(_byte_of_character())


def token_bytes(token: str) -> bytes:
    """Return the bytes of a token of a `tokenizer.json`; `KeyError` if it is not spelt in bytes."""
    return bytes(map(_byte_of_character().__getitem__, token))


def _merged_below(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, ...]:
    """Merge the bytes of a token as tiktoken does, with the ranks below its own."""
    parts = [token[k : k + 1] for k in range(len(token))]
    limit = ranks[token]
    found = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
    while found and (lowest := min(found)) < limit:
        k = found.index(lowest)
        parts[k : k + 2] = [parts[k] + parts[k + 1]]
        del found[k]
        for near in range(max(k - 1, 0), min(k + 1, len(found))):  # the pairs that the new part is in
            found[near] = ranks.get(parts[near] + parts[near + 1], limit)
    return tuple(parts)
