"""Folders of files in no store whose names tell splits: read in place, by all loaders, readers and commands."""

import json

import numpy as np
import pytest
from commandline import run_zb
from reading import reading
from split_corpus import FILES, FIRST_ID, FORMATS, SHAPE, TOKENS, ids_of, shape_of, write_npy

from zb_hdf5 import (
    ArgumentError,
    DocumentLoader,
    Loader,
    convert,
    open_corpus,
    open_reader,
    verify_store,
    write_digests,
)


@pytest.fixture(params=FORMATS)
def corpus(request, tmp_path):
    """A folder with a train, a val and a test split, and the options that open it."""
    write, options = FORMATS[request.param]
    folder = tmp_path / "train-and-test"  # which tells nothing
    folder.mkdir()
    for name, number in FILES.items():
        write(folder / name, ids_of(number))
    return folder, options


def ids_read(loader):
    with loader:
        return np.sort(np.concatenate([batch.numpy().reshape(-1) for batch in loader]))


def expected(*splits):
    return np.sort(np.concatenate([ids_of(FILES[name]) for name in FILES if name.split("_")[1] in splits]))


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_loader_reads_the_split_that_is_asked_for(corpus, split):
    folder, names = corpus
    options = reading(names)
    loader = Loader(folder, split=split, **shape_of(folder), **options)
    assert np.array_equal(ids_read(loader), expected(split))


def test_a_loader_reads_the_training_files_by_default_and_says_so_once(corpus, capfd):
    folder, names = corpus
    options = reading(names)
    for _ in range(2):
        assert np.array_equal(ids_read(Loader(folder, **shape_of(folder), **options)), expected("train"))
    line = f"note: {folder}: only the files of the split train are read; others: test (1 file) and val (1 file)\n"
    assert capfd.readouterr().err == line


@pytest.mark.parametrize("split", [None, "all"])
def test_all_splits_are_read_where_that_is_said(corpus, split, capfd):
    folder, names = corpus
    options = reading(names)
    loader = Loader(folder, split=split, **shape_of(folder), **options)
    assert np.array_equal(ids_read(loader), expected("train", "val", "test"))
    assert not capfd.readouterr().err


def test_other_words_find_the_split_too(corpus):
    folder, names = corpus
    options = reading(names)
    with open_reader(folder, split="validation", **shape_of(folder), **options) as reader:
        assert reader.read_batch(0)[0, 0] == FIRST_ID["val"]
    with pytest.raises(ArgumentError, match=r"expected a split that its files have \(test, train, val\), found 'vall'"):
        open_reader(folder, split="vall", **shape_of(folder), **options)


def test_a_state_goes_on_in_its_split_and_in_no_other(corpus):
    folder, names = corpus
    options = reading(names)
    options = {**options, **shape_of(folder), "seed": 3}
    with Loader(folder, **options) as loader, Loader(folder, split="train", **options) as later:
        next(loader)
        later.load_state_dict(loader.state_dict())
        assert later.state_dict() == loader.state_dict()
        assert next(later).equal(next(loader))
        state = loader.state_dict()
    with Loader(folder, split="val", **options) as other, pytest.raises(ValueError, match="fingerprint"):
        other.load_state_dict(state)


def test_streams_and_document_loaders_read_the_split(corpus):
    folder, names = corpus
    options = reading(names)
    if "seq_len" not in shape_of(folder):
        pytest.skip("records are not a stream")
    with open_corpus(folder, split="val", **options) as stream:
        assert stream.tokens[0:40].tolist() == ids_of(2).tolist()
        assert stream.refresh() == 40
    with open_corpus(folder, **options) as stream:
        assert stream.num_tokens == TOKENS["train"]
    loader = DocumentLoader(folder, split="val", collate="pad", batch_size=1, drop_last=False, **options)
    with loader:
        assert next(loader)["tokens"].reshape(-1).tolist() == ids_of(2).tolist()


def test_digests_are_those_of_all_splits_and_each_split_is_compared_with_them(corpus, tmp_path):
    folder, names = corpus
    options = reading(names)
    digests = tmp_path / "made.json"
    compared = reading({**names, "digests": digests})
    assert len(write_digests(folder, digests, **options).files) == len(FILES)
    assert len(verify_store(folder, **compared)) == len(FILES)
    assert len(verify_store(folder, split="val", **compared)) == 1
    with Loader(folder, split="val", verify="store", **shape_of(folder), **compared) as loader:
        assert np.array_equal(ids_read(loader), expected("val"))


