"""litdata's chunks: each item is a document, and neither the index nor a chunk is believed."""

import json
import pickle
import shutil
import struct

import numpy as np
import pytest
from contract import is_refused
from id_documents import GOLDEN, documents_of, truth_of
from reading import fits

from zb_hdf5 import ChecksumError, ConvertError, FormatError, IncompleteError, convert, open_corpus
from zb_hdf5.trainers import litdata
from zb_hdf5.trainers.litdata import DATA_FORMATS, open_litdata

LITDATA = GOLDEN / "litdata"
FOLDERS = ("array", "tensor")
IDS = ([5, 6, 7], [8], [], [9, 10])


def write(folder, dtype, data_format):
    """Write a folder of one chunk."""
    folder.mkdir(exist_ok=True)
    arrays = [np.array(ids, dtype) for ids in IDS]
    offsets = np.cumsum([4 * (len(arrays) + 2), *(each.nbytes for each in arrays)]).astype("<u4")
    data = struct.pack("<I", len(arrays)) + offsets.tobytes() + b"".join(each.tobytes() for each in arrays)
    (folder / "chunk-0-0.bin").write_bytes(data)
    chunk = {"chunk_bytes": len(data), "chunk_size": len(arrays), "dim": 6, "filename": "chunk-0-0.bin"}
    config = {"compression": None, "data_format": [data_format], "item_loader": "TokensLoader"}
    (folder / "index.json").write_text(json.dumps({"chunks": [chunk], "config": config}))
    return folder


def changed(folder, config=None, **chunk):
    """Change the index: its config, and the entry of the first chunk."""
    index = json.loads((folder / "index.json").read_text())
    index["config"] |= config or {}
    index["chunks"][0] |= chunk
    (folder / "index.json").write_text(json.dumps(index))


@pytest.fixture
def copied(tmp_path):
    """Return `copied(name)`: a golden folder that a test may damage."""
    return lambda name: shutil.copytree(LITDATA / name, tmp_path / name)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("block", [1, 500, 1 << 20])
def test_golden_items_are_documents(name, block, monkeypatch):
    monkeypatch.setattr(litdata, "BLOCK_OF_IDS", block)
    source = pickle.loads(pickle.dumps(open_litdata([LITDATA / name])))
    found = documents_of(source)
    sha256, lengths = truth_of(LITDATA / name)
    assert (found.sha256, [len(each) for each in found.tokens]) == (sha256, lengths)
    assert source.dtype == (np.uint16 if name == "array" else np.uint32)
    assert found.rows == [*range(1, 28), *range(1, 24), *range(1, 11)]
    chosen = documents_of(source, choose=lambda count: np.arange(count) % 2 == 0)
    assert [found.tokens[found.rows.index(row)] for row in chosen.rows[:3]] == chosen.tokens[:3]


@pytest.mark.parametrize(("data_format", "dtype"), [
    (f"{name}:{code}", dtype) for name, codes in DATA_FORMATS.items() for code, dtype in codes.items()
])  # fmt: skip
def test_both_tables_of_dtypes_are_known(data_format, dtype, tmp_path):
    found = documents_of(open_litdata([write(tmp_path / "a", dtype, data_format)]))
    assert found.tokens == [*IDS]


@pytest.mark.parametrize(
    "data_format", ["no_header_tensor:0", "no_header_numpy:14", "no_header_numpy:99", "pickle", "int"]
)
def test_items_that_are_no_ids_are_refused_by_name(data_format, tmp_path):
    folder = write(tmp_path / "a", "i4", data_format)
    is_refused(
        FormatError, lambda: open_litdata([folder]), match=rf"with a dtype of integers, found \['{data_format}'\]"
    )


@pytest.mark.parametrize(("config", "match"), [
    ({"item_loader": "PyTreeLoader"}, "expected chunks of ids for TokensLoader, found items for PyTreeLoader"),
    ({"encryption": {"algorithm": "fernet"}}, "expected chunks of ids, found encrypted ones"),
    ({"compression": "lz4"}, "expected files as they are, or by zstd, found 'lz4'"),
    ({"data_format": ["no_header_tensor:16", "no_header_tensor:16"]}, "with a dtype of integers, found"),
    ({"data_format": None}, "with a dtype of integers, found None"),
])  # fmt: skip
def test_other_chunks_are_refused(config, match, tmp_path):
    folder = write(tmp_path / "a", "i4", "no_header_tensor:16")
    changed(folder, config)
    is_refused(FormatError, lambda: open_litdata([folder]), match=match)


