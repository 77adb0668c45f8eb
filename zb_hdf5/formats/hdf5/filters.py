"""What the chunks of a dataset are packed with: its codec, and which of its filters this HDF5 lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py

from zb_hdf5.errors import UnavailableError
from zb_hdf5.files.codecs import require_codec
from zb_hdf5.formats.hdf5.file import open_h5_for_reading, own_dataset
from zb_hdf5.spec import BATCHES, CODECS, NO_CODEC, TOKENS


def codec_of(stored: h5py.Dataset) -> str | None:
    """Return the codec of a dataset; None if it has filters that are no codec of ours."""
    creation: Any = stored.id.get_create_plist()
    if creation.get_nfilters() == 0:
        return NO_CODEC
    code, _, values, _ = creation.get_filter(0)
    names = [name for name, facts in CODECS.items() if facts.filter_id == code]
    if creation.get_nfilters() > 1 or not names:
        return None
    return f"{names[0]}:{values[0] if values else CODECS[names[0]].default_level}"


def missing_filters(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (problem, remedy) for each filter that the tokens of a file need, and this machine has not."""
    with open_h5_for_reading(path) as h5:
        stored = own_dataset(h5, path, BATCHES) or own_dataset(h5, path, TOKENS)
        codec = codec_of(stored) if stored else NO_CODEC
        if codec is not None:  # read past HDF5
            try:
                require_codec(codec, path)
            except UnavailableError as error:
                yield str(error), "pip install 'zb_hdf5[codecs]'"
            return
        load_filters(stored)
        for name in lacking_filters(stored):
            yield f"{path}: {name} is not available", "pip install 'zb_hdf5[codecs]', or the plugin of that filter"


def load_filters(stored: h5py.Dataset) -> None:
    """Have HDF5 know the common filters, where a dataset needs one that it lacks and they are installed."""
    if lacking_filters(stored):
        with contextlib.suppress(ImportError):
            import_module("hdf5plugin")  # registers them as it is imported


def lacking_filters(stored: h5py.Dataset) -> list[str]:
    """Name the filters that a dataset needs, and this HDF5 library has not."""
    creation: Any = stored.id.get_create_plist()
    found = (creation.get_filter(number) for number in range(creation.get_nfilters()))
    return [
        f"filter {code} ({name.decode('utf-8', 'replace')})"
        for code, _, _, name in found
        if not h5py.h5z.filter_avail(code)
    ]
