"""The six conversions: nothing lost, nothing invented, nothing left behind."""

import contextlib
import io
import itertools
import os
import re
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from array_tokens import npy_source
from commandline import one_error, report_of, run
from contents import batches_of, files_in, label_batches, write_batches
from contract import random_tokens
from damage import flip_token
from descriptors import open_files
from hypothesis import given
from hypothesis import strategies as st

import zb_hdf5.converters.batch_source
import zb_hdf5.files.publishing
from examples import examples
from zb_hdf5 import ConvertError, IncompleteError, ShardIndex, open_reader, open_writer
from zb_hdf5 import write_batch_file as write_native
from zb_hdf5.converters.arguments import convert as run_pipe
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.converters.store_source import StoreSource
from zb_hdf5.loaders.order import write_order
from zb_hdf5.spec import INDEX_NAME

SEQ_LEN = 8
SHAPE = ("--batch-size", 4, "--seq-len", SEQ_LEN)
SUFFIXES = {"npy": ".npy", "hdf5": ".h5", "batch": ".batch"}
FROM_NPY = ("npy-to-hdf5", "npy-to-batch")
INTEGERS = ["<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", ">i2", ">i4", ">i8", ">u2", ">u4", ">u8"]


def succeed(*arguments):
    """Return the report."""
    report = report_of(convert, *arguments)
    dropped = sum(report["tokens_dropped"].values())
    assert report["tokens_in"] + report["tokens_padded"] == report["tokens_stored"] + dropped
    return report


def fail(code, *arguments):
    """Return the one error message."""
    return one_error(run(convert, *arguments), code)


def save(path, array):
    path.parent.mkdir(exist_ok=True)
    np.save(path, array)
    return path


def numbered(count, first=0, dtype="<u4", seq_len=SEQ_LEN):
    """Return records that tell themselves apart."""
    return np.arange(first * seq_len, (first + count) * seq_len, dtype=dtype).reshape(count, seq_len)


def records_of(path):
    """Return all stored records, in order."""
    if path.suffix == ".npy":
        return np.load(path)
    if path.is_dir() and not (path / INDEX_NAME).exists():
        return np.concatenate([np.load(file) for file in sorted(path.glob("*.npy"))])
    return np.concatenate(batches_of(path))


def sorted_rows(records):
    return np.sort(np.ascontiguousarray(records).view([("", records.dtype)] * records.shape[1]).ravel())


@pytest.fixture
def source(tmp_path):
    """50 records in one file: 12 batches of 4 and a rest of 2."""
    return save(tmp_path / "in" / "tokens.npy", numbered(50))


@pytest.fixture
def native(tmp_path):
    """A .batch file with everything its header can say: 23 batches, padded slots, seed, dropped records."""
    path = tmp_path / "in" / "source.batch"
    path.parent.mkdir(exist_ok=True)
    write_native(path, numbered(94), 4, SEQ_LEN, 77)
    return path


# --- order and conservation ------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", FROM_NPY)
@pytest.mark.parametrize(("remainder", "stored", "padded", "dropped"), [
    ("drop", 48, 0, {"remainder": 2 * SEQ_LEN}),
    ("pad", 52, 2 * SEQ_LEN, {}),
])  # fmt: skip
def test_the_report_says_where_every_token_went(command, remainder, stored, padded, dropped, source, tmp_path):
    report = succeed(command, source, tmp_path / "out", *SHAPE, "--remainder", remainder)
    assert report["tokens_in"] == 50 * SEQ_LEN
    assert report["tokens_stored"] == stored * SEQ_LEN
    assert report["tokens_padded"] == padded
    assert report["tokens_dropped"] == dropped
    assert len(records_of(tmp_path / "out")) == stored
    if not padded:
        balance = "400 in = 384 stored + 16 remainder dropped"
        assert balance in run(convert, command, source, tmp_path / "out", *SHAPE, "--force").stdout


@pytest.mark.parametrize("command", FROM_NPY)
@pytest.mark.parametrize(
    "options", [("--seed", 5), *(("--no-shuffle", *cut) for cut in ((), ("--shards", 1), ("--shards", 3)))]
)
def test_the_order_is_the_documented_shuffle_or_that_of_the_source(command, options, source, tmp_path):
    succeed(command, source, tmp_path / "out", *SHAPE, *options)
    order = write_order(50, 5).indices(np.arange(48)) if "--seed" in options else np.arange(48)
    np.testing.assert_array_equal(records_of(tmp_path / "out"), numbered(50)[order])


def test_the_same_seed_gives_the_same_bytes_and_those_of_write_batch_file(source, tmp_path):
    for command, name in (("npy-to-hdf5", "out"), ("npy-to-hdf5", "out.h5"), ("npy-to-batch", "out.batch")):
        found = []
        for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
            (tmp_path / name / folder).mkdir(parents=True)
            succeed(command, source, tmp_path / name / folder / name, *SHAPE, "--seed", seed)
            found.append(files_in(tmp_path / name / folder))
        assert found[0] == found[1] != found[2]
    write_native(tmp_path / "function.batch", numbered(50), 4, SEQ_LEN, 2)
    assert found[2]["out.batch"] == (tmp_path / "function.batch").read_bytes()


