"""The HDF5 store: plain HDF5 to every other tool, extents to us, and never wrong tokens from a damaged file."""

import errno
import hashlib
import io
import os
import re
import shutil
import subprocess
import threading
import zlib

import h5py
import numpy as np
import pytest
from commandline import one_error, run
from contents import batches_of
from contract import is_refused, random_tokens
from descriptors import open_descriptors
from hypothesis import given
from hypothesis import strategies as st
from interpreter import start_program
from processes import in_forks
from reading import reading

from zb_hdf5 import ReadAs, StoreMeta, __version__, errors, open_reader, open_writer, verify_store
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.files.look import Look
from zb_hdf5.formats.h5_corpus import HDF5Corpus
from zb_hdf5.formats.h5_writer import HDF5BatchWriter
from zb_hdf5.hdf5.h5_file import open_h5_for_reading
from zb_hdf5.spec import BATCHES_ATTRIBUTES, CRC32_CHUNK_ROWS, DESCRIPTIONS, NO_SHA256, ROOT_ATTRIBUTES

needs_h5dump = pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed")


@pytest.fixture
def path(tmp_path, tokens, write_file):
    return write_file(tmp_path / "x.h5", tokens, seed=42, total_records=23, expected_batches=7).path


def offsets_of(path):
    """Return the byte offset of every chunk, in batch order, as HDF5 itself tells it."""
    found = {}
    with h5py.File(path, "r") as h5:
        h5["batches"].id.chunk_iter(lambda chunk: found.update({chunk.chunk_offset[0]: chunk.byte_offset}))
    return np.array([found[index] for index in range(len(found))])


def copy_attributes(attributes, stored, **changes):
    """Give a dataset the attributes of `batches`, with the same types."""
    for name, dtype in BATCHES_ATTRIBUTES.items():
        stored.attrs.create(name, changes.get(name, attributes[name]), dtype=dtype)


def text(value):
    return value.decode() if isinstance(value, bytes) else value


# --- what other tools see --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["uint32", "uint16"])
def test_plain_h5py_reads_what_was_written(dtype, tmp_path, write_file):
    expected = random_tokens(5, 3, 10, dtype)
    with h5py.File(write_file(tmp_path / "x.h5", expected).path, "r") as h5:
        assert sorted(h5) == ["batches", "crc32"]
        stored = h5["batches"]
        assert stored.dtype == np.dtype(dtype).newbyteorder("<")
        for index, batch in enumerate(expected):
            np.testing.assert_array_equal(stored[index], batch)
        np.testing.assert_array_equal(stored[1:4, :, 3], expected[1:4, :, 3])


@needs_h5dump
def test_h5dump_reads_what_was_written(path, tokens, tmp_path):
    raw = tmp_path / "raw.bin"
    subprocess.run(["h5dump", "-d", "/batches", "-b", "LE", "-o", raw, path], check=True, capture_output=True)
    assert raw.read_bytes() == tokens.tobytes()
    shown = subprocess.run(["h5dump", "-A", path], check=True, capture_output=True, text=True).stdout
    for name in (*ROOT_ATTRIBUTES, *BATCHES_ATTRIBUTES):
        assert f'ATTRIBUTE "{name}"' in shown


