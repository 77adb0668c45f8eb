"""Targets from the fields `labels` and `loss_mask`, in the two ways in which trainers write them."""

import re

import h5py
import numpy as np
import pytest
import torch
from commandline import run_zb
from contents import write_batches, write_stream
from contract import is_refused
from reading import reading

import zb_hdf5
from zb_hdf5 import ArgumentError, ConvertError, DocumentLoader, FollowingLoader, Loader, MixedLoader, open_writer
from zb_hdf5.errors import ZbError

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
    "a mask": ({"loss_mask": (OWN >= 0) * 1.0}, {"loss_mask": "f4"}),
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


def write_foreign(path, tokens, **values):
    """Write ids and values beside them, as programs do that know no fields."""
    with h5py.File(path, "w") as file:
        file["input_ids"] = tokens
        for name, value in values.items():
            file[name] = value
    return path


@pytest.mark.parametrize("dtype", ["f4", "f8", ">f4", "i2", "u8", "i8"])
@pytest.mark.parametrize("labels", [OWN, NEXT], ids=["own", "next"])
@pytest.mark.parametrize("place", ["store", "foreign", "stream"])
def test_labels_of_any_dtype_are_read(place, labels, dtype, tmp_path):
    values = labels if not dtype.startswith("u") else np.where(labels < 0, 0, labels)
    mask = {} if not dtype.startswith("u") else {"loss_mask": labels >= 0}
    flat, how = IDS[:-1], {}
    if place == "store":
        types = {"labels": dtype.lstrip(">"), **dict.fromkeys(mask, "?")}
        write_batches(
            tmp_path / "x.h5",
            TOKENS,
            {"labels": values, **mask},
            fields=types,
        )
    elif place == "foreign":
        rows = {name: value.reshape(-1, S) for name, value in {"labels": values.astype(dtype), **mask}.items()}
        write_foreign(tmp_path / "x.h5", TOKENS.reshape(-1, S).astype("i4"), **rows)
        how = {"batch_size": B}
    else:
        rows = {name: value.reshape(-1) for name, value in {"labels": values.astype(dtype), **mask}.items()}
        write_foreign(tmp_path / "x.h5", flat.astype("i4"), **rows)
        how = {"batch_size": B, "seq_len": S - 1}
    with Loader(tmp_path / "x.h5", targets=True, **how, **HOW) as loader:
        y = np.concatenate([of(step)[1] for step in loader])
    if place == "stream":  # windows of x have one token more than the records of the others
        expected = NEXT.reshape(-1)[: y.size].reshape(y.shape)
        np.testing.assert_array_equal(y, expected)
    else:
        np.testing.assert_array_equal(y, NEXT.reshape(-1, S)[:, :-1])
        with Loader(tmp_path / "x.h5", **how, **HOW) as loader:
            found = np.array([each["labels"].numpy() for each in loader.records().__getitems__(range(16))])
        np.testing.assert_array_equal(found[:, 1:], NEXT.reshape(-1, S)[:, :-1])


#: Values beside ids that are not targets, although their names say so.
UNFIT = {
    "fractions": {"labels": TOKENS + 0.5},
    "no number": {"labels": np.where(OWN < 0, np.nan, OWN)},
    "bytes": {"labels": np.full(TOKENS.shape, b"no")},
    "a mask of bytes": {"loss_mask": np.full(TOKENS.shape, b"1")},
    "a mask of no numbers": {"loss_mask": np.where(OWN < 0, np.nan, 1)},
    "a mask of weights": {"loss_mask": (OWN >= 0) * 0.5},
    "vectors": {"labels": np.zeros((*TOKENS.shape, 2), "f4")},
}


