"""HDF5 files of documents: values with offsets, lists, or a dataset for each; no offset and no size is believed."""

import pickle
from contextlib import nullcontext

import h5py
import numpy as np
import pytest
from commandline import one_error, report_of, run_zb
from contract import is_refused
from id_documents import documents_of
from reading import fits

from zb_hdf5 import ConvertError, FormatError, IncompleteError, ReadAs, ShardIndex, convert, open_corpus, open_reader
from zb_hdf5.commands.zb import zb
from zb_hdf5.trainers import list_file, offset_file, ragged_file
from zb_hdf5.trainers.ragged import open_ragged

LENGTHS = [3, 0, 1, 7, 40, 0, 5, 1, 1, 30] * 3
IDS = np.arange(sum(LENGTHS)) * 31 % 50_257
DOCUMENTS = [each.tolist() for each in np.split(IDS, np.cumsum(LENGTHS)[:-1])]
LABELS = np.where(IDS % 3 > 0, IDS, -100)
ENDS = np.cumsum(LENGTHS)
OFFSETS = np.concatenate([[0], ENDS])


def values_with(path, offsets, name="offsets", how=None, **more):
    with h5py.File(path, "w") as h5:
        h5.create_dataset("x/values", data=IDS.astype("<i4"), **(how or {}))
        h5.create_dataset("x/labels", data=LABELS.astype("<i4"), **(how or {}))
        h5[f"x/{name}"] = offsets
        h5["x/scores"] = np.zeros(3)
    return path


def with_offsets(path):
    return values_with(path, OFFSETS.astype("<u8"))


def with_ends(path):
    return values_with(path, ENDS, "ends", {"compression": "gzip", "chunks": (16,)})


def with_lengths(path):
    return values_with(path, np.array(LENGTHS, "<u2"), "lengths", {"chunks": (16,)})


def lists(path):
    with h5py.File(path, "w") as h5:
        for name, values, dtype in (("input_ids", IDS, "<i4"), ("labels", LABELS, "<i8")):
            stored = h5.create_dataset(f"x/{name}", (len(LENGTHS),), h5py.vlen_dtype(np.dtype(dtype)))
            for number, each in enumerate(np.split(values, ENDS[:-1])):
                stored[number] = each
    return path


def datasets(path):
    with h5py.File(path, "w") as h5:
        for number, each in enumerate(DOCUMENTS):  # in the order of their names 10 is before 2
            h5[f"docs/doc_{number}"] = np.array(each, "<i4")
    return path


LAYOUTS = {"offsets": with_offsets, "ends": with_ends, "lengths": with_lengths, "lists": lists, "datasets": datasets}
#: The options that name lengths, which are not looked for.
OF_LENGTHS = {"dataset": "x/values", "offsets": "x/lengths"}


@pytest.fixture(params=LAYOUTS)
def layout(request, tmp_path):
    return request.param, LAYOUTS[request.param](tmp_path / "x.h5")


@pytest.mark.parametrize("block", [1, 50, 1 << 20])
def test_the_documents_of_each_layout_are_found(layout, block, monkeypatch):
    name, path = layout
    for limit in ("BLOCK_OF_IDS", "_BLOCK_DOCUMENTS", "_BLOCK_LENGTHS"):
        monkeypatch.setattr(offset_file, limit, block)
    monkeypatch.setattr(list_file, "_BLOCK_LISTS", block)
    monkeypatch.setattr(ragged_file, "_GROUP_BYTES", block)
    named = OF_LENGTHS if name == "lengths" else {}
    assert fits("ragged", path) == (not named)
    source = pickle.loads(pickle.dumps(open_ragged([path], **named)))
    found = documents_of(source)
    assert found.tokens == DOCUMENTS
    assert found.rows == list(range(1, len(DOCUMENTS) + 1))
    assert [field.name for field in source.fields] == ([] if name == "datasets" else ["labels"])
    chosen = documents_of(source, choose=lambda count: np.zeros(count, bool) if count < 1 else np.ones(count, bool))
    assert chosen.tokens == DOCUMENTS


@pytest.mark.thin
def test_their_documents_and_fields_are_converted(layout, tmp_path):
    name, path = layout
    named = OF_LENGTHS if name == "lengths" else {}
    convert(path, "stream", tmp_path / "stream", **named)
    with open_corpus(tmp_path / "stream") as stream:
        assert [stream.documents[number].ids.tolist() for number in range(stream.document_count)] == DOCUMENTS
        assert stream.documents[3].source == str(path)
        labels = None if name == "datasets" else stream.field("labels").tokens[0 : len(IDS)]
    if labels is not None:
        np.testing.assert_array_equal(labels, LABELS)
    options = [word for option, value in named.items() for word in (f"--{option}", value)]
    report = report_of(
        zb, "convert", path, tmp_path / "rows", "--seq-len", 8, "--batch-size", 2, "--packing", "best-fit", *options
    )
    assert report["num_batches"] > 0
    with open_reader(tmp_path / "rows") as reader:
        assert reader.has_pieces
        assert [field.name for field in reader.meta.fields] == ([] if name == "datasets" else ["labels"])


