"""Text to token ids: bytes, tiktoken and Hugging Face tokenizers behind one interface, each with a digest."""

from __future__ import annotations

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, FormatError, StateError, UnavailableError

TokenIds = npt.NDArray[np.uint32]
DEFAULT_BOUNDARY: Final = "<|endoftext|>"
#: Tasks per thread: the documents of a block differ in length, and the last task should be a short one.
TASKS_PER_THREAD: Final = 4


class Tokenizer(ABC):
    """Turns texts into token ids. Thread-safe; pickled as its `spec`, which must then mean the same file.

    Attributes
    ----------
    spec
        What `load_tokenizer` was given.
    kind, name
        The part of `spec` before the colon, and the name (not the path) of what follows it.
    vocab_size
        One more than the largest id.
    digest
        sha256, in hexadecimal, over everything that decides which ids a text gets.
    special_tokens
        Text -> id of the tokens that no text is turned into.
    """

    kind: ClassVar[str]
    spec: str
    name: str
    vocab_size: int
    digest: str
    special_tokens: dict[str, int]

    @property
    def boundary_token_id(self) -> int | None:
        """Id of `<|endoftext|>`, which ends a document; None if this tokenizer has no such token."""
        return self.special_tokens.get(DEFAULT_BOUNDARY)

    def special_token_id(self, text: str) -> int:
        """Return the id of a special token.

        Raises
        ------
        ArgumentError
            If there is no such token; the message lists those that exist.
        """
        if text not in self.special_tokens:
            known = ", ".join(self.special_tokens) or "none"
            raise ArgumentError(f"tokenizer {self.spec}: no special token {text!r}; it has: {known}")
        return self.special_tokens[text]

    @property
    def description(self) -> dict[str, Any]:
        """What a store keeps of its tokenizer."""
        return {"kind": self.kind, "name": self.name, "vocab_size": self.vocab_size, "digest": self.digest}

    def encode(self, texts: Sequence[str], num_threads: int = 1) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """Return the ids of all texts, one after the other, and how many each text has.

        Special tokens that are spelt out in a text are ordinary text. The ids do not depend on `num_threads`.
        """
        slices = _slices([len(text) for text in texts], num_threads * TASKS_PER_THREAD if num_threads > 1 else 1)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="zb-encode") as pool:
            parts = pool.map(lambda cut: self._encode([_unicode(text) for text in texts[cut]]), slices)
            arrays = [array for part in parts for array in part]
        lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        return (np.concatenate(arrays) if arrays else np.empty(0, np.uint32)), lengths

    @abstractmethod
    def _encode(self, texts: list[str]) -> list[TokenIds]:
        """Return the ids of each text, in the calling thread and without holding the interpreter lock for long."""

    def __reduce__(self) -> tuple[Any, ...]:
        return load_tokenizer, (self.spec,)


class ByteTokenizer(Tokenizer):
    """The 256 byte values of UTF-8, and the boundary token 256. Needs no file and no library."""

    kind = "byte"

    def __init__(self) -> None:
        self.spec = self.name = "byte"
        self.vocab_size = 257
        self.special_tokens = {DEFAULT_BOUNDARY: 256}
        self.digest = hashlib.sha256(b"zb byte tokenizer 1").hexdigest()

    def _encode(self, texts: list[str]) -> list[TokenIds]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32) for text in texts]


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding: one that tiktoken knows by name, or a file of ranks with the `tokenizer.json` beside it."""

    kind = "tiktoken"

    def __init__(self, spec: str, name_or_file: str) -> None:
        path = Path(name_or_file)
        self.spec, self.name = spec, path.name
        encoding = self._encoding = _encoding_of_file(path) if path.is_file() else _encoding_of_name(name_or_file)
        self.vocab_size = encoding.n_vocab
        self.special_tokens = {text: encoding.encode_single_token(text) for text in encoding.special_tokens_set}
        sha256 = hashlib.sha256(json.dumps([encoding._pat_str, sorted(self.special_tokens.items())]).encode())
        for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
            sha256.update(base64.b64encode(token) + b" %d\n" % rank)
        self.digest = sha256.hexdigest()

    def _encode(self, texts: list[str]) -> list[TokenIds]:
        # to a buffer, not to a list of Python integers: threads would wait for each other to build those
        return [self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` of the Hugging Face tokenizers library."""

    kind = "hf"

    def __init__(self, spec: str, file: str) -> None:
        self.spec, self.name = spec, Path(file).name
        content = _read_tokenizer_json(Path(file))
        library = require_package("tokenizers")
        try:
            self._tokenizer = library.Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the library raises nothing narrower
            raise FormatError(f"{file}: not a tokenizer.json: {error}") from error
        self._tokenizer.encode_special_tokens = True  # as ordinary text
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in added.items() if token.special}
        self.digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _encode(self, texts: list[str]) -> list[TokenIds]:
        # one text a call: the library's pool then never runs more of them than we have threads
        encode = self._tokenizer.encode_batch_fast
        return [np.array(encode([text], add_special_tokens=False)[0].ids, np.uint32) for text in texts]


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer that `spec` names.

    Parameters
    ----------
    spec
        "byte"; "tiktoken:NAME" or "tiktoken:FILE" (a file of ranks `x.tiktoken` with its `x.json` beside it, as
        `zb tokenizer train` writes them); "hf:FILE" (a `tokenizer.json`).

    Raises
    ------
    ArgumentError
        If there is no such kind of tokenizer.
    FormatError
        If the file is malformed.
    UnavailableError
        If the library, or the network that a name needs, is not there.
    """
    kind, _, where = spec.partition(":")
    if spec == ByteTokenizer.kind:
        return ByteTokenizer()
    if kind == TiktokenTokenizer.kind and where:
        return TiktokenTokenizer(spec, where)
    if kind == HuggingFaceTokenizer.kind and where:
        return HuggingFaceTokenizer(spec, where)
    raise ArgumentError(f"tokenizer must be byte, tiktoken:NAME, tiktoken:FILE or hf:tokenizer.json, found {spec!r}")


def token_dtype(tokenizer: Tokenizer) -> str:
    """Return the name of the smallest stored dtype that holds every id."""
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def require_tokenizer(stored: str, tokenizer: str | Tokenizer, where: object) -> None:
    """Raise `StateError` if the tokens of a store are those of another tokenizer.

    Parameters
    ----------
    stored
        `StoreMeta.tokenizer`: JSON, or empty if the store does not say; then there is nothing to compare.
    tokenizer
        A specification for `load_tokenizer`, or a tokenizer.
    where
        The store, for the message.
    """
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    found = json.loads(stored) if stored else {}
    if found.get("digest", tokenizer.digest) != tokenizer.digest:
        raise StateError(
            f"{where}: expected the tokenizer that it was made with, {found.get('kind')}:{found.get('name')} (digest "
            f"{found['digest'][:12]}), found {tokenizer.spec} (digest {tokenizer.digest[:12]})"
        )


def require_package(name: str) -> Any:
    """Import an optional package.

    Raises
    ------
    UnavailableError
        If it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise UnavailableError(f"this needs the package {name}: pip install 'zb_hdf5[text]'") from error


