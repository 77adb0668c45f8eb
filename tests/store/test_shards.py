"""A store is what its `shards.json` says: everything else is an error that names the file."""

import json
import os
import pickle
import re
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
from array_tokens import npy_source
from contents import batches_of, write_streams
from contract import check_closing, check_reader, is_refused, random_tokens
from damage import flip, flip_stored, flip_token
from hypothesis import given
from hypothesis import strategies as st
from processes import python

from examples import examples
from zb_hdf5 import ShardEntry, ShardIndex, StoreMeta, errors, open_reader, verify_store
from zb_hdf5.converters.arguments import convert
from zb_hdf5.files.ranges import Run
from zb_hdf5.spec import NO_SHA256, SPLITS

MISSING = object()


@pytest.fixture
def backends():
    """Seven batches are in a .batch shard of 2, an .h5 shard of 3 and a .batch shard of 2."""
    return ("batch", "hdf5")


def change_index(folder, *keys_and_value):
    """Set one value of `shards.json`, given its keys; a key of one shard as "shards", key, number."""
    *keys, last, value = keys_and_value
    content = json.loads((folder / "shards.json").read_text())
    target = content
    for key in keys:
        target = target[key]
    if value is MISSING:
        del target[last]
    else:
        target[last] = value
    (folder / "shards.json").write_text(json.dumps(content))


# --- shards.json -----------------------------------------------------------------------------------------------
names = st.sampled_from(["shard-00000.h5", "ä-é_9.batch", "x.h5"])
free_json = st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=9))


@st.composite
def indexes(draw):
    u64 = st.integers(0, 2**64 - 1)
    tokenizer = draw(st.none() | st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=5), min_size=1))
    columns = st.sets(st.sampled_from(["batches", "fields/a"]))
    meta = StoreMeta(
        *draw(st.tuples(st.integers(1, 99), st.integers(1, 99))),
        np.dtype(draw(st.sampled_from(["<u4", "<u2"]))),
        *(draw(u64) for _ in range(4)),
        tokenizer=json.dumps(tokenizer) if tokenizer else "",
    )
    digests = st.integers(0, 2**256 - 1).map("{:064x}".format)
    counts = draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=3))
    shards = tuple(
        ShardEntry(
            draw(names), draw(st.sampled_from(["batch", "hdf5"])), draw(st.integers(0, 2**40)), count,
            count * meta.batch_tokens, draw(digests), draw(st.integers(-1, 2**32 - 1)), draw(st.integers(-1, 9)),
            draw(st.sampled_from(SPLITS)), draw(st.booleans()),
            {name: (Run(draw(st.integers(0, 2**40)), meta.batch_bytes, count),) for name in draw(columns)},
        )
        for count in counts
    )  # fmt: skip
    return ShardIndex(meta, shards, draw(st.sampled_from(["global", "none"])), draw(free_json))


@examples(50)
@given(indexes())
def test_index_round_trip(index):
    assert ShardIndex.from_json(index.to_json(), "shards.json") == index


def test_unknown_keys_are_left_for_later_versions(store, tokens):
    change_index(store, "extents", [[0, 1, 2]])
    change_index(store, "shards", "later", [{"x": 1}])
    shutil.copyfile(store / "shard-00000.batch", store / "shard-00003.batch")  # nor does it name this
    np.testing.assert_array_equal(batches_of(store), tokens)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"not json", b"[]", b"[1, 2]", b"null", b"7", b'"zb-shards"', b"\xff\xfe\x00", b"[" * 100_000, b"{}"],
    ids=lambda content: repr(content[:12]),
)
def test_a_file_that_is_no_index_is_a_format_error(content, store):
    (store / "shards.json").write_bytes(content)
    is_refused(errors.FormatError, lambda: open_reader(store), match=r"store/shards\.json")
    (store / "shards.json").unlink()
    is_refused(errors.FormatError, lambda: open_reader(store), match=r"store: no shards\.json: its index was lost")


