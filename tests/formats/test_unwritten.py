"""Rows of HDF5 files of other programs that nobody has written: named and refused, filled, or left out, never ids."""

import pickle
import shlex
from itertools import product

import h5py
import numpy as np
import pytest
from commandline import one_error, report_of, run_zb
from contents import batches_of
from contract import is_refused
from reading import reading

from zb_hdf5 import ArgumentError, FormatError, Loader, ReadAs, convert, open_corpus, open_reader, write_digests
from zb_hdf5.commands.zb import zb
from zb_hdf5.hdf5.written_rows import rows_in_both, runs_between

ALONE = {"rank": 0, "world_size": 1}
#: Rows, and those of them that are written; a chunk has 8.
ROWS = 64
WRITTEN = {"the first": [(0, 40)], "some": [(8, 16), (24, 40)], "none": []}
#: The chunks of a dataset with rows of (2, 6) or 6 tokens, and other options of it.
LAYOUTS = {
    "chunks": {"chunks": 8},
    "a chunk for each row": {"chunks": 1},
    "parts of rows": {"chunks": 8, "part": 4},
    "gzip": {"chunks": 8, "compression": "gzip", "shuffle": True},
    "lzf and a fill value": {"chunks": 8, "compression": "lzf", "fillvalue": 7},
    "a fill value": {"chunks": 8, "fillvalue": 7},
    "contiguous": {"chunks": 0, "fillvalue": 7},
}
CASES = [
    (layout, written)
    for layout, written in product(LAYOUTS, WRITTEN)
    if LAYOUTS[layout]["chunks"] or written == "none"  # a contiguous dataset is written as a whole
]


def rows_of(shape):
    return 1 + np.arange(np.prod(shape)).reshape(shape) % 60_000


def make(path, layout, written, *rest, name="ids"):
    """Write a dataset as a program does that makes it at once; return its values, as HDF5 has them."""
    how = dict(LAYOUTS[layout])
    chunk_rows = how.pop("chunks")
    part = how.pop("part", None)
    if chunk_rows:
        how["chunks"] = (chunk_rows, *rest[:-1], *([part or rest[-1]] if rest else []))
    with h5py.File(path, "a") as h5:
        stored = h5.create_dataset(name, (ROWS, *rest), "<u2", maxshape=(None, *rest) if chunk_rows else None, **how)
        for first, stop in WRITTEN[written]:
            stored[first:stop] = rows_of(stored.shape)[first:stop]
        if chunk_rows:
            stored.resize(ROWS - 8, 0)
            stored.resize(ROWS, 0)  # twice: what was cut off is not there again
        return stored[:]


def kept_in(tokens, written):
    return np.concatenate([tokens[first:stop] for first, stop in WRITTEN[written]] or [tokens[:0]])


@pytest.mark.parametrize("access", ["auto", "h5py"])
@pytest.mark.parametrize("rest", [(6,), (2, 6)], ids=["2-D", "3-D"])
@pytest.mark.parametrize(("layout", "written"), CASES)
def test_rows_that_were_never_written_are_refused_filled_or_left_out(layout, written, rest, access, tmp_path):
    path = tmp_path / "x.h5"
    tokens = make(path, layout, written, *rest)
    how = {"access": access} | ({"axes": "batch,record,token"} if len(rest) == 2 else {})
    gaps = {"the first": "40 to 63", "some": "0 to 7, 16 to 23, 40 to 63", "none": "0 to 63"}[written]
    with pytest.raises(
        FormatError, match=rf"x\.h5: ids: .* rows {gaps} were never written; pass unwritten='drop' to ReadAs"
    ):
        open_reader(path, **reading(how))
    with open_reader(path, **reading({**how, "unwritten": "fill"})) as reader:
        np.testing.assert_array_equal(np.array(list(reader)).reshape(tokens.shape), tokens)
    with open_reader(path, **reading({**how, "unwritten": "drop"})) as reader:
        found = np.array(list(reader)).reshape(-1, *rest)
        np.testing.assert_array_equal(found, kept_in(tokens, written))
    if written == "none":
        return
    shape = {"batch_size": 4, "shuffle": False, "workers": 1}
    del how["access"]
    with pytest.raises(FormatError, match=f"rows {gaps} were never written"):
        convert(path, "hdf5", tmp_path / "refused", **shape, **how)
    for unwritten, expected in (("fill", tokens), ("drop", kept_in(tokens, written))):
        convert(path, "hdf5", tmp_path / unwritten, unwritten=unwritten, **shape, **how)
        np.testing.assert_array_equal(batches_of(tmp_path / unwritten).reshape(-1, *rest), expected)