@pytest.mark.parametrize("backend", ["hdf5", "batch"])
@pytest.mark.parametrize("shards", [1, 2, 5, 12])
@pytest.mark.thin
def test_shards_hold_what_one_file_holds_in_the_same_order(backend, shards, source, tmp_path):
    one = succeed(f"npy-to-{backend}", source, tmp_path / f"one{SUFFIXES[backend]}", *SHAPE)
    many = succeed(f"npy-to-{backend}", source, tmp_path / "many", *SHAPE, "--shards", shards)
    np.testing.assert_array_equal(records_of(tmp_path / f"one{SUFFIXES[backend]}"), records_of(tmp_path / "many"))
    sizes = [shard.num_batches for shard in ShardIndex.load(tmp_path / "many").shards]
    assert len(sizes) == many["num_shards"] == shards
    assert sum(sizes) == one["num_batches"] == 12
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("size", "batches_per_shard"), [(1, 1), (131, 1), (259, 2), (643, 5), (12803, 100)])
def test_no_shard_is_larger_than_asked_for_or_one_batch(size, batches_per_shard, source, tmp_path):
    succeed("npy-to-hdf5", source, tmp_path / "out", *SHAPE, "--shard-size", size)
    sizes = [shard.num_batches for shard in ShardIndex.load(tmp_path / "out").shards]
    assert len(sizes) == -(-12 // batches_per_shard)
    assert max(sizes) <= batches_per_shard
    assert max(sizes) - min(sizes) <= 1


PAD = ("--remainder", "pad")


@pytest.mark.parametrize(("command", "target", "options", "code", "messages"), [
    ("npy-to-hdf5", "out", ("--shards", 13), 1, ["12 batches cannot fill 13 shards"]),
    ("npy-to-hdf5", "out", ("--shards", 2, "--shard-size", "1GiB"), 2, ["not both"]),
    ("npy-to-hdf5", "out.h5", ("--shards", 2), 1, ["name a folder"]),
    ("npy-to-hdf5", "out.h5", ("--shard-size", "1k"), 1, ["name a folder"]),
    ("npy-to-hdf5", "out.batch", (), 1, [".h5"]),
    ("npy-to-hdf5", "nowhere/out", (), 1, ["nowhere"]),
    ("npy-to-hdf5", "out", ("--batch-size", 51), 1, ["do not fill one batch"]),
    ("npy-to-hdf5", "out", ("--remainder", "error"), 1, ["50 records", "2 are left over"]),
    ("npy-to-batch", "out", ("--remainder", "error"), 1, ["50 records", "2 are left over"]),
    ("npy-to-hdf5", "out", (*PAD, "--dtype", "uint16", "--pad-id", 65536), 2, ["pad_id"]),
    ("npy-to-hdf5", "out", (*PAD, "--vocab-size", 400, "--pad-id", 400), 2, ["pad_id"]),
    ("npy-to-batch", "o.batch", ("--seed", 2**32), 1, ["32 bits"]),
])  # fmt: skip
def test_an_impossible_target_is_refused_and_leaves_nothing(command, target, options, code, messages, source, tmp_path):
    result = run(convert, command, source, tmp_path / target, *SHAPE, *options)
    assert (result.exit_code, result.stdout, result.stderr.count("Error: ")) == (code, "", 1)
    assert all(message in result.stderr for message in messages), result.stderr
    assert list(tmp_path.iterdir()) == [source.parent]


@pytest.mark.parametrize("shuffle", [(), ("--no-shuffle",)])
@pytest.mark.parametrize("pad_id", [0, 7])
def test_padding_keeps_every_record_and_comes_last(shuffle, pad_id, source, tmp_path):
    succeed("npy-to-batch", source, tmp_path / "o.batch", *SHAPE, "--remainder", "pad", "--pad-id", pad_id, *shuffle)
    stored = records_of(tmp_path / "o.batch")
    np.testing.assert_array_equal(sorted_rows(stored[:50]), sorted_rows(numbered(50)))
    assert (stored[50:] == pad_id).all()
    assert len(stored) == 52


# --- what a source may be --------------------------------------------------------------------------------------
@pytest.mark.parametrize("shuffle", [(), ("--no-shuffle",)])
def test_several_files_are_one_sequence_of_records(shuffle, tmp_path):
    save(tmp_path / "whole.npy", numbered(50))
    save(tmp_path / "parts" / "a.npy", numbered(13))
    save(tmp_path / "parts" / "b.npy", np.zeros((0, SEQ_LEN), "<u4"))
    save(tmp_path / "parts" / "c.npy", numbered(20, 13).astype(">i8").reshape(-1))
    save(tmp_path / "parts" / "d.npy", np.asfortranarray(numbered(17, 33, "<u2")))
    one = succeed("npy-to-hdf5", tmp_path / "whole.npy", tmp_path / "one.h5", *SHAPE, *shuffle)
    parts = sorted((tmp_path / "parts").iterdir())  # each is named: in a folder one of another dtype is not ids
    many = succeed("npy-to-hdf5", *parts, tmp_path / "many.h5", *SHAPE, *shuffle)
    assert one["sha256"] == many["sha256"]
    narrow_and_wide = (tmp_path / "parts" / "d.npy", tmp_path / "whole.npy")
    assert succeed("npy-to-hdf5", *narrow_and_wide, tmp_path / "o.h5", *SHAPE, *shuffle)["dtype"] == "uint32"


def test_files_come_as_given_and_those_of_a_folder_by_path_and_nothing_else(tmp_path):
    folder, first = tmp_path / "in", save(tmp_path / "z.npy", numbered(4, 300))
    folder.mkdir()
    assert "no .npy files" in fail(1, "npy-to-hdf5", folder, tmp_path / "o.h5", *SHAPE)
    for name, number in (("part-2.npy", 20), ("part-10.npy", 10), ("a.npy", 0)):  # as names sort, not numbers
        save(folder / name, numbered(4, number))
    (folder / "notes.txt").write_text("not tokens")
    (folder / "tokens.npz").write_bytes(b"not this either")
    save(folder / "deeper" / "b.npy", numbered(4, 99))
    succeed("npy-to-hdf5", first, folder, tmp_path / "o.h5", *SHAPE, "--no-shuffle")
    expected = np.vstack([numbered(4, number) for number in (300, 0, 99, 10, 20)])
    np.testing.assert_array_equal(records_of(tmp_path / "o.h5"), expected)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.thin
def test_every_integer_dtype_and_order_gives_the_same_tokens(dtype, order, tmp_path):
    limit = min(np.iinfo(dtype).max, 2**32 - 1)
    tokens = np.random.default_rng(1).integers(0, limit, (8, SEQ_LEN), dtype=np.uint64, endpoint=True)
    tokens[0, 0], tokens[7, 7] = 0, limit
    save(tmp_path / "in.npy", np.asarray(tokens, dtype=dtype, order=order))
    report = succeed("npy-to-hdf5", tmp_path / "in.npy", tmp_path / "o.h5", *SHAPE, "--no-shuffle")
    np.testing.assert_array_equal(records_of(tmp_path / "o.h5"), tokens)
    assert report["max_token"] == limit
    tokens[tokens > 65535] = 65535  # the largest id that fits
    if limit >= 65535:
        save(tmp_path / "in.npy", np.asarray(tokens, dtype=dtype, order=order))
        for options in (("--dtype", "uint16"), ("--vocab-size", 65536)):
            report = succeed("npy-to-hdf5", tmp_path / "in.npy", tmp_path / "o.h5", *SHAPE, *options, "--force")
            assert report["max_token"] == 65535


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_in_fortran_order_is_the_same_stream(shuffle, tmp_path):
    tokens = np.arange(8 * SEQ_LEN, dtype="<u4")
    data = io.BytesIO()
    np.lib.format.write_array_header_1_0(data, {"descr": "<u4", "fortran_order": True, "shape": tokens.shape})
    (tmp_path / "in.npy").write_bytes(data.getvalue() + tokens.tobytes())
    opened = npy_source([tmp_path / "in.npy"], batch_size=4, seq_len=SEQ_LEN, seed=3, shuffle=shuffle)
    found = np.empty((2, 4, SEQ_LEN), "<u4")
    opened.read_into(0, found)
    order = write_order(8, 3).indices(np.arange(8)) if shuffle else np.arange(8)
    np.testing.assert_array_equal(found.reshape(-1, SEQ_LEN), tokens.reshape(-1, SEQ_LEN)[order])


def test_more_files_than_may_be_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("zb_hdf5.files.paths.descriptor_room", lambda needed: 3)
    for number in range(10):
        save(tmp_path / "in" / f"{number}.npy", numbered(5, 5 * number))
    opened = npy_source([tmp_path / "in"], batch_size=2, seq_len=SEQ_LEN, seed=3)
    found = np.empty((opened.num_batches, 2, SEQ_LEN), "<u4")
    for number in range(opened.num_batches):
        opened.read_into(number, found[number : number + 1])
        assert sum(path.startswith(str(tmp_path)) for path in open_files().values()) <= 3
    expected = numbered(50)[write_order(50, 3).indices(np.arange(50))]
    np.testing.assert_array_equal(found.reshape(-1, SEQ_LEN), expected)


@examples(60)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=5),
    batch_size=st.integers(1, 5),
    seq_len=st.integers(1, 6),
    shuffle=st.booleans(),
    remainder=st.sampled_from(["drop", "pad"]),
    shards=st.integers(1, 3),
)
def test_tokens_are_conserved(lengths, batch_size, seq_len, shuffle, remainder, shards):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = 1
        runs = []  # of records, and of streams that follow each other
        for number, (length, is_stream) in enumerate(lengths):
            size = length if is_stream else length * seq_len
            tokens = np.arange(first, first + size, dtype="<u4")
            np.save(folder / f"{number}.npy", tokens if is_stream else tokens.reshape(-1, seq_len))
            if not (number and is_stream and lengths[number - 1][1]):
                runs.append([])
            runs[-1].append(tokens)
            first += size
        joined = [np.concatenate(run) for run in runs]
        whole = np.concatenate([run[: len(run) // seq_len * seq_len].reshape(-1, seq_len) for run in joined])
        batches = len(whole) // batch_size if remainder == "drop" else -(-len(whole) // batch_size)
        options = {"batch_size": batch_size, "seq_len": seq_len, "seed": 1, "shuffle": shuffle, "remainder": remainder}
        if batches < shards:
            with pytest.raises(ConvertError):
                run_pipe(npy_source([folder], **options), "hdf5", folder / "out", shards=shards)
            assert not (folder / "out").exists()
            return
        report = run_pipe(npy_source([folder], **options), "hdf5", folder / "out", shards=shards)
        stored = records_of(folder / "out")
    counts, kept = report.counts, batches * batch_size
    assert counts.tokens_in == first - 1
    assert counts.tokens_in + counts.padded == report.tokens_stored + sum(counts.dropped.values())
    assert counts.dropped.get("file tail", 0) == first - 1 - whole.size
    assert len(stored) == kept
    real = stored[: min(kept, len(whole))]
    assert set(map(tuple, real)) <= set(map(tuple, whole))
    assert len(set(map(tuple, real))) == len(real)
    assert not stored[len(real) :].any()
    if not shuffle:
        np.testing.assert_array_equal(real, whole[: len(real)])


# --- which dtype is stored -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("command", "source_dtype", "options", "expected"), [
    ("npy-to-hdf5", "<u2", (), "uint16"), ("npy-to-hdf5", ">u2", (), "uint16"), ("npy-to-hdf5", "<u1", (), "uint8"),
    ("npy-to-hdf5", "<u1", ("--pad-id", 255), "uint8"), ("npy-to-hdf5", "<u1", ("--pad-id", 256), "uint16"),
    ("npy-to-hdf5", "<i8", ("--vocab-size", 256), "uint8"), ("npy-to-hdf5", "<i8", ("--vocab-size", 257), "uint16"),
    ("npy-to-hdf5", "<i8", ("--dtype", "uint8"), "uint8"), ("npy-to-hdf5", "<u1", ("--dtype", "uint16"), "uint16"),
    ("npy-to-batch", "<u1", (), "uint32"),
    ("npy-to-hdf5", "<i2", (), "uint32"), ("npy-to-hdf5", "<u4", (), "uint32"), ("npy-to-hdf5", "<i8", (), "uint32"),
    ("npy-to-hdf5", "<i8", ("--vocab-size", 65536), "uint16"),
    ("npy-to-hdf5", "<i8", ("--vocab-size", 65537), "uint32"),
    ("npy-to-hdf5", "<u2", ("--dtype", "uint32"), "uint32"), ("npy-to-hdf5", "<i8", ("--dtype", "uint16"), "uint16"),
    ("npy-to-batch", "<u2", (), "uint32"), ("npy-to-batch", "<i8", ("--vocab-size", 65536), "uint32"),
    ("npy-to-batch", "<u2", ("--dtype", "uint16"), "uint16"),
])  # fmt: skip
def test_the_stored_dtype(command, source_dtype, options, expected, tmp_path):
    tokens = (numbered(8) % 120).astype(source_dtype)
    save(tmp_path / "in.npy", tokens)
    report = succeed(command, tmp_path / "in.npy", tmp_path / "out", *SHAPE, "--remainder", "error", *options)
    assert (report["dtype"], report["tokens_dropped"]) == (expected, {})
    with open_reader(tmp_path / "out") as reader:
        assert reader.dtype.name == expected
    np.testing.assert_array_equal(sorted_rows(records_of(tmp_path / "out")), sorted_rows(tokens.astype(expected)))


# --- token ids that cannot be stored ---------------------------------------------------------------------------
BAD_TOKENS = [
    *((dtype, value, (), "outside 0..4,294,967,295 (dtype uint32)")
      for dtype, value in (("<i1", -1), ("<i8", -5), (">i4", -(2**31)), ("<i8", 2**32), ("<u8", 2**64 - 1))),
    ("<u4", 65536, ("--dtype", "uint16"), "outside 0..65,535 (dtype uint16)"),
    ("<i4", 100, ("--vocab-size", 100), "outside 0..99 (vocab_size 100)"),
    ("<u2", 65535, ("--vocab-size", 50000), "outside 0..49,999 (vocab_size 50,000)"),
    ("<i8", 65536, ("--vocab-size", 65536), "outside 0..65,535 (vocab_size 65,536)"),
]  # fmt: skip


#: Every id in one way, and one id in every way, for every day; all ways by --slow.
BAD_TOKEN_WAYS = [
    pytest.param(*way, marks=() if token in (0, number // len(BAD_TOKENS) + 1) else pytest.mark.slow)
    for number, way in enumerate(itertools.product([False, True], FROM_NPY, [(), ("--no-shuffle",)], BAD_TOKENS))
    for token in [number % len(BAD_TOKENS)]
]


@pytest.mark.parametrize(("stream", "command", "shuffle", "bad_token"), BAD_TOKEN_WAYS)
@pytest.mark.thin
def test_a_bad_id_is_named_with_file_index_and_value(stream, command, shuffle, bad_token, tmp_path):
    dtype, value, options, reason = bad_token
    tokens = (numbered(200) % 90).astype(dtype)
    tokens[150, 3] = value
    bad = save(tmp_path / "in" / "b.npy", tokens.reshape(-1) if stream else tokens)
    save(tmp_path / "in" / "a.npy", (numbered(20) % 90).astype(dtype))
    message = fail(1, command, tmp_path / "in", tmp_path / "out", *SHAPE, *shuffle, *options)
    where = f"index {150 * SEQ_LEN + 3:,}" if stream else "index [150, 3]"
    assert message == f"{bad}: token id {value} at {where} is {reason}"
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]


# --- sources that are not tokens -------------------------------------------------------------------------------
@pytest.mark.parametrize(("array", "message"), [
    *((np.zeros((8, SEQ_LEN), kind), "integer") for kind in ("<f4", bool, "U3", "<c8", "<M8[s]", [("id", "<i4")])),
    (np.full((8, SEQ_LEN), None, object), "integer"),
    *((np.zeros(shape, "<u2"), f"{{path}}: expected a 1-D stream or 2-D records, found shape {shape}")
      for shape in ((), (2, 2, SEQ_LEN), (1, 1, 1, SEQ_LEN))),
    (numbered(8, seq_len=9), "pass --seq-len 9"),
])  # fmt: skip
def test_an_array_that_is_no_tokens_is_refused(array, message, tmp_path):
    path = save(tmp_path / "in.npy", array)
    said = fail(1, "npy-to-hdf5", path, tmp_path / "o.h5", *SHAPE)
    assert (message.format(path=path) in said, str(path) in said) == (True, True)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("names", [["records"], ["stream", "records"]])
def test_the_length_of_records_is_the_default(names, tmp_path):
    save(tmp_path / "records.npy", numbered(8, seq_len=24))
    save(tmp_path / "stream.npy", numbered(4, seq_len=24).reshape(-1))
    report = succeed("npy-to-hdf5", *(tmp_path / f"{name}.npy" for name in names), tmp_path / "out", "--batch-size", 2)
    assert report["seq_len"] == 24
    other = save(tmp_path / "other.npy", numbered(8, seq_len=16))
    assert "expected records of 24 tokens, found 16" in fail(
        1, "npy-to-hdf5", tmp_path / "records.npy", other, tmp_path / "two", "--batch-size", 2
    )
    report = succeed(
        "npy-to-hdf5", save(tmp_path / "long.npy", np.zeros(1024, np.uint8)), tmp_path / "x", "--batch-size", 2
    )
    assert report["seq_len"] == 512


@pytest.mark.parametrize("keep", [0, 5, 40, 127, 128, 200, -1])
@pytest.mark.parametrize("command", FROM_NPY)
def test_a_truncated_npy_is_incomplete(keep, command, tmp_path):
    path = save(tmp_path / "in.npy", numbered(50))
    os.truncate(path, keep if keep >= 0 else path.stat().st_size - 1)
    assert str(path) in fail(4, command, path, tmp_path / "out", *SHAPE)
    assert list(tmp_path.iterdir()) == [path]


def npy_header(text, version=(1, 0)):
    length = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + text.encode() + bytes(4096)


def test_every_npy_version_is_read(tmp_path):
    for version in ((1, 0), (2, 0), (3, 0)):
        with open(tmp_path / "in.npy", "wb") as file:
            np.lib.format.write_array(file, numbered(8), version=version)
        succeed("npy-to-batch", tmp_path / "in.npy", tmp_path / "o.batch", *SHAPE, "--no-shuffle", "--force")
        np.testing.assert_array_equal(records_of(tmp_path / "o.batch"), numbered(8))


@pytest.mark.parametrize("content", [
    npy_header("{'descr': '<i4', 'fortran_order': False, 'shape': ("),
    npy_header("(" * 2000 + ")" * 2000),
    npy_header("{'descr': '<i4', 'fortran_order': False, 'shape': (-8,), }"),
    npy_header("{'descr': '<i4', 'fortran_order': False, 'shape': (-8, 8), }"),
    npy_header("{'descr': '<i4', 'fortran_order': False, 'shape': (2305843009213693952, 8), }"),
    npy_header("{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999999999999999999, 8), }"),
    npy_header("{'descr': 'foo', 'fortran_order': False, 'shape': (8, 8), }"),
    npy_header("{'descr': '<i4'}"),
    npy_header("\0\0\0\0"),
    npy_header("{'descr': '<i4', 'fortran_order': False, 'shape': (8, 8), }", (9, 9)),
    b"not numpy at all", b"not numpy at all" * 100, b"\x93NUMPX\x01\x00" * 30, None,
], ids=["open", "deep", "negative", "negative-2d", "wraps", "huge", "dtype", "keys", "zeros", "version",
        "short", "long", "magic", "npz"])  # fmt: skip
def test_a_malformed_npy_file_is_one_clear_error(content, tmp_path):
    path = tmp_path / f"in.np{'y' if content else 'z'}"
    path.write_bytes(content) if content else np.savez(path, tokens=numbered(50))
    result = run(convert, "npy-to-hdf5", path, tmp_path / "o.h5", *SHAPE)
    assert result.exit_code in (1, 4), result.output
    assert result.stderr.startswith(f"Error: {path}: ")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("command", "suffix"), [("hdf5-to-batch", ".batch"), ("batch-to-hdf5", ".h5")])
def test_a_source_of_the_other_format_is_refused(command, suffix, tmp_path):
    wrong = tmp_path / f"wrong{suffix}"
    write_batches(wrong, numbered(8).reshape(2, 4, SEQ_LEN))
    message = fail(1, command, wrong, tmp_path / f"out{suffix}")
    found = command.split("-")[2]
    assert re.search(rf"asked for backend .*; run 'zb convert {found}-to-hdf5 \.\.\.' for them", message)
    assert "'SRC...'. Pass the sources, then DST." in run(convert, "npy-to-hdf5", wrong).stderr


# --- there and back --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["uint32", "uint16"])
@pytest.mark.parametrize("middle", ["middle.h5", "middle"])
@pytest.mark.parametrize("shards", [1, 3])
def test_batch_to_hdf5_and_back_is_the_identical_file(dtype, middle, shards, tmp_path):
    write_native(tmp_path / "a.batch", numbered(94, dtype="<u2"), 4, SEQ_LEN, 77, dtype=dtype)
    cut = ("--shards", shards) if middle == "middle" else ()
    there = succeed("batch-to-hdf5", tmp_path / "a.batch", tmp_path / middle, *cut)
    back = succeed("hdf5-to-batch", tmp_path / middle, tmp_path / "b.batch")
    assert (tmp_path / "a.batch").read_bytes() == (tmp_path / "b.batch").read_bytes()
    if middle == "middle.h5":
        assert there["sha256"] == back["sha256"]


@pytest.mark.parametrize("target", ["hdf5", "batch"])
@pytest.mark.parametrize("backend", ["hdf5", "batch"])
@pytest.mark.parametrize("shape", [(4, 1024), (3, 1000)], ids=["packed", "padded"])
def test_a_copy_of_a_copy_has_the_bytes_of_the_original(target, backend, shape, tmp_path):
    source, first, second = (tmp_path / f"{k}{SUFFIXES[kind]}" for k, kind in enumerate((backend, target, target)))
    tokens = random_tokens(40, *shape)
    write_batches(source, tokens)
    run_pipe(StoreSource(source, backend), target, first)
    run_pipe(StoreSource(first, target), target, second)
    assert first.read_bytes() == second.read_bytes()
    np.testing.assert_array_equal(batches_of(first), tokens)


def test_the_same_tokens_have_the_same_sha256_in_every_format_and_a_store_keeps_its_cut_and_its_story(
    native, tmp_path, source
):
    printed = run(convert, "batch-to-hdf5", native, tmp_path / "middle", "--shards", 3).stdout
    reports = [
        succeed("batch-to-hdf5", native, tmp_path / "a.h5"),
        succeed("batch-to-npy", native, tmp_path / "a.npy"),
        succeed("hdf5-to-npy", tmp_path / "a.h5", tmp_path / "b.npy"),
        succeed("npy-to-batch", tmp_path / "a.npy", tmp_path / "b.batch", *SHAPE, "--no-shuffle"),
        succeed("npy-to-hdf5", tmp_path / "b.npy", tmp_path / "b.h5", *SHAPE, "--no-shuffle"),
    ]
    assert len({report["sha256"] for report in reports}) == 1
    back = run(convert, "hdf5-to-batch", tmp_path / "middle", tmp_path / "back").stdout
    digest, again = (re.search(r"^sha256 +(\w{64})$", text, re.MULTILINE)[1] for text in (printed, back))
    assert digest == again
    succeed("npy-to-hdf5", source, tmp_path / "h5", *SHAPE, "--shards", 5, "--seed", 6, "--vocab-size", 400)
    succeed("hdf5-to-batch", tmp_path / "h5", tmp_path / "batch")
    succeed("batch-to-hdf5", tmp_path / "batch", tmp_path / "again")
    assert files_in(tmp_path / "again") == files_in(tmp_path / "h5")
    first, second = ShardIndex.load(tmp_path / "h5"), ShardIndex.load(tmp_path / "batch")
    assert [s.sha256 for s in first.shards] == [s.sha256 for s in second.shards]
    assert (first.meta, first.shuffle, first.source) == (second.meta, second.shuffle, second.source)


@examples(40)
@given(
    num_batches=st.integers(1, 9),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 40)),
    dtype=st.sampled_from(["uint16", "uint32"]),
    path=st.lists(st.sampled_from(["npy", "hdf5", "batch"]), min_size=2, max_size=5),
    cuts=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_any_way_through_the_formats_keeps_every_token(num_batches, shape, dtype, path, cuts, seed):
    tokens = np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, (num_batches, *shape), dtype, endpoint=True)
    path = [path[0], *(after for before, after in itertools.pairwise(path) if after != before)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        current = folder / f"0{SUFFIXES[path[0]]}"
        if path[0] == "npy":
            np.save(current, tokens.reshape(-1, shape[1]))
        else:
            write_batches(current, tokens)
        for number, (before, after) in enumerate(itertools.pairwise(path), 1):
            if before == "npy":
                options = {"batch_size": shape[0], "seq_len": shape[1], "seed": 0, "shuffle": False, "dtype": dtype}
                opened = npy_source([current], **options)
            else:
                opened = StoreSource(current, before)
            shards = min(cuts[number - 1], num_batches)
            current = folder / (str(number) if shards else f"{number}{SUFFIXES[after]}")
            run_pipe(opened, after, current, shards=shards or None)
        found = records_of(current)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.reshape(tokens.shape), tokens)


