"""Conversions of folders whose names tell splits: these are kept, whatever the source and the target are."""

import json

import numpy as np
import pytest
from commandline import one_error, run_zb
from reading import reading
from split_corpus import FILES, FORMATS, ids_of, write_npy

from zb_hdf5 import ArgumentError, ConvertError, Loader, ShardIndex, convert, open_corpus, open_reader, verify_store
from zb_hdf5.converters.split_order import SplitOrder
from zb_hdf5.loaders.order import write_order

SPLITS = ("train", "val", "test")


@pytest.fixture(params=FORMATS)
def corpus(request, tmp_path):
    write, options = FORMATS[request.param]
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, number in FILES.items():
        write(folder / name, ids_of(number))
    return folder, options


def expected(split):
    return sorted(token for name in FILES if name.split("_")[1] == split for token in ids_of(FILES[name]).tolist())


def tokens_of(store, split):
    """Return the sorted tokens of a split of a result: a stream or batches, of ours or of another trainer."""
    with open_corpus(store, split=split) as stream:
        return sorted(stream.tokens[0 : stream.num_tokens].tolist())


def rows_of(store, split):
    with open_reader(store, split=split) as reader:
        found = np.concatenate([reader.read_batch(k) for k in range(reader.num_batches)]).reshape(-1, reader.seq_len)
    return found


@pytest.mark.parametrize("shuffle", [True, False])
def test_records_of_each_split_have_batches_of_their_own(corpus, tmp_path, shuffle):
    folder, options = corpus
    if any(folder.glob("*.npy")) and options:  # of OLMo, without documents
        options = {**options, "source_format": "bin"}
    convert(folder, "hdf5", tmp_path / "out", batch_size=2, seq_len=5, shuffle=shuffle, **options)
    assert list(dict.fromkeys(ShardIndex.load(tmp_path / "out").table.values["split"])) == ["train", "test", "val"]
    for split in SPLITS:
        rows = rows_of(tmp_path / "out", split)
        assert sorted(rows.reshape(-1).tolist()) == expected(split)
        if split != "train":
            assert shuffle == bool((np.diff(rows[:, 0].astype(int)) != 5).any())
    assert not any(report.problem for report in verify_store(tmp_path / "out"))


@pytest.mark.parametrize("target", ["stream", "bin", "megatron", "parquet", "mds", "hf"])
@pytest.mark.thin
def test_other_targets_have_a_split_for_each_too_and_come_back(corpus, tmp_path, target):
    folder, options = corpus
    if any(folder.glob("*.h5")):
        pytest.skip("HDF5 files of other programs become batches")
    has_documents = any(folder.glob("*.idx")) or any(folder.glob("*.ds"))
    if target == "bin":
        options = {**options, "tokens_only": True}
    elif not has_documents:
        options = {**options, "boundary_token_id": 1}
    out = tmp_path / "out"
    convert(folder, target, out, **options)
    back = out
    if target == "bin":
        back = tmp_path / "back"
        convert(out, "stream", back, source_dtype="uint16", boundary_token_id=1)
    elif target != "stream":
        back = tmp_path / "back"
        convert(out, "stream", back)
    assert [tokens_of(back, split) for split in SPLITS] == [expected(split) for split in SPLITS]
    if target in ("bin", "megatron"):  # in place, too
        names = {"source_dtype": "uint16"} if target == "bin" else {}
        with open_corpus(out, split="dev", **reading(names)) as stream:
            assert sorted(stream.tokens[0 : stream.num_tokens].tolist()) == expected("val")


