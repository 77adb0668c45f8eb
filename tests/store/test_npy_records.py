"""2-D `.npy` files, and folders of them, read in place as records: the same as 2-D HDF5 files of other programs."""

import json
import pickle
import shutil

import h5py
import numpy as np
import pytest
import torch
from commandline import one_error, report_of, run_zb
from contract import is_refused, random_tokens, require_equal, steps_of
from damage import flip

from zb_hdf5 import (
    Loader,
    MixedLoader,
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
from zb_hdf5.store.shard_report import Outcome

ONE_RANK = {"rank": 0, "world_size": 1}
AXES = "record,token"
ORDERS = {
    "global": {},
    "records": {"seq_len": 12},
    "block": {"targets": True, "last": "masked"},
    "sequential": {"targets": True, "last": "short"},
}
IDS = (random_tokens(1, 103, 24)[0] % 50_257).astype("<u2")
#: The records of each file, by its name: in the order in which they are read.
FILES = {"a/part-1": IDS[:40], "b": IDS[40:48], "c": IDS[48:]}


@pytest.fixture
def places(tmp_path):
    """Write the records as a lone file and a folder, of each format."""
    for suffix in ("npy", "h5"):
        for name, rows in {"one": IDS, **{f"in-{suffix}/{name}": rows for name, rows in FILES.items()}}.items():
            write(tmp_path / f"{name}.{suffix}", rows)
    return tmp_path


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, rows)
        return path
    with h5py.File(path, "w") as h5:
        h5["ids"] = rows
    return path


# --- the same as HDF5 -------------------------------------------------------------------------------------------------
def test_they_give_the_steps_of_hdf5_files_in_every_order(places):
    for shuffle, more in ORDERS.items():
        options = {"batch_size": 8, "shuffle": shuffle, "seed": 3, **more}
        expected = steps_of(places / "one.h5", **options)
        for path in ("one.npy", "in-npy"):
            require_equal(steps_of(places / path, **options), expected)
    for path, files in (("one.npy", 1), ("in-npy", 3)):
        with open_reader(places / path, batch_size=4) as reader:
            assert (reader.corpus.layout, reader.meta.shape, reader.num_records, reader.rest) == (
                "batches",
                (4, 24),
                103,
                3,
            )
            assert (reader.corpus.backend, reader.access, len(reader.corpus.files)) == ("npy", "auto", files)
            np.testing.assert_array_equal(reader.tokens[0 : IDS.size], IDS.reshape(-1))
            with pickle.loads(pickle.dumps(reader)) as copied:
                np.testing.assert_array_equal(copied[5], IDS[20:24])


@pytest.mark.parametrize("dtype", ["u1", "<u4", "<i8", ">i4"])
def test_integers_of_any_dtype_are_read(dtype, tmp_path):
    rows = (IDS % 200).astype(dtype)
    np.save(tmp_path / "x.npy", rows)
    for access in ("auto", "mmap", "pread"):
        found = torch.stack(steps_of(tmp_path / "x.npy", batch_size=1, shuffle="sequential", access=access))
        np.testing.assert_array_equal(found[:, 0].numpy(), rows.astype("<i8"))


def test_fingerprints_and_states_are_those_of_a_folder_of_hdf5_files(places):
    with open_reader(places / "in-npy", batch_size=4) as reader, open_reader(places / "in-h5", batch_size=4) as same:
        assert reader.fingerprint == same.fingerprint
        assert reader.fingerprint.endswith(":4x24+0")
        sample = reader.corpus.fingerprint
    with open_reader(places / "in-npy", batch_size=8) as reader:
        assert reader.corpus.fingerprint == sample  # no batch size is in it
    for path, other in (("in-npy", "in-h5"), ("in-h5", "in-npy"), ("one.npy", "one.npy")):
        with Loader(places / path, batch_size=4, **ONE_RANK) as loader:
            next(loader)
            state = json.loads(json.dumps(loader.state_dict()))
            rest = torch.cat([next(loader) for _ in range(2)])
        ranks = []
        for rank in range(2):
            with Loader(places / other, batch_size=2, rank=rank, world_size=2) as loader:
                loader.load_state_dict(state)
                ranks.append([next(loader) for _ in range(2)])
        assert torch.equal(torch.cat([part for step in zip(*ranks, strict=True) for part in step]), rest)


