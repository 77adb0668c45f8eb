"""Repair of streams: whole documents that touch no bad chunk are kept, and nothing else is touched."""

import json
import os
from itertools import product

import h5py
import numpy as np
import pytest
from commandline import run_zb
from contents import batches_of, files_in, require_good, write_stream
from contract import is_refused, random_tokens
from damage import flip, flip_stored
from descriptors import open_files
from hypothesis import given
from hypothesis import strategies as st
from interpreter import start_program
from interrupted import STREAM_WRITER, stopped_before_the_index
from processes import killed_after, running

from examples import examples
from zb_hdf5 import HDF5ShardWriter, IncompleteError, ShardIndex, UnavailableError, open_corpus, verify_store
from zb_hdf5.commands.findings import diagnose
from zb_hdf5.errors import ArgumentError, ConvertError, FormatError, Remedy
from zb_hdf5.spec import DOC_OFFSETS, INDEX_NAME
from zb_hdf5.store.rebuild import index_files, rebuild_index
from zb_hdf5.store.repair import repair, repair_file
from zb_hdf5.store.unchecked_file import open_chunks

CHUNK = 64
RANDOM = np.random.default_rng(11)


def documents_of(lengths, boundary=-1):
    """Make documents that nothing else looks like; a boundary token ends each of them."""
    made = [RANDOM.integers(100, 60_000, length) for length in lengths]
    return [np.append(tokens, boundary) if boundary >= 0 else tokens for tokens in made]


def write(path, documents, **options):
    tokens = np.concatenate([np.empty(0, np.int64), *documents])
    return write_stream(path, tokens, list(map(len, documents)), chunk_tokens=CHUNK, **options).path


def content(path):
    with open_corpus(path) as store:
        return [store.documents[number].ids.tolist() for number in range(store.document_count)]


def flip_chunk(path, number):
    with open_chunks(path) as reader:
        offset = reader.extents.offset(number)
    flip(path, offset, 16)


