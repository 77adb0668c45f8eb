"""Rows of ids in files of another trainer as a source of documents: the code of their format opens them."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from zb_hdf5.converters.routes import told_splits
from zb_hdf5.converters.settings import Settings
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.store.format_list import format_named, load_format, package_of
from zb_hdf5.trainers.guards import GuardedSource


def open_rows(paths: list[Path], settings: Settings) -> DocumentSource:
    """Open files by the code of their format, which gets the options that its row names."""
    name = settings.source_format
    row = format_named(name)
    package = package_of(name)
    chosen = {option: settings.option(option) for option in row.options}
    source = load_format(row).rows(settings.looks.rows(paths, name), **chosen)
    opened = cast(DocumentSource, GuardedSource(source, package, name)) if package else source
    opened.splits = opened.splits or told_splits(opened, settings)
    return opened