# --- damage is not copied --------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["hdf5", "batch"])
@pytest.mark.parametrize(
    ("target", "options"),
    [("same-cut", ()), ("other-cut", ("--shards", 5)), ("one-shard", ("--shards", 1)), ("joined", ()), ("npy", ())],
)
@pytest.mark.thin
def test_a_damaged_store_is_refused(backend, target, options, source, tmp_path):
    succeed(f"npy-to-{backend}", source, tmp_path / "store", *SHAPE, "--shards", 3)
    flip_token(tmp_path / "store" / f"shard-00001-of-00003{SUFFIXES[backend]}", 2)
    before = files_in(tmp_path)
    to = {"hdf5": "batch", "batch": "hdf5"}[backend]
    if target == "npy":
        to = "npy"
    name = f"joined{SUFFIXES[to]}" if target == "joined" else target
    assert "expected" in fail(3, f"{backend}-to-{to}", tmp_path / "store", tmp_path / name, *options)
    after = files_in(tmp_path)  # shards that were finished before the damage was met may be there for --resume
    assert {path: data for path, data in after.items() if not path.startswith(f"{name}.partial/")} == before
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("number", [0, 5, 11])
def test_damage_is_no_reason_to_lose_what_was_there(number, tmp_path):
    write_batches(tmp_path / "in.h5", numbered(48).reshape(12, 4, SEQ_LEN))
    write_batches(tmp_path / "out.batch", numbered(4, 99).reshape(1, 4, SEQ_LEN))
    flip_token(tmp_path / "in.h5", number)
    before = files_in(tmp_path)
    assert f"batch {number}" in fail(3, "hdf5-to-batch", tmp_path / "in.h5", tmp_path / "out.batch", "--force")
    assert files_in(tmp_path) == before