def test_the_layout_attributes_and_their_types(path, tokens):
    with h5py.File(path, "r") as h5:
        stored = h5["batches"]
        assert (stored.shape, stored.maxshape, stored.chunks) == ((7, 3, 10), (None, 3, 10), (1, 3, 10))
        assert stored.id.get_create_plist().get_nfilters() == 0
        assert h5["crc32"].dtype.str == "<u4"
        assert h5["crc32"][:].tolist() == [zlib.crc32(batch.tobytes()) for batch in tokens]
        root = h5.attrs
        batches = h5["batches"].attrs
        assert sorted(root) == sorted((*ROOT_ATTRIBUTES, "seed", "total_records"))  # what is unknown is absent
        assert (text(root["format"]), text(root["description"])) == ("zb-batches", DESCRIPTIONS["batches"])
        assert text(root["creator"]).startswith(f"zb_hdf5 {__version__} (h5py {h5py.__version__}, HDF5 ")
        numbers = {name: int(root[name]) for name in root if name not in ("format", "creator", "description")}
        assert numbers == {"format_version": 3, "batch_size": 3, "seq_len": 10, "seed": 42, "total_records": 23}
        assert {root.get_id(name).dtype.str for name in numbers} == {"<u4", "<u8"}
        assert root.get_id("format_version").dtype.str == "<u4"
        assert {name: batches.get_id(name).dtype for name in BATCHES_ATTRIBUTES} == BATCHES_ATTRIBUTES
        assert set(batches) - set(BATCHES_ATTRIBUTES) == {"DIMENSION_LABELS"}
        assert [axis.label for axis in h5["batches"].dims] == ["batch", "record", "token"]
        assert (batches["num_batches"], batches["token_count"], batches["complete"]) == (7, 210, 1)
        assert batches["max_token"] == tokens.max()
        assert text(batches["sha256"]) == hashlib.sha256(tokens.tobytes()).hexdigest()
    data = path.read_bytes()
    assert data[:8] == b"\x89HDF\r\n\x1a\n"
    assert data[8] == 3  # superblock version: HDF5 1.10 reads it
    assert data[11] == 0  # no writer
    assert int.from_bytes(data[28:36], "little") == len(data)  # trimmed
    with open_reader(path, access="pread") as reader:
        reader.read_batch(0)
        with h5py.File(path, "r+"):  # HDF5 would refuse, had it the file open for reading
            pass


@pytest.mark.parametrize("expected_batches", [0, 10, CRC32_CHUNK_ROWS, 3 * CRC32_CHUNK_ROWS])
def test_crc32_has_exactly_as_many_rows_whatever_was_expected(expected_batches, tmp_path):
    tokens = random_tokens(CRC32_CHUNK_ROWS + 30, 1, 2, "uint16")
    with open_writer(
        tmp_path / "x.h5", batch_size=1, seq_len=2, dtype="uint16", expected_batches=expected_batches
    ) as writer:
        for start, stop in ((0, 1), (1, 4000), (4000, 4100), (4100, len(tokens))):
            writer.write(tokens[start:stop])
    with h5py.File(tmp_path / "x.h5", "r") as h5:
        assert h5["crc32"][:].tolist() == [zlib.crc32(batch.tobytes()) for batch in tokens]
    np.testing.assert_array_equal(batches_of(tmp_path / "x.h5"), tokens)


def test_tokenizer_is_kept(tmp_path):
    described = '{"name": "gpt2", "Länge": ' + "1" * 200_000 + "}"
    meta = StoreMeta(1, 2, np.dtype("<u2"), vocab_size=50257, document_count=9, tokenizer=described)
    with HDF5BatchWriter(tmp_path / "x.h5", meta) as writer:
        writer.write([[1, 2]])
    with open_reader(tmp_path / "x.h5") as reader:
        assert reader.meta == meta


# --- layout ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((48, 32, 512), "uint32"), ((3000, 2, 512), "uint32"), ((3000, 1, 1100), "uint16"), ((5000, 1, 8), "uint16")],
    ids=["64 KiB", "4 KiB", "2200 B", "16 B"],
)
def test_batches_lie_in_one_run(shape, dtype, tmp_path, write_file):
    tokens = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    path = write_file(tmp_path / "x.h5", tokens, expected_batches=len(tokens)).path
    offsets = offsets_of(path)
    assert len(offsets) == len(tokens)
    assert len(set(np.diff(offsets))) == 1
    batch_bytes = tokens[0].nbytes
    if batch_bytes >= 4096:
        assert (offsets % 4096 == 0).all()
    with open_reader(path) as reader:
        assert [tuple(run) for run in reader.corpus.extents.runs] == [
            (offsets[0], offsets[1] - offsets[0], len(tokens))
        ]
    assert path.stat().st_size < offsets[-1] + batch_bytes + (1 << 20)
    raw = path.read_bytes()
    for index in (0, 1, len(tokens) - 1):
        assert raw[offsets[index] : offsets[index] + batch_bytes] == tokens[index].tobytes()


ORDERS = {"as h5py likes": range(300), "backwards": range(299, -1, -1)}
ORDERS["anywhere"] = np.random.default_rng(1).permutation(300)


