"""Fields: what is aligned with the tokens is stored, read, checked and carried with them, in every format."""

import errno
import json
import os
import pickle
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
from commandline import run_zb
from contents import write_batches, write_stream
from contract import check_fields, is_refused
from damage import flip
from hypothesis import given
from hypothesis import strategies as st
from interrupted import failing

from examples import examples
from zb_hdf5 import (
    HDF5ShardWriter,
    Loader,
    ShardIndex,
    errors,
    open_reader,
    open_writer,
    rebuild_index,
    repair,
    verify_store,
)
from zb_hdf5.converters.arguments import convert
from zb_hdf5.converters.store_source import StoreSource
from zb_hdf5.field import Field, parse_fields
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.formats.h5_writer import HDF5BatchWriter
from zb_hdf5.spec import NO_BOUNDARY, StoreMeta
from zb_hdf5.store.unchecked_file import open_chunks, open_damaged

SHAPE = (4, 50)
NUM_BATCHES = 23
PAIR = np.dtype([("left", "u1"), ("right", "<f4")])
FIELDS = {"loss_mask": "u1", "concept": "<u2", "vector": ("<f4", (3,)), "pair": PAIR, "seen": "?"}
RNG = np.random.default_rng(5)
TOKENS = RNG.integers(0, 60000, (NUM_BATCHES, *SHAPE)).astype("u4")


def values_of(shape, rng=RNG):
    pair = np.zeros(shape, PAIR)
    pair["left"] = rng.integers(0, 256, shape)
    pair["right"] = rng.random(shape)
    return {
        "loss_mask": rng.integers(0, 2, shape).astype("u1"),
        "concept": rng.integers(0, 2**16, shape).astype("<u2"),
        "vector": rng.random((*shape, 3)).astype("<f4"),
        "pair": pair,
        "seen": rng.integers(0, 2, shape).astype(bool),
    }


VALUES = values_of(TOKENS.shape)


def write(path, *, groups=(7, 1, 15), **options):
    """Write the tokens and their values in groups; return what `finish` says."""
    with open_writer(path, batch_size=SHAPE[0], seq_len=SHAPE[1], fields=FIELDS, **options) as writer:
        start = 0
        for count in groups:
            writer.write(*part(start, start + count))
            start += count
        return writer.finish()


def part(start, stop):
    """Return some batches, and the values of their fields."""
    return TOKENS[start:stop], {name: values[start:stop] for name, values in VALUES.items()}


def stored(reader, name):
    """Return all values of a field, in the shape in which they were written."""
    field = reader.field(name)
    assert field.meta.field is not None
    return np.array([np.array(batch) for batch in field]).reshape(-1, *SHAPE, *field.meta.field.shape)


def check(path, tokens=TOKENS, values=VALUES, **options):
    with open_reader(path, **options) as reader:
        assert [field.name for field in reader.meta.fields] == sorted(FIELDS)
        np.testing.assert_array_equal(np.array([np.array(batch) for batch in reader]), tokens)
        for name, expected in values.items():
            np.testing.assert_array_equal(stored(reader, name), expected)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "x.h5").path


@pytest.mark.parametrize("access", ["auto", "mmap", "pread", "h5py"])
@pytest.mark.thin
def test_values_come_back_by_every_access(path, access):
    check(path, access=access)
    with h5py.File(path) as h5:
        for name, values in VALUES.items():
            np.testing.assert_array_equal(h5["fields"][name][:], values)
    with open_reader(path, access=access) as reader:
        check_fields(reader, VALUES)


def test_a_batch_file_holds_tokens_only(tmp_path):
    with pytest.raises(errors.ArgumentError, match="batch files hold tokens only: write fields to an HDF5 file"):
        write(tmp_path / "x.batch")
    assert not list(tmp_path.iterdir())


