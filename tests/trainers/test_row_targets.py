"""Rows for other trainers: Parquet, folders for `load_from_disk`, and MDS, with fields, ids, metadata and splits."""

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
from contract import is_refused
from id_documents import GOLDEN, documents_of, labels_of, loss_mask_of, truth_of
from interrupted import Failing, Stops

from zb_hdf5 import ConvertError, HDF5ShardWriter, ShardIndex, StoreMeta, convert, open_corpus
from zb_hdf5.errors import ClosedError, ExistsError
from zb_hdf5.field import Field
from zb_hdf5.formats import document_writer, row_writer
from zb_hdf5.trainers import mds_writer
from zb_hdf5.trainers.hf import open_hf
from zb_hdf5.trainers.mds import open_mds
from zb_hdf5.trainers.mds_writer import MdsWriter
from zb_hdf5.trainers.table_writers import ArrowWriter, ParquetWriter

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TARGETS = {"parquet": open_hf, "hf": open_hf, "mds": open_mds}
WRITERS = {"parquet": ParquetWriter, "hf": ArrowWriter, "mds": MdsWriter}
#: A column of URLs, which are ids and metadata too.
HOW = {"id_column": "url", "metadata_columns": ("url",), "vocab_size": 50_257, "workers": 1}
SAVED = GOLDEN / "hf" / "saved"


@pytest.fixture(params=TARGETS)
def target(request):
    return request.param