#: Keys of an index and of its shards, and values that they cannot have.
WRONG = {
    "format": ["zb-batches", MISSING, 1], "version": [1, 4, "1", True, 1.0, MISSING], "layout": ["streams", MISSING],
    "dtype": ["int64", "float32", 4, "u", MISSING], "shuffle": [5, None, MISSING], "source": ["a text", [1]],
    "batch_size": [0, -3, "3", 3.0, True, None, 2**40, MISSING], "seq_len": [0, [10], MISSING],
    "seed": [-1, 2**64, None, MISSING], "total_records": [-1, "many", MISSING], "document_count": [MISSING],
    "vocab_size": [MISSING, -1], "token_count": [211, "210", MISSING], "sha256": ["0" * 64, None, MISSING],
    "tokenizer": ["gpt2", [1]], "shards": [[], {}, None, MISSING, ["shard-00000.batch"]], "fields": [None, [1]],
}  # fmt: skip
WRONG_IN_A_SHARD = {
    "path": ["../x.h5", "a/../../x.h5", "/etc/passwd", "", ".", 5, "x\0.h5", MISSING],
    "backend": ["zarr", None, MISSING], "num_batches": [4, -3, True, 3.0, MISSING], "token_count": [91, MISSING],
    "sha256": [NO_SHA256, "0" * 63, "x" * 64, "A" * 64, 5, MISSING], "complete": [1, MISSING],
    "split": [None, "tarin", "", MISSING], "document_count": ["3", -2, None, True],
}  # fmt: skip
CHANGES = [(key, value) for key, values in WRONG.items() for value in values]
CHANGES += [("shards", key, 1, value) for key, values in WRONG_IN_A_SHARD.items() for value in values]


def named(change):
    return ", ".join("missing" if part is MISSING else repr(part)[:18] for part in change)


@pytest.mark.parametrize("change", CHANGES, ids=named)
@pytest.mark.thin
def test_a_malformed_index_is_a_format_error(change, store):
    change_index(store, *change)
    is_refused(errors.FormatError, lambda: open_reader(store), match=r"store/shards\.json")
    if change == ("version", 4):
        is_refused(errors.FormatError, lambda: verify_store(store), match="expected version 3, found 4")


@pytest.mark.parametrize("make", [lambda path: f"../{path.name}", str, lambda path: f"a/../../{path.name}"])
def test_a_path_that_leaves_the_folder_is_refused_though_the_file_is_there(make, store):
    outside = store.parent / "outside.h5"
    shutil.copyfile(store / "shard-00001.h5", outside)
    (store / "a").mkdir()
    change_index(store, "shards", "path", 1, make(outside))
    is_refused(errors.FormatError, lambda: open_reader(store), match="leaves the folder of the store")


# --- the shards and the index ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["shard-00000.batch", "shard-00001.h5", "shard-00002.batch"])
def test_a_missing_shard_is_named(name, store):
    (store / name).rename(store / "aside")
    assert [problem and problem.exit_code for problem in problems(store)].count(4) == 1
    with pytest.raises(errors.FormatError, match=rf"names {name}, which is not there \(1 of 3 shards are missing\)"):
        open_reader(store)
    (store / "aside").rename(store / name)
    change_index(store, "shards", "path", 1, "far/away/shard-00001.h5")
    with pytest.raises(errors.FormatError, match=r"names far/away/shard-00001\.h5, which is not there"):
        open_reader(store)


@pytest.mark.parametrize(("field", "make"), [
    ("num_batches", lambda tokens: tokens[:2]),
    ("shape", lambda tokens: tokens[:3].reshape(3, 10, 3)),
    ("dtype", lambda tokens: (tokens[:3] % 100).astype("uint16")),
    ("sha256", lambda tokens: np.ascontiguousarray(tokens[:3])),
])  # fmt: skip
def test_another_file_in_place_of_a_shard_is_found_when_it_is_read(field, make, store, tokens, write_file):
    write_file(store / "shard-00001.h5", make(tokens), overwrite=True)
    assert f" has {'num_batches 3, the file has 2' if field == 'num_batches' else 'sha256'}" in str(problems(store)[1])
    with open_reader(store) as reader:
        np.testing.assert_array_equal(reader.read_batch(1), tokens[1])
        is_refused(errors.FormatError, lambda: reader.read_batch(2), match=rf"shard-00001\.h5: its index has {field}")


