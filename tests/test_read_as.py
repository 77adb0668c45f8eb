"""`ReadAs`: one value for all that a user says about files, which every front takes."""

import inspect
import pickle
from dataclasses import fields

import h5py
import numpy as np
import pytest
from contract import is_refused

import zb_hdf5
from zb_hdf5 import (
    ArgumentError,
    DocumentLoader,
    Loader,
    ReadAs,
    StoreRecords,
    convert,
    open_corpus,
    open_field_set,
    open_reader,
    verify_store,
    write_digests,
)

NAMES = {each.name for each in fields(ReadAs)}
FRONTS = (
    *(Loader, DocumentLoader, StoreRecords, open_reader, open_corpus, open_field_set),
    *(verify_store, write_digests),
)


@pytest.mark.parametrize("front", FRONTS)
def test_every_front_takes_one_value_and_none_of_its_parts(front):
    names = set(inspect.signature(front).parameters)
    assert "read_as" in names
    assert not names & NAMES


@pytest.mark.parametrize(("given", "words"), [
    ({"dataset": 3}, "dataset must be a name, found 3"),
    ({"axes": "token,record"}, "axes must be .*found 'token,record'"),
    ({"axes": "batch,record,token", "channel": 0}, "pass either axes or channel, not both"),
    ({"field_channels": {"labels": 1}}, "field_channels needs channel"),
    ({"field_channels": 2, "channel": 0}, "names and their channels, found 2"),
    ({"channel": -1}, "whole numbers from 0 on, found -1"),
    ({"channel": True}, "^channel must be whole numbers from 0 on, found True$"),
    ({"channel": 0, "field_channels": {"m": True}}, "^field_channels must be .* found True$"),
    ({"channel": 0, "field_channels": {"m": 0}}, "entries of their own, found 'm' in 0, which has the ids"),
    ({"channel": 0, "field_channels": {"b": 1, "a": 1}}, "found 'b' in 1, which has the field 'a'"),
    ({"digests": 5}, "digests must be the path of a file, found 5"),
    ({"digests": ""}, "^digests must be the path of a file, found ''$"),
    ({"unwritten": "zero"}, "'fill' or 'drop', found 'zero'"),
    ({"source_dtype": "float32"}, "source_dtype must be one of uint8, .* found 'float32'"),
    ({"skip_bytes": 4}, "skip_bytes=4 is for files without a header"),
    ({"source_dtype": "uint16", "skip_bytes": -1}, "skip_bytes must be .* found -1"),
    ({"source_dtype": "uint16", "dataset": "ids"}, "source_dtype is for files without a header"),
    ({"source_dtype": "uint16", "unwritten": "fill"}, "source_dtype is for files without a header"),
])  # fmt: skip
def test_what_has_no_sense_is_refused_where_the_value_is_made(given, words):
    is_refused(ArgumentError, lambda: ReadAs(**given), match=words)


def test_it_is_a_value():
    channels = {"loss_mask": 1, "labels": 2}
    one = ReadAs(channel=0, field_channels=channels)
    same = ReadAs(channel=0, field_channels={"labels": 2, "loss_mask": 1})
    assert one == same == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(same)
    channels["more"] = 3
    assert one == same
    assert repr(one) == "ReadAs(channel=0, field_channels={'labels': 2, 'loss_mask': 1})"
    assert pickle.loads(pickle.dumps(one)) == one
    assert len(pickle.dumps(ReadAs())) < 60  # only what was given
    assert repr(ReadAs()) == "ReadAs()"


@pytest.mark.parametrize("front", [Loader, open_reader, open_corpus, verify_store, write_digests])
def test_anything_else_is_refused(front, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100))
    more = [tmp_path / "made.json"] if front is write_digests else []
    is_refused(
        ArgumentError, lambda: front(tmp_path / "a.npy", *more, read_as={"dataset": "ids"}),
        match=r"read_as must be a ReadAs, .*found \{'dataset': 'ids'\}",
    )  # fmt: skip


def test_digests_are_not_made_of_digests(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100))
    read_as = ReadAs(digests=tmp_path / "made.json")
    is_refused(ArgumentError, lambda: write_digests(tmp_path / "a.npy", tmp_path / "new.json", read_as=read_as))


def test_a_store_names_its_dataset_and_is_opened_as_any_other(tmp_path):
    """The index of a store that was made of HDF5 files of another program has the name of their dataset."""
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5["ids"] = np.arange(64 * 8).reshape(64, 8)
    convert(tmp_path / "x.h5", "hdf5", tmp_path / "store", batch_size=8, shuffle=False, workers=1)
    with open_reader(tmp_path / "store", access="h5py") as reader:
        np.testing.assert_array_equal(np.concatenate(list(reader)), np.arange(64 * 8).reshape(64, 8))


def test_its_name_is_public():
    assert zb_hdf5.ReadAs is ReadAs