def test_a_conversion_has_the_same_files_in_the_same_order(places):
    convert(places / "in-npy", "hdf5", places / "store", batch_size=1, shuffle=False, workers=1)
    how = {"batch_size": 1, "shuffle": "sequential"}
    require_equal(steps_of(places / "in-npy", **how), steps_of(places / "store", **how))


@pytest.mark.parametrize("target", ["megatron", "datatrove", "olmo", "parquet", "bin"])
@pytest.mark.parametrize("suffix", ["npy", "h5"])
def test_each_record_becomes_a_document_of_another_trainer(suffix, target, places):
    out = places / "out"
    convert(places / f"in-{suffix}", target, out, workers=1)
    if target == "parquet":
        convert(out, "stream", places / "stream", workers=1)
        out = places / "stream"
    named = {"source_dtype": "uint16"} if target in ("olmo", "bin") else {}
    with open_corpus(out, read_as=ReadAs(**named)) as stream:
        np.testing.assert_array_equal(stream.tokens[0 : len(stream)], IDS.reshape(-1))
        if target not in ("bin", "olmo"):
            assert stream.document_count == len(IDS)
    is_refused(
        errors.ArgumentError,
        lambda: convert(places / f"in-{suffix}", target, out, batch_size=8),
        match=f"batch_size does not apply to .* as {target}",
    )
    is_refused(errors.ZbError, lambda: convert(places / f"in-{suffix}", "stream", places / "s"))


def test_names_tell_splits_and_masks_are_no_ids(tmp_path):
    for name, rows in (("train/0", IDS[:40]), ("train/1", IDS[40:80]), ("val/0", IDS[80:])):
        write(tmp_path / "x" / f"{name}.npy", rows)
    for split, rows in (("train", IDS[:80]), ("val", IDS[80:]), (None, IDS)):
        with open_reader(tmp_path / "x", split=split) as reader:
            np.testing.assert_array_equal(reader.tokens[0 : rows.size], rows.reshape(-1))
    with Loader(tmp_path / "x", batch_size=4, **ONE_RANK) as loader:
        assert loader.batches.num_records == 80
    assert report_of(zb, "info", tmp_path / "x")["splits"].keys() == {"train", "val"}
    write(tmp_path / "x/train/labels.npy", IDS[:40])
    is_refused(errors.FormatError, lambda: open_reader(tmp_path / "x"), match=r"labels.npy: is named as a field")


# --- commands ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["one.npy", "in-npy"])
def test_every_command_reads_them(name, places, tmp_path):
    path = places / name
    files = 1 if path.is_file() else 3
    found = report_of(zb, "info", path)
    assert (found["tokens"], found["seq_len"], found["num_files"], found["backend"]) == (IDS.size, 24, files, "npy")
    assert (found["kind"], found["verified"]) == ("file" if files == 1 else "folder", "none")
    rows = report_of(zb, "show", path, "--batch", 45, "--all")["rows"]
    assert rows[0]["parts"][0]["tokens"] == IDS[45].tolist()
    assert report_of(zb, "report", path, "-o", tmp_path / "r.html")["tokens"] == IDS.size
    assert "problem" not in {each["state"] for each in report_of(zb, "doctor", path)["findings"]}
    with Loader(path, batch_size=8, seed=3, **ONE_RANK) as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        batch = next(loader)
    found = report_of(zb, "which", path, "--state", tmp_path / "state.json", "--step", 0, "--batch-size", 8)
    places_of_rows = found["batches"][0]["rows"]
    rows = [np.load(each["shard"]).reshape(-1)[each["start"] : each["stop"]] for each in places_of_rows]
    np.testing.assert_array_equal(np.array(rows), batch.numpy())
    staged = report_of(zb, "stage", path, tmp_path / "cache", "--batch-size", 8, "--world-size", 1)
    assert staged["copied"] > 0
    require_equal(steps_of(path, batch_size=8, cache=tmp_path / "cache"), steps_of(path, batch_size=8))
    done = run_zb("verify", path, code=6)
    assert f"make a file of digests with 'zb index digests {path} -o FILE'" in done.output or files > 1


