"""Files of another trainer as a source of documents: the row of their format opens them."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import cast

from zb_hdf5.converters.options import FormatOptions, Settings
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.trainers.trainer_formats import TRAINER_FORMATS


def open_trainer_documents(paths: list[Path], settings: Settings) -> DocumentSource:
    """Open files by the function of their format, which gets those of the options that it names."""
    options = settings.of(FormatOptions)
    row = TRAINER_FORMATS[options.source_format]
    chosen = {name: getattr(options, name) for name in row.options}
    return cast("DocumentSource", resolve_name(row.source)(paths, **chosen))