@pytest.mark.parametrize("source", ["jsonl", "text", "parquet"])
@pytest.mark.thin
def test_text_keeps_its_splits(tmp_path, source):
    folder = tmp_path / "corpus"
    for split, text in (("train", "abc"), ("validation", "xyz"), ("test", "123")):
        place = folder / split if source == "text" else folder
        place.mkdir(exist_ok=True, parents=True)
        if source == "jsonl":
            (place / f"{split}.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
        elif source == "text":
            (place / "0.txt").write_text(text, encoding="utf-8")
        else:
            arrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(arrow.table({"text": [text]}), place / f"{split}-00000-of-00001.parquet")
    convert(folder, "stream", tmp_path / "out", tokenizer="byte", no_boundary=True)
    texts = {split: bytes(tokens_of(tmp_path / "out", split)) for split in ("train", "val", "test")}
    assert texts == {"train": b"abc", "val": b"xyz", "test": b"123"}
    convert(folder, "hdf5", tmp_path / "rows", tokenizer="byte", no_boundary=True, seq_len=3, batch_size=1)
    assert bytes(rows_of(tmp_path / "rows", "dev").reshape(-1).astype("u1")) == b"xyz"
    convert(folder, "stream", tmp_path / "one", tokenizer="byte", no_boundary=True, split="all")
    assert len(tokens_of(tmp_path / "one", "train")) == 9


def test_what_our_own_export_writes_comes_back_with_its_splits(tmp_path):
    np.save(tmp_path / "ids.npy", np.tile(np.append(np.arange(2, 9, dtype=np.uint16), 1), 50))
    convert(tmp_path / "ids.npy", "stream", tmp_path / "st", boundary_token_id=1)
    for target in ("megatron", "datatrove", "hf", "parquet", "mds"):
        convert(tmp_path / "st", target, tmp_path / target, val_fraction=0.2)
        convert(tmp_path / target, "stream", tmp_path / f"{target}-back")
        index = ShardIndex.load(tmp_path / f"{target}-back")
        assert list(dict.fromkeys(index.table.values["split"])) == ["train", "val"]
        assert index.token_count == 400


def test_a_folder_of_one_split_becomes_a_store_for_training(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("val_0", "val_1"):
        write_npy(folder / name, ids_of(2))
    convert(folder, "hdf5", tmp_path / "out", batch_size=2, seq_len=5)
    with Loader(tmp_path / "out") as loader:
        assert loader.batches.num_batches == 8


def test_paths_that_are_named_tell_splits_by_their_own_names(tmp_path):
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        write_npy(tmp_path / name / "0", ids_of(1 if name == "train" else 2))
    paths = [tmp_path / "train", tmp_path / "val"]
    convert(paths, "hdf5", tmp_path / "out", batch_size=2, seq_len=5)
    assert sorted(rows_of(tmp_path / "out", "val").reshape(-1).tolist()) == ids_of(2).tolist()
    convert(paths, "hdf5", tmp_path / "one", batch_size=2, seq_len=5, split="all")
    with Loader(tmp_path / "one") as loader:
        assert loader.batches.num_batches == 8
    convert(paths, "stream", tmp_path / "st", boundary_token_id=1)
    assert tokens_of(tmp_path / "st", "val") == ids_of(2).tolist()


def test_splits_that_a_target_has_not_are_refused_with_the_line_to_type(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, number in FILES.items():
        write_npy(folder / name, ids_of(number))
    shape = ["--batch-size", 2, "--seq-len", 5]
    for target in ("out.npy", "out.h5"):
        message = one_error(run_zb("convert", folder, tmp_path / target, *shape), 2)
        assert "has the splits train and test and val, and" in message
        assert message.endswith("name the files of one, or pass --split all")
        run_zb("convert", folder, tmp_path / target, *shape, "--split", "all", code=0)
    held_out = run_zb("convert", folder, tmp_path / "out", *shape, "--val-fraction", 0.1)
    assert "leave out --val-fraction, or pass --split all" in one_error(held_out, 2)
    with pytest.raises(ConvertError, match="do not fill one batch"):
        convert(folder, "hdf5", tmp_path / "out", batch_size=10, seq_len=5)
    (folder / "fineweb_train_val.npy").write_bytes((folder / "fineweb_val_000000.npy").read_bytes())
    with pytest.raises(ArgumentError, match=r"fineweb_train_val.npy: expected a name of one split"):
        convert(folder, "hdf5", tmp_path / "out", batch_size=2, seq_len=5)


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("method", ["direct", "two-pass"])
def test_either_shuffle_gives_the_same_rows_and_no_split_another_ones(tmp_path, method, remainder):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, start, count in (("train", 0, 103), ("val", 1000, 57), ("test", 2000, 21)):
        np.save(folder / f"{name}.npy", np.arange(start, start + count * 4, dtype=np.uint16).reshape(-1, 4))
    options = {"batch_size": 10, "shards": 2, "remainder": remainder, "seed": 5, "pad_id": 65535}
    convert(folder, "hdf5", tmp_path / "out", shuffle_method=method, **options)
    for name, start, count in (("train", 0, 103), ("val", 1000, 57), ("test", 2000, 21)):
        rows = rows_of(tmp_path / "out", name)
        real = rows[rows[:, 0] != 65535]
        assert len(rows) == (count // 10 if remainder == "drop" else -(-count // 10)) * 10
        assert len(real) == (len(rows) if remainder == "drop" else count)
        assert (np.diff(real.astype(int)) == 1).all()
        order = write_order(count, 5)
        assert ((real[:, 0] - start) // 4).tolist() == order.indices(np.arange(len(real))).tolist()
    splits = ShardIndex.load(tmp_path / "out").table.values["split"]
    assert splits[:2] == ["train", "train"]
    assert set(splits[2:]) == {"val", "test"}


def test_the_order_of_several_splits_is_a_permutation_with_its_inverse():
    order = SplitOrder([write_order(n, 7) for n in (103, 1, 57)], [100, 0, 50])
    positions = np.arange(order.n)
    found = order.indices(positions)
    assert sorted(found.tolist()) == positions.tolist()
    assert order.positions(found).tolist() == positions.tolist()
    assert (found[:100] < 103).all()
    assert (found[100:150] >= 104).all()


def test_no_record_is_left_over_where_each_split_fills_its_batches(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, count in (("train", 45), ("val", 25)):  # together they would have one record more
        np.save(folder / f"{name}.npy", np.arange(count, dtype=np.uint16))
    report = convert(folder, "hdf5", tmp_path / "out", batch_size=2, seq_len=10, remainder="error", shuffle=False)
    assert report.counts.dropped == {"file tail": 10}
    assert rows_of(tmp_path / "out", "train").reshape(-1).tolist() == [*range(40)]
    assert rows_of(tmp_path / "out", "val").reshape(-1).tolist() == [*range(20)]
    np.save(folder / "val.npy", np.arange(35, dtype=np.uint16))
    with pytest.raises(ConvertError, match="1 are left over") as caught:
        convert(folder, "hdf5", tmp_path / "more", batch_size=2, seq_len=10, remainder="error")
    assert caught.value.__notes__ == ["the split val, by the names of its files, is a part of its own"]


@pytest.mark.parametrize("split", [None, "all"])
def test_a_store_of_several_splits_is_told_that_uint16_would_be_smaller_too(tmp_path, split):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("train", "val"):
        np.save(folder / f"{name}.npy", np.arange(40, dtype=np.uint32))
    report = convert(folder, "hdf5", tmp_path / "out", batch_size=2, seq_len=10, **({"split": split} if split else {}))
    assert report.lacks_vocab_size
