"""Findings about a path or URL and this machine: problems that would stop or slow down training."""

from __future__ import annotations

import fcntl
import os
import resource
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from zb_hdf5.commands.description import describe_layout, layout_text
from zb_hdf5.console import message_of
from zb_hdf5.errors import UnavailableError
from zb_hdf5.files.file_systems import network_file_system
from zb_hdf5.files.paths import DESCRIPTORS_PER_MAPPED_FILE, RemotePath, any_path, room_under
from zb_hdf5.files.publishing import NO_LOCKS
from zb_hdf5.files.tokens import Wait
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.packages import h5py, require_package
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.format_list import flat_format
from zb_hdf5.store.opening import open_corpus

GOOD_RUNS: Final = 4
#: The last version of HDF5 that has them -> number of published holes: SECURITY.md names each, and its source.
HOLES: Final = {(1, 14, 6): 25, (2, 0, 0): 5, (2, 1, 1): 4, (2, 2, 0): 2, (2, 3, 0): 2}
#: From this HDF5 on, filters that report a wrong size fail, and the Blosc2 filter did before this hdf5plugin.
SIZES_ARE_CHECKED: Final = (2, 2, 0)
BLOSC2_REPORTS_ITS_SIZE: Final = (7, 1)


@dataclass
class Finding:
    """The result of one check. `state` is "ok", "note" or "problem"; only a problem stops training."""

    name: str
    state: str
    text: str
    remedy: str = ""

    def line(self) -> str:
        text = f"{self.state}: {self.text}"
        return f"{text}; {self.remedy}" if self.remedy else text


def diagnose(path: str | os.PathLike[str], read_as: ReadAs = AS_STORED, split: str | None = None) -> list[Finding]:
    """Return the findings about a path or URL and this machine; `UnavailableError` where nothing could train."""
    require_package("torch", "torch")
    path = any_path(path)
    is_remote = isinstance(path, RemotePath)
    locking = os.environ.get("HDF5_USE_FILE_LOCKING", "not set")
    text = f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}, HDF5_USE_FILE_LOCKING {locking}"
    findings = [Finding("libraries", "ok", text), _holes(), *_filter_package()]
    if not is_remote:
        folder = path if path.is_dir() else path.parent
        network = network_file_system(folder)
        findings += [Finding("file system", "ok", network or "local"), _locks(folder, network)]
    start_s = time.perf_counter()
    try:
        corpus = open_corpus(path, read_as=read_as, split=split)
    except UnavailableError as error:
        return [*findings, Finding("open", "problem", message_of(error))]
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return [*findings, Finding("open", "problem", str(error), "export HDF5_USE_FILE_LOCKING=FALSE")]
    with corpus:
        try:
            first = _first_batch(corpus)
            findings.append(Finding("filters", "ok", "none is missing"))
        except UnavailableError as error:
            first = None
            findings.append(Finding("filters", "problem", message_of(error)))
        if first is not None:
            findings.append(Finding("first batch", "ok", f"after {(time.perf_counter() - start_s) * 1000:.1f} ms"))
        if not is_remote:
            findings += [_layout(corpus), _open_files(corpus)]
    return findings


def _first_batch(corpus: Corpus) -> TokenArray | None:
    """Return the first batch, or the first token of a stream; None if there is none."""
    if not corpus.num_tokens:
        return None
    return corpus.tokens[:1] if corpus.is_stream else corpus.batches().read_batch(0)


def _note_if(noted: bool, name: str, text: str, remedy: str) -> Finding:
    return Finding(name, "note", text, remedy) if noted else Finding(name, "ok", text)


def _holes() -> Finding:
    found = sum(number for last, number in HOLES.items() if h5py.version.hdf5_version_tuple <= last)
    text = f"SECURITY.md lists {found or 'no'} holes that HDF5 {h5py.version.hdf5_version} does not mend"
    return _note_if(found > 0, "security holes", text, "read HDF5 files of strangers in a process that may die")


def _filter_package() -> list[Finding]:
    try:
        found = version("hdf5plugin")
    except PackageNotFoundError:
        return []
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    is_bad = h5py.version.hdf5_version_tuple >= SIZES_ARE_CHECKED and numbers < BLOSC2_REPORTS_ITS_SIZE
    text = f"hdf5plugin {found}"
    if is_bad:
        text += f" with HDF5 {h5py.version.hdf5_version}: chunks that its Blosc2 filter writes are lost"
    return [_note_if(is_bad, "filter package", text, "install hdf5plugin 7.1 or newer")]


def _locks(folder: Path, network: str | None) -> Finding:
    """Try flock(2) on a file without a name to leave behind."""
    off = os.environ.get("HDF5_USE_FILE_LOCKING", "").upper() in ("FALSE", "0")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            return Finding("locks", "note", f"not tried: {error}", "reading needs no space in the folder")
        if not off and "HDF5_USE_FILE_LOCKING" in os.environ:
            text = f"flock: {error}, and HDF5_USE_FILE_LOCKING demands it"
            return Finding("locks", "problem", text, "export HDF5_USE_FILE_LOCKING=FALSE")
        return Finding(
            "locks", "note", f"flock: {error}", "files are opened without locks: start one writer only for a path"
        )
    text = "flock works"
    if network == "fuse":  # nodes keep flock to themselves there, unless the file system brings its own
        text += f" between the processes of this node ({network}: other nodes may not see it)"
    if off:
        text += ", but HDF5_USE_FILE_LOCKING switches HDF5's off"
    return Finding("locks", "ok", text)


def _layout(corpus: Corpus) -> Finding:
    if corpus.tokens.wait is Wait.DECODE:
        return Finding("layout", "ok", "compressed chunks, which threads unpack")
    file = corpus.tokens.files.open(0, 0).resolve()
    found = describe_layout(None if file is None else file.extents, corpus.meta.batch_bytes)
    good = found is not None and found["page_aligned"] and found["runs"] <= GOOD_RUNS
    remedy = "convert it again, for faster reads"
    if flat_format(corpus.backend) is not None:  # its own program writes it like this
        remedy = "zb convert makes a store of it, whose reads are checked"
    return _note_if(not good, "layout", layout_text(found), remedy)


def _open_files(corpus: Corpus) -> Finding:
    shards = len(corpus.files)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the soft one is raised when that is needed
    kept = min(shards, room_under(limit) // DESCRIPTORS_PER_MAPPED_FILE)
    text = f"hard limit {limit:,}: {kept:,} of {shards:,} shards stay open" if limit >= 0 else "no limit"
    return _note_if(kept < shards, "open files", text, "raise it")
