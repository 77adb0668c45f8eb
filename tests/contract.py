"""The contracts of readers, writers and loaders, as functions: used over every backend and access."""

import json
import pickle
import warnings
import zlib
from itertools import islice

import numpy as np
import pytest
import torch

from zb_hdf5 import BatchWriter, Loader, TokenLoader, errors, open_reader
from zb_hdf5.formats.batch_writer import ShardInfo
from zb_hdf5.loaders.order import WIDE_VERSION
from zb_hdf5.loaders.state import STATE_VERSION
from zb_hdf5.store.format_list import FORMATS

#: The kinds of the states of all loaders, and of the data set of a `Loader` and its sampler.
KINDS = ("loader", "mixture", "text", "documents", "batches", "steps")
#: The warning of an epoch that is read twice, for tests in which that is the point.
SAME_EPOCH = ".*is read again in the same order"

same = np.testing.assert_array_equal


def random_tokens(num_batches, batch_size, seq_len, dtype="uint32", seed=0):
    """Return reproducible batches that hold the smallest and the largest id of `dtype`."""
    limit = int(np.iinfo(dtype).max)
    tokens = np.random.default_rng(seed).integers(0, limit, (num_batches, batch_size, seq_len), dtype, endpoint=True)
    if num_batches:
        tokens[0, 0, 0], tokens[-1, -1, -1] = 0, limit
    return tokens


def read_records(reader, numbers, length=None):
    """Return records by their numbers, or shorter ones, in one read."""
    out = np.zeros((len(numbers), length or reader.seq_len), reader.dtype)
    reader.read_records_into(np.asarray(numbers, np.int64), out)
    return out


def is_refused(error, *uses, match=None):
    for use in uses:
        with pytest.raises(error, match=match):
            use()


def steps_of(path, **options):
    """Return the steps of an epoch of one rank, unless the options name another."""
    with Loader(path, **{"rank": 0, "world_size": 1, **options}) as loader:
        return list(loader)


def require_equal(found, expected):
    """Compare steps: tensors, pairs of them, or dictionaries."""
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        if isinstance(mine, dict):
            assert mine.keys() == theirs.keys()
            require_equal(list(mine.values()), list(theirs.values()))
        elif isinstance(mine, tuple):
            require_equal(mine, theirs)
        else:
            assert torch.equal(mine, theirs)


# --- readers ---------------------------------------------------------------------------------------------------------
def check_reader(reader, expected, fields=None):
    """Check everything that leaves the reader open; `fields` has the values of each, shape `(N, B, S, ...)`."""
    check_description(reader, expected)
    check_batches(reader, expected)
    check_read_into(reader, expected)
    check_read_batches_into(reader, expected)
    check_buffers(reader, expected)
    check_records(reader, expected)
    check_indices(reader, expected)
    check_sequence(reader, expected)
    check_pickling(reader, expected)
    check_fields(reader, fields or {})


def check_fields(reader, expected):
    """The values of a field are read like tokens; where each chunk has a crc32, it is the right one."""
    assert [field.name for field in reader.meta.fields] == sorted(expected)
    for field in reader.meta.fields:
        values = expected[field.name]
        found = reader.field(field.name)
        assert reader.field(field.name) is found
        assert (found.meta.field, found.dtype) == (field, values.dtype)
        batches = values.reshape(len(values), *found.meta.shape)
        check_sequence(found, batches)
        check_ranges(found, batches)
        numbers = np.random.default_rng(0).integers(0, found.num_records, 23)
        same(read_records(found, numbers), batches.reshape(-1, found.seq_len)[numbers])
        crc32 = found.corpus.digests.crc32()
        if crc32 is not None:  # a store leaves them to its shards
            assert crc32.tolist() == [zlib.crc32(batch.tobytes()) for batch in batches]
    is_refused(errors.ArgumentError, lambda: reader.field("no_such_field"), match="expected a field")