@pytest.mark.parametrize("access", ["auto", "h5py"])
@pytest.mark.parametrize(("layout", "written"), [case for case in CASES if "part" not in LAYOUTS[case[0]]])
def test_a_stream_ends_before_its_tail_and_refuses_other_gaps(layout, written, access, tmp_path, capfd):
    path = tmp_path / "x.h5"
    tokens = make(path, layout, written)
    if written == "the first":
        with open_corpus(path, access=access) as stream:
            np.testing.assert_array_equal(stream.tokens[0:40], tokens[:40])
            assert stream.num_tokens == 40
            assert stream.access == ("auto" if access == "auto" and "compression" not in LAYOUTS[layout] else "h5py")
        assert f"note: {path}: ids: tokens 40 to 63 were never written: the stream ends" in capfd.readouterr().err
        convert(path, "hdf5", tmp_path / "out", batch_size=1, seq_len=8, shuffle=False, workers=1)
        np.testing.assert_array_equal(batches_of(tmp_path / "out").reshape(-1), tokens[:40])
    else:
        is_refused(FormatError, lambda: open_corpus(path, access=access), match="tokens .* were never written; pass")
    for unwritten, expected in (("fill", tokens), ("drop", kept_in(tokens, written))):
        with open_corpus(path, access=access, read_as=ReadAs(unwritten=unwritten)) as stream:
            np.testing.assert_array_equal(stream.tokens[0 : len(expected)], expected)
            assert stream.num_tokens == len(expected)


def test_a_field_that_was_not_written_counts_too(tmp_path):
    path = tmp_path / "x.h5"
    tokens = make(path, "chunks", "the first", 6, name="input_ids")
    mask = make(path, "gzip", "some", 6, name="loss_mask")
    is_refused(FormatError, lambda: open_reader(path), match="input_ids: .* rows 40 to 63 were never written")
    both = np.r_[8:16, 24:40]
    for unwritten, rows in (("fill", np.arange(ROWS)), ("drop", both)):
        with open_reader(path, read_as=ReadAs(unwritten=unwritten)) as reader:
            np.testing.assert_array_equal(np.array(list(reader))[:, 0], tokens[rows])
            np.testing.assert_array_equal(np.array(list(reader.field("loss_mask")))[:, 0], mask[rows])
    with h5py.File(path, "r+") as h5:
        h5["input_ids"][:] = rows_of((ROWS, 6))
    is_refused(FormatError, lambda: open_reader(path), match="loss_mask: .* rows 0 to 7, 16 to 23, 40 to 63 were never")


