"""Whole documents as batches: what each batch holds, and that a stop is never noticed, on any number of ranks."""

import json
import pickle
import warnings
from itertools import chain, count, islice

import numpy as np
import pytest
import torch
from contents import write_batches, write_stream
from hypothesis import given
from hypothesis import strategies as st
from reading import begun

from examples import examples
from zb_hdf5 import ArgumentError, Cache, DocumentLoader, HDF5ShardWriter, StateError, load_tokenizer, open_corpus
from zb_hdf5.store.rebuild import index_files

BOUNDARY = 60_000
LENGTHS = np.random.default_rng(3).integers(0, 25, 140).tolist()
LENGTHS[7] = LENGTHS[70] = 40
#: The document of number n holds tokens 100 * n, 100 * n + 1, ...; and a boundary token behind them.
DOCUMENTS = [[*range(100 * number, 100 * number + length), BOUNDARY] for number, length in enumerate(LENGTHS)]
WAYS = {
    "pad": {"collate": "pad", "batch_size": 3},
    "lengths": {"collate": "pad", "batch_size": 3, "shuffle": ("lengths", 5)},
    "pack": {"collate": "pack", "max_tokens": 96},
    "sequential": {"collate": ("pack", 8), "max_tokens": 64, "shuffle": "sequential"},
    "truncate": {"collate": "pad", "batch_size": 4, "max_tokens": (16, "truncate")},
    "drop": {"collate": "pack", "max_tokens": (32, "drop")},
}


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """A stream of documents."""
    path = tmp_path_factory.mktemp("documents") / "stream.h5"
    with HDF5ShardWriter(path, dtype="uint16", boundary_token_id=BOUNDARY) as writer:
        for document in DOCUMENTS:
            writer.write_document(np.array(document[:-1]))
    return path


def loader_of(stream, way, rank=0, world_size=1, **options):
    return DocumentLoader(stream, **{**WAYS[way], "rank": rank, "world_size": world_size, **options})


def numbers_and_lengths(batch):
    """Return the number and the length of each document; padding at the end of a packed batch is number -1."""
    numbers, lengths = batch["documents"].tolist(), batch["seq_lens"].tolist()
    if "cu_seqlens" in batch:
        assert np.diff(batch["cu_seqlens"]).tolist() == lengths
    padded = numbers[-1] == -1
    return (numbers[:-1], lengths[:-1]) if padded else (numbers, lengths)


def seen(batch):
    """Return the documents of a batch by number, having checked every value of it against the documents."""
    numbers, lengths = numbers_and_lengths(batch)
    texts = [DOCUMENTS[number][:length] for number, length in zip(numbers, lengths, strict=True)]
    shifted = [[*text[1:], -100] for text in texts]
    if "max_seqlen" in batch:
        size = len(batch["tokens"])
        rest = size - sum(lengths)
        assert batch["tokens"].tolist() == [*chain.from_iterable(texts), *[0] * rest]
        assert batch["targets"].tolist() == [*chain.from_iterable(shifted), *[-100] * rest]
        ends = np.cumsum([0, *lengths]).tolist() + [size] * (rest > 0)
        assert batch["cu_seqlens"].tolist() == ends
        assert batch["cu_seqlens"].dtype == batch["position_ids"].dtype == torch.int32
        assert batch["max_seqlen"] == max(np.diff(ends))
        places = [place for length in [*lengths, rest] for place in range(length)]
        assert batch["position_ids"].tolist() == places
    else:
        longest = max(lengths)
        assert batch["tokens"].tolist() == [[*text, *[0] * (longest - len(text))] for text in texts]
        assert batch["targets"].tolist() == [[*text, *[-100] * (longest - len(text))] for text in shifted]
    assert batch["tokens"].dtype == batch["targets"].dtype == batch["documents"].dtype == torch.int64
    return numbers


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_gives_each_document_once_as_it_is(way, stream):
    with loader_of(stream, way, drop_last=False, targets=True) as loader:
        longest = loader.max_tokens if way == "drop" else 10**9
        expected = [number for number, text in enumerate(DOCUMENTS) if len(text) <= longest]
        found = [number for batch in loader for number in seen(batch)]
        assert sorted(set(found)) == expected
        assert len(found) < len(expected) + (loader.batch_size or 1)
        if way == "sequential":
            assert found == expected
        else:
            loader.set_epoch(1)
            assert [number for batch in loader for number in seen(batch)] != found


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_that_is_read_again_is_warned_of_once(way, stream):
    with loader_of(stream, way, targets=True) as loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [[seen(batch) for batch in loader] for _ in range(3)]
    assert found == [found[0]] * 3
    assert [each.filename for each in caught] == ([] if way == "sequential" else [__file__])