def test_a_mixture_takes_them(places):
    with MixedLoader(
        {"a": places / "in-npy", "b": places / "one.h5"}, {"a": 1, "b": 1}, batch_size=4, **ONE_RANK
    ) as both:
        assert next(both).shape == (4, 24)


# --- digests ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["one.npy", "in-npy"])
def test_digests_are_made_and_compared(name, places):
    path = places / name
    digests = places / "x.json"
    assert report_of(zb, "index", "digests", path, "-o", digests)["backend"] == "npy"
    assert json.loads(digests.read_text())["record_tokens"] == 24
    reports = verify_store(path, read_as=ReadAs(digests=digests))
    assert {report.outcome for report in reports} == {Outcome.VERIFIED}
    plain = steps_of(path, batch_size=8)
    for verify in ("auto", "none", "batch", "store"):
        with Loader(path, batch_size=8, **ONE_RANK, read_as=ReadAs(digests=digests), verify=verify) as loader:
            require_equal(list(loader), plain)
            assert loader.batches.verified == {"batch": "all reads", "store": "store"}.get(verify, "none")
    file = path if path.is_file() else path / "b.npy"
    flip(file, 200)
    assert "BAD" in run_zb("verify", path, "--digests", digests, code=3).output
    is_refused(
        errors.ChecksumError, lambda: steps_of(path, batch_size=8, read_as=ReadAs(digests=digests), verify="batch")
    )


def test_a_header_with_other_records_is_found_that_no_digest_covers(places):
    path = places / "one.npy"
    write_digests(path, places / "x.json")
    np.save(path, IDS.reshape(206, 12))
    words = "expected record_tokens 24, as x.json has it, found 12"
    is_refused(errors.FormatError, lambda: open_reader(path, read_as=ReadAs(digests=places / "x.json")), match=words)
    assert words in str(verify_store(path, read_as=ReadAs(digests=places / "x.json"))[0].problem)