def test_values_alone_are_a_stream_in_place_and_converted(tmp_path):
    path = with_offsets(tmp_path / "x.h5")
    with open_corpus(path, read_as=ReadAs(dataset="x/values")) as stream:
        np.testing.assert_array_equal(stream.tokens[0 : len(IDS)], IDS)
    how = {"batch_size": 2, "seq_len": 8, "shuffle": False}
    convert(path, "hdf5", tmp_path / "out", dataset="x/values", **how)
    with open_reader(tmp_path / "out") as reader:
        np.testing.assert_array_equal(np.array(list(reader)).reshape(-1), IDS[: reader.num_batches * 16])


def test_folders_of_such_files(tmp_path):
    (tmp_path / "in" / "more").mkdir(parents=True)
    with_ends(tmp_path / "in" / "0.h5")
    with_offsets(tmp_path / "in" / "more" / "1.hdf5")
    convert(tmp_path / "in", "stream", tmp_path / "out")
    with open_corpus(tmp_path / "out") as stream:
        assert [stream.documents[number].ids.tolist() for number in range(stream.document_count)] == DOCUMENTS * 2
    convert(tmp_path / "in", "hdf5", tmp_path / "rows", seq_len=16, batch_size=1)
    assert ShardIndex.load(tmp_path / "rows").source["format"] == "ragged"
    assert not fits("ragged", tmp_path / "rows")  # a store


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.h5"
    with_ends(path)
    (tmp_path / "in" / "folder.h5").mkdir()  # a folder is not a file, whatever its name is
    is_refused(ConvertError, lambda: open_ragged([tmp_path / "in", path]), match=r"a\.h5: is named 2 times")
    assert open_ragged([tmp_path / "in"]).paths == [path]