def test_the_cost_of_max_tokens_is_counted_and_documents_of_similar_length_share_a_batch(stream):
    lost = [len(text) - 16 for text in DOCUMENTS if len(text) > 16]
    with loader_of(stream, "truncate") as loader:
        found = loader.documents
        assert (found.truncated_documents, found.truncated_tokens) == (len(lost), sum(lost))
        assert all(max(batch["seq_lens"].tolist()) <= 16 for batch in loader)
    with loader_of(stream, "drop") as loader:
        assert loader.documents.dropped_documents == 2
    with pytest.raises(ArgumentError, match=rf"{stream.name}: expected documents of at most max_tokens=32 .* 2 longer"):
        loader_of(stream, "drop", max_tokens=32)
    padding = {}
    for way in ("pad", "lengths"):
        how = {"shuffle": ("lengths", 40)} if way == "lengths" else {}
        with loader_of(stream, way, **how) as loader:
            padding[way] = sum(batch["tokens"].numel() - int(batch["seq_lens"].sum()) for batch in loader)
    assert padding["lengths"] < padding["pad"] / 4
    for way, shape in (("pad", (3, 48)), ("pack", (48,))):
        with loader_of(stream, way, max_tokens=48, collate=(way, 48)) as loader:
            assert {tuple(batch["tokens"].shape) for batch in loader} == {shape}


