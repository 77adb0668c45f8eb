"""One protocol for every loader, those under the seeds' own names included; and states that say their kind."""

import contextlib
import gc
import inspect
import json
import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from contents import write_batches, write_stream
from contract import KINDS, assert_same, check_fields_of_a_state, check_loader, random_tokens, taken
from descriptors import open_files

import zb_hdf5
import zb_hdf5.loaders.mixture
from zb_hdf5.compat import tokenizing_distributed_data_loader
from zb_hdf5.loaders.state import STATE_VERSION

ALONE = {"rank": 0, "world_size": 1}
RANK = {"rank": 1, "world_size": 2}


@pytest.fixture(autouse=True)
def _short_orders(monkeypatch):
    """Compute 16 steps of a mixture ahead: 2048 would be hundreds of epochs of sources so small."""
    monkeypatch.setattr(zb_hdf5.loaders.mixture, "ORDER_STEPS", 16)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with one of everything that a loader reads."""
    folder = tmp_path_factory.mktemp("data")
    for name, seed in (("a.h5", 1), ("b.batch", 2)):
        write_batches(folder / name, random_tokens(20, 3, 8, seed=seed))
    write_stream(folder / "stream.h5", np.arange(1000), [1000], dtype="uint32")
    with zb_hdf5.HDF5ShardWriter(folder / "documents.h5", dtype="uint16") as writer:
        for length in np.random.default_rng(1).integers(0, 30, 90).tolist():
            writer.write_document(np.arange(length))
    (folder / "npy").mkdir()
    for name, size in (("0.npy", 300), ("1.npy", 401)):
        np.save(folder / "npy" / name, np.arange(size, dtype=np.uint16))
    table, parquet = pytest.importorskip("pyarrow").table, pytest.importorskip("pyarrow.parquet")
    (folder / "text").mkdir()
    for name in ("a", "b"):
        texts = [f"{name}{number} once upon a time" for number in range(40)]
        parquet.write_table(table({"text": texts}), folder / "text" / f"{name}.parquet", row_group_size=10)
    return folder


#: Name -> a new loader over the data.
LOADERS = {
    "Loader": lambda data: zb_hdf5.Loader(data / "a.h5", **ALONE),
    "Loader, records": lambda data: zb_hdf5.Loader(
        data / "a.h5", shuffle="records", batch_size=4, targets=True, **RANK
    ),
    "Loader, last step filled up": lambda data: zb_hdf5.Loader(data / "b.batch", drop_last=False, batch_size=7, **RANK),
    "Loader, prefetch": lambda data: zb_hdf5.Loader(data / "b.batch", shuffle=("block", 4), prefetch=3, **ALONE),
    "Loader of a stream": lambda data: zb_hdf5.Loader(
        data / "stream.h5", batch_size=4, seq_len=16, targets=True, **ALONE
    ),
    "Loader of a stream, short": lambda data: zb_hdf5.Loader(
        data / "stream.h5", batch_size=7, seq_len=16, last="short", dtype=torch.int32, **RANK
    ),
    "Loader of a stream, masked": lambda data: zb_hdf5.Loader(
        data / "stream.h5", batch_size=7, seq_len=16, targets=True, last="masked", shuffle="records", **RANK
    ),
    "FollowingLoader": lambda data: zb_hdf5.FollowingLoader(data / "a.h5", **ALONE),
    "MixedLoader": lambda data: mixture(data, **ALONE),
    "MixedLoader, prefetch": lambda data: mixture(data, prefetch=2, **RANK),
    "TextLoader": lambda data: zb_hdf5.TextLoader(data / "text", tokenizer="byte", batch_size=2, seq_len=9, **ALONE),
    "TextLoader, after": lambda data: zb_hdf5.TextLoader(
        data / "text", tokenizer="byte", batch_size=2, seq_len=9, targets=True, boundary_position="after", **RANK
    ),
    "DocumentLoader": lambda data: documents(data, collate="pad", batch_size=3, targets=True, **ALONE),
    "DocumentLoader, lengths": lambda data: documents(
        data, collate="pad", batch_size=3, shuffle=("lengths", 4), drop_last=False, **RANK
    ),
    "DocumentLoader, pack": lambda data: documents(
        data, collate=("pack", 16), max_tokens=64, targets=True, prefetch=2, **RANK
    ),
    "BatchNativeLoader": lambda data: zb_hdf5.BatchNativeLoader(data / "b.batch", block_size=4),
    "DatasetLoader": lambda data: zb_hdf5.DatasetLoader(2, 8, 1, 2, data / "npy"),
    "SlidingWindowDataloader": lambda data: windows(data),
    "SlidingWindowDataloader, random": lambda data: windows(data, order="random"),
    "tokenizing_distributed_data_loader": lambda data: tokenizing_distributed_data_loader(
        2, 9, "train", data_dir=data / "text", tokenizer="byte", device="cpu"
    ),
}


def mixture(data, **options):
    return zb_hdf5.MixedLoader({"a": data / "a.h5", "b": data / "b.batch"}, {"a": 2, "b": 1}, **options)


def documents(data, **options):
    return zb_hdf5.DocumentLoader(data / "documents.h5", **options)


def windows(data, **options):
    return zb_hdf5.SlidingWindowDataloader(zb_hdf5.open_corpus(data / "stream.h5"), 16, 4, **options)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.thin
def test_every_loader_keeps_the_protocol(name, data):
    check_loader(lambda: LOADERS[name](data), steps=5)


#: Arguments that are refused after the source is open.
REFUSED = {
    "Loader": (
        lambda source, **options: zb_hdf5.Loader(source, access="pread", **options),
        "a.h5",
        [{"rank": 3, "world_size": 2}, {"seq_len": 5}, {"documents": True}, {"mask_documents": [0]}, {"skip": [0]}],
    ),
    "DocumentLoader": (
        lambda source, **options: zb_hdf5.DocumentLoader(source, collate="pad", **{"batch_size": 3, **options}),
        "documents.h5",
        [{"rank": 3, "world_size": 2}, {"fields": ["no"]}, {"batch_size": 1000}, {"mask_documents": [1000]}],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_is_refused_leaves_no_file_open(name, data):
    make, file, refused = REFUSED[name]
    gc.collect()  # what earlier tests have left in rings
    before = open_files()
    for options in refused:
        with pytest.raises(zb_hdf5.ZbError) as error:
            make(data / file, **options)
        assert open_files() == before, options
        del error  # whose traceback has held the loader
    shape = {} if name == "Loader" else {"batch_size": 1, "seq_len": 1}
    with zb_hdf5.open_reader(data / file, **shape) as reader:
        for options in refused:
            with pytest.raises(zb_hdf5.ZbError):
                make(reader, **options)
        assert reader.read_batch(0) is not None


#: One loader of each kind of state; the data set of a loader and its sampler have states of their own.
STATEFUL = {"loader": "Loader", "mixture": "MixedLoader", "text": "TextLoader", "documents": "DocumentLoader"}


def test_every_kind_of_state_is_refused_by_every_other_kind_and_one_without_a_kind_by_all(data):
    loader = zb_hdf5.Loader(data / "a.h5", **ALONE)
    others = {"batches": loader.dataset(), "steps": loader.dataset().sampler}
    made = {**{kind: LOADERS[name](data) for kind, name in STATEFUL.items()}, **others}
    assert made.keys() == {*KINDS}
    for kind, giver in made.items():
        state = json.loads(json.dumps(giver.state_dict()))
        assert (state["kind"], state["version"]) == (kind, STATE_VERSION)
        check_fields_of_a_state(giver)
        for other, taker in made.items():
            if other != kind:
                with pytest.raises(zb_hdf5.StateError, match=f"expected kind '{other}', found '{kind}'"):
                    taker.load_state_dict(state)
        without_kind = {name: value for name, value in state.items() if name != "kind"}
        with pytest.raises(zb_hdf5.StateError, match=r"state: expected kind .*, found None"):
            giver.load_state_dict(without_kind)
    for each in made.values():
        getattr(each, "close", lambda: None)()


@pytest.mark.parametrize("argument", ["prefetch", "split", "rank", "world_size", "targets", "device", "batch_size"])
def test_an_argument_has_one_default(argument):
    makers = (zb_hdf5.Loader, zb_hdf5.FollowingLoader, zb_hdf5.MixedLoader, zb_hdf5.TextLoader, zb_hdf5.DocumentLoader)
    found = {make: inspect.signature(make).parameters.get(argument) for make in makers}
    defaults = {make: each.default for make, each in found.items() if each is not None}
    given = {default for default in defaults.values() if default is not inspect.Parameter.empty}
    assert len(given) == 1, defaults


@pytest.mark.parametrize(
    "name", ["Loader", "MixedLoader", "SlidingWindowDataloader", "DatasetLoader", "DocumentLoader"]
)
def test_next_and_an_iteration_share_one_position(name, data):
    """Whoever gives the next batch, none is given twice, and the state counts what was given."""
    with LOADERS[name](data) as loader, LOADERS[name](data) as other:
        next(loader)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = loader.state_dict()
        other.load_state_dict(state)
        ways = (next, lambda loader: loader.get_batch(), lambda _: next(iterator), next)
        for way in ways:
            assert_same(taken([way(loader)], 1), taken([next(other)], 1))
            assert loader.state_dict() == other.state_dict()
        assert isinstance(loader, zb_hdf5.TokenLoader)


def test_next_goes_on_after_the_epoch_and_a_following_loader_ends(data):
    with zb_hdf5.Loader(data / "a.h5", **ALONE) as loader:
        for _ in range(len(loader) + 1):
            next(loader)
        assert loader.epoch == 1
    with zb_hdf5.FollowingLoader(data / "a.h5", **ALONE) as loader:
        assert sum(1 for _ in iter(lambda: next(loader, None), None)) == 20
        with pytest.raises(StopIteration):
            next(loader)
        with pytest.raises(zb_hdf5.ArgumentError, match="makes one epoch, 0, found 1"):
            loader.get_batch()


def test_a_mixture_and_a_text_loader_are_forced_to_take_the_place_in_other_data(data):
    state = mixture(data, **ALONE).state_dict() | {"position": 7}
    with mixture(data, seed=1, **ALONE) as loader:
        with pytest.raises(zb_hdf5.StateError, match="seed"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, force=True)
        assert loader.state_dict()["position"] == 7
    with LOADERS["TextLoader"](data) as loader:
        next(loader)
        state = loader.state_dict() | {"tokenizer": "another"}
        loader.load_state_dict(state, force=True)
        for wrong, field, force in ((state, "tokenizer", False), (state | {"row_group": 99}, "row_group", True)):
            with pytest.raises(zb_hdf5.StateError, match=field):
                loader.load_state_dict(wrong, force=force)


def test_the_boundary_token_stands_before_or_after_each_document(data):
    options = {"tokenizer": "byte", "batch_size": 1, "seq_len": 46, **ALONE}
    text = list(b"a0 once upon a time"), list(b"a1 once upon a time")
    with zb_hdf5.TextLoader(data / "text", **options) as loader:
        assert next(loader)[0, :40].tolist() == [256, *text[0], 256, *text[1]]
    with zb_hdf5.TextLoader(data / "text", boundary_position="after", **options) as loader:
        assert next(loader)[0, :40].tolist() == [*text[0], 256, *text[1], 256]
        state = loader.state_dict()
    with (
        zb_hdf5.TextLoader(data / "text", **options) as loader,
        pytest.raises(zb_hdf5.StateError, match="boundary_position"),
    ):
        loader.load_state_dict(state)
    with pytest.raises(zb_hdf5.ArgumentError, match="boundary_position"):
        zb_hdf5.TextLoader(data / "text", boundary_position="between", **options)


#: The module of a loader that looks for a device.
DEVICES = {
    "Loader": "loader",
    "Loader, records": "loader",
    "Loader of a stream, masked": "loader",
    "DocumentLoader, pack": "document_loader",
    "TextLoader, after": "text_loader",
}


@pytest.mark.parametrize(("name", "module"), DEVICES.items())
def test_batches_on_their_way_to_a_device(name, module, data, monkeypatch):
    """Without a device: threads pin, and the consumer moves."""
    threads = set()

    def pinned(tensor):
        threads.add(threading.current_thread().name[:3])
        return tensor + 1

    def moved(tensor, device):
        assert (threading.current_thread(), device) == (threading.main_thread(), torch.device("cuda"))
        return tensor - 1

    with LOADERS[name](data) as loader:
        expected = taken(loader, 5)
    monkeypatch.setattr(f"zb_hdf5.loaders.{module}.cuda_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("zb_hdf5.loaders.ahead.pinned", pinned)
    monkeypatch.setattr("zb_hdf5.loaders.ahead.moved", moved)
    with LOADERS[name](data) as loader:
        assert_same(taken(loader, 5), expected)
    assert threads == {"zb-"}


class Forgetful(zb_hdf5.Loader):
    """A loader that is one step behind with its state."""

    def state_dict(self):
        state = super().state_dict()
        return state | {"position": max(0, state["position"] - 3)}


def test_the_check_sees_a_loader_that_does_not_keep_the_protocol(data):
    with pytest.raises(AssertionError):
        check_loader(lambda: Forgetful(data / "a.h5", **ALONE))


@pytest.mark.parametrize(
    "name", ["Loader", "Loader, records", "Loader, prefetch", "FollowingLoader", "MixedLoader", "DocumentLoader"]
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_after_an_error_next_goes_on_at_the_same_batch(name, error, data, monkeypatch):
    """A read that fails, or Ctrl+C, costs no batch: not the one that was asked for, and not the rest of the epoch."""
    with LOADERS[name](data) as loader:
        expected = taken((next(loader) for _ in range(12)), 12)
    with LOADERS[name](data) as loader:
        remaining = iter(expected)

        def require_next():
            assert_same(taken([next(loader)], 1), [next(remaining)])

        for _ in range(2):
            with monkeypatch.context() as broken:
                called = {
                    "Loader": ["whole_batches.crc32_of"],
                    "DocumentLoader": ["step_field.from_numpy"],
                }  # in each step
                for function in called.get(name, ["mapped_records.from_numpy", "whole_batches.from_numpy"]):
                    broken.setattr(f"zb_hdf5.loaders.{function}", Mock(side_effect=error))
                for _ in range(4):  # some may have been read before
                    before = loader.state_dict()
                    with contextlib.suppress(error):
                        require_next()
                        continue
                    break
                else:
                    pytest.fail("expected an error")
            assert loader.state_dict() == before
            require_next()


def read_in_thread(loader, way, ending):
    """Read a loader in a thread until it ends; return the thread, an event of its first batch, and its errors."""
    begun, errors = threading.Event(), []

    def read():
        try:
            while not ending.is_set():
                for _ in loader if way == "loop" else iter(loader.get_batch, None):
                    begun.set()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    return thread, errors


THREADED = ["Loader", "Loader, records", "Loader, prefetch", "Loader of a stream", "MixedLoader", "DocumentLoader"]


@pytest.mark.filterwarnings("ignore:.*read to its end")
@pytest.mark.parametrize("way", ["loop", "get_batch"])
@pytest.mark.parametrize("name", THREADED)
def test_a_loader_that_another_thread_closes_ends_or_names_the_reason(name, way, data):
    gc.collect()  # what earlier tests have left in rings
    before = open_files()
    for pause in range(8):
        loader, ending = LOADERS[name](data), threading.Event()
        thread, errors = read_in_thread(loader, way, ending)
        time.sleep(pause / 2000)
        ending.set()
        loader.close()
        thread.join(60)
        assert not thread.is_alive()
        assert all(isinstance(error, zb_hdf5.ZbError) for error in errors), errors
        assert way == "loop" or errors
        errors.clear()  # their tracebacks hold the files that were read
        loader.close()
    gc.collect()  # of a chain of errors, the frames that had the mapping of a file hold each other
    assert open_files() == before


class LateReading:
    """A reading whose end waits until the reading thread has looked at it."""

    def __init__(self, loader):
        self.looked, self.closing = threading.Event(), threading.Event()
        self.steps = self._steps(loader)

    def _steps(self, loader):
        try:
            yield from loader._read_from(loader._position)
        finally:
            self.closing.set()
            assert self.looked.wait(60)

    def __iter__(self):
        return self


class SlowReading(LateReading):
    """A reading that another thread begins to close between a step and the look at it, and closes after that."""

    def __init__(self, loader):
        super().__init__(loader)
        self.stepped = threading.Event()

    def __next__(self):
        step = next(self.steps)
        self.stepped.set()
        assert self.closing.wait(60)
        return step

    def close(self):
        try:
            self.steps.close()
        finally:
            self.looked.set()


@pytest.mark.parametrize("way", ["loop", "get_batch"])
def test_a_loader_may_be_closed_between_a_step_and_the_look_at_it(way, data, monkeypatch):
    loader = LOADERS["Loader, prefetch"](data)
    slow, errors = SlowReading(loader), []

    def begin():
        loader._reading = slow
        return slow

    def read():
        try:
            next(iter(loader)) if way == "loop" else loader.get_batch()
        except (Exception, StopIteration) as error:
            errors.append(error)

    monkeypatch.setattr(loader, "_begin", begin)
    thread = threading.Thread(target=read)
    thread.start()
    assert slow.stepped.wait(60)
    loader.close()
    thread.join(60)
    assert [type(error) for error in errors] == [StopIteration if way == "loop" else zb_hdf5.ClosedError]


class EndedReading(LateReading):
    """A reading whose second step is asked for while another thread ends it."""

    def __init__(self, loader, choose_epoch):
        super().__init__(loader)
        self.other = threading.Thread(target=choose_epoch)
        self.calls = 0

    def __next__(self):
        self.calls += 1
        if self.calls == 2:
            self.other.start()
            assert self.closing.wait(60)
        return next(self.steps)

    def close(self):
        self.steps.close()


@pytest.mark.parametrize("way", ["loop", "get_batch"])
def test_a_step_asked_for_while_another_thread_chooses_an_epoch_is_of_that_epoch(way, data, monkeypatch):
    loader = LOADERS["Loader, prefetch"](data)
    with LOADERS["Loader, prefetch"](data) as other:
        other.set_epoch(5)
        expected = taken(other, 1)
    ended = EndedReading(loader, lambda: loader.set_epoch(5))
    begin = loader._begin

    def begin_once():
        monkeypatch.setattr(loader, "_begin", begin)
        loader._reading = ended
        return ended

    monkeypatch.setattr(loader, "_begin", begin_once)
    steps = iter(loader) if way == "loop" else iter(loader.get_batch, None)
    next(steps)
    found = taken(steps, 1)
    ended.looked.set()
    ended.other.join(60)
    assert_same(found, expected)
    loader.close()


@pytest.mark.filterwarnings("ignore:.*read to its end")
@pytest.mark.parametrize("way", ["loop", "get_batch"])
@pytest.mark.parametrize("name", [name for name in THREADED if name != "MixedLoader"])
def test_another_thread_may_choose_the_epoch(name, way, data):
    loader, ending = LOADERS[name](data), threading.Event()
    thread, errors = read_in_thread(loader, way, ending)
    for epoch in range(100):
        loader.set_epoch(2 * epoch % 7)
    ending.set()
    if way == "get_batch":
        loader.close()
    thread.join(60)
    assert not thread.is_alive()
    assert all(isinstance(error, zb_hdf5.ZbError) for error in errors), errors
    assert way == "get_batch" or not errors
    loader.close()