def check_description(reader, expected):
    assert (reader.num_batches, reader.batch_size, reader.seq_len) == expected.shape
    assert (reader.dtype, reader.meta.shape) == (expected.dtype, expected.shape[1:])
    assert reader.complete
    assert reader.refresh() == len(expected)
    assert reader.access in ("auto", "mmap", "pread", "h5py", "remote")
    assert str(len(expected)) in repr(reader)
    assert reader.fingerprint == reader.fingerprint


def check_batches(reader, expected):
    """Arrays are read-only and tensors the caller's own; hints change nothing but speed, and have limits."""
    import torch  # not needed by a spawned process that imports this module

    kept = []
    for index, batch in enumerate(expected):
        reader.will_need(index)
        assert reader.is_ready(index) in (True, False)
        found = reader.read_batch(index)
        int64 = reader.read_batch_torch(index)
        int32 = reader.read_batch_int32(index)
        assert (found.dtype, int64.dtype, int32.dtype) == (batch.dtype, torch.int64, torch.int32)
        same(int64.numpy(), batch.astype(np.int64))
        same(int32.numpy(), batch.astype(np.int32))
        with pytest.raises(ValueError, match="read-only"):
            found[0, 0] = 1
        kept.append((found, int64.zero_()))
    same([found for found, _ in kept], expected)  # none overwrites another
    same(reader.read_batch(0), expected[0])
    reader.will_need(0, len(expected))
    hints = (reader.will_need, reader.is_ready, lambda count: reader.will_need(0, count + 1))
    is_refused(errors.BatchIndexError, *(lambda hint=hint: hint(len(expected)) for hint in hints))


def with_gaps(shape, dtype):
    """Return one array of that shape that is not contiguous; none for a single token, which has no gaps."""
    array = np.zeros((shape[0], 2 * shape[1]), dtype)[:, ::2]
    return [] if array.flags.c_contiguous else [array]


def check_read_into(reader, expected):
    """The stored dtype, its signed twin (the same bits) and int64 (the same values); nothing else."""
    shape = expected.shape[1:]
    stored = expected.dtype
    for dtype in (stored, np.dtype(f"i{stored.itemsize}"), np.dtype(np.int64)):
        for index, batch in enumerate(expected):
            out = np.full(batch.shape, 7, dtype)
            reader.read_into(index, out)
            same(out, batch.astype(dtype))
    other_size = np.dtype("u2" if stored.itemsize == 4 else "u4")
    for out in (
        *(np.zeros(bad, stored) for bad in ((shape[0] + 1, shape[1]), (shape[0], shape[1] + 1), (1, *shape))),
        np.zeros(shape[0] * shape[1], stored),
        *with_gaps(shape, stored),
        *(np.zeros(shape, dtype) for dtype in ("f4", "f8", "u8", "?", ">i8", other_size)),
    ):
        is_refused(errors.ArgumentError, lambda out=out: reader.read_into(0, out), match="read_into needs")
        assert not out.any()


def check_ranges(reader, expected):
    for start in range(len(expected)):
        for count in range(len(expected) - start + 1):
            out = np.zeros((count, *expected.shape[1:]), expected.dtype)
            reader.read_batches_into(start, out)
            same(out, expected[start : start + count])


def check_read_batches_into(reader, expected):
    check_ranges(reader, expected)
    shape = expected.shape[1:]
    stored = expected.dtype
    count = len(expected)
    for start, many in ((-1, 1), (count, 1), (0, count + 1), (count - 1, 2)):
        out = np.zeros((many, *shape), stored)
        is_refused(errors.BatchIndexError, lambda start=start, out=out: reader.read_batches_into(start, out))
    for out in (
        np.zeros((1, *shape), np.int64),
        np.zeros((1, *shape), ">i8"),
        *([np.zeros((1, *shape), stored.newbyteorder(">"))] if stored.itemsize > 1 else []),  # a byte has no order
        np.zeros((1, shape[0], shape[1] + 1), stored),
        *(batch[np.newaxis] for batch in with_gaps(shape, stored)),
    ):
        is_refused(
            errors.ArgumentError, lambda out=out: reader.read_batches_into(0, out), match="read_batches_into needs"
        )