def test_a_structured_array_names_its_fields(tmp_path):
    dtype = np.dtype([("mask", "u1"), ("weight", "<f4", (2,))])
    values = np.zeros(TOKENS.shape, dtype)
    values["mask"] = VALUES["loss_mask"]
    values["weight"] = VALUES["vector"][..., :2]
    write_batches(tmp_path / "x.h5", TOKENS, values, fields=dtype)
    with open_reader(tmp_path / "x.h5") as reader:
        assert reader.meta.fields == (Field("mask", np.dtype("u1")), Field("weight", np.dtype("<f4"), (2,)))
        np.testing.assert_array_equal(stored(reader, "weight"), values["weight"])


@examples(30)
@given(
    dtype=st.sampled_from(["u1", "<i2", "<u4", "<i8", "<f2", "<f8", "<c8", "?", "S3"]),
    shape=st.lists(st.integers(1, 4), max_size=2).map(tuple),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 40)),
    data=st.data(),
)
def test_any_dtype_and_shape_comes_back(tmp_path_factory, dtype, shape, sizes, data):
    path = tmp_path_factory.mktemp("fields") / "x.h5"
    batch_size, seq_len, count = sizes
    whole = (count, batch_size, seq_len, *shape)
    raw = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 100, whole)
    values = raw.astype(dtype)
    write_batches(path, np.zeros(whole[:3], "u4"), {"f": values}, fields={"f": (dtype, shape)})
    with open_reader(path) as reader:
        field = reader.field("f")
        assert field.meta.field == Field("f", np.dtype(dtype), shape)
        np.testing.assert_array_equal(np.array([np.array(b) for b in field]).reshape(whole), values)
        assert field.corpus.digests.compare()[1] == ["crc32", "sha256"]


def test_a_field_reader_is_pickled_and_closed_with_its_tokens(path):
    with open_reader(path) as reader:
        copy = pickle.loads(pickle.dumps(reader))
        field = reader.field("concept")
        assert reader.field("concept") is field
        is_refused(errors.ArgumentError, lambda: reader.field("nothing"), match=r"concept, loss_mask.*found 'nothing'")
    np.testing.assert_array_equal(stored(copy, "concept"), VALUES["concept"])
    is_refused(ValueError, lambda: field.read_batch(0), match="closed")
    copy.close()


@pytest.mark.parametrize(("fields", "match"), [
    ({"tokens": "u1"}, "none of"), ({"a b": "u1"}, "letters, digits"), ({"x": "O"}, "fixed size"),
    ({"x": "U3"}, "fixed size"), ({"x": ">u2"}, "fixed size"), ({"x": "nonsense"}, "expected a dtype"),
    (np.dtype("u1"), "structured dtype"), (["loss_mask"], "'loss_mask' without a dtype"),
    ([Field("a", np.dtype("u1"))] * 2, "each name once"), ({"x": [("a", "i4"), ("a", "i4")]}, "expected a dtype"),
])  # fmt: skip
def test_fields_that_cannot_be_stored_are_refused(fields, match, tmp_path):
    with pytest.raises(errors.ArgumentError, match=match):
        open_writer(tmp_path / "x.h5", batch_size=1, seq_len=4, fields=fields)
    assert not list(tmp_path.iterdir())
    assert [field.name for field in parse_fields({"b": "u1", "a": "u2"})] == ["a", "b"]


@pytest.mark.parametrize("dtype", ["uint8", np.uint8, np.dtype("u1"), "B"], ids=repr)
def test_a_dtype_is_described_as_numpy_takes_it(dtype, tmp_path):
    field = Field("mask", dtype)
    assert field == Field("mask", np.dtype("u1"))
    assert hash(field) == hash(Field("mask", np.dtype("u1")))
    assert (field.padding.dtype, pickle.loads(pickle.dumps(field))) == (np.uint8, field)
    write_batches(tmp_path / "x.h5", TOKENS[:1], {"mask": np.ones((1, *SHAPE), "u1")}, fields=[field])
    with open_reader(tmp_path / "x.h5") as reader:
        assert reader.meta.fields == (field,)


