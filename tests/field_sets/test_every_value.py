"""Every value of every step, against a reference of NumPy and h5py alone.

No two tokens are equal, and the values are noise: a token tells its position, and its value belongs to this one alone.
"""

import json
import pickle
from contextlib import nullcontext
from itertools import islice, product

import h5py
import numpy as np
import pytest
import torch

from zb_hdf5 import Field, Loader, MixedLoader, convert, open_corpus, open_field_set
from zb_hdf5.files import checked, tokens
from zb_hdf5.loaders import step_memory

SEQ_LEN = 32
FIELDS = [Field("ids", np.dtype("i4"), (3,), fill=-5), Field("logprobs", np.dtype("f2"), (2,), fill=9.0)]
NAMES = ["teacher/ids", "teacher/logprobs", "weights/weight"]
ORDERS = ["global", "records", "block", "sequential"]
PART_BYTES = 30_000


def write_noise(corpus, name, fields, batch_size=8, **options):
    """Write noise for all records of a set; the values of the context in a window of a stream are other ones."""
    rng = np.random.default_rng(len(name))
    with open_field_set(corpus, name, fields, part_bytes=PART_BYTES, **options) as found:
        for step in found.missing(batch_size, quiet=True):
            shape = step["tokens"].shape if "tokens" in step else step["documents"].shape
            values = {}
            for field in fields:
                of_field = shape if field.unit == "token" else shape[:1]
                bits = rng.integers(-30_000, 30_000, (*of_field, *field.shape))
                values[field.name] = bits.astype(field.dtype)
            found.write(step["records" if "records" in step else "documents"], **values)
        found.finish()
        return found.folder


def stored(folder, name):
    """Return all values of a field in the order of their records, read by h5py."""
    found = []
    for path in sorted(folder.glob("*.values")):
        with h5py.File(path) as h5:
            assert (h5["marks"][:] > 0).all()
            found.append(h5[f"values/{name}"][:])
    return np.concatenate(found)


