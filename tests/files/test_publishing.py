"""Partial files and folders are made whole or not at all, whichever signal or rival comes at that moment."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from contents import names

from zb_hdf5 import ConvertError, ExistsError, StoreMeta, open_writer
from zb_hdf5.files import publishing
from zb_hdf5.files.publishing import PartialDirectory, PartialFile, scratch_directory, write_atomically
from zb_hdf5.signals import Terminated, unwinding_signals
from zb_hdf5.store.digests import write_digests
from zb_hdf5.store.format_list import FORMATS, document_targets, load_format

META = StoreMeta(4, 8, np.dtype("<u2"))


def write_in_folder(folder):
    with PartialDirectory(folder / "x"):
        pytest.fail("the signal came late")


def write_scratch(folder):
    with scratch_directory(folder / "x"):
        pytest.fail("the signal came late")


def digest(folder):
    np.save(folder / "x.npy", np.zeros(100, "<u2"))
    try:
        write_digests(folder / "x.npy", folder / "x.json")
    finally:
        (folder / "x.npy").unlink()


MAKERS = {
    "bytes": lambda folder: write_atomically(folder / "x", b"x"),
    "folder": write_in_folder,
    "scratch": write_scratch,
    "digests": digest,
    "h5": lambda folder: open_writer(folder / "x.h5", batch_size=4, seq_len=8, dtype="uint16"),
    "batch": lambda folder: open_writer(folder / "x.batch", batch_size=4, seq_len=8, dtype="uint16"),
    **{
        name: lambda folder, name=name: load_format(FORMATS[name]).write(folder / f"x{FORMATS[name].suffix}", META)
        for name in document_targets()
    },
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_signal_as_a_partial_is_made_leaves_nothing_of_it(make, tmp_path, monkeypatch):
    def signalled(*opened):
        os.kill(os.getpid(), signal.SIGTERM)
        return keep_locked(*opened)

    keep_locked = publishing.keep_locked
    monkeypatch.setattr(publishing, "keep_locked", signalled)
    with unwinding_signals(), pytest.raises(Terminated):
        make(tmp_path)
    assert names(tmp_path) == []


def test_a_folder_whose_name_is_taken_as_it_is_locked_is_refused_and_leaves_nothing(tmp_path):
    folder = PartialDirectory(tmp_path / "x")
    (tmp_path / "x").mkdir()  # by a rival that was first
    with pytest.raises(ExistsError), folder:
        pytest.fail("the rival was not seen")
    assert names(tmp_path) == ["x"]


def test_a_refused_folder_keeps_the_leftover_of_an_earlier_run(tmp_path):
    folder = PartialDirectory(tmp_path / "x")
    for name in ("x", "x.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "x.partial" / "shard-00000-of-00001.h5").touch()
    with pytest.raises(ExistsError), folder:
        pytest.fail("the rival was not seen")
    assert names(tmp_path / "x.partial") == ["shard-00000-of-00001.h5"]


@pytest.mark.parametrize(
    ("make", "found"), [(os.mkfifo, "a FIFO, a socket or a device"), (Path.touch, "a file"), (Path.mkdir, "a folder")]
)
def test_a_name_of_unfinished_data_that_something_else_has_is_refused(make, found, tmp_path):
    make(tmp_path / "x.partial")
    words = rf"x\.partial: expected an unfinished {{}} or none, found {found}; remove it$"
    if make != Path.mkdir:
        with pytest.raises(ConvertError, match=words.format("folder")), PartialDirectory(tmp_path / "x"):
            pytest.fail("it was not seen")
    if make != Path.touch:
        with pytest.raises(ConvertError, match=words.format("file")):
            PartialFile(tmp_path / "x")
    assert names(tmp_path) == ["x.partial"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")], ids=["fifo", "device"])
def test_a_result_takes_the_place_of_no_fifo_or_device(make, tmp_path):
    for name in ("x.h5", "x.html"):
        make(tmp_path / name)
    for write in (
        lambda: write_atomically(tmp_path / "x.html", b"x"),
        lambda: open_writer(tmp_path / "x.h5", batch_size=4, seq_len=8, dtype="uint16", overwrite=True),
    ):
        with pytest.raises(ConvertError, match="is a FIFO, a socket or a device; choose another output"):
            write()
    assert names(tmp_path) == ["x.h5", "x.html"]
    assert not any(path.is_file() for path in tmp_path.iterdir())