@pytest.mark.parametrize("access", ["mmap", "pread", "h5py"])
@pytest.mark.parametrize("sequence", ORDERS.values(), ids=ORDERS)
def test_chunks_are_read_wherever_they_lie(sequence, access, path, tmp_path):
    """Files that another HDF5 program wrote or copied need not have one run."""
    tokens = random_tokens(300, 3, 10)
    with h5py.File(path, "r") as old, h5py.File(tmp_path / "y.h5", "w") as new:
        new.attrs.update(old.attrs)
        stored = new.create_dataset("batches", (300, 3, 10), "<u4", maxshape=(None, 3, 10), chunks=(1, 3, 10))
        for index in sequence:
            stored.id.write_direct_chunk((index, 0, 0), tokens[index])
        copy_attributes(old["batches"].attrs, stored, num_batches=300)
    out = np.zeros((120, 3, 10), np.uint32)
    with open_reader(tmp_path / "y.h5", access=access) as reader:
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)
        for start in (0, 77, 180):
            reader.read_batches_into(start, out)
            np.testing.assert_array_equal(out, tokens[start : start + 120])


def edited(path, edit):
    """Change a file with h5py, as a user might."""
    with h5py.File(path, "r+") as h5:
        edit(h5)
    return path


@pytest.mark.parametrize("access", ["mmap", "pread", "h5py"])
def test_num_batches_is_trusted_and_the_shape_is_not(access, path, tokens):
    edited(path, lambda h5: h5["batches"].resize(12, axis=0))
    np.testing.assert_array_equal(batches_of(path, access=access), tokens)
    edited(path, lambda h5: h5["batches"].attrs.modify("num_batches", np.uint64(4)))
    with open_reader(path, access=access) as reader:
        np.testing.assert_array_equal(np.stack(list(reader)), tokens[:4])
        is_refused(IndexError, lambda: reader.read_batch(4))


def test_a_committed_batch_that_was_never_written_is_found(path):
    def grow(h5):
        h5["batches"].resize(8, axis=0)
        h5["crc32"].resize(8, axis=0)
        h5["batches"].attrs.modify("num_batches", np.uint64(8))

    edited(path, grow)
    [report] = verify_store(path)
    assert "batch 7" in str(report.problem)


# --- malformed stores ------------------------------------------------------------------------------------------
def replaced(data):
    def edit(h5):
        attributes = dict(h5["batches"].attrs)
        del h5["batches"]
        copy_attributes(attributes, data(h5))

    return edit


def without_a_chunk(h5):
    """Copy the batches as another program does, which allocates a chunk when it writes it; two are missing."""
    h5.move("batches", "old")
    stored = h5.create_dataset("batches", (9, 3, 10), "<u4", maxshape=(None, 3, 10), chunks=(1, 3, 10))
    stored[:7] = h5["old"][:]
    copy_attributes(h5["old"].attrs, stored, num_batches=9)
    del h5["old"]


#: Attributes of the root and of `batches`, and values that they cannot have.
VALUES = {
    "/": [
        ("format", 1), ("format", np.array([1, 2])), ("format_version", "one"),
        ("format_version", np.array([1, 1])), ("batch_size", "three"), ("batch_size", np.array([3, 3])),
        ("batch_size", 0), ("batch_size", 4), ("batch_size", -3), ("seq_len", 2**33), ("seq_len", float("nan")),
        ("seed", -1), ("seed", "none"), ("total_records", float("inf")), ("vocab_size", np.array([])),
    ],
    "batches": [
        ("num_batches", "seven"), ("num_batches", 7.0), ("num_batches", -7),
        ("num_batches", np.array([7, 7], dtype="<u8")), ("complete", "yes"),
        ("complete", np.array([1, 1], dtype="u1")), ("sha256", 5), ("sha256", np.bytes_(b"\xff" * 64)),
        ("sha256", np.bytes_(b"abc")), ("sha256", np.bytes_(b"x" * 64)), ("token_count", 1.5),
    ],
}  # fmt: skip


