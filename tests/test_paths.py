"""Every public function that takes a path takes a `str` and any `os.PathLike`, not only a `pathlib.Path`."""

import inspect
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from contents import write_stream

import zb_hdf5
from zb_hdf5.commands.downloads import fetch_shards
from zb_hdf5.compat import list_parquet_files, parquets_iter_batched, tokenizing_distributed_data_loader
from zb_hdf5.files.paths import any_path
from zb_hdf5.store.live import LiveStoreWriter
from zb_hdf5.store.rebuild import index_files
from zb_hdf5.store.repair import repair_file, repair_store
from zb_hdf5.text.text_corpus import open_documents

META = zb_hdf5.StoreMeta(4, 512, np.dtype("<u4"))
ALONE = {"rank": 0, "world_size": 1}
TEXT = {"tokenizer": "byte", "batch_size": 2, "seq_len": 64}
ROWS = np.arange(8 * 512, dtype=np.uint32).reshape(8, 512)
BATCHES = ROWS.reshape(2, 4, 512)


class Place:
    """A path that is neither a text nor a `pathlib.Path`."""

    def __init__(self, text):
        self._text = text

    def __fspath__(self):
        return self._text


@pytest.fixture(scope="module")
def made(tmp_path_factory, write_file, write_store):
    """Return a folder that holds one of each."""
    folder = tmp_path_factory.mktemp("made")
    write_file(folder / "x.h5", BATCHES)
    write_file(folder / "x.batch", BATCHES)
    write_store(folder / "store", BATCHES, (1,))
    write_stream(folder / "stream.h5", np.arange(5000), [5000])
    (folder / "streams").mkdir()
    shutil.copy(folder / "stream.h5", folder / "streams")
    index_files([folder / "streams" / "stream.h5"]).save(folder / "streams")
    (folder / "npy").mkdir()
    for name in ("a", "b"):
        np.save(folder / "npy" / f"{name}.npy", ROWS.reshape(-1))
    zb_hdf5.write_digests(folder / "npy", folder / "npy.json")
    documents = (json.dumps({"text": f"document {k} " * 30}) + "\n" for k in range(40))
    (folder / "text.jsonl").write_text("".join(documents))
    table = pytest.importorskip("pyarrow").table
    parquet = pytest.importorskip("pyarrow.parquet")
    (folder / "parquet").mkdir()
    for name in ("a", "b"):
        parquet.write_table(table({"text": ["once upon a time"] * 100}), folder / "parquet" / f"{name}.parquet")
    return folder


def finish(writer, batches=BATCHES):
    with writer:
        writer.write(batches)


def values_of(path):
    """Return a store with the fields of a set, whose folder is a path of the same kind."""
    zb_hdf5.open_field_set(path, "weights", {"weight": "f4"}).close()
    place = type(path)(os.path.join(os.fspath(path), "fields", "weights", "train"))
    return zb_hdf5.open_corpus(path).with_fields("weights", path=place, allow_missing={"weight": 0})


