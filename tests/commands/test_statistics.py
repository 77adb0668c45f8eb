"""Statistics of stores, against counts that are made one token and one document after the other."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from contents import write_batches, write_stream
from descriptors import open_files
from hypothesis import given
from hypothesis import strategies as st
from packed import write_packed

from zb_hdf5 import ArgumentError, HDF5ShardWriter, MmapTokenStore
from zb_hdf5.commands import statistics
from zb_hdf5.commands.statistics import MAX_COUNTED_ID, Part, measure
from zb_hdf5.store.streams import index_files

#: Few tokens and short documents: many of them are equal.
DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=40)


def slow(units):
    """Return repeated units, their tokens, and the groups of equal ones."""
    groups = defaultdict(list)
    for number, unit in units.items():
        if len(unit):
            groups[tuple(unit)].append(number)
    again = {unit: numbers for unit, numbers in groups.items() if len(numbers) > 1}
    copies = sum(len(numbers) - 1 for numbers in again.values())
    tokens = sum((len(numbers) - 1) * len(unit) for unit, numbers in again.items())
    ordered = sorted(again.items(), key=lambda item: (-(len(item[1]) - 1) * len(item[0]), item[1][0]))
    return copies, tokens, [(numbers, len(unit)) for unit, numbers in ordered[: statistics.MAX_GROUPS]]


def check(found, units, tokens=None):
    """Compare with units, a list or number -> tokens, and with all tokens if these are more."""
    units = dict(enumerate(units)) if isinstance(units, list) else units
    tokens = [token for unit in units.values() for token in unit] if tokens is None else tokens
    assert {token: int(count) for token, count in enumerate(found.counts) if count} == Counter(tokens)
    assert found.units == len(units)
    copies, repeated, groups = slow(units)
    assert (found.duplicates.units, found.duplicates.tokens) == (copies, repeated)
    assert [(group.units.tolist(), group.length) for group in found.duplicates.groups] == groups
    for group in found.duplicates.groups:
        beginning = group.beginning.tolist()
        assert beginning
        assert beginning == list(units[int(group.units[0])])[: len(beginning)]


def write_documents(path, documents):
    tokens = [token for document in documents for token in document]
    write_stream(path, np.array(tokens, np.uint16), list(map(len, documents)), chunk_tokens=64)


@given(DOCUMENTS, st.sampled_from([1, 5, 1 << 18]), st.booleans())
def test_a_stream(tmp_path_factory, documents, stretch, collide):
    if not any(documents):
        return
    path = tmp_path_factory.mktemp("s") / "s.h5"
    write_documents(path, documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "STREAM_TOKENS", stretch)
        if collide:  # all hashes are equal
            patch.setattr(statistics, "_hashes", lambda part: np.zeros(len(part.starts), np.uint64))
        found = measure(path)
    check(found, documents)
    assert (found.tokens, found.packing, found.sources) == (sum(map(len, documents)), None, [])
    assert found.unit == "document"
    assert found.lengths.tolist() == [len(document) for document in documents]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.sampled_from([1, 64, 4 << 20]))
def test_batches(tmp_path_factory, num_batches, batch_size, seq_len, seed, group_bytes):
    tokens = np.random.default_rng(seed).integers(0, 3, (num_batches, batch_size, seq_len)).astype(np.uint16)
    path = tmp_path_factory.mktemp("b") / "b.h5"
    write_batches(path, tokens, dtype="uint16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "GROUP_BYTES", group_bytes)
        found = measure(path)
    check(found, tokens.reshape(-1, seq_len).tolist())
    assert (found.unit, found.lengths, found.tokens) == ("record", None, tokens.size)


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers(0, 999), st.sampled_from([0, 0.1, 0.5]),
    st.sampled_from([1, 4 << 20]), st.booleans(),
)  # fmt: skip
def test_documents_in_batches(tmp_path_factory, lengths, seed, lost, group_bytes, collide):
    packed = write_packed(tmp_path_factory.mktemp("p") / "x.h5", lengths, seed=seed, lost=lost, vocab=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "GROUP_BYTES", group_bytes)
        if collide:
            patch.setattr(statistics, "_hashes", lambda part: np.zeros(len(part.starts), np.uint64))
        found = measure(packed.path)
    held = {number: packed.held(number) for number in range(len(lengths))}
    whole = {number: packed.documents[number] for number, there in held.items() if len(there) == lengths[number]}
    check(found, whole, [token for there in held.values() for _, token in there])
    assert (found.unit, found.lengths.tolist(), found.num_units) == ("document", lengths, len(lengths))
    there = [len(held[number]) for number in range(len(lengths))]
    assert found.packing.padding == sum(of < 0 for row in packed.cells for _, of, _ in row)
    assert found.packing.absent == sum(length > 0 == now for length, now in zip(lengths, there, strict=True))
    assert found.packing.cropped == sum(length > now > 0 for length, now in zip(lengths, there, strict=True))
    assert found.packing.lost == sum(lengths) - sum(there)
    begins = Counter()
    for row in packed.cells:
        befores = [(-1, 0), *((of, place) for _, of, place in row)]
        begins.update(of for (_, of, place), before in zip(row, befores, strict=False) if before != (of, place - 1))
    assert found.packing.split == sum(count > 1 for of, count in begins.items() if of >= 0)
    names = {f"{k}.jsonl": lengths[k::2] for k in range(2) if lengths[k::2]}
    assert {name: (documents, tokens) for name, documents, tokens in found.sources} == {
        name: (len(part), sum(part)) for name, part in names.items()
    }


def test_sources_are_counted_with_one_table_open_at_a_time(tmp_path):
    paths = [tmp_path / f"shard-{number:05}.h5" for number in range(3)]
    for path in paths:
        with HDF5ShardWriter(path, chunk_tokens=64) as writer:
            writer.write_document(np.arange(9), id="a")
    index_files(paths).save(tmp_path)
    with MmapTokenStore(tmp_path) as store:
        table, before = store.documents, open_files()
        assert statistics._sources(table) == []
        assert open_files() == before


def test_samples_are_spread_evenly_over_batches_and_have_whole_documents_of_a_stream(tmp_path, monkeypatch):
    tokens = np.arange(20 * 2 * 4, dtype=np.uint16).reshape(20, 2, 4)
    tokens[19, 1] = tokens[0, 0]
    write_batches(tmp_path / "b.h5", tokens, dtype="uint16")
    found = measure(tmp_path / "b.h5", sample_batches=3)
    assert (found.num_tokens, found.tokens, found.num_units, found.units) == (160, 24, 40, 6)
    assert np.flatnonzero(found.counts).tolist() == np.unique(tokens[[0, 10, 19]]).tolist()
    assert [group.units.tolist() for group in found.duplicates.groups] == [[0, 39]]
    assert measure(tmp_path / "b.h5", sample_batches=1000).tokens == 160
    monkeypatch.setattr(statistics, "STREAM_TOKENS", 10)
    documents = [[number] * 7 for number in range(30)]
    write_documents(tmp_path / "s.h5", documents)
    found = measure(tmp_path / "s.h5", sample_batches=4)
    assert found.units == found.tokens // 7 < 30
    assert set(found.counts.tolist()) == {0, 7}


def test_files_of_npy_are_compared_whole_and_ids_that_no_tokenizer_has_are_counted_together(tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "STREAM_TOKENS", 16)
    parts = [np.arange(100), np.arange(100) + 1, np.arange(100)]
    for number, part in enumerate(parts):
        np.save(tmp_path / f"{number}.npy", part.astype(np.uint16))
    found = measure(tmp_path)
    check(found, [part.tolist() for part in parts])
    assert found.unit == "file"
    np.save(tmp_path / "a.npy", np.array([3, 3, MAX_COUNTED_ID, 2**31, 2**32 - 1, MAX_COUNTED_ID - 1]))
    found = measure(tmp_path / "a.npy")
    assert found.uncounted == 3
    assert (len(found.counts), found.counts[3], found.counts[-1]) == (MAX_COUNTED_ID, 2, 1)


def test_progress_ends_at_the_total_and_nothing_cannot_be_measured(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(1000, np.uint16))
    seen = []
    measure(tmp_path / "a.npy", progress=lambda tokens, total: seen.append((tokens, total)))
    assert sum(tokens for tokens, _ in seen) == 1000 == seen[-1][1]
    np.save(tmp_path / "a.npy", np.zeros(0, np.uint16))
    with pytest.raises(ArgumentError, match="expected tokens to count, found none"):
        measure(tmp_path / "a.npy")


def test_hashes_tell_short_documents_apart_and_add_up():
    pairs = np.stack(np.meshgrid(np.arange(300), np.arange(300)), axis=-1).reshape(-1, 2)
    units = np.arange(len(pairs))
    whole = statistics._hashes(Part(pairs.reshape(-1), units * 2, units, units * 0))
    assert len(np.unique(whole)) == len(pairs)
    halves = statistics._hashes(
        Part(pairs.reshape(-1), np.arange(pairs.size), units.repeat(2), np.tile([0, 1], len(pairs)))
    )
    assert np.array_equal(halves[::2] + halves[1::2], whole)