@pytest.mark.parametrize(("number", "field", "make"), [
    (1, "shape", lambda tokens: tokens[2:5].reshape(3, 10, 3)),  # the same bytes, and so the same digest
    (1, "dtype", lambda tokens: tokens[2:5].view("<u2")),
    (0, "shape", lambda tokens: tokens[:2].reshape(2, 10, 3)),
    (0, "num_batches", lambda tokens: tokens[:3]),
    (0, "dtype", lambda tokens: tokens[:2].astype("uint16")),
])  # fmt: skip
def test_a_file_of_another_shape_dtype_or_count_is_reported(number, field, make, store, tokens, write_file):
    name = ("shard-00000.batch", "shard-00001.h5")[number]
    write_file(store / name, make(tokens), overwrite=True)
    message = rf"{name}: its index has {field}"
    if number == 1 or field == "shape":  # a reader cannot tell, and need not
        assert re.search("has (shape|dtype)" if number else message, str(problems(store)[number]))
    else:
        with pytest.raises(errors.FormatError, match=message), open_reader(store) as reader:
            reader.read_batch(0)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda store: change_index(store, "shards", "complete", 1, False), r"shard-00001\.h5: its writer has not"),
    (lambda store: os.truncate(store / "shard-00001.h5", 1 << 20), r"shard-00001\.h5"),
])  # fmt: skip
def test_a_shard_that_is_not_complete_is_refused(spoil, message, store):
    spoil(store)
    with open_reader(store) as reader, pytest.raises(errors.IncompleteError, match=message):
        reader.read_batch(2)
    change_index(store, "shards", "backend", 0, "hdf5")
    assert "shard-00000.batch" in str(problems(store)[0])


def test_a_store_may_be_moved_and_copied_and_its_shards_may_lie_in_folders(store, tokens, tmp_path, monkeypatch):
    (store / "a" / "b").mkdir(parents=True)
    (store / "shard-00001.h5").rename(store / "a" / "b" / "x.h5")
    change_index(store, "shards", "path", 1, "a/b/x.h5")
    np.testing.assert_array_equal(batches_of(store), tokens)
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(store, moved)
    shutil.rmtree(store)
    np.testing.assert_array_equal(batches_of(moved), tokens)
    for folder, paths in ((moved.parent, ("moved", "moved/shards.json", "./moved/")), (moved, (".", "shards.json"))):
        monkeypatch.chdir(folder)
        for path in paths:
            np.testing.assert_array_equal(batches_of(path), tokens)


# --- one sequence of batches -----------------------------------------------------------------------------------
@pytest.mark.parametrize("backends", [("batch",), ("hdf5",), ("batch", "hdf5")], ids="-".join)
@pytest.mark.parametrize("cuts", [(), (1,), (0,), (7,), (3, 3), (0, 0, 4, 4, 7), (1, 2, 3, 4, 5, 6)], ids=str)
@pytest.mark.thin
def test_batches_are_numbered_across_shards(cuts, backends, tmp_path, tokens, write_store):
    """Also where a shard is empty: the first, one in the middle, several, the last."""
    reader = open_reader(write_store(tmp_path / "store", tokens, cuts, backends))
    check_reader(reader, tokens)
    check_closing(reader, tokens)


def test_a_store_of_empty_shards_is_empty(tmp_path, tokens, write_store):
    with open_reader(write_store(tmp_path / "store", tokens[:0], (0,), ("hdf5",))) as reader:
        assert (len(reader), list(reader)) == (0, [])
        is_refused(IndexError, lambda: reader.read_batch(0))


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_descriptors_are_bounded_however_many_shards_there_are(access, tmp_path, write_store, monkeypatch):
    monkeypatch.setattr("zb_hdf5.files.paths.descriptor_room", lambda needed: 4 if access == "pread" else 8)
    expected = random_tokens(40, 2, 5)
    folder = write_store(tmp_path / "store", expected, range(1, 40), ("batch", "batch", "hdf5"))
    before = len(os.listdir("/proc/self/fd"))
    kept = []
    with open_reader(folder, access=access) as reader:
        for index in [*range(40), *np.random.default_rng(0).integers(0, 40, 200).tolist()]:
            kept.append((index, reader.read_batch(index)))
            if access == "pread":  # a view keeps its mapping, and that a descriptor
                assert len(os.listdir("/proc/self/fd")) <= before + 4
    while kept:  # though most of their shards were let go of
        index, batch = kept.pop()
        np.testing.assert_array_equal(batch, expected[index])
    del batch
    with open_reader(folder, access=access) as reader:  # views that are not kept
        for index in range(40):
            np.testing.assert_array_equal(reader.read_batch(index), expected[index])
            assert len(os.listdir("/proc/self/fd")) <= before + 2 * 4  # Python's mmap has a descriptor of its own


