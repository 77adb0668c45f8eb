"""Folders of HDF5 files of other programs, read in place: the same as one file with all of their rows."""

import itertools
import json
import os
import pickle
import shutil

import h5py
import numpy as np
import pytest
import torch
from commandline import one_error, report_of, run_zb
from contents import label_batches
from contract import is_refused, random_tokens, require_equal, steps_of
from damage import flip
from reading import reading

from zb_hdf5 import (
    DocumentLoader,
    Loader,
    MmapTokenStore,
    ReadAs,
    convert,
    errors,
    open_corpus,
    open_reader,
    verify_store,
    write_digests,
)
from zb_hdf5.commands.zb import zb
from zb_hdf5.files.look import Look
from zb_hdf5.store.digests import Digests
from zb_hdf5.store.format_list import FOREIGN, FORMATS, HDF5, load_format
from zb_hdf5.store.shard_report import Outcome

ONE_RANK = {"rank": 0, "world_size": 1}
AXES = "batch,record,token"
#: Each order, with other values of a step.
ORDERS = {
    "global": {},
    "records": {"fields": ("loss_mask", "weight")},
    "block": {"targets": True, "last": "masked"},
    "sequential": {"targets": True, "fields": ("weight",), "last": "short"},
}
#: Records of all files, and where the files are cut.
IDS = (random_tokens(1, 103, 24)[0] % 50_257).astype("<i4")
CUTS = [40, 48]
#: The datasets beside the ids.
BESIDE = {"loss_mask": (IDS % 3 > 0).astype("u1"), "weight": (IDS / 7).astype(">f4")}
#: Kind -> the axes of a row, rows of records that make it, and the shape of the batches of a loader.
KINDS = {
    "stream": ((), 24, {"batch_size": 4, "seq_len": 31}),
    "records": ((24,), 1, {"batch_size": 8}),
    "batches": ((2, 24), 1 / 2, {}),
}
#: How the datasets are stored; chunks of a stream have the rows of two records.
LAYOUTS = {"contiguous": {}, "chunks": {"chunks": True}, "gzip": {"compression": "gzip"}}


def write_file(path, rows, beside=None, name="data/input_ids", how=None, has_labels=False):
    """Write the rows of a dataset, labels of its axes, and the rows of the datasets beside it."""
    options = dict(how or {})
    if options.get("chunks"):
        options["chunks"] = (min(len(rows), 48 if rows.ndim == 1 else 3), *rows.shape[1:])
    with h5py.File(path, "w") as h5:
        stored = h5.create_dataset(name, data=rows, **options)
        if has_labels:
            label_batches(stored)
        for each, values in (beside or {}).items():
            h5.create_dataset(f"{name.rpartition('/')[0]}/{each}", data=values, **options)
    return path


def write_both(tmp_path, kind="records", how=None, ids=IDS, beside=None):
    """Write a folder of three files, and one file of all their rows; return both, and the rows."""
    axes = KINDS[kind][0]
    whole = 102 // (2 if kind == "batches" else 1)
    rows = ids[:102].reshape(-1, *axes) if axes else ids[:102].reshape(-1)
    values = {name: each[:102].reshape(rows.shape) for name, each in (beside or {}).items()}
    cuts = [cut * len(rows) // whole // (2 if kind == "batches" else 1) for cut in CUTS]
    folder = tmp_path / "corpus"
    folder.mkdir(parents=True)
    edges = [0, *cuts, len(rows)]
    has_labels = kind == "batches"
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        part = {name: each[start:stop] for name, each in values.items()}
        write_file(
            folder / f"part-{number}.{('h5', 'hdf5', 'h5')[number]}",
            rows[start:stop],
            part,
            how=how,
            has_labels=has_labels,
        )
    return folder, write_file(tmp_path / "one.h5", rows, values, how=how, has_labels=has_labels), rows


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=LAYOUTS)
def how(request):
    return LAYOUTS[request.param]


