"""Text to token ids and back: one interface of byte, tiktoken and Hugging Face tokenizers, each with a digest."""

from __future__ import annotations

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final, overload

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, FormatError, Remedy, StateError, UnavailableError, ZbError
from zb_hdf5.files.paths import read_whole
from zb_hdf5.files.urls import without_secrets
from zb_hdf5.notes import note
from zb_hdf5.packages import require_package
from zb_hdf5.text.alphabet import Alphabet, is_complete, lacks_unknown_token
from zb_hdf5.text.byte_pairs import digest_as_ranks, digest_of_encoding, split_pattern

TokenIds = npt.NDArray[np.uint32]
DEFAULT_BOUNDARY: Final = "<|endoftext|>"
#: Tasks per thread: the documents of a block differ in length, and the last task should be a short one.
TASKS_PER_THREAD: Final = 4
#: The keys by which a Unigram model draws one of several ways to encode a text.
LOTS: Final = ("alpha", "nbest_size")


def with_boundaries(
    tokens: TokenIds,
    lengths: npt.NDArray[np.int64],
    boundary_token_id: int,
    position: str = "after",
) -> tuple[TokenIds, npt.NDArray[np.int64]]:
    """Return the tokens and the lengths of documents with a boundary token in each.

    Parameters
    ----------
    tokens, lengths
        The tokens of all documents, one after the other, and the length of each.
    boundary_token_id, position
        The token, and its position: "before" or "after" the document.
    """
    ends = np.cumsum(lengths)
    offsets = ends - lengths if position == "before" else ends
    return np.insert(tokens, offsets, np.uint32(boundary_token_id)), lengths + 1


