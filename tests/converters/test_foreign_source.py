"""HDF5 files of other programs, one or many, are converted like arrays, whatever the layout of their datasets."""

import hashlib
import os

import h5py
import numpy as np
import pytest
from commandline import one_error, report_of, run_zb
from contents import batches_of, files_in, label_batches
from contract import is_refused
from interrupted import Failing, Stops
from reading import reading

from zb_hdf5 import (
    ArgumentError,
    ChecksumError,
    ConvertError,
    FormatError,
    IncompleteError,
    Loader,
    ShardIndex,
    convert,
    open_reader,
    verify_store,
)
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters.shuffle import BYTES_PER_RECORD, PROCESS_BYTES, ScatterPlan
from zb_hdf5.loaders.order import write_order

S = 8
#: How each file stores its part: the options of its dataset, its dtype, and its user block.
LAYOUTS = [
    ({}, "<i4", 0),
    ({"chunks": (7, S)}, "<i4", 512),
    ({"chunks": (7, S), "compression": "gzip", "shuffle": True}, "<i4", 0),
    ({}, ">i4", 1024),
    ({"chunks": (5, 3)}, ">i4", 0),
]
RECORDS = np.arange(120 * S).reshape(-1, S) * 7 % 50_257
SHAPE = {"batch_size": 4, "seed": 3, "workers": 1}
SHUFFLED = RECORDS[write_order(120, 3).indices(np.arange(120))]


def write_file(path, tokens, name="data/tokens", layout=0, dtype=None):
    """Write a dataset of tokens: records of S tokens, batches of them, or a stream."""
    how, usual, user_block = LAYOUTS[layout]
    dtype = dtype or usual
    path.parent.mkdir(exist_ok=True)
    if "chunks" in how and tokens.ndim != 2:
        how = how | {"chunks": (min(50, len(tokens)),) if tokens.ndim == 1 else (2, *tokens.shape[1:])}
    with h5py.File(path, "w", userblock_size=user_block) as h5:
        stored = h5.create_dataset(name, data=tokens.astype(dtype), **how)
        if tokens.ndim == 3:
            label_batches(stored)
    return path


@pytest.fixture
def folder(tmp_path):
    """Return a folder of files of which each has another layout; one is in a folder of its own."""
    parts = np.array_split(RECORDS, len(LAYOUTS))
    for number, part in enumerate(parts):
        write_file(tmp_path / "in" / f"{number}.h5", part, layout=number)
    (tmp_path / "in" / "more").mkdir()
    (tmp_path / "in" / "4.h5").rename(tmp_path / "in" / "more" / "4.hdf5")
    return tmp_path / "in"


def records_of(path):
    return batches_of(path).reshape(-1, S)


def test_records_of_many_files_are_shuffled_like_arrays(folder, tmp_path):
    report = convert(folder, "hdf5", tmp_path / "out", **SHAPE, shards=2, vocab_size=50_257)
    assert (report.meta.dtype, report.num_batches, report.counts.tokens_in) == (np.uint16, 30, RECORDS.size)
    np.testing.assert_array_equal(records_of(tmp_path / "out"), SHUFFLED)
    assert {each.outcome for each in verify_store(tmp_path / "out")} == {"verified"}
    index = ShardIndex.load(tmp_path / "out")
    names = ["0.h5", "1.h5", "2.h5", "3.h5", "more/4.hdf5"]
    assert index.source["files"] == [str(folder / name) for name in names]
    assert (index.source["format"], index.source["dataset"], index.shuffle) == ("hdf5", "data/tokens", "global")
    command = ("convert", "hdf5-to-hdf5", *(folder / name for name in names), tmp_path / "again")
    options = ("--batch-size", 4, "--seed", 3, "--shards", 2, "--vocab-size", 50_257, "--dataset", "data/tokens")
    run_zb(*command, *options, code=0)
    assert files_in(tmp_path / "again") == files_in(tmp_path / "out")