def test_a_shape_is_a_tuple_and_the_shape_of_a_dtype_is_its_end():
    expected = Field("f", np.dtype("f4"), (2, 8))
    assert (
        Field("f", "f4", [2, np.int64(8)]) == Field("f", ("f4", (8,)), (2,)) == Field("f", ("f4", (2, 8))) == expected
    )
    assert type(Field("f", "f4", [np.int64(8)]).shape[0]) is int


@pytest.mark.parametrize(("given", "match"), [
    (("f", "nonsense"), "^field f: expected a dtype, found 'nonsense'"), (("f", "O"), "^field f: .*found object"),
    (("f", 5), "^field f: expected a dtype, found 5"), ((5, "u1"), "for a field, .*found 5"),
    (("f", "u1", 8), r"^field f: expected a shape such as \(8,\), found 8"),
    (("f", "u1", (2.5,)), r"^field f: expected a shape .*found \(2.5,\)"),
    (("f", "f4", (), "token", None, True, "bfloat16"), "^field f: bfloat16 is stored as uint16, found float32"),
])  # fmt: skip
def test_a_field_that_is_not_possible_is_refused_where_it_is_made(given, match):
    is_refused(errors.ArgumentError, lambda: Field(*given), match=match)


@pytest.mark.parametrize(("dtype", "fields", "error", "match"), [
    ("u1", None, errors.ArgumentError, r"expected the fields \['mask'\], found none"),
    ("u1", {"other": np.zeros((1, *SHAPE), "u1")}, errors.ArgumentError, r"found \['other'\]"),
    ("u1", {"mask": np.zeros((2, *SHAPE), "u1")}, errors.ArgumentError, "expected shape"),
    ("u1", {"mask": np.full((1, *SHAPE), 256)}, errors.ConvertError, "256 does not fit uint8"),
    ("u1", {"mask": np.zeros((1, *SHAPE), "f4")}, errors.ArgumentError, "expected uint8, found float32"),
    ("S4", {"mask": np.full((1, *SHAPE), b"abcdef")}, errors.ConvertError, "does not fit"),
    ("f4", {"mask": np.full((1, *SHAPE), 1e39)}, errors.ConvertError, "does not fit float32"),
    ([("a", "i1")], {"mask": np.full((1, *SHAPE), 300, [("a", "i8")])}, errors.ArgumentError, "expected exactly"),
])  # fmt: skip
def test_values_of_another_kind_are_refused_and_nothing_is_written(dtype, fields, error, match, tmp_path):
    path = tmp_path / "x.h5"
    values = np.ones((1, *SHAPE), int if dtype == "u1" else dtype)
    with open_writer(path, batch_size=SHAPE[0], seq_len=SHAPE[1], fields={"mask": dtype}) as writer:
        is_refused(error, lambda: writer.write(TOKENS[:1], fields), match=match)
        assert writer.num_batches == 0
        writer.write(TOKENS[:1], {"mask": values})
    with open_reader(path) as reader:
        assert reader.num_batches == 1
        np.testing.assert_array_equal(reader.field("mask").read_batch(0), values[0])


def test_infinity_and_nan_are_values(tmp_path):
    values = np.array([np.inf, -np.inf, np.nan, 1.0])[np.arange(SHAPE[0] * SHAPE[1]) % 4].reshape(1, *SHAPE)
    write_batches(tmp_path / "y.h5", TOKENS[:1], {"x": values}, fields={"x": "f4"})
    with open_reader(tmp_path / "y.h5") as reader:
        np.testing.assert_array_equal(reader.field("x").read_batch(0), values[0])