class Tokenizer(ABC):
    """Turns texts into token ids. Thread-safe; pickled as its `spec`, which must then mean the same file.

    Attributes
    ----------
    spec
        The argument of `load_tokenizer`.
    kind, name
        The part of `spec` before the colon, and the last name of the path that follows it.
    vocab_size
        One more than the largest id.
    digest
        sha256, in hexadecimal, over everything that decides which ids a text gets. A trained byte-level BPE has the
        same one as `hf:tok.json` and as `tiktoken:tok.tiktoken`.
    special_tokens
        Text -> id of the tokens that no text is turned into.
    encoder
        The name of the file that encodes: of `hf:tok.json` the `tok.tiktoken` of the same folder if both have one
        digest, and so give the same ids to every text, for it is faster.
    """

    kind: ClassVar[str]
    spec: str
    name: str
    vocab_size: int
    digest: str
    special_tokens: dict[str, int]

    @property
    def encoder(self) -> str:
        return self.name

    @property
    def boundary_token_id(self) -> int | None:
        """Id of `<|endoftext|>`, which ends a document; None if this tokenizer has no such token."""
        return self.special_tokens.get(DEFAULT_BOUNDARY)

    def special_token_id(self, text: str) -> int:
        """Return the id of a special token.

        Raises
        ------
        ArgumentError
            If there is no such token; the message lists the ones that exist.
        """
        if text not in self.special_tokens:
            known = ", ".join(self.special_tokens) or "none"
            raise ArgumentError(f"tokenizer {self.spec}: no special token {text!r}; it has: {known}")
        return self.special_tokens[text]

    def num_unknown(self, text: str) -> int:
        """Return how many characters of a text become no token: of most tokenizers none."""
        return 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec!r}, vocab_size={self.vocab_size}, digest={self.digest[:8]!r})"

    @property
    def description(self) -> dict[str, Any]:
        """The description of its tokenizer that a store keeps."""
        return {"kind": self.kind, "name": self.name, "vocab_size": self.vocab_size, "digest": self.digest}

    @overload
    def encode(self, texts: str, num_threads: int = 1) -> TokenIds: ...  # type: ignore[overload-overlap]

    @overload
    def encode(self, texts: Sequence[str], num_threads: int = 1) -> tuple[TokenIds, npt.NDArray[np.int64]]: ...

    def encode(
        self, texts: str | Sequence[str], num_threads: int = 1
    ) -> TokenIds | tuple[TokenIds, npt.NDArray[np.int64]]:
        """Return the ids of one text; or, for a list of texts, all ids in order and the number of ids of each text.

        Special tokens that are spelt out in a text are ordinary text.

        Parameters
        ----------
        texts
            One text, or a list of them.
        num_threads
            Threads that encode a list. The ids do not depend on it.

        Raises
        ------
        FormatError
            If the tokenizer refuses one of them.
        """
        if isinstance(texts, str):
            return _ids_of(*self._encode([as_unicode(texts)]))
        arrays = [*map(_ids_of, self.encode_each(texts, num_threads))]
        lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        return (np.concatenate(arrays) if arrays else np.empty(0, np.uint32)), lengths

    def encode_each(self, texts: Sequence[str], num_threads: int = 1) -> list[TokenIds | FormatError]:
        """Return the ids of each text, or the error of one that the tokenizer refuses. See `encode`."""
        found: list[TokenIds | FormatError] = [np.empty(0, np.uint32) for _ in texts]
        tasks = num_threads * TASKS_PER_THREAD if num_threads > 1 else 1
        with ThreadPoolExecutor(num_threads, thread_name_prefix="zb-encode") as pool:
            parts = pool.map(lambda k: self._encode([as_unicode(text) for text in texts[k::tasks]]), range(tasks))
            for number, part in enumerate(parts):
                found[number::tasks] = part
        return found

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of one row of ids: a list, an array or a CPU tensor.

        Special tokens are spelt out: rows show where documents end. Bytes that are not UTF-8, as where
        a row cuts a character in two, become U+FFFD. So `decode(encode(text))` is `text` for every text without
        lone surrogates; for `hf:` tokenizers that normalize, it is the text that their own library makes of the ids.

        Raises
        ------
        ArgumentError
            If they are not integers, or one of them is not an id of this tokenizer.
        """
        row = np.asarray(ids)
        if row.size == 0:
            return ""
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise ArgumentError(f"decode needs one row of ids, found shape {row.shape} of {row.dtype}")
        for token in np.unique(row).tolist():
            if not self.has_id(token):
                raise ArgumentError(
                    f"tokenizer {self.spec}: has no token {token}; its ids are below {self.vocab_size:,}"
                )
        return self._decode(row.tolist())

    @abstractmethod
    def _encode(self, texts: list[str]) -> list[TokenIds | FormatError]:
        """Return the ids or the error of each text, in this thread, and never hold the interpreter lock for long."""

    @abstractmethod
    def has_id(self, token: int) -> bool:
        """Return whether a token has this id: there may be holes below `vocab_size`."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of ids that all exist."""

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

    def _encode(self, texts: list[str]) -> list[TokenIds | FormatError]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32) for text in texts]

    def has_id(self, token: int) -> bool:
        return 0 <= token < self.vocab_size

    def _decode(self, ids: list[int]) -> str:
        boundary = DEFAULT_BOUNDARY.encode()
        return b"".join(bytes([each]) if each < 256 else boundary for each in ids).decode("utf-8", "replace")


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding: one of its own names, or a file of ranks with a `tokenizer.json` in the same folder.

    Parameters
    ----------
    spec, name
        See `Tokenizer`.
    encoding
        The `tiktoken.Encoding`.
    """

    kind = "tiktoken"

    def __init__(self, spec: str, name: str, encoding: Any) -> None:
        self.spec = spec
        self.name = name
        self._encoding = encoding
        self.vocab_size = encoding.n_vocab
        self._ids = frozenset(encoding._mergeable_ranks.values()) | frozenset(encoding._special_tokens.values())
        self.special_tokens = {text: encoding.encode_single_token(text) for text in encoding.special_tokens_set}
        self.digest = digest_of_encoding(encoding)

    def _encode(self, texts: list[str]) -> list[TokenIds | FormatError]:
        return _encoded_by_ranks(self._encoding, texts)

    def has_id(self, token: int) -> bool:
        return token in self._ids

    def _decode(self, ids: list[int]) -> str:
        return str(self._encoding.decode(ids, errors="replace"))


class EncodingTokenizer(TiktokenTokenizer):
    """A `tiktoken.Encoding` that a program has made itself; pickled with it."""

    def __init__(self, encoding: Any) -> None:
        if not isinstance(encoding, require_package("tiktoken", "text").Encoding):
            raise ArgumentError(f"tokenizer: expected a name, or a tiktoken.Encoding, found {encoding!r:.80}")
        super().__init__(f"tiktoken:{encoding.name}", encoding.name, encoding)

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodingTokenizer, (self._encoding,)


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` of the Hugging Face tokenizers library."""

    kind = "hf"

    def __init__(self, spec: str, file: str) -> None:
        self.spec = spec
        self.name = Path(file).name
        if not Path(file).is_file():
            raise ArgumentError(
                f"{without_secrets(spec)}: expected a tokenizer.json of this machine, found none, and "
                "the names of a hub are not looked up",
                remedy=Remedy.TOKENIZER,
            )
        content = _read_tokenizer_json(Path(file))
        library = require_package("tokenizers", "text")
        try:
            self._tokenizer = library.Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the library raises nothing narrower
            raise FormatError(f"{file}: not a tokenizer.json: {error}") from error
        self._tokenizer.encode_special_tokens = True  # as ordinary text
        if not (vocabulary := self._tokenizer.get_vocab(with_added_tokens=True)):
            raise FormatError(f"{file}: expected a trained tokenizer, found no tokens; train it first")
        self.vocab_size = max(vocabulary.values()) + 1
        self._alphabet = None if is_complete(content) else Alphabet(content["model"], self._normalized, self._split)
        if self._alphabet is not None:
            note(f"{file}: has no unknown token and no tokens of bytes: characters that it has no token for are lost")
        elif lacks_unknown_token(content):
            note(f"{file}: has no unknown token: documents with a text that it has no token for are dropped")
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in added.items() if token.special}
        self._ranks = Path(file).with_suffix(".tiktoken")
        self._encoding = None
        as_ranks = digest_as_ranks(content)
        if as_ranks is None:
            self.digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        else:
            self.digest = as_ranks
            self._encoding = _encoding_with_digest(self._ranks, as_ranks)

    @property
    def encoder(self) -> str:
        return self.name if self._encoding is None else self._ranks.name

    def _encode(self, texts: list[str]) -> list[TokenIds | FormatError]:
        if self._encoding is not None:
            return _encoded_by_ranks(self._encoding, texts)
        # one text a call: the library's pool then never runs more of them than we have threads
        return [self._encoded(text) for text in texts]

    def _encoded(self, text: str) -> TokenIds | FormatError:
        try:
            return np.array(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.uint32)
        except Exception as error:  # the library raises nothing narrower
            return FormatError(f"{self.spec}: cannot encode a text of {len(text):,} characters: {error}")

    def num_unknown(self, text: str) -> int:
        return 0 if self._alphabet is None else self._alphabet.num_unknown(text)

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def _split(self, text: str) -> list[str]:
        splitter = self._tokenizer.pre_tokenizer
        return [text] if splitter is None else [piece for piece, _ in splitter.pre_tokenize_str(text)]

    def has_id(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and self._tokenizer.id_to_token(token) is not None

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _ids_of(found: TokenIds | FormatError) -> TokenIds:
    if isinstance(found, FormatError):
        raise found
    return found


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer that `spec` names.

    Parameters
    ----------
    spec
        "byte"; "tiktoken:NAME" or "tiktoken:FILE" (a file of ranks `x.tiktoken` and the `x.json` of the same folder, as
        `zb tokenizer train` writes them); "hf:FILE" (a `tokenizer.json`). A path alone that ends in ".json" or
        ".tiktoken" is such a file.

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
    if kind not in (TiktokenTokenizer.kind, HuggingFaceTokenizer.kind) and spec.endswith((".json", ".tiktoken")):
        kind = HuggingFaceTokenizer.kind if spec.endswith(".json") else TiktokenTokenizer.kind
        where = spec
    if kind == TiktokenTokenizer.kind and where and not where.endswith(".json"):
        path = Path(where)
        encoding = _encoding_of_file(path) if path.is_file() else _encoding_of_name(where)
        return TiktokenTokenizer(spec, path.name, encoding)
    if kind == HuggingFaceTokenizer.kind and where:
        return HuggingFaceTokenizer(spec, where)
    raise ArgumentError(
        f"tokenizer {without_secrets(spec)!r}: expected byte, a tokenizer.json, a file of ranks .tiktoken, or "
        "tiktoken:NAME",
        remedy=Remedy.TOKENIZER,
    )


def require_tokenizer(stored: str, tokenizer: str | Tokenizer, where: object) -> None:
    """Raise `StateError` if a store was made with another tokenizer.

    Parameters
    ----------
    stored
        The description of its tokenizer that the store keeps.
    tokenizer
        As for `load_tokenizer`, or a tokenizer.
    where
        The store, for messages.
    """
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    found = tokenizer_named(stored)
    digest = found.get("digest")
    if isinstance(digest, str) and digest != tokenizer.digest:
        raise StateError(
            f"{where}: expected the tokenizer that it was made with, {found.get('kind')}:{found.get('name')} (digest "
            f"{digest[:12]}), found {tokenizer.spec} (digest {tokenizer.digest[:12]}); "
            "pass that one, or convert the text again"
        )


def tokenizer_named(stored: str) -> dict[str, Any]:
    """Return the description of its tokenizer that a store keeps, which may be any text; empty if it keeps none."""
    try:
        found = json.loads(stored or "null")
    except (ValueError, RecursionError):
        found = stored
    if found is None:
        return {}
    return found if isinstance(found, dict) else {"name": str(found)}


def _encoding_of_name(name: str) -> Any:
    library = require_package("tiktoken", "text")
    known = library.list_encoding_names()
    if name not in known:
        raise ArgumentError(f"tiktoken:{name}: no such file, and no encoding of tiktoken: {', '.join(known)}")
    try:
        return library.get_encoding(name)
    except Exception as error:  # of requests, of the network, of a damaged cache
        raise UnavailableError(
            f"tiktoken:{name}: its ranks could not be downloaded ({type(error).__name__}); run it once where there is "
            "a network, with TIKTOKEN_CACHE_DIR set to a folder that this machine also sees"
        ) from error


def _encoding_of_file(path: Path) -> Any:
    """Return the encoding of ranks, which merge bytes; the json has the split of text and the special tokens."""
    library = require_package("tiktoken", "text")
    sidecar = path.with_suffix(".json")
    if not sidecar.is_file():
        raise ArgumentError(
            f"{path}: expected {sidecar.name} in the same folder, which describes how text is split; pass "
            "hf:tokenizer.json, or the name of an encoding, tiktoken:cl100k_base",
            remedy=Remedy.TRAIN,
            at=sidecar,
        )
    content = _read_tokenizer_json(sidecar)
    lines = read_whole(path).splitlines()
    try:
        pairs = [line.split() for line in lines if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        special = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
        if sorted(ranks.values()) != sorted(set(content["model"]["vocab"].values()) - set(special.values())):
            raise FormatError("it has other ids")
        if (pattern := split_pattern(content)) is None:
            raise FormatError(
                "its json splits or normalizes text in a way that tiktoken has not; pass hf:tokenizer.json"
            )
        return library.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except Exception as error:  # of base64, of missing keys, of the library
        raise FormatError(f"{path}: not a file of ranks that goes with {sidecar.name}: {error}") from error


def _encoding_with_digest(path: Path, digest: str) -> Any | None:
    """Return the encoding of a file of ranks; None if it is not there, cannot be read, or is another tokenizer."""
    if not path.is_file():
        return None
    try:
        encoding = _encoding_of_file(path)
    except (ZbError, OSError):  # nobody has asked for this file
        return None
    return encoding if digest_of_encoding(encoding) == digest else None


def _encoded_by_ranks(encoding: Any, texts: list[str]) -> list[TokenIds | FormatError]:
    return [_ids_by_ranks(encoding, text) for text in texts]


def _ids_by_ranks(encoding: Any, text: str) -> TokenIds | FormatError:
    try:
        # to a buffer, not to a list of Python integers: threads would wait for each other to build lists
        found: TokenIds = encoding.encode_to_numpy(text, disallowed_special=())
        return found
    except BaseException as error:
        # tiktoken splits no run of a million spaces; its older versions panic, which `except Exception` does not catch
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return _ids_by_pieces(encoding, text)


def _ids_by_pieces(encoding: Any, text: str) -> TokenIds | FormatError:
    """Split a text by the library of regular expressions that tiktoken itself is tested with, and encode each piece."""
    library = require_package("regex", "text")
    try:
        pieces = (match[0] for match in library.finditer(encoding._pat_str, text))
        return np.fromiter(chain.from_iterable(map(encoding._encode_single_piece, pieces)), np.uint32)
    except Exception as error:  # of either library
        return FormatError(f"{encoding.name}: cannot encode a text of {len(text):,} characters: {error}")


def _read_tokenizer_json(path: Path) -> dict[str, Any]:
    """Return a `tokenizer.json` that encodes a text whole, and always in the same way.

    It is without truncation and padding, and without all that draws lots: the dropout of merges, and the samples of
    Unigram, which are for the training of a model from text.
    """
    text = read_whole(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a tokenizer.json: {error}") from error
    if not isinstance(content, dict) or "model" not in content:
        raise FormatError(f"{path}: not a tokenizer.json: it has no 'model'")
    model = content["model"]
    if isinstance(model, dict):
        model = {name: value for name, value in model.items() if name not in LOTS}
        if model.get("dropout"):
            model["dropout"] = None
    return {**content, "model": model, "truncation": None, "padding": None}


def as_unicode(text: str) -> str:
    """Return `text` with lone surrogates, which no UTF-8 has but JSON may spell, replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