def test_a_shard_that_changes_after_it_was_let_go_of_is_refused(tmp_path, tokens, write_store, write_file, monkeypatch):
    monkeypatch.setattr("zb_hdf5.files.paths.descriptor_room", lambda needed: 2)
    folder = write_store(tmp_path / "store", tokens, (2, 5))
    with open_reader(folder) as reader:
        reader.read_batch(0)
        reader.read_batch(6)
        write_file(folder / "shard-00000.h5", tokens[1::-1], overwrite=True)
        for _ in range(2):  # and stays refused
            with pytest.raises(errors.FormatError, match=r"shard-00000\.h5: (changed since|shards\.json has)"):
                reader.read_batch(0)


# --- verify ----------------------------------------------------------------------------------------------------
def problems(path, **options):
    return [report.problem for report in verify_store(path, **options)]


@pytest.fixture
def one_core():
    """Have this process run on one core only, as in a Slurm step."""
    before = os.sched_getaffinity(0)
    if os.cpu_count() == 1:
        pytest.skip("needs a second core, to be kept from it")
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize("layout", ["batches", "stream"])
def test_verify_takes_the_cores_of_its_process_not_of_the_node(layout, store, tmp_path, one_core):
    if layout == "stream":
        store = write_streams(tmp_path / "streams", [np.arange(100)] * 3)
    seen = []

    def progress(tokens):
        seen.append(sum(thread.name.startswith("zb-verify") for thread in threading.enumerate()))

    assert [report.problem for report in verify_store(store, progress=progress)] == [None] * 3
    assert set(seen) == {1}


def test_a_batch_shard_is_verified_by_its_sidecar_and_by_the_index(store, tokens, write_file):
    flip(store / "shard-00002.batch.crc32", 4)
    found = problems(store)[2]
    assert isinstance(found, errors.ChecksumError)
    assert "batch 1 is the first bad one" in str(found)
    flip(store / "shard-00002.batch.crc32", 4)
    (store / "shard-00000.batch.crc32").unlink()
    assert verify_store(store)[0].checks == ["index"]
    assert problems(store) == [None] * 3
    flip_stored(store / "shard-00000.batch", tokens[1], 8)
    assert "shards.json has sha256" in str(problems(store)[0])
    write_file(store / "shard-00000.batch", tokens[5:7], overwrite=True)  # consistent damage of both
    assert isinstance(problems(store)[0], errors.ChecksumError)
    assert "shards.json has sha256" in str(problems(store)[0])


def test_an_index_describes_its_store_and_is_saved_and_loaded(store, tmp_path):
    index = ShardIndex.load(store)
    index.save(tmp_path)
    assert ShardIndex.load(tmp_path) == ShardIndex.load(tmp_path / "shards.json") == index
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["shards.json", "store"]
    assert (index.num_batches, index.meta.shape) == (7, (3, 10))
    with open_reader(store) as reader:
        assert (reader.corpus.backend, reader.corpus.sha256) == ("batch", index.sha256)
        assert index.backends == ["batch", "hdf5"]  # that of a reader is the format of its first file
        assert [shard.num_batches for shard in reader.corpus.index.shards] == [2, 3, 2]
        # no advice to open another store: some of its shards are HDF5
        is_refused(errors.BackendError, lambda: reader.read_pieces([0]), match="holds no documents")
    other = replace(index, shards=index.shards[::-1])
    assert other.sha256 != index.sha256  # the order of shards is content


# --- an index that spares HDF5 ---------------------------------------------------------------------------------
def test_a_pickled_copy_is_the_index_and_little_else(store, tokens, tmp_path):
    """Each worker gets one: what follows from the index is not in it, whatever the number of shards is."""

    def pickled(count):
        index = ShardIndex.load(store)
        entries = [replace(index.shards[1], path=f"s-{number}.h5") for number in range(count)]
        many = tmp_path / f"of-{count}"
        many.mkdir()
        meta = replace(index.meta, total_records=count * entries[0].num_batches * index.meta.batch_size)
        replace(index, shards=entries, meta=meta).save(many)
        for entry in entries:
            (many / entry.path).touch()
        shutil.copy(store / index.shards[1].path, many / "s-0.h5")
        with open_reader(many) as reader, pickle.loads(pickle.dumps(reader)) as copy:
            np.testing.assert_array_equal(copy[0], tokens[2])
            assert copy.num_batches == reader.num_batches
            return len(pickle.dumps(copy)), len(pickle.dumps(copy.corpus.index))

    (one, index_of_one), (many, index_of_many) = pickled(1), pickled(3000)
    assert one - index_of_one < 1500
    assert many - index_of_many < one - index_of_one + 3000 * 5  # the place of its first token


