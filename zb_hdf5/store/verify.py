"""Checks every stored batch, and every chunk of a stream, against every digest that was stored with it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from zb_hdf5.errors import ArgumentError, UnverifiableError
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.threads import ReadPool
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.corpus_file import CorpusFile
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.read_as import AS_STORED, ReadAs, require_read_as
from zb_hdf5.store.check_progress import CheckProgress
from zb_hdf5.store.compared_files import ComparedFiles
from zb_hdf5.store.compared_in_place import compared_in_place
from zb_hdf5.store.compared_shards import compared_in_stores
from zb_hdf5.store.digests import Count
from zb_hdf5.store.file_check import FileCheck, recorded
from zb_hdf5.store.found_path import look_of
from zb_hdf5.store.found_store import stores_at
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.opened_path import OpenedPath
from zb_hdf5.store.recognition import require_datasets
from zb_hdf5.store.shard_report import ShardReport


def verify_store(
    path: str | os.PathLike[str] | Corpus | Batches,
    *,
    split: str | None = None,
    read_as: ReadAs = AS_STORED,
    workers: int | None = None,
    progress: Count = lambda tokens: None,
    announce: Count = lambda tokens: None,
) -> list[ShardReport]:
    """Check a file, or every shard of a store, several shards at a time: batches, streams and `.npy` files.

    A folder may have a store of the same tokens for each format: both are checked, and compared.

    Parameters
    ----------
    path
        A file or a folder; or a corpus, or batches of one, whose path is looked at anew by the split and the `read_as`
        that it was opened with.
    split
        Split of a store, or of a folder of files whose names tell them, that alone is checked; None: all of them.
    read_as
        How files are read that do not tell it themselves, and the digests that were made of them.
    workers
        Threads; by default one per core that this process may use. Hashing and reading release the interpreter lock.
    progress
        Called with the number of tokens checked since the last call, from any of the threads.
    announce
        Called with the number of tokens that there are to check, each time that more are known.

    Returns
    -------
    list of ShardReport
        One per file, in order; the document tables come last. A damaged file is a report with a `problem`, and
        one that has no digest to compare with is a report with the digest as `missing`; neither is an exception.

    Raises
    ------
    FormatError
        If `path` is a folder whose `shards.json` cannot be read, or a file of no known format, or if there are no such
        digests.
    ArgumentError
        If no shard is of that split, or a split or `read_as` is given beside a corpus, which has them.
    BackendError
        If digests are given for files that hold their own.
    UnavailableError
        If this machine lacks something that a file needs, such as a codec, or this user may not read it: nothing is
        known about the files.
    """
    if isinstance(path, Corpus | Batches):
        path, split, read_as = _opened_as(path if isinstance(path, Corpus) else path.corpus, split, read_as)
    return _reports_on(path, split, read_as, OpenedPath(), workers, progress, announce)


def _opened_as(corpus: Corpus, split: str | None, read_as: ReadAs) -> tuple[str | os.PathLike[str], str | None, ReadAs]:
    """Return the path of a corpus, and the split and `read_as` that it was opened with; refuse others beside it."""
    for name, value, default in (("split", split, None), ("read_as", read_as, AS_STORED)):
        if value != default:
            raise ArgumentError(
                f"{corpus.path}: {name}={value!r} is chosen when a corpus is opened: pass it to open_corpus, or pass "
                "the path to verify_store",
                options=[name],
            )
    opened = corpus.opened
    return opened.path, opened.how["split"], opened.how["read_as"]


def _reports_on(
    path: str | os.PathLike[str],
    split: str | None,
    read_as: ReadAs,
    opened: OpenedPath,
    workers: int | None = None,
    progress: Count = lambda tokens: None,
    announce: Count = lambda tokens: None,
) -> list[ShardReport]:
    """Return the reports on the files at a path, as `verify_store`."""
    require_read_as(read_as)
    with _begin_look(path, opened) as look:
        require_datasets(look, read_as)
        reports, found = _compared_at(look, split, read_as, opened.index)
        check = _PathCheck(look, opened, progress, announce)
        # -1: the tokens of a file may be unknown before it is open
        if num_tokens := sum(max(file.num_tokens, 0) for compared in found for file in compared.files):
            announce(num_tokens)
        with ReadPool(workers or len(os.sched_getaffinity(0)), "zb-verify") as readers:
            for compared in found:
                reports += check.reports_on(compared, readers)
    return reports


def _begin_look(path: str | os.PathLike[str], opened: OpenedPath) -> Look:
    """Return a look at a path, which somebody may have, or may have open as a file."""
    begin = opened.files.get(path) if isinstance(path, Path) else None
    found = opened.look if begin is None else begin().look
    return found or look_of(path)


def _compared_at(
    look: Look, split: str | None, read_as: ReadAs, index: ShardIndex | None
) -> tuple[list[ShardReport], list[ComparedFiles]]:
    """Return the files of each store at a path, or its files in no store; and reports on what is wrong with indexes."""
    stores = {} if read_as.lacks_header or read_as.digests is not None else stores_at(look.path)
    if not stores:
        return compared_in_place(look, read_as, split)
    return compared_in_stores(look.path, stores, None if split == AUTO_SPLIT else split, index)  # a reader has all


@dataclass(frozen=True)
class _PathCheck:
    """The check of the files at a path.

    Attributes
    ----------
    look
        The look at the path, which goes on as that at its file.
    opened
        The files that somebody has open.
    progress, announce
        As for `verify_store`.
    """

    look: Look
    opened: OpenedPath
    progress: Count
    announce: Count

    def reports_on(self, compared: ComparedFiles, readers: ReadPool) -> list[ShardReport]:
        """Return a report on each of some files, and on all else that belongs to them."""
        reports = readers.map(partial(self._report, compared), count(), compared.files)
        return reports + compared.others(readers, reports, self.opened.tables)

    def _report(self, compared: ComparedFiles, number: int, file: CorpusFile) -> ShardReport:
        path = file.path
        report = ShardReport(str(path))
        progress = CheckProgress(self.progress, self.announce, file.num_tokens)
        begin = self.opened.files.get(path)
        opened = None if begin is None else begin()
        with self._look_at(number, path, opened) as look, recorded(report, compared.take_error):
            column = None if opened is None else opened.column
            compared.compare(FileCheck(number, file, look, column, self.opened.tables, report, progress))
        progress.end()
        return report

    def _look_at(self, number: int, path: Path, opened: FoundFile | None) -> Look:
        """Return the look at a file: that of the path goes on, and so does that of its first file, if there was one."""
        if opened is not None and opened.look is not None:
            return opened.look
        if path == self.look.path:
            return self.look
        return self.look.of(path) if number == 0 else Look(path)


def require_digests(
    path: Path, split: str | None = None, read_as: ReadAs = AS_STORED, opened: OpenedPath | None = None
) -> None:
    """Compare a store or stream with its digests; raise the first problem, or `UnverifiableError` where one lacks.

    Parameters
    ----------
    path, split, read_as
        As for `verify_store`.
    opened
        Its files that are open; None: none.
    """
    for report in _reports_on(path, split, read_as, opened or OpenedPath()):
        if report.problem:
            raise report.problem
        if report.missing:
            raise UnverifiableError(f"{report.path}: cannot be verified: {report.missing}")
