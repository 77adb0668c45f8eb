"""Targets from the fields `labels` and `loss_mask`, in the two ways in which trainers write them."""

import numpy as np
import pytest
import torch
from contents import write_batches, write_stream
from contract import is_refused

from zb_hdf5 import ArgumentError, DocumentLoader, FollowingLoader, Loader, MixedLoader, open_writer

HOW = {"rank": 0, "world_size": 1, "shuffle": "sequential"}
B, S = 2, 6
rng = np.random.default_rng(4)
IDS = rng.integers(5, 900, 8 * B * S + 1)
TOKENS = IDS[:-1].reshape(8, B, S)
#: Of each token: whether the model learns it.
LEARNED = rng.integers(0, 2, IDS.shape).astype(bool)
#: The token after each one, or -100, as all of them tell.
NEXT = np.where(LEARNED, IDS, -100)[1:].reshape(8, B, S)
OWN = np.where(LEARNED, IDS, -100)[:-1].reshape(8, B, S)
#: The labels of files for Cerebras count by a mask, and may be anything elsewhere.
WITH_MASK = {"labels": np.where(NEXT < 0, 0, NEXT), "loss_mask": NEXT >= 0}
#: The fields of a store, their dtypes, and the tokens that the targets tell of.
FIELDS = {
    "labels of the tokens": ({"labels": OWN}, {"labels": "i4"}),
    "labels of the next tokens": ({"labels": NEXT}, {"labels": "i8"}),
    "next labels and a mask": (WITH_MASK, {"labels": "u2", "loss_mask": "u1"}),
    "labels and a mask": ({"labels": TOKENS, "loss_mask": OWN >= 0}, {"labels": "i4", "loss_mask": "?"}),
    "a mask": ({"loss_mask": (OWN >= 0) * 0.5}, {"loss_mask": "f4"}),
}


@pytest.fixture(params=FIELDS)
def fields(request):
    return FIELDS[request.param]


@pytest.fixture
def path(fields, tmp_path):
    values, dtypes = fields
    write_batches(tmp_path / "x.h5", TOKENS, values, fields=dtypes)
    return tmp_path / "x.h5"


def of(step):
    x, y = step
    return x.numpy(), y.numpy()


def test_pairs_have_the_stored_targets(path):
    with Loader(path, targets=True, **HOW) as loader:
        steps = [of(step) for step in loader]
    np.testing.assert_array_equal([x for x, _ in steps], TOKENS[:, :, :-1])
    np.testing.assert_array_equal([y for _, y in steps], NEXT[:, :, :-1])
    with Loader(path, targets=True, **HOW) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": 4})
        np.testing.assert_array_equal(of(next(iter(loader)))[1], NEXT[2, :, :-1])


def test_other_shapes_and_orders_have_them_too(path):
    expected = NEXT.reshape(-1, S)[:, :-1]
    tokens = TOKENS.reshape(-1, S)[:, :-1]
    for how in ({"batch_size": 3}, {"shuffle": "records", "batch_size": 4}, {"shuffle": "global", "prefetch": 2}):
        with Loader(path, targets=True, dtype=torch.int32, last="short", **{**HOW, **how}) as loader:
            x, y = (np.concatenate(parts) for parts in zip(*map(of, loader), strict=True))
        order = [int(np.flatnonzero((tokens == row).all(axis=1))[0]) for row in x]
        assert sorted(order) == list(range(16))
        np.testing.assert_array_equal(y, expected[order])
    with Loader(path, targets=True, seq_len=3, **HOW) as loader:
        found = np.concatenate([of(step)[1] for step in loader])
    np.testing.assert_array_equal(found, NEXT.reshape(-1, 3)[:, :-1])


def test_dictionaries_have_them_and_the_fields_as_they_are(path, fields):
    names = tuple(fields[0])
    with Loader(path, targets=True, fields=names, last="masked", batch_size=5, **HOW) as loader:
        steps = list(loader)
    targets = np.concatenate([step["targets"].numpy() for step in steps])
    assert targets.shape == (20, S)
    assert (targets[16:] == -100).all()
    np.testing.assert_array_equal(targets[:16, :-1], NEXT.reshape(-1, S)[:, :-1])
    assert (targets[:, -1] == -100).all()
    for name, values in fields[0].items():
        found = np.concatenate([step[name].numpy() for step in steps])[:16]
        np.testing.assert_array_equal(found, values.reshape(-1, S))


def test_without_targets_nothing_changes(path):
    with Loader(path, **HOW) as loader:
        np.testing.assert_array_equal(torch.stack(list(loader)).numpy(), TOKENS)


def test_records_for_trainers_have_labels_that_models_shift(path):
    with Loader(path, **HOW) as loader:
        records = loader.records()
        labels = np.array([records[number]["labels"].numpy() for number in range(len(records))])
    np.testing.assert_array_equal(labels[:, 1:], NEXT.reshape(-1, S)[:, :-1])