def test_a_store_is_read_without_hdf5_where_the_index_knows_the_places(tokens, tmp_path, write_store):
    folder = write_store(tmp_path / "store", tokens, (2, 5))
    assert all(shard.columns for shard in ShardIndex.load(folder).shards)
    code = (
        "import sys, numpy as np; from zb_hdf5 import open_reader\n"
        "reader = open_reader(sys.argv[1]); print(sum(int(np.array(batch).sum()) for batch in reader))\n"
        "print('h5py' in sys.modules)"
    )
    done = python(code, folder, check=True)
    assert done.stdout.split() == [str(int(tokens.astype("u8").sum())), "False"]


@pytest.mark.parametrize("shift", [(4096, 0), (-4096, 0), (0, 4), (0, -4), (2**40, 0)])
def test_wrong_places_are_never_wrong_tokens(shift, tokens, tmp_path, write_store):
    folder = write_store(tmp_path / "store", tokens, (3,))
    index = ShardIndex.load(folder)
    first, *others = index.shards
    [run] = first.columns["batches"]
    moved = Run(run.base + shift[0], run.stride + shift[1], run.num_batches)
    first = replace(first, columns=first.columns | {"batches": (moved,)})
    replace(index, shards=(first, *others)).save(folder)  # with the digest of its own text
    message = r"shard-00000\.h5: expected its batches at the offsets.*rebuild the index|columns: batches overlap"
    with pytest.raises(errors.ZbError, match=message), open_reader(folder) as reader:
        reader.read_batch(0)
    if shift[1] >= 0:  # else the index cannot be read
        assert [report.problem is None for report in verify_store(folder)] == [False, True]


def test_a_damaged_batch_that_is_the_first_to_be_read_is_told(tokens, tmp_path, write_store):
    folder = write_store(tmp_path / "store", tokens, (3,))
    flip_token(folder / "shard-00000.h5", 2)
    with pytest.raises(errors.ChecksumError, match="batch 2: expected crc32"), open_reader(folder) as reader:
        reader.read_batch(2)


@pytest.mark.parametrize("change", [
    ("runs", "x"), ("runs", [1]), ("runs", [1, -2]), ("runs", [True, -1]), ("offset", [-4096]), ("offset", []),
    ("stride", ["a"]), ("stride", [0]), ("chunks", [2]), ("chunks", [2**70]), ("chunks", MISSING),
], ids=named)  # fmt: skip
def test_places_that_are_none_are_told(change, tokens, tmp_path, write_store):
    folder = write_store(tmp_path / "store", tokens, (3,))
    change_index(folder, "columns", "batches", *change)
    is_refused(errors.FormatError, lambda: open_reader(folder), match="columns: ")


def test_every_flipped_bit_of_an_index_is_found(tokens, tmp_path, write_store, thinned):
    path = write_store(tmp_path / "store", tokens, (3,)) / "shards.json"
    text = path.read_bytes()
    expected = ShardIndex.load(path)
    for position in thinned(range(len(text)), 3):
        flipped = bytearray(text)
        flipped[position] ^= 1 << position % 7
        path.write_bytes(flipped)
        try:
            assert ShardIndex.load(path) == expected  # only what holds nothing, such as the key "check" itself
            assert position >= text.rindex(b',\n "check"') or chr(text[position]).isspace(), position
        except errors.FormatError:
            pass


@pytest.mark.parametrize("field", ["seed", "total_records"])
def test_a_flipped_bit_in_the_counts_of_a_batch_header_is_found(field, tmp_path):
    np.save(tmp_path / "in.npy", np.arange(480, dtype="<u4").reshape(48, 10))
    source = npy_source([tmp_path / "in.npy"], batch_size=4, seq_len=10, seed=42)
    convert(source, "batch", tmp_path / "store", shards=3)
    assert [report.problem for report in verify_store(tmp_path / "store")] == [None] * 3
    offset = {"seed": 32, "total_records": 36}[field]
    flip(tmp_path / "store" / "shard-00001-of-00003.batch", offset)
    assert any(report.problem for report in verify_store(tmp_path / "store"))
