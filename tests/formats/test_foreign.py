"""HDF5 files of other programs: masks are not taken for tokens, and the one dataset of integers is found."""

import json
import os
import pickle
import re
from functools import partial

import h5py
import numpy as np
import pytest
import torch
from commandline import one_error, report_of, run_zb
from contents import batches_of
from contract import is_refused, random_tokens
from processes import killed_after
from reading import reading

import zb_hdf5
from zb_hdf5 import Loader, ReadAs, convert, errors, open_corpus, open_reader, verify_store
from zb_hdf5.field import parse_fields
from zb_hdf5.formats import foreign
from zb_hdf5.store.found_path import found_at

ONE_RANK = {"rank": 0, "world_size": 1}
AXES = "batch,record,token"
VOCABULARY = 50257


def model_zoo(items=100, seq_len=32):
    """Return ids, mask and labels, int32 of shape (items, 3, seq_len), as the Cerebras Model Zoo writes them."""
    ids = random_tokens(1, items, seq_len + 1)[0].astype(np.int64) % VOCABULARY
    lengths = np.random.default_rng(5).integers(seq_len // 2, seq_len + 1, items)
    ids = np.where(np.arange(seq_len + 1) < lengths[:, np.newaxis], ids, 0)  # padding, as for fine-tuning
    mask = np.arange(seq_len) < lengths[:, np.newaxis]
    return np.stack([ids[:, :-1], mask, ids[:, 1:]], axis=1).astype("<i4")


REFUSED = {
    "ids, mask, labels": model_zoo,
    "two records": lambda: random_tokens(20, 2, 32),
    "four records": lambda: random_tokens(20, 4, 32),
    "one item": lambda: model_zoo(items=1),
    "records of one token": lambda: random_tokens(20, 2, 1),
}


def written(path, tokens, **how):
    with h5py.File(path, "w") as h5:
        h5.create_dataset("data", data=tokens, **how)
    return path


def labelled(path, *labels):
    with h5py.File(path, "r+") as h5:
        for axis, label in zip(h5["data"].dims, labels, strict=True):
            axis.label = label
    return path


@pytest.mark.parametrize("name", REFUSED)
def test_two_to_four_entries_are_refused_whatever_they_hold(name, tmp_path):
    tokens = REFUSED[name]()
    path = written(tmp_path / "x.h5", tokens)
    folder = tmp_path / "folder"
    folder.mkdir()
    written(folder / "0.h5", tokens)
    first = ["[" + ", ".join(map(str, entry[:5].tolist())) + "]" for entry in tokens[0]]
    for at, refused in (
        (path, lambda: open_reader(path, read_as=ReadAs(dataset="data"))),
        (path, lambda: Loader(path, **ONE_RANK)),
        (path, lambda: verify_store(path)),
        (path, lambda: convert(path, "batch", tmp_path / "o.batch", workers=1)),
        (folder / "0.h5", lambda: open_reader(folder)),
        (folder / "0.h5", lambda: convert(folder, "batch", tmp_path / "o.batch", workers=1)),
    ):
        with pytest.raises(errors.FormatError) as raised:
            refused()
        message = str(raised.value)
        assert message.startswith(f"{at}: data: expected records along its second axis, found {tokens.shape[1]} ")
        assert all(f"{number}: {ids}" in message for number, ids in enumerate(first)), message
        assert "axes='batch,record,token'" in message
    assert not (tmp_path / "o.batch").exists()
    np.testing.assert_array_equal(batches_of(path, read_as=ReadAs(axes=AXES)), tokens)
    np.testing.assert_array_equal(batches_of(folder, read_as=ReadAs(axes=AXES)), tokens)


def test_labels_of_the_axes_tell_that_they_are_records(tmp_path):
    tokens = random_tokens(8, 3, 32)
    path = labelled(written(tmp_path / "x.h5", tokens), "batch", "record", "token")
    np.testing.assert_array_equal(batches_of(path), tokens)
    with h5py.File(path) as h5:
        assert h5["data"].attrs["DIMENSION_LABELS"].tolist() == ["batch", "record", "token"]
    assert report_of_zb("info", path)["batch_size"] == 3
    assert convert(path, "batch", tmp_path / "o.batch", workers=1).num_batches == 8
    labelled(path, "item", "channel", "token")
    is_refused(errors.FormatError, lambda: open_reader(path), match="found 3 entries")


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        ("<i4", {}),
        (">i4", {}),
        (">i8", {"chunks": (16, 3, 32), "compression": "gzip"}),
        ("<u2", {"chunks": (1, 3, 32), "shuffle": True, "fletcher32": True}),
    ],
    ids=["contiguous", "big-endian", "gzip", "checked chunks"],
)
def test_ids_are_shown_however_they_are_stored_and_read_if_they_are_meant(dtype, how, tmp_path):
    tokens = model_zoo().astype(dtype)
    path = written(tmp_path / "x.h5", tokens, **how)
    shown = re.escape(f"1: {tokens[0, 1, :5].tolist()}")
    is_refused(errors.FormatError, lambda: open_reader(path, read_as=ReadAs(dataset="data")), match=shown)
    np.testing.assert_array_equal(batches_of(path, read_as=ReadAs(dataset="data", axes=AXES)), tokens)
    with Loader(path, read_as=ReadAs(dataset="data", axes=AXES), shuffle="sequential", **ONE_RANK) as loader:
        np.testing.assert_array_equal(torch.stack(list(loader)).numpy(), tokens.astype("<i8"))
    convert(path, "batch", tmp_path / "o.batch", source_format="hdf5", dataset="data", axes=AXES, shuffle=False)
    np.testing.assert_array_equal(batches_of(tmp_path / "o.batch"), tokens)


