"""A step carries, for each token, the fields, the document and the span of its source token."""

import json
import pickle
import tracemalloc

import h5py
import numpy as np
import pytest
import torch
from contents import write_batches, write_stream
from contract import is_refused
from hypothesis import given
from hypothesis import strategies as st
from reading import ordered
from source_tokens import ALL, check_step, make_stream
from torch.utils.data import DataLoader

from examples import examples
from zb_hdf5 import (
    ArgumentError,
    DocumentLoader,
    FollowingLoader,
    HDF5ShardWriter,
    Loader,
    MixedLoader,
    StateError,
    convert,
    open_reader,
    open_writer,
)
from zb_hdf5.converters.store_source import StoreSource
from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.errors import BackendError, FormatError
from zb_hdf5.store.rebuild import index_files

HOW = {"rank": 0, "world_size": 1, "shuffle": "records", "seed": 7}
EVERYTHING = {"targets": True, "fields": ("number", "pair"), "documents": ALL, "spans": True}


def make(path, lengths, *, batch_size=3, seq_len=8, packing="concat"):
    """Write documents of these lengths, as `make_stream` has them, in batches; padding is 0."""
    stream = make_stream(path.with_name(f"stream-{path.name}"), lengths)
    size = {"batch_size": batch_size, "seq_len": seq_len, "pad_id": 0}
    convert(stream, "hdf5", path, shuffle=False, packing=packing, workers=1, **size)


@pytest.fixture(scope="module")
def lone(tmp_path_factory):
    path = tmp_path_factory.mktemp("lone") / "x.h5"
    lengths = [5, 17, 3, 8, 40, 1, 1, 22, 9, 30]
    make(path, lengths)
    return path, lengths


@pytest.mark.parametrize("access", ["auto", "mmap", "pread", "h5py"])
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.thin
def test_every_access_and_prefetch_gives_the_same(lone, access, prefetch):
    path, lengths = lone
    with Loader(path, access=access, prefetch=prefetch, **HOW, **EVERYTHING) as loader:
        for step in loader:
            check_step(step, lengths, seq_len=8)


def test_damaged_pieces_are_an_error_of_their_own_step(tmp_path):
    make(tmp_path / "x.h5", [8] * 60, batch_size=1)
    with h5py.File(tmp_path / "x.h5.pieces", "r+") as h5:
        h5["columns"][-1] = 5
    with Loader(tmp_path / "x.h5", verify="none", documents=True, **HOW | {"shuffle": "sequential"}) as loader:
        assert len([next(loader) for _ in range(59)]) == 59
        is_refused(FormatError, lambda: next(loader), match="columns do not ascend")


def test_a_store_of_shards_and_a_data_set_give_the_same(lone, tmp_path):
    path, lengths = lone
    convert(StoreSource(path, "hdf5"), "hdf5", tmp_path / "store", shards=2)
    with Loader(tmp_path / "store", **HOW, **EVERYTHING) as loader:
        steps = list(loader)
        for step in [*steps, *DataLoader(loader.dataset(), batch_size=None)]:
            check_step(step, lengths, seq_len=8)
        copy = pickle.loads(pickle.dumps(loader))
        np.testing.assert_array_equal(next(iter(copy))["tokens"], steps[0]["tokens"])
    with Loader(path, **HOW, **EVERYTHING) as other:
        for step, same in zip(steps, other, strict=True):
            np.testing.assert_array_equal(step["targets"], same["targets"])


def test_windows_of_a_stream_have_them_too(tmp_path):
    lengths = [5, 17, 3, 8, 40, 1, 1, 22]
    make_stream(tmp_path / "s.h5", lengths)
    with Loader(tmp_path / "s.h5", batch_size=3, seq_len=8, **HOW, **EVERYTHING) as loader:
        steps = 0
        for step in loader:
            steps += 1
            targets = step["targets"].numpy()
            ends = np.cumsum(lengths)
            after = step["tokens"].numpy() - 1000 + 1
            np.testing.assert_array_equal(targets, np.where(np.isin(after, ends), -100, after + 1000))
            step["targets"] = step["targets"].clone()
            step["targets"][:, -1] = -100  # a window knows the token behind it, a stored row does not
            check_step(step, lengths, seq_len=8)
        assert steps == len(loader) > 2