@pytest.mark.parametrize("case", UNFIT)
def test_values_that_are_no_targets_are_refused_by_name_and_never_passed_over(case, tmp_path):
    [(name, values)] = UNFIT[case].items()
    write_batches(tmp_path / "x.h5", TOKENS, UNFIT[case], fields={name: (values.dtype, values.shape[3:])})
    write_stream(
        tmp_path / "s.h5",
        IDS[:-1],
        [len(IDS) - 1],
        {name: values.reshape(-1, *values.shape[3:])},
        fields={name: (values.dtype, values.shape[3:])},
    )
    packed = {"collate": "pack", "max_tokens": 200, "rank": 0, "world_size": 1}
    for read in (
        lambda: next(iter(Loader(tmp_path / "x.h5", targets=True, **HOW))),
        lambda: next(MixedLoader({"x": tmp_path / "x.h5"}, {"x": 1}, targets=True, **HOW)),
        lambda: Loader(tmp_path / "x.h5", **HOW).records()[0],
        lambda: next(iter(Loader(tmp_path / "s.h5", targets=True, batch_size=1, seq_len=S, **HOW))),
        lambda: next(iter(DocumentLoader(tmp_path / "s.h5", targets=True, **packed))),
    ):
        with pytest.raises(ZbError, match=rf"targets: expected .* {name}, found"):
            read()
    for file in ("x.h5", "s.h5"):
        [line] = re.findall("^no targets .*$", run_zb("info", tmp_path / file, code=0).stdout, re.MULTILINE)
        assert re.search(f"expected .* {name}, found", line)
    with Loader(tmp_path / "x.h5", fields=(name,), **HOW) as loader:
        np.testing.assert_array_equal(next(iter(loader))["tokens"].numpy(), TOKENS[0])


@pytest.mark.parametrize("shape", ["a last axis", "another width", "bytes", "of records"])
@pytest.mark.parametrize("name", ["labels", "loss_mask"])
def test_values_in_group_foreign_ids_that_do_not_fit_are_refused(name, shape, tmp_path):
    rows = TOKENS.reshape(-1, S)
    values = {
        "a last axis": OWN.reshape(-1, S, 1),
        "another width": rows[:, :-1],
        "bytes": np.full(rows.shape, b"1"),
        "of records": np.arange(len(rows)),
    }[shape]
    path = write_foreign(tmp_path / "x.h5", rows.astype("i4"), **{name: values})
    how = {"dataset": "input_ids", "batch_size": B}
    for read in (
        lambda: Loader(path, targets=True, **reading(how), **HOW),
        lambda: Loader(path, **reading(how), **HOW).records(),
        lambda: MixedLoader({"x": path}, {"x": 1}, targets=True, **reading(how), **HOW),
    ):
        is_refused(ArgumentError, read, match=f"expected one .* for each token in {name}, found ")
    told = run_zb("info", path, "--dataset", "input_ids", code=0).stdout
    assert len(re.findall(f"^no targets +expected one .* for each token in {name}, found", told, re.MULTILINE)) == 1
    convert = lambda **more: zb_hdf5.convert(path, "hdf5", tmp_path / "out", **how, workers=1, **more)  # noqa: E731
    is_refused(ConvertError, convert, match=f"expected one number for each token in {name}, found .*tokens_only")
    convert(tokens_only=True, shuffle=False)
    for source, more in ((path, how), (tmp_path / "out", {})):
        with Loader(source, **reading(more), **HOW) as loader:
            np.testing.assert_array_equal(torch.cat(list(loader)).numpy(), rows)
    stream = write_foreign(tmp_path / "s.h5", rows.reshape(-1).astype("i4"), **{name: values})
    window = {"dataset": "input_ids", "batch_size": 1, "seq_len": S}
    message = f"for each token in {name}, found"
    is_refused(
        ArgumentError,
        lambda: Loader(stream, targets=True, **reading(window), **HOW),
        match=f"for each token in {name}, found",
    )
    if shape == "bytes":  # else several datasets may be the ids
        how = {"source_format": "stream", "boundary_token_id": 1, "workers": 1}
        to_stream = lambda **more: zb_hdf5.convert(stream, "stream", tmp_path / "t", **how, **more)  # noqa: E731
        is_refused(ConvertError, to_stream, match=message)


def sparse(way, where, count=400):
    """Return random records, and labels of which those of a few records count."""
    tokens = np.random.default_rng(7).integers(5, 900, (count, 1, S))
    labels = np.full(tokens.shape, -100)
    source = tokens if way == "own" else np.roll(tokens, -1, axis=2)
    labels[where] = source[where]
    if way == "next":
        labels[:, :, -1] = -100
    return tokens, labels


