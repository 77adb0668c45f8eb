"""A field set as a job asks for it: made by the first job, and compared by the others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from zb_hdf5.errors import ArgumentError, ConvertError, NotFoundError, Remedy, UnverifiableError, counted, parse_size
from zb_hdf5.field import BFLOAT16, UNITS, Field, is_field_name, parse_fields
from zb_hdf5.field_sets.field_set import FieldSet
from zb_hdf5.field_sets.part_claim import STALE_S
from zb_hdf5.field_sets.set_plan import FieldSetPlan
from zb_hdf5.files.paths import local_path, on_failure
from zb_hdf5.files.publishing import refuse_existing
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.notes import note
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import ABOUT, SET_FACTS, SET_GROWN
from zb_hdf5.store.bound_tokens import bound_files, require_bound, split_of
from zb_hdf5.store.opening import open_corpus
from zb_hdf5.store.sealed_text import sealed_text
from zb_hdf5.store.set_facts import (
    SAMPLED,
    BoundFile,
    SetFacts,
    files_to_json,
    grown_files,
    maker_text,
    publish_new,
    records_in_part,
)
from zb_hdf5.store.set_place import set_folder
from zb_hdf5.text.tokenizers import require_tokenizer

#: The kinds of a field as people write them: a dtype, with a shape, or a `Field`.
FieldKinds: TypeAlias = Mapping[str, Any] | Sequence[Field]


def open_field_set(
    source: str | os.PathLike[str] | Corpus,
    name: str,
    fields: FieldKinds | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    about: str = ABOUT[0],
    seq_len: int | None = None,
    stride: int | None = None,
    maker: object = "",
    tokenizer: Any = None,
    note: str = "",
    words: Sequence[str] = (),
    part_bytes: int | str | None = None,
    require_digests: bool = False,
    stale_s: float = STALE_S,
    read_as: ReadAs = AS_STORED,
) -> FieldSet:
    """Open a field set to write values into it; the first job makes it, and others compare their arguments with it.

    Tokens, `shards.json`, states and fingerprints are never touched.

    Parameters
    ----------
    source
        The tokens: a path for `open_corpus`, whose split for training is taken, and whose reads are all compared with
        digests, if there are any; or a corpus of one split.
    name
        The name of the set, as of a field.
    fields
        Name -> dtype, or (dtype, shape of the values of one token), or "bfloat16"; or `Field`s, whose `unit` is
        "token", "record" or "document". NaN is refused, unless a `Field` allows it. None: the set is there.
    path
        The folder of the set. None: `fields/<name>/<split>/` in the store, or in `<path>.fields/` beside a lone file
        or a folder of other files.
    about
        "next": the value at a token is about the token after it, as the probabilities that a model gives after it has
        read this token. "token": it is about the token itself, as a weight. A loader with targets gives at each place
        the value that is about its target in both cases.
    seq_len, stride
        For a stream: the window that the maker of the values sees, and how many tokens of it are new; `stride`, by
        default `seq_len`, divides `seq_len`.
    maker
        Whatever names the maker: model, revision, commit. Text, or what JSON has.
    tokenizer
        The tokenizer of the maker, as for `load_tokenizer`: another one than that of the tokens is refused.
    note
        Free text.
    words
        The words of the codes, for a field of documents that `documents=["meta:<name>"]` of a `Loader` gives.
    part_bytes
        The bytes of a part, about, as a number or "1GiB". None: 8 GiB, or a 1,024th of the set where that is less,
        but 64 MiB at least.
    require_digests
        Whether tokens without a stored digest are refused; else they are bound by a sample, which is noted.
    stale_s
        Seconds after which a part is taken over whose job has not touched it.
    read_as
        As for `open_corpus`, for a path alone.

    Raises
    ------
    ArgumentError
        If the arguments contradict each other, the corpus, or the set that is there.
    ChecksumError
        If the set belongs to other tokens.
    ConvertError
        If the disk has too little space for a new set.
    NotFoundError
        If `fields` is None, and the set is not there.
    UnverifiableError
        If digests are required, and not stored.
    StateError
        If the tokens were made with another tokenizer.

    Examples
    --------
    >>> with open_field_set("train-h5", "teacher", {"logprobs": ("f2", (64,))}) as teacher:  # doctest: +SKIP
    ...     for step in teacher.missing(batch_size=8):
    ...         teacher.write(step["records"], logprobs=top_k(model(step["tokens"])))
    ...     teacher.finish()
    """
    _require_name(name)
    corpus = _corpus_of(source, read_as)
    with on_failure(corpus.close if corpus is not source else lambda: None):
        split = split_of(corpus)
        folder = set_folder(corpus.path, name, split) if path is None else local_path(path)
        files = bound_files(corpus)
        if any(file.digest.startswith(SAMPLED) for file in files):
            _note_sampled(corpus.path, require_digests)
        if tokenizer is not None:
            require_tokenizer(corpus.meta.tokenizer, tokenizer, corpus.path)
        asked = None
        if fields is not None:
            how: dict[str, Any] = {"maker": maker_text(maker), "note": note, "words": tuple(words), "about": about}
            asked = _asked(corpus, files, name, split, parse_set_fields(fields), (seq_len, stride), **how)
            asked = _cut(asked, corpus, part_bytes)
            _make(folder, asked)
        facts = _load(folder, name, corpus.path, files, asked)
        if asked is not None and part_bytes is not None and facts.part_records != asked.part_records:
            raise ArgumentError(
                f"{folder}: this field set has parts of {counted(facts.part_records, 'record')}, found part_bytes="
                f"{part_bytes!r}, which are {counted(asked.part_records, 'record')}",
                options=["part_bytes"],
            )
        return FieldSet(folder, facts, corpus, stale_s, closes=corpus is not source)


def plan_field_set(
    source: str | os.PathLike[str] | Corpus,
    name: str,
    fields: FieldKinds,
    *,
    path: str | os.PathLike[str] | None = None,
    seq_len: int | None = None,
    stride: int | None = None,
    part_bytes: int | str | None = None,
    read_as: ReadAs = AS_STORED,
) -> FieldSetPlan:
    """Return the parts of a field set that is not made yet, and the room that they take; nothing is written.

    Parameters
    ----------
    source, name, fields, path, seq_len, stride, part_bytes, read_as
        As for `open_field_set`.

    Raises
    ------
    ArgumentError
        If the arguments contradict each other, or the corpus.
    ExistsError
        If the set is there.

    Examples
    --------
    >>> plan = plan_field_set("train-h5", "teacher", {"logprobs": ("f2", (64,))})  # doctest: +SKIP
    >>> plan.num_bytes, plan.num_parts, plan.lack  # doctest: +SKIP
    """
    _require_name(name)
    corpus = _corpus_of(source, read_as)
    with nullcontext() if corpus is source else closing(corpus):
        split = split_of(corpus)
        folder = set_folder(corpus.path, name, split) if path is None else local_path(path)
        refuse_existing(folder / SET_FACTS)
        asked = _asked(corpus, bound_files(corpus), name, split, parse_set_fields(fields), (seq_len, stride))
        return FieldSetPlan.of(folder, _cut(asked, corpus, part_bytes))


def _require_name(name: str) -> None:
    if not is_field_name(name):
        raise ArgumentError(f"expected a name of letters, digits and _ for a field set, found {name!r}")


def _asked(
    corpus: Corpus,
    files: tuple[BoundFile, ...],
    name: str,
    split: str,
    fields: tuple[Field, ...],
    windows: tuple[int | None, int | None],
    about: str = ABOUT[0],
    **facts: Any,
) -> SetFacts:
    """Return the facts of a set as a job asks for it, before it is cut into parts."""
    is_of_documents = {field.unit == UNITS[2] for field in fields}
    if len(is_of_documents) > 1:
        raise ArgumentError(f"field set {name}: fields of documents are a set of their own")
    record_tokens, seq_len = (0, 0) if True in is_of_documents else _records_of(corpus, *windows)
    return SetFacts(
        name=name,
        split=split,
        fields=fields,
        about=about,
        record_tokens=record_tokens,
        seq_len=seq_len,
        num_documents=len(corpus.require_documents()) if True in is_of_documents else 0,
        part_records=1,
        files=files,
        tokenizer=corpus.meta.tokenizer,
        **facts,
    )


def _corpus_of(source: str | os.PathLike[str] | Corpus, read_as: ReadAs) -> Corpus:
    """Return a corpus as it is, or open that of a path: of several splits the one for training.

    Each read of the maker of the values is compared with the digests of the tokens, if they have any.
    """
    if isinstance(source, Corpus):
        if read_as != AS_STORED:
            raise ArgumentError(f"{source.path}: is open: pass read_as to open_corpus", options=["read_as"])
        return source
    try:
        corpus = open_corpus(source, read_as=read_as, verify="batch")
    except UnverifiableError:
        corpus = open_corpus(source, read_as=read_as)
    if corpus.training_split is None:
        return corpus
    with closing(corpus):
        return corpus.split(corpus.training_split)


def _note_sampled(path: Path, require_digests: bool) -> None:
    if require_digests:
        raise UnverifiableError(f"{path}: no digest of its tokens is stored", remedy=Remedy.DIGESTS, at=path)
    note(f"{path}: no digest of its tokens is stored: a field set is bound to them by a sample")


def _records_of(corpus: Corpus, seq_len: int | None, stride: int | None) -> tuple[int, int]:
    """Return the new tokens of a record, and the tokens of a window of a stream; 0 for stored records."""
    windows = corpus.windows
    if windows is not None:
        if seq_len not in (None, windows.length) or stride not in (None, windows.length):
            raise ArgumentError(
                f"{corpus.path}: its records have {windows.length:,} tokens: leave out seq_len and stride",
                options=["seq_len"],
            )
        return windows.length, 0
    if seq_len is None:
        raise ArgumentError(
            f"{corpus.path}: is a token stream: pass the seq_len of the windows that the maker of the values sees",
            options=["seq_len"],
        )
    stride = seq_len if stride is None else stride
    if seq_len < 1 or stride < 1 or seq_len % stride:
        raise ArgumentError(f"expected a stride that divides seq_len={seq_len:,}, found {stride:,}")
    return stride, seq_len


def parse_set_fields(fields: FieldKinds) -> tuple[Field, ...]:
    """Return the fields of a set, in the order of their names."""
    if isinstance(fields, Mapping):
        return parse_fields(each if isinstance(each, Field) else _field_of(name, each) for name, each in fields.items())
    return parse_fields(fields)


def _field_of(name: str, described: Any) -> Field:
    """Return a field of a dtype, and perhaps a shape."""
    has_shape = isinstance(described, tuple) and len(described) == 2
    dtype, shape = described if has_shape else (described, ())
    kind = BFLOAT16 if str(dtype) in (BFLOAT16, f"torch.{BFLOAT16}") else ""
    [found] = parse_fields({name: (np.uint16 if kind else dtype, (shape,) if isinstance(shape, int) else shape)})
    return replace(found, allow_nan=False, kind=kind)


def _cut(asked: SetFacts, corpus: Corpus, part_bytes: int | str | None) -> SetFacts:
    """Return the facts of a set with its cut into parts."""
    if isinstance(part_bytes, str):
        part_bytes = parse_size(part_bytes)
    batch_records = 1 if corpus.windows is None or asked.is_of_documents else corpus.windows.size
    batch_records = max(batch_records, asked.context_records + 1)
    return asked.cut(records_in_part(asked.num_records, asked.record_bytes, batch_records, part_bytes))


def _make(folder: Path, asked: SetFacts) -> None:
    """Make the set in a folder, unless it is there: of several jobs exactly one does."""
    if (folder / SET_FACTS).exists():
        return
    if lack := FieldSetPlan.of(folder, asked).lack:
        raise ConvertError(lack)
    folder.mkdir(parents=True, exist_ok=True)
    publish_new(folder / SET_FACTS, asked.to_json())


def _load(folder: Path, name: str, path: Path, files: tuple[BoundFile, ...], asked: SetFacts | None) -> SetFacts:
    """Read the facts of a set, compare them with a job and the tokens, and add files of tokens that came later."""
    if not (folder / SET_FACTS).exists():
        raise NotFoundError(f"{folder}: there is no field set {name!r}: pass its fields to make it")
    while True:
        facts = SetFacts.load(folder)
        if asked is None:  # else all facts are compared below
            facts.require_name(name, folder)
        new = require_bound(facts, files, folder, path)
        if not new:
            break
        if facts.is_of_documents:
            raise ArgumentError(f"{folder}: {path} has more documents now: make a new set for them")
        number = len(list(grown_files(folder))) + 1
        text = sealed_text({"of": facts.name}, {"files": files_to_json(new)})
        publish_new(folder / f"{SET_GROWN}{number:05}.json", text)
    if asked is not None:
        facts.require_same(asked, folder)
    return facts