def malformed():
    """Yield (edit of a file, name in the error)."""
    names = [name for name in ROOT_ATTRIBUTES if name not in ("creator", "description")]
    for owner, name in [*(("/", name) for name in names), *(("batches", name) for name in BATCHES_ATTRIBUTES)]:
        yield lambda h5, owner=owner, name=name: h5[owner].attrs.pop(name), name
    for version in (0, 1, 2, 4, 2**32 - 1):
        found = f"expected format_version 3, found {version}"
        yield lambda h5, version=version: h5.attrs.modify("format_version", np.uint32(version)), found
    for owner, name, value in ((owner, *case) for owner, cases in VALUES.items() for case in cases):
        yield lambda h5, owner=owner, name=name, value=value: h5[owner].attrs.__setitem__(name, value), "x.h5"
    yield lambda h5: h5["batches"].attrs.modify("num_batches", np.uint64(8)), "expected 8 batches, found space for 7"
    yield without_a_chunk, "batch 7 is committed but has no chunk"
    yield replaced(lambda h5: h5.create_group("batches")), "expected a 3-D dataset 'batches'"
    for shape, dtype, found in (
        ((7, 30), "<u4", "expected a 3-D dataset 'batches'"), ((7, 3, 11), "<u4", r"expected batches of \(3, 10\)"),
        *(((7, 3, 10), dtype, "dtype must be one of uint32, uint16, uint8") for dtype in ("<i4", "<f4", ">u4")),
    ):  # fmt: skip
        yield replaced(lambda h5, shape=shape, dtype=dtype: h5.create_dataset("batches", shape, dtype)), found