@pytest.mark.parametrize("way", ["own", "next"])
@pytest.mark.parametrize("where", [[100], [77, 300], slice(30, 90)])
def test_the_way_is_that_of_a_record_in_which_a_label_counts(way, where, tmp_path):
    tokens, labels = sparse(way, where)
    write_batches(tmp_path / "x.h5", tokens, {"labels": labels}, fields={"labels": "i4"})
    expected = labels[:, 0, :-1] if way == "next" else labels[:, 0, 1:]
    with Loader(tmp_path / "x.h5", targets=True, **HOW) as loader:
        np.testing.assert_array_equal(np.concatenate([of(step)[1] for step in loader]), expected)
    write_stream(
        tmp_path / "s.h5", tokens.reshape(-1), [S] * 400, {"labels": labels.reshape(-1)}, fields={"labels": "i4"}
    )
    with DocumentLoader(tmp_path / "s.h5", collate="pad", batch_size=1, targets=True, **HOW) as loader:
        found = np.concatenate([batch["targets"].numpy() for batch in loader])
    np.testing.assert_array_equal(found[:, :-1], expected)


def test_labels_that_are_both_or_not_found_have_to_be_named(tmp_path, monkeypatch):
    both = np.full((40, 1, S), 7)
    labels = both.copy()
    labels[:, :, :3] = -100
    write_batches(tmp_path / "both.h5", both, {"labels": labels}, fields={"labels": "i4"})
    monkeypatch.setattr("zb_hdf5.loaders.stored_targets.SEARCHES", 4)
    monkeypatch.setattr("zb_hdf5.loaders.stored_targets.SEARCHED_BYTES", 1)
    tokens, few = sparse("next", [150])
    write_batches(tmp_path / "few.h5", tokens, {"labels": few}, fields={"labels": "i4"})
    for name, found in (("both", "labels that are both"), ("few", "none that counts in the records")):
        path = tmp_path / f"{name}.h5"
        is_refused(
            ArgumentError, lambda path=path: Loader(path, targets=True, **HOW), match=f"found {found}.*labels='own'"
        )
    for way, expected in (("own", labels[:, 0, 1:]), ("next", labels[:, 0, :-1])):
        with Loader(tmp_path / "both.h5", targets=True, labels=way, **HOW) as loader:
            np.testing.assert_array_equal(np.concatenate([of(step)[1] for step in loader]), expected)
            records = loader.records()[0]["labels"].tolist()
            assert records == (labels[0, 0].tolist() if way == "own" else [-100, *labels[0, 0, :-1]])
        with MixedLoader({"x": tmp_path / "both.h5"}, {"x": 1}, targets=True, labels=way, **HOW) as mixed:
            np.testing.assert_array_equal(of(next(mixed))[1], expected[:1])
    with Loader(tmp_path / "few.h5", targets=True, labels="next", **HOW) as loader:
        np.testing.assert_array_equal(np.concatenate([of(step)[1] for step in loader]), few[:, 0, :-1])
    is_refused(
        ArgumentError,
        lambda: Loader(tmp_path / "few.h5", targets=True, labels="shifted", **HOW),
        match="labels must be one of own, next, found 'shifted'",
    )


def test_a_store_that_grows_tells_the_way_when_a_label_counts(tmp_path):
    tokens, labels = sparse("next", slice(4, 6), count=6)
    writer = open_writer(
        tmp_path / "live", batch_size=1, seq_len=S, live=True, shard_batches=8, fields={"labels": "i4"}
    )
    with writer, FollowingLoader(tmp_path / "live", targets=True, rank=0, world_size=1) as loader:
        for first, stop in ((0, 4), (4, 6)):
            writer.write(tokens[first:stop], {"labels": labels[first:stop]})
            found = np.concatenate([of(next(loader))[1] for _ in range(first, stop)])
            np.testing.assert_array_equal(found, labels[first:stop, 0, :-1])


def test_a_document_loader_takes_the_fields_and_another_mask_by_its_name(tmp_path):
    values = {"labels": NEXT.reshape(-1), "loss_mask": np.ones(96), "other": np.arange(96) % 3 > 0}
    fields = {"labels": "f4", "loss_mask": "f4", "other": "?"}
    write_stream(tmp_path / "x.h5", IDS[:-1], [40, 0, 56], values, fields=fields)
    how = {"collate": "pack", "max_tokens": 96, "targets": True, **HOW}
    expected = NEXT.reshape(-1).copy()
    expected[[39, 95]] = -100
    with DocumentLoader(tmp_path / "x.h5", **how) as loader:
        np.testing.assert_array_equal(next(iter(loader))["targets"].numpy(), expected)
    with DocumentLoader(tmp_path / "x.h5", **{**how, "targets": "other"}) as loader:
        np.testing.assert_array_equal(next(iter(loader))["targets"].numpy(), np.where(values["other"], expected, -100))


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