def test_records_are_rows_of_one_length(tmp_path):
    path = values_with(tmp_path / "x.h5", np.arange(len(IDS) // 4 + 1) * 4)
    with h5py.File(path, "r+") as h5:
        for name in ("values", "labels"):
            values = h5[f"x/{name}"][: len(IDS) // 4 * 4]
            del h5[f"x/{name}"]
            h5[f"x/{name}"] = values
    convert(path, "hdf5", tmp_path / "out", rows="records", batch_size=1, shuffle=False)
    with open_reader(tmp_path / "out") as reader:
        np.testing.assert_array_equal(np.array(list(reader)).reshape(-1), IDS[: len(IDS) // 4 * 4])


def test_a_layout_that_is_not_certain_has_to_be_named(tmp_path):
    path = with_offsets(tmp_path / "x.h5")
    with h5py.File(path, "r+") as h5:
        h5.copy("x", "y")
    message = one_error(run_zb("convert", path, tmp_path / "o", "--to", "stream"), 1)
    pairs = [f"--dataset='{each}/values', --offsets='{each}/offsets'" for each in "xy"]
    assert f"found {'; '.join(pairs)}: name" in message
    assert message.endswith(
        "name the values, the lists or the group by --dataset, and the ends or lengths by --offsets"
    )
    named = ("--dataset", "x/values", "--offsets", "x/offsets")
    report_of(zb, "convert", path, tmp_path / "out", "--to", "stream", *named)
    with open_corpus(tmp_path / "out") as stream:
        assert stream.documents[4].ids.tolist() == DOCUMENTS[4]
    with h5py.File(tmp_path / "words.h5", "w") as h5:
        h5["docs/train"], h5["docs/val"] = IDS[:20], IDS[20:]
    assert not fits("ragged", tmp_path / "words.h5")  # two streams?
    refused = (lambda: open_ragged([tmp_path / "words.h5"]),)
    is_refused(ConvertError, *refused, match="found none of these: name the values, .* the group by dataset")
    found = documents_of(open_ragged([tmp_path / "words.h5"], dataset="docs"))
    assert [len(each) for each in found.tokens] == [20, len(IDS) - 20]


def test_a_group_and_lists_are_named_without_their_format(tmp_path):
    for name, path in (("docs", datasets(tmp_path / "0.h5")), ("x/input_ids", lists(tmp_path / "1.h5"))):
        out = tmp_path / path.stem
        convert(path, "stream", out, dataset=name)
        with open_corpus(out) as stream:
            assert stream.documents[4].ids.tolist() == DOCUMENTS[4]


BAD_OFFSETS = {
    "another end": (OFFSETS + np.where(np.arange(len(OFFSETS)) == len(LENGTHS), 5, 0), r"end with the 264 .*found 269"),
    "back": (np.concatenate([OFFSETS[:4], [3], OFFSETS[5:]]), "ascend up to 264, found 3 after 4, at document 4"),
    "outside": (np.concatenate([OFFSETS[:4], [1 << 60], OFFSETS[5:]]), "found 1,152,921,504,606,846,976 after 4"),
    "below 0": (np.concatenate([OFFSETS[:4], [-5], OFFSETS[5:]]), "found -5 after 4"),
    "lengths that are too long": (np.array([3, 0, 262]), "or lengths that add up to them, found 262"),
    "lengths below 0": (np.array([3, -2, 263]), "or lengths that add up to them, found 263"),
    "lengths that overflow": (np.array([1 << 62, 1 << 62, 1 << 62, (1 << 62) + 263, 1]), "add up to them, found 1"),
    "none": (OFFSETS[:0], "end with the 264 values of x/values, .*found -1"),
}


def test_lengths_are_named_and_add_up(tmp_path):
    path = with_lengths(tmp_path / "x.h5")
    is_refused(FormatError, lambda: convert(path, "stream", tmp_path / "out"), match="x/lengths")  # no guess
    for lengths in (np.array([*LENGTHS[:-1], LENGTHS[-1] + 1]), np.array([-1, *LENGTHS, 1])):
        other = values_with(tmp_path / "y.h5", lengths, "lengths")
        is_refused(FormatError, lambda other=other: open_ragged([other], **OF_LENGTHS), match="that add up to them")
    source = open_ragged([path], **OF_LENGTHS)
    with h5py.File(path, "r+") as h5:
        h5["x/lengths"][0] = 5000
    is_refused(FormatError, lambda: documents_of(source))


@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_offsets_are_compared_with_the_values(name, tmp_path):
    offsets, message = BAD_OFFSETS[name]
    path = values_with(tmp_path / "x.h5", offsets)
    named = {"dataset": "x/values", "offsets": "x/offsets", "source_format": "ragged"}
    is_refused(FormatError, lambda: convert(path, "stream", tmp_path / "out", **named), match=f"x/offsets: .*{message}")
    assert not (tmp_path / "out").exists()


def test_documents_that_a_file_cannot_hold_take_no_memory(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5.create_dataset("values", (1 << 50,), "<i4", chunks=(1 << 10,))
        h5["offsets"] = np.array([0, 1 << 50])
        h5.create_dataset("docs/0", data=np.arange(5))
        h5.create_dataset("docs/1", (1 << 50,), "<i8", chunks=(1 << 10,))
        h5.create_dataset("lists", (1 << 50,), h5py.vlen_dtype(np.dtype("<i4")), chunks=(1 << 10,))
    for how in ({"dataset": "values", "offsets": "offsets"}, {"dataset": "lists"}):
        is_refused(FormatError, lambda how=how: open_ragged([tmp_path / "x.h5"], **how), match="were never written")
    is_refused(
        IncompleteError,
        lambda: open_ragged([tmp_path / "x.h5"], dataset="lists", unwritten="fill"),
        match="truncated|cut short",
    )
    source = open_ragged([tmp_path / "x.h5"], dataset="docs")
    is_refused(FormatError, lambda: documents_of(source), match="docs/1.*were never written")


def test_values_whose_tail_was_never_written_are_refused_by_it(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as h5:
        h5.create_dataset("values", (100,), "<i4", chunks=(10,), fillvalue=7)[:60] = np.arange(60)
        h5["offsets"] = np.arange(0, 101, 20)
    done = run_zb("convert", tmp_path / "x.h5", tmp_path / "o", "--from", "ragged", "--to", "stream", code=1)
    message = done.stderr.rstrip()
    assert "values: expected 100 tokens, found that tokens 60 to 99 were never written" in message
    assert message.endswith("pass --unwritten fill to take the fill value 7 for them")
    filled = documents_of(open_ragged([tmp_path / "x.h5"], unwritten="fill"))
    assert filled.tokens[3:] == [[7] * 20] * 2
    with h5py.File(tmp_path / "x.h5", "r+") as h5:
        h5["offsets"][4:] = 60  # then all documents were written
    source = open_ragged([tmp_path / "x.h5"], dataset="values", offsets="offsets")
    assert [len(each) for each in documents_of(source).tokens] == [20, 20, 20, 0, 0]


def test_values_that_are_no_ids_are_refused(tmp_path):
    path = datasets(tmp_path / "x.h5")
    with h5py.File(path, "r+") as h5:
        del h5["docs/doc_4"]
        h5["docs/doc_4"] = np.arange(5.0)
    source = open_ragged([path], dataset="docs")
    message = "docs/doc_4: expected a dataset of one axis of int32, as the first"
    is_refused(FormatError, lambda: documents_of(source), match=message)
    with h5py.File(tmp_path / "y.h5", "w") as h5:
        h5["values"], h5["offsets"] = np.arange(5.0), [0, 5]
    named = {"dataset": "values", "offsets": "offsets"}
    is_refused(FormatError, lambda: open_ragged([tmp_path / "y.h5"], **named), match="values: expected integers")
    path = lists(tmp_path / "z.h5")
    with h5py.File(path, "r+") as h5:
        h5["x/labels"][3] = np.arange(2)
    is_refused(ConvertError, lambda: documents_of(open_ragged([path])), match="'labels': expected 7 values")
    with h5py.File(tmp_path / "x.h5", "r+") as h5:
        h5["out"] = h5py.ExternalLink("y.h5", "values")
    named = {"dataset": "out", "offsets": "docs/doc_1"}
    is_refused(FormatError, lambda: open_ragged([tmp_path / "x.h5"], **named), match="nothing outside of a file")


@pytest.mark.parametrize(("name", "numbers", "expected"), [
    ("ends", [0, 2, 5], [0, 2, 3]), ("doc_ends", [0, 2, 5], [0, 2, 3]), ("docEnds", [0, 0, 5], [0, 0, 5]),
    ("end_offsets", [0, 5], [0, 5]), ("offsets", [0, 2, 5], [2, 3]), ("doc_offsets", [0, 0, 5], [0, 5]),
    ("cu_seqlens", [0, 5], [5]), ("indptr", [0, 2, 5], [2, 3]), ("row_splits", [0, 2, 5], [2, 3]),
    ("offsets", [2, 5], [2, 3]), ("numbers", [2, 5], [2, 3]), ("lengths", [0, 5], [0, 5]),
    ("lengths", [0, 0, 5], [0, 0, 5]),
])  # fmt: skip
def test_numbers_from_0_on_are_offsets_or_ends_as_their_name_has_it(name, numbers, expected, tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as h5:
        h5["values"] = np.arange(1, 6)
        h5[name] = np.array(numbers)
    assert [len(each) for each in documents_of(open_ragged([path])).tokens] == expected


def test_numbers_from_0_on_whose_name_does_not_tell_are_refused_with_a_line(tmp_path):
    path = tmp_path / "it's.h5"
    with h5py.File(path, "w") as h5:
        h5["x/values"], h5["x/numbers"] = np.arange(1, 6), np.array([0, 2, 5])
    with pytest.raises(
        ConvertError, match="as offsets they have 2 documents, as ends 3, of which the first is"
    ) as error:
        open_ragged([path])
    line = str(error.value).partition("rename it: ")[2]
    exec(line, {"h5py": h5py})
    assert [len(each) for each in documents_of(open_ragged([path])).tokens] == [2, 3]


@pytest.mark.parametrize("name", ["seq_lengths", "labels", "spans"])
def test_lists_beside_records_of_ids_are_no_ids(name, tmp_path):
    path = tmp_path / "x.h5"
    ids = np.arange(100, 132, dtype=np.uint16).reshape(4, 8)
    with h5py.File(path, "w") as h5:
        h5["input_ids"] = ids
        stored = h5.create_dataset(name, (4,), h5py.vlen_dtype("i4"))
        for number, values in enumerate([[5, 3], [8], [2, 6], [4, 4]]):
            stored[number] = values
    with open_reader(path) as reader:
        np.testing.assert_array_equal(reader[0], ids[:1])
    one_error(run_zb("convert", path, tmp_path / "out", "--to", "stream"), 1)
    how = {"tokens_only": True} if name == "labels" else {}
    with (
        pytest.warns(match="left out, as they cannot be fields: seq_lengths")
        if name == "seq_lengths"
        else nullcontext()
    ):
        convert(path, "hdf5", tmp_path / "batches", batch_size=4, shuffle=False, workers=1, **how)
    with open_reader(tmp_path / "batches") as reader:
        np.testing.assert_array_equal(reader[0], ids)


def test_numbered_datasets_of_which_two_look_like_values_and_ends_name_the_group_too(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as h5:
        for number, ids in enumerate([[7], [0], [], [5, 6], [1, 1]]):
            h5[str(number)] = np.array(ids, "u2")
    with pytest.raises(ConvertError, match="found") as error:
        open_ragged([path])
    assert "'/'" in str(error.value)
    assert len(documents_of(open_ragged([path], dataset="/")).tokens) == 5