# --- the same as one file ---------------------------------------------------------------------------------------------
def test_a_folder_gives_the_steps_of_one_file_with_its_rows(kind, how, tmp_path):
    folder, one, rows = write_both(tmp_path, kind, how, beside=BESIDE)
    shape = KINDS[kind][2]
    for shuffle, more in ORDERS.items():
        options = {**shape, "shuffle": shuffle, "seed": 3, **more}
        require_equal(steps_of(folder, **options), steps_of(one, **options))
    with open_reader(folder, **shape) as reader, open_reader(one, **shape) as same:
        assert (reader.corpus.layout, reader.meta.shape, reader.num_records) == (
            same.corpus.layout,
            same.meta.shape,
            same.num_records,
        )
        assert reader.meta.fields == same.meta.fields
        assert reader.access == ("h5py" if how.get("compression") else "auto")
        np.testing.assert_array_equal(reader.tokens[0 : rows.size], rows.reshape(-1))
        np.testing.assert_array_equal(reader.field("weight").tokens[900:1200], BESIDE["weight"].reshape(-1)[900:1200])


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i8", ">i4"])
def test_integers_of_any_dtype_are_read(dtype, kind, tmp_path):
    folder, one, _ = write_both(tmp_path, kind, ids=IDS.astype(dtype))
    shape = KINDS[kind][2]
    for access in ("auto", "mmap", "pread", "h5py"):
        options = {**shape, "access": access, "shuffle": "records"}
        require_equal(steps_of(folder, **options), steps_of(one, **options))


def test_a_state_is_exact_on_other_ranks(kind, tmp_path):
    folder, one, _ = write_both(tmp_path, kind)
    options = {**KINDS[kind][2], "seed": 5, "shuffle": "records", "batch_size": 2}
    states, rest = [], []
    for path in (folder, one):
        with Loader(path, **options, **ONE_RANK) as loader:
            for _ in range(4):
                next(loader)
            states.append(json.loads(json.dumps(loader.state_dict())))
            rest.append(torch.cat([next(loader) for _ in range(6)]))
    assert torch.equal(*rest)
    ranks = []
    for rank in range(2):
        with Loader(folder, **options, rank=rank, world_size=2) as loader:
            loader.load_state_dict(states[0])
            ranks.append([next(loader) for _ in range(3)])
    assert torch.equal(torch.cat([part for step in zip(*ranks, strict=True) for part in step]), rest[0])
    moved = folder.rename(tmp_path / "moved")
    with Loader(moved, **options, **ONE_RANK) as loader:
        loader.load_state_dict(states[0])
        assert torch.equal(torch.cat([next(loader) for _ in range(6)]), rest[0])


def test_a_state_of_another_batch_size_of_whole_batches_fits_the_records(tmp_path):
    folder, _, _ = write_both(tmp_path)
    with Loader(folder, batch_size=4, **ONE_RANK) as loader:
        next(loader)
        state = loader.state_dict()
        expected = next(loader)
    with Loader(folder, batch_size=2, **ONE_RANK) as loader:
        loader.load_state_dict(state)
        assert torch.equal(torch.cat([next(loader), next(loader)]), expected)


