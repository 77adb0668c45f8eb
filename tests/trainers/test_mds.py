"""MosaicML streaming's shards: each sample is a document, and neither the index nor a shard is believed."""

import json
import pickle
import shutil
import struct

import numpy as np
import pytest
from contract import is_refused
from id_documents import GOLDEN, documents_of, truth_of
from mds_folder import array_of, write
from reading import fits

from zb_hdf5 import ChecksumError, ConvertError, FormatError, IncompleteError, convert, open_corpus, open_reader
from zb_hdf5.formats import id_source
from zb_hdf5.trainers.mds import MDS_DTYPES, open_mds

MDS = GOLDEN / "mds"
#: The golden folders, and what it takes to read each.
FOLDERS = {"ndarray": {}, "zstd": {}, "bytes": {"source_dtype": "int64"}}


IDS = [np.array(ids, np.int32) for ids in ([5, 6, 7], [8], [9, 10])]


def changed(folder, **entry):
    """Change the entry of the first shard."""
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= entry
    (folder / "index.json").write_text(json.dumps(index))


@pytest.fixture
def copied(tmp_path):
    """Return `copied(name)`: a golden folder that a test may damage."""
    return lambda name: shutil.copytree(MDS / name, tmp_path / name)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("block", [1, 500, 1 << 20])
def test_golden_samples_are_documents(name, block, monkeypatch):
    monkeypatch.setattr(id_source, "BLOCK_OF_IDS", block)
    source = pickle.loads(pickle.dumps(open_mds([MDS / name], **FOLDERS[name])))
    found = documents_of(source)
    sha256, lengths = truth_of(MDS / name)
    assert (found.sha256, [len(each) for each in found.tokens]) == (sha256, lengths)
    assert source.dtype == (np.uint16 if name == "zstd" else np.uint32)
    first = [documents_of(source, [group]).rows for group in source.groups]
    assert [rows[0] for rows in first] == [1] * len(first)
    chosen = documents_of(source, choose=lambda count: np.arange(count) < 1)
    assert chosen.tokens[0] == found.tokens[0]


def test_several_folders_follow_each_other(tmp_path):
    report = convert([MDS / "ndarray", MDS / "zstd"], "stream", tmp_path / "out", workers=1)
    assert (report.counts.documents, len(report.shards)) == (120, 3)
    with open_corpus(tmp_path / "out") as stream:
        place = stream.documents[70]
    assert (place.source, place.row) == (str(MDS / "zstd" / "shard.00000.mds.zstd"), 11)


def test_bytes_need_their_dtype():
    match = "column 'tokens': expected arrays, found bytes, whose dtype is not stored: name it in source_dtype"
    is_refused(ConvertError, lambda: open_mds([MDS / "bytes"]), match=match)


def test_a_dtype_of_arrays_that_have_their_own_is_refused():
    match = "column 'tokens': source_dtype is for bytes, found .*; leave it out"
    is_refused(ConvertError, lambda: open_mds([MDS / "ndarray"], source_dtype="uint16"), match=match)


def test_a_wrong_dtype_of_bytes_is_found_by_the_vocabulary(tmp_path):
    how = {"source_dtype": "int16", "vocab_size": 50_257, "workers": 1}
    is_refused(ConvertError, lambda: convert(MDS / "bytes", "stream", tmp_path / "out", **how), match="token id -")


@pytest.mark.parametrize("dtype", [each for each in MDS_DTYPES.values() if each.kind in "iu"], ids=str)
@pytest.mark.parametrize("shape_code", [0, 1, 2, 3])
def test_arrays_of_any_dtype_and_shape_are_ids(dtype, shape_code, tmp_path):
    arrays = [ids.astype(dtype) for ids in IDS]
    for encoding in ("ndarray", f"ndarray:{dtype.name}"):
        samples = [[array_of(each, dtype if ":" in encoding else None, shape_code)] for each in arrays]
        source = open_mds([write(tmp_path / "a", samples, {"tokens": encoding})])
        assert documents_of(source).tokens == [each.tolist() for each in IDS]
    fixed = write(
        tmp_path / "b", [[arrays[0].tobytes()]] * 2, {"tokens": f"ndarray:{dtype.name}:3"}, [3 * dtype.itemsize]
    )
    assert documents_of(open_mds([fixed], rows="records")).tokens == [[5, 6, 7]] * 2