def test_compressed_chunks_are_unpacked(copied):
    zstandard = pytest.importorskip("zstandard")
    folder = copied("tensor")
    for path in sorted(folder.glob("*.bin")):
        (folder / f"{path.stem}.zstd.bin").write_bytes(zstandard.compress(path.read_bytes()))
        path.unlink()
    index = json.loads((folder / "index.json").read_text())
    for chunk in index["chunks"]:
        chunk["filename"] = chunk["filename"].replace(".bin", ".zstd.bin")
    index["config"]["compression"] = "zstd"
    (folder / "index.json").write_text(json.dumps(index))
    source = open_litdata([folder])
    assert documents_of(source).sha256 == truth_of(LITDATA / "tensor")[0]
    first = folder / "chunk-0-0.zstd.bin"
    data = first.read_bytes()
    first.write_bytes(data[:-100])
    is_refused(
        ChecksumError, lambda: documents_of(source), match=r"chunk-0-0\.zstd\.bin: is damaged: its zstd does not"
    )
    first.write_bytes(zstandard.compress(b"short"))
    is_refused(ChecksumError, lambda: documents_of(source), match="expected 31,008 bytes, found 5 in its header")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_chunk_that_was_cut_is_refused(name, copied):
    folder = copied(name)
    path = folder / "chunk-0-1.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    match = r"chunk-0-1\.bin: expected [0-9,]+ bytes for 7,774 ids, as index\.json has it, found"
    is_refused(IncompleteError, lambda: open_litdata([folder]), match=match)
    path.unlink()
    is_refused(
        IncompleteError, lambda: open_litdata([folder]), match="expected a file, as index.json has it, found none"
    )


def test_offsets_outside_of_the_chunk_are_not_followed(tmp_path):
    folder = write(tmp_path / "a", "<i4", "no_header_tensor:16")
    path = folder / "chunk-0-0.bin"
    data = path.read_bytes()
    offsets = np.frombuffer(data[4:24], "<u4")
    for lie in (offsets + 4, offsets[::-1], offsets - 4, offsets * 2, offsets + np.eye(5, dtype=int)[1]):
        path.write_bytes(data[:4] + lie.astype("<u4").tobytes() + data[24:])
        is_refused(
            FormatError, lambda: documents_of(open_litdata([folder])), match="expected 4 items from byte 24 to 48"
        )
    path.write_bytes(struct.pack("<I", 5) + data[4:])
    is_refused(FormatError, lambda: documents_of(open_litdata([folder])), match="found 5 from 24 to 48")


@pytest.mark.parametrize(("chunk", "match"), [
    ({"filename": "../chunk.bin"}, "expected a file below the folder in filename, found '../chunk.bin'"),
    ({"filename": None}, "expected a file below the folder in filename, found None"),
    ({"dim": None}, "chunk 0: expected the number of its ids in dim, found none: it was written without TokensLoader"),
    ({"chunk_size": -1}, "expected a number in chunk_size, found -1"),
    ({"dim": 1 << 60}, "expected a chunk of less than 4 GiB, found 1,152,921,504,606,846,976 ids"),
    ({"chunk_size": 5}, "expected 52 bytes for 6 ids, as index.json has it, found 48"),
])  # fmt: skip
def test_an_index_that_lies_is_refused(chunk, match, tmp_path):
    folder = write(tmp_path / "a", "<i4", "no_header_tensor:16")
    changed(folder, **chunk)
    is_refused(FormatError, lambda: open_litdata([folder]), match=match)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"chunks": [], "config": {"data_format": ["no_header_tensor:16"]}}']
)
def test_other_json_is_no_index(text, tmp_path):
    (tmp_path / "index.json").write_text(text)
    is_refused(FormatError, lambda: open_litdata([tmp_path]), match=r"index\.json: expected")
    assert fits("litdata", tmp_path) == ("chunks" in text)
    is_refused(
        ConvertError, lambda: open_litdata([tmp_path.parent / tmp_path.name / "index.json"]), match="expected a f"
    )


def test_items_are_kept_as_documents_of_a_stream(tmp_path):
    report = convert(LITDATA / "array", "stream", tmp_path / "out", workers=1, val_fraction=0.2, shards=2)
    assert (report.counts.documents, len(report.shards)) == (60, 3)
    with open_corpus(tmp_path / "out") as stream:
        place = stream.documents[1]
    assert place.source == str(LITDATA / "array" / "chunk-0-0.bin")
