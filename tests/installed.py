"""Packages with formats, installed in this process: a module and the entry points of its `.dist-info`."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np

from zb_hdf5.store.format_list import INSTALLED, add_installed

ZARR = Path(__file__).parent.parent / "examples" / "format_zarr" / "format_zarr.py"


def forget_installed():
    """Let the next question load the formats of installed packages again."""
    add_installed.cache_clear()
    for part in INSTALLED:
        part.clear()


def install(folder, monkeypatch, module, text, name="", attribute="ROW"):
    """Install a package of one module, which makes a format known: by default it has the name of the module."""
    site = folder / f"site-{module}"
    facts = site / f"{module}-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[zb_hdf5.formats]\n{name or module} = {module}:{attribute}\n")
    (site / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    sys.modules.pop(module, None)
    forget_installed()


def install_zarr(folder, monkeypatch):
    """Install the package of the examples."""
    install(folder, monkeypatch, "format_zarr", ZARR.read_text(encoding="utf-8"), "zarr")


def write_zarr(folder, tokens, version=2, chunk=1000, **changes):
    """Write a 1-D array as the library of Zarr does, in chunks that are not compressed."""
    shutil.rmtree(folder, ignore_errors=True)
    facts = {
        2: {"chunks": [chunk], "dtype": tokens.dtype.str, "compressor": None, "filters": None, "order": "C"},
        3: {
            "node_type": "array", "data_type": tokens.dtype.name, "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
    }[version]  # fmt: skip
    chunks = folder / "c" if version == 3 else folder
    chunks.mkdir(parents=True)
    facts = {"zarr_format": version, "shape": list(tokens.shape), **facts, **changes}
    (folder / {2: ".zarray", 3: "zarr.json"}[version]).write_text(json.dumps(facts))
    for number, start in enumerate(range(0, len(tokens), chunk)):
        part = np.zeros(chunk, tokens.dtype)
        part[: len(tokens) - start] = tokens[start : start + chunk]
        (chunks / str(number)).write_bytes(part.tobytes())
    return folder