@pytest.mark.parametrize(("edit", "message"), [*malformed()])
def test_a_malformed_file_is_a_format_error(edit, message, path):
    edited(path, edit)
    with pytest.raises(errors.FormatError, match=message) as caught:
        open_reader(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("change", [
    lambda h5: h5.pop("crc32"),
    lambda h5: h5["crc32"].resize(6, axis=0),
    lambda h5: (h5.pop("crc32"), h5.create_dataset("crc32", (7, 1), "<u4")),
    lambda h5: (h5.pop("crc32"), h5.create_group("crc32")),
], ids=["missing", "short", "2-D", "group"])  # fmt: skip
def test_without_its_crc32_a_file_is_not_verified(change, path):
    edited(path, change)
    is_refused(errors.FormatError, lambda: open_reader(path, verify="batch"), match="crc32")
    assert "crc32" in str(verify_store(path)[0].problem)


# --- datasets of another origin --------------------------------------------------------------------------------
@pytest.mark.parametrize("token", [2**32, -1])
def test_an_id_out_of_range_is_an_error_when_it_is_met(token, tmp_path):
    with h5py.File(tmp_path / "foreign.h5", "w") as h5:
        ids = np.arange(60).reshape(2, 3, 10)
        h5["data"] = np.where(ids == 47, token, ids)
    with open_reader(tmp_path / "foreign.h5", read_as=ReadAs(dataset="data", axes="batch,record,token")) as reader:
        np.testing.assert_array_equal(reader.read_batch(0), ids[0])
        out = np.zeros((3, 10), np.int64)
        for read in (reader.read_batch, reader.read_batch_torch, lambda number: reader.read_into(number, out)):
            is_refused(errors.ConvertError, lambda read=read: read(1), match=f"data: .* found {token:,} at index 47")


# --- compressed ------------------------------------------------------------------------------------------------
def test_damage_inside_a_compressed_batch_is_found(path, tokens, tmp_path, gzip_copy):
    packed = gzip_copy(path, tmp_path / "packed.h5")
    place = offsets_of(packed)[5]
    with open(packed, "r+b") as file:
        file.seek(place + 20)
        file.write(bytes(8))
    with open_reader(packed) as reader:
        np.testing.assert_array_equal(reader.read_batch(4), tokens[4])
        is_refused(errors.ZbError, lambda: reader.read_batch(5))
    assert isinstance(verify_store(packed)[0].problem, errors.ZbError)


def test_a_filter_that_is_not_installed_is_named(path, tmp_path):
    """Nobody has registered filter 305: the file needs it, and its chunks are as good as compressed by it."""
    odd = tmp_path / "odd.h5"
    with h5py.File(path, "r") as old, h5py.File(odd, "w") as new:
        new.attrs.update(old.attrs)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((1, 3, 10))
        plist.set_filter(305, h5py.h5z.FLAG_OPTIONAL)
        space = h5py.h5s.create_simple((7, 3, 10))
        stored = h5py.h5d.create(new.id, b"batches", h5py.h5t.STD_U32LE, space, plist)
        for index in range(7):
            stored.write_direct_chunk((index, 0, 0), bytes(120))
        copy_attributes(old["batches"].attrs, new["batches"])
    is_refused(
        errors.UnavailableError, lambda: open_reader(odd, read_as=ReadAs(dataset="batches")), match="lacks a filter"
    )
    for choice in ({}, {"dataset": "batches", "axes": "batch,record,token"}):
        with open_reader(odd, **reading(choice)) as reader:
            is_refused(errors.UnavailableError, lambda reader=reader: reader.read_batch(0), match="lacks a filter")
    done = run(convert, "hdf5-to-batch", odd, tmp_path / "o.batch", "--dataset", "batches")
    assert "filter" in one_error(done, 5)


# --- truncated and damaged -------------------------------------------------------------------------------------
def test_a_truncated_file_is_never_read(path, tmp_path):
    data = path.read_bytes()
    cut = tmp_path / "cut.h5"
    end = len(data)
    for size in sorted(
        {*range(0, 120, 3), *range(120, 6000, 97), *range(6000, end, 30_011), *range(end - 900, end, 37)}
    ):
        cut.write_bytes(data[:size])
        with pytest.raises(errors.FormatError) as caught:  # IncompleteError is one
            open_reader(cut, verify="store")
        assert isinstance(caught.value, errors.IncompleteError) or size < 100, f"{size}: {caught.value}"
        assert verify_store(cut)[0].problem is not None


def appended(path, data):
    with path.open("ab") as file:
        file.write(data)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_bytes_behind_the_end_of_a_finished_file_are_refused_and_cut_by_the_line_of_the_error(
    codec, tmp_path, tokens, write_file
):
    path = write_file(tmp_path / "x y.h5", tokens, codec=codec).path
    data = path.read_bytes()
    appended(path, data)  # cat a.h5 b.h5 > c.h5
    is_refused(errors.FormatError, lambda: open_reader(path), match=f"found {len(data):,} more: something was appended")
    line = str(verify_store(path)[0].problem).split("type: ")[1]
    subprocess.run(line, shell=True, check=True)
    assert path.read_bytes() == data
    np.testing.assert_array_equal(batches_of(path), tokens)


def test_a_shard_with_bytes_behind_its_end_is_refused(tmp_path, tokens, write_store):
    store = write_store(tmp_path / "store", tokens)
    shard = min(store.glob("*.h5"))
    appended(shard, b"signature")
    is_refused(errors.FormatError, lambda: batches_of(store), match="found 9 more: something was appended")
    assert [report.problem is None for report in verify_store(store)].count(False) == 1


def test_user_blocks_are_counted_to_the_end_of_a_file(path, tokens, tmp_path):
    """One was there before HDF5 made the file, the other was put before it later, as by h5jam."""
    data = path.read_bytes()
    path.write_bytes(bytes(512) + data)
    np.testing.assert_array_equal(batches_of(path), tokens)
    appended(path, b"x")
    is_refused(errors.FormatError, lambda: open_reader(path), match="found 1 more")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory, tokens, write_file):
    """Return `damaged(flips) -> str`: what becomes of a file, `damaged.original`, with some bytes changed."""
    folder = tmp_path_factory.mktemp("damaged")
    known = {"seed": 1, "total_records": 21, "vocab_size": 2**32}  # more than 8 attributes: HDF5 keeps them in a heap
    data = write_file(folder / "x.h5", tokens, expected_batches=7, **known).path.read_bytes()

    def look(flips):
        changed = bytearray(data)
        for offset, mask in flips.items():
            changed[offset] ^= mask
        path = folder / "changed.h5"
        path.write_bytes(changed)
        return in_forks(lambda: verdict(path, tokens), limit_s=10)[0]  # it may not hang or kill its reader

    look.original = data
    return look


def verdict(path, expected):
    try:
        problems = [report.problem for report in verify_store(path, workers=1) if report.problem]
    except Exception as error:
        return f"verify_store raised {error!r}"
    try:
        intact = np.array_equal(batches_of(path), expected)
    except (errors.ZbError, OSError) as error:
        return "reported" if problems else f"verified, but not to be opened: {error!r}"
    except Exception as error:
        return f"open_reader raised {error!r}"
    if problems:
        return "reported"
    return "intact" if intact else "verified, but other tokens"


