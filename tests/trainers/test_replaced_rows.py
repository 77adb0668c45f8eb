"""Rows and text: a file that took the place of another one since the look is named, and not read."""

import gzip
import json
import os
import pickle
import shutil

import h5py
import numpy as np
import pyarrow
import pytest
from contents import take_place
from contract import is_refused
from golden import DATA
from id_documents import documents_of
from pyarrow import parquet

from zb_hdf5 import FormatError, convert
from zb_hdf5.converters import run
from zb_hdf5.converters.engines import Engine, open_engine
from zb_hdf5.converters.text_source import Recipe, TextSource
from zb_hdf5.text.text_corpus import open_documents
from zb_hdf5.trainers.hf import open_hf
from zb_hdf5.trainers.litdata import open_litdata
from zb_hdf5.trainers.mds import open_mds
from zb_hdf5.trainers.ragged import open_ragged

WRITTEN = DATA / "trainers"
CHANGED = r"changed since it was opened: expected \(device, inode\)"
TEXTS = ["one text", "two texts", "three"]
IDS = [np.arange(n, dtype="<i4") for n in (3, 5, 2)]


def text_in(name, content):
    """Return a function that writes a file of text, and returns it with its source."""

    def make(folder):
        folder.mkdir()
        content(folder / name)
        files = open_documents([folder])
        return files[0].path, TextSource(files, "text", Recipe("byte", 256))

    return make


def write_lines(path):
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXTS))


def copied(name, opener, file):
    """Return a function that copies a golden folder, and returns a file of it with the source."""

    def make(folder):
        shutil.copytree(WRITTEN / name, folder, ignore=shutil.ignore_patterns("truth.json"))
        return folder / file, opener([folder])

    return make


def ragged_of(write):
    """Return a function that writes an HDF5 file of documents, and returns it with its source."""

    def make(folder):
        folder.mkdir()
        with h5py.File(folder / "x.h5", "w") as h5:
            write(h5)
        return folder / "x.h5", open_ragged([folder])

    return make


def write_offsets(h5):
    h5["values"] = np.concatenate(IDS)
    h5["offsets"] = np.cumsum([0, *map(len, IDS)])


def write_lists(h5):
    stored = h5.create_dataset("input_ids", (len(IDS),), h5py.vlen_dtype(np.dtype("<i4")))
    for number, each in enumerate(IDS):
        stored[number] = each


def write_datasets(h5):
    for number, each in enumerate(IDS):
        h5[f"docs/doc_{number}"] = each[::-1]