def test_a_flipped_bit_in_a_value_is_found(path):
    with open_reader(path) as reader:
        field = reader.field("concept")
        assert field.corpus.extents is not None
        place = field.path
        offset = field.corpus.extents.offset(11)
    flip(Path(place), offset, 4)
    [report] = verify_store(path)
    assert isinstance(report.problem, errors.ChecksumError)
    assert "batch 11 is the first bad one" in str(report.problem)
    with open_reader(path, verify="batch") as reader:
        reader.read_batch(11)
        is_refused(errors.ChecksumError, lambda: reader.field("concept").read_batch(11), match="batch 11")
    [outcome] = repair(path)
    kept = [n for n in range(NUM_BATCHES) if n != 11]
    check(outcome.output, TOKENS[kept], {name: values[kept] for name, values in VALUES.items()})


@pytest.fixture
def field_store(tmp_path):
    """A store of three shards with fields, in HDF5."""
    write(tmp_path / "lone.h5")
    convert(StoreSource(tmp_path / "lone.h5", "hdf5"), "hdf5", tmp_path / "store", shards=3)
    return tmp_path / "store"


def test_a_store_of_shards_has_the_fields_of_its_shards_also_with_a_new_index(field_store):
    for access in ("auto", "mmap", "pread", "h5py"):
        check(field_store, access=access)
    check(field_store, verify="batch")
    index = ShardIndex.load(field_store)
    assert [field.name for field in index.meta.fields] == sorted(FIELDS)
    assert ShardIndex.from_json(index.to_json(), field_store).to_json() == index.to_json()
    assert {f"field {name}" for name in FIELDS} <= {*verify_store(field_store)[0].checks}
    said = run_zb("verify", field_store, code=0).stdout
    assert all(said.count(f"field {name}") == 1 for name in FIELDS)
    (field_store / "shards.json").unlink()
    made = rebuild_index(field_store)
    assert (made.shards, made.meta.fields) == (index.shards, index.meta.fields)
    check(field_store)


def test_fields_survive_the_way_to_compressed_live_or_recut_files_and_back(field_store, tmp_path):
    convert(StoreSource(field_store, "hdf5"), "hdf5", tmp_path / "cut", shards=4)
    report = convert(StoreSource(tmp_path / "cut", "hdf5"), "hdf5", tmp_path / "live", shards=2, live=True)
    assert report.left_behind == ""
    check(tmp_path / "cut")
    check(tmp_path / "live")
    there = tmp_path / "there"
    back = tmp_path / "back"
    convert(StoreSource(field_store, "hdf5"), "hdf5", there, codec="gzip:6")
    check(there, verify="batch")
    assert all(report.problem is None for report in verify_store(there))
    convert(StoreSource(there, "hdf5"), "hdf5", back)
    check(back)
    before, after = ({p.name: p.read_bytes() for p in folder.glob("shard-*")} for folder in (field_store, back))
    assert before == after
    assert ShardIndex.load(back).shards == ShardIndex.load(field_store).shards