def test_a_store_with_something_missing_or_a_dataset_too_many_is_refused(source, tmp_path):
    succeed("npy-to-hdf5", source, tmp_path / "store", *SHAPE, "--shards", 3)
    dataset = (tmp_path / "store", tmp_path / "out", "--dataset", "nothing")  # which is of a file
    refused = f"{tmp_path / 'store'}: --dataset nothing needs an HDF5 file, found a folder"
    assert refused in fail(1, "hdf5-to-batch", *dataset)
    for missing in ("shard-00001-of-00003.h5", INDEX_NAME):
        (tmp_path / "store" / missing).unlink()
        assert missing in fail(1, "hdf5-to-batch", tmp_path / "store", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("backend", "target"), [("hdf5", "batch"), ("batch", "hdf5")])
def test_a_file_that_is_truncated_or_holds_no_batches_is_refused(backend, target, tmp_path):
    path = tmp_path / f"in{SUFFIXES[backend]}"
    write_batches(path, numbered(48).reshape(12, 4, SEQ_LEN))
    os.truncate(path, path.stat().st_size - 4096)
    before = sorted(tmp_path.iterdir())
    fail(4, f"{backend}-to-{target}", path, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
    write_batches(path, np.zeros((0, 4, SEQ_LEN), "<u4"), overwrite=True)
    assert "holds no batches" in fail(1, f"{backend}-to-npy", path, tmp_path / "out.npy")


def test_a_store_that_is_still_written_is_refused(tmp_path):
    with open_writer(tmp_path / "live.h5", batch_size=4, seq_len=SEQ_LEN) as writer:
        writer.write(numbered(8).reshape(2, 4, SEQ_LEN))
        message = fail(4, "hdf5-to-batch", tmp_path / "live.h5.partial", tmp_path / "out.batch")
        assert "2 batches are committed" in message
        with pytest.raises(IncompleteError):
            StoreSource(tmp_path / "live.h5.partial", "hdf5")
    assert not (tmp_path / "out.batch").exists()
    assert succeed("hdf5-to-batch", tmp_path / "live.h5", tmp_path / "out.batch")["num_batches"] == 2


# --- HDF5 files of another origin ------------------------------------------------------------------------------
def foreign(path, tokens, **options):
    with h5py.File(path, "w") as h5:
        label_batches(h5.create_dataset("data/tokens", data=tokens, **options))
        h5["data/flat"] = tokens.reshape(-1)
        h5["data/float"] = tokens[1:].astype("<f4")
    return path


@pytest.mark.parametrize("options", [{}, {"chunks": (2, 2, SEQ_LEN)}, {"compression": "gzip"}])
@pytest.mark.parametrize("dtype", ["<i8", ">u4", "<u2", "<i2"])
def test_a_foreign_dataset_is_converted_on_request(options, dtype, tmp_path):
    tokens = numbered(24).astype(dtype).reshape(6, 4, SEQ_LEN)
    path = foreign(tmp_path / "foreign.h5", tokens, **options)
    how = ("--dataset", "data/tokens", "--no-shuffle")
    assert succeed("hdf5-to-batch", path, tmp_path / "o.batch", *how)["dtype"] == "uint32"
    report = succeed("hdf5-to-hdf5", path, tmp_path / "o.h5", *how)
    assert (report["dtype"], report["batch_size"]) == ("uint16" if dtype == "<u2" else "uint32", 4)
    np.testing.assert_array_equal(records_of(tmp_path / "o.h5"), tokens.reshape(-1, SEQ_LEN))
    np.testing.assert_array_equal(records_of(tmp_path / "o.batch"), tokens.reshape(-1, SEQ_LEN))
    with h5py.File(path, "r+") as h5:  # which the conversion has left
        h5.attrs["seen"] = 1


def test_a_dataset_without_integer_batches_is_an_error(tmp_path):
    path = foreign(tmp_path / "foreign.h5", numbered(24).reshape(6, 4, SEQ_LEN))
    for name in ("nothing", "data", "data/flat", "data/float", "", "/"):
        message = fail(1, "hdf5-to-batch", path, tmp_path / "o.batch", "--dataset", name)
        assert ("0 records of 512 tokens do not fill" if name == "data/flat" else str(path)) in message
    assert list(tmp_path.iterdir()) == [path]


def test_a_bad_id_in_a_foreign_dataset_is_named(tmp_path):
    for value in (-1, 2**32):
        tokens = numbered(24, dtype="<i8").reshape(6, 4, SEQ_LEN)
        tokens[3, 1, 2] = value
        path = foreign(tmp_path / "foreign.h5", tokens)
        command = ("hdf5-to-batch", path, tmp_path / "o.batch", "--dataset", "data/tokens")
        message = fail(1, *command, "--axes", "batch,record,token")
        assert (str(path) in message, f"token id {value} at index " in message) == (True, True)
        assert list(tmp_path.iterdir()) == [path]


# --- what is there already -------------------------------------------------------------------------------------
@pytest.fixture(params=["out.h5", "out"])
def old(request, tmp_path):
    """An older output, to be kept or replaced: one file, or a folder."""
    save(tmp_path / "old.npy", numbered(8, 500))
    succeed("npy-to-hdf5", tmp_path / "old.npy", tmp_path / request.param, *SHAPE)
    return tmp_path / request.param


def test_an_older_output_is_replaced_by_force_only_and_nothing_else_is_left(old, source, tmp_path):
    before = files_in(tmp_path)
    assert "--force" in fail(1, "npy-to-hdf5", source, old, *SHAPE)
    assert files_in(tmp_path) == before
    names = sorted(path.name for path in tmp_path.iterdir())
    succeed("npy-to-hdf5", source, old, *SHAPE, "--no-shuffle", "--force")
    np.testing.assert_array_equal(records_of(old), numbered(48))
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_force_replaces_only_at_the_end_and_a_failing_conversion_nothing(old, tmp_path, source):
    tokens = numbered(48, dtype="<i8")
    tokens[47, 7] = -1
    save(tmp_path / "bad.npy", tokens)
    before = files_in(tmp_path)
    fail(1, "npy-to-hdf5", tmp_path / "bad.npy", old, *SHAPE, "--no-shuffle", "--force")
    assert files_in(tmp_path) == before
    seen = []

    def watch(tokens):
        seen.append(records_of(old))

    opened = npy_source([source], batch_size=4, seq_len=SEQ_LEN, seed=0, shuffle=False)
    run_pipe(opened, "hdf5", old, force=True, progress=watch)
    assert len(seen) > 0
    for records in seen:
        np.testing.assert_array_equal(sorted_rows(records), sorted_rows(numbered(8, 500)))
    np.testing.assert_array_equal(records_of(old), numbered(48))


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "model"])
def test_force_never_deletes_a_folder_with_foreign_files(name, source, tmp_path):
    succeed("npy-to-hdf5", source, tmp_path / "out", *SHAPE)
    foreign_path = tmp_path / "out" / name
    if name == "model":
        foreign_path.mkdir()
        foreign_path = foreign_path / "weights.bin"
    foreign_path.write_text("precious")
    before = files_in(tmp_path)
    assert name in fail(1, "npy-to-hdf5", source, tmp_path / "out", *SHAPE, "--force")
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("name", ["out.h5", "out.batch", "out", "out/notes.txt"])
def test_files_that_appear_during_the_conversion_are_kept(name, source, tmp_path):
    def appear(tokens):
        if not (tmp_path / name).exists():
            (tmp_path / name).write_text("precious")

    target, replaces = tmp_path / name.partition("/")[0], "/" in name
    backend = "batch" if target.suffix == ".batch" else "hdf5"
    if replaces:
        succeed("npy-to-hdf5", source, target, *SHAPE)
    before = files_in(tmp_path)
    opened = npy_source([source], batch_size=4, seq_len=SEQ_LEN, seed=0)
    with pytest.raises(ConvertError, match="notes" if replaces else "exists"):
        run_pipe(opened, backend, target, force=replaces, progress=appear)
    after = {path: data for path, data in files_in(tmp_path).items() if not path.startswith("out.partial/")}
    assert after == {**before, name: b"precious"}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.thin
