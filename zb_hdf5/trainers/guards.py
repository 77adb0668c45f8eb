"""The code of installed packages, called: an exception in it becomes an error that names the package."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import Identity
from zb_hdf5.formats.batch_writer import ShardInfo
from zb_hdf5.formats.document_source import Choose, CompletedSource, DocumentGroup, Encoded, missing_members
from zb_hdf5.formats.document_writer import DocumentWriter, WrittenShard
from zb_hdf5.formats.flat import FlatDigest, FlatFormat, FlatReader, FlatTokens
from zb_hdf5.spec import StoreMeta, TokenArray
from zb_hdf5.trainers.installed_formats import errors_of


class GuardedFlat(FlatFormat):
    """A flat format of a package.

    Parameters
    ----------
    flat
        The format, as the package has it.
    package, name
        The package and the format, for messages.
    """

    def __init__(self, flat: FlatFormat, package: str, name: str) -> None:
        super().__init__(flat.suffixes, flat.read_as)
        self._flat = flat
        self._package = package
        self._name = name
        self.sign = flat.sign  # type: ignore[misc]
        self.holds_records = flat.holds_records  # type: ignore[misc]
        self.documents_suffix = flat.documents_suffix  # type: ignore[misc]

    def files(self, look: Look) -> list[Path]:
        with errors_of(self._package, self._name):
            return self._flat.files(look)

    def recognises(self, look: Look) -> bool:
        with errors_of(self._package, self._name):
            return self._flat.recognises(look)

    def facts(self, look: Look) -> FlatTokens:
        with errors_of(self._package, self._name):
            return self._flat.facts(look)

    def beside(self, path: Path) -> list[Path]:
        with errors_of(self._package, self._name):
            return self._flat.beside(path)

    def file_of_field(self, path: Path, name: str) -> Path:
        with errors_of(self._package, self._name):
            return self._flat.file_of_field(path, name)

    def field_files(self, ids: Sequence[Path]) -> list[Path]:
        with errors_of(self._package, self._name):
            return self._flat.field_files(ids)

    def facts_without_header(self, look: Look) -> FlatTokens:
        with errors_of(self._package, self._name):
            return self._flat.facts_without_header(look)

    def num_documents(self, found: FlatTokens) -> int:
        with errors_of(self._package, self._name):
            return self._flat.num_documents(found)

    def document_offsets(self, found: FlatTokens) -> npt.NDArray[np.uint64]:
        with errors_of(self._package, self._name):
            return self._flat.document_offsets(found)

    def open(
        self,
        found: FlatTokens,
        meta: StoreMeta,
        access: str = "auto",
        identity: Identity | None = None,
        digest: FlatDigest | None = None,
    ) -> FlatReader:
        with errors_of(self._package, self._name):
            return self._flat.open(found, meta, access, identity, digest)


class GuardedSource(CompletedSource):
    """A source of documents of a package, as a `DocumentSource`. Picklable, as that is.

    Parameters
    ----------
    source
        The source, as the package has it: any object that has the members without a default.
    package, name
        The package and the format, for messages.

    Raises
    ------
    PackageError
        If it lacks such members.
    """

    def __init__(self, source: Any, package: str, name: str) -> None:
        self._package = package
        self._name = name
        with errors_of(package, name):
            missing = missing_members(source)
            if missing:
                raise TypeError(
                    f"expected a source of documents, found a {type(source).__name__} without {', '.join(missing)}"
                )
            super().__init__(source)

    def read(self, group: DocumentGroup, choose: Choose | None, num_threads: int) -> Iterator[Encoded]:
        with errors_of(self._package, self._name):
            yield from super().read(group, choose, num_threads)


def guarded_writer(writer: type[DocumentWriter], package: str, name: str) -> type[DocumentWriter]:
    """Return a writer of a package whose errors name it."""

    class GuardedWriter(writer):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            with errors_of(package, name):
                super().__init__(*args, **options)

        @classmethod
        def dtype_of(cls, meta: StoreMeta) -> np.dtype[Any]:
            with errors_of(package, name):
                found: np.dtype[Any] = super().dtype_of(meta)
                return found

        @classmethod
        def files(cls, path: Path, meta: StoreMeta) -> list[Path]:
            with errors_of(package, name):
                found: list[Path] = super().files(path, meta)
                return found

        @classmethod
        def beside(cls, path: Path) -> list[Path]:
            with errors_of(package, name):
                found: list[Path] = super().beside(path)
                return found

        @classmethod
        def complete_folder(
            cls, folder: Path, shards: Sequence[WrittenShard], meta: StoreMeta, facts: Collection[str]
        ) -> None:
            with errors_of(package, name):
                super().complete_folder(folder, shards, meta, facts)

        def abort(self) -> None:
            with errors_of(package, name):
                super().abort()

        def write_documents(
            self,
            tokens: TokenArray,
            lengths: npt.NDArray[np.int64],
            fields: Mapping[str, npt.NDArray[Any]] | None = None,
            documents: DocumentRows | None = None,
        ) -> None:
            with errors_of(package, name):
                super().write_documents(tokens, lengths, fields, documents)

        def finish(self) -> ShardInfo:
            with errors_of(package, name):
                info: ShardInfo = super().finish()
                return info

    return GuardedWriter
