"""Verify, repair and rebuild with the pieces of shards and the document tables."""

import json
import os
import shutil

import h5py
import numpy as np
import pytest
from contents import write_stream
from contract import is_refused
from damage import flip, flip_token
from packed import damage_table, require_same_pieces

import zb_hdf5
from zb_hdf5.converters.arguments import convert
from zb_hdf5.converters.store_source import StoreSource
from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.documents.table_writer import DocumentsWriter, PiecesWriter
from zb_hdf5.errors import ChecksumError
from zb_hdf5.spec import INDEX_NAME, documents_path, pieces_path
from zb_hdf5.store.opening import open_writer
from zb_hdf5.store.rebuild import index_files, rebuild_index
from zb_hdf5.store.repair import repair

B, S = 2, 8


def write_file(path, num_batches, first=0, split="train", documents=True):
    """Write batches whose token t of the document stream is t % 97, two pieces a record, from offset `first` on."""
    records = num_batches * B
    tokens = (first + np.arange(records * S)) % 97
    with open_writer(path, batch_size=B, seq_len=S, backend="auto") as writer:
        writer.write(tokens.reshape(num_batches, B, S))
        sha256 = writer.sha256()
    offsets = first + np.stack([np.arange(records) * S, np.arange(records) * S + 3], axis=1).reshape(-1)
    pieces = PiecesWriter(path)
    pieces.append_pieces(
        Pieces(2 * np.arange(records + 1), np.tile([0, 3], records).astype("u4"), offsets.astype("u8"), S)
    )
    pieces.publish(seq_len=S, split=split, tokens_sha256=sha256)
    if documents:
        with DocumentsWriter(documents_path(path)) as table:
            table.append_documents([5] * 4, DocumentRows(ids=[b"a", b"b", b"c", b"d"]))
            table.publish(split=split, tokens_sha256=sha256)