# --- refused ----------------------------------------------------------------------------------------------------------
REFUSED = {
    "fortran": (np.asfortranarray(IDS), r"found Fortran order: convert\('.*x\.npy', 'hdf5', 'DST', .* seq_len=24\)$"),
    "floats": (IDS.astype("<f4"), "expected an array of integers of one axis or two, found shape"),
    "three axes": (IDS[:102].reshape(-1, 2, 24), "of one axis or two, found shape"),
    "no tokens": (IDS[:, :0], "expected records of one token or more"),
    "rows of one": (
        IDS[:, :1],
        "at least 3 tokens, found rows of 1; pass axes='record,token' to ReadAs if each is a record$",
    ),
    "rows of two": (
        IDS[:, :2],
        "at least 3 tokens, found rows of 2; pass axes='record,token' to ReadAs if each is a record$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_arrays_are_one_line(name, tmp_path):
    array, words = REFUSED[name]
    np.save(tmp_path / "x.npy", array)
    for path in (tmp_path, tmp_path / "x.npy"):
        for refused in (
            lambda path=path: open_reader(path),
            lambda path=path: Loader(path, batch_size=2, **ONE_RANK),
            lambda path=path: write_digests(path, tmp_path / "o.json"),
        ):
            is_refused(errors.FormatError, refused, match=words)
    assert not (tmp_path / "o.json").exists()
    assert "x.npy: expected" in one_error(run_zb("info", tmp_path / "x.npy"))
    if name == "fortran":
        assert "zb convert" in one_error(run_zb("info", tmp_path / "x.npy"))


def test_rows_of_one_or_two_tokens_are_records_if_their_axes_are_told(tmp_path):
    for length in (1, 2):
        path = tmp_path / f"{length}.npy"
        np.save(path, IDS[:, :length])
        with open_reader(path, read_as=ReadAs(axes=AXES)) as reader:
            np.testing.assert_array_equal(reader.tokens[0 : 103 * length], IDS[:, :length].reshape(-1))
        digests = tmp_path / f"{length}.json"
        how = ReadAs(axes=AXES, digests=digests)
        write_digests(path, digests, read_as=ReadAs(axes=AXES))
        assert [each.outcome for each in verify_store(path, read_as=how)] == ["verified"]
        steps_of(path, read_as=how, batch_size=2, verify="store")
        assert report_of(zb, "info", path, "--axes", AXES)["seq_len"] == length
        assert "--axes record,token" in one_error(run_zb("info", path))


def test_axes_of_records_are_those_of_two_axes(places, write_store):
    for path in (places / "one.npy", places / "in-npy", places / "one.h5", places / "in-h5"):
        with open_reader(path, read_as=ReadAs(axes=AXES)) as reader:
            np.testing.assert_array_equal(reader[2], IDS[2:3])
    write(places / "stream.npy", IDS.reshape(-1))
    write(places / "three.h5", IDS[:102].reshape(-1, 3, 24))
    store = write_store(places / "store", random_tokens(4, 2, 24), (4,))
    for error, path, axes, words in (
        (errors.ArgumentError, "stream.npy", AXES, "is a token stream, which has one axis"),
        (errors.ArgumentError, "three.h5", AXES, "needs a dataset of two axes"),
        (errors.BackendError, "one.npy", "batch,record,token", "needs an HDF5 file, found a 'npy' file"),
        (errors.BackendError, store, AXES, "needs an HDF5 file or a .npy file, found a folder"),
        (errors.ArgumentError, store / "shard-00000.h5", AXES, "needs a dataset of two axes"),
    ):
        is_refused(
            error, lambda path=path, axes=axes: open_reader(places / path, read_as=ReadAs(axes=axes)), match=words
        )


def test_a_file_of_other_records_in_a_folder_is_one_line(places):
    folder = places / "in-npy"
    for rows, found in ((IDS[:, :12], "records of 12"), (IDS.reshape(-1), "a stream")):
        np.save(folder / "b.npy", rows)
        words = rf"b.npy: expected records of 24, as part-1.npy has, found {found}: move the others"
        for refused in (
            lambda: open_reader(folder),
            lambda: Loader(folder, batch_size=2, **ONE_RANK),
            lambda: write_digests(folder, places / "x.json"),
        ):
            is_refused(errors.FormatError, refused, match=words)
    np.save(folder / "b.npy", (IDS % 2).astype("u1"))
    is_refused(errors.FormatError, lambda: open_reader(folder), match="as a mask has")


def test_records_are_no_stream_and_too_few_are_told(places):
    is_refused(
        errors.FormatError, lambda: MmapTokenStore(places / "in-npy"), match="expected a token stream, found batches"
    )
    is_refused(
        errors.ArgumentError, lambda: open_reader(places / "in-npy", batch_size=200), match="do not fill one batch"
    )
    is_refused(errors.BackendError, lambda: open_reader(places / "one.npy", access="h5py"), match="needs an HDF5 file")
    shutil.copy(places / "one.npy", places / "short.npy")
    with open(places / "short.npy", "r+b") as file:
        file.truncate(1000)
    is_refused(errors.IncompleteError, lambda: open_reader(places / "short.npy"))