def check_buffers(reader, expected):
    """A buffer that is read-only or of the other byte order is refused, never filled."""
    reads = [
        (reader.read_into, 0, expected.shape[1:]),
        (reader.read_batches_into, 0, (1, *expected.shape[1:])),
        (reader.read_records_into, np.arange(3), (3, expected.shape[2])),
    ]
    for read, first, shape in reads:
        out = np.zeros(shape, expected.dtype)
        out.flags.writeable = False
        is_refused(errors.ArgumentError, lambda read=read, first=first, out=out: read(first, out))
        assert not out.any()
    for kind in "ui" if expected.dtype.itemsize > 1 else "":
        out = np.zeros(expected.shape[1:], f">{kind}{expected.dtype.itemsize}")
        is_refused(errors.ArgumentError, lambda out=out: reader.read_into(0, out))


def check_records(reader, expected):
    """One record, many in any order, and shorter ones that divide a record."""
    seq_len = expected.shape[2]
    count = expected.shape[0] * expected.shape[1]
    assert reader.num_records == count
    for number, record in enumerate(expected.reshape(-1, seq_len)):
        found = reader.read_record(number)
        same(found, record)
        assert not found.flags.writeable
    is_refused(errors.BatchIndexError, lambda: reader.read_record(-1), lambda: reader.read_record(count))
    for length in (length for length in range(1, seq_len + 1) if seq_len % length == 0):
        rows = expected.reshape(-1, length)
        every = np.arange(len(rows))
        for numbers in (every, every[::-1], np.random.default_rng(length).integers(0, len(rows), 23), every[:0]):
            same(read_records(reader, numbers, length), rows[numbers])
        out = np.zeros((2, length), expected.dtype)
        for numbers in (np.array([0, len(rows)]), np.array([-1, 0])):
            is_refused(errors.BatchIndexError, lambda numbers=numbers, out=out: reader.read_records_into(numbers, out))
    for shape, dtype in (((1, seq_len + 1), expected.dtype), ((2, seq_len), expected.dtype), ((1, seq_len), np.int64)):
        with pytest.raises(errors.ArgumentError, match="read_records_into needs"):
            reader.read_records_into(np.arange(1), np.zeros(shape, dtype))


def check_indices(reader, expected):
    count = len(expected)
    out = np.zeros(expected.shape[1:], expected.dtype)
    for bad in (count, -1, -count - 1, 10**30, np.int64(count)):
        for read in (reader.read_batch, reader.read_batch_torch, lambda index: reader.read_into(index, out)):
            with pytest.raises(errors.BatchIndexError, match=f"expected an index in 0..{count - 1:,}"):
                read(bad)
    is_refused(IndexError, lambda: reader[count], lambda: reader[-count - 1])
    is_refused(TypeError, *(lambda other=other: reader.read_batch(other) for other in (0.0, "0", None)))
    for number in (np.int64(count - 1), np.uint8(count - 1)):
        same(reader.read_batch(number), expected[-1])
    for back in range(1, count + 1):
        same(reader[-back], expected[-back])


def check_sequence(reader, expected):
    assert len(reader) == len(expected)
    for _ in range(2):
        same(np.stack(list(reader)), expected)


def check_pickling(reader, expected):
    data = pickle.dumps(reader)
    for _ in range(2):
        with pickle.loads(data) as copy:
            assert type(copy) is type(reader)
            assert (copy.access, copy.fingerprint) == (reader.access, reader.fingerprint)
            same(np.stack(list(copy)), expected)
            same(copy.read_batch_torch(0).numpy(), expected[0].astype(np.int64))
    same(reader.read_batch(0), expected[0])  # the original is as it was