def test_damage_of_a_field_is_never_copied(field_store, tmp_path):
    with open_reader(field_store) as reader:
        field = ShardIndex.load(field_store).of_field("vector")
        assert field.meta.field == reader.field("vector").meta.field
    shard = field_store / field.shards[1].path
    flip(shard, field.shards[1].columns["fields/vector"][0].base + 5)
    is_refused(errors.ChecksumError, lambda: convert(StoreSource(field_store, "hdf5"), "hdf5", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
@pytest.mark.parametrize("commit_bytes", [0, 3 * TOKENS[0].nbytes, 1 << 30])
def test_batches_whose_write_failed_can_be_written_again(call, commit_bytes, tmp_path, monkeypatch):
    """Neither their digests nor their crc32 rows count twice."""
    meta = StoreMeta(*SHAPE, TOKENS.dtype, fields=parse_fields(FIELDS))
    with HDF5BatchWriter(tmp_path / "x.h5", meta, durable=True, commit_bytes=commit_bytes) as writer:
        for start, stop in ((0, 2), (2, 5), (5, NUM_BATCHES)):
            with monkeypatch.context() as patch, suppress(OSError):
                patch.setattr(os, call, failing(errno.EIO))
                writer.write(*part(start, stop))
            if writer.num_batches == start:
                writer.write(*part(start, stop))
    check(tmp_path / "x.h5")
    assert [report.problem for report in verify_store(tmp_path / "x.h5")] == [None]


def test_a_flush_that_failed_ends_the_writer(tmp_path, monkeypatch):
    """The kernel may have dropped what was to be flushed, and would not fail again."""
    meta = StoreMeta(*SHAPE, TOKENS.dtype, fields=parse_fields(FIELDS))
    writer = HDF5BatchWriter(tmp_path / "x.h5", meta, durable=True)
    writer.write(*part(0, 2))
    monkeypatch.setattr(os, "fdatasync", failing(errno.EIO))
    is_refused(OSError, lambda: writer.write(*part(2, 5)), match="Input/output error")
    is_refused(errors.ConvertError, lambda: writer.write(*part(2, 5)), match="the 2 batches that were committed")
    writer.abort()


def test_a_live_store_shows_fields_as_they_are_committed(tmp_path):
    size = {"batch_size": SHAPE[0], "seq_len": SHAPE[1]}
    with open_writer(tmp_path / "live", **size, fields=FIELDS, live=True, shard_batches=5) as writer:
        writer.write(*part(0, 3))
        with open_reader(tmp_path / "live") as reader:
            assert reader.num_batches == 3
            np.testing.assert_array_equal(stored(reader, "concept"), VALUES["concept"][:3])
            writer.write(*part(3, 12))
            assert reader.refresh() == 12
            np.testing.assert_array_equal(stored(reader, "concept"), VALUES["concept"][:12])
            np.testing.assert_array_equal(stored(reader, "vector"), VALUES["vector"][:12])
    check(tmp_path / "live", *part(0, 12))


def flat_values(reader, name):
    return reader.field(name).tokens[:]


def test_a_stream_keeps_fields_of_each_token_and_repair_keeps_them(tmp_path):
    lengths = [7, 0, 40, 3, 90, 21]
    tokens = RNG.integers(0, 500, sum(lengths))
    values = values_of(tokens.shape)
    path = tmp_path / "s.h5"
    write_stream(path, tokens, lengths, values, chunk_tokens=16, fields=FIELDS)
    with open_chunks(path) as reader:
        for name, expected in values.items():
            np.testing.assert_array_equal(flat_values(reader, name).reshape(expected.shape), expected)
        place = reader.field("concept").extents.offset(4)
    assert verify_store(path)[0].problem is None
    flip(path, place)
    assert isinstance(verify_store(path)[0].problem, errors.ChecksumError)
    [outcome] = repair(path)
    ends = np.cumsum(lengths)
    kept = np.concatenate([np.arange(e - n, e) for n, e in zip(lengths, ends, strict=True) if e <= 64 or e - n >= 80])
    assert outcome.dropped == [4]
    with open_chunks(outcome.output) as reader:
        np.testing.assert_array_equal(flat_values(reader, "concept"), values["concept"][kept])


def test_the_boundary_token_of_a_document_has_zeros(tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5", chunk_tokens=8, boundary_token_id=9, fields={"mask": "u1"}) as writer:
        writer.write_document([1, 2, 3], {"mask": [1, 0, 1]})
        writer.write_document([4], {"mask": [1]})
    with open_chunks(tmp_path / "s.h5") as reader:
        assert flat_values(reader, "mask").tolist() == [1, 0, 1, 0, 1, 0]


def test_the_command_line_carries_them_and_npy_says_which_it_leaves_behind(field_store, tmp_path):
    assert run_zb("convert", "hdf5-to-hdf5", field_store, tmp_path / "again", "--workers", 1).exit_code == 0
    check(tmp_path / "again")
    assert json.loads(run_zb("verify", tmp_path / "again", "--json").stdout)["ok"]
    refused = run_zb("convert", "hdf5-to-npy", field_store, tmp_path / "one.npy")
    assert (refused.exit_code, "pass --tokens-only to leave them behind" in refused.stderr) == (1, True)
    assert not (tmp_path / "one.npy").exists()
    for out, command in (("one.npy", ("--json",)), ("folder", ("--json",)), ("lines.npy", ())):
        done = run_zb("convert", "hdf5-to-npy", field_store, tmp_path / out, "--workers", 1, "--tokens-only", *command)
        assert done.exit_code == 0, done.output
        lost = "leaves behind the fields concept, loss_mask, pair, seen, vector"
        assert lost == json.loads(done.stdout)["left_behind"] if command else lost in done.output
        parts = [tmp_path / out] if out.endswith(".npy") else sorted((tmp_path / out).glob("*.npy"))
        found = np.concatenate([np.load(part) for part in parts])
        np.testing.assert_array_equal(found.reshape(TOKENS.shape), TOKENS)
    assert not list(tmp_path.glob("**/*.npy.fields.h5"))


def test_a_full_disk_in_the_middle_of_fields_leaves_nothing_half_written(mount_disk):
    disk = mount_disk(6 << 10)
    path = disk / "x.h5"
    writer = open_writer(path, batch_size=32, seq_len=256, dtype="uint16", fields={"vector": ("<f4", (32,))})
    values = np.arange(32 * 256 * 32, dtype="<f4").reshape(1, 32, 256, 32)

    def fill():
        for number in range(20):
            writer.write(np.full((1, 32, 256), number), {"vector": values + number})

    with pytest.raises(OSError, match="No space left") as caught:
        fill()
    assert str(caught.value.filename).startswith(str(path))
    kept = writer.num_batches
    assert 0 < kept < 20
    with open_damaged(partial_path(path), path).corpus.batches() as reader:
        assert reader.num_batches == kept
        for number in range(kept):
            assert (reader.read_batch(number) == number).all()
            found = reader.field("vector").read_batch(number).reshape(values.shape[1:])
            np.testing.assert_array_equal(found, values[0] + number)
    writer.abort()
    assert not list(disk.iterdir())


def test_a_field_whose_digest_is_none_is_refused(tmp_path):
    write(tmp_path / "x.h5", groups=(5,))
    with h5py.File(tmp_path / "x.h5", "a") as h5:
        h5["fields/concept"].attrs.modify("sha256", np.bytes_(b"z" * 64))
    with open_reader(tmp_path / "x.h5") as reader:
        reader.field("vector").read_batch(0)
        told = r"x\.h5: fields/concept: expected 64 hexadecimal digits in sha256"
        is_refused(errors.FormatError, lambda: reader.field("concept"), match=told)


def test_a_structured_array_may_hold_the_tokens_too(tmp_path):
    pair = np.dtype([("token", np.uint32), ("concept", np.uint16)])
    array = np.array([(151, 1), (213, 6), (726, 3), (5, 9)] * 8, dtype=pair)
    with HDF5ShardWriter(tmp_path / "s.h5", fields=pair, boundary_token_id=NO_BOUNDARY) as writer:
        writer.write_document(array[:20])
        writer.write_documents(array[20:], [12])
    with Loader(tmp_path / "s.h5", batch_size=2, seq_len=16, shuffle="sequential", fields=["concept"]) as loader:
        [batch] = loader
    np.testing.assert_array_equal(batch["tokens"].numpy().reshape(-1), array["token"])
    np.testing.assert_array_equal(batch["concept"].numpy().reshape(-1), array["concept"])
    write_batches(tmp_path / "b.h5", array.reshape(1, 2, 16), fields=pair)
    with open_reader(tmp_path / "b.h5") as reader:
        np.testing.assert_array_equal(reader.read_batch(0).reshape(-1), array["token"])
        np.testing.assert_array_equal(reader.field("concept").read_batch(0).reshape(-1), array["concept"])