SOURCES = {
    "lines": text_in("a.jsonl", write_lines),
    "gzip": text_in("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(b'{"text": "one"}\n'))),
    "plain": text_in("a.txt", lambda path: path.write_text(TEXTS[0])),
    "parquet": text_in("a.parquet", lambda path: parquet.write_table(pyarrow.table({"text": TEXTS}), path)),
    "ids-lines": copied("hf", lambda paths: open_hf([paths[0] / "corpus.jsonl"]), "corpus.jsonl"),
    "ids-parquet": copied("hf", lambda paths: open_hf([paths[0] / "corpus.parquet"]), "corpus.parquet"),
    "ids-arrow": copied("hf/saved", open_hf, "data-00000-of-00002.arrow"),
    "mds": copied("mds/ndarray", open_mds, "shard.00000.mds"),
    "mds-zstd": copied("mds/zstd", open_mds, "shard.00000.mds.zstd"),
    "litdata": copied("litdata/tensor", open_litdata, "chunk-0-0.bin"),
    "offsets": ragged_of(write_offsets),
    "lists": ragged_of(write_lists),
    "datasets": ragged_of(write_datasets),
}


@pytest.mark.parametrize("name", SOURCES)
def test_another_file_of_the_same_size_and_time_is_named(name, tmp_path):
    file, source = SOURCES[name](tmp_path / "in")
    expected = documents_of(source).tokens
    assert sum(map(len, expected))
    sent = pickle.dumps(source)
    assert documents_of(pickle.loads(sent)).tokens == expected
    take_place(file)
    is_refused(FormatError, lambda: documents_of(source), match=f"{file.name}: {CHANGED}")
    is_refused(FormatError, lambda: documents_of(pickle.loads(sent)), match=f"{file.name}: {CHANGED}")


@pytest.mark.parametrize("name", ["lines", "ids-parquet"])
def test_a_file_that_was_written_in_place_is_the_same(name, tmp_path):
    """A conversion compares its size and its time when it ends."""
    file, source = SOURCES[name](tmp_path / "in")
    expected = documents_of(source).tokens
    os.utime(file, ns=(1, 1))
    assert documents_of(source).tokens == expected


def test_a_file_that_is_replaced_while_it_is_opened_is_named(tmp_path, monkeypatch):
    [file] = open_documents([SOURCES["lines"](tmp_path / "in")[0]])
    read = file._row_group

    def replaced(number):
        take_place(file.path)
        yield from read(number)

    monkeypatch.setattr(file, "_row_group", replaced)
    is_refused(FormatError, lambda: [*file.blocks()], match=CHANGED)


def test_an_empty_file_that_takes_the_place_while_it_is_opened_is_named(tmp_path, monkeypatch):
    [file] = open_documents([SOURCES["lines"](tmp_path / "in")[0]])
    read = file._row_group

    def emptied(number):
        other = tmp_path / "empty"
        other.touch()
        other.rename(file.path)
        yield from read(number)

    monkeypatch.setattr(file, "_row_group", emptied)
    is_refused(FormatError, lambda: [*file.blocks()], match="changed since it was opened: .* found \\(0, ")


class Replacing(Engine):
    """Two worker processes, which begin when another file has the place of one of the source."""

    workers = 2

    def __init__(self, file):
        self.file = file

    def run(self, function, tasks, progress):
        take_place(self.file)
        with open_engine("processes", 2) as engine:
            yield from engine.run(function, tasks, progress)


@pytest.mark.parametrize(
    ("path", "options"),
    [("corpus.jsonl", {}), ("corpus.parquet", {}), ("texts", {"tokenizer": "byte", "source_format": "jsonl"})],
)
def test_a_worker_of_a_conversion_names_another_file(path, options, tmp_path):
    shutil.copytree(WRITTEN / "hf", tmp_path / "in")
    write_lines(tmp_path / "in" / "texts")
    file = tmp_path / "in" / path
    with pytest.raises(FormatError, match=f"{file.name}: {CHANGED}"):
        convert(file, "stream", tmp_path / "out", engine=Replacing(file), **options)
    assert not (tmp_path / "out").exists()


#: Sources of a conversion: the path, the file that is replaced, and the options.
FOUND = {
    "mds": ("mds/ndarray", "index.json", {}),
    "litdata": ("litdata/tensor", "index.json", {}),
    "offsets": ("ragged/offsets.h5", "", {}),
    "lists": ("ragged/lists.h5", "", {}),
    "datasets": ("ragged/datasets.h5", "", {}),
    "ids-lines": ("hf/corpus.jsonl", "", {}),
    "ids-parquet": ("hf/corpus.parquet", "", {}),
    "lines": ("texts/a.json", "", {"tokenizer": "byte"}),  # of an .jsonl its name tells, and no look reads it
    "megatron": ("megatron/uint16", "corpus_text_document.idx", {}),
    "later-arrays": ("arrays", "1.h5", {}),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_file_that_is_replaced_between_the_look_and_the_opening_is_named(name, tmp_path, monkeypatch):
    path, inside, options = FOUND[name]
    folder = tmp_path / "in"
    shutil.copytree(WRITTEN, folder)
    for each in ("ragged", "texts", "arrays"):
        (folder / each).mkdir()
    for kind, write in (("offsets", write_offsets), ("lists", write_lists), ("datasets", write_datasets)):
        with h5py.File(folder / "ragged" / f"{kind}.h5", "w") as h5:
            write(h5)
    write_lines(folder / "texts" / "a.json")
    for number in range(2):
        with h5py.File(folder / "arrays" / f"{number}.h5", "w") as h5:
            h5["input_ids"] = np.arange(64, dtype="u2").reshape(8, 8)
    replaced = folder / path / inside
    resolved = run.resolved

    def resolved_before(conversion):
        settings, open_source = resolved(conversion)
        return settings, lambda: (take_place(replaced), open_source())[1]

    monkeypatch.setattr(run, "resolved", resolved_before)
    target = {"target": "hdf5", "batch_size": 2} if name == "later-arrays" else {"target": "stream"}
    how = {**target, **options}
    is_refused(FormatError, lambda: convert(folder / path, destination=tmp_path / "out", **how), match=CHANGED)
    assert not (tmp_path / "out").exists()