def as_flags(options):
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.thin
def test_the_commands_show_all_splits_and_take_one(corpus, tmp_path):
    folder, names = corpus
    options = reading(names)
    flags = as_flags(names)
    found = json.loads(run_zb("info", folder, "--json", *flags).stdout)
    assert found["splits"] == {
        "train": {"files": 2, "tokens": 80},
        "test": {"files": 1, "tokens": 40},
        "val": {"files": 1, "tokens": 40},
    }
    assert found["tokens"] == 160
    assert "val" in run_zb("info", folder, *flags).stdout
    assert json.loads(run_zb("info", folder, "--json", "--split", "val", *flags).stdout)["tokens"] == 40
    shown = json.loads(run_zb("show", folder, "--json", "--batch", 0, "--split", "val", *flags).stdout)
    assert str(FIRST_ID["val"]) in json.dumps(shown["rows"])
    page = tmp_path / "report.html"
    assert json.loads(run_zb("report", folder, "-o", page, "--split", "test", "--json", *flags).stdout)["tokens"] == 40
    assert run_zb("verify", folder, "--split", "dev", *flags).exit_code == 6
    state = tmp_path / "state.json"
    with Loader(folder, split="val", **shape_of(folder), **options) as loader:
        state.write_text(json.dumps(loader.state_dict()))
    which = ["which", folder, "--state", state, "--step", 0, "--batch-size", 2, *flags]
    assert "fineweb_val_000000" in run_zb(*which, "--split", "val").stdout
    assert "fineweb_val_000000" in run_zb(*which).stdout  # the state tells it


def test_names_that_contradict_each_other_are_refused_with_the_lines_to_type(tmp_path):
    folder = tmp_path / "corpus"
    (folder).mkdir()
    for name in ("train_val_0", "train_1"):
        write_npy(folder / name, ids_of(1))
    with pytest.raises(ArgumentError, match=r"train_val_0.npy: expected a name of one split, found train and val: "):
        Loader(folder, **SHAPE)
    with Loader(folder, split="all", **SHAPE) as loader:
        assert loader.batches.corpus.num_tokens == 80
    failed = run_zb("info", folder)
    assert failed.exit_code == 2
    assert failed.stderr.rstrip().endswith(
        "name the file or the folder to read, or pass --split all to read all as one"
    )
    assert run_zb("info", folder, "--split", "all").exit_code == 0
    (folder / "train_val_0.npy").rename(folder / "more.npy")
    with pytest.raises(ArgumentError, match=r"more.npy: expected a name that tells its split, as train_1.npy tells"):
        Loader(folder, **SHAPE)


def test_a_folder_of_one_split_is_just_that(tmp_path, capfd):
    folder = tmp_path / "val"
    folder.mkdir()
    for name in ("val_0", "val_1"):
        write_npy(folder / name, ids_of(2))
    for split in ("auto", "val", "dev", None):
        with Loader(folder, split=split, **SHAPE) as loader:
            assert loader.batches.corpus.num_tokens == 80
    with pytest.raises(ArgumentError, match=r"expected a split that its files have \(val\), found 'train'"):
        Loader(folder, split="train", **SHAPE)
    with Loader(folder / "val_0.npy", split="val", **SHAPE) as loader:
        assert loader.batches.corpus.num_tokens == 40
    assert not capfd.readouterr().err


@pytest.mark.parametrize(("flags", "batches"), [(["--split", "val"], 4), (["--split", "all"], 16), ([], 8)])
def test_the_batches_of_a_split_are_staged(tmp_path, flags, batches):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, number in FILES.items():
        write_npy(folder / name, ids_of(number))
    convert(folder, "hdf5", tmp_path / "store", **SHAPE)
    staged = run_zb("stage", tmp_path / "store", tmp_path / "cache", "--json", *flags)
    assert json.loads(staged.stdout)["copied"] == batches
    assert run_zb("stage", folder, tmp_path / "cache", "--batch-size", 2, "--seq-len", 5, *flags).exit_code == 0