def kept_of(documents, bad):
    """Say slowly which documents have no token in a bad chunk."""
    kept, place = [], 0
    for number, document in enumerate(documents):
        if not {token // CHUNK for token in range(place, place + len(document))} & set(bad):
            kept.append(number)
        place += len(document)
    return kept


# --- bad chunks ------------------------------------------------------------------------------------------------
@examples(60)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=12),
    chosen=st.sets(st.integers(0, 100), max_size=5),
    group_bytes=st.sampled_from([2, 100, 1 << 20]),
)
def test_documents_that_touch_no_bad_chunk_are_kept(lengths, chosen, group_bytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    documents = documents_of(lengths)
    path = write(folder / "s.h5", documents)
    num_chunks = -(-sum(lengths) // CHUNK)
    bad = sorted({number % num_chunks for number in chosen}) if num_chunks else []
    for number in bad:
        flip_chunk(path, number)
    kept = kept_of(documents, bad)
    tokens = sum(len(documents[number]) for number in kept)
    before = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zb_hdf5.store.salvage.GROUP_BYTES", group_bytes)
        if bad and not tokens:
            is_refused(IncompleteError, lambda: repair_file(path), match="no document can be saved")
            assert [file.name for file in folder.iterdir()] == ["s.h5"]
            return
        dry = repair_file(path, dry_run=True)
        assert [file.name for file in folder.iterdir()] == ["s.h5"]
        [report] = repair(path)
    assert (report.unit, report.kept, report.kept_tokens) == ("document", len(kept), tokens)
    assert report.dropped == dry.dropped == [number for number in range(len(documents)) if number not in kept]
    assert report.kept_tokens + report.dropped_tokens == sum(lengths)
    assert path.read_bytes() == before
    if not bad:
        assert report.state == "whole"
        return
    assert content(folder / "s.repaired.h5") == [documents[number].tolist() for number in kept]
    require_good(folder / "s.repaired.h5")
    after = files_in(folder)
    assert repair_file(path).state == "repaired"  # it has them already
    assert files_in(folder) == after


def test_the_attributes_of_a_stream_are_kept(tmp_path):
    options = {"dtype": "uint32", "boundary_token_id": 7, "vocab_size": 60_001, "tokenizer": '{"name": "t"}'}
    path = write(tmp_path / "s.h5", documents_of([50] * 9, 7), **options)
    flip_chunk(path, 3)
    result = run_zb("repair", path)
    said = " ".join(result.stdout.split())
    assert "the tokens of 1 chunk differ from the tokens that were written: kept 6 documents" in said
    assert "dropped 3 (3, 4, 5): 153 tokens of 459" in said
    with open_chunks(path) as old, open_chunks(tmp_path / "s.repaired.h5") as new:
        assert old.meta.document_count == 9
        for name in ("shape", "dtype", "boundary_token_id", "vocab_size", "tokenizer", "layout"):
            assert getattr(old.meta, name) == getattr(new.meta, name), name


def test_a_compressed_stream_is_saved_too(tmp_path, gzip_copy):
    documents = documents_of([90] * 8)
    with h5py.File(gzip_copy(write(tmp_path / "plain.h5", documents), tmp_path / "s.h5")) as h5:
        place = h5["tokens"].id.get_chunk_info(4).byte_offset
    require_good(tmp_path / "s.h5")
    flip(tmp_path / "s.h5", place + 10, 0xFF)
    assert repair_file(tmp_path / "s.h5").kept == 6
    assert content(tmp_path / "s.repaired.h5") == [documents[k].tolist() for k in kept_of(documents, [4])]


def test_the_output_is_chosen_and_never_replaced_by_mistake(tmp_path):
    path = write(tmp_path / "s.h5", documents_of([60] * 9))
    flip_chunk(path, 0)
    is_refused(ArgumentError, lambda: repair_file(path, output=tmp_path / "o.batch"), match="can hold a token stream")
    is_refused(ArgumentError, lambda: repair_file(path, output=path), match="is the file to repair")
    other = write(tmp_path / "o.h5", documents_of([3])).read_bytes()
    is_refused(ConvertError, lambda: repair_file(path, output=tmp_path / "o.h5"), match="exists already")
    assert (tmp_path / "o.h5").read_bytes() == other
    assert repair_file(path, output=tmp_path / "o.h5", overwrite=True).kept == 7
    require_good(tmp_path / "o.h5")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["o.h5", "s.h5"]


def test_other_documents_of_the_same_tokens_are_not_taken_for_the_repaired_ones(tmp_path):
    documents = documents_of([CHUNK] * 4)
    path = write(tmp_path / "s.h5", documents)
    flip_chunk(path, 3)
    write(tmp_path / "s.repaired.h5", [np.concatenate(documents[:3])])
    is_refused(ConvertError, lambda: repair_file(path), match="exists already")


@pytest.mark.parametrize("cut", [100, 5000, 1_050_000, -1])
def test_a_truncated_stream_is_refused_as_a_truncated_batch_file_is(cut, tmp_path):
    path = write(tmp_path / "s.h5", documents_of([500] * 9))
    os.truncate(path, cut % path.stat().st_size)
    before = files_in(tmp_path)
    for use in (repair_file, content):
        is_refused(FormatError, lambda use=use: use(path), match=r"s\.h5")
    assert run_zb("verify", path).exit_code in (1, 4)
    assert files_in(tmp_path) == before


# --- the places of the documents -------------------------------------------------------------------------------
def damage_offsets(path):
    with h5py.File(path, "r+") as h5:
        h5[DOC_OFFSETS][1] = 3


@pytest.mark.parametrize(("documents", "boundary", "more"), [
    (documents_of([20, 30, 70]), -1, False),
    (documents_of([20, 30, 70]), 7, False),  # it is nowhere
    ([np.array([1, 7, 2, 7]), np.array([5] * 60)], 7, False),  # it is elsewhere
    (documents_of([20, 30, 70], 7), 7, True),
])  # fmt: skip
def test_places_of_documents_are_never_guessed(documents, boundary, more, tmp_path):
    path = write(tmp_path / "s.h5", documents, boundary_token_id=boundary)
    damage_offsets(path)
    assert "offsets of its documents" in str(verify_store(path)[0].problem)
    if more:
        flip_chunk(path, 1)
    before = files_in(tmp_path)
    is_refused(IncompleteError, lambda: repair_file(path), match="the offsets of its documents are damaged")
    assert run_zb("repair", path).exit_code == 4
    assert files_in(tmp_path) == before


# --- killed writers --------------------------------------------------------------------------------------------
def killed(path, documents):
    """Return the partial of a writer that was killed when it had said that it has so many documents."""
    with running(start_program(STREAM_WRITER, path)) as process:
        for _ in range(documents):
            process.stdout.readline()
        with pytest.raises(UnavailableError, match="another process is writing it"):
            repair_file(path.with_name(path.name + ".partial"))
        process.kill()
        written = sum(1 for _ in process.stdout) + documents
    return path.with_name(path.name + ".partial"), written


def expected_of(numbers):
    return [(np.arange(number * 100, number * 100 + 100) % 60000).tolist() for number in numbers]


@pytest.mark.parametrize("documents", [30, 400])
def test_the_whole_documents_of_a_killed_writer_are_published(documents, tmp_path):
    path = tmp_path / "s.h5"
    partial, written = killed(path, documents)
    before = partial.read_bytes()
    findings = {finding.name: finding for finding in diagnose(partial)}
    assert "no plain extents" in findings["layout"].text
    report = repair_file(partial)
    committed = report.kept_tokens + report.dropped_tokens
    assert (report.state, report.output, report.dropped) == ("repaired", str(path), [])
    assert committed >= written * 100 // 512 * 512
    assert (report.kept, report.dropped_tokens) == divmod(committed, 100)
    if report.dropped_tokens:
        told = f", dropped none but an unfinished one: {report.dropped_tokens} tokens of {committed:,}"
        assert report.line().endswith(told)
    require_good(path)
    assert content(path) == expected_of(range(report.kept))
    assert partial.read_bytes() == before
    after = files_in(tmp_path)
    repair_file(partial)
    assert files_in(tmp_path) == after
    assert sorted(after) == [path.name, partial.name]


def write_with_ids(path, number):
    with HDF5ShardWriter(path, chunk_tokens=CHUNK) as writer:
        for name in ("old", "older"):
            writer.write_document(np.full(300, number), id=f"{name} {number}")


def test_a_stream_that_is_replaced_leaves_nothing_beside_the_new_one(tmp_path):
    path = tmp_path / "s.h5"
    partial, _ = killed(path, 30)
    write_with_ids(tmp_path / "old.h5", 1)
    os.rename(tmp_path / "old.h5", path)
    os.rename(tmp_path / "old.h5.documents", tmp_path / "s.h5.documents")
    (tmp_path / "s.h5.crc32").write_bytes(b"old")
    repair_file(partial, overwrite=True)
    require_good(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["s.h5", "s.h5.partial"]


@pytest.mark.parametrize("renames", [1, 2])
def test_a_repair_that_is_killed_between_two_renames_is_ended_by_the_next(renames, tmp_path, monkeypatch):
    path = tmp_path / "s.h5"
    write_with_ids(path, 1)
    write_with_ids(tmp_path / "new.h5", 2)
    os.rename(tmp_path / "new.h5", tmp_path / "s.h5.partial")
    os.rename(tmp_path / "new.h5.documents", tmp_path / "s.h5.partial.documents")
    with monkeypatch.context() as patch:
        calls, replace = [], os.replace

        def stop(*names):
            calls.extend([] if ".repaired" in str(names[1]) else [names])
            if len(calls) == renames:
                raise KeyboardInterrupt
            replace(*names)

        patch.setattr(os, "replace", stop)
        is_refused(KeyboardInterrupt, lambda: repair_file(tmp_path / "s.h5.partial", overwrite=True))
    repair_file(tmp_path / "s.h5.partial", overwrite=True)
    require_good(path)
    with open_corpus(path) as store:
        assert store.documents[0].id == "old 2"


def test_a_repair_that_cannot_write_leaves_no_table_open(tmp_path):
    write_with_ids(tmp_path / "s.h5", 1)
    flip_chunk(tmp_path / "s.h5", 0)
    before = open_files()
    with pytest.raises(FileNotFoundError) as caught:
        repair_file(tmp_path / "s.h5", output=tmp_path / "none" / "s.h5")
    assert caught.value  # whose traceback holds what was open
    assert open_files() == before


def test_an_unfinished_stream_is_kept_up_to_its_first_bad_chunk(tmp_path):
    partial, _ = killed(tmp_path / "s.h5", 60)
    flip_stored(partial, np.arange(2 * 512, 3 * 512).astype("<u2"), 9)
    report = repair_file(partial)
    assert report.kept == 10  # 1,024 good tokens
    assert report.dropped[0] == 10
    assert "chunk 2 is bad" in report.reason
    assert content(tmp_path / "s.h5") == expected_of(range(10))
    require_good(tmp_path / "s.h5")


def test_an_unfinished_stream_without_a_whole_document_is_told(tmp_path):

    def write():
        writer = HDF5ShardWriter(tmp_path / "s.h5", chunk_tokens=64)
        writer.write_documents(np.arange(1000), [1000])
        return writer

    killed_after(write)
    with pytest.raises(IncompleteError, match="no document can be saved: its writer has not finished"):
        repair_file(tmp_path / "s.h5.partial")
    assert [file.name for file in tmp_path.iterdir()] == ["s.h5.partial"]


# --- stores ----------------------------------------------------------------------------------------------------
@pytest.fixture
def stream_store(tmp_path):
    """A store of three streams of five documents each, of which the last is for validation."""
    folder = tmp_path / "store"
    folder.mkdir()
    documents = [documents_of([70] * 5) for _ in range(3)]
    paths = [write(folder / f"shard-{number:05}.h5", found) for number, found in enumerate(documents)]
    index_files(paths, splits={"shard-00002.h5": "val"}, source={"format": "test"}).save(folder)
    return folder, documents


def test_a_store_of_streams_is_repaired(stream_store):
    folder, documents = stream_store
    flip_chunk(folder / "shard-00001.h5", 2)
    before = files_in(folder)
    [_, found, _] = json.loads(run_zb("repair", folder, "--dry-run", "--json").stdout)["files"]
    assert (found["unit"], found["kept"], found["dropped"]) == ("document", 3, [1, 2])
    assert (found["kept_tokens"], found["dropped_tokens"]) == (210, 140)
    assert files_in(folder) == before
    reports = repair(folder)
    assert [(report.state, report.kept, report.dropped) for report in reports] == [
        ("whole", 5, []), ("repaired", 3, [1, 2]), ("whole", 5, []),
    ]  # fmt: skip
    require_good(folder)
    index = ShardIndex.load(folder)
    assert [entry.path for entry in index.shards] == ["shard-00000.h5", "shard-00001.repaired.h5", "shard-00002.h5"]
    assert [entry.split for entry in index.shards] == ["train", "train", "val"]
    assert (index.meta.document_count, index.token_count, index.source) == (13, 13 * 70, {"format": "test"})
    expected = [*documents[0], *(documents[1][number] for number in (0, 3, 4)), *documents[2]]
    assert content(folder) == [document.tolist() for document in expected]
    after = files_in(folder)
    assert {**before, INDEX_NAME: after[INDEX_NAME]}.items() <= after.items()
    assert {report.state for report in repair(folder)} == {"whole"}
    assert files_in(folder) == after
    assert rebuild_index(folder, force=True) == index


def test_a_repair_that_was_stopped_before_the_index_goes_on(stream_store, monkeypatch):
    folder, _ = stream_store
    flip_chunk(folder / "shard-00000.h5", 0)
    index = (folder / INDEX_NAME).read_bytes()
    with stopped_before_the_index(monkeypatch):
        repair(folder)
    assert (folder / INDEX_NAME).read_bytes() == index
    made = (folder / "shard-00000.repaired.h5").stat()
    repair(folder)
    assert (folder / "shard-00000.repaired.h5").stat() == made
    require_good(folder)


@pytest.mark.parametrize(("kind", "damage"), [
    *product(("batches", "streams"), ("missing", "no HDF5 file")), ("batches", "cut short"), ("streams", "documents"),
])  # fmt: skip
def test_a_shard_that_cannot_be_saved_is_left_out_only_with_force(kind, damage, stream_store, tmp_path, write_store):
    folder, documents = stream_store
    data, lost = random_tokens(9, 4, 1024, "uint16"), "5 documents"
    if kind == "batches":
        folder, lost = write_store(tmp_path / "batches", data, (3, 6)), "3 batches"
    shard = folder / "shard-00001.h5"
    if damage == "missing":
        shard.unlink()
    elif damage == "cut short":
        os.truncate(shard, 5000)
    elif damage == "documents":
        damage_offsets(shard)
    else:
        shard.write_bytes(b"x" * 5000)
    before = files_in(folder)
    result = run_zb("repair", folder)
    assert result.exit_code in (1, 4)
    assert f"--force to leave its {lost} out" in result.stderr
    assert "lost" in run_zb("repair", folder, "--dry-run", "--json").stdout
    assert files_in(folder) == before
    assert run_zb("repair", folder, "--force").exit_code == 0
    require_good(folder)
    if kind == "batches":
        np.testing.assert_array_equal(batches_of(folder), np.delete(data, slice(3, 6), axis=0))
    else:
        assert content(folder) == [document.tolist() for document in [*documents[0], *documents[2]]]
        assert ShardIndex.load(folder).meta.document_count == 10


def test_an_index_that_counts_other_documents_is_told(stream_store):
    folder, _ = stream_store
    write(folder / "other.h5", [np.concatenate(stream_store[1][0])])
    os.replace(folder / "other.h5", folder / "shard-00000.h5")
    [problem, *rest] = [report.problem for report in verify_store(folder)]
    assert "has document_count 5, the file has 1" in str(problem)
    assert rest == [None, None]


def test_an_unfinished_stream_and_batches_have_no_place_in_an_index_of_streams(tmp_path, tokens, write_file):
    paths = [write(tmp_path / "a.h5", documents_of([9])), write_file(tmp_path / "b.h5", tokens).path]
    is_refused(FormatError, lambda: index_files(paths), match=r"b\.h5: expected a stream of .*, found \(\d")
    for path in paths:
        path.unlink()
    partial, _ = killed(tmp_path / "shard-00000.h5", 20)
    with pytest.raises(IncompleteError, match="repair it") as caught:
        index_files([partial])
    assert (caught.value.remedy, caught.value.at) == (Remedy.REPAIR, str(partial))
    os.unlink(partial)
    write(tmp_path / "shard-00000.h5", documents_of([9]))
    write(tmp_path / "shard-00001.h5", documents_of([9]), vocab_size=60_001)
    with pytest.raises(FormatError, match=r"expected a stream of uint16.*found a stream.*vocabulary 60,001"):
        rebuild_index(tmp_path)