def check_closing(reader, expected):
    """Close the reader, and check that what it gave away outlives it while nothing else can be had from it."""
    with reader as entered:
        assert entered is reader
        kept = [reader.read_batch(index) for index in range(len(expected))]
        data = pickle.dumps(reader)
    same(np.stack(kept), expected)
    same(read_everything(pickle.loads(data)), expected)
    out = np.zeros(expected.shape[1:], expected.dtype)
    is_refused(
        errors.ClosedError,
        lambda: reader.read_batch(0),
        lambda: reader[0],
        lambda: reader.read_batch_torch(0),
        lambda: reader.read_into(0, out),
        lambda: reader.read_into(0, out.astype(np.int64)),
        lambda: reader.read_batches_into(0, out[np.newaxis]),
        lambda: reader.read_batch_int32(0),
        lambda: reader.read_record(0),
        lambda: reader.read_records_into(np.arange(len(out)), out),
        lambda: reader.is_ready(0),
        lambda: list(reader),
        match="closed",
    )
    reader.close()
    reader.close()
    same(np.stack(kept), expected)


def read_everything(reader):
    """Return all batches: a function that a spawned process can import."""
    with reader:
        return np.stack(list(reader))


# --- writers ---------------------------------------------------------------------------------------------------------
def check_writer(make, read_back, expected):
    """Check the writers of `make(number)`; `read_back(info)` returns the batches and the digest of a finished one."""
    check_writing(make(0), read_back, expected)
    check_appending(make(6), read_back, expected)
    check_writer_refusals(make(2), expected)
    check_finishing(make(3), expected)
    check_aborting(make(4), expected)
    left = make(5)
    with pytest.raises(ZeroDivisionError):
        leave_with_an_error(left, expected[0])
    is_refused(errors.ClosedError, left.finish, match="closed")


def leave_with_an_error(writer, batch):
    with writer:
        writer.write(batch)
        raise ZeroDivisionError


def check_writer_of_fields(make, expected, values):
    """Check a writer that `make(number)` begins with the fields of `values`, each of shape `(N, B, S, ...)`."""
    writer = make(0)
    first = {name: array[0] for name, array in values.items()}
    short = {name: array[:, :-1] for name, array in values.items()}
    for bad in (None, {}, first | {"no_such_field": first}, short):
        is_refused(errors.ArgumentError, lambda bad=bad: writer.write(expected[0], bad), match="expected")
    check_written(writer, expected[:0])
    writer.write(expected[0], first)
    check_written(writer, expected[:1])
    writer.write(expected[1:], {name: array[1:] for name, array in values.items()})
    check_written(writer, expected)
    with open_reader(writer.finish().path) as reader:
        check_reader(reader, expected, values)
    left = make(1)
    left.write(expected[0], first)
    left.abort()
    is_refused(errors.ClosedError, lambda: left.write(expected[0], first), match="closed")


def check_writing(writer, read_back, expected):
    """One batch, several, other integer dtypes; each is counted and digested when `write` returns."""
    check_written(writer, expected[:0])
    writer.write(expected[0])
    check_written(writer, expected[:1])
    writer.write(expected[1:4].astype(np.int64))
    check_written(writer, expected[:4])
    writer.write(expected[4:])
    check_written(writer, expected)
    check_finished(writer, read_back, expected)


def check_appending(writer, read_back, expected):
    """Each batch is committed when `append` returns; its buffer may be filled again when the digests are there."""
    buffers = [np.empty_like(expected[0]) for _ in range(3)]
    waits = [writer.append(expected[:0])] * len(buffers)
    for number, batch in enumerate(expected):
        waits[number % 3]()
        buffers[number % 3][...] = batch
        waits[number % 3] = writer.append(buffers[number % 3])
        check_written(writer, expected[: number + 1])
    check_finished(writer, read_back, expected)