class Reference:
    """The tokens of a corpus in order, and the values of its sets: of tokens by position, of records by number."""

    def __init__(self, path):
        if path.is_dir():
            shards = [h5py.File(shard) for shard in sorted(path.glob("shard-*.h5"))]
            tokens = np.concatenate([shard["batches"][:].reshape(-1) for shard in shards])
            for shard in shards:
                shard.close()
        else:
            tokens = np.load(path)
        self.tokens = tokens
        self.place = np.full(2**16, -1)
        self.place[tokens[tokens > 0]] = np.flatnonzero(tokens > 0)
        sets = path / "fields" if (path / "fields").exists() else path.with_name(f"{path.name}.fields")
        self.values = {}
        for part in sets.glob("*/*/part-000000000000.values"):
            with h5py.File(part) as h5:
                names = list(h5["values"])
            of_set = {f"{part.parent.parent.name}/{name}": stored(part.parent, name) for name in names}
            self.values.update(of_set)

    def of_tokens(self, name):
        found = self.values[name]
        return found.reshape(-1, *found.shape[2:])[: len(self.tokens)]

    def require(self, step, names=NAMES):
        """See that every value of a step is the one that is stored for its token, or its target; return its tokens."""
        tokens = step["tokens"].numpy().astype(np.int64)
        of_inputs = np.where(tokens > 0, self.place[tokens], -1)
        of_targets = of_inputs
        if "targets" in step:
            targets = step["targets"].numpy()
            of_targets = np.where(targets > 0, self.place[np.maximum(targets, 0)], -1)
        for name in names:
            place = of_targets if name.startswith("weights") else of_inputs
            found = step[name].numpy()[place >= 0]
            expected = self.of_tokens(name)[place[place >= 0]]
            assert found.dtype == expected.dtype
            assert found.tobytes() == expected.tobytes(), name
        return tokens[tokens > 0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store of records, a stream, and a store of packed documents with padding; nobody writes here later."""
    folder = tmp_path_factory.mktemp("noise")
    tokens = (np.random.default_rng(7).permutation(2**16 - 1)[: 301 * SEQ_LEN] + 1).astype(np.uint16)
    np.save(folder / "rows.npy", tokens.reshape(-1, SEQ_LEN))
    convert(folder / "rows.npy", "hdf5", folder / "store", batch_size=8, shards=3)
    np.save(folder / "flat.npy", tokens[:-5])
    ends = np.sort(np.random.default_rng(2).choice(np.arange(1, len(tokens)), 400, replace=False))
    rows = [json.dumps({"input_ids": each.tolist()}) for each in np.split(tokens, ends)]
    (folder / "docs.jsonl").write_text("\n".join(rows))
    convert(folder / "docs.jsonl", "hdf5", folder / "packed", seq_len=SEQ_LEN, batch_size=8, remainder="pad")
    weight = [Field("weight", np.dtype("f8"), fill=-2.5)]
    for name in ("store", "packed", "flat.npy"):
        options = {"seq_len": 64, "stride": 16} if name == "flat.npy" else {}
        write_noise(folder / name, "teacher", FIELDS, **options)
        write_noise(folder / name, "weights", weight, about="token", **options)
    return folder


@pytest.fixture(scope="module")
def references(made):
    return {name: Reference(made / name) for name in ("store", "packed", "flat.npy")}


#: The shapes of steps of each corpus: batch size, tokens of a record, and for a stream the stride of its windows.
SHAPES = {
    "store": [(None, None), (5, None), (None, SEQ_LEN // 2), (3, SEQ_LEN // 4)],
    "packed": [(None, None), (5, SEQ_LEN // 2)],
    "flat.npy": [(2, 64, 64), (3, 40, 13), (1, 7, 7)],
}
WORLDS = [(1, 2), (2, 3), (3, 1)]
#: The worlds outside: so every third case has each of them.
CASES = [
    (name, shape, order, worlds, (number + place) % 2 == 0)
    for place, worlds in enumerate(WORLDS)
    for name, shapes in SHAPES.items()
    for number, (shape, order) in enumerate(product(shapes, ORDERS))
]


def loader_of(made, name, shape, order, **options):
    """Return a loader of a case, and what closes the corpus that it reads."""
    batch_size, seq_len, *stride = shape
    options = {"fields": NAMES, "shuffle": order, "seed": 3, **options}
    if stride:
        corpus = open_corpus(made / name, **{key: options.pop(key) for key in ("access", "verify") if key in options})
        return Loader(corpus.batches(batch_size, seq_len, stride[0]), **options), corpus
    return Loader(made / name, batch_size=batch_size, seq_len=seq_len, **options), nullcontext()


def steps_of(made, case, rank, world_size, count=None, state=None):
    """Return the steps of a rank, at most so many, and its state after them."""
    name, shape, order, _, targets = case
    documents = ("document_ids",) if name == "packed" else False
    loader, opened = loader_of(
        made, name, shape, order, targets=targets, documents=documents, rank=rank, world_size=world_size
    )
    with opened, loader:
        if state is not None:
            loader.load_state_dict(state)
        return list(islice(loader, count)), loader.state_dict()


def test_every_value_in_every_order_shape_and_world_size_and_after_a_resume(made, references, thinned):
    """All ranks read some steps, stop, and another number of ranks goes on; no token comes twice."""
    for case in thinned(CASES, 11):
        name, shape, _, (world_size, later_size), _ = case
        reference = references[name]
        seen = []
        for rank in range(world_size):
            steps, state = steps_of(made, case, rank, world_size, count=4)
            seen += [reference.require(step) for step in steps]
        for rank in range(later_size):
            steps, _ = steps_of(made, case, rank, later_size, state=state)
            seen += [reference.require(step) for step in steps]
        seen = np.concatenate(seen)
        is_whole = len(shape) == 2 or shape[1] == shape[2]
        if is_whole:
            assert len(np.unique(seen)) == len(seen), case
        assert len(np.unique(seen)) > 0.75 * np.count_nonzero(reference.tokens), case


@pytest.mark.parametrize("last", ["drop", "fill", "short", "masked"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_value_of_the_last_step(made, references, last, order):
    for name, shape in product(("store", "flat.npy"), ((5, None), (7, 16))):
        shape = shape if name == "store" else (shape[0], 24, 24)
        seen = []
        for rank in range(2):
            options = {"last": last, "targets": last == "masked", "rank": rank, "world_size": 2}
            loader, opened = loader_of(made, name, shape, order, **options)
            with opened, loader:
                for step in loader:
                    seen.append(references[name].require(step))
                    if last == "masked":
                        rows = (step["targets"] == -100).all(dim=1) & (step["tokens"] == 0).all(dim=1)
                        for field, fill in zip(NAMES, (-5, 9.0, -2.5), strict=True):
                            assert (step[field][rows] == fill).all()
        total = len(np.unique(np.concatenate(seen)))
        if last in ("short", "masked", "fill"):
            whole = len(references[name].tokens) // 24 * 24 - (24 if last == "masked" else 0)
            assert total >= (len(references[name].tokens) if name == "store" else whole)


def test_every_value_of_other_ways_to_read(made, references):
    """Steps that are jumped over, a `DataLoader` of records, a `dataset()` with workers, a mixture, a pickle."""
    reference = references["store"]
    with Loader(made / "store", fields=NAMES, skip=[(0, 24, 72)], targets=True) as loader:
        assert sum(len(reference.require(step)) for step in loader) == len(reference.tokens) - 48 * SEQ_LEN
    for order in ("global", "records"):
        with Loader(made / "store", fields=NAMES, shuffle=order) as loader:
            workers = torch.utils.data.DataLoader(loader.dataset(), batch_size=None, num_workers=2)
            assert sum(len(reference.require(step)) for step in workers) == len(reference.tokens)
            with pickle.loads(pickle.dumps(loader)) as copied:
                assert sum(len(reference.require(step)) for step in copied) == len(reference.tokens)
    sources = {name: made / name for name in ("store", "packed")}
    with MixedLoader(sources, {"store": 1.0, "packed": 2.0}, fields=NAMES, targets=True, batch_size=8) as mixed:
        for step in islice(mixed, 60):
            rows = step["tokens"]
            for name, reference in references.items():
                is_own = np.array([name in sources and _is_of(reference, row) for row in rows.numpy()])
                if is_own.any():
                    reference.require({key: each[is_own] for key, each in step.items()})


def _is_of(reference, row):
    place = reference.place[row[row > 0]]
    return bool((place >= 0).all() and (np.diff(place) == 1).all())


@pytest.mark.parametrize("access", ["auto", "mmap", "pread"])
@pytest.mark.parametrize("name", ["teacher/ids", "weights/weight", "large/x"])
def test_units_are_the_same_by_every_way_to_take_them(made, name, access):
    """Whole records, from one mapping or row by row; parts of records, through the buffer of a thread; long runs."""
    folder = made / "store"
    if name == "large/x" and not (folder / "fields/large").exists():  # a record of it is read by a call of its own
        write_noise(folder, "large", [Field("x", np.dtype("i4"), (300,))])
    rng = np.random.default_rng(9)
    with open_corpus(folder, access=access) as corpus:
        values = corpus.field(name).tokens
        expected = stored(made / "store/fields" / name.partition("/")[0] / "train", name.partition("/")[2]).reshape(-1)
        unit = values.unit
        for turn in range(4):  # the first one finds no file open
            records = rng.permutation(len(expected) // unit)[:40]
            for starts, length in ((records * unit, unit), (records[records > 2] * unit - unit // 2 - 1, unit)):
                out = np.empty((len(starts), length), values.dtype)
                values.gather(starts, out)
                assert (out == np.stack([expected[start : start + length] for start in starts])).all(), turn
            start = int(records[0]) * unit // 2
            run = np.empty(min(len(expected) - start, 70 * unit + turn), values.dtype)
            values.read([(start, run)])
            assert (run == expected[start : start + len(run)]).all()


@pytest.mark.parametrize("verify", ["auto", "none"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["store", "packed", "flat.npy"])
def test_large_values_are_the_same_from_mappings_and_in_memory_that_is_filled_again(
    made, references, name, order, verify, monkeypatch
):
    """As if these few bytes were many; all steps are kept, and then none is."""
    shape = SHAPES[name][0]

    def loader_with(**options):
        return loader_of(made, name, shape, order, verify=verify, **options)

    loader, opened = loader_with(access="pread")
    with opened, loader:
        expected = list(loader)
    monkeypatch.setattr(step_memory, "LEAST_BYTES", 1)
    monkeypatch.setattr(tokens, "LARGE_RUN_BYTES", 1)
    monkeypatch.setattr(checked, "CACHED_BYTES", 1000)
    loader, opened = loader_with()
    with opened, loader:
        require_equal(list(loader), expected)
    loader, opened = loader_with()
    with opened, loader:
        for step, other in zip(loader, expected, strict=True):
            references[name].require(step)
            require_equal([step], [other])


def require_equal(steps, others):
    assert len(steps) == len(others) > 0
    for step, other in zip(steps, others, strict=True):
        assert step.keys() == other.keys()
        for name in step:
            assert step[name].numpy().tobytes() == other[name].numpy().tobytes(), name