@pytest.mark.parametrize("shape", [(20, 1, 32), (20, 5, 32)])
def test_other_numbers_of_entries_are_records(shape, tmp_path):
    with open_reader(written(tmp_path / "x.h5", np.zeros(shape, "<i4"))) as reader:
        assert reader.num_batches == shape[0]


def test_no_items_have_no_ids_to_show(tmp_path):
    path = written(tmp_path / "x.h5", np.zeros((0, 3, 32), "<i4"))
    is_refused(errors.FormatError, lambda: open_reader(path), match="found 3 entries, which may be ids, a mask and lab")
    with open_reader(path, read_as=ReadAs(axes=AXES)) as reader:
        assert reader.num_batches == 0


def test_axes_are_three_words_for_three_axes_of_another_program(tmp_path, write_file, write_store):
    tokens = random_tokens(8, 3, 32)
    path = written(tmp_path / "x.h5", tokens)
    with h5py.File(path, "r+") as h5:
        h5["flat"] = tokens.reshape(-1)
        h5["records"] = tokens.reshape(-1, 32)
    own = write_file(tmp_path / "own.h5", tokens).path
    batch = write_file(tmp_path / "own.batch", tokens).path
    store = write_store(tmp_path / "store", tokens, (4,))
    for error, message, where, options in (
        (
            errors.ArgumentError,
            "axes must be .*token or record,token, found 'token'",
            path,
            {"axes": "token"},
        ),
        (errors.ArgumentError, "axes must be .*batch,record,token.*, found 3", path, {"axes": 3}),
        (errors.ArgumentError, "needs a dataset of three axes", path, {"axes": AXES, "dataset": "records"}),
        (
            errors.ArgumentError,
            "is a token stream, which has one axis",
            path,
            {"axes": AXES, "dataset": "flat"},
        ),
        (errors.ArgumentError, "needs a dataset of three axes", own, {"axes": AXES}),
        (errors.ArgumentError, "needs a dataset of two axes", path, {"axes": "record,token", "dataset": "data"}),
        (errors.BackendError, "needs an HDF5 file, found a 'batch' file", batch, {"axes": AXES}),
        (errors.BackendError, "needs an HDF5 file, found a folder", store, {"axes": AXES}),
    ):
        is_refused(error, lambda where=where, options=options: open_reader(where, **reading(options)), match=message)