#: What a user calls -> the path that it reads, and the call; what it returns is closed.
READERS = {
    "open_reader": ("x.h5", zb_hdf5.open_reader),
    "Loader": ("store", lambda path: zb_hdf5.Loader(path, **ALONE)),
    "Loader of a stream": ("stream.h5", lambda path: zb_hdf5.Loader(path, batch_size=2, seq_len=64, **ALONE)),
    "DocumentLoader": (
        "stream.h5",
        lambda path: zb_hdf5.DocumentLoader(path, collate="pack", max_tokens=10**6, **ALONE),
    ),
    "made_up_corpus": ("store", lambda path: zb_hdf5.made_up_corpus(like=path)),
    "open_field_set": ("store", lambda path: zb_hdf5.open_field_set(path, "weights", {"weight": "f4"})),
    "plan_field_set": ("store", lambda path: zb_hdf5.plan_field_set(path, "others", {"weight": "f4"})),
    "Corpus.with_fields": ("store", values_of),
    "StoreRecords": ("store", zb_hdf5.StoreRecords),
    "MixedLoader": ("store", lambda path: zb_hdf5.MixedLoader({"a": path, "b": path}, {"a": 1, "b": 1}, **ALONE)),
    "FollowingLoader": ("store", lambda path: zb_hdf5.FollowingLoader(path, **ALONE)),
    "BatchFileReader": ("x.batch", zb_hdf5.BatchFileReader),
    "BatchNativeLoader": ("x.batch", zb_hdf5.BatchNativeLoader),
    "open_reader of a store": ("store", zb_hdf5.open_reader),
    "open_reader of a stream": ("stream.h5", lambda path: zb_hdf5.open_reader(path, batch_size=2, seq_len=64)),
    "open_corpus": ("stream.h5", zb_hdf5.open_corpus),
    "MmapTokenStore": ("stream.h5", zb_hdf5.MmapTokenStore),
    "DatasetLoader": ("npy", lambda path: zb_hdf5.DatasetLoader(2, 64, 0, 1, path)),
    "TextLoader": ("parquet", lambda path: zb_hdf5.TextLoader(path, **TEXT, **ALONE)),
    "ReadAs": (
        "npy.json",
        lambda path: zb_hdf5.open_corpus(os.fspath(path).removesuffix(".json"), read_as=zb_hdf5.ReadAs(digests=path)),
    ),
    "verify_store": ("x.h5", zb_hdf5.verify_store),
    "verify_store of a store": ("store", zb_hdf5.verify_store),
    "verify_store of a stream": ("streams", zb_hdf5.verify_store),
    "ShardIndex.load": ("store", zb_hdf5.ShardIndex.load),
    "ShardIndex.save": ("store", lambda path: zb_hdf5.ShardIndex.load(path).save(path)),
    "ShardIndex.from_json": (
        "store/shards.json",
        lambda path: zb_hdf5.ShardIndex.from_json(Path(path).read_text(), path),
    ),
    "ShardIndex.of_split": ("store", lambda path: zb_hdf5.ShardIndex.load(path).of_split(None, path)),
    "ShardIndex.files": ("store", lambda path: [*zb_hdf5.ShardIndex.load(path).files(path)]),
    "ShardEntry.file": ("store", lambda path: zb_hdf5.ShardIndex.load(path).shards[0].file(path)),
    "rebuild_index": ("store", lambda path: zb_hdf5.rebuild_index(path, force=True)),
    "repair": ("store", zb_hdf5.repair),
    "convert": (
        "npy",
        lambda path: zb_hdf5.convert(path, "hdf5", f"{os.fspath(path)}.h5", batch_size=4, force=True),
    ),
    "train_tokenizer": (
        "text.jsonl",
        lambda path: zb_hdf5.train_tokenizer(path, f"{os.fspath(path)}.json", 270, overwrite=True),
    ),
    "list_parquet_files": ("parquet", list_parquet_files),
    "parquets_iter_batched": ("parquet", lambda path: list(parquets_iter_batched("val", data_dir=path))),
    "tokenizing_distributed_data_loader": (
        "parquet",
        lambda path: tokenizing_distributed_data_loader(2, 64, "val", data_dir=path, tokenizer="byte", device="cpu"),
    ),
}
#: What a user calls -> the path that it makes, and the call, which also gets the folder `made`.
WRITERS = {
    "open_writer": ("out.h5", lambda path, made: finish(zb_hdf5.open_writer(path, batch_size=4, seq_len=512))),
    "HDF5ShardWriter": ("out.h5", lambda path, made: zb_hdf5.HDF5ShardWriter(path).finish()),
    "write_batch_file": ("out.batch", lambda path, made: zb_hdf5.write_batch_file(path, ROWS, 4, 512, 1)),
    "write_batch_dataset": (
        "out.batch",
        lambda path, made: zb_hdf5.write_batch_dataset(path, iter(ROWS), 8, 4, 512, 1),
    ),
    "convert to streams": (
        "out",
        lambda path, made: zb_hdf5.convert([made / "npy"], "stream", path, boundary_token_id=1),
    ),
    "fetch_shards": ("out", lambda path, made: fetch_shards("http://127.0.0.1:9/{:05d}", 0, folder=path)),
    "convert": ("out", lambda path, made: zb_hdf5.convert(made / "store", "batch", path)),
    "ShardedTokenizationPipeline.run": (
        "out",
        lambda path, made: zb_hdf5.ShardedTokenizationPipeline(["a text"]).run(path),
    ),
    "a cache": ("cache", lambda path, made: zb_hdf5.open_reader(made / "store", cache=path).close()),
    "Cache": ("cache", lambda path, made: zb_hdf5.open_reader(made / "store", cache=zb_hdf5.Cache(path)).close()),
    "Cache.of": ("cache", lambda path, made: zb_hdf5.open_reader(made / "store", cache=zb_hdf5.Cache.of(path)).close()),
    "write_digests": ("digests.json", lambda path, made: zb_hdf5.write_digests(made / "npy", path)),
    "train_tokenizer": ("tok.json", lambda path, made: train(path, made)),
}