def test_other_columns_are_fields_ids_and_metadata(tmp_path):
    values = [b"a\xc3\xbc", b"b", b"c"]
    samples = [
        [array_of(-each, np.int32), struct.pack("<q", len(each)), value, b'{"x": [1]}', array_of(each, np.int32)]
        for each, value in zip(IDS, values, strict=True)
    ]
    columns = {"labels": "ndarray:int32", "n": "int", "name": "str", "more": "json", "tokens": "ndarray:int32"}
    folder = write(tmp_path / "a", samples, columns, [None, 8, None, None, None])
    source = open_mds([folder], id_column="name", metadata_columns=["n", "more"])
    found = documents_of(source)
    assert found.tokens == [each.tolist() for each in IDS]
    assert found.fields == {"labels": [(-each).tolist() for each in IDS]}
    assert found.ids == values
    assert found.metadata == [{"n": len(each), "more": {"x": [1]}} for each in IDS]
    assert documents_of(open_mds([folder], ids_column="tokens", field_columns=[])).fields == {}
    for name, match in (
        ("labels", "expected one of str"),
        ("none", "expected a column 'none', found the columns labels"),
    ):
        with pytest.raises(ConvertError, match=match):
            open_mds([folder], metadata_columns=[name])


@pytest.mark.parametrize(("encoding", "match"), [
    ("pkl", "column 'tokens': expected lists of ids, found pkl"),
    ("jpeg", "column 'tokens': expected lists of ids, found jpeg"),
    ("ndarray:float32", "column 'tokens': expected lists of ids, found lists of float32"),
    ("ndarray:complex64", "expected an array of one of uint8, .*, found 'ndarray:complex64'"),
    ("ndarray:int32:x", "expected the shape of an array, found 'ndarray:int32:x'"),
])  # fmt: skip
def test_encodings_that_are_no_ids_are_refused_and_nothing_is_unpickled(encoding, match, tmp_path):
    class Evil:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    folder = write(tmp_path / "a", [[pickle.dumps(Evil())]], {"tokens": encoding})
    is_refused((ConvertError, FormatError), lambda: open_mds([folder]), match=match)


@pytest.mark.parametrize(("data", "error", "match"), [
    (struct.pack("<BB", (1 << 2), 9) + bytes(8), FormatError, "expected 9 values of 4 bytes, found 8 bytes"),
    (struct.pack("<BQ", (1 << 2) | 3, 1 << 60), FormatError, "expected 1,152,921,504,606,846,976 values of"),
    (struct.pack("<BBB", (2 << 2), 1, 1) + bytes(4), ConvertError, "expected an array of one axis, found 2 axes"),
    (b"", FormatError, "expected an array with its shape, found b''"),
    (struct.pack("<BB", (1 << 2) | 3, 1), FormatError, "expected an array with its shape"),
])  # fmt: skip
def test_an_array_that_lies_is_named(data, error, match, tmp_path):
    folder = write(tmp_path / "a", [[array_of(IDS[0], "int32")], [data]], {"tokens": "ndarray:int32"})
    source = open_mds([folder])
    is_refused(error, lambda: documents_of(source), match=rf"row 2 of .*: column 'tokens': {match}")


def test_bytes_that_are_no_whole_ids_are_named(tmp_path):
    folder = write(tmp_path / "a", [[b"12345678"], [b"123"]], {"tokens": "bytes"})
    source = open_mds([folder], source_dtype="int32")
    is_refused(FormatError, lambda: documents_of(source), match="row 2 of .*: expected ids of 4 bytes, found 3 bytes")


# --- damaged and lying ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_a_shard_that_was_cut_or_changed_is_refused(name, copied):
    folder = copied(name)
    path = next(folder.glob("shard.00000*"))
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    how = FOLDERS[name]
    is_refused(IncompleteError, lambda: open_mds([folder], **how), match="expected [0-9,]+ bytes, as index.json has it")
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    source = open_mds([folder], **how)
    is_refused(
        ChecksumError, lambda: documents_of(source), match="expected sha1 [0-9a-f]+, as index.json has it, found"
    )
    path.unlink()
    is_refused(IncompleteError, lambda: open_mds([folder], **how), match="expected a file, as index.json has it, found")


def test_a_hash_that_python_lacks_is_not_compared(copied):
    folder = copied("ndarray")
    entry = json.loads((folder / "index.json").read_text())["shards"][0]["raw_data"]
    changed(folder, raw_data=entry | {"hashes": {"xxh64": "wrong"}})
    assert documents_of(open_mds([folder])).sha256 == truth_of(MDS / "ndarray")[0]


@pytest.mark.parametrize("size", [39_523, 39_525, 1 << 31])
def test_zstd_unpacks_to_the_bytes_of_the_index_or_not_at_all(size, copied):
    folder = copied("zstd")
    changed(folder, raw_data={"basename": "shard.00000.mds", "bytes": size, "hashes": {}})
    is_refused(ChecksumError, lambda: documents_of(open_mds([folder])), match="does not unpack: expected")


def test_the_plain_shard_is_read_where_both_are_there(copied, tmp_path):
    import zstandard

    folder = copied("zstd")
    packed = next(folder.glob("*.zstd"))
    (folder / "shard.00000.mds").write_bytes(zstandard.decompress(packed.read_bytes()))
    packed.unlink()
    assert documents_of(open_mds([folder])).sha256 == truth_of(MDS / "zstd")[0]