def test_a_channel_is_looked_at_by_itself(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        stored = h5.create_dataset("data", (16, 3, 8), "<u2", chunks=(4, 1, 8))
        stored[:, 0] = rows_of((16, 8))
        stored[:8, 1] = 1
    with open_reader(tmp_path / "x.h5", read_as=ReadAs(channel=0)) as reader:
        np.testing.assert_array_equal(np.array(list(reader))[:, 0], rows_of((16, 8)))
    mask = {"channel": 0, "field_channels": {"labels": 1}}
    is_refused(
        FormatError, lambda: open_reader(tmp_path / "x.h5", **reading(mask)), match="rows 8 to 15 were never written"
    )
    with open_reader(tmp_path / "x.h5", **reading({**mask, "unwritten": "drop"})) as reader:
        assert (len(reader), len(reader.field("labels"))) == (8, 8)


def test_a_copy_in_another_process_reads_the_same_rows(tmp_path):
    path = tmp_path / "x.h5"
    tokens = make(path, "gzip", "some")
    make(path, "chunks", "some", name="loss_mask")
    windows = reading({"dataset": "ids", "unwritten": "drop", "batch_size": 2, "seq_len": 4})
    with (
        open_reader(path, **windows) as reader,
        pickle.loads(pickle.dumps(reader)) as copy,
    ):
        for each in (reader, copy):
            np.testing.assert_array_equal(np.array(list(each)).reshape(-1), kept_in(tokens, "some"))
            np.testing.assert_array_equal(np.array(list(each.field("loss_mask"))).reshape(-1), kept_in(tokens, "some"))


def test_fields_of_files_of_a_folder_leave_out_the_same_rows(tmp_path):
    for name in ("some", "the first"):
        make(tmp_path / f"{name}.h5", "chunks", name, 6, name="input_ids")
        make(tmp_path / f"{name}.h5", "gzip", name, 6, name="loss_mask")
    rows = np.r_[8:16, 24:40, 0:40]
    with open_reader(tmp_path, read_as=ReadAs(unwritten="drop")) as reader:
        for each in (reader, reader.field("loss_mask")):
            np.testing.assert_array_equal(np.array(list(each))[:, 0], rows_of((ROWS, 6))[rows])


def test_files_of_a_folder_each_leave_out_their_rows(tmp_path):
    expected = [kept_in(make(tmp_path / f"{name}.h5", "chunks", name, 6), name) for name in ("some", "the first")]
    is_refused(FormatError, lambda: open_reader(tmp_path), match=r"some\.h5: ids: .* were never written")
    with Loader(tmp_path, read_as=ReadAs(unwritten="drop"), batch_size=1, shuffle="sequential", **ALONE) as loader:
        np.testing.assert_array_equal([step.numpy()[0] for step in loader], np.concatenate(expected))
        state = loader.state_dict()
    with Loader(tmp_path, read_as=ReadAs(unwritten="drop"), batch_size=1, shuffle="sequential", **ALONE) as loader:
        loader.load_state_dict(state)
    digests = tmp_path / "digests.json"
    write_digests(tmp_path, digests, read_as=ReadAs(unwritten="drop"))
    with open_reader(tmp_path, read_as=ReadAs(unwritten="drop", digests=digests), verify="batch") as reader:
        np.testing.assert_array_equal(np.array(list(reader))[:, 0], np.concatenate(expected))
    assert run_zb("verify", tmp_path, "--digests", digests).exit_code == 0


def test_the_message_of_a_command_ends_in_the_option_to_type(tmp_path):
    path = tmp_path / "x.h5"
    make(path, "a fill value", "some", 6)
    convert = ("convert", "hdf5-to-hdf5", path, tmp_path / "out", "--batch-size", 4)
    for command in (("info", path), ("show", path), convert):
        message = one_error(run_zb(*command), 1)
        assert "rows 0 to 7, 16 to 23, 40 to 63 were never written; pass --unwritten drop to leave" in message
        assert message.endswith("or --unwritten fill to take the fill value 7 for them")
        for option in ("--unwritten drop", "--unwritten fill"):
            done = run_zb(*command, *shlex.split(option), *(["--force"] if command[0] == "convert" else []))
            assert done.exit_code == 0, done.output
    assert report_of(zb, "info", path, "--unwritten", "drop")["num_batches"] == 24


def test_files_that_are_whole_take_the_option_and_others_refuse_it(tmp_path, write_file, tokens):
    make(tmp_path / "x.h5", "chunks", "none", 6)
    with h5py.File(tmp_path / "x.h5", "r+") as h5:
        h5["ids"][:] = rows_of((ROWS, 6))
    prints = {
        open_reader(tmp_path / "x.h5", read_as=ReadAs(unwritten=each)).fingerprint for each in (None, "fill", "drop")
    }
    assert len(prints) == 1
    is_refused(
        ArgumentError,
        lambda: open_reader(tmp_path / "x.h5", read_as=ReadAs(unwritten="zero")),
        match="'fill' or 'drop'",
    )
    write_file(tmp_path / "own.h5", tokens)
    is_refused(
        ArgumentError,
        lambda: open_reader(tmp_path / "own.h5", read_as=ReadAs(unwritten="fill")),
        match="another program",
    )


def test_documents_whose_values_were_never_written_are_refused_or_filled(tmp_path):
    with h5py.File(tmp_path / "values.h5", "w") as h5:
        stored = h5.create_dataset("values", (64,), "<i4", chunks=(8,))
        stored[:8] = stored[40:] = 5
        h5["offsets"] = [0, 10, 64]
    with h5py.File(tmp_path / "lists.h5", "w") as h5:
        stored = h5.create_dataset("lists", (16,), h5py.vlen_dtype(np.dtype("<i4")), chunks=(4,))
        stored[0] = [1, 2, 3]
    with h5py.File(tmp_path / "datasets.h5", "w") as h5:
        h5["docs/0"] = np.arange(9)
        h5.create_dataset("docs/1", (64,), "<i8", chunks=(8,))
    shape = {"workers": 1, "source_format": "ragged"}
    for name, gap in (("values", "8 to 39"), ("lists", "4 to 15"), ("datasets", "0 to 63")):
        path = tmp_path / f"{name}.h5"
        with pytest.raises(FormatError, match=f"{gap} were never written; pass unwritten='fill'"):
            convert(path, "stream", tmp_path / f"{name}-out", **shape)
        convert(path, "stream", tmp_path / f"{name}-out", unwritten="fill", force=True, **shape)
        is_refused(ArgumentError, lambda path=path: convert(path, "stream", tmp_path / "y", unwritten="drop", **shape))
    with open_corpus(tmp_path / "values-out") as stream:
        np.testing.assert_array_equal(stream.tokens[0:64], [5] * 8 + [0] * 32 + [5] * 24)


def test_runs_of_rows():
    assert rows_in_both(None, ((1, 5),)) == ((1, 5),)
    assert rows_in_both(((0, 4), (6, 9), (12, 20)), ((2, 7), (8, 13), (19, 30))) == (
        (2, 4),
        (6, 7),
        (8, 9),
        (12, 13),
        (19, 20),
    )
    runs = ((2, 4), (6, 9), (12, 13))
    rows = [2, 3, 6, 7, 8, 12]
    for first in range(6):
        for stop in range(first, 7):
            found = [row for run in runs_between(runs, [2, 5, 6], first, stop) for row in range(*run)]
            assert found == rows[first:stop]