def test_a_lacking_filter_is_named_where_items_are_looked_at(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as h5:
        how = {"chunks": (1, 3, 32), "compression": 299, "allow_unknown_filter": True}
        created = h5.create_dataset("data", (1, 3, 32), "<i4", **how)
        created.id.write_direct_chunk((0, 0, 0), b"x" * 10)
    is_refused(
        errors.UnavailableError, lambda: open_reader(path, read_as=ReadAs(dataset="data")), match="lacks a filter"
    )


def test_the_command_line_refuses_masks_and_takes_axes(tmp_path):
    path = written(tmp_path / "x.h5", model_zoo())
    message = one_error(run_zb("info", path, "--dataset", "data"), 1)
    assert "found 3 entries, which may be ids, a mask and labels; in the first item they begin with 0: [" in message
    assert "such as --channel 0 --field-channel loss_mask=1 --field-channel labels=2" in message
    assert message.endswith("or --axes batch,record,token if all are records")
    found = report_of_zb("info", path, "--dataset", "data", "--axes", AXES)
    assert (found["num_batches"], found["batch_size"], found["seq_len"]) == (100, 3, 32)
    to_batch = ("convert", "hdf5-to-batch", path, tmp_path / "o.batch", "--dataset", "data")
    assert "found 3 entries, which may be ids" in one_error(run_zb(*to_batch), 1)
    assert report_of_zb(*to_batch, "--axes", AXES)["num_batches"] == 100
    assert "--axes" in one_error_of_usage(run_zb("info", path, "--dataset", "data", "--axes", "token"))


def report_of_zb(*arguments, code=0):
    from zb_hdf5.commands.zb import zb

    return report_of(zb, *arguments, code=code)


def one_error_of_usage(result):
    assert result.exit_code == 2, result.output
    return result.stderr


# --- one dataset of integers is found ------------------------------------------------------------------------------
SHAPES = {"batches": (24, 5, 32), "records": (120, 32), "stream": (3840,)}


@pytest.fixture(params=SHAPES)
def lone(request, tmp_path):
    """Return the path of a file with one dataset of integers, the arguments that give it a shape, and its tokens."""
    tokens = random_tokens(24, 5, 32).astype("<i4") % VOCABULARY
    with h5py.File(tmp_path / "lone.h5", "w") as h5:
        h5["group/ids"] = tokens.reshape(SHAPES[request.param])
        h5["weights"] = np.zeros((4, 5))
        h5["text"] = np.zeros(3, "S2")
        h5.attrs["format"] = "of another program"
    shape = {} if request.param == "batches" else {"batch_size": 5}
    return tmp_path / "lone.h5", shape | ({"seq_len": 32} if request.param == "stream" else {}), tokens


def flags(shape):
    return [text for name, value in shape.items() for text in (f"--{name.replace('_', '-')}", value)]


def test_the_only_integer_dataset_is_read_without_its_name(lone, tmp_path):
    path, shape, tokens = lone
    np.testing.assert_array_equal(batches_of(path, **shape), tokens)
    with open_reader(path, **shape) as found, open_reader(path, read_as=ReadAs(dataset="group/ids"), **shape) as named:
        assert (found.fingerprint, found.meta, found.access) == (named.fingerprint, named.meta, "auto")
    with Loader(path, shuffle="sequential", **shape, **ONE_RANK) as loader:
        np.testing.assert_array_equal(torch.stack(list(loader)).numpy(), tokens)
        state = loader.state_dict()
    with Loader(path, read_as=ReadAs(dataset="group/ids"), shuffle="sequential", **shape, **ONE_RANK) as loader:
        loader.load_state_dict(state)
    convert(path, "batch", tmp_path / "o.batch", shuffle=False, **shape)  # also without the name of its format
    np.testing.assert_array_equal(batches_of(tmp_path / "o.batch").reshape(-1, 32), tokens.reshape(-1, 32))


def test_nothing_is_promised_that_compares_what_has_no_digest(lone):
    path, shape, _ = lone
    for verify in ("batch", "store"):
        is_refused(
            errors.UnverifiableError,
            lambda verify=verify: open_reader(path, verify=verify, **shape),
            lambda verify=verify: Loader(path, verify=verify, **shape, **ONE_RANK),
            match="a dataset of another origin has no digests",
        )
    for options in ((), ("--dataset", "group/ids")):
        found = report_of_zb("info", path, *options)
        assert (found["tokens"], found["dataset"], found["verified"]) == (3840, "group/ids", "none")
        text = run_zb("info", path, *options).output
        assert "reads        not checked: no crc32 is stored" in text
        assert 'verify="batch"' not in text
        verdict = report_of_zb("verify", path, *options, code=6)
        assert [file["missing"] for file in verdict["files"]] == [f"group/ids: {missing(path)}"]
        text = run_zb("verify", path, *options).output
        assert text.splitlines()[-1].endswith("NOT VERIFIED: there is nothing to compare the file with")
    assert [report.missing for report in verify_store(path)] == [f"group/ids: {MISSING}"]


LACKING = "a dataset of another origin has no digests; make a file of digests with "
MISSING = f"{LACKING}write_digests, or convert them to a store"


def missing(path):
    """Return the digests that a file lacks, as the command line says it."""
    return f"{LACKING}'zb index digests {path} -o FILE', or convert them to a store"


def test_every_command_that_looks_finds_the_dataset_and_takes_its_name(lone, tmp_path):
    path, shape, tokens = lone
    with Loader(path, seed=3, **shape, **ONE_RANK) as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    stored = {} if len(shape) < 2 else shape
    for options in ((), ("--dataset", "group/ids")):
        rows = report_of_zb("show", path, "--batch", 2, *flags(stored), *options)["rows"]
        size = 1 if shape and not stored else 5
        expected = tokens.reshape(-1, size, 32)[2]
        assert [row["parts"][0]["tokens"] for row in rows] == expected.tolist()
        report = tmp_path / f"report{len(options)}.html"
        assert report_of_zb("report", path, "-o", report, *options)["tokens"] == 3840
        assert "problem" not in {each["state"] for each in report_of_zb("doctor", path, *options)["findings"]}
        of_batch = report_of_zb("which", path, "--batch", 1, *flags(stored), *options)
        assert of_batch["batches"]
        command = ("which", path, "--state", tmp_path / "state.json", "--step", 1)
        of_step = report_of_zb(*command, *(flags(shape) if len(shape) == 1 else ()), *options)
        assert sum(len(row.get("rows", [0])) for row in of_step["batches"][0]["rows"]) == 5


def test_of_several_integer_datasets_the_option_and_all_of_them_are_named(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as h5:
        h5["ids"] = np.zeros((20, 32), "<i4")
        h5["group/mask"] = np.zeros((20, 32), "u1")
    listed = "group/mask (20, 32) uint8, ids (20, 32) int32"
    is_refused(
        errors.FormatError,
        lambda: open_reader(path),
        lambda: Loader(path, **ONE_RANK),
        lambda: convert(path, "batch", tmp_path / "o.batch", workers=1),
        match=re.escape(f"pass dataset= to ReadAs or convert, with one of its integer datasets: {listed}") + "$",
    )
    for command in (
        ("info", path), ("show", path), ("report", path, "-o", tmp_path / "r.html"), ("doctor", path),
        ("which", path, "--batch", 0), ("convert", "hdf5-to-batch", path, tmp_path / "o.batch"),
    ):  # fmt: skip
        message = one_error(run_zb(*command), 1)
        assert re.search("pass --dataset .*" + re.escape(listed) + "$", message), message
    assert "no digest is stored" in run_zb("verify", path).output
    assert run_zb("verify", path).exit_code == 6
    with h5py.File(path, "r+") as h5:
        for number in range(20):
            h5[f"more/{number:02}"] = np.zeros(3, "<i4")
    line = r"more/07.* and 12 more\n.*: has HDF5 files of documents, which are not read in place: convert\("
    is_refused(errors.FormatError, lambda: open_reader(path), match=line)


def test_a_look_at_a_file_of_many_datasets_ends_and_says_where(tmp_path, monkeypatch):
    path = tmp_path / "documents.h5"
    with h5py.File(path, "w") as h5:
        for number in range(70):
            h5[f"docs/doc{number:02}"] = np.arange(5, dtype="<i4")
    message = one_error(run_zb("info", path), 1)
    assert "docs/doc09 (5,) int32 and 54 more (only its first 64 integer datasets were looked at)" in message
    assert message.endswith(f"which are not read in place: zb convert {path} DST --to stream")
    with h5py.File(path, "r+") as h5:
        h5["docs/labels"] = np.arange(5, dtype="<i4")
    column = found_at(path, read_as=ReadAs(dataset="docs/doc69")).column  # other documents are not fields
    assert [field.name for field in column.meta.fields] == ["labels"]
    monkeypatch.setattr(foreign, "MAX_OBJECTS", 9)
    with h5py.File(path, "w") as h5:
        for number in range(10):
            h5[f"a/{number}"] = np.zeros(5)
        h5["ids"] = np.zeros((20, 32), "<i4")
    with pytest.raises(errors.FormatError, match=r"none is seen \(only its first 9 objects were looked at\)$"):
        open_reader(path)
    assert batches_of(path, read_as=ReadAs(dataset="ids")).shape == (20, 1, 32)


def test_a_dataset_of_a_wrong_name_is_no_other_one(lone):
    path, _, _ = lone
    for command in ("info", "show", "verify", "doctor"):
        assert "expected a dataset 'nothing'" in one_error(run_zb(command, path, "--dataset", "nothing"), 1)


def test_repair_and_rebuild_leave_files_of_other_programs_alone(lone):
    path = lone[0].rename(lone[0].with_name("shard-00000.h5"))
    before = path.read_bytes()
    for command in (("repair", path), ("index", "rebuild", path.parent)):
        assert one_error(run_zb(*command), 6) == f"{path}: group/ids: {missing(path)}"
    assert (path.read_bytes(), list(path.parent.iterdir())) == (before, [path])


def test_axes_are_taken_by_every_command_that_takes_a_dataset(tmp_path):
    path = written(tmp_path / "x.h5", model_zoo())
    with Loader(path, read_as=ReadAs(axes=AXES), **ONE_RANK) as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    for command in (
        ("info", path), ("show", path), ("report", path, "-o", tmp_path / "r.html"), ("doctor", path),
        ("which", path, "--batch", 0), ("which", path, "--state", tmp_path / "state.json", "--step", 0),
        ("convert", "hdf5-to-batch", path, tmp_path / "o.batch"),
    ):  # fmt: skip
        assert "found 3 entries, which may be ids" in one_error(run_zb(*command), 1)
        assert run_zb(*command, "--axes", AXES).exit_code == 0
    assert "found 3 entries, which may be ids" in one_error(run_zb("verify", path), 1)  # it is not damage
    assert report_of_zb("verify", path, "--axes", AXES, code=6)["files"][0]["missing"] == f"data: {missing(path)}"
    is_stream = written(tmp_path / "stream.h5", np.arange(100))
    for command in ("info", "show", "verify", "doctor"):
        assert "which has one axis: leave out --axes=" in one_error(run_zb(command, is_stream, "--axes", AXES), 2)


# --- read past HDF5, or by it ---------------------------------------------------------------------------------------
RECORDS = (np.arange(40 * 24) * 37 % VOCABULARY).reshape(40, 24)


def stored_as(**how):
    dtype = how.pop("dtype", "<i4")
    return lambda h5: h5.create_dataset("ids", data=RECORDS.astype(dtype), **how)


def of_twenty_bits(h5):
    kind = h5py.h5t.STD_U32LE.copy()
    kind.set_precision(20)
    kind.set_offset(3)
    stored = h5py.h5d.create(h5.id, b"ids", kind, h5py.h5s.create_simple(RECORDS.shape))
    stored.write(h5py.h5s.ALL, h5py.h5s.ALL, RECORDS.astype("<u4"))


def in_its_header(h5):
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple(RECORDS.shape)
    stored = h5py.h5d.create(h5.id, b"ids", h5py.h5t.NATIVE_INT32, space, dcpl=how)
    stored.write(h5py.h5s.ALL, h5py.h5s.ALL, RECORDS.astype("<i4"))


def partly_written(h5):
    stored = h5.create_dataset("ids", RECORDS.shape, "<i4", chunks=(8, 24), fillvalue=3)
    stored[:8] = RECORDS[:8]
    stored[16:24] = RECORDS[16:24]
    h5["weights"] = np.zeros(4000)


def never_written(h5):
    h5.create_dataset("ids", RECORDS.shape, "<u2", fillvalue=7)
    h5["weights"] = np.zeros(4000)


#: The writer of a dataset, the user block of its file, and the obstacle to reading it past HDF5.
LAYOUTS = {
    "contiguous": (stored_as(), 0, ""),
    "contiguous uint16": (stored_as(dtype="<u2"), 0, ""),
    "chunks": (stored_as(chunks=(8, 24)), 0, ""),
    "chunks beyond the last record": (stored_as(chunks=(7, 24)), 0, ""),
    "a chunk for each record": (stored_as(chunks=(1, 24), dtype="<u4"), 0, ""),
    "big-endian": (stored_as(dtype=">i8"), 0, ""),
    "big-endian chunks": (stored_as(dtype=">u4", chunks=(7, 24)), 0, ""),
    "user block": (stored_as(), 1024, ""),
    "user block and chunks": (stored_as(chunks=(7, 24), dtype="<i8"), 512, ""),
    "gzip": (stored_as(chunks=(7, 24), compression="gzip"), 0, "it is compressed or filtered"),
    "gzip, big-endian": (stored_as(chunks=(7, 24), compression="gzip", dtype=">i4"), 0, "it is compressed or filtered"),
    "checksums": (stored_as(chunks=(7, 24), fletcher32=True), 0, "it is compressed or filtered"),
    "parts of records": (stored_as(chunks=(7, 5)), 0, r"its chunks \(7, 5\) have parts of its rows \(24,\)"),
    "numbers of 20 bits": (of_twenty_bits, 0, "HDF5 has to convert its values"),
    "compact": (in_its_header, 0, "it has no place of its own in this file"),
    "partly written": (partly_written, 0, "some of its rows were never written"),
    "never written": (never_written, 0, "some of its rows were never written"),
}


@pytest.fixture(params=LAYOUTS)
def laid_out(request, tmp_path):
    """Return the path of a file with a dataset in one layout, its values, and the obstacle to reading it past HDF5."""
    write, user_block, obstacle = LAYOUTS[request.param]
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=user_block) as h5:
        write(h5)
    with h5py.File(tmp_path / "x.h5") as h5:
        return tmp_path / "x.h5", h5["ids"][:], obstacle


def test_each_layout_gives_the_values_that_hdf5_gives(laid_out):
    path, tokens, obstacle = laid_out
    open_reader = partial(zb_hdf5.open_reader, read_as=ReadAs(unwritten="fill"))
    for access in ("auto", "mmap", "pread", "h5py"):
        if obstacle and access in ("mmap", "pread"):
            is_refused(errors.BackendError, lambda access=access: open_reader(path, access=access), match=obstacle)
            continue
        with open_reader(path, access=access, batch_size=5) as reader:
            assert reader.access == ("h5py" if obstacle else access)
            np.testing.assert_array_equal(np.array(list(reader)).reshape(tokens.shape), tokens)
            records = np.array([39, 0, 17, 18, 7, 6])
            rows = np.empty((6, 24), reader.dtype)
            reader.read_records_into(records, rows)
            np.testing.assert_array_equal(rows, tokens[records])
        options = {"shuffle": "records", "seed": 3, "batch_size": 8, "read_as": ReadAs(unwritten="fill")}
        with Loader(path, access=access, **options, **ONE_RANK) as loader:
            found = torch.cat(list(loader)).numpy()
        np.testing.assert_array_equal(found[np.lexsort(found.T)], tokens[np.lexsort(tokens.T)])


def test_info_says_whether_a_layout_is_read_past_hdf5(laid_out):
    path, _, obstacle = laid_out
    found = report_of_zb("info", path, "--unwritten", "fill")
    assert (found["past_hdf5"], found["access"]) == ((False, "h5py") if obstacle else (True, "auto"))
    assert (found["layout"] is None) is bool(obstacle)
    text = run_zb("info", path, "--unwritten", "fill").output
    if obstacle:
        assert re.search(obstacle, found["obstacle"])
        assert re.search(f"layout +read through h5py: {obstacle}", text)
    else:
        assert re.search(r"layout +\d+ runs?, first at byte .*: read past HDF5", text)


@pytest.mark.parametrize("how", [{}, {"chunks": (100,)}, {"chunks": (100,), "compression": "gzip"}])
@pytest.mark.parametrize("dtype", ["<u2", "<i4", ">i8"])
def test_a_stream_is_read_past_hdf5_up_to_its_last_token(how, dtype, tmp_path):
    tokens = (np.arange(957) * 37 % VOCABULARY).astype(dtype)
    path = written(tmp_path / "x.h5", np.pad(tokens, (0, 43)), **how)
    with h5py.File(path, "r+") as h5:
        h5["data"].attrs["token_count"] = 957
    with open_corpus(path) as stream:
        assert stream.access == ("h5py" if "compression" in how else "auto")
        np.testing.assert_array_equal(stream.tokens[0:957], tokens)
        np.testing.assert_array_equal(stream.tokens[90:310], tokens[90:310])
        np.testing.assert_array_equal(stream.tokens[950:958], tokens[950:])
    with Loader(path, batch_size=2, seq_len=31, shuffle="sequential", last="short", **ONE_RANK) as loader:
        rows = torch.cat(list(loader)).numpy()
    np.testing.assert_array_equal(rows, tokens[: 30 * 31].reshape(30, 31))


def test_a_file_cut_short_is_an_error_in_each_layout(tmp_path):
    path = written(tmp_path / "x.h5", RECORDS.astype("<u4"))
    with open_reader(path, batch_size=5) as reader:
        os.truncate(path, path.stat().st_size - 100)
        is_refused(errors.IncompleteError, lambda: reader.read_into(7, np.empty((5, 24), "<u4")), match="cut short")
    is_refused(errors.IncompleteError, lambda: open_reader(path), match="truncated")


@pytest.mark.parametrize("libver", ["earliest", "v108", "latest"])
@pytest.mark.parametrize("userblock_size", [0, 2048])
def test_bytes_behind_the_end_of_a_file_are_left_out_with_a_note(libver, userblock_size, tmp_path, capfd):
    """HDF5 reads such a file: of two in one it reads the first."""
    path, whole = tmp_path / "x.h5", tmp_path / "whole.h5"
    for each in (path, whole):
        with h5py.File(each, "w", libver=libver, userblock_size=userblock_size) as h5:
            h5["data"] = RECORDS.astype("<u4")
            h5.attrs["long"] = "x" * 5000
    path.write_bytes(path.read_bytes() * 2)
    for _ in range(2):
        for each in (path, whole):
            np.testing.assert_array_equal(batches_of(each).reshape(-1, 24), RECORDS)
    convert(path, "hdf5", tmp_path / "out", batch_size=4, workers=1)
    size = whole.stat().st_size
    notes = f"note: {path}: left out: {size:,} bytes behind its end, which is {size:,} as its superblock has it"
    assert capfd.readouterr().err.splitlines() == [notes]


def test_a_file_whose_writer_was_killed_in_swmr_mode_has_no_end_yet(tmp_path, capfd):
    path = tmp_path / "x.h5"

    def write():
        h5 = h5py.File(path, "w", libver="latest")
        stored = h5.create_dataset("data", shape=(0, 24), maxshape=(None, 24), chunks=(8, 24), dtype="u2")
        h5.swmr_mode = True
        stored.resize(40, axis=0)
        stored[:] = RECORDS
        stored.flush()

    killed_after(write)
    np.testing.assert_array_equal(batches_of(path).reshape(-1, 24), RECORDS)
    assert capfd.readouterr().err == ""


# --- fields beside the tokens ---------------------------------------------------------------------------------------
MASK = RECORDS % 3 > 0
VALUES = {
    "attention_mask": MASK.astype("<i8"),
    "labels": np.where(MASK, RECORDS, -100).astype(">i4"),
    "position_ids": np.broadcast_to(np.arange(24), RECORDS.shape).astype("u1"),
    "weight": (RECORDS / 7).astype("<f4"),
    "loss_mask": MASK,
}
#: The shape of the tokens, and the arguments that give it that of five records.
WITH_FIELDS = {"records": (40, 24), "batches": (8, 5, 24), "stream": (960,)}


@pytest.fixture(params=[{}, {"chunks": True}, {"compression": "gzip"}], ids=["contiguous", "chunks", "gzip"])
def how(request):
    return request.param


@pytest.fixture(params=WITH_FIELDS)
def beside(request, how, tmp_path):
    """Return the path of a file with tokens and fields of the same shape, and the arguments for five records."""
    shape = WITH_FIELDS[request.param]
    chunks = {"chunks": (5, *shape[1:])} if how == {"chunks": True} else how
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5.create_dataset("data/input_ids", data=RECORDS.reshape(shape).astype("<i8"), **chunks)
        for name, values in VALUES.items():
            h5.create_dataset(f"data/{name}", data=values.reshape(shape), **chunks)
        h5["data/lengths"] = np.zeros(40)
        h5["data/spans"] = np.zeros(shape)  # a loader has spans of its own
        h5["data/text"] = np.zeros(shape, "S3")
    given = {"batch_size": 5} | ({"seq_len": 24} if request.param == "stream" else {})
    return tmp_path / "x.h5", {} if request.param == "batches" else given


def test_datasets_of_the_same_shape_are_fields(beside):
    path, shape = beside
    with open_reader(path, **shape) as reader:
        assert reader.meta.fields == parse_fields({name: each.dtype.newbyteorder("=") for name, each in VALUES.items()})
        np.testing.assert_array_equal(np.array(list(reader)).reshape(40, 24), RECORDS)
        for name, values in VALUES.items():
            found = np.array(list(reader.field(name)))
            assert found.dtype.isnative
            np.testing.assert_array_equal(found.reshape(40, 24), values)
    with Loader(path, fields=tuple(VALUES), shuffle="records", seed=2, **shape, **ONE_RANK) as loader:
        for step in loader:
            numbers = [int(np.flatnonzero((row == RECORDS).all(axis=1))[0]) for row in step["tokens"].numpy()]
            for name, values in VALUES.items():
                np.testing.assert_array_equal(step[name].numpy(), values[numbers])
    found = report_of_zb("info", path)
    assert list(found["fields"]) == sorted(VALUES)
    assert found["dataset"] == "data/input_ids"


def test_their_labels_are_the_targets_in_place(beside):
    path, shape = beside
    with Loader(path, targets=True, shuffle="sequential", **shape, **ONE_RANK) as loader:
        targets = torch.cat([y for _, y in loader]).numpy()
    expected = VALUES["labels"].reshape(-1)
    if "seq_len" in shape:
        np.testing.assert_array_equal(targets.reshape(-1), expected[1 : targets.size + 1])
    else:
        np.testing.assert_array_equal(targets, expected.reshape(40, 24)[:, 1:])


def test_tokens_have_to_be_named_where_fields_do_not_fit(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        for name in ("train", "val"):
            h5[f"{name}/input_ids"] = RECORDS
            h5[f"{name}/labels"] = RECORDS
    is_refused(errors.FormatError, lambda: open_reader(tmp_path / "x.h5"), match="pass dataset= .*train/input_ids")
    with open_reader(tmp_path / "x.h5", read_as=ReadAs(dataset="val/input_ids"), batch_size=5) as reader:
        assert [field.name for field in reader.meta.fields] == ["labels"]
    with h5py.File(tmp_path / "x.h5", "r+") as h5:
        del h5["val"]
        h5["train/other"] = np.zeros(3, "i4")
    is_refused(errors.FormatError, lambda: open_reader(tmp_path / "x.h5"), match="pass dataset= .*train/other")
    with h5py.File(tmp_path / "x.h5", "r+") as h5:
        del h5["train/other"]
        h5["train/token_ids"] = RECORDS
    is_refused(errors.FormatError, lambda: open_reader(tmp_path / "x.h5"), match="pass dataset= .*train/token_ids")


def test_a_field_that_leads_out_of_the_file_is_left_out(tmp_path):
    for name in ("x.h5", "other.h5"):
        with h5py.File(tmp_path / name, "w") as h5:
            h5["input_ids"] = RECORDS
            h5["labels"] = RECORDS
    with h5py.File(tmp_path / "x.h5", "r+") as h5:
        h5["elsewhere"] = h5py.ExternalLink("other.h5", "labels")
        h5["again"] = h5py.SoftLink("/labels")
    with open_reader(tmp_path / "x.h5") as reader:
        assert [field.name for field in reader.meta.fields] == ["labels"]


# --- channels ---------------------------------------------------------------------------------------------------------
CHANNELS = {"channel": 0, "field_channels": {"loss_mask": 1, "labels": 2}}
AS_CHANNELS = ("--channel", 0, "--field-channel", "loss_mask=1", "--field-channel", "labels=2")


@pytest.fixture
def zoo(how, tmp_path):
    """Return a file of ids, masks and labels, 100 of (3, 32), and its items."""
    items = model_zoo()
    chunks = {"chunks": (7, 3, 32)} if how == {"chunks": True} else how
    with h5py.File(tmp_path / "zoo.h5", "w") as h5:
        h5.create_dataset("data", data=items, **chunks)
    return tmp_path / "zoo.h5", items


@pytest.mark.parametrize("access", ["auto", "h5py"])
def test_channels_are_tokens_and_their_fields(access, zoo):
    path, items = zoo
    with open_reader(path, batch_size=10, access=access, read_as=ReadAs(**CHANNELS)) as reader:
        assert reader.meta.fields == parse_fields({"loss_mask": "i4", "labels": "i4"})
        np.testing.assert_array_equal(np.concatenate(list(reader)), items[:, 0])
        assert (reader.num_batches, reader.batch_size, reader.seq_len) == (10, 10, 32)
        for name, number in CHANNELS["field_channels"].items():
            np.testing.assert_array_equal(np.concatenate(list(reader.field(name))), items[:, number])
        copy = pickle.loads(pickle.dumps(reader))
        np.testing.assert_array_equal(copy.field("labels")[9], items[90:, 2])
        copy.close()


def test_the_labels_of_channels_are_targets_as_they_lie(zoo):
    path, items = zoo
    how = {"batch_size": 7, "shuffle": "records", "seed": 1, "targets": True, "last": "fill"}
    with Loader(path, **how, read_as=ReadAs(**CHANNELS), **ONE_RANK) as loader:
        assert len(loader) == 15
        for x, y in loader:
            numbers = [int(np.flatnonzero((row == items[:, 0, :-1]).all(axis=1))[0]) for row in x.numpy()]
            expected = np.where(items[numbers, 1] == 1, items[numbers, 2], -100)
            np.testing.assert_array_equal(y.numpy(), expected[:, :-1])


def test_channels_of_the_command_line(zoo):
    path, items = zoo
    found = report_of_zb("info", path, *AS_CHANNELS)
    assert (found["num_batches"], found["seq_len"], sorted(found["fields"])) == (100, 32, ["labels", "loss_mask"])
    rows = report_of_zb("show", path, *AS_CHANNELS, "--all", "--batch", 0)["rows"]
    assert rows[0]["parts"][0]["tokens"] == items[0, 0].tolist()
    assert report_of_zb("verify", path, *AS_CHANNELS, code=6)
    for words, message in (
        (("--channel", 0, "--field-channel", "labels"), "'labels' is not a channel of a field: expected NAME=N"),
        (("--field-channel", "labels=1"), "--field-channel needs --channel"),
        (("--channel", 0, "--axes", AXES), "pass either --axes or --channel"),
        (("--channel", 0, "--field-channel", "m=0"), "--field-channel must be entries of their own, found 'm' in 0"),
    ):
        result = run_zb("info", path, *words)
        assert (result.exit_code > 0, message in result.output) == (True, True), result.output
    result = run_zb("info", path, "--channel", 0, "--field-channel", "labels=1", "--field-channel", "labels=2")
    assert "labels has a channel already: 1" in one_error_of_usage(result)


def test_a_mask_without_its_labels_is_a_warning(tmp_path):
    path = written(tmp_path / "x.h5", model_zoo())
    mask = ReadAs(channel=0, field_channels={"loss_mask": 1})
    with pytest.warns(UserWarning, match="channel 1 is taken as the loss_mask .*off by one token.* labels too"):
        open_reader(path, read_as=mask).close()
    result = run_zb("info", path, "--channel", 0, "--field-channel", "loss_mask=1")
    assert result.exit_code == 0
    assert result.stderr.startswith("note: channel 1 is taken as the loss_mask")


def test_channels_that_a_file_lacks_are_refused(tmp_path, write_file):
    path = written(tmp_path / "x.h5", model_zoo())
    with h5py.File(tmp_path / "flat.h5", "w") as h5:
        h5["ids"] = np.arange(100)
    own = write_file(tmp_path / "own.h5", random_tokens(8, 3, 32)).path
    batch = write_file(tmp_path / "own.batch", random_tokens(8, 3, 32)).path
    for error, message, where, how in (
        (errors.FormatError, "channel=3: expected a channel in 0..2", path, {"channel": 3}),
        (errors.FormatError, "labels=4: expected .* 0..2", path, {"channel": 0, "field_channels": {"labels": 4}}),
        (
            errors.FormatError,
            r"channel=0 needs a dataset of three axes, found \(100,\)",
            tmp_path / "flat.h5",
            {"channel": 0},
        ),
        (errors.ArgumentError, "channel=0 needs a dataset of three axes", own, {"channel": 0}),
        (errors.BackendError, "channel=0 needs an HDF5 file, found a 'batch' file", batch, {"channel": 0}),
        (errors.ArgumentError, "field_channels needs channel", path, {"field_channels": {"labels": 2}}),
        (errors.ArgumentError, "names and their channels, found 2", path, {"channel": 0, "field_channels": 2}),
        (errors.ArgumentError, "whole numbers from 0 on, found -1", path, {"channel": -1}),
        (
            errors.ArgumentError,
            "whole numbers from 0 on, found 'a'",
            path,
            {"channel": 0, "field_channels": {"x": "a"}},
        ),
        (errors.ArgumentError, "expected a name of letters", path, {"channel": 0, "field_channels": {"spans": 1}}),
    ):
        is_refused(error, lambda where=where, how=how: open_reader(where, **reading(how)), match=message)