def test_the_store_of_arrays_is_the_same(folder, tmp_path):
    np.save(tmp_path / "all.npy", RECORDS)
    for name, source in (("a", folder), ("b", tmp_path / "all.npy")):
        convert(source, "batch", tmp_path / name, **SHAPE, shards=3, val_fraction=0.2)
    ours, theirs = (ShardIndex.load(tmp_path / name) for name in "ab")
    assert (ours.sha256, ours.table.values["split"]) == (theirs.sha256, theirs.table.values["split"])
    assert list(ours.table.values["split"]) == ["train"] * 3 + ["val"]


def test_files_of_several_dtypes_are_converted_if_each_is_named(folder, tmp_path):
    dtypes = ("<u2", "<i4", "<i8", ">i8", ">u4")
    files = sorted(path for path in folder.rglob("*.h*") if path.is_file())
    for number, part in enumerate(np.array_split(RECORDS, len(LAYOUTS))):
        write_file(files[number], part, layout=number, dtype=dtypes[number])
    convert(files, "hdf5", tmp_path / "out", **SHAPE)
    np.testing.assert_array_equal(records_of(tmp_path / "out"), SHUFFLED)
    with pytest.raises(FormatError, match=r"0\.h5: expected ids of int64, as 2\.h5 has them, found uint16"):
        convert(folder, "hdf5", tmp_path / "folder", **SHAPE)


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
@pytest.mark.parametrize("kind", ["stream", "batches"])
def test_streams_and_batches_become_records(kind, layout, tmp_path):
    shape = (-1,) if kind == "stream" else (-1, 5, S)
    for number, part in enumerate(np.array_split(RECORDS, 3)):
        write_file(tmp_path / "in" / f"{number}.h5", part.reshape(shape), layout=layout)
    how = {"seq_len": S} if kind == "stream" else {}
    convert(tmp_path / "in", "hdf5", tmp_path / "plain", shuffle=False, **how)
    found = batches_of(tmp_path / "plain")
    assert found.shape[1:] == ((32, S) if kind == "stream" else (5, S))
    np.testing.assert_array_equal(found.reshape(-1, S), RECORDS[: found.size // S])
    report = convert(tmp_path / "in", "hdf5", tmp_path / "out", **SHAPE, seq_len=S, shuffle_method="two-pass")
    np.testing.assert_array_equal(records_of(tmp_path / "out"), SHUFFLED)
    assert report.shuffle.startswith("two-pass: as asked")


@pytest.mark.parametrize("target", ["stream", "megatron"])
def test_a_target_of_documents_is_refused_with_the_line_that_makes_batches(target, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if target == "megatron":  # records become documents of it, and a stream has none
        folder = write_file(tmp_path / "s.h5", np.tile(RECORDS.reshape(-1), 20))
    message = one_error(run_zb("convert", folder, "out", "--to", target), 1)
    assert f"expected documents for {target}, found a dataset of ids without them: convert it to batches: " in message
    assert not (tmp_path / "out").exists()
    run_zb(*message.rpartition(": zb ")[2].split(), code=0)
    assert {*records_of(tmp_path / "DST").reshape(-1)} <= {*RECORDS.reshape(-1)}


def test_the_end_of_a_stream_is_counted(tmp_path):
    for number, size in enumerate((100, 203, 7)):
        write_file(tmp_path / "in" / f"{number}.h5", np.arange(size), layout=number)
    report = convert(tmp_path / "in", "npy", tmp_path / "out.npy", seq_len=10, batch_size=3, shuffle=False)
    assert report.counts.dropped == {"remainder": 10}
    assert np.load(tmp_path / "out.npy").reshape(-1).tolist() == [*range(100), *range(200)]


def test_workers_parts_stops_and_two_passes_give_the_same_files(folder, tmp_path):
    options = {"batch_size": 4, "seed": 3, "shards": 3}
    convert(folder, "hdf5", tmp_path / "one", **options, workers=1, shuffle_method="direct")
    expected = files_in(tmp_path / "one")
    convert(folder, "hdf5", tmp_path / "two", **options, workers=2)
    assert files_in(tmp_path / "two") == expected
    for part in range(2):
        convert(folder, "hdf5", tmp_path / "parts", **options, shard_range=(part, 2), workers=1)
    run_zb("index", "merge", tmp_path / "parts", code=0)
    assert files_in(tmp_path / "parts") == expected
    how = options | {"shuffle_method": "direct"}
    is_refused(Stops, lambda: convert(folder, "hdf5", tmp_path / "stopped", **how, engine=Failing(1)))
    assert convert(folder, "hdf5", tmp_path / "stopped", **how, resume=True, workers=1).kept.shards == 1
    assert files_in(tmp_path / "stopped") == expected
    is_refused(Stops, lambda: convert(folder, "hdf5", tmp_path / "changed", **how, engine=Failing(1)))
    os.utime(folder / "0.h5", (1, 1))
    is_refused(ConvertError, lambda: convert(folder, "hdf5", tmp_path / "changed", **how, resume=True))


def test_compressed_chunks_are_read_in_two_passes_and_the_dry_run_says_so(folder, tmp_path):
    command = ("convert", "hdf5-to-hdf5", folder, tmp_path / "out", "--batch-size", 4, "--dry-run")
    found = report_of(zb, *command)
    assert found["shuffle"].startswith("two-pass: a record of a compressed chunk is read with the whole chunk")
    assert (found["num_batches"], found["seq_len"]) == (30, S)
    (folder / "2.h5").unlink()
    (folder / "more" / "4.hdf5").unlink()
    assert report_of(zb, *command)["shuffle"].startswith("direct")
    assert not (tmp_path / "out").exists()


def test_a_digest_of_the_file_is_compared_before_its_tokens_are_shuffled(tmp_path):
    tokens = RECORDS.reshape(-1).astype("<u4")
    for name in ("good", "bad"):
        path = write_file(tmp_path / f"{name}.h5", tokens, "tokens")
        with h5py.File(path, "r+") as h5:
            del h5["tokens"]
            h5["tokens"] = tokens
            digest = hashlib.sha256(tokens + (name == "bad")).hexdigest()
            h5["tokens"].attrs.update({"token_count": len(tokens), "sha256": digest})
    convert(tmp_path / "good.h5", "hdf5", tmp_path / "out", **SHAPE, seq_len=S)
    np.testing.assert_array_equal(records_of(tmp_path / "out"), SHUFFLED)
    both = [tmp_path / "good.h5", tmp_path / "bad.h5"]
    is_refused(ChecksumError, lambda: convert(both, "hdf5", tmp_path / "x", **SHAPE, seq_len=S), match="bad.h5")
    assert not list(tmp_path.glob("x*"))


# --- bad input -----------------------------------------------------------------------------------------------------
def of_floats(path):
    with h5py.File(path, "r+") as h5:
        del h5["data/tokens"]
        h5["data/tokens"] = np.zeros((4, S))


def of_objects(path):
    with h5py.File(path, "r+") as h5:
        del h5["data/tokens"]
        h5["data/tokens"] = ["some", "text"]


def of_lists(path):
    with h5py.File(path, "r+") as h5:
        del h5["data/tokens"]
        h5.create_dataset("data/tokens", (4,), h5py.vlen_dtype("<i4"))


def without_it(path):
    with h5py.File(path, "r+") as h5:
        h5.move("data/tokens", "data/other")


def of_another_length(path):
    write_file(path, RECORDS.reshape(-1, 2 * S))


def outside_of_it(path):
    with h5py.File(path, "w") as h5:
        kept = [(str(path.with_suffix(".raw")), 0, 4 * S * 4)]
        h5.create_dataset("data/tokens", (4, S), "<i4", external=kept)


def virtual(path):
    layout = h5py.VirtualLayout((24, S), "<u2")
    layout[:] = h5py.VirtualSource(path.with_name("0.h5"), "data/tokens", (24, S))
    with h5py.File(path, "w") as h5:
        h5.create_virtual_dataset("data/tokens", layout)


def of_ours(path):
    np.save(path.with_suffix(".npy"), RECORDS)
    path.unlink()
    convert(path.with_suffix(".npy"), "hdf5", path, **SHAPE)


def cut_short(path):
    write_file(path, RECORDS)
    os.truncate(path, path.stat().st_size - 500)


def of_four_axes(path):
    with h5py.File(path, "r+") as h5:
        del h5["data/tokens"]
        h5["data/tokens"] = np.zeros((2, 2, 2, S), "<i4")


def no_hdf5(path):
    path.write_bytes(b"nothing")


def with_a_mask(path):
    with h5py.File(path, "w") as h5:
        h5["data/tokens"] = np.stack([RECORDS, RECORDS % 2, RECORDS], axis=1)


BAD = {
    "floats": (of_floats, FormatError, r"1\.h5: data/tokens: expected integers, found float64"),
    "texts": (of_objects, FormatError, r"1\.h5: data/tokens: expected integers, found object"),
    "lists": (of_lists, FormatError, r"1\.h5: data/tokens: expected integers, found object"),
    "missing": (
        without_it,
        FormatError,
        r"1\.h5: expected a dataset 'data/tokens' of one, .* found None; pass .*other",
    ),
    "another length": (of_another_length, ConvertError, r"1\.h5: expected records of 8 tokens, found 16"),
    "external": (outside_of_it, FormatError, r"1\.h5: 'data/tokens' keeps its data in other files"),
    "virtual": (virtual, FormatError, r"1\.h5: 'data/tokens' is a virtual dataset"),
    "ours": (of_ours, FormatError, r"1\.h5: expected an HDF5 file of another program, found a file of this one"),
    "cut short": (cut_short, IncompleteError, r"1\.h5: truncated"),
    "four axes": (of_four_axes, FormatError, r"1\.h5: expected a dataset 'data/tokens' of one, two or three axes"),
    "no HDF5": (no_hdf5, FormatError, r"1\.h5: HDF5 cannot read it"),
    "a mask": (with_a_mask, FormatError, r"1\.h5: data/tokens: expected records along its second axis"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_bad_file_of_many_is_named_and_nothing_is_written(name, tmp_path):
    spoil, error, message = BAD[name]
    for number in range(3):
        write_file(tmp_path / "in" / f"{number}.h5", RECORDS[:24])
    spoil(tmp_path / "in" / "1.h5")
    named = {"dataset": "data/tokens"} if name == "ours" else {}
    files = [tmp_path / "in" / f"{number}.h5" for number in range(3)]
    for source in (tmp_path / "in", files):
        if name == "ours" and source is not files:
            (tmp_path / "in" / "1.npy").unlink()
        is_refused(
            error, lambda source=source: convert(source, "hdf5", tmp_path / "out", **SHAPE, **named), match=message
        )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    line = one_error(run_zb("convert", "hdf5-to-batch", *files, tmp_path / "out"))
    assert len(line.splitlines()) == 1


def test_an_id_that_is_none_is_named_by_its_place(tmp_path):
    for layout, (value, shown) in ((1, (-5, "-5")), (3, (2**40, "1099511627776")), (2, (-1, "-1"))):
        tokens = RECORDS.copy()
        tokens[33, 2] = value
        path = write_file(tmp_path / f"{layout}.h5", tokens, layout=layout, dtype="<i8")
        message = rf"{layout}\.h5: token id {shown} at index \[33, 2\] is outside 0\.\."
        is_refused(ConvertError, lambda path=path: convert(path, "hdf5", tmp_path / "o", **SHAPE), match=message)
        assert not (tmp_path / "o").exists()
    write_file(tmp_path / "x.h5", RECORDS)
    is_refused(
        ConvertError,
        lambda: convert(tmp_path / "x.h5", "hdf5", tmp_path / "o", **SHAPE, vocab_size=6000),
        match=r"x\.h5: token id 6\d\d\d at index .* \(vocab_size 6,000\)",
    )


def test_options_that_the_one_or_the_other_lacks_are_refused(folder, tmp_path, write_store):
    store = write_store(tmp_path / "store", np.zeros((3, 2, S), "<u4"))
    out = tmp_path / "out"
    for refused, message in (
        (
            lambda: convert(store, "hdf5", out, shuffle=True),
            "shuffle belongs to .*hdf5 of other programs, found an HDF5",
        ),
        (lambda: convert(store, "hdf5", out, vocab_size=9, memory=1 << 30), "memory, vocab_size belong to"),
        (lambda: convert(store, "hdf5", out, dtype="auto"), "dtype must be one of keep, uint32, uint16"),
        (
            lambda: convert(folder, "hdf5", out, dtype="keep"),
            "dtype must be one of auto, uint32, uint16, uint8, found 'keep'",
        ),
        (
            lambda: convert(folder, "hdf5", out, packing="pad"),
            "packing belongs to .*, found HDF5 files of other programs",
        ),
        (
            lambda: convert([store, store], "hdf5", out),
            "expected one file or store of ours, found 2: convert each by itself",
        ),
    ):
        is_refused(ArgumentError, refused, match=message)
    is_refused(ArgumentError, lambda: convert(folder, "hdf5", out, axes="batch,record,token"), match="three axes")
    is_refused(ConvertError, lambda: convert([folder, folder / "0.h5"], "hdf5", out), match=r"0\.h5: is named 2 times")
    assert not out.exists()


def test_a_folder_without_hdf5_files_and_one_of_ours_are_no_foreign_ones(tmp_path, write_store):
    (tmp_path / "empty").mkdir()
    is_refused(FormatError, lambda: convert(tmp_path / "empty", "hdf5", tmp_path / "o", source_format="hdf5"))
    store = write_store(tmp_path / "store", np.zeros((3, 2, S), "<u4"))
    (store / "shards.json").unlink()
    message = one_error(run_zb("convert", "hdf5-to-batch", store, tmp_path / "o"), 1)
    assert "zb index rebuild" in message


# --- fields --------------------------------------------------------------------------------------------------------
MASK = RECORDS % 3 > 0
VALUES = {
    "attention_mask": MASK.astype("<i8"),
    "labels": np.where(MASK, RECORDS, -100).astype(">i4"),
    "loss_mask": MASK,
    "weight": (RECORDS / 7).astype("<f4"),
}
FIELDS = {name: values[write_order(120, 3).indices(np.arange(120))] for name, values in VALUES.items()}


def write_fields(path, rows, layout=0, leave_out=(), shape=None, **dtypes):
    """Write the tokens of some records, and their fields, each in a dataset of its own."""
    write_file(path, RECORDS[rows] if shape is None else RECORDS[rows].reshape(shape), "x/input_ids", layout)
    with h5py.File(path, "r+") as h5:
        for name, values in VALUES.items():
            if name not in leave_out:
                part = values[rows] if shape is None else values[rows].reshape(shape)
                how = {"compression": "gzip"} if layout == 2 else {}
                h5.create_dataset(f"x/{name}", data=part.astype(dtypes.get(name, values.dtype)), **how)
    return path


def require_fields(path):
    np.testing.assert_array_equal(records_of(path), SHUFFLED)
    with open_reader(path) as reader:
        assert {field.name for field in reader.meta.fields} == VALUES.keys()
        for name, values in FIELDS.items():
            found = np.array(list(reader.field(name)))
            np.testing.assert_array_equal(found.reshape(-1, S), values)
            assert found.dtype == values.dtype.newbyteorder("=")
    assert {each.outcome for each in verify_store(path)} == {"verified"}


@pytest.mark.parametrize("shape", [None, (-1,), (-1, 4, S)])
@pytest.mark.parametrize("method", ["direct", "two-pass"])
def test_datasets_beside_the_tokens_become_fields(method, shape, tmp_path):
    (tmp_path / "in").mkdir()
    for number, rows in enumerate(np.array_split(np.arange(120), 3)):
        write_fields(tmp_path / "in" / f"{number}.h5", rows, number, shape=shape)
    how = {**SHAPE, "seq_len": S, "shards": 2, "shuffle_method": method}
    report = convert(tmp_path / "in", "hdf5", tmp_path / "out", **how)
    require_fields(tmp_path / "out")
    assert report.left_behind == ""
    with Loader(tmp_path / "out", targets=True, shuffle="sequential", rank=0, world_size=1) as loader:
        targets = np.concatenate([y.numpy() for _, y in loader])
    np.testing.assert_array_equal(targets, FIELDS["labels"][:, 1:])


def test_fields_of_a_last_batch_are_padded(tmp_path):
    path = write_fields(tmp_path / "x.h5", np.arange(10))
    for method in ("direct", "two-pass"):
        out = tmp_path / method
        convert(path, "hdf5", out, batch_size=4, remainder="pad", pad_id=9, shuffle_method=method)
        with open_reader(out) as reader:
            assert (reader[2][2:] == 9).all()
            last = {name: reader.field(name)[2][2:] for name in VALUES}
        assert all((values == (-100 if name == "labels" else 0)).all() for name, values in last.items())
    convert(path, "hdf5", tmp_path / "plain", batch_size=4, remainder="drop", shuffle=False, val_fraction=0.5)
    with open_reader(tmp_path / "plain", split="val") as reader:
        np.testing.assert_array_equal(reader.field("labels")[0], VALUES["labels"][4:8])


def test_buckets_in_little_memory_have_the_fields_too(tmp_path, monkeypatch):
    path = write_fields(tmp_path / "x.h5", np.arange(120))
    monkeypatch.setattr("zb_hdf5.converters.batch_source.GROUP_BYTES", 1)  # a group is one batch
    fit = ScatterPlan.fit
    few = {"memory_bytes": PROCESS_BYTES + 20 * (S * (2 + 8 + 4 + 1 + 4) + BYTES_PER_RECORD)}
    seen = []

    def in_little_memory(order, tokens, dtype, ranges, memory_bytes, fields):
        seen.append(fit(order, tokens, dtype, ranges, fields=fields, **few))
        return seen[-1]

    monkeypatch.setattr(ScatterPlan, "fit", in_little_memory)
    options = {**SHAPE, "shards": 2, "vocab_size": 50_257, "shuffle_method": "two-pass"}
    convert(path, "hdf5", tmp_path / "out", **options)
    assert (len(seen[0].buckets), seen[0].num_runs) == (6, 6)
    require_fields(tmp_path / "out")


def test_targets_without_a_place_for_fields_refuse_them_unless_tokens_suffice(tmp_path):
    path = write_fields(tmp_path / "x.h5", np.arange(120))
    for target, out in (("batch", "o.batch"), ("npy", "o.npy")):
        refused = (lambda target=target, out=out: convert(path, target, tmp_path / out, **SHAPE),)
        is_refused(ConvertError, *refused, match="the fields attention_mask, labels, loss_mask, weight; .*tokens_only")
        assert not (tmp_path / out).exists()
        report = convert(path, target, tmp_path / out, **SHAPE, tokens_only=True)
        assert "leaves behind the fields attention_mask" in report.left_behind
    message = one_error(run_zb("convert", "hdf5-to-batch", path, tmp_path / "x.batch"), 1)
    assert message.endswith("pass --tokens-only to leave them behind")
    run_zb("convert", "hdf5-to-hdf5", path, tmp_path / "plain", "--tokens-only", "--batch-size", 4, code=0)
    assert ShardIndex.load(tmp_path / "plain").meta.fields == ()


def test_files_must_have_the_same_fields(tmp_path):
    (tmp_path / "in").mkdir()
    write_fields(tmp_path / "in" / "0.h5", np.arange(60))
    second = tmp_path / "in" / "1.h5"
    first = "expected the fields attention_mask int64, labels int32, loss_mask bool, weight float32 of .*0.h5, found"
    for how, found in (
        ({"leave_out": ("labels",)}, "attention_mask int64, loss_mask bool, weight float32"),
        ({"labels": "<i8"}, "attention_mask int64, labels int64, loss_mask bool, weight float32"),
        ({"leave_out": VALUES}, "none"),
    ):
        write_fields(second, np.arange(60, 120), **how)
        refused = (lambda: convert(tmp_path / "in", "hdf5", tmp_path / "o", **SHAPE, dataset="x/input_ids"),)
        is_refused(ConvertError, *refused, match=rf"1\.h5: {first} {found}; write .* alike .*tokens_only")
    assert not (tmp_path / "o").exists()
    convert(tmp_path / "in", "hdf5", tmp_path / "o", **SHAPE, dataset="x/input_ids", tokens_only=True)
    np.testing.assert_array_equal(records_of(tmp_path / "o"), SHUFFLED)


def test_values_that_can_be_no_field_are_named(tmp_path):
    path = write_fields(tmp_path / "x.h5", np.arange(120))
    with h5py.File(path, "r+") as h5:
        h5["x/spans"] = np.zeros(RECORDS.shape, "i1")
    with pytest.warns(UserWarning, match=r"x\.h5: left out, as they cannot be fields: spans"):
        convert(path, "hdf5", tmp_path / "out", **SHAPE, dataset="x/input_ids")
    assert {field.name for field in ShardIndex.load(tmp_path / "out").meta.fields} == VALUES.keys()


# --- channels ---------------------------------------------------------------------------------------------------------
def write_channels(path, rows, layout=0):
    """Write tokens, masks and labels as the channels of one dataset."""
    items = np.stack([RECORDS, MASK, np.where(MASK, RECORDS, -100)], axis=1)[rows]
    how, dtype, user_block = LAYOUTS[layout]
    with h5py.File(path, "w", userblock_size=user_block) as h5:
        h5.create_dataset("data", data=items.astype(dtype), **({**how, "chunks": (7, 3, S)} if how else {}))
    return path


@pytest.mark.parametrize("method", ["direct", "two-pass"])
def test_channels_become_tokens_and_fields(method, tmp_path):
    (tmp_path / "in").mkdir()
    for number, rows in enumerate(np.array_split(np.arange(120), 3)):
        write_channels(tmp_path / "in" / f"{number}.h5", rows, [1, 1, 2][number])
    channels = {"channel": 0, "field_channels": {"loss_mask": 1, "labels": 2}}
    with h5py.File(tmp_path / "in" / "2.h5", "r+") as h5:  # fields of all files have one dtype
        items = h5["data"][:].astype("<i4")
        del h5["data"]
        h5.create_dataset("data", data=items, chunks=(7, 3, S), compression="gzip")
    convert(tmp_path / "in", "hdf5", tmp_path / "out", **SHAPE, **channels, shards=2, shuffle_method=method)
    np.testing.assert_array_equal(records_of(tmp_path / "out"), SHUFFLED)
    with open_reader(tmp_path / "out") as reader:
        for name, values in (("loss_mask", FIELDS["loss_mask"]), ("labels", FIELDS["labels"])):
            np.testing.assert_array_equal(np.array(list(reader.field(name))).reshape(-1, S), values)
    source = ShardIndex.load(tmp_path / "out").source
    assert (source["channel"], source["field_channels"]) == (0, {"labels": 2, "loss_mask": 1})


def test_channels_of_the_command_line_are_converted(tmp_path):
    path = write_channels(tmp_path / "x.h5", np.arange(120), 1)
    command = ("convert", path, tmp_path / "out", "--batch-size", 4, "--seed", 3, "--shuffle", "none")
    message = one_error(run_zb(*command), 1)
    assert "pass the channel of the ids" in message
    report = report_of(zb, *command, "--channel", 0, "--field-channel", "loss_mask=1", "--field-channel", "labels=2")
    assert report["num_batches"] == 30
    channels = {"channel": 0, "field_channels": {"loss_mask": 1, "labels": 2}}
    with open_reader(path, batch_size=4, **reading(channels)) as theirs, open_reader(tmp_path / "out") as ours:
        np.testing.assert_array_equal(np.array(list(ours)), np.array(list(theirs)))
        for name in ("labels", "loss_mask"):
            np.testing.assert_array_equal(np.array(list(ours.field(name))), np.array(list(theirs.field(name))))
    result = run_zb("convert", "npy-to-hdf5", tmp_path, tmp_path / "o", "--channel", 0)
    assert result.exit_code == 2
    result = run_zb("convert", tmp_path / "out", tmp_path / "o", "--channel", 0)
    assert result.exit_code > 0
    assert "channel=0 needs an HDF5 file" in result.output


def test_a_mask_that_is_converted_without_its_labels_is_a_note(tmp_path):
    path = write_channels(tmp_path / "x.h5", np.arange(120))
    how = ("--channel", 0, "--field-channel", "loss_mask=1")
    result = run_zb("convert", path, tmp_path / "out", "--batch-size", 4, *how)
    assert result.exit_code == 0
    assert "note: channel 1 is taken as the loss_mask" in result.stderr
