"""Byte-level BPE in its two forms, a `tokenizer.json` and tiktoken's ranks: one digest where both give the same ids."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from itertools import count, pairwise
from typing import Any


def byte_pair_digest(pattern: str, special_tokens: Mapping[str, int], ranks: Mapping[bytes, int]) -> str:
    """Return the sha256 of everything that decides the ids: the split of text, the special tokens, the merges."""
    sha256 = hashlib.sha256(json.dumps([pattern, sorted(special_tokens.items())]).encode())
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        sha256.update(base64.b64encode(token) + b" %d\n" % rank)
    return sha256.hexdigest()


def digest_as_ranks(content: dict[str, Any]) -> str | None:
    """Return the digest of the tiktoken encoding of the same ids as a `tokenizer.json`; None if there is none."""
    # tiktoken merges any two neighbours that form a token, the lowest rank first, without a list of merges. That is the
    # same as the list if each token is made of the very two tokens that the lower ranks leave of its bytes, and the
    # list has this pair, in the order of the ranks. A trained tokenizer is of this kind.
    pattern, model, added = split_pattern(content), content["model"], content.get("added_tokens", [])
    extras = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    plain = model.get("type") == "BPE" and not any(model.get(name) for name in extras)
    if pattern is None or not plain or not all(token.get("special") for token in added):
        return None
    special = {token["content"]: int(token["id"]) for token in added}
    byte_of = byte_of_character()
    try:
        ranks = {
            bytes(byte_of[character] for character in token): int(rank)
            for token, rank in model["vocab"].items()
            if token not in special
        }
        merges = [_pair(merge, byte_of) for merge in model["merges"]]
        made = [ranks[left + right] for left, right in merges]
    except KeyError:  # a token that is not spelt in bytes
        return None
    if made != sorted(made) or not _are_merges_of(ranks, set(merges)):
        return None
    return byte_pair_digest(pattern, special, ranks)


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


def byte_of_character() -> dict[str, int]:
    """Return GPT-2's way of writing bytes as printable characters: themselves, or the next ones from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


def _pair(merge: Any, byte_of: dict[str, int]) -> tuple[bytes, bytes]:
    """Return the two tokens of a merge, which is a list of them, or one text with a space between."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return bytes(byte_of[character] for character in left), bytes(byte_of[character] for character in right)


def _are_merges_of(ranks: dict[bytes, int], merges: set[tuple[bytes, bytes]]) -> bool:
    """Return whether the lower ranks leave two tokens of each token's bytes, which are one of the merges."""
    if any(bytes([byte]) not in ranks for byte in range(256)):
        return False
    return all(
        len(parts := _merge_below(token, ranks, rank)) == 2 and (parts[0], parts[1]) in merges
        for token, rank in ranks.items()
        if len(token) > 1
    )


def _merge_below(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """Merge the bytes of a token as tiktoken does, with the ranks below `limit`."""
    parts = [token[k : k + 1] for k in range(len(token))]
    while len(parts) > 1:
        found = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
        lowest = min(found)
        if lowest >= limit:
            return parts
        k = found.index(lowest)
        parts[k : k + 2] = [parts[k] + parts[k + 1]]
    return parts