def check_written(writer, expected):
    assert isinstance(writer, BatchWriter)
    assert FORMATS[writer.backend].takes_batches
    assert (writer.meta.shape, writer.meta.dtype) == (expected.shape[1:], expected.dtype)
    counts = (len(expected), expected.size, expected.max(initial=0))
    assert (writer.num_batches, writer.token_count, writer.max_token) == counts
    assert writer.crc32().dtype == np.uint32
    assert writer.crc32().tolist() == [zlib.crc32(batch.tobytes()) for batch in expected]
    assert len(writer.sha256()) == 64


def check_finished(writer, read_back, expected):
    info = writer.finish()
    assert isinstance(info, ShardInfo)
    assert info.path.exists()
    counts = (writer.backend, len(expected), expected.size, expected.max(initial=0), writer.sha256())
    assert (info.backend, info.num_batches, info.token_count, info.max_token, info.sha256) == counts
    assert info.crc32.tolist() == writer.crc32().tolist()
    check_written(writer, expected)
    found, sha256 = read_back(info)
    same(found, expected)
    assert info.sha256 == sha256


def check_writer_refusals(writer, expected):
    """Nothing of what is refused is written, and the writer goes on."""
    writer.write(expected[0])
    shape = expected.shape[1:]
    for bad in (expected[0, 0], expected[:, :, :-1], np.zeros((1, 1, *shape), expected.dtype)):
        is_refused(errors.ArgumentError, lambda bad=bad: writer.write(bad), match="expected batches of shape")
    for bad in (np.full(shape, -1), np.full(shape, 2**40), np.zeros(shape, float)):
        is_refused(errors.ConvertError, lambda bad=bad: writer.write(bad))
    check_written(writer, expected[:1])
    writer.write(expected[1:])
    assert writer.finish().num_batches == len(expected)


def check_finishing(writer, expected):
    """The block finishes what was not finished in it, and nothing can be written any more."""
    with writer as entered:
        assert entered is writer
        writer.write(expected)
    uses = (lambda: writer.write(expected[0]), lambda: writer.write(expected[:0]), writer.finish)
    is_refused(errors.ClosedError, *uses, match="closed")
    writer.abort()
    writer.close()
    check_written(writer, expected)


def check_aborting(writer, expected):
    writer.write(expected[:2])
    writer.abort()
    writer.abort()
    is_refused(errors.ClosedError, lambda: writer.write(expected[0]), writer.finish, match="closed")


# --- loaders ---------------------------------------------------------------------------------------------------------
def check_loader(make, *, steps=4):
    """Check the protocol of `TokenLoader`; `make()` returns a new loader over the same data, of at least 2 `steps`."""
    with make() as loader:
        assert isinstance(loader, TokenLoader)
        expected = taken(loader, steps)
    check_ways_to_the_next_batch(make, expected)
    check_length(make, expected)
    check_states(make, expected)
    check_refused_states(make, expected)
    check_epochs(make, expected)
    check_copies(make, expected)
    with make() as loader:  # in the middle of an iteration too; closing again does nothing
        next(loader)
    loader.close()


def taken(batches, count):
    """Return the next batches, as copies."""
    found = [tuple(np.asarray(part).copy() for part in parts_of(batch)) for batch in islice(batches, count)]
    assert len(found) == count, f"expected {count} batches, found {len(found)}"
    return found


def parts_of(batch):
    if isinstance(batch, dict):
        return tuple(batch[name] for name in sorted(batch))
    return batch if isinstance(batch, tuple) else (batch,)


def assert_same(found, expected):
    """Fail unless these are the same batches, in the same order."""
    for batch, other in zip(found, expected, strict=True):
        assert [part.dtype for part in batch] == [part.dtype for part in other]
        for part, twin in zip(batch, other, strict=True):
            same(part, twin)


