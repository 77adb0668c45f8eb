"""The bytes of the `.batch` header, and the limits of what may be stored."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from contents import write_batches
from contract import is_refused
from hypothesis import example, given
from hypothesis import strategies as st

from zb_hdf5 import ArgumentError, ConvertError, FormatError, IncompleteError, StoreMeta
from zb_hdf5.field import Field
from zb_hdf5.formats.native import BatchCorpus, batch_file_bytes, pack_header, unpack_header
from zb_hdf5.spec import BATCHES_ATTRIBUTES, HEADER_BYTES, as_stored, meta_block_bytes, stored_dtype

U32 = np.dtype("<u4")
U16 = np.dtype("<u2")
META = StoreMeta(2, 3, U32, seed=42, total_records=5)
#: 2 batches of 2 x 3 uint32 tokens, seed 42, 5 source records
HEADER_40 = bytes.fromhex(
    "4c4c4d4241544348"  # LLMBATCH
    "01000000"  # version 1
    "02000000"  # batch_size 2
    "03000000"  # seq_len 3
    "0200000000000000"  # num_batches 2
    "00000000"  # dtype 0: uint32
    "2a000000"  # seed 42
    "05000000"  # total_records 5
)
TOKENS = np.array([[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 0xFFFFFFFF]]], dtype=U32)


def test_batch_file_is_these_bytes(tmp_path):
    path = tmp_path / "golden.batch"
    write_batches(path, TOKENS, seed=42, total_records=5)
    first = bytes.fromhex("010000000200000003000000040000000500000006000000")
    second = bytes.fromhex("0700000008000000090000000a0000000b000000ffffffff")
    expected = HEADER_40 + bytes(4056) + first + bytes(4072) + second + bytes(4072)
    assert len(expected) == 3 * 4096
    assert path.read_bytes() == expected
    assert pack_header(replace(META, dtype=U16), 2)[:40] == HEADER_40[:28] + b"\1\0\0\0" + HEADER_40[32:]
    # 104,829 records of 512 tokens at batch size 32, from the description of the format
    assert batch_file_bytes(StoreMeta(32, 512, U32), 104_829 // 32) == 214_634_496


def test_slots_are_whole_pages_and_the_metadata_block_grows_with_the_chunk_index():
    shapes = {(1, 1, U16): 4096, (2, 512, U32): 4096, (2, 512, U16): 4096, (3, 512, U32): 8192, (32, 512, U32): 65536}
    assert {shape: StoreMeta(*shape).padded_batch_bytes for shape in shapes} == shapes
    assert len(BATCHES_ATTRIBUTES) <= 8, "few enough for one write"
    blocks = {0: 1 << 20, 1000: 1 << 20, 1 << 20: (16 << 20) + (64 << 10)}
    assert {batches: meta_block_bytes(batches) for batches in blocks} == blocks


@st.composite
def metas(draw):
    batch_size = draw(st.integers(1, 2**16))
    seq_len = draw(st.integers(1, 2**13))
    u32 = st.integers(0, 2**32 - 1)
    return StoreMeta(batch_size, seq_len, draw(st.sampled_from([U32, U16])), draw(u32), draw(u32))


@given(metas(), st.integers(0, 2**64 - 1))
def test_header_round_trip(meta, num_batches):
    header = pack_header(meta, num_batches)
    assert len(header) == HEADER_BYTES
    assert header[40:] == bytes(HEADER_BYTES - 40)
    assert unpack_header(header, "x.batch") == (meta, num_batches)


@pytest.mark.parametrize("name", ["seed", "total_records"])
@pytest.mark.parametrize("value", [2**32, 2**32 + 42, 2**64 - 1])
def test_a_number_beyond_32_bits_is_an_error_and_never_wrapped(name, value):
    with pytest.raises(FormatError, match=f"{name} {value:,} does not fit"):
        pack_header(replace(META, **{name: value}), 2)
    meta = replace(META, seed=2**32 - 1, total_records=2**32 - 1)
    assert unpack_header(pack_header(meta, 2), "x.batch") == (meta, 2)


@pytest.mark.parametrize(("offset", "data", "message"), [
    (0, b"LLMBATCX", "expected magic"), (0, b"\x89HDF\r\n\x1a\n", "expected magic"),
    (8, b"\0\0\0\0", "expected .batch version 1, found 0"), (8, b"\2\0\0\0", "expected .batch version 1, found 2"),
    (8, b"\0\0\0\1", "version 1, found 16777216"),  # big-endian
    (12, b"\0\0\0\0", "batch_size must be"), (16, b"\0\0\0\0", "seq_len must be"),
    (12, b"\xff\xff\xff\xff\xff\xff\xff\xff", "HDF5 chunks end below 4 GiB"),
    (28, b"\2\0\0\0", "expected dtype code 0 or 1, found 2"), (28, b"\xff\xff\xff\xff", "expected dtype code"),
])  # fmt: skip
def test_each_wrong_field_is_named(offset, data, message):
    header = pack_header(META, 2)
    with pytest.raises(FormatError, match=message) as caught:
        unpack_header(header[:offset] + data + header[offset + len(data) :], "folder/x.batch")
    assert "folder/x.batch" in str(caught.value)
    assert not isinstance(caught.value, IncompleteError)


@pytest.mark.parametrize("length", [*range(10), 12, 39, 40, 41, 512, 4095])
def test_a_truncated_header_is_incomplete_and_less_than_the_magic_no_batch_file(length):
    kind, message = (FormatError, r"not a \.batch file") if length < 8 else (IncompleteError, f"found {length}")
    is_refused(kind, lambda: unpack_header(pack_header(META, 2)[:length], "x.batch"), match=message)


def flipped_header(flips):
    header = bytearray(pack_header(META, 2))
    for offset, mask in flips.items():
        header[offset] ^= mask
    return bytes(header)


FLIPPED = st.dictionaries(st.integers(0, 39), st.integers(1, 255), min_size=1, max_size=4).map(flipped_header)


@given(FLIPPED | st.binary(min_size=32, max_size=32).map(lambda rest: (b"LLMBATCH" + rest).ljust(HEADER_BYTES, b"\0")))
def test_a_damaged_header_parses_or_is_a_format_error(header):
    try:
        meta, num_batches = unpack_header(header, "x.batch")
    except FormatError:
        return
    assert pack_header(meta, num_batches) == header  # nothing was dropped or wrapped


@given(FLIPPED)
@example(flipped_header({20: 3}))  # 1 batch
@example(flipped_header({20: 2}))  # no batch
@example(flipped_header({27: 0x80}))  # 2**63 + 2 batches
@example(flipped_header({19: 0x20}))  # a batch of 4 GiB
def test_a_damaged_header_opens_only_if_it_fits_the_file(tmp_path_factory, header):
    path = tmp_path_factory.mktemp("example") / "x.batch"
    path.write_bytes(header + bytes(2 * META.padded_batch_bytes))
    try:
        reader = BatchCorpus(path).batches()
    except FormatError:
        return
    with reader:
        assert batch_file_bytes(reader.meta, reader.num_batches) == path.stat().st_size
        for batch in reader:
            assert not batch.any()


@pytest.mark.parametrize(("tokens", "dtype", "vocab_size", "message"), [
    (np.array([[3, -1]]), U32, 0, r"token id -1 at index 1 is outside 0\.\.4,294,967,295 \(dtype uint32\)"),
    (np.array([[3, -128]], dtype="i1"), U32, 0, "token id -128 at index 1"),
    (np.array([[0, 2**32]]), U32, 0, "token id 4294967296 at index 1"),
    (np.array([[2**64 - 1, 0]], dtype="u8"), U32, 0, "token id 18446744073709551615 at index 0"),
    (np.array([[1, 65536]]), U16, 0, r"token id 65536 at index 1 is outside 0\.\.65,535 \(dtype uint16\)"),
    (np.array([[1, -1]], dtype="i2"), U16, 0, "token id -1 at index 1"),
    (np.array([[99, 100]]), U32, 100, r"token id 100 at index 1 is outside 0\.\.99 \(vocab_size 100\)"),
    (np.array([[99, 100]], dtype="u4"), U32, 100, "token id 100 at index 1"),
    (np.array([[255, 254]], dtype="u1"), U16, 255, "token id 255 at index 0"),
    (np.array([[5, -1], [-2, 9]]), U32, 7, "token id -1 at index 1"),
    *((np.zeros((1, 2), dtype), U32, 0, "integer dtype") for dtype in ("f4", "f8", "?", "S3", "c8", "O", "M8[s]")),
])  # fmt: skip
def test_a_token_that_cannot_be_stored_is_named_with_its_place(tokens, dtype, vocab_size, message):
    with pytest.raises(ConvertError, match=message) as caught:
        as_stored(tokens, StoreMeta(1, 2, dtype, vocab_size=vocab_size), "part-7.npy")
    assert str(caught.value).startswith("part-7.npy")


@given(
    st.lists(st.integers(0, 127), min_size=1, max_size=20),
    st.sampled_from(["i1", "u1", ">i2", "<u2", ">u4", "<i4", ">i8", "<u8"]),
    st.sampled_from([U32, U16]),
)
def test_ids_that_fit_are_stored_unchanged(ids, source, stored):
    tokens = np.array([ids, ids], dtype=source)[:, ::-1]
    found = as_stored(tokens, StoreMeta(1, 1, stored, vocab_size=128), "x")
    assert found.dtype == stored
    assert found.flags.c_contiguous
    assert found.tolist() == [ids[::-1], ids[::-1]]


def test_limits_themselves_are_stored_and_unknown_dtypes_are_refused():
    for dtype, limit in ((U32, 2**32 - 1), (U16, 2**16 - 1)):
        assert as_stored(np.array([[0, limit]]), StoreMeta(1, 2, dtype), "x").tolist() == [[0, limit]]
    assert as_stored(np.array([[0, 9]]), StoreMeta(1, 2, U16, vocab_size=10), "x").tolist() == [[0, 9]]
    assert as_stored(np.zeros((0, 2), "i8"), META, "x").shape == (0, 2)
    for name in ("int32", "uint64", "float32", "u3", "", "tokens"):
        with pytest.raises(ArgumentError, match="dtype must be one of uint32, uint16"):
            stored_dtype(name)
    assert [stored_dtype(name).str for name in ("uint32", "uint16")] == ["<u4", "<u2"]


@pytest.mark.parametrize(("changes", "message"), [
    ({"batch_size": 0}, "batch_size must be between 1 and 4,294,967,295, found 0"),
    ({"batch_size": -1}, "batch_size"), ({"batch_size": 2**32}, "batch_size"), ({"seq_len": 0}, "seq_len"),
    ({"seq_len": 2**32}, "seq_len"), ({"dtype": np.dtype("i4")}, "dtype must be one of uint32, uint16, uint8"),
    ({"dtype": np.dtype(">u4")}, "dtype must be"), ({"dtype": np.dtype("u8")}, "dtype must be"),
    ({"seed": -1}, "seed must be"), ({"seed": 2**64}, "seed must be"),
    ({"total_records": -1}, "total_records must be"), ({"total_records": 2**64}, "total_records must be"),
    ({"document_count": -1}, "document_count must be"), ({"vocab_size": -1}, "vocab_size must be"),
    ({"batch_size": 2**15, "seq_len": 2**15}, "4,294,967,296 bytes"),
    ({"batch_size": 2**16, "seq_len": 2**15, "dtype": U16}, "4,294,967,296 bytes"),
])  # fmt: skip
def test_impossible_descriptions_are_refused(changes, message):
    is_refused(ArgumentError, lambda: replace(META, **changes), match=message)
    assert StoreMeta(2**32 // 4 - 1, 1, U32).batch_bytes == 2**32 - 4  # the largest batch that is possible


FIELD = Field("score", np.dtype([("x", "f4"), ("y", "u1")]))


@pytest.mark.parametrize("meta", [
    StoreMeta(1, 2, np.dtype("u1")),
    StoreMeta(3, 2, np.dtype("u2"), layout="stream", boundary_token_id=3),
    StoreMeta(1, 2, np.dtype("u4"), unfit=(("labels", "words"),)),
    StoreMeta(1, 2, np.dtype("u2"), fields=(FIELD,)),
    StoreMeta(1, 2, np.dtype("u2"), fields=(FIELD,)).of_field("score"),
])  # fmt: skip
def test_pickled_facts_are_the_same_without_the_usual_ones(meta):
    assert pickle.loads(pickle.dumps(meta)) == meta
    assert len(pickle.dumps(META)) < 80
