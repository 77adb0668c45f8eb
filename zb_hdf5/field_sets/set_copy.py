"""A copy of a finished field set: its parts as they are, and its facts bound to a copy of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from zb_hdf5.errors import ChecksumError, FormatError, IncompleteError
from zb_hdf5.files.publishing import copy_published, fsync_directory, write_atomically
from zb_hdf5.files.threads import MAX_THREADS, read_ahead
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.spec import SET_FACTS, SET_INDEX
from zb_hdf5.store.bound_tokens import rebound
from zb_hdf5.store.set_facts import SetFacts, publish_new
from zb_hdf5.store.set_index import SetIndex, index_of, part_digest, parts_in
from zb_hdf5.store.value_part import ValuePart


def copy_parts(
    folder: Path,
    facts: SetFacts,
    index: SetIndex,
    target: Path,
    numbers: Iterable[int],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy some parts of a finished set; several jobs may copy a share each. `bind_copy` ends it.

    Parts that are there with the digest of the index are kept, so that a copy that ended early goes on. No value is
    compared: the crc32 of each record is copied with it.

    Parameters
    ----------
    folder, facts, index
        The set; its folder may be in a bucket.
    target
        The folder of the copy, which is made.
    numbers
        The parts, counted from 0.
    progress
        Called with the bytes of each part that is there now.
    """
    target.mkdir(parents=True, exist_ok=True)
    _publish_same(target / SET_FACTS, facts.to_json())
    _publish_same(target / SET_INDEX, index.to_json())
    parts = index.parts
    names = set(parts["path"])
    for _, path in parts_in(target):
        if path.name not in names:  # of an older set of this name
            path.unlink()

    def copy(number: int) -> int:
        name = parts["path"][number]
        if not _is_part(target / name, facts, parts["sha256"][number]):
            copy_published(folder / name, target / name)
        return int(parts["bytes"][number])

    for num_bytes in read_ahead(copy, iter(numbers), MAX_THREADS, threads=MAX_THREADS):
        progress(num_bytes)


def _publish_same(path: Path, text: str) -> None:
    """Write a text to a file, which other jobs may write at the same time."""
    if not publish_new(path, text) and path.read_text(encoding="utf-8") != text:
        write_atomically(path, text.encode())


def _is_part(path: Path, facts: SetFacts, sha256: str) -> bool:
    """Return whether a part of a digest is there."""
    if not path.exists():
        return False
    try:
        with closing(ValuePart(path, facts)) as part:
            crc32 = {field.name: part.crc32(field) for field in facts.fields}
    except (FormatError, IncompleteError):
        return False
    return part_digest(facts, part.layout.first, part.layout.records, crc32) == sha256


def bind_copy(folder: Path, tokens: Corpus) -> None:
    """End a copy of a set: see that all parts are there, and bind it to a copy of its tokens.

    Parameters
    ----------
    folder
        The copy of the set.
    tokens
        The copy of its tokens.

    Raises
    ------
    ChecksumError
        If these are other tokens, or the index names other parts.
    IncompleteError
        If a part is missing.
    """
    facts = rebound(SetFacts.load(folder), tokens)
    if index_of(folder, facts) != SetIndex.load(folder, facts):
        raise ChecksumError(f"{folder}: its parts differ from {SET_INDEX}: the field set was changed meanwhile")
    write_atomically(folder / SET_FACTS, facts.to_json().encode())
    for above in (folder.parent, folder.parent.parent):
        fsync_directory(above)