def check_ways_to_the_next_batch(make, expected):
    """`iter`, `next` and `get_batch` give the same batches; each goes on where the one before has stopped."""
    steps = len(expected)
    for way in (next, lambda loader: loader.get_batch()):
        with make() as loader:
            assert_same(taken((way(loader) for _ in range(steps)), steps), expected)
    with make() as loader:
        assert_same(taken([next(loader), loader.get_batch()], 2), expected[:2])


def check_length(make, expected):
    """A length is the number of batches of each iteration; without one, `len` is a TypeError."""
    with make() as loader:
        try:
            count = len(loader)
        except TypeError:
            return
        assert count >= len(expected)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", SAME_EPOCH)
            for _ in range(2):
                assert_same(taken(loader, count)[: len(expected)], expected)
                assert sum(1 for _ in loader) == count


def check_states(make, expected):
    """A state is JSON, says its kind, counts what was given, and another loader goes on exactly there."""
    for done in range(len(expected)):
        with make() as loader:
            for _ in range(done):
                next(loader)
            state = loader.state_dict()
        assert json.loads(json.dumps(state)) == state
        assert state["kind"] in KINDS
        assert state["version"] in (STATE_VERSION, WIDE_VERSION)
        for force in (False, True):
            with make() as other:
                other.load_state_dict(json.loads(json.dumps(state)), force=force)
                assert other.state_dict() == state
                assert_same(taken(other, len(expected) - done), expected[done:])


def check_refused_states(make, expected):
    """A value that is not a state of such a loader is refused, also by force, and nothing is taken over."""
    with make() as loader:
        next(loader)
        state = loader.state_dict()
        others = [{**state, "kind": kind} for kind in (*KINDS, "none", None, 7) if kind != state["kind"]]
        changed = [{**state, "version": 1}, {**state, "more": 1}, {k: v for k, v in state.items() if k != "kind"}]
        bad = [(each, force) for each in (*others, None, [], "state", {}) for force in (False, True)]
        for each, force in bad + [(each, False) for each in changed]:
            with pytest.raises(errors.StateError, match="state"):
                loader.load_state_dict(each, force=force)
        assert loader.state_dict() == state
        assert_same(taken([next(loader)], 1), expected[1:2])


def check_fields_of_a_state(loader):
    """A field that is unknown, missing, or a number of another type is named."""
    state = loader.state_dict()
    loader.load_state_dict(json.loads(json.dumps(state)))
    wrong = [("surprise", {**state, "surprise": 1})]
    wrong += [(name, {key: value for key, value in state.items() if key != name}) for name in state]
    for name, number in ((name, value) for name, value in state.items() if type(value) is int):
        others = (float(number), bool(number), str(number), [number], 10**40, -1)
        wrong += [(name, {**state, name: other}) for other in others]
    for name, each in wrong:
        with pytest.raises(errors.StateError, match=name):
            loader.load_state_dict(each)


def check_epochs(make, expected):
    """The epoch that is chosen again keeps its position; what is not an epoch is refused."""
    with make() as loader:
        next(loader)
        loader.set_epoch(0)
        assert_same(taken([next(loader)], 1), expected[1:2])
        is_refused(errors.ArgumentError, lambda: loader.set_epoch(-1), match="epoch")
        state = loader.state_dict()
        try:
            loader.set_epoch(1)
        except errors.ArgumentError:  # it has one epoch
            assert loader.state_dict() == state
            return
        assert loader.state_dict() != state
        loader.set_epoch(0)
        assert_same(taken([next(loader)], 1), expected[:1])


def check_copies(make, expected):
    """A pickled loader goes on where this one would: with the next batch."""
    with make() as loader:
        for done in range(len(expected)):
            with pickle.loads(pickle.dumps(loader)) as copy:
                assert copy.state_dict() == loader.state_dict()
                assert_same(taken([next(copy)], 1), expected[done : done + 1])
            assert_same(taken([next(loader)], 1), expected[done : done + 1])