@pytest.mark.parametrize("name", FIELDS)
def test_windows_of_a_stream_lose_no_target(name, tmp_path):
    values, dtypes = FIELDS[name]
    flat = {each: np.concatenate([value.reshape(-1), value.reshape(-1)[:1]]) for each, value in values.items()}
    if "labels" in flat and name.startswith(("labels of the t", "labels and")):
        flat["labels"][-1] = IDS[-1] if LEARNED[-1] or "mask" in name else -100
    if "loss_mask" in flat and name in ("labels and a mask", "a mask"):
        flat["loss_mask"][-1] = LEARNED[-1]
    write_stream(tmp_path / "x.h5", IDS, [10, 30, len(IDS) - 40], flat, fields=dtypes)
    with Loader(tmp_path / "x.h5", batch_size=4, seq_len=8, targets=True, **HOW) as loader:
        x, y = (np.concatenate(parts).reshape(-1) for parts in zip(*map(of, loader), strict=True))
    np.testing.assert_array_equal(x, IDS[:96])
    np.testing.assert_array_equal(y, NEXT.reshape(-1))
    with Loader(tmp_path / "x.h5", batch_size=4, seq_len=8, targets=True, documents=True, **HOW) as loader:
        found = np.concatenate([step["targets"].numpy() for step in loader]).reshape(-1)
    expected = NEXT.reshape(-1).copy()
    expected[[9, 39]] = -100  # the next token is of another document
    np.testing.assert_array_equal(found, expected)
    with Loader(tmp_path / "x.h5", batch_size=4, seq_len=8, targets=True, mask_documents=[1], **HOW) as loader:
        found = np.concatenate([of(step)[1] for step in loader]).reshape(-1)
    expected = NEXT.reshape(-1).copy()
    expected[9:39] = -100
    np.testing.assert_array_equal(found, expected)


def test_a_mixture_and_a_store_that_grows_have_them(tmp_path):
    values, dtypes = FIELDS["labels of the next tokens"]
    for name in ("a", "b"):
        write_batches(tmp_path / f"{name}.h5", TOKENS, values, fields=dtypes)
    sources = {name: tmp_path / f"{name}.h5" for name in ("a", "b")}
    with MixedLoader(sources, {"a": 0.5, "b": 0.5}, targets=True, **HOW) as mixture:
        for _ in range(4):
            x, y = of(next(iter(mixture)))
            place = int(np.flatnonzero((TOKENS[:, :, :-1] == x).all(axis=(1, 2)))[0])
            np.testing.assert_array_equal(y, NEXT[place, :, :-1])
    writer = open_writer(tmp_path / "live", batch_size=B, seq_len=S, live=True, shard_batches=4, fields=dtypes)
    with writer, FollowingLoader(tmp_path / "live", targets=True, rank=0, world_size=1) as loader:
        writer.write(TOKENS[:3], {"labels": NEXT[:3]})
        np.testing.assert_array_equal(of(next(loader))[1], NEXT[0, :, :-1])


def test_labels_that_are_neither_are_refused_and_no_labels_are_both(tmp_path):
    for name, labels, is_good in (("other", TOKENS[::-1], False), ("none", np.full_like(TOKENS, -100), True)):
        path = tmp_path / f"{name}.h5"
        write_batches(path, TOKENS, {"labels": labels}, fields={"labels": "i4"})
        if is_good:
            with Loader(path, targets=True, **HOW) as loader:
                assert all((y == -100).all() for _, y in map(of, loader))
            continue
        refused = (lambda path=path: Loader(path, targets=True, **HOW),)
        is_refused(
            ArgumentError, *refused, match=r"other\.h5: targets: expected labels that are the tokens, or the next"
        )
        with Loader(path, fields=("labels",), **HOW) as loader:
            np.testing.assert_array_equal(next(iter(loader))["labels"].numpy(), labels[0])


def test_fields_that_are_no_targets_stay_fields(tmp_path):
    values = {"labels": np.zeros((*TOKENS.shape, 2), "f4"), "loss_mask": np.full(TOKENS.shape, b"no")}
    write_batches(tmp_path / "x.h5", TOKENS, values, fields={"labels": ("f4", (2,)), "loss_mask": "S2"})
    with Loader(tmp_path / "x.h5", targets=True, **HOW) as loader:
        np.testing.assert_array_equal(of(next(iter(loader)))[1], TOKENS[0, :, 1:])


def test_stored_position_ids_are_a_field_unless_those_of_documents_are_asked_for(tmp_path):
    values = {"position_ids": np.arange(len(IDS)) % 7}
    write_stream(tmp_path / "x.h5", IDS, [40, len(IDS) - 40], values, fields={"position_ids": "i4"})
    how = {"batch_size": 2, "seq_len": 8, **HOW}
    with Loader(tmp_path / "x.h5", fields=("position_ids",), documents=True, **how) as loader:
        step = next(iter(loader))
    assert step["position_ids"].reshape(-1).tolist() == (np.arange(16) % 7).tolist()
    both = {"fields": ("position_ids",), "documents": ("position_ids",)}
    is_refused(
        ArgumentError, lambda: Loader(tmp_path / "x.h5", **both, **how), match="as a field, and of the documents"
    )
    packed = {"collate": "pack", "max_tokens": 100, "fields": ("position_ids",), "rank": 0, "world_size": 1}
    is_refused(ArgumentError, lambda: DocumentLoader(tmp_path / "x.h5", **packed), match="position_ids of its own")