@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=3))
def test_random_damage_is_reported_or_does_no_harm(damaged, flips):
    used = np.flatnonzero(np.frombuffer(damaged.original, np.uint8))
    near = np.unique(used[:, np.newaxis] - np.arange(9)).clip(0)  # most of the file is unused and zero
    assert damaged({int(near[number % len(near)]): mask for number, mask in flips}) in ("reported", "intact")


@pytest.mark.parametrize("signature", [b"\x89HDF", b"OHDR", b"EAHD", b"EAIB", b"FRHP", b"BTHD", b"GCOL"])
@pytest.mark.thin
def test_damage_in_each_structure_is_reported_or_does_no_harm(signature, damaged, thinned):
    """Superblock, object headers, chunk index, attribute heap, attribute names: each byte near each signature."""
    places = [match.start() for match in re.finditer(re.escape(signature), damaged.original)]
    assert places
    for offset in thinned(place + distance for place in places for distance in range(32)):
        assert damaged({offset: 6}) in ("reported", "intact"), f"byte {offset}"


def test_texts_lie_where_hdf5_keeps_a_checksum(damaged):
    """In a global heap, where texts of variable length lie, one flipped bit sends HDF5 2.0 into an endless loop.

    HDF5 wants the labels of axes there. No reader of ours looks at them.
    """
    with h5py.File(io.BytesIO(damaged.original)) as h5:
        owners = [h5, *(h5[name] for name in ("batches", "crc32"))]
        found = [(name, owner.attrs.get_id(name).dtype) for owner in owners for name in owner.attrs]
    heaped = {name for name, dtype in found if (h5py.check_string_dtype(dtype) or (0, 0))[1] is None}
    assert heaped == {"DIMENSION_LABELS"}


# --- while it is written ---------------------------------------------------------------------------------------
def test_a_reader_follows_a_writer(tmp_path, tokens):
    writer = open_writer(tmp_path / "x.h5", batch_size=3, seq_len=10)
    partial = tmp_path / "x.h5.partial"
    with writer, open_reader(partial) as reader, open_reader(partial) as late:
        assert (reader.num_batches, reader.complete, reader.corpus.sha256, reader.access) == (0, False, None, "h5py")
        for count in range(1, 6):
            writer.write(tokens[count - 1])
            assert reader.num_batches == count - 1  # until it asks
            assert reader.refresh() == count == len(reader)
            np.testing.assert_array_equal(np.stack(list(reader)), tokens[:count])
            is_refused(IndexError, lambda count=count: reader.read_batch(count))
        writer.write(tokens[5:])
        with pytest.raises(FileNotFoundError, match=r"x\.h5\.partial in its folder is being written"):
            open_reader(tmp_path / "x.h5")
        info = writer.finish()
        assert (late.refresh(), late.complete) == (7, True)  # it has not read yet
        np.testing.assert_array_equal(np.stack(list(late)), tokens)
        assert reader.refresh() == 7
        assert (reader.complete, reader.corpus.sha256) == (True, info.sha256)
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)  # though the file has another name now
    np.testing.assert_array_equal(batches_of(tmp_path / "x.h5", verify="store"), tokens)


def test_a_live_file_has_no_extents_and_no_digest(tmp_path, tokens):
    partial = tmp_path / "x.h5.partial"
    with open_writer(tmp_path / "x.h5", batch_size=3, seq_len=10) as writer:
        writer.write(tokens[:3])
        for options in ({"access": "mmap"}, {"access": "pread"}, {"verify": "batch"}, {"verify": "store"}):
            with pytest.raises(errors.BackendError, match="its writer has not finished"):
                open_reader(partial, **options)
        with h5py.File(partial, "r", swmr=True) as h5:
            assert h5["batches"].attrs["sha256"] == NO_SHA256.encode()
        (report,) = verify_store(partial)
        assert isinstance(report.problem, errors.IncompleteError)
        assert "3 batches are committed" in str(report.problem)
        with open_reader(partial) as reader:
            assert reader.fingerprint.startswith("sampled:")