def test_a_failure_between_the_renames_of_a_swap_keeps_the_old_store(error, call, source, tmp_path, monkeypatch):
    succeed("npy-to-hdf5", source, tmp_path / "out", *SHAPE, "--no-shuffle")
    new = save(tmp_path / "in" / "new.npy", numbered(48, 1000))
    opened = npy_source([new], batch_size=4, seq_len=SEQ_LEN, seed=0, shuffle=False)
    real, calls = os.replace, []

    def replace(old_path, new_path):
        if Path(new_path).parent.name != "out.partial":  # not what is renamed inside the new store
            calls.append(new_path)
            if len(calls) == call:
                raise error("now")
        real(old_path, new_path)

    monkeypatch.setattr(zb_hdf5.files.publishing.os, "replace", replace)
    expected = numbered(48)
    with contextlib.suppress(OSError, KeyboardInterrupt):
        run_pipe(opened, "hdf5", tmp_path / "out", force=True)
        expected = numbered(48, 1000)
    np.testing.assert_array_equal(records_of(tmp_path / "out"), expected)
    assert {path.name for path in tmp_path.iterdir()} - {"out.partial"} == {"in", "out"}


def test_the_leftover_of_a_killed_conversion_is_replaced_and_no_file_by_a_folder_or_back(source, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "shard-00000-of-00007.h5").write_text("half a shard")
    (tmp_path / "one.h5.partial").write_text("half a file")
    for name in ("out", "one.h5"):
        succeed("npy-to-hdf5", source, tmp_path / name, *SHAPE, "--no-shuffle")
        np.testing.assert_array_equal(records_of(tmp_path / name), numbered(48))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "one.h5", "out"]
    assert len(list((tmp_path / "out").iterdir())) == 2
    (tmp_path / "file").write_text("precious")
    succeed("npy-to-hdf5", source, tmp_path / "folder", *SHAPE)
    (tmp_path / "folder").rename(tmp_path / "folder.h5")
    before = files_in(tmp_path)
    fail(1, "npy-to-hdf5", source, tmp_path / "file", *SHAPE, "--force")
    fail(1, "npy-to-hdf5", source, tmp_path / "folder.h5", *SHAPE, "--force")
    assert files_in(tmp_path) == before


