"""Compressed HDF5 files: what they say, that any HDF5 tool reads them, and what damage and missing libraries do."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from contents import batches_of, write_stream
from contract import is_refused, read_records
from processes import python

from zb_hdf5 import ShardIndex, errors, open_reader, open_writer, rebuild_index, verify_store
from zb_hdf5.files.codecs import CodedChunks, Decoded, Encoder, chunk_decoder
from zb_hdf5.files.ranges import open_ranges
from zb_hdf5.files.tokens import Wait
from zb_hdf5.spec import EXTENTS, INDEX_NAME, NO_CODEC, codec_named

CODECS = ("zstd:3", "gzip:1")
SHAPE = (40, 8, 128)


@pytest.fixture(scope="module")
def tokens():
    """Return batches that shrink, but for one of them."""
    generator = np.random.default_rng(3)
    found = generator.choice(generator.integers(0, 60_000, 40), SHAPE).astype("<u2")
    found[7] = generator.integers(0, 65_536, SHAPE[1:])
    return found


@pytest.fixture(scope="module", params=CODECS)
def packed(request, tokens, tmp_path_factory, write_file):
    """Return (path, codec) of a file."""
    path = tmp_path_factory.mktemp("packed") / "x.h5"
    assert write_file(path, tokens, codec=request.param).compressed.codec == request.param
    return path, request.param


def test_a_file_says_where_its_chunks_lie(packed, tokens):
    path, codec = packed
    with h5py.File(path) as h5, open_reader(path) as reader:
        batches = h5["batches"]
        extents = h5[EXTENTS][:]
        found = []
        batches.id.chunk_iter(lambda chunk: found.append((chunk.byte_offset, chunk.size, chunk.filter_mask)))
        np.testing.assert_array_equal(extents, [chunk[:2] for chunk in found])
        assert [mask for *_, mask in found] == [int(number == 7) for number in range(40)]
        assert extents[7, 1] == tokens[7].nbytes > extents[8, 1]
        assert batches.id.get_create_plist().get_nfilters() == 1
        assert (reader.meta.codec, reader.corpus.compressed.num_bytes) == (codec, extents[:, 1].sum())


def test_h5py_reads_it(packed, tokens):
    pytest.importorskip("hdf5plugin")
    with h5py.File(packed[0]) as h5:
        np.testing.assert_array_equal(h5["batches"][:], tokens)


@pytest.mark.skipif(shutil.which("h5repack") is None, reason="h5repack is not installed")
@pytest.mark.parametrize("codec", ["gzip", None])
def test_hdf5_tools_read_it_and_a_table_of_another_file_is_not_believed(codec, tokens, tmp_path, write_file):
    path = write_file(tmp_path / "x.h5", tokens, codec=codec).path
    copy = tmp_path / "copy.h5"
    subprocess.run(["h5repack", "-f", "batches:GZIP=9", path, copy], check=True, capture_output=True)
    with h5py.File(copy) as h5:
        assert (EXTENTS in h5) is (codec == "gzip")  # copied along, with the places of the old file
    for verify in ("none", "batch", "store"):
        with open_reader(copy, verify=verify) as reader, open_reader(path) as original:
            assert (reader.access, reader.meta.codec, EXTENTS in reader.corpus.columns) == ("pread", "gzip:9", False)
            assert reader.fingerprint == original.fingerprint
            np.testing.assert_array_equal(np.stack(list(reader)), tokens)
    assert [report.problem for report in verify_store(copy)] == [None]
    plain = tmp_path / "plain.h5"
    subprocess.run(["h5repack", "-f", "NONE", copy, plain], check=True, capture_output=True)
    with open_reader(plain) as reader:
        assert (reader.access, reader.meta.codec) == ("auto", NO_CODEC)
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)


@pytest.mark.parametrize("codec", CODECS)
def test_windows_documents_and_fields_of_a_stream(codec, tokens, tmp_path):
    flat = tokens.reshape(-1)
    how = {"chunk_tokens": 1000, "fields": {"mask": "u1"}, "codec": codec}
    write_stream(tmp_path / "s.h5", flat, [100, 0, 2900, len(flat) - 3000], {"mask": flat % 2}, **how)
    with h5py.File(tmp_path / "s.h5") as h5:
        assert h5["tokens"].shape == (len(flat),)
        assert h5["fields/mask.extents"].shape == (-(-len(flat) // 1000), 2)
    with open_reader(tmp_path / "s.h5", batch_size=3, seq_len=70, overlap=1) as reader:
        assert (reader.access, reader.tokens.wait) == ("pread", Wait.DECODE)
        starts = np.arange(reader.num_records) * 70
        expected = np.stack([flat[start : start + 71] for start in starts])
        np.testing.assert_array_equal(np.concatenate(list(reader)), expected)
        np.testing.assert_array_equal(np.concatenate(list(reader.field("mask"))), expected % 2)
        np.testing.assert_array_equal(reader.corpus.documents[3].ids, flat[3000:])
    assert [report.problem for report in verify_store(tmp_path / "s.h5")] == [None]


def test_a_store_is_opened_by_its_index_alone(tokens, tmp_path, write_store, monkeypatch):
    folder = write_store(tmp_path / "z", tokens, (9, 30), codec="zstd")
    index = json.loads((folder / INDEX_NAME).read_text())
    assert index["codecs"]["codec"] == ["zstd:3"] * 3
    monkeypatch.setattr(h5py, "File", None)
    with open_reader(folder) as reader:
        assert (reader.access, reader.meta.codec, reader.tokens.wait) == ("pread", "zstd:3", Wait.DECODE)
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)
        rows = np.random.default_rng(1).permutation(320)[:50]
        np.testing.assert_array_equal(read_records(reader, rows), tokens.reshape(-1, 128)[rows])


def test_shards_of_several_codecs_are_one_store(tokens, tmp_path, write_file, write_store):
    folder = write_store(tmp_path / "z", tokens, (9, 30), codec="zstd")
    for number, codec in ((1, None), (2, "gzip:9")):
        start, stop = ((9, 30), (30, 40))[number - 1]
        write_file(folder / f"shard-0000{number}.h5", tokens[start:stop], codec=codec, overwrite=True)
    index = rebuild_index(folder, force=True)
    assert [shard.compressed and shard.compressed.codec for shard in index.shards] == ["zstd:3", None, "gzip:9"]
    assert ShardIndex.load(folder) == index
    np.testing.assert_array_equal(batches_of(folder), tokens)
    assert [report.problem for report in verify_store(folder)] == [None] * 3
    text = (folder / INDEX_NAME).read_text()
    text = text.replace('"gzip:9"', '"lzma:6"')[: text.rindex(',\n "check"')] + "}"
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(errors.FormatError, match="codecs: expected one of gzip, zstd, found 'lzma:6'"):
        ShardIndex.load(folder)


def zero_chunk(path, number):
    with h5py.File(path) as h5:
        offset, size = h5[EXTENTS][number].tolist()
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(bytes(size))


def test_another_file_of_the_same_size_is_not_taken_for_the_shard(tokens, tmp_path, write_store):
    folder = write_store(tmp_path / "z", tokens, (20,), codec="gzip")
    path = folder / "shard-00000.h5"
    zero_chunk(path, 0)
    with open_reader(folder) as reader:
        is_refused(errors.ChecksumError, lambda: reader.read_batch(0), match=r"shard-00000.h5: batch 0 is damaged")


@pytest.mark.parametrize("verify", ["none", "batch"])
def test_damage_names_the_batch(packed, verify, tmp_path):
    path = Path(shutil.copy(packed[0], tmp_path))
    name = packed[1].partition(":")[0]
    zero_chunk(path, 5)
    with open_reader(path, verify=verify) as reader:
        reader.read_batch(4)
        told = f"batch 5 is damaged: its {name} does not unpack: .*; verify it"
        is_refused(errors.ChecksumError, lambda: reader.read_batch(5), match=told)
        with pytest.raises(errors.ChecksumError, match="batch 5 is damaged"):
            reader.read_batches_into(0, np.empty(SHAPE, "<u2"))
    assert "batch 5 is damaged" in str(verify_store(path)[0].problem)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("change", ["more", "less", "cut", "empty", "noise"])
def test_data_that_unpack_to_something_else_are_refused(codec, change):
    data = np.arange(2000, dtype="<u2").reshape(1, -1) // 5
    encode = Encoder(codec)
    [(stored, skipped)] = encode(data)
    encode.close()
    assert skipped == 0
    out = np.empty(data.nbytes, np.uint8)
    chunk_decoder(codec)(np.frombuffer(stored, np.uint8), out)
    np.testing.assert_array_equal(out.view("<u2"), data[0])
    if change in ("more", "less"):
        out = np.empty(data.nbytes + (-1 if change == "more" else 1), np.uint8)
    else:
        stored = {"cut": stored[:-9], "empty": b"\0", "noise": b"\xff" * len(stored)}[change]
    is_refused(ValueError, lambda: chunk_decoder(codec)(np.frombuffer(stored, np.uint8), out), match=r"\w")


OUTSIDE = "batch 3 is outside of the file"


@pytest.mark.parametrize(("row", "message"), [
    *(((first, size), OUTSIDE) for first, size in ((-1, 10), (10, 0), (0, 2**62), (2**62, 1))),
    ((1 << 20, 2**40), "batch 3: expected at most "),  # a buffer of that size would be a MemoryError
])  # fmt: skip
def test_chunks_outside_of_the_file_or_larger_than_plain_ones_are_refused(row, message, packed, tmp_path):
    with open_reader(packed[0]) as reader:
        meta = reader.meta
    with h5py.File(packed[0]) as h5:
        table = h5[EXTENTS][:].astype(np.int64)
    table[3] = row
    path = Path(shutil.copy(packed[0], tmp_path))
    if message != OUTSIDE:
        os.truncate(path, sum(row))  # a sparse file is long enough for any claim, and costs nothing
    with closing(open_ranges(path)) as ranges, pytest.raises(errors.FormatError, match=message):
        Decoded(ranges, CodedChunks(packed[1], table), meta.dtype, meta.batch_tokens, 40 * meta.batch_tokens, "batch")


@pytest.mark.parametrize("text", ["lzma", "zstd:0", "zstd:23", "gzip:10", "gzip:x", "zstd:", "", ":3"])
def test_codecs_that_do_not_exist_are_refused(text):
    if text == "zstd:":
        assert codec_named(text) == "zstd:3"
        return
    is_refused(errors.ArgumentError, lambda: codec_named(text), match="codec")


def test_only_hdf5_files_that_are_not_live_are_compressed(tmp_path):
    shape = {"batch_size": 1, "seq_len": 2, "codec": "zstd"}
    with pytest.raises(errors.ArgumentError, match="batch files are never compressed: leave out the codec zstd:3"):
        open_writer(tmp_path / "x.batch", **shape)
    with pytest.raises(errors.ArgumentError, match="a live store is never compressed: leave out the codec zstd:3"):
        open_writer(tmp_path / "x", live=True, shard_batches=1, **shape)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named(tokens, tmp_path, write_file, write_store, monkeypatch):
    path = write_file(tmp_path / "x.h5", tokens, codec="zstd").path
    folder = write_store(tmp_path / "z", tokens, codec="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    install = r"codec zstd:3 needs the package zstandard: pip install 'zb_hdf5\[codecs\]'"
    is_refused(errors.UnavailableError, lambda: write_file(tmp_path / "y.h5", tokens, codec="zstd"), match=install)
    for opened in (path, folder):
        with pytest.raises(errors.UnavailableError, match=install), open_reader(opened) as reader:
            reader.read_batch(0)
    assert not list(tmp_path.glob("y.h5*"))


def test_a_check_without_the_library_calls_no_file_bad(tokens, tmp_path, write_store, monkeypatch):
    folder = write_store(tmp_path / "z", tokens, codec="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(errors.UnavailableError, match="codec zstd:3 needs the package zstandard"):
        verify_store(folder)


def test_hdf5_itself_needs_a_plugin_for_zstd(tokens, tmp_path, write_file):
    """In a process of its own: whoever imports hdf5plugin changes HDF5 for good."""
    path = write_file(tmp_path / "x.h5", tokens, codec="zstd").path
    code = f"""if True:
        import sys
        from zb_hdf5 import UnavailableError, open_reader
        if sys.argv[1] == "without":
            sys.modules["hdf5plugin"] = None
        with open_reader({str(path)!r}, access="h5py") as reader:
            try:
                print(reader.read_batch(0).sum())
            except UnavailableError as error:
                print(error)
    """
    for how, expected in (("with", str(tokens[0].sum())), ("without", "pip install 'zb_hdf5[codecs]'")):
        done = python(code, how)
        assert expected in done.stdout, done.stderr