def _encoding_of_name(name: str) -> Any:
    library = require_package("tiktoken")
    known = library.list_encoding_names()
    if name not in known:
        raise ArgumentError(f"tiktoken:{name}: no such file, and no encoding of tiktoken's: {', '.join(known)}")
    try:
        return library.get_encoding(name)
    except Exception as error:  # of requests, of the network, of a damaged cache
        raise UnavailableError(
            f"tiktoken:{name}: its ranks could not be downloaded ({type(error).__name__}); run it once where there is "
            "a network, with TIKTOKEN_CACHE_DIR set to a folder that this machine also sees"
        ) from error


def _encoding_of_file(path: Path) -> Any:
    """Ranks say how pieces of text are merged, not how text is cut into pieces, nor which tokens are special."""
    library = require_package("tiktoken")
    beside = path.with_suffix(".json")
    if beside == path or not beside.is_file():
        raise ArgumentError(
            f"{path}: expected {beside.name} beside it: a file of ranks does not say how text is split; train both "
            "with 'zb tokenizer train', or pass hf:tokenizer.json, or the name of an encoding, tiktoken:cl100k_base"
        )
    content = _read_tokenizer_json(beside)
    try:
        ranks = _parse_ranks(path.read_bytes())
        special = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
        if sorted(ranks.values()) != sorted(set(content["model"]["vocab"].values()) - set(special.values())):
            raise FormatError("it has other ids")
        return library.Encoding(
            path.name, pat_str=_split_pattern(content), mergeable_ranks=ranks, special_tokens=special
        )
    except Exception as error:  # of base64, of missing keys, of the library
        raise FormatError(f"{path}: not a file of ranks that goes with {beside.name}: {error}") from error


def _parse_ranks(data: bytes) -> dict[bytes, int]:
    pairs = [line.split() for line in data.splitlines() if line]
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}


def _split_pattern(content: dict[str, Any]) -> str:
    """Return the regular expression of a `tokenizer.json` that splits and merges as tiktoken does."""
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
    raise FormatError("its json splits or normalizes text in a way that tiktoken has not; pass hf:tokenizer.json")


def _read_tokenizer_json(path: Path) -> dict[str, Any]:
    """Return a `tokenizer.json` without what cuts and fills up texts: neither is part of which ids a text has."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a tokenizer.json: {error}") from error
    if not isinstance(content, dict) or "model" not in content:
        raise FormatError(f"{path}: not a tokenizer.json: it has no 'model'")
    return {**content, "truncation": None, "padding": None}


def _unicode(text: str) -> str:
    """Return `text` with lone surrogates, which no UTF-8 has but JSON may spell, replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _slices(sizes: list[int], count: int) -> list[slice]:
    """Cut a list of `sizes` into at most `count` runs of about the same total size."""
    ends = np.cumsum(sizes, dtype=np.int64)
    if not len(ends):
        return []
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
    return [slice(a, b) for a, b in pairwise(np.unique([0, *cuts, len(sizes)]).tolist())]
