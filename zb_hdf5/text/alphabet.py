"""The characters that a `tokenizer.json` has tokens for. Byte-pair encoding leaves all others out, without a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zb_hdf5.text.byte_pairs import byte_characters


class Alphabet:
    """The characters that are encoded.

    Parameters
    ----------
    model
        The model of a `tokenizer.json`.
    normalize
        Returns a text as it is encoded.
    split
        Returns the pieces of such a text, which are encoded one by one.
    """

    def __init__(
        self, model: Mapping[str, Any], normalize: Callable[[str], str], split: Callable[[str], list[str]]
    ) -> None:
        self._tokens = frozenset(model["vocab"])
        self._prefix = model.get("continuing_subword_prefix") or ""
        self._suffix = model.get("end_of_word_suffix") or ""
        self._has_bytes = bool(model.get("byte_fallback"))
        self._takes_pieces_whole = bool(model.get("ignore_merges"))
        self._normalize = normalize
        self._split = split

    def num_unknown(self, text: str) -> int:
        """Return how many characters of a text have no token."""
        return sum(map(self._num_unknown_of, self._split(self._normalize(text))))

    def _num_unknown_of(self, piece: str) -> int:
        if self._takes_pieces_whole and piece in self._tokens:
            return 0
        last = len(piece) - 1
        symbols = (
            (self._prefix if number else "") + character + (self._suffix if number == last else "")
            for number, character in enumerate(piece)
        )
        return sum(not self._has(symbol) for symbol in symbols)

    def _has(self, symbol: str) -> bool:
        if symbol in self._tokens:
            return True
        return self._has_bytes and all(f"<0x{byte:02X}>" in self._tokens for byte in symbol.encode())


def is_complete(content: Mapping[str, Any]) -> bool:
    """Return whether every character of every text has a token, or the unknown token; a model may also refuse one."""
    model = content["model"]
    if "merges" not in model or model.get("unk_token") is not None:
        return True
    tokens = model["vocab"].keys()
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in tokens for byte in range(256)):
        return True
    has_affixes = bool(model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
    steps = (content.get("pre_tokenizer"), content.get("normalizer"))
    return any(map(_is_of_bytes, steps)) and not has_affixes and byte_characters() <= tokens


def _is_of_bytes(step: Any) -> bool:
    """Return whether a step of a `tokenizer.json`, or one of its parts, writes text as the characters of its bytes."""
    if not isinstance(step, Mapping):
        return False
    parts = [*step.get("pretokenizers", ()), *step.get("normalizers", ())]
    return step.get("type") == "ByteLevel" or any(map(_is_of_bytes, parts))


def lacks_unknown_token(content: Mapping[str, Any]) -> bool:
    """Return whether a model refuses a text with a character or word that it has no token for."""
    model = content["model"]
    if model.get("type") == "Unigram":
        return model.get("unk_id") is None and not model.get("byte_fallback")
    unknown = model.get("unk_token")
    return unknown is not None and unknown not in model.get("vocab", ())
