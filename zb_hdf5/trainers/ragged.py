"""HDF5 files of documents, of any program: values with offsets, lists, a dataset for each. See `Layout`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from zb_hdf5.errors import ArgumentError, ZbError
from zb_hdf5.files.field_files import ids_at
from zb_hdf5.files.listing import files_at, listed
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.signatures import is_hdf5
from zb_hdf5.formats.format import Found, RowsFormat
from zb_hdf5.formats.format_row import HDF5_SUFFIXES
from zb_hdf5.formats.id_source import ColumnSelection, IdFile, IdSource
from zb_hdf5.formats.inspection import is_own_file
from zb_hdf5.hdf5.h5_file import h5_damage, open_h5_for_reading
from zb_hdf5.read_as import FILL
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.trainers.dataset_file import DatasetFile
from zb_hdf5.trainers.list_file import ListFile
from zb_hdf5.trainers.offset_file import OffsetFile
from zb_hdf5.trainers.ragged_layout import (
    DATASETS,
    LISTS,
    OFFSETS,
    layout_at,
    layouts_of,
    names_documents,
)

#: The name of the format.
RAGGED: Final = "ragged"
#: The file of each layout.
_FILES: Final[dict[str, type[OffsetFile | ListFile | DatasetFile]]] = {
    OFFSETS: OffsetFile,
    LISTS: ListFile,
    DATASETS: DatasetFile,
}


def open_ragged(
    paths: Sequence[Path],
    look: Look | None = None,
    *,
    dataset: str | None = None,
    offsets: str | None = None,
    unwritten: str | None = None,
    field_columns: Sequence[str] | None = None,
    rows: str = "documents",
    dtype: str = "auto",
    vocab_size: int = 0,
    max_document_tokens: int | None = None,
) -> IdSource:
    """Open HDF5 files of documents, and folders of them.

    Parameters
    ----------
    paths
        The files and folders.
    look
        The look by which the first of them was found; None: it is looked at.
    dataset
        The dataset of the values or lists, or the group of the datasets; None: found by the content of each file.
    offsets
        The dataset of the offsets (N + 1), the ends (N) or the lengths (N) of the documents; None: offsets or ends,
        found by their content.
    unwritten
        "fill": values that were never written are the fill value of their dataset; None: they are refused.
    field_columns
        The datasets of values that are aligned with the ids; None: all in the group that have their shape.
    rows, dtype, vocab_size, max_document_tokens
        As for `IdSource`.

    Raises
    ------
    ConvertError
        If the datasets of a file are not certain, and have to be named.
    FormatError
        If the offsets do not fit the values, or a file is damaged.
    """
    if unwritten not in (None, FILL):
        raise ArgumentError(
            f"unwritten={unwritten!r} would move the places of documents in their values; pass 'fill', or write them",
            options=["unwritten"],
        )
    files: list[IdFile] = []
    with Look(paths[0]) if look is None else nullcontext(look) as look:
        for each in look.each(ids_at(files_at(map(look.of, paths), *HDF5_SUFFIXES), paths)):
            with each.keeping_handles():
                layout = layout_at(each, dataset, offsets)._replace(fills=unwritten == FILL)
                files.append(_FILES[layout.kind](each, layout, ColumnSelection(layout.name, field_columns)))
    found = IdSource(
        files,
        RAGGED,
        ColumnSelection(),
        rows=rows,
        dtype=dtype,
        vocab_size=vocab_size,
        max_document_tokens=max_document_tokens,
    )
    found.identity |= {"dataset": dataset, "offsets": offsets}
    return found


class RaggedFiles(RowsFormat):
    """HDF5 files of documents, and folders of such files that are not a store."""

    def fits(self, look: Look) -> bool:
        path = look.path
        try:
            if look.is_dir:
                first = next(iter(listed(look, *HDF5_SUFFIXES).files), None)
                return first is not None and not (path / INDEX_NAME).exists() and self.fits(look.of(first))
            if not is_hdf5(look):
                return False
            with h5_damage(path):
                h5 = open_h5_for_reading(path, look=look)
            with h5_damage(path), h5:
                return not is_own_file(h5) and bool(layouts_of(h5))
        except (OSError, ZbError):
            return False  # whoever opens it says so

    def recognise(self, look: Look, backend: str = "auto", split: str | None = AUTO_SPLIT) -> Found | None:
        """See `RowsFormat`; a dataset of ids that is named has records, or a stream, whatever else is in the file."""
        found = super().recognise(look, backend, split)
        dataset = self.read_as.dataset
        return found if found is None or dataset is None or names_documents(look, dataset) else None

    def rows(self, found: Sequence[Found], **options: Any) -> IdSource:
        return open_ragged([each.path for each in found], found[0].look, **options)