def train(path, made):
    pytest.importorskip("tokenizers")
    zb_hdf5.train_tokenizer(open_documents([made / "text.jsonl"]), path, 270)


@pytest.mark.parametrize("kind", [str, Place])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.thin
def test_readers_take_any_path(name, kind, made):
    path, read = READERS[name]
    getattr(read(kind(str(made / path))), "close", lambda: None)()


@pytest.mark.parametrize("kind", [str, Place])
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.thin
def test_writers_take_any_path(name, kind, made, tmp_path):
    path, write = WRITERS[name]
    write(kind(str(tmp_path / path)), made)
    assert (tmp_path / path).exists()


#: What is done on this machine only.
LOCAL = {
    "rebuild_index": zb_hdf5.rebuild_index,
    "repair": zb_hdf5.repair,
    "repair_file": repair_file,
    "repair_store": repair_store,
    "the output of a repair": lambda path: repair_file(__file__, output=path),
    "LiveStoreWriter": lambda path: LiveStoreWriter(path, META, shard_batches=1),
    "fetch_shards": lambda path: fetch_shards("http://127.0.0.1:9/{:05d}", 0, folder=path),
    "ShardIndex.save": zb_hdf5.ShardIndex(META, ()).save,
    "index_files": lambda path: index_files([path]),
}


@pytest.mark.parametrize("name", LOCAL)
def test_a_url_is_refused_by_its_name_where_a_folder_of_this_machine_is_meant(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(zb_hdf5.ArgumentError, match=r"^s3://bucket/x\.h5: is a URL"):
        LOCAL[name]("s3://bucket/x.h5")
    assert not list(tmp_path.iterdir())


def path_annotations(thing):
    """Return the annotations of the parameters that take a path, as texts; an alias of its module by its value."""
    module = sys.modules.get(thing.__module__)
    texts = [str(parameter.annotation) for parameter in inspect.signature(thing).parameters.values()]
    texts = [str(getattr(module, text, text)) for text in texts]
    return [text for text in texts if "Path" in text]


def public_functions():
    """Return every public name, and every public method of a public class."""
    for name in zb_hdf5.__all__:
        thing = getattr(zb_hdf5, name)
        yield name, thing
        if inspect.isclass(thing):
            yield from ((f"{name}.{key}", getattr(thing, key)) for key in vars(thing) if not key.startswith("_"))


def test_no_public_function_is_left_out():
    results = {"ShardInfo", "StreamInfo", "FieldSet", "FieldSetPlan", "FieldSetPlan.of", "Corpus.opened_by"}
    bases = {"Batches", "BatchWriter", "Corpus"}  # whose backends are all here
    found = {name: thing for name, thing in public_functions() if callable(thing) and name not in results | bases}
    taking = {
        name
        for name, thing in found.items()
        if not (inspect.isclass(thing) and issubclass(thing, zb_hdf5.ZbError))  # they say a path, and open none
        and _has_signature(thing)
        and path_annotations(thing)
    }
    assert len(taking) > 20
    assert taking <= {*READERS, *WRITERS}
    for name in taking:
        assert all("os.PathLike[str]" in text for text in path_annotations(found[name])), name


def _has_signature(thing):
    try:
        inspect.signature(thing)
    except (TypeError, ValueError):  # of some built-in bases
        return False
    return True


@pytest.mark.parametrize("url", ["S3://bucket/Store", "s3://bucket/Store"])
def test_the_scheme_of_a_url_may_be_in_capitals(url):
    assert str(any_path(url)) == "s3://bucket/Store"