@pytest.mark.parametrize(("codec", "wanted", "values"), [
    (pickle.dumps, pickle.loads, [{1, 2}, complex(1, 2)]),
    (str.encode, bytes.decode, ["a", "b"]),
])  # fmt: skip
def test_a_loader_is_told_what_decodes_spans(codec, wanted, values, tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5", spans_codec=codec) as writer:
        for value in values:
            writer.write_document([5, 6, 7, 8], spans=[(1, 3, value)])
        writer.write_document([9])
    ways = [(Loader, {"seq_len": 4}), (Loader, {"seq_len": 4, "targets": True}), (DocumentLoader, {"collate": "pad"})]
    for kind, how in ways:
        how |= {"batch_size": 2, "shuffle": "sequential"}
        with kind(tmp_path / "s.h5", **how, spans=wanted) as loader:
            step = next(loader)
        assert step["spans"] == values
        assert step["span_index"].tolist() == [[-1, 0, 0, -1], [-1, 1, 1, -1]]
        with kind(tmp_path / "s.h5", **how, spans=True) as loader, pytest.raises(BackendError, match="to a loader"):
            next(loader)


def test_fields_alone_need_no_documents_and_names_come_in_any_collection(tmp_path):
    make(tmp_path / "y.h5", [5, 9, 30])
    for documents, names in (([], set()), (["cu_seqlens"], {"tokens", "cu_seqlens"}), (set(), set())):
        with Loader(tmp_path / "y.h5", documents=documents, **HOW) as loader:
            step = next(loader)
            assert (set(step) if isinstance(step, dict) else set()) == names
    tokens = np.arange(16).reshape(2, 2, 4)
    write_batches(tmp_path / "x.h5", tokens, {"mask": tokens}, fields={"mask": "u2"})
    with Loader(tmp_path / "x.h5", fields=("mask",), targets=True, **HOW | {"shuffle": "sequential"}) as loader:
        step = next(iter(loader))
    assert set(step) == {"tokens", "targets", "mask"}
    assert step["mask"].dtype == torch.int32
    assert step["targets"].tolist() == [[1, 2, 3, -100], [5, 6, 7, -100]]
    is_refused(BackendError, lambda: Loader(tmp_path / "x.h5", documents=True, **HOW), match="holds no documents")
    with pytest.raises(ArgumentError, match="expected a field that is stored"):
        Loader(tmp_path / "x.h5", fields=("nothing",), **HOW)


def test_padding_is_never_a_target(tmp_path):
    make(tmp_path / "x.h5", [5, 4, 3], batch_size=2, seq_len=4)
    with Loader(tmp_path / "x.h5", targets=True, **HOW | {"shuffle": "sequential"}) as loader:
        pairs = [(x.tolist(), y.tolist()) for x, y in loader]
    flat = [(a, b) for x, y in pairs for row, ys in zip(x, y, strict=True) for a, b in zip(row, ys, strict=True)]
    assert all(b in (-100, a + 1) for a, b in flat)
    assert all(b != 0 for _, b in flat)
    assert (1004, 1005) in flat  # the next document is a target here: only documents= takes it away
    with Loader(tmp_path / "x.h5", **HOW) as loader:
        labels = np.concatenate([record["labels"].numpy() for record in loader.records()])
    assert 0 not in labels
    assert sorted(labels[labels >= 0]) == list(range(1000, 1012))


def test_records_for_trainers_have_positions_and_cu_seqlens_are_filled_up_to_a_capacity(lone):
    path, lengths = lone
    with Loader(path, documents=True, **HOW) as loader:
        records = loader.records()
        for number in range(len(records)):
            record = records[number]
            tokens, labels, positions = (record[name].numpy() for name in ("input_ids", "labels", "position_ids"))
            begins = positions == 0
            np.testing.assert_array_equal(labels, np.where(begins | (tokens == 0), -100, tokens))
            starts = np.concatenate([[0], np.cumsum(lengths)]) + 1000
            assert begins[0]
            assert all(begins[column] for column in range(8) if tokens[column] in starts)
    with Loader(path, documents=[("cu_seqlens", 32)], **HOW) as loader:
        for step in loader:
            assert step["cu_seqlens"].shape == (32,)
            assert int(step["cu_seqlens"][-1]) == 24
    with Loader(path, documents=[("cu_seqlens", 3)], **HOW) as loader, pytest.raises(ArgumentError):
        list(loader)


@pytest.mark.parametrize(("options", "match"), [
    ({"documents": "cu_seqlens"}, "documents must be True or names of"),
    ({"documents": ("nothing",)}, "documents must be one of"),
    ({"fields": "number"}, "names of fields"),
    ({"mask_documents": [0]}, "needs targets=True"),
    ({"mask_documents": ["doc-1"], "targets": True}, r"mask_documents: expected numbers .* found \['doc-1'\]"),
    ({"mask_documents": 3, "targets": True}, "mask_documents: expected numbers .* found 3"),
    ({"mask_documents": [99], "targets": True}, r"expected numbers in 0\.\.9, found 99"),
    ({"skip": [(0, 5)]}, r"expected \(epoch, start, stop\)"),
    ({"skip": [(0, 5, 3)]}, "0 <= start <= stop"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused(lone, options, match):
    is_refused(ArgumentError, lambda: Loader(lone[0], **HOW, **options), match=match)


def test_masked_documents_lose_their_targets_and_nothing_else(lone):
    path, lengths = lone
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for documents in (False, True):
        whole = Loader(path, targets=True, fields=("number",), documents=documents, **HOW)
        masked = Loader(path, targets=True, fields=("number",), documents=documents, mask_documents=[4, 0], **HOW)
        with whole, masked:
            for before, after in zip(whole, masked, strict=True):
                np.testing.assert_array_equal(before["tokens"], after["tokens"])
                targets = before["targets"].numpy()
                number = np.searchsorted(starts, targets - 1000, side="right") - 1
                expected = np.where((targets >= 0) & np.isin(number, [0, 4]), -100, targets)
                np.testing.assert_array_equal(after["targets"], expected)


@examples(40)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=4),
    shuffle=st.sampled_from(["global", "records", "block", "sequential"]),
    batch_size=st.integers(1, 5),
    world=st.integers(1, 3),
    data=st.data(),
)
def test_skipped_positions_are_jumped_over_and_a_resumed_run_jumps_too(
    tmp_path_factory, ranges, shuffle, batch_size, world, data
):
    path = tmp_path_factory.mktemp("skip") / "x.h5"
    write_batches(path, np.arange(36).repeat(4).reshape(12, 3, 4))
    skip = [(0, start, start + count) for start, count in ranges]
    how = {"shuffle": ordered(shuffle, 2), "seed": 5, "batch_size": batch_size}
    with Loader(path, rank=0, world_size=1, drop_last=False, **{**how, "batch_size": 1}) as plain:
        order = [int(step[0, 0]) for step in plain]
    dropped = {position for start, count in ranges for position in range(start, start + count)}
    expected = [record for position, record in enumerate(order) if position not in dropped]
    whole = len(expected) // (batch_size * world)
    if not whole:
        is_refused(ArgumentError, lambda: Loader(path, rank=0, world_size=world, skip=skip, **how), match="too few")
        return
    loaders = [Loader(path, rank=rank, world_size=world, skip=skip, **how) for rank in range(world)]
    assert {len(loader) for loader in loaders} == {whole}
    stop = data.draw(st.integers(0, whole))
    running = [iter(loader) for loader in loaders]
    found = [record for _ in range(stop) for steps in running for record in next(steps)[:, 0].tolist()]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    assert all(state == states[0] for state in states)
    with Loader(path, rank=0, world_size=1, drop_last=False, **{**how, "batch_size": 1}) as rest:  # knows of no skip
        rest.load_state_dict(states[0])
        found += [int(step[0, 0]) for step in rest]
    assert found == expected
    for loader in loaders:
        loader.close()


def test_a_state_keeps_what_was_chosen_and_adds_what_is_new(lone):
    path, _ = lone
    with Loader(path, targets=True, skip=[(0, 3, 5)], mask_documents=[2], **HOW) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
    with Loader(path, targets=True, skip=[(1, 0, 2)], mask_documents=[7], **HOW) as loader:
        loader.load_state_dict(state)
        assert loader.skip == ((0, 3, 5), (1, 0, 2))
        assert loader.mask_documents == (2, 7)
        is_refused(StateError, lambda: loader.load_state_dict({**state, "skip": [[1]]}), match="skip")
    with Loader(path, **HOW) as loader:
        assert {"skip", "mask_documents"}.isdisjoint(loader.state_dict())
    with Loader(path, skip=[(1, 0, 6)], batch_size=1, **HOW) as loader:
        for epoch, steps in ((0, 0), (1, 6), (2, 0)):  # a skipped epoch is that epoch only
            loader.set_epoch(epoch)
            assert len(loader) == loader.num_records - steps


@pytest.mark.slow
def test_a_mixture_carries_them_and_never_has_padding_as_a_target(lone, tmp_path):
    path, _ = lone
    make(tmp_path / "y.h5", [7, 7, 7, 2], packing="pad")
    with MixedLoader(
        {"x": path, "y": tmp_path / "y.h5"}, {"x": 1, "y": 1}, rank=0, world_size=1, **EVERYTHING
    ) as mixed:
        for _ in range(8):
            step = next(mixed)
            assert set(step) == {"tokens", "targets", "number", "pair", *ALL, "spans", "span_index"}
            assert 0 not in step["targets"]
    with MixedLoader({"y": tmp_path / "y.h5"}, {"y": 1}, rank=0, world_size=1, targets=True) as mixed:
        _, targets = next(mixed)
        assert 0 not in targets
    with pytest.raises(ArgumentError, match="has no mask_documents, skip"):
        MixedLoader({"x": path}, {"x": 1}, rank=0, world_size=1, skip=[(0, 1, 2)], mask_documents=[1])


def test_a_following_loader_gives_the_fields_that_are_committed(tmp_path):
    size = {"batch_size": 2, "seq_len": 4}
    values = np.arange(10 * 8).reshape(10, 2, 4)
    with open_writer(tmp_path / "live", **size, fields={"mask": "u2"}, live=True, shard_batches=3) as writer:
        writer.write(values[:4], {"mask": values[:4] + 7})
        loader = FollowingLoader(tmp_path / "live", timeout_s=20, rank=0, world_size=1, fields=("mask",))
        steps = [next(loader) for _ in range(4)]
        writer.write(values[4:], {"mask": values[4:] + 7})
        steps += [next(loader) for _ in range(6)]
    steps += list(loader)[10:]
    loader.close()
    for number, step in enumerate(steps):
        np.testing.assert_array_equal(step["tokens"], values[number])
        np.testing.assert_array_equal(step["mask"], values[number] + 7)


# --- memory ------------------------------------------------------------------------------------------------------
SHAPE = {"batch_size": 32, "seq_len": 512}
LENGTH = 8
NUM_BATCHES = 200
#: Documents of each batch.
DOCUMENTS = 32 * 512 // LENGTH


@pytest.fixture
def streams(tmp_path):
    """Return a store of ten streams; every other one has a table of its documents."""
    lengths = np.full(NUM_BATCHES * DOCUMENTS // 10, LENGTH)
    paths = [tmp_path / "streams" / f"shard-{number:05}.h5" for number in range(10)]
    paths[0].parent.mkdir()
    for number, path in enumerate(paths):
        rows = DocumentRows(ids=[b"%d" % k for k in range(len(lengths))]) if number % 2 else None
        with HDF5ShardWriter(path, dtype="uint16") as writer:
            writer.write_documents(np.zeros(lengths.sum(), np.uint16), lengths, documents=rows)
    index_files(paths).save(paths[0].parent)
    return paths[0].parent


def require_little_memory(store, **how):
    """Compare what Python and numpy allocate for a loader and an epoch with an offset for each document."""
    how |= {"rank": 0, "world_size": 1, "prefetch": 0, "documents": ("cu_seqlens", "documents")}
    with Loader(store, **how) as warm:
        warm.get_batch()  # modules are loaded once
    tracemalloc.start()
    try:
        with Loader(store, **how) as loader:
            for _ in range(NUM_BATCHES):
                assert loader.get_batch()["documents"].numel() == DOCUMENTS
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * NUM_BATCHES * DOCUMENTS / 2, "less than half of an offset for each document"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_documents_of_streams(streams, monkeypatch):
    monkeypatch.setattr("zb_hdf5.store.store_documents.FEW_DOCUMENTS", 1000)
    for shuffle in ("global", "records"):
        require_little_memory(streams, shuffle=shuffle, **SHAPE)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_documents(streams, tmp_path):
    convert(streams, "hdf5", tmp_path / "store", packing="concat", shuffle=False, shards=10, **SHAPE)
    require_little_memory(tmp_path / "store")


@pytest.mark.parametrize("overlap", [1, 2, 5])
def test_windows_that_overlap_have_one_shape_as_pairs_and_as_dictionaries(overlap, tmp_path):
    write_stream(tmp_path / "x.h5", np.arange(300), [100, 0, 200], {"flag": np.arange(300) % 2}, fields={"flag": "u1"})
    how = {"targets": True, "shuffle": "sequential", "rank": 0, "world_size": 1}
    for more in ({}, {"mask_documents": [2]}, {"fields": ("flag",)}, {"documents": ("position_ids",)}):
        with open_reader(tmp_path / "x.h5", batch_size=4, seq_len=12, overlap=overlap) as reader:
            step = next(iter(Loader(reader, **how, **more)))
            x, y = (step["tokens"], step["targets"]) if isinstance(step, dict) else step
            starts = 12 * np.arange(4)[:, None]
            np.testing.assert_array_equal(x.numpy(), starts + np.arange(11 + overlap))
            np.testing.assert_array_equal(y.numpy()[0], np.arange(1, 12 + overlap))
            for name in ("flag", "position_ids"):
                assert name not in step or step[name].shape == x.shape


def stored_as(kind, folder):
    """Write 16 records of 8 ids, of which one is 4,000,000,000, and return their path and a shape."""
    tokens = np.arange(128, dtype=np.uint32)
    tokens[50] = 4_000_000_000
    if kind == "foreign":
        with h5py.File(folder / "x.h5", "w") as file:
            file["ids"] = tokens.astype("i8").reshape(16, 8)
        return folder / "x.h5", {"batch_size": 4}
    if kind == "stream":
        write_stream(folder / "x.h5", tokens, [128], dtype="uint32")
        return folder / "x.h5", {"batch_size": 4, "seq_len": 8}
    name = {"batch": "x.batch", "hdf5": "x.h5"}[kind]
    write_batches(folder / name, tokens.reshape(4, 4, 8), dtype="uint32")
    return folder / name, {}


@pytest.mark.parametrize("shuffle", ["sequential", "records"])
@pytest.mark.parametrize("options", [{}, {"access": "pread"}, {"prefetch": 2}, {"targets": True}, {"verify": "none"}])
@pytest.mark.parametrize("kind", ["batch", "hdf5", "stream", "foreign"])
def test_ids_that_int32_does_not_hold_are_refused(kind, options, shuffle, tmp_path):
    path, shape = stored_as(kind, tmp_path)
    how = {"rank": 0, "world_size": 1, "shuffle": shuffle, **shape, **options}
    with Loader(path, dtype=torch.int32, **how) as loader:
        is_refused(ArgumentError, lambda: list(loader), match=r"ids below 2\*\*31.* found 4,000,000,000; pass dtype=")
    with Loader(path, **how) as loader:
        steps = [step[1] if options.get("targets") else step for step in loader]
        assert max(step.max().item() for step in steps) == 4_000_000_000


def test_a_document_loader_refuses_ids_that_int32_does_not_hold(tmp_path):
    path, _ = stored_as("stream", tmp_path)
    how = {"collate": "pack", "max_tokens": 200, "rank": 0, "world_size": 1}
    with DocumentLoader(path, dtype=torch.int32, **how) as loader:
        is_refused(ArgumentError, lambda: next(loader), match="found 4,000,000,000; pass dtype=")