def test_readers_are_pickled_and_read_in_other_processes(kind, how, tmp_path):
    folder, one, rows = write_both(tmp_path, kind, how, beside=BESIDE)
    shape = KINDS[kind][2]
    with open_reader(folder, **shape) as reader, open_reader(one, **shape) as same:
        reader.read_batch(0)
        with pickle.loads(pickle.dumps(reader)) as copied:
            np.testing.assert_array_equal(np.array(list(copied)), np.array(list(same)))
            assert copied.fingerprint == reader.fingerprint
            np.testing.assert_array_equal(copied.field("loss_mask")[1], same.field("loss_mask")[1])
        child = os.fork()
        if not child:
            os._exit(0 if np.array_equal(reader.tokens[0 : rows.size], rows.reshape(-1)) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_folder_of_one_file_is_that_file(kind, tmp_path):
    _, one, _ = write_both(tmp_path, kind)
    (tmp_path / "alone").mkdir()
    shutil.move(one, tmp_path / "alone" / "one.h5")
    shape = KINDS[kind][2]
    with Loader(tmp_path / "alone" / "one.h5", **shape, **ONE_RANK) as loader:
        next(loader)
        state = loader.state_dict()
        rest = next(loader)
    with Loader(tmp_path / "alone", **shape, **ONE_RANK) as loader:
        loader.load_state_dict(state)
        assert torch.equal(next(loader), rest)


def test_a_stream_ends_at_the_last_token_of_each_file(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number, part in enumerate(np.split(IDS.reshape(-1), [1000, 1010])):
        path = write_file(tmp_path / "corpus" / f"{number}.h5", np.pad(part, (0, 7)))
        with h5py.File(path, "r+") as h5:
            h5["data/input_ids"].attrs["token_count"] = len(part)
    with open_corpus(tmp_path / "corpus") as stream:
        np.testing.assert_array_equal(stream.tokens[0 : len(stream)], IDS.reshape(-1))


def test_batches_are_kept_in_a_cache(kind, tmp_path):
    folder, _, _ = write_both(tmp_path, kind)
    shape = KINDS[kind][2]
    plain = steps_of(folder, **shape)
    for _ in range(2):
        require_equal(steps_of(folder, cache=tmp_path / "cache", **shape), plain)


def test_streams_are_streams_and_records_are_none(tmp_path):
    folder, _, rows = write_both(tmp_path / "a", "stream")
    with open_corpus(folder) as stream:
        np.testing.assert_array_equal(stream.tokens[900:1300], rows[900:1300])
        assert (len(stream.files), stream.document_count, stream.refresh()) == (3, 3, len(rows))
    records, _, _ = write_both(tmp_path / "b")
    is_refused(errors.FormatError, lambda: MmapTokenStore(records), match="expected a token stream, found batches")
    with open_reader(records) as reader:
        is_refused(errors.ArgumentError, lambda: DocumentLoader(reader, collate="pad", batch_size=2, **ONE_RANK))
        is_refused(errors.BackendError, lambda: reader.read_batch_pieces(0), match="holds no documents")
    is_refused(errors.ArgumentError, lambda: open_reader(folder), match="pass batch_size and seq_len for windows")
    is_refused(errors.ArgumentError, lambda: open_reader(folder, split="val", batch_size=1, seq_len=9), match="split")
    many = {"batch_size": 200}
    is_refused(errors.ArgumentError, lambda: open_reader(records, **many), match="do not fill one batch of 200")


def test_a_dataset_and_its_channels_are_named_as_of_one_file(how, tmp_path):
    items = np.stack([IDS[:-1], IDS[:-1] % 2, IDS[1:]], axis=1)
    folder = tmp_path / "zoo"
    folder.mkdir()
    for number, part in enumerate(np.split(items, CUTS)):
        path = write_file(folder / f"{number}.h5", part, name="a/ids", how=how)
        with h5py.File(path, "r+") as h5:
            h5["b/other"] = np.arange(7)
    is_refused(errors.FormatError, lambda: open_reader(folder), match="0.h5: .*pass dataset= .*a/ids.*b/other")
    named = {"dataset": "a/ids", "channel": 0, "field_channels": {"loss_mask": 1, "labels": 2}}
    is_refused(
        errors.FormatError, lambda: open_reader(folder, read_as=ReadAs(dataset="a/ids")), match="expected records along"
    )
    with open_reader(folder, batch_size=10, read_as=ReadAs(**named)) as reader:
        assert reader.corpus.foreign_dataset == "a/ids"
        np.testing.assert_array_equal(np.concatenate(list(reader)), items[:100, 0])
        np.testing.assert_array_equal(np.concatenate(list(reader.field("labels"))), items[:100, 2])
        with pickle.loads(pickle.dumps(reader)) as copied:
            np.testing.assert_array_equal(copied.field("loss_mask")[4], items[40:50, 1])
    flags = ("--dataset", "a/ids", "--channel", 0, "--field-channel", "loss_mask=1", "--field-channel", "labels=2")
    assert report_of(zb, "info", folder, *flags)["fields"].keys() == {"labels", "loss_mask"}
    rows = report_of(zb, "show", folder, *flags, "--batch", 45, "--all")["rows"]
    assert rows[0]["parts"][0]["tokens"] == items[45, 0].tolist()


# --- commands ---------------------------------------------------------------------------------------------------------
def test_every_command_reads_a_folder(kind, tmp_path):
    folder, one, rows = write_both(tmp_path, kind)
    shape = KINDS[kind][2]
    flags = [text for name, value in shape.items() for text in (f"--{name.replace('_', '-')}", value)]
    found = report_of(zb, "info", folder)
    assert (found["tokens"], found["dataset"], found["num_files"]) == (rows.size, "data/input_ids", 3)
    assert (found["past_hdf5"], found["stored_dtype"], found["verified"]) == (True, "<i4", "none")
    text = run_zb("info", folder, code=0).output
    assert ("token stream in 3 files" if kind == "stream" else "hdf5 folder of 3 files, complete") in text
    stored = () if kind == "records" else flags
    mine, theirs = (report_of(zb, "show", path, "--batch", 3, "--all", *stored)["rows"] for path in (folder, one))
    assert [row["parts"][0]["tokens"] for row in mine] == [row["parts"][0]["tokens"] for row in theirs]
    assert report_of(zb, "report", folder, "-o", tmp_path / "r.html")["tokens"] == rows.size
    assert "problem" not in {each["state"] for each in report_of(zb, "doctor", folder)["findings"]}
    with Loader(folder, seed=3, **shape, **ONE_RANK) as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        batch = next(loader)
    of_step = ("which", folder, "--state", tmp_path / "state.json", "--step", 0, *(() if kind == "stream" else flags))
    places = report_of(zb, *of_step)["batches"][0]["rows"]
    found = {}
    for place in places:
        with h5py.File(place["shard"]) as h5:
            part = h5["data/input_ids"][:].reshape(-1)[place["start"] : place["stop"]]
        found.setdefault(place["row"], []).append(part)
    np.testing.assert_array_equal(np.array([np.concatenate(found[row]) for row in sorted(found)]), batch.numpy())


def test_a_folder_has_a_row_of_its_own(kind, tmp_path):
    folder, whole, _ = write_both(tmp_path, kind)
    with Look(folder) as look, Look(whole) as lone:
        found = load_format(FORMATS[FOREIGN]).recognise(look)
        assert (found.backend, len(found.files)) == ("hdf5", 3)
        assert load_format(FORMATS[HDF5]).recognise(look) is None  # lone files, of ours too
        assert load_format(FORMATS[HDF5]).recognise(lone).column.is_foreign


def test_verify_says_that_nothing_can_be_compared(kind, tmp_path):
    folder, _, _ = write_both(tmp_path, kind)
    shape = KINDS[kind][2]
    done = run_zb("verify", folder, code=6)
    assert "3 could not be compared with anything" in done.output
    assert "tokens: HDF5 files of other programs hold no digests" in done.output
    assert f"make a file of digests with 'zb index digests {folder} -o FILE'" in done.output
    for verify in ("batch", "store"):
        is_refused(
            errors.UnverifiableError,
            lambda verify=verify: open_reader(folder, verify=verify, **shape),
            match="part-0.h5: cannot be verified: .*make a file of digests",
        )


# --- digests ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("layout", "lone"), [("contiguous", False), ("contiguous", True), ("gzip", False)])
def test_digests_are_made_and_compared(layout, lone, kind, tmp_path):
    folder, one, _ = write_both(tmp_path, kind, LAYOUTS[layout])
    path = one if lone else folder
    digests = tmp_path / "x.json"
    found = report_of(zb, "index", "digests", path, "-o", digests)
    assert (found["num_files"], found["backend"]) == (1 if lone else 3, "hdf5")
    reports = verify_store(path, read_as=ReadAs(digests=digests))
    assert {report.outcome for report in reports} == {Outcome.VERIFIED}
    assert [report.checks for report in reports] == [["crc32", "sha256"]] * found["num_files"]
    assert "verified" in run_zb("verify", path, "--digests", digests, code=0).output
    shape = KINDS[kind][2]
    plain = steps_of(path, **shape)
    with Loader(path, **shape, **ONE_RANK) as loader:
        state = loader.state_dict()
    for verify in ("auto", "none", "batch", "store"):
        with Loader(path, **shape, **ONE_RANK, read_as=ReadAs(digests=digests), verify=verify) as loader:
            assert loader.state_dict() == state  # states fit with and without digests
            require_equal(list(loader), plain)
            assert loader.batches.verified == {"batch": "all reads", "store": "store"}.get(verify, "none")


@pytest.mark.parametrize("kind", ["stream", "records"])
def test_a_flipped_bit_is_found(kind, tmp_path):
    folder, _, rows = write_both(tmp_path, kind)
    digests = tmp_path / "x.json"
    write_digests(folder, digests)
    damaged = folder / "part-1.hdf5"
    flip(damaged, damaged.read_bytes().index(rows.reshape(-1)[40 * 24 :][:24].tobytes()) + 5)
    assert [report.outcome for report in verify_store(folder, read_as=ReadAs(digests=digests))] == [
        "verified",
        "bad",
        "verified",
    ]
    assert "chunk 0 is the first bad one" in run_zb("verify", folder, "--digests", digests, code=3).output
    options = reading({**KINDS[kind][2], "digests": digests})
    for verify in ("none", "batch"):  # the first read of a file proves it, whatever `verify` is
        with open_reader(folder, **options, verify=verify) as reader:
            is_refused(errors.ChecksumError, lambda reader=reader: list(reader), match=r"part-1\.hdf5: chunk 0")
    is_refused(errors.ChecksumError, lambda: open_reader(folder, **options, verify="store"), match=r"part-1\.hdf5")


def test_digests_are_those_of_one_dataset(tmp_path):
    path = write_file(tmp_path / "x.h5", IDS, name="a")
    with h5py.File(path, "r+") as h5:
        h5["b"] = IDS[::-1]
        h5["c"] = np.stack([IDS, IDS], axis=1)
    is_refused(errors.FormatError, lambda: write_digests(path, tmp_path / "x.json"), match="pass dataset=")
    made = write_digests(path, tmp_path / "x.json", read_as=ReadAs(dataset="a"))
    assert Digests.load(tmp_path / "x.json").files == made.files
    assert Digests.load(tmp_path / "x.json").read_as.dataset == "a"
    [report] = verify_store(path, read_as=ReadAs(digests=tmp_path / "x.json"))  # the digests have the name
    assert report.outcome is Outcome.VERIFIED
    words = "expected digests of dataset 'b', found digests of dataset 'a'"
    is_refused(
        errors.FormatError,
        lambda: open_reader(path, read_as=ReadAs(dataset="b", digests=tmp_path / "x.json")),
        lambda: verify_store(path, read_as=ReadAs(dataset="b", digests=tmp_path / "x.json")),
        match=words,
    )
    run_zb("index", "digests", path, "--dataset", "c", "--channel", 1, "-o", tmp_path / "c.json", code=0)
    with open_reader(
        path, read_as=ReadAs(dataset="c", channel=1, digests=tmp_path / "c.json"), verify="batch"
    ) as reader:
        np.testing.assert_array_equal(reader[7], IDS[7:8])
    is_refused(
        errors.FormatError,
        lambda: open_reader(path, read_as=ReadAs(dataset="c", channel=0, digests=tmp_path / "c.json")),
        match="expected digests of channel 0 of dataset 'c', found digests of channel 1",
    )
    run_zb("index", "digests", path, "--dataset", "c", "--axes", AXES, "-o", tmp_path / "axes.json", code=0)
    with open_reader(path, read_as=ReadAs(dataset="c", axes=AXES, digests=tmp_path / "axes.json")) as reader:
        assert reader.meta.shape == (2, 24)
    [report] = verify_store(path, read_as=ReadAs(digests=tmp_path / "axes.json"))
    assert report.outcome is Outcome.VERIFIED
    lacks_axes = {"dataset": "c", "digests": tmp_path / "axes.json"}
    is_refused(errors.FormatError, lambda: open_reader(path, **reading(lacks_axes)), match="expected records along")
    changed = (tmp_path / "x.json").read_text().replace('"dataset": "a"', '"dataset": 7')
    (tmp_path / "bad.json").write_text(changed)
    is_refused(errors.FormatError, lambda: Digests.load(tmp_path / "bad.json"))


def test_files_that_were_digested_have_to_be_there(tmp_path):
    folder, _, _ = write_both(tmp_path)
    digests = tmp_path / "x.json"
    write_digests(folder, digests)
    (folder / "part-2.h5").unlink()
    words = r"part-2\.h5: is not there, and x\.json has digests of it"
    is_refused(errors.IncompleteError, lambda: open_reader(folder, read_as=ReadAs(digests=digests)), match=words)
    assert "part-2.h5: is not there" in run_zb("verify", folder, "--digests", digests, code=4).output
    write_file(folder / "part-2.h5", IDS[:3])
    is_refused(
        errors.FormatError,
        lambda: open_reader(folder, read_as=ReadAs(digests=digests)),
        match=r"part-2\.h5: expected bytes",
    )


def test_files_with_digests_of_their_own_take_no_others(tmp_path, write_store):
    store = write_store(tmp_path / "store", random_tokens(8, 3, 32), (4,))
    folder, _, _ = write_both(tmp_path)
    write_digests(folder, tmp_path / "x.json")
    is_refused(
        errors.BackendError,
        lambda: open_reader(store, read_as=ReadAs(digests=tmp_path / "x.json")),
        match="files that hold none",
    )
    is_refused(errors.BackendError, lambda: write_digests(store, tmp_path / "y.json"), match="stores have digests")


# --- bad folders ------------------------------------------------------------------------------------------------------
def other(rows, **options):
    return lambda folder: write_file(folder / "part-1.hdf5", rows, **options)


def cut_short(folder):
    os.truncate(folder / "part-1.hdf5", (folder / "part-1.hdf5").stat().st_size - 100)


def no_hdf5(folder):
    (folder / "part-1.hdf5").write_bytes(b"nothing of HDF5")


@pytest.mark.parametrize(("change", "kind", "words", "code"), [
    (other(IDS[:, :20]), errors.FormatError,
     r"expected records of 24, as part-0\.h5 has it, found records of 20: move the others", 1),
    (other(IDS.reshape(-1)), errors.FormatError, r"expected records of 24, as part-0\.h5 has it, found a stream", 1),
    (other(IDS.astype("<i8")), errors.FormatError, "expected <i4, .*found <i8", 1),
    (other(IDS, beside=BESIDE), errors.FormatError, "expected no fields, .*found the fields loss_mask u", 1),
    (other(IDS, name="data/others"), errors.FormatError, "expected a dataset 'data/input_ids' of one, two", 1),
    (other(IDS.astype("f8")), errors.FormatError, "data/input_ids: expected integers, found float64", 1),
    (cut_short, errors.IncompleteError, "truncated", 4),
    (no_hdf5, errors.FormatError, "HDF5 cannot read it", 1),
])  # fmt: skip
def test_a_file_that_differs_is_one_line(change, kind, words, code, tmp_path):
    folder, _, _ = write_both(tmp_path)
    change(folder)
    before = sorted(os.listdir(tmp_path))
    is_refused(
        kind,
        lambda: open_reader(folder),
        lambda: Loader(folder, **ONE_RANK),
        lambda: write_digests(folder, tmp_path / "x.json"),
        match=rf"part-1\.hdf5: .*{words}",
    )
    assert "part-1.hdf5: " in one_error(run_zb("info", folder), code)
    assert "part-1.hdf5: " in one_error(run_zb("index", "digests", folder, "-o", tmp_path / "x.json"), code)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_damaged_first_file_is_named(tmp_path):
    folder, _, _ = write_both(tmp_path)
    os.truncate(folder / "part-0.h5", 2000)
    is_refused(errors.IncompleteError, lambda: open_reader(folder), match=r"part-0\.h5: truncated")
    done = run_zb("verify", folder, code=4)
    assert "part-0.h5" in done.output


def test_a_file_that_disappears_or_is_replaced_is_one_line(tmp_path):
    folder, _, _ = write_both(tmp_path)
    with open_reader(folder) as reader:
        (folder / "part-1.hdf5").unlink()
        is_refused(FileNotFoundError, lambda: reader.read_batch(41), match=r"part-1\.hdf5")
        write_file(folder / "part-1.hdf5", IDS[:8])
        is_refused(errors.FormatError, lambda: reader.read_batch(41), match=r"part-1\.hdf5: changed since")


def test_other_folders_are_what_they_were(tmp_path, write_file):
    (tmp_path / "empty").mkdir()
    is_refused(errors.FormatError, lambda: open_reader(tmp_path / "empty"), match="an empty folder")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "x.h5").write_bytes(b"no HDF5")
    is_refused(errors.FormatError, lambda: open_reader(tmp_path / "junk"), match="a folder with 1 .h5 file")
    (tmp_path / "lost").mkdir()
    ours = write_file(tmp_path / "lost" / "shard-00000.h5", random_tokens(8, 3, 32)).path
    is_refused(errors.FormatError, lambda: open_reader(ours.parent), match="its index was lost")
    os.truncate(ours, 3000)
    is_refused(errors.FormatError, lambda: open_reader(ours.parent), match="its index was lost")
    named = {"dataset": "data/input_ids"}
    is_refused(
        errors.BackendError, lambda: open_reader(tmp_path / "empty", read_as=ReadAs(**named)), match="found a folder"
    )
    folder, _, _ = write_both(tmp_path)
    is_refused(errors.BackendError, lambda: open_reader(folder, backend="batch"), match="asked for backend 'batch'")
    shutil.copy(write_file(tmp_path / "own.h5", random_tokens(8, 3, 32)).path, folder / "part-3.h5")
    is_refused(errors.FormatError, lambda: open_reader(folder), match=r"part-3\.h5: .*found a file of this one")


def test_a_conversion_has_the_records_that_are_read_in_place(tmp_path):
    folder, _, _ = write_both(tmp_path)
    convert(folder, "hdf5", tmp_path / "store", batch_size=6, shuffle=False, workers=1)
    require_equal(
        steps_of(folder, batch_size=6, shuffle="sequential"), steps_of(tmp_path / "store", shuffle="sequential")
    )
