"""Checks every stored batch, and every chunk of a stream, against every digest that was stored with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from zb_hdf5.documents.document_table import DocumentPart, DocumentTable, DocumentTableFile, in_order
from zb_hdf5.documents.metadata import TableInfo
from zb_hdf5.documents.table_file import PiecesFile
from zb_hdf5.errors import (
    ArgumentError,
    ChecksumError,
    FormatError,
    IncompleteError,
    Remedy,
    UnavailableError,
    UnverifiableError,
    ZbError,
)
from zb_hdf5.files.listing import kept_listings
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT, SplitFiles
from zb_hdf5.files.threads import ReadPool
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.corpus_file import CorpusFile
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.flat_digest import FlatDigest
from zb_hdf5.formats.format import Format
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.read_as import AS_STORED, ReadAs, require_read_as
from zb_hdf5.spec import INDEX_NAME, NOT_KNOWN, STREAM_LAYOUT, StoreMeta, documents_path, pieces_path
from zb_hdf5.store.agreement import require_agreement
from zb_hdf5.store.both_formats import require_same_tokens
from zb_hdf5.store.digests import CHUNKS_OF_FLAT_FILES, Count, Digests, files_without_digests, needs_no_digests
from zb_hdf5.store.format_list import FORMATS, load_format
from zb_hdf5.store.found_path import look_of
from zb_hdf5.store.found_store import stores_at
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.lost_index import no_index
from zb_hdf5.store.opened_path import OpenedPath, OpenTables
from zb_hdf5.store.rebuild import PiecesFacts, entry_of
from zb_hdf5.store.recognition import files_in_place, format_of, no_known_file, require_datasets
from zb_hdf5.store.shard_report import ShardReport
from zb_hdf5.store.shard_table import ShardEntry
from zb_hdf5.store.unchecked_file import open_unchecked
from zb_hdf5.store.way_in import not_in_place

if TYPE_CHECKING:  # h5py, which `.batch` files do not need
    from zb_hdf5.formats.h5_column import Column


def check_pieces(corpus: Corpus, expected: TableInfo | None, report: ShardReport) -> PiecesFacts:
    """Check the pieces of a file of batches, and return their facts.

    Parameters
    ----------
    corpus
        The file.
    expected
        The pieces as the index has them; None: the file is in no store.
    report
        The report of the file; the check is added to it.
    """
    file = PiecesFile(
        corpus.path,
        corpus.num_units * corpus.meta.batch_size,
        corpus.meta.seq_len,
        sha256=expected.sha256 if expected else "",
        tokens_sha256=report.sha256,
    )
    with closing(file):
        if expected is not None and expected.num_bytes != file.num_bytes:
            raise FormatError(f"{file.path}: {INDEX_NAME} has {expected.num_bytes:,} bytes, found {file.num_bytes:,}")
        file.check()
        facts = PiecesFacts.of(file)
    report.checks.append("pieces")
    return facts


def check_sidecars(tables: OpenTables, corpus: Corpus, report: ShardReport) -> None:
    """Check the sidecars of a lone file. Raises as `check_pieces` does.

    Parameters
    ----------
    tables
        The document tables that somebody has open.
    """
    if pieces_path(corpus.path).exists():
        check_pieces(corpus, None, report)
    opened = tables.get(documents_path(corpus.path))
    if opened is not None:
        opened().check()
    else:
        table = DocumentTable.of_file(corpus.path, report.sha256, sha256=corpus.documents_sha256)
        if table is None:
            return
        with closing(table):
            table.file(0).check()
    if "documents" not in report.checks:
        report.checks.append("documents")


def verify_documents(folder: Path, tables: OpenTables, part: DocumentPart, place: DocumentPart | None) -> ShardReport:
    """Check one document table of a store, and its entry in the index.

    Parameters
    ----------
    folder
        The folder of the store.
    tables
        The tables that somebody has open.
    part
        The entry.
    place
        The entry as its neighbours give it; None: it belongs to no shard.
    """
    path = folder / part.path
    report = ShardReport(str(path), backend="hdf5", document_count=part.document_count)
    with _recorded(report):
        with nullcontext(tables[path]()) if path in tables else closing(DocumentTableFile(path, part)) as table:
            table.check()
            found = table.part()._replace(path=part.path)
        if place is None:
            raise FormatError(f"{path}: {INDEX_NAME} has it among the documents, and no shard that it belongs to")
        found = found._replace(first_token=place.first_token, first_document=place.first_document)
        if place.num_bytes == 0:  # of a stream: the table of its documents names no split
            found = found._replace(split=place.split)
        _compare_facts(folder, path, map(_Fact, DocumentPart._fields, part, found))
        report.sha256 = part.sha256
        report.checks = ["documents"]
    return report


def _places(index: ShardIndex) -> list[DocumentPart | None]:
    """Return for each document table the entry that its neighbours give: the split, the first token and document."""
    if index.meta.layout != STREAM_LAYOUT:
        return list(in_order(index.documents))
    shards = in_order(
        DocumentPart(_table_path(entry), 0, "", entry.split, 0, entry.token_count, 0, entry.document_count)
        for entry in index.shards
    )
    places = {shard.path: shard for shard in shards}
    return [places.get(part.path) for part in index.documents]


def _table_path(entry: ShardEntry) -> str:
    """Return the path of the documents of a stream, as the index has it."""
    return documents_path(Path(entry.path)).as_posix()


@contextmanager
def _recorded(report: ShardReport, *, is_lone: bool = False, is_named: bool = False) -> Iterator[None]:
    """Keep an error as the problem of a file.

    A lone file of another program has no digests of ours; its dataset may be named, and be the wrong one. A machine
    that lacks a codec, a server or the right to read tells nothing about the file.
    """
    try:
        yield
    except UnavailableError:
        raise
    except ZbError as error:
        is_of_call = isinstance(error, ArgumentError) and bool(error.options)
        if is_lone and (is_of_call or error.remedy in (Remedy.CONVERT, Remedy.CHANNELS)):
            raise
        if is_named and error.remedy is Remedy.DATASET:
            raise
        if is_lone and error.remedy is Remedy.DATASET:
            report.missing = f"no digest is stored: {error.facts}"
        elif is_lone and isinstance(error, UnverifiableError):
            report.missing = str(error).removeprefix(f"{report.path}: ")
        else:
            report.problem = error
    except PermissionError as error:
        raise UnavailableError(
            f"{report.path}: this user may not read it, so that nothing is known about it: ask for the right to it"
        ) from error
    except FileNotFoundError:
        report.problem = IncompleteError(f"{report.path}: is not there; restore it, or repair the store without it")
    except OSError as error:
        report.problem = IncompleteError(f"{report.path}: {error}")


@kept_listings()
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
    with _begin_look(path, opened.files) as look:
        require_datasets(look, read_as)
        stores = {} if read_as.lacks_header or read_as.digests is not None else stores_at(look.path)
        of_store = None if split == AUTO_SPLIT else split  # as a reader of a store has all
        reports, found = (
            _in_stores(look.path, stores, of_store, opened.index) if stores else _in_place(look, read_as, split)
        )
        checks = [_Check(look, known, opened, progress, announce) for known in found]
        if num_tokens := sum(check.num_tokens for check in checks):
            announce(num_tokens)
        with ReadPool(workers or len(os.sched_getaffinity(0)), "zb-verify") as readers:
            for check in checks:
                reports += check.run(readers)
    return reports


def _begin_look(path: str | os.PathLike[str], opened: Mapping[Path, Callable[[], FoundFile]]) -> Look:
    """Return a look at a path, which may be a file that somebody has open."""
    found = opened[path]().look if isinstance(path, Path) and path in opened else None
    return found or look_of(path)


def _in_stores(
    path: Path, stores: Mapping[str, Path], split: str | None, index: ShardIndex | None
) -> tuple[list[ShardReport], list[_InStore]]:
    """Return reports on what is wrong with the indexes of several stores, and the shards of each store.

    Parameters
    ----------
    index
        The index of a store that is alone, which somebody has read; None: each is read.

    Raises
    ------
    FormatError
        If the index of a store that is alone cannot be read.
    ArgumentError
        If no shard is of that split.
    """
    found: dict[str, ShardIndex] = {}
    reports = []
    for name, store in stores.items():
        report = ShardReport(str(store))
        with _recorded(report) if name else nullcontext():
            found[name] = ShardIndex.load(store) if index is None or name else index
        reports.append(report)
    compared = ShardReport(reports[-1].path)
    with _recorded(compared):
        require_same_tokens(path, found)
    shards = [_InStore.at(stores[name], index, split) for name, index in found.items()]
    return [report for report in (*reports, compared) if report.problem], shards


def _in_place(look: Look, read_as: ReadAs, split: str | None) -> tuple[list[ShardReport], list[_InPlace]]:
    """Return the files at a path that are in no store; where none are known, a report on that.

    Raises
    ------
    FormatError, BackendError
        If they are not read in place, or have digests of their own, or others than those that were made.
    """
    path = look.path
    digests = None if read_as.digests is None else Digests.load(read_as.digests)
    found: tuple[Format, list[Path]] | None
    found = files_in_place(look, read_as) if digests is None else files_without_digests(look, read_as)
    if found is None:
        return [_unknown(look, digests)], []
    code, files = found
    files = SplitFiles.at([path], files, split).files
    made: Mapping[str, FlatDigest] = {}
    if digests is not None:
        code = digests.as_digested(code)
        made = digests.files
    return [], [_InPlace(path, [CorpusFile.at(path, file, made) for file in files], code, read_as, digests)]


def _unknown(look: Look, digests: Digests | None) -> ShardReport:
    """Return the report of a file that no format has, and that has a name of ours; raise the error of another path."""
    path = look.path
    if problem := not_in_place(look):
        raise problem
    if digests is not None:
        raise needs_no_digests(path, digests.path)
    if look.is_dir:
        raise no_index(path)
    report = ShardReport(str(path))
    with _recorded(report, is_lone=True):
        raise no_known_file(look)
    return report


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


def _check_records(folder: Path, index: ShardIndex, reports: Sequence[ShardReport]) -> None:
    """Compare the counts in the headers of the shards, which no digest covers."""
    if not all(FORMATS[report.backend].tokens_only for report in reports):
        return
    found = sum(report.total_records for report in reports)
    expected = index.meta.total_records
    if found not in (expected, 0):
        where = reports[0]
        where.problem = FormatError(
            f"{where.path}: {INDEX_NAME} has {expected:,} records, the headers of the shards add up to {found:,}: one "
            "of them is damaged; its batches are whole",
            remedy=Remedy.REBUILD_FORCE,
            at=folder,
        )


class _Counted:
    """The tokens of one file that are checked, for its progress: one counts when the values of its fields are, too.

    Parameters
    ----------
    progress, announce
        As for `verify_store`.
    num_tokens
        The tokens that were announced; -1: they are not known before the file is open.
    """

    def __init__(self, progress: Count, announce: Count, num_tokens: int) -> None:
        self._progress = progress
        self._announce = announce
        self._num_tokens = num_tokens
        self._token_bytes = 1
        self._num_bytes = 0
        self._told = 0

    def found(self, num_tokens: int) -> None:
        """Announce the tokens of the file that is open now, unless they are announced already."""
        if self._num_tokens == NOT_KNOWN:
            self._num_tokens = num_tokens
            self._announce(num_tokens)

    def columns(self, meta: StoreMeta) -> list[tuple[str | None, Count]]:
        """Return each column, None for the tokens, and its progress, which is called with the values that were read."""
        sizes: list[tuple[str | None, int]] = [(None, meta.dtype.itemsize)]
        sizes += [(each.name, each.dtype.itemsize) for each in meta.fields]
        self._token_bytes = meta.dtype.itemsize + sum(each.dtype.itemsize * each.size for each in meta.fields)
        return [(name, partial(self._read, size)) for name, size in sizes]

    def _read(self, value_bytes: int, num_values: int) -> None:
        self._num_bytes += num_values * value_bytes
        self._reach(self._num_bytes // self._token_bytes)

    def end(self) -> None:
        """Count all tokens as checked, with those that are skipped after a bad one."""
        self._reach(self._num_tokens)

    def _reach(self, num_tokens: int) -> None:
        if num_tokens > self._told:
            self._progress(num_tokens - self._told)
            self._told = num_tokens


@dataclass(frozen=True)
class _Check:
    """The check of some files: the shards of one store, or the files at a path that are in none.

    Attributes
    ----------
    look
        The look at the path, which goes on as that at its file.
    known
        The files, and all that they are compared with.
    opened
        Those that somebody has open.
    progress, announce
        As for `verify_store`.
    """

    look: Look
    known: _InStore | _InPlace
    opened: OpenedPath
    progress: Count
    announce: Count

    @property
    def num_tokens(self) -> int:
        """The tokens of the files, as far as they are known before these are open."""
        return sum(max(file.num_tokens, 0) for file in self.known.files)

    def run(self, readers: ReadPool) -> list[ShardReport]:
        """Return a report on each file, and on all else that belongs to them."""
        reports = readers.map(self._file, count(), self.known.files)
        return reports + self.known.others(readers, reports, self.opened.tables)

    def _file(self, number: int, file: CorpusFile) -> ShardReport:
        path = file.path
        known = self.known
        report = ShardReport(str(path))
        counted = _Counted(self.progress, self.announce, file.num_tokens)
        begin = self.opened.files.get(path)
        opened = None if begin is None else begin()
        with (
            self._look_at(number, path, opened) as look,
            _recorded(report, is_lone=known.is_lone, is_named=known.is_named),
        ):
            column = None if opened is None else opened.column
            known.compare(number, look, column, self.opened.tables, report, counted)
        counted.end()
        return report

    def _look_at(self, number: int, path: Path, opened: FoundFile | None) -> Look:
        """Return the look at a file: that of the path goes on, and so does that of its first file, if there was one."""
        if opened is not None and opened.look is not None:
            return opened.look
        if path == self.look.path:
            return self.look
        return self.look.of(path) if number == 0 else Look(path)


@dataclass(frozen=True)
class _InStore:
    """The shards of a store, and the index with which they are compared.

    Attributes
    ----------
    folder
        The folder of the store.
    index
        The index of the shards.
    tables
        Its document tables, by their paths.
    is_whole
        Whether these are the shards of all splits.
    """

    folder: Path
    index: ShardIndex
    tables: Mapping[str, DocumentPart]
    is_whole: bool
    is_lone: ClassVar = False
    is_named: ClassVar = False

    @classmethod
    def at(cls, store: Path, index: ShardIndex, split: str | None) -> Self:
        """Return the shards of one split of a store, which is its folder or its `shards.json`; None: of all."""
        folder = store.parent if store.name == INDEX_NAME else store
        part = index.of_split(split, store)
        return cls(folder, part, {table.path: table for table in part.documents}, split is None)

    @property
    def files(self) -> Sequence[CorpusFile]:
        """The files of the shards."""
        return self.index.files(self.folder)

    def compare(
        self,
        number: int,
        look: Look,
        column: Column | None,
        opened: OpenTables,
        report: ShardReport,
        counted: _Counted,
    ) -> None:
        """Fill the report of the shard that has this number; `column` as for `open_unchecked`."""
        code = load_format(format_of(look))
        _compare_stored(code, look, column, report, counted, partial(self._compare_facts, number))

    def _compare_facts(self, number: int, corpus: Corpus, report: ShardReport) -> None:
        entry = self.index.shards[number]
        _check_entry(self.index, entry, self.tables.get(_table_path(entry)), corpus, report)
        if entry.crc32 != NOT_KNOWN and "crc32" not in report.checks:  # no reader opens it without the rows
            report.missing = corpus.missing_digests()

    def others(self, readers: ReadPool, reports: Sequence[ShardReport], opened: OpenTables) -> list[ShardReport]:
        """Return the reports on the document tables, and compare the counts of all shards if none of these is bad."""
        check = partial(verify_documents, self.folder, opened)
        tables = readers.map(check, self.index.documents, _places(self.index))
        if self.is_whole and not any(report.problem for report in reports):
            _check_records(self.folder, self.index, reports)
        return tables


@dataclass(frozen=True)
class _InPlace:
    """The files at a path that are in no store, and the digests that were made of them.

    Attributes
    ----------
    path
        The path.
    files
        The files.
    code
        Their format.
    read_as
        As for `verify_store`.
    digests
        The digests that were made of files that hold none; None: none were.
    """

    path: Path
    files: Sequence[CorpusFile]
    code: Format
    read_as: ReadAs
    digests: Digests | None
    is_lone: ClassVar = True

    @property
    def is_named(self) -> bool:
        """Whether the user names their dataset, so that the wrong one is an error of the call."""
        return self.digests is None and self.read_as.dataset is not None

    def compare(
        self,
        number: int,
        look: Look,
        column: Column | None,
        opened: OpenTables,
        report: ShardReport,
        counted: _Counted,
    ) -> None:
        """Fill the report of the file that has this number; `column` as for `open_unchecked`."""
        code = self.code
        if isinstance(code, FlatFormat) and (self.digests is not None or not code.row.takes_batches):
            report.backend = code.name
            self._compare_made(code, self.files[number], look, report, counted)
        else:
            _compare_stored(code, look, column, report, counted, partial(check_sidecars, opened))

    def _compare_made(
        self, flat: FlatFormat, file: CorpusFile, look: Look, report: ShardReport, counted: _Counted
    ) -> None:
        """Fill the report of a file of another trainer."""
        facts = flat.facts(look)
        report.token_count = facts.num_tokens
        flat.num_documents(facts)  # which reads them, and refuses those that no reader reads
        opened = FoundFile(path=facts.path, meta=CHUNKS_OF_FLAT_FILES, known=facts, look=look)
        if self.digests is None:
            flat.open(opened).close()  # which refuses what no reader reads
            report.missing = f"{flat.row.noun} hold no digests; {Remedy.DIGESTS.about(str(facts.path))}"
            return
        if file.made is None:
            report.missing = f"{self.digests.path} has no digests of it"
            return
        made = self.digests.require(facts, file.name)
        with flat.open(replace(opened, digest=made)) as corpus:
            report.sha256, report.checks = corpus.digests.compare(counted.columns(corpus.meta)[0][1])
        if made.documents_sha256:
            made.require_documents(facts.path, flat.document_offsets(facts))
            report.checks.append("documents")

    def others(self, readers: ReadPool, reports: Sequence[ShardReport], opened: OpenTables) -> list[ShardReport]:
        """Return a report on each file that was digested and is not there."""
        if self.digests is None or not self.path.is_dir():
            return []
        missing = self.digests.missing(self.path, [file.name for file in self.files])
        return [ShardReport(path, backend=self.code.name, problem=error) for path, error in missing.items()]


def _compare_stored(
    code: Format,
    look: Look,
    column: Column | None,
    report: ShardReport,
    counted: _Counted,
    compare_facts: Callable[[Corpus, ShardReport], None],
) -> None:
    """Fill the report of a file that holds digests; `compare_facts` compares all but its tokens and fields."""
    report.backend = code.name
    if not code.row.holds_batches:
        report.token_count, report.missing = code.count(look)
        return
    with open_unchecked(code, look, column) as corpus:
        counted.found(corpus.num_tokens)
        _compare_columns(corpus, report, counted)
        compare_facts(corpus, report)
        if not report.checks:
            report.missing = corpus.missing_digests()
        report.checks += [f"field {name}" for name in report.fields]
        if not corpus.complete:
            raise _is_unfinished(corpus.path, report)


def _compare_columns(corpus: Corpus, report: ShardReport, counted: _Counted) -> None:
    """Take the facts of a file, and compare its tokens and the values of its fields with their digests."""
    report.total_records = corpus.meta.total_records
    report.token_count = corpus.num_tokens
    if not corpus.is_stream:
        report.num_batches = corpus.num_units
    for name, progress in counted.columns(corpus.meta):
        if name is None:
            report.sha256, report.checks = corpus.digests.compare(progress)
        else:
            report.fields[name], _ = corpus.field(name).digests.compare(progress)


def _is_unfinished(path: Path, report: ShardReport) -> IncompleteError:
    committed = f"{report.token_count:,} tokens"
    if report.num_batches:
        committed = f"{report.num_batches:,} batches"
    return IncompleteError(
        f"{path}: its writer has not finished: {committed} are committed", remedy=Remedy.REPAIR, at=path
    )


def _check_entry(
    index: ShardIndex, entry: ShardEntry, table: DocumentPart | None, corpus: Corpus, report: ShardReport
) -> None:
    """Compare a shard with its entry in the index."""
    if not entry.complete:
        raise IncompleteError(
            f"{corpus.path}: is growing, or its writer was killed", remedy=Remedy.REPAIR, at=corpus.path.parent
        )
    if entry.num_batches == corpus.num_units:
        _compare_sha256(corpus.path, entry.sha256, report.sha256)
    if (names := {field.name for field in corpus.meta.fields}) != entry.fields.keys():
        raise FormatError(f"{corpus.path}: {INDEX_NAME} names the fields {sorted(entry.fields)}, found {sorted(names)}")
    for name, found in report.fields.items():
        _compare_sha256(corpus.field(name).path, entry.fields[name].sha256, found)
    if entry.backend != corpus.backend:
        raise FormatError(f"{corpus.path}: {INDEX_NAME} has backend {entry.backend!r}, found {corpus.backend!r}")
    require_agreement(index, entry, corpus)
    pieces = None if entry.pieces is None else check_pieces(corpus, entry.pieces, report)
    of_file = entry_of(corpus, corpus.origin.get("split"), sha256=report.sha256, pieces=pieces)
    folder = corpus.path.parents[entry.path.count("/")]
    _compare_facts(folder, corpus.path, _facts(index, entry, table, corpus, of_file))
    report.checks.append("index")


class _Fact(NamedTuple):
    """One fact about a shard: its values in the index and in the file, and the value of an unknown one."""

    name: str
    in_index: Any
    in_file: Any
    unknown: Any = ()  # never the value of a fact: this one is always known


def _facts(
    index: ShardIndex, entry: ShardEntry, table: DocumentPart | None, corpus: Corpus, found: ShardEntry
) -> Iterator[_Fact]:
    """Yield the facts about a shard that `require_agreement` does not compare; `found` are those of its file."""
    names_split = "split" in corpus.origin or found.pieces is not None
    yield _Fact("bytes", entry.num_bytes, found.num_bytes, 0)
    yield _Fact("crc32", entry.crc32, found.crc32, NOT_KNOWN)
    yield _Fact("split", entry.split, found.split if names_split else None, None)
    yield _Fact("document_count", entry.document_count, found.document_count, NOT_KNOWN)
    yield _Fact("pieces", entry.pieces, found.pieces)
    yield _Fact("codecs", entry.compressed, found.compressed, None if entry.compressed is None else ())
    if index.meta.layout == STREAM_LAYOUT:
        yield _Fact("sha256 of its documents", table.sha256 if table else "", corpus.documents_sha256)
    for column, runs in entry.columns.items():
        yield _Fact(f"places of {column}", runs, found.columns.get(column))
    for name, digest in entry.fields.items():
        yield _Fact(f"field {name}", digest, found.fields[name])
    yield _Fact("fields", index.meta.fields, corpus.meta.fields)
    yield _Fact("boundary_token_id", index.meta.boundary_token_id, corpus.meta.boundary_token_id)
    for name, unknown in (("seed", 0), ("vocab_size", 0), ("tokenizer", "")):
        yield _Fact(name, getattr(index.meta, name), getattr(corpus.meta, name), unknown)


def _compare_facts(folder: Path, path: Path, facts: Iterable[_Fact]) -> None:
    """Raise `FormatError` at the first fact that differs between the index and the file."""
    for fact in facts:
        is_known = fact.unknown not in (fact.in_index, fact.in_file)
        if is_known and fact.in_index != fact.in_file:
            raise FormatError(
                f"{path}: {INDEX_NAME} has {fact.name} {fact.in_index!s:.99}, the file has {fact.in_file!s:.99}",
                remedy=Remedy.REBUILD_FORCE,
                at=folder,
            )


def _compare_sha256(path: Path, expected: str, found: str) -> None:
    if expected != found:
        raise ChecksumError(f"{path}: {INDEX_NAME} has sha256 {expected}, its bytes give {found}; restore it")