@examples(60)
@given(data=st.data(), way=st.sampled_from(sorted(WAYS)), before=st.integers(1, 3), after=st.integers(1, 4))
def test_other_ranks_go_on_with_the_next_document(stream, data, way, before, after):
    """Whatever the ranks were: all of them together see the batches of one rank that never stopped, in their order."""
    with begun(loader_of(stream, way), 1) as loader:
        expected = [batch["documents"].tolist() for batch in loader]
    steps = data.draw(st.integers(0, len(expected) // before))
    found, states = [[] for _ in range(steps * before)], []
    for rank in range(before):
        prefetch = data.draw(st.sampled_from([0, 2]))
        with begun(loader_of(stream, way, rank, before, prefetch=prefetch), 1) as loader:
            for step, batch in enumerate(islice(loader, steps) if steps else ()):
                found[step * before + rank] = batch["documents"].tolist()
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert found == expected[: steps * before]
    assert all(state == states[0] for state in states)
    rest = []
    for rank in range(after):
        with loader_of(stream, way, rank, after) as loader:
            loader.load_state_dict(states[0])
            rest.append([batch["documents"].tolist() for batch in loader])
    dealt = [batch for step in zip(*rest, strict=True) for batch in step]
    left = expected[steps * before :]
    assert dealt == left[: len(left) // after * after]


def test_a_packed_epoch_goes_on_with_batches_of_another_size(stream):
    with (
        loader_of(stream, "pack", shuffle="sequential") as loader,
        loader_of(stream, "pack", shuffle="sequential", max_tokens=128) as other,
    ):
        first = [number for batch in islice(loader, 4) for number in batch["documents"].tolist()]
        other.load_state_dict(loader.state_dict())
        second = [number for batch in other for number in batch["documents"].tolist()]
        assert [*first, *second] == list(range(len(first) + len(second)))


@pytest.mark.parametrize(("field", "options"), [
    ("seed", {"seed": 1}),
    ("shuffle", {"shuffle": "sequential"}),
    ("batch_size", {"batch_size": 4}),
    ("bucket_batches", {"shuffle": ("lengths", 6)}),
    ("longest", {"max_tokens": (30, "drop")}),
])  # fmt: skip
@pytest.mark.thin
def test_a_state_of_other_documents_or_another_order_is_refused(field, options, stream):
    with loader_of(stream, "lengths") as loader:
        next(loader)
        state = loader.state_dict()
    with loader_of(stream, "lengths", **options) as other:
        with pytest.raises(StateError, match=f"state has {'shuffle|' * (field == 'shuffle')}{field} .*force=True"):
            other.load_state_dict(state)
        other.load_state_dict(state, force=True)
        assert other.state_dict()["position"] == 3
        with pytest.raises(StateError, match=r"expected position in 0\.\.\d+, the documents of an epoch, found 10000"):
            other.load_state_dict(state | {"position": 10_000}, force=True)


def test_the_same_tokens_with_other_boundaries_are_other_documents_and_a_pickled_loader_goes_on(tmp_path, stream):
    for name, lengths in (("a.h5", [4, 4, 4]), ("b.h5", [4, 5, 3])):
        write_stream(tmp_path / name, np.arange(12), lengths)
    with DocumentLoader(tmp_path / "a.h5", **WAYS["pack"]) as loader:
        state = loader.state_dict()
        corpus = loader.corpus
        assert state["fingerprint"] == corpus.known_as.of_documents(corpus.doc_offsets) != corpus.fingerprint
    with DocumentLoader(tmp_path / "b.h5", **WAYS["pack"]) as loader, pytest.raises(StateError, match="fingerprint"):
        loader.load_state_dict(state)
    with open_corpus(stream) as store, DocumentLoader(store, **WAYS["pack"]) as loader:
        next(loader)
        with pickle.loads(pickle.dumps(loader)) as other:
            assert other.state_dict() == loader.state_dict()
            assert torch.equal(next(other)["tokens"], next(loader)["tokens"])


@pytest.mark.parametrize(("options", "message"), [
    ({"collate": "stack"}, "collate must be one of pad, pack"), ({"batch_size": None}, "needs batch_size"),
    ({"collate": "pack", "batch_size": None}, "needs max_tokens"),
    ({"collate": "pack", "max_tokens": 99}, "found max_tokens=99, batch_size=2"),
    ({"collate": "pack", "max_tokens": 99, "batch_size": None, "shuffle": "lengths"}, "shuffle='lengths'"),
    ({"batch_size": 0}, "batch_size must be at least 1"), ({"max_tokens": (9, "cut")}, "must be one of refuse"),
    ({"max_tokens": 99, "collate": ("pad", 8)}, "a multiple of 8"), ({"shuffle": ("lengths", 0)}, "bucket_batches"),
    ({"prefetch": -1}, "prefetch"), ({"batch_size": 999}, "140 documents are too few for a step of 1 rank;"),
    ({"device": "mps"}, "must be a CUDA device or the CPU, found mps"), ({"cache": "s3://bucket/cache"}, "is a URL"),
    ({"dtype": torch.float32}, r"dtype must be torch\.int64 or torch\.int32"),
])  # fmt: skip
def test_arguments_that_contradict_each_other_are_refused(options, message, stream, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        DocumentLoader(stream, **{"collate": "pad", "batch_size": 2, **options})
    write_batches(tmp_path / "a.h5", np.zeros((1, 2, 4), int))
    with pytest.raises(ArgumentError, match=r"a\.h5: not a token stream"):
        DocumentLoader(tmp_path / "a.h5", **WAYS["pack"])


FIELDS = {"loss_mask": "u1", "weight": "f4", "vector": ("i2", (2, 3))}
DTYPES = {"tokens": torch.int64, "loss_mask": torch.uint8, "weight": torch.float32, "vector": torch.int16}
DTYPES |= {"span_index": torch.int32}
TOKEN = st.tuples(st.integers(0, 99), st.integers(0, 2), st.integers(-3, 3))
#: Ways that cut documents of up to 13 tokens, and share them out in every manner.
SIZES = {"pad": {}, "pack": {"max_tokens": 24}, "truncate": {"max_tokens": (8, "truncate")}}


def columns_of(drawn):
    """Return the tokens and the fields of a document of which (token, mask, weight) of each token were drawn."""
    tokens, mask, weight = np.array(drawn, np.int64).reshape(-1, 3).T
    vector = weight[:, None, None] + np.arange(6).reshape(2, 3)
    return tokens, {"loss_mask": mask, "weight": weight / 2, "vector": vector}


def spans_of(number, length):
    """Return the spans of a document: the second, fourth, ... pair of its tokens."""
    return [(start, min(start + 2, length), [number, start // 2]) for start in range(2, length, 4)]


def expected_of(batch, documents, mask):
    """Return tokens, targets and fields of a batch of these documents, filled in one token at a time."""
    packed = batch["tokens"].dim() == 1
    found = {name: torch.zeros_like(batch[name]) for name in (*DTYPES, "targets")}
    found["tokens"][:] = 7
    found["targets"][:] = -100
    found["span_index"][:] = -1
    spans = {tuple(value): place for place, value in enumerate(batch["spans"])}
    assert len(spans) == len(batch["spans"])
    start = 0
    for row, (number, length) in enumerate(zip(*numbers_and_lengths(batch), strict=True)):
        tokens, fields = documents[number]
        for token in range(length):
            place = (start + token,) if packed else (row, token)
            found["span_index"][place] = spans.get((number, token // 2), -1)
            for name, values in {"tokens": tokens, **fields}.items():
                found[name][place] = torch.from_numpy(values)[token]
            if token + 1 < length and (mask is None or fields[mask][token + 1] != 0):
                found["targets"][place] = int(tokens[token + 1])
        start += length
    assert set(found["span_index"].unique().tolist()) - {-1} == set(range(len(spans)))
    return found


@examples(25)
@given(
    drawn=st.lists(st.lists(st.lists(TOKEN, max_size=12), max_size=6), min_size=1, max_size=3).filter(
        lambda files: any(map(any, files))
    ),
    chunk_tokens=st.integers(1, 20),
    way=st.sampled_from(sorted(SIZES)),
    multiple=st.sampled_from([1, 8]),
    mask=st.sampled_from([None, "loss_mask", "weight"]),
)
def test_fields_spans_and_targets_are_those_of_each_token(drawn, chunk_tokens, way, multiple, mask, tmp_path_factory):
    """The store has several files, whose chunks end anywhere."""
    folder = tmp_path_factory.mktemp("fields")
    paths, number = [folder / f"{place}.h5" for place in range(len(drawn))], count()
    for path, file in zip(paths, drawn, strict=True):
        with HDF5ShardWriter(path, chunk_tokens=chunk_tokens, fields=FIELDS) as writer:
            for document in file:
                writer.write_document(*columns_of(document), spans=spans_of(next(number), len(document)))
    index_files(paths).save(folder)
    documents = [columns_of(document) for file in drawn for document in file]
    options = {"fields": list(FIELDS), "pad_token_id": 7, "drop_last": False, **SIZES[way]}
    options["collate"] = WAYS[way]["collate"], multiple
    with loader_of(folder, way, spans=True, targets=mask or True, **options) as loader:
        seen = set()
        for batch in loader:
            seen |= set(numbers_and_lengths(batch)[0])
            assert {name: batch[name].dtype for name in DTYPES} == DTYPES
            expected = expected_of(batch, documents, mask or "loss_mask")  # used by its name
            assert all(torch.equal(batch[name], values) for name, values in expected.items())
    assert seen == {number for number, (tokens, _) in enumerate(documents) if len(tokens)}


def test_padding_of_fields_of_bytes_is_empty(tmp_path):
    kind = np.dtype([("name", "S2"), ("value", "i2")])
    with HDF5ShardWriter(tmp_path / "s.h5", fields={"tag": "S3", "record": kind}) as writer:
        for length in (1, 3):
            values = {"tag": np.full(length, b"ab"), "record": np.array([(b"c", 7)] * length, kind)}
            writer.write_document(np.arange(length), values)
    how = {"fields": ("tag", "record"), "shuffle": "sequential"}
    batch = next(DocumentLoader(tmp_path / "s.h5", collate="pad", batch_size=2, **how))
    assert batch["tag"].tolist() == [[b"ab", b"", b""], [b"ab"] * 3]
    assert batch["record"].tolist() == [[(b"c", 7), (b"", 0), (b"", 0)], [(b"c", 7)] * 3]


def test_the_mask_is_yielded_if_it_is_asked_for_and_fields_that_are_not_there_are_refused(tmp_path):
    path = tmp_path / "f.h5"
    with HDF5ShardWriter(path, boundary_token_id=9, fields=FIELDS | {"name": "S4"}) as writer:
        tokens, values = columns_of([(1, 1, 1), (2, 1, 1)])
        writer.write_document(tokens, values | {"name": np.array([b"a", b"b"])})
    for fields in ((), ("weight",)):
        first = loader_of(path, "pack", fields=fields, targets="loss_mask")
        with first, pickle.loads(pickle.dumps(first)) as loader:
            batch = loader.get_batch()
            assert set(batch) & set(FIELDS) == set(fields)
            assert batch["targets"].tolist() == [2, -100, -100]  # the boundary token is of no field: it does not count
    for options, message in (
        ({"fields": ["other"]}, r"f\.h5: expected a field that is stored .* found 'other'"),
        ({"targets": "name"}, r"expected targets to name .* found 'name', \|S4 of shape \(\)"),
        ({"targets": "vector"}, r"expected targets to name .* found 'vector', int16 of shape \(2, 3\)"),
    ):
        with pytest.raises(ArgumentError, match=message):
            loader_of(path, "pack", **options)


@pytest.mark.parametrize("way", ["pad", "lengths", "pack"])
def test_positions_that_are_jumped_over_give_no_documents_on_any_number_of_ranks(way, stream):
    with loader_of(stream, way, drop_last=False) as loader:
        order = loader.plan.order.indices(np.arange(140)).tolist()
    skip = [(0, 10, 31), (0, 130, 140), (1, 0, 5)]
    expected = sorted({*range(140)} - {*order[10:31], *order[130:]})
    with loader_of(stream, way, drop_last=False, targets=True, skip=skip) as loader:
        batches = list(loader)
        assert len(batches) == len(loader)
        assert sorted({number for batch in batches for number in seen(batch)}) == expected
    with loader_of(stream, way, targets=True, skip=skip) as loader:
        first = [seen(batch) for batch in islice(loader, 5)]
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [seen(next(loader)) for _ in range(3)]
        assert not {*chain(*first, *rest)} & {*order[10:31]}
    with loader_of(stream, way, targets=True) as other:  # the state brings what is jumped over
        other.load_state_dict(state)
        assert other.skip == tuple(skip)
        assert [seen(next(other)) for _ in range(3)] == rest


@pytest.mark.parametrize("way", ["pad", "pack"])
def test_tokens_of_masked_documents_are_no_targets(way, stream):
    masked = (3, 70, 139)
    with (
        loader_of(stream, way, targets=True) as plain,
        loader_of(stream, way, targets=True, mask_documents=masked) as loader,
    ):
        assert len(plain) == len(loader)
        for batch, other in zip(plain, loader, strict=True):
            documents = other["tokens"] // 100
            lost = torch.isin(documents, torch.tensor(masked)) & (other["tokens"] != BOUNDARY)
            changed = batch["targets"] != other["targets"]
            assert bool((other["targets"][changed] == -100).all())
            assert torch.equal(changed, lost & (batch["targets"] != -100))
            assert torch.equal(batch["tokens"], other["tokens"])
        state = loader.state_dict()
    with loader_of(stream, way, targets=True) as other:
        other.load_state_dict(state)
        assert other.mask_documents == masked
    wrong = (
        ([140], "0..139, found 140"),
        ([-1], "found -1"),
        (["a"], "expected numbers"),
        (masked, "needs targets=True"),
    )
    for documents, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            loader_of(stream, way, targets=documents != masked, mask_documents=documents)


def test_tokens_of_32_bits(stream):
    with (
        loader_of(stream, "pad", targets=True) as plain,
        loader_of(stream, "pad", targets=True, dtype=torch.int32) as x,
    ):
        for batch, other in zip(plain, x, strict=True):
            assert (other["tokens"].dtype, other["targets"].dtype) == (torch.int32, torch.int64)
            assert torch.equal(batch["tokens"], other["tokens"].long())
            assert torch.equal(batch["targets"], other["targets"])


def test_a_cache_serves_the_documents_of_later_epochs(stream, tmp_path):
    options = {"targets": True, "verify": "batch", "drop_last": False}
    with loader_of(stream, "pack", **options) as plain:
        expected = [seen(batch) for batch in plain]
    for _ in range(2):
        with loader_of(stream, "pack", cache=Cache(tmp_path / "cache", "1MiB"), **options) as loader:
            assert [seen(batch) for batch in loader] == expected
            assert pickle.loads(pickle.dumps(loader)).state_dict() == loader.state_dict()
    assert [path.name for path in tmp_path.glob("cache/zb-cache-*")]


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    with HDF5ShardWriter(tmp_path / "s.h5", tokenizer=json.dumps(load_tokenizer("byte").description)) as writer:
        for _ in range(8):
            writer.write_document(np.arange(5))
    options = {"collate": "pad", "batch_size": 2, "rank": 0, "world_size": 1}
    with DocumentLoader(tmp_path / "s.h5", tokenizer="byte", **options) as loader:
        assert next(loader)["tokens"].shape == (2, 5)
    other = load_tokenizer("byte")
    other.digest = "0" * 64
    with pytest.raises(StateError, match="expected the tokenizer that it was made with, byte"):
        DocumentLoader(tmp_path / "s.h5", tokenizer=other, **options)


@pytest.mark.parametrize("collate", ["pad", "pack"])
def test_a_masked_document_without_tokens_masks_no_other(collate, tmp_path):
    write_stream(tmp_path / "x.h5", np.arange(1, 10), [3, 0, 3, 0, 0, 3])
    how = {"collate": collate, "targets": True, "shuffle": "sequential", "rank": 0, "world_size": 1}
    how |= {"batch_size": 3} if collate == "pad" else {"max_tokens": 9}
    for masked, expected in (
        ((1,), [2, 3, -100, 5, 6, -100, 8, 9, -100]),
        ((1, 3, 4), [2, 3, -100, 5, 6, -100, 8, 9, -100]),
        ((2, 3), [2, 3, -100, -100, -100, -100, 8, 9, -100]),
        ((), [2, 3, -100, 5, 6, -100, 8, 9, -100]),
    ):
        with DocumentLoader(tmp_path / "x.h5", mask_documents=masked, **how) as loader:
            assert next(iter(loader))["targets"].reshape(-1).tolist() == expected
