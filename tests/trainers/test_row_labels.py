"""Labels and masks in rows of any format that are not one number for each id, or no whole numbers, are refused."""

import json
from itertools import chain

import h5py
import numpy as np
import pytest
from contract import is_refused
from mds_folder import array_of, write

from zb_hdf5 import ConvertError, DocumentLoader, FormatError, convert

ROWS = [[5, 6, 7], [8], [9, 10]]
NAMES = ("labels", "loss_mask")


def to_jsonl(path, name, rows):
    lines = [json.dumps({"input_ids": ids, name: values}) for ids, values in zip(ROWS, rows, strict=True)]
    path.with_suffix(".jsonl").write_text("\n".join(lines))
    return path.with_suffix(".jsonl")


def to_mds(path, name, rows):
    arrays = [np.array(values, np.float64) for values in rows]
    samples = [(array_of(np.array(ids, np.int32)), array_of(each)) for ids, each in zip(ROWS, arrays, strict=True)]
    return write(path, samples, {"tokens": "ndarray", name: "ndarray"})


def to_values(path, name, rows):
    with h5py.File(path.with_suffix(".h5"), "w") as h5:
        h5["tokens"] = [*chain(*ROWS)]
        h5["offsets"] = np.cumsum([0, *map(len, ROWS)])
        h5[name] = np.concatenate([np.array(values, np.float64) for values in rows])
    return path.with_suffix(".h5")


def to_lists(path, name, rows):
    with h5py.File(path.with_suffix(".h5"), "w") as h5:
        for column, lists, dtype in (("tokens", ROWS, "i4"), (name, rows, "f8")):
            stored = h5.create_dataset(column, (len(ROWS),), h5py.vlen_dtype(dtype))
            for number, values in enumerate(lists):
                stored[number] = np.array(values, dtype).reshape(-1)
    return path.with_suffix(".h5")


WRITERS = {"jsonl": to_jsonl, "mds": to_mds, "values": to_values, "lists": to_lists}
WIDTHS = {
    "one less": [[1.0] * (len(ids) - 1) for ids in ROWS],
    "one more": [[1.0] * (len(ids) + 1) for ids in ROWS],
    "pairs": [[[1.0, 1.0]] * len(ids) for ids in ROWS],
}


def targets_of(path, folder):
    source_format = "hf" if path.suffix == ".jsonl" else "auto"
    convert(path, "stream", folder, source_format=source_format, workers=1, vocab_size=100)
    how = {"collate": "pack", "max_tokens": 100, "targets": True, "shuffle": "sequential", "rank": 0, "world_size": 1}
    with DocumentLoader(folder, **how) as loader:
        return next(iter(loader))["targets"].tolist()


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_another_width_is_refused_by_name(kind, name, width, tmp_path):
    path = WRITERS[kind](tmp_path / "a", name, WIDTHS[width])
    is_refused(
        ConvertError, lambda: targets_of(path, tmp_path / "out"),
        match=f"column '{name}': expected .*name the columns of values|column '{name}': .*name the columns that are",
    )  # fmt: skip


@pytest.mark.parametrize("kind", WRITERS)
def test_fractions_are_refused_where_they_would_be_targets(kind, tmp_path):
    path = WRITERS[kind](tmp_path / "a", "labels", [[0.5] * len(ids) for ids in ROWS])
    is_refused(
        FormatError, lambda: targets_of(path, tmp_path / "out"),
        match="expected whole numbers in the field labels, found 0.5",
    )  # fmt: skip


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", NAMES)
def test_doubles_that_are_whole_are_targets(kind, name, tmp_path):
    rows = [[float(token) for token in ids] if name == "labels" else [1.0] * len(ids) for ids in ROWS]
    path = WRITERS[kind](tmp_path / "a", name, rows)
    assert targets_of(path, tmp_path / "out") == [6, 7, -100, -100, 10, -100]


def test_arrays_of_two_axes_that_are_no_targets_are_left_out(tmp_path):
    path = to_mds(tmp_path / "a", "scores", WIDTHS["pairs"])
    assert targets_of(path, tmp_path / "out") == [6, 7, -100, -100, 10, -100]
    fixed = [(array_of(np.array([5, 6], np.int32)), np.ones((2, 2), "<f8").tobytes())]
    path = write(tmp_path / "b", fixed, {"tokens": "ndarray", "scores": "ndarray:float64:2,2"}, [None, 32])
    assert targets_of(path, tmp_path / "fixed") == [6, -100]