# --- file locks ------------------------------------------------------------------------------------------------
@pytest.fixture
def refuse_locks(monkeypatch):
    """Return `refuse_locks(number)`: h5py then fails as on a file system that answers flock(2) with that errno."""
    opened = []
    real = h5py.File

    def install(number):
        def fake(name, mode="r", **options):
            opened.append(options.get("locking"))
            if options.get("locking") is None:
                text = f"unable to lock file, errno = {number}, error message = 'x'"
                raise OSError(number, f"Unable to synchronously open file ({text})")
            return real(name, mode, **options)

        monkeypatch.setattr(h5py, "File", fake)
        return opened

    return install


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, 524, errno.EIO])
def test_without_file_locks_a_file_is_read_with_a_warning(number, path, tokens, refuse_locks):
    opened = refuse_locks(number)
    with pytest.warns(UserWarning, match="this file system has no file locks"):
        corpus = HDF5Corpus(path, access="pread")
    with corpus:
        np.testing.assert_array_equal(np.stack(list(corpus.batches())), tokens)
    assert opened == [None, False]


def test_without_file_locks_a_file_is_written_with_a_warning(tmp_path, tokens, refuse_locks, write_file):
    refuse_locks(errno.ENOLCK)
    with pytest.warns(UserWarning, match="this file system has no file locks"):
        path = write_file(tmp_path / "x.h5", tokens).path
    with pytest.warns(UserWarning, match="this file system has no file locks"), open_reader(path) as reader:
        np.testing.assert_array_equal(np.stack(list(reader)), tokens)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_another_process_holds_is_not_ignored(number, path, refuse_locks, monkeypatch):
    opened = refuse_locks(number)
    kind = errors.UnavailableError if number == errno.EAGAIN else PermissionError
    is_refused(kind, lambda: open_reader(path))
    assert False not in opened

    def broken(*args, **options):
        raise OSError(errno.EIO, "Unable to synchronously open file (file read failed)")

    monkeypatch.setattr(h5py, "File", broken)  # another error of the disk
    is_refused(OSError, lambda: open_reader(path), match="file read failed")


def test_a_file_that_hdf5_holds_for_writing_is_unavailable(path):
    code = "import h5py, sys; h5 = h5py.File(sys.argv[1], 'r+'); print('open', flush=True); sys.stdin.read()"
    with start_program(code, path) as writer:  # another process: within one, HDF5 shares the file
        assert writer.stdout.readline() == "open\n"
        is_refused(errors.UnavailableError, lambda: open_reader(path), match="a writer has it open, or was killed")
        writer.stdin.close()
    open_reader(path).close()


def test_a_partial_file_that_grows_while_hdf5_looks_at_it_is_opened(tmp_path):
    path = tmp_path / "lone.h5.partial"
    with h5py.File(path, "w") as h5:
        h5["tokens"] = np.arange(4096)
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 1000)

    def grow():
        with path.open("ab") as file:
            file.write(whole[-1000:])

    writer = threading.Timer(0.02, grow)
    writer.start()
    try:
        with open_h5_for_reading(path) as h5:
            assert np.array_equal(h5["tokens"], np.arange(4096))
    finally:
        writer.join()


@pytest.mark.parametrize("name", ["lone.h5.partial", "lone.h5"])
def test_a_file_that_stays_truncated_is_refused_as_truncated(name, tmp_path):
    path = tmp_path / name
    with h5py.File(path, "w") as h5:
        h5["tokens"] = np.arange(4096)
    os.truncate(path, path.stat().st_size - 1000)
    with pytest.raises(errors.IncompleteError, match="truncated"):
        open_h5_for_reading(path)


def test_all_that_look_into_a_file_in_a_block_share_one_handle(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as h5:
        h5["tokens"] = np.arange(100)
    before = open_descriptors()
    with Look(path) as look:
        with look.keeping_handles():
            with open_h5_for_reading(path, look=look) as first, open_h5_for_reading(path, look=look.of(path)) as second:
                assert first["tokens"][5] == second["tokens"][5] == 5
                assert len(open_descriptors() - before) == 1
            with open_h5_for_reading(path, look=look) as again:
                assert again["tokens"][6] == 6
        assert open_descriptors() == before


def test_a_handle_of_a_file_that_grows_is_not_kept(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as writer:
        writer["tokens"] = np.arange(100)
        writer.swmr_mode = True
        with Look(path) as look, look.keeping_handles():
            with open_h5_for_reading(path, look=look) as h5:
                assert h5["tokens"][5] == 5
            assert look.handles == {}