def test_other_codecs_are_refused_by_name(copied):
    folder = copied("zstd")
    changed(folder, compression="br:11")
    is_refused(FormatError, lambda: open_mds([folder]), match="expected files as they are, or by zstd, found 'br:11'")


def test_offsets_outside_of_the_shard_are_not_followed(tmp_path):
    folder = write(tmp_path / "a", [[array_of(each, "int32")] for each in IDS], {"tokens": "ndarray:int32"})
    path = folder / "shard.00000.mds"
    data = path.read_bytes()
    offsets = np.frombuffer(data[4:20], "<u4")
    match = "expected 3 samples, as index.json has it, to byte"
    for lie in (offsets + 1, offsets[::-1], offsets - 10, offsets * 2):
        path.write_bytes(data[:4] + lie.astype("<u4").tobytes() + data[20:])
        is_refused(FormatError, lambda: documents_of(open_mds([folder])), match=match)
    path.write_bytes(struct.pack("<I", 4) + data[4:])
    is_refused(FormatError, lambda: documents_of(open_mds([folder])), match=match)
    path.write_bytes(data[:22] + struct.pack("<I", 1 << 31) + data[26:])
    match = "row 1 of .*: expected columns of 21 bytes, found 2,147,483,652"
    is_refused(FormatError, lambda: documents_of(open_mds([folder])), match=match)


@pytest.mark.parametrize(("entry", "match"), [
    ({"format": "json"}, "expected mds, version 2, found json, version 2"),
    ({"version": 3}, "expected mds, version 2, found mds, version 3"),
    ({"samples": -1}, "expected a number in samples, found -1"),
    ({"samples": 1 << 60}, "expected the bytes of 1,152,921,504,606,846,976 samples, found"),
    ({"raw_data": {"basename": "../x.mds", "bytes": 1}}, "expected a file below the folder in basename, found '../x"),
    ({"raw_data": {"basename": "/etc/x", "bytes": 1}}, "expected a file below the folder in basename, found '/etc/x'"),
    ({"raw_data": None}, "expected a file below the folder in basename, found None"),
    ({"column_names": ["a", "b"]}, "expected lists of column_names, column_encodings, column_sizes, of one length"),
    ({"column_sizes": ["x"]}, r"expected the bytes of columns, found \['x'\]"),
    ({"column_names": ["x"]}, "'token_ids' or 'ids' of lists of ids, found the columns x"),
])  # fmt: skip
def test_an_index_that_lies_is_refused(entry, match, tmp_path):
    folder = write(tmp_path / "a", [[array_of(each, "int32")] for each in IDS], {"tokens": "ndarray:int32"})
    changed(folder, **entry)
    is_refused((FormatError, ConvertError), lambda: open_mds([folder]), match=match)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"shards": []}', '{"shards": [7]}', '{"shards": 7}'])
def test_other_json_is_no_index(text, tmp_path):
    (tmp_path / "index.json").write_text(text)
    assert not fits("mds", tmp_path)
    is_refused(FormatError, lambda: open_mds([tmp_path]), match=r"index\.json: expected (JSON|a JSON object|shards)")


def test_a_folder_of_folders_names_them(copied, tmp_path):
    copied("ndarray")
    copied("zstd")
    is_refused(ConvertError, lambda: open_mds([tmp_path]), match="has the data sets ndarray, zstd: name the folders of")
    is_refused(
        ConvertError, lambda: open_mds([tmp_path / "zstd" / "shard.00000.mds.zstd"]), match="expected a folder with"
    )
    assert fits("mds", tmp_path / "zstd")
    assert not fits("mds", tmp_path)


def test_shards_lie_in_folders_below_the_index(copied, tmp_path):
    folder = copied("zstd")
    (folder / "0").mkdir()
    next(folder.glob("*.zstd")).rename(folder / "0" / "shard.00000.mds.zstd")
    entry = json.loads((folder / "index.json").read_text())["shards"][0]
    moved = {key: entry[key] | {"basename": f"0/{entry[key]['basename']}"} for key in ("raw_data", "zip_data")}
    changed(folder, **moved)
    assert documents_of(open_mds([folder])).sha256 == truth_of(MDS / "zstd")[0]


def test_samples_become_packed_rows(tmp_path):
    how = {"seq_len": 64, "batch_size": 4, "packing": "best-fit", "val_fraction": 0.2, "workers": 1}
    report = convert(MDS / "zstd", "hdf5", tmp_path / "out", **how)
    assert {*report.batches_of_split} == {"train", "val"}
    with open_reader(tmp_path / "out") as reader:
        assert reader.has_pieces
