"""Files of another trainer as a source of documents: the row of their format opens them."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import cast

from zb_hdf5.converters.options import FormatOptions, Settings
from zb_hdf5.converters.routes import told_splits
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.trainers.guards import GuardedSource
from zb_hdf5.trainers.installed_formats import errors_of
from zb_hdf5.trainers.trainer_formats import format_named, package_of


def open_trainer_documents(paths: list[Path], settings: Settings) -> DocumentSource:
    """Open files by the function of their format, which gets those of the options that it names."""
    options = settings.of(FormatOptions)
    name = options.source_format
    row = format_named(name)
    package = package_of(name)
    chosen = {option: getattr(options, option) for option in row.options}
    with errors_of(package, name):
        source = resolve_name(row.source)(paths, **chosen)
    opened = GuardedSource(source, package, name) if package else cast("DocumentSource", source)
    opened.splits = opened.splits or told_splits(opened, settings)
    return opened