def test_no_source_is_lost_to_a_conversion_onto_itself(native, source, tmp_path):
    succeed("npy-to-hdf5", source, tmp_path / "store", *SHAPE, "--no-shuffle")
    before = files_in(tmp_path)
    fail(1, "hdf5-to-batch", tmp_path / "store", tmp_path / "store")
    for force in ((), ("--force",)):
        fail(1, "batch-to-hdf5", native, native, *force)
    fail(1, "npy-to-hdf5", source.parent, source.parent, *SHAPE)
    assert files_in(tmp_path) == before
    run(convert, "hdf5-to-batch", tmp_path / "store", tmp_path / "store", "--force")
    np.testing.assert_array_equal(records_of(tmp_path / "store"), numbered(48))
    # shuffling, dropping and padding cannot be undone: the source of an npy conversion must outlive it
    succeed("npy-to-hdf5", source, tmp_path / "shuffled", *SHAPE)
    succeed("hdf5-to-npy", tmp_path / "shuffled", tmp_path / "records")
    before = files_in(tmp_path / "records")
    shape = ("--batch-size", 5, "--seq-len", SEQ_LEN)
    run(convert, "npy-to-hdf5", tmp_path / "records", tmp_path / "records", *shape, "--force")
    assert files_in(tmp_path / "records") == before


def test_a_conversion_reads_its_source_only(native, source, tmp_path):
    before = {**files_in(source.parent), **files_in(native.parent)}
    succeed("npy-to-hdf5", source, tmp_path / "a.h5", *SHAPE)
    succeed("batch-to-hdf5", native, tmp_path / "b.h5")
    h5 = files_in(tmp_path)
    succeed("hdf5-to-npy", tmp_path / "b.h5", tmp_path / "b.npy")
    assert {name: data for name, data in files_in(tmp_path).items() if name != "b.npy"} == h5
    assert {**files_in(source.parent), **files_in(native.parent)} == before