@pytest.fixture
def split_store(tmp_path):
    """Return a store of two splits, of two shards each."""
    folder = tmp_path / "store"
    folder.mkdir()
    paths = []
    for number in range(4):
        paths.append(folder / f"shard-{number:05}-of-00004.h5")
        split, first = ("train", "val")[number // 2], number % 2 * 3 * B * S
        write_file(paths[-1], 3, first, split, documents=False)
    for number, split in enumerate(("train", "val")):
        with DocumentsWriter(folder / f"documents-{number:05}.tables") as table:
            table.append_documents([16] * 6, DocumentRows(ids=[f"{split}{k}".encode() for k in range(6)]))
            table.publish(split=split)
    index_files(paths).save(folder)
    return folder


def right_pieces(reader):
    """Return all pieces, whose first tokens are those of their offsets."""
    pieces = reader.read_pieces(np.arange(reader.num_records))
    np.testing.assert_array_equal(np.concatenate(list(reader))[pieces.rows, pieces.columns], pieces.offsets % 97)
    return pieces


def require_whole(folder, per_split=6 * B):
    for split in ("train", "val"):
        with zb_hdf5.open_reader(folder, split=split) as reader:
            pieces = right_pieces(reader)
            assert reader.num_records == per_split
            numbers = reader.corpus.documents.number_of(pieces.offsets)
            assert reader.corpus.documents[int(numbers[-1])].id == f"{split}{int(pieces.offsets[-1]) // 16}"


def problems(path):
    return [(os.path.basename(report.path), report.problem) for report in zb_hdf5.verify_store(path) if report.problem]


def test_a_whole_store_is_verified(split_store):
    require_whole(split_store)
    reports = zb_hdf5.verify_store(split_store)
    assert not problems(split_store)
    assert [report.document_count for report in reports] == [0] * 4 + [6] * 2
    assert all("pieces" in report.checks for report in reports[:4])
    assert [report.checks for report in reports[4:]] == [["documents"]] * 2


@pytest.mark.parametrize("name", ["shard-00002-of-00004.h5.pieces", "documents-00001.tables"])
@pytest.mark.thin
def test_each_table_is_checked(split_store, name):
    path = split_store / name
    damage_table(path)
    [(where, problem)] = problems(split_store)
    assert where.startswith(path.name[:11])
    assert isinstance(problem, ChecksumError)
    os.truncate(path, path.stat().st_size - 5)
    assert len(problems(split_store)) == 1
    path.unlink()
    [(_, problem)] = problems(split_store)
    assert isinstance(problem, zb_hdf5.FormatError)
    assert "is not there" in str(problem)


def test_a_lone_file_is_checked_with_what_lies_beside_it(tmp_path):
    path = tmp_path / "x.h5"
    write_file(path, 3)
    [report] = zb_hdf5.verify_store(path)
    assert report.problem is None
    assert {"pieces", "documents"} <= {*report.checks}
    for beside in (pieces_path(path), documents_path(path)):
        damage_table(beside)
        assert isinstance(zb_hdf5.verify_store(path)[0].problem, ChecksumError)
        damage_table(beside)


def test_a_lost_index_is_made_again(split_store):
    before = zb_hdf5.ShardIndex.load(split_store)
    (split_store / INDEX_NAME).unlink()
    rebuild_index(split_store)
    after = zb_hdf5.ShardIndex.load(split_store)
    assert list(after.shards) == list(before.shards)  # their splits too, which the pieces know
    assert after.documents == before.documents
    require_whole(split_store)
    assert not problems(split_store)


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_document_table_of_another_store_is_named(is_copy, split_store, tmp_path):
    before = zb_hdf5.ShardIndex.load(split_store)
    other = split_store / "documents-00007.tables"
    if is_copy:
        shutil.copy(split_store / before.documents[0].path, other)
    else:
        write_file(tmp_path / "x.h5", 3)
        shutil.copy(documents_path(tmp_path / "x.h5"), other)
    match = f"{other.name}: is not of this store, or a copy: .* documents-00000.tables, documents-00001.tables; move"
    is_refused(zb_hdf5.FormatError, lambda: rebuild_index(split_store, force=True), match=match)
    assert zb_hdf5.ShardIndex.load(split_store) == before
    shutil.copy(other, split_store / before.documents[0].path)  # made again: the user has the last word
    other.unlink()
    assert rebuild_index(split_store, force=True).documents[0].path == before.documents[0].path


def test_repair_keeps_the_pieces_of_the_kept_batches(split_store):
    flip_token(split_store / "shard-00001-of-00004.h5", 1)
    reports = repair(split_store)
    assert [report.state for report in reports] == ["whole", "repaired", "whole", "whole"]
    assert reports[1].dropped == [1]
    assert not problems(split_store)
    with zb_hdf5.open_reader(split_store, split="train") as reader:
        assert reader.num_batches == 5
        right_pieces(reader)
    shutil.copytree(split_store, split_store.with_name("again"))
    rebuild_index(split_store.with_name("again"), force=True)
    with zb_hdf5.open_reader(split_store) as first, zb_hdf5.open_reader(split_store.with_name("again")) as second:
        require_same_pieces(*(reader.read_pieces(np.arange(first.num_records)) for reader in (first, second)))
        assert first.corpus.document_table.parts == second.corpus.document_table.parts


def test_repair_of_a_lone_file_keeps_its_documents(tmp_path):
    path = tmp_path / "x.h5"
    write_file(path, 4)
    flip_token(path, 2)
    [report] = repair(path)
    with zb_hdf5.open_reader(report.output) as reader:
        right_pieces(reader)
        assert reader.corpus.documents[3].id == "d"
    damage_table(pieces_path(path))
    for left in tmp_path.glob("*.repaired.*"):
        left.unlink()
    with pytest.raises(ChecksumError) as caught:
        repair(path)
    assert "without its pieces" in caught.value.__notes__[0]


def require_stream(store, kept):
    table = store.documents
    numbers = [number for number in range(len(table)) if table[number].id]
    assert [table[number].id for number in numbers] == [f"d{k}" for k in kept]
    for number, k in zip(numbers, kept, strict=True):
        document = table[number]
        assert store.documents[number].ids.tolist() == [k] * 5
        spans = table.spans(document.offset, document.offset + document.length)
        assert (spans.starts.tolist(), spans.values) == ([document.offset + 1], [f"v{k}"])


def test_streams_are_verified_rebuilt_and_repaired(tmp_path):
    streams = tmp_path / "streams"
    streams.mkdir()
    first, second = (streams / f"shard-{number:05}-of-00002.h5" for number in range(2))
    for path in (first, second):
        with zb_hdf5.HDF5ShardWriter(path, chunk_tokens=16) as writer:
            for k in range(20):
                facts = {"id": f"d{k}", "spans": [(1, 3, f"v{k}")]} if path == first else {}
                writer.write_document(np.full(5, k), **facts)
    index_files([first, second]).save(streams)
    with zb_hdf5.open_corpus(streams) as store:
        require_stream(store, range(20))
        assert store.documents[25].facts == (25, 125, 5, None, None, None, {})
    assert not problems(streams)
    assert [report.checks for report in zb_hdf5.verify_store(streams)][-1] == ["documents"]
    before = zb_hdf5.ShardIndex.load(streams)
    (streams / INDEX_NAME).unlink()
    assert rebuild_index(streams).documents == before.documents
    with h5py.File(first) as h5:
        place = h5["tokens"].id.get_chunk_info(2).byte_offset
    flip(first, place)
    assert len(problems(streams)) == 1
    [report, _] = repair(streams)
    assert report.dropped == [6, 7, 8, 9]
    assert not problems(streams)
    with zb_hdf5.open_corpus(streams) as store:
        require_stream(store, [*range(6), *range(10, 20)])
        assert len(store.documents) == 36


def test_a_damaged_source_is_not_copied(split_store, tmp_path):
    [pieces, *_] = sorted(split_store.glob("*.pieces"))
    damage_table(pieces)
    with pytest.raises(ChecksumError, match=r"pieces: \w+: block 0: expected crc32"):
        convert(StoreSource(split_store, "auto"), "hdf5", tmp_path / "out")
    damage_table(pieces)
    table = split_store / "documents-00000.tables"
    damage_table(table)
    with pytest.raises(ChecksumError, match=r"documents-00000\.tables: \w+: block 0: expected crc32"):
        convert(StoreSource(split_store, "auto"), "hdf5", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("key", "change", "message"), [
    ("pieces", {"bytes": [1]}, "pieces: expected arrays of 4 elements"),
    ("pieces", {"sha256": [1] * 4}, r"pieces: sha256\[0\]: expected str"),
    ("documents", {"path": ["../x", "y"]}, "documents: path '../x' leaves the folder"),
    ("documents", {"sha256": ["0", "1"]}, "documents: expected 64 hexadecimal digits"),
    ("documents", {"split": ["train", "train"]}, "documents-00001.tables: overlaps the table before it"),
    ("documents", {"token_count": [-1, 5]}, "documents: documents-00000.tables: overlaps"),
    ("documents", {"first_token": ["a", 0]}, r"documents: first_token\[0\]: expected int"),
])  # fmt: skip
@pytest.mark.thin
def test_an_index_that_contradicts_itself_is_refused(split_store, key, change, message):
    value = json.loads((split_store / INDEX_NAME).read_text())
    del value["check"]
    value[key] |= change
    is_refused(zb_hdf5.FormatError, lambda: zb_hdf5.ShardIndex.from_json(json.dumps(value), "x"), match=message)


def test_a_stream_without_its_table_is_refused(tmp_path):
    path = tmp_path / "s.h5"
    with zb_hdf5.HDF5ShardWriter(path) as writer:
        writer.write_document(np.arange(40), id="a", spans=[(3, 9, "x")])
    how = {"batch_size": 1, "seq_len": 8, "rank": 0, "world_size": 1, "spans": True}
    with zb_hdf5.Loader(path, **how) as loader:
        assert next(loader)["spans"] is not None
    documents_path(path).unlink()
    lost = r"s\.h5\.documents: is not there, and holds the ids, metadata and spans of s\.h5: restore it"
    uses = (lambda: zb_hdf5.Loader(path, **how), lambda: zb_hdf5.open_corpus(path).documents)
    is_refused(zb_hdf5.IncompleteError, *uses, lambda: index_files([path]), match=lost)
    assert isinstance(zb_hdf5.verify_store(path)[0].problem, zb_hdf5.IncompleteError)
    write_stream(path, np.arange(40), overwrite=True)
    assert not documents_path(path).exists()
    assert zb_hdf5.verify_store(path)[0].problem is None