def files_in(folder):
    """Return the content of all files in and below a folder, by their paths."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def read_back(target, path, **how):
    """Return the documents of a target, by our own reader."""
    return documents_of(TARGETS[target]([path], id_column="id", metadata_columns=["metadata"], **how))


@pytest.mark.parametrize("block", [1, 3000, 1 << 20])
def test_documents_fields_ids_and_metadata_come_back(target, block, tmp_path, monkeypatch):
    monkeypatch.setattr(row_writer, "BLOCK_IDS_WRITTEN", block)
    report = convert(SAVED, target, tmp_path / "out", **HOW, shards=2)
    found = read_back(target, tmp_path / "out")
    sha256, lengths = truth_of(GOLDEN / "hf")
    assert (found.sha256, [len(each) for each in found.tokens]) == (sha256, lengths)
    assert (found.fields["labels"], found.fields["loss_mask"]) == (
        labels_of(found.tokens), loss_mask_of(found.tokens)
    )  # fmt: skip
    urls = [f"https://example.org/{number}" for number in range(60)]
    assert found.ids == [url.encode() for url in urls]
    metadata = [each["metadata"] for each in found.metadata]
    assert [json.loads(each) if isinstance(each, str) else each for each in metadata] == [{"url": url} for url in urls]
    facts = report.to_json()
    assert (facts["documents"], facts["num_shards"]) == (60, 2)
    assert facts["dtype"] == ("uint16" if target == "mds" else "int32")
    assert not [*tmp_path.glob("*.partial")]


def test_blocks_are_as_large_as_they_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(row_writer, "BLOCK_IDS_WRITTEN", 100)
    monkeypatch.setattr(row_writer, "BLOCK_ROWS_WRITTEN", 4)
    with ParquetWriter(tmp_path / "a.parquet", StoreMeta(1, 16, np.dtype("<u2"), layout="stream")) as writer:
        for lengths in ([60], [30, 10, 1], [250], [1] * 9, [0, 0]):
            writer.write_documents(np.zeros(sum(lengths), np.int64), np.array(lengths))
    file = parquet.ParquetFile(tmp_path / "a.parquet")
    groups = [file.read_row_group(number)["input_ids"].to_pylist() for number in range(file.num_row_groups)]
    assert [[len(row) for row in group] for group in groups] == [
        [60, 30, 10],
        [1],
        [250],
        [1] * 4,
        [1] * 4,
        [1],
        [0, 0],
    ]


def test_splits_have_folders_of_their_own(target, tmp_path):
    convert(SAVED, target, tmp_path / "out", **HOW, shards=2, val_fraction=0.2)
    suffix = WRITERS[target].suffix
    parts = [f"train-{number:05}-of-00002{suffix}" for number in range(2)] + [f"val-00000-of-00001{suffix}"]
    of_split = {"parquet": [], "hf": ["dataset_info.json", "state.json"], "mds": ["index.json"]}[target]
    if target == "parquet":
        assert [*files_in(tmp_path / "out")] == parts
        return
    whole = {"dataset_dict.json"} if target == "hf" else set()
    expected = {f"{part.partition('-')[0]}/{name}" for part in parts for name in (part, *of_split)}
    assert {*files_in(tmp_path / "out")} == expected | whole
    found = {split: read_back(target, tmp_path / "out" / split) for split in ("train", "val")}
    assert 0 < len(found["val"].tokens) < 30
    assert sorted(found["train"].ids + found["val"].ids) == sorted(read_back_ids())
    convert(tmp_path / "out", "stream", tmp_path / "again", source_format=target)
    index = ShardIndex.load(tmp_path / "again")
    assert [*dict.fromkeys(index.table.values["split"])] == ["train", "val"]
    with open_corpus(tmp_path / "again", split="val") as stream:
        assert stream.num_tokens == sum(map(len, found["val"].tokens))


def read_back_ids():
    return documents_of(open_hf([SAVED], id_column="url")).ids


def test_a_split_without_documents_has_no_folder(target, tmp_path):
    convert(SAVED, target, tmp_path / "out", **HOW, shards=1, val_fraction=1e-9)
    names = [*files_in(tmp_path / "out")]
    assert not any("/" in name for name in names)
    assert read_back(target, tmp_path / "out").sha256 == truth_of(GOLDEN / "hf")[0]


def test_a_folder_is_the_same_whoever_writes_it_and_is_replaced_when_asked(target, tmp_path):
    how = {**HOW, "shards": 2, "val_fraction": 0.2}
    convert(SAVED, target, tmp_path / "out", **how)
    expected = files_in(tmp_path / "out")
    with pytest.raises(ExistsError):
        convert(SAVED, target, tmp_path / "out", **how)
    convert(SAVED, target, tmp_path / "out", **how, force=True)
    assert files_in(tmp_path / "out") == expected
    place = tmp_path / "out" / ("" if target == "parquet" else "val")
    (place / "notes.txt").write_text("mine")
    with pytest.raises(ConvertError, match=r"notes\.txt"):
        convert(SAVED, target, tmp_path / "out", **how, force=True)
    assert (place / "notes.txt").read_text() == "mine"


def test_an_interrupted_conversion_is_resumed(target, tmp_path, monkeypatch):
    how = {**HOW, "shards": 2, "val_fraction": 0.2}
    convert(SAVED, target, tmp_path / "whole", **how)
    once = {name: value for name, value in how.items() if name != "workers"}
    is_refused(Stops, lambda: convert(SAVED, target, tmp_path / "out", **once, engine=Failing(1)))
    assert convert(SAVED, target, tmp_path / "out", **how, resume=True).kept.shards == 1
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")
    shutil.rmtree(tmp_path / "out")
    if target == "parquet":
        return
    monkeypatch.setattr(document_writer.Path, "mkdir", stops_at("val", document_writer.Path.mkdir))
    is_refused(Stops, lambda: convert(SAVED, target, tmp_path / "out", **how))
    monkeypatch.undo()
    convert(SAVED, target, tmp_path / "out", **how, resume=True)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


def stops_at(name, mkdir):
    """Return a `mkdir` that stops at a folder of this name."""

    def stop(path, *arguments, **how):
        if path.name == name:
            raise Stops
        return mkdir(path, *arguments, **how)

    return stop


@pytest.mark.parametrize(("target", "name"), [("parquet", "out.parquet"), ("hf", "out.arrow")])
def test_one_file_is_named_by_its_suffix(target, name, tmp_path):
    convert(SAVED, "auto", tmp_path / name, **HOW)
    assert read_back(target, tmp_path / name).sha256 == truth_of(GOLDEN / "hf")[0]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_shard_of_mds_alone_is_no_result(tmp_path):
    with pytest.raises(ConvertError, match="expected a folder"):
        convert(SAVED, "mds", tmp_path / "out.mds", **HOW)


def test_samples_are_those_of_the_library(tmp_path):
    """Its header has other words for the columns; the samples are the same bytes."""
    source = GOLDEN / "mds" / "ndarray"
    convert(source, "mds", tmp_path / "out", workers=1)
    for mine, theirs in zip(sorted((tmp_path / "out").glob("*.mds")), sorted(source.glob("*.mds")), strict=True):
        found = []
        for data in (mine.read_bytes(), theirs.read_bytes()):
            count = int.from_bytes(data[:4], "little")
            offsets = np.frombuffer(data, "<u4", count + 1, 4)
            found.append((count, np.diff(offsets).tolist(), data[offsets[0] :]))
        assert found[0] == found[1]
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    theirs = json.loads((source / "index.json").read_text())
    assert index.keys() == theirs.keys()
    assert index["shards"][0].keys() == theirs["shards"][0].keys()


FIELDS = (
    Field("flag", np.dtype(bool)),
    Field("vector", np.dtype("f4"), (2, 3)),
    Field("half", np.dtype("f2")),
    Field("wide", np.dtype("u8")),
)


def test_fields_of_any_numbers_are_lists(target, tmp_path):
    meta = StoreMeta(1, 16, np.dtype("<u4"), layout="stream", fields=FIELDS)
    rng = np.random.default_rng(3)
    values = {
        "flag": rng.integers(0, 2, 5).astype(bool),
        "vector": rng.random((5, 2, 3)).astype("f4"),
        "half": rng.random(5).astype("f2"),
        "wide": rng.integers(0, 2**63, 5).astype("u8"),
    }
    path = tmp_path / f"train-0{WRITERS[target].suffix}"
    with WRITERS[target](path, meta) as writer:
        writer.write_documents(np.arange(5), np.array([3, 0, 2]), values)
    if target == "mds":
        found = samples_of(path, [*MdsWriter.encodings(meta, ()).values()])
        names = [*MdsWriter.encodings(meta, ())]
        rows = [dict(zip(names, sample, strict=True)) for sample in found]
    else:
        table = parquet.read_table(path) if target == "parquet" else pa.ipc.open_stream(path.read_bytes()).read_all()
        rows = table.to_pylist()
    for name, expected in values.items():
        parts = [np.array(row[name], expected.dtype).reshape(-1, *expected.shape[1:]) for row in rows]
        assert [len(part) for part in parts] == [3, 0, 2]
        np.testing.assert_array_equal(np.concatenate(parts), expected)


def samples_of(path, encodings):
    """Decode the arrays of each sample, as the library does."""
    data = path.read_bytes()
    offsets = np.frombuffer(data, "<u4", int.from_bytes(data[:4], "little") + 1, 4)
    samples = []
    for start, stop in pairwise(offsets.tolist()):
        sizes = np.frombuffer(data, "<u4", len(encodings), start)
        ends = start + 4 * len(encodings) + np.cumsum(sizes)
        assert ends[-1] == stop
        arrays = []
        for size, end, encoding in zip(sizes, ends, encodings, strict=True):
            value = data[end - size : end]
            axes = value[0] >> 2
            itemsize = 1 << (value[0] & 3)
            shape = np.frombuffer(value, f"<u{itemsize}", axes, 1)
            arrays.append(np.frombuffer(value[1 + axes * itemsize :], encoding.split(":")[1]).reshape(shape))
        samples.append(arrays)
    return samples


@pytest.mark.parametrize("fields", [
    (Field("x", np.dtype("c8")),), (Field("x", np.dtype([("a", "u1"), ("b", "f4")])),),
], ids=["complex", "structured"])  # fmt: skip
def test_fields_that_a_format_lacks_are_named(fields, target, tmp_path):
    meta = StoreMeta(1, 16, np.dtype("<u4"), layout="stream", fields=fields)
    with pytest.raises(ConvertError, match=r"field x: .* has no"):
        WRITERS[target](tmp_path / "out.x", meta)
    assert not [*tmp_path.iterdir()]


def test_a_field_that_has_the_name_of_another_column_is_refused(target, tmp_path):
    name = WRITERS[target].ids_column if target != "mds" else "id"
    meta = StoreMeta(1, 16, np.dtype("<u4"), layout="stream", fields=(Field(name, np.dtype("u1")),))
    with pytest.raises(ConvertError, match=f"expected columns of different names, found .*{name}"):
        WRITERS[target](tmp_path / "out.x", meta, facts=("ids",))


@pytest.mark.thin
def test_ids_that_do_not_fit_are_refused(target, tmp_path):
    with HDF5ShardWriter(tmp_path / "in.h5", dtype="uint32") as writer:
        writer.write_document([7, 8, 9])
        writer.write_document([1, 2**31])
    expected = r"token id 2147483648 at index 1 of row 2 is outside 0\.\.2,147,483,647 \(int32\)"
    with pytest.raises(ConvertError, match=expected):
        convert(tmp_path / "in.h5", target, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]


def test_ids_beyond_the_vocabulary_are_refused_with_their_row(target, tmp_path):
    meta = StoreMeta(1, 16, np.dtype("<u4"), layout="stream", vocab_size=100)
    with WRITERS[target](tmp_path / f"x{WRITERS[target].suffix}", meta) as writer:
        writer.write_documents(np.arange(5), np.array([3, 2]))
        with pytest.raises(
            ConvertError, match=r"token id 100 at index 0 of row 5 is outside 0\.\.99 \(vocab_size 100\)"
        ):
            writer.write_documents(np.array([1, 2, 100, 200]), np.array([2, 0, 2]))


@pytest.mark.thin
def test_spans_have_no_place(target, tmp_path):
    with HDF5ShardWriter(tmp_path / "in.h5") as writer:
        writer.write_document([1, 2], spans=[(0, 1, "s")])
    with pytest.raises(ConvertError, match="leaves behind the spans of documents"):
        convert(tmp_path / "in.h5", target, tmp_path / "out")
    convert(tmp_path / "in.h5", target, tmp_path / "out", tokens_only=True)


def test_a_shard_of_mds_is_below_4_gib(tmp_path, monkeypatch):
    monkeypatch.setattr(mds_writer, "MAX_FILE_BYTES", 30_000)
    with pytest.raises(ConvertError, match="a shard of MDS has less than 4 GiB: pass more shards"):
        convert(GOLDEN / "mds" / "zstd", "mds", tmp_path / "out", workers=1)
    assert not [*tmp_path.iterdir()]


def test_a_writer_that_was_closed_takes_no_more(target, tmp_path):
    meta = StoreMeta(1, 16, np.dtype("<u2"), layout="stream")
    suffix = WRITERS[target].suffix
    with WRITERS[target](tmp_path / f"out{suffix}", meta) as writer:
        writer.write_documents(np.array([1, 2, 3]), np.array([2, 1]))
    with pytest.raises(ClosedError):
        writer.write_documents(np.array([1]), np.array([1]))
    with pytest.raises(ConvertError, match="outside"), WRITERS[target](tmp_path / f"x{suffix}", meta) as writer:
        writer.write_documents(np.array([1, -1]), np.array([2]))
    with pytest.raises(ExistsError):
        WRITERS[target](tmp_path / f"out{suffix}", meta)
    with WRITERS[target](tmp_path / f"empty{suffix}", meta):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"empty{suffix}", f"out{suffix}"]


@pytest.mark.parametrize("size", [16, 64, 120])
def test_a_full_disk_leaves_no_file(size, target, mount_disk):
    """The disk is full in the middle of the rows, or at their end."""
    disk = mount_disk(size)
    with pytest.raises(OSError, match="No space left"):
        convert(SAVED, target, disk / "out", **HOW, shards=1)
    assert not [*disk.iterdir()]
