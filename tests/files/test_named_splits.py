"""The splits of files by the words of their names: one table of names, and the names that are refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zb_hdf5 import ArgumentError
from zb_hdf5.files.named_splits import ALL_SPLITS, AUTO_SPLIT, SPLIT_OF_WORD, SplitFiles, named_splits, split_named

ROOT = Path("/train/test/corpus")


def splits(*names):
    """Return the splits of files of one folder, in whose own path there are words of others."""
    return named_splits([ROOT / name for name in names], [ROOT])


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("fineweb_train_000001.bin", "train"),
        ("train.bin", "train"),
        ("train-00000-of-00004.parquet", "train"),
        ("val/0.npy", "val"),
        ("corpus-val.idx", "val"),
        ("train_text_document.bin", "train"),
        ("c4-validation.00000-of-00008.json.gz", "val"),
        ("a/b/valid/part.npy", "val"),
        ("dev.jsonl", "val"),
        ("EVAL.NPY", "val"),
        ("test2019.npy", "test"),
        ("train/train_0.npy", "train"),
        ("val/validation-dev.npy", "val"),
    ],
)
def test_a_word_of_a_name_tells_its_split(name, split):
    assert splits(name, "train_other.bin", "val_other.bin") == [split, "train", "val"]


@pytest.mark.parametrize(
    "name", ["trainer.bin", "evaluate.npy", "latest.npy", "valley/0.npy", "devops.h5", "trainval.npy", "útrain.bin"]
)
def test_a_part_of_a_word_tells_nothing(name):
    assert splits(name, "other.bin") == ["", ""]


def test_what_is_above_a_path_tells_nothing():
    assert splits("a.bin", "b.bin") == ["", ""]
    assert splits("val.bin") == ["val"]
    assert named_splits([ROOT / "val" / "a.bin", ROOT / "val" / "b.bin"], [ROOT / "val"]) == ["", ""]


def test_of_several_paths_their_own_names_tell():
    files = [ROOT / "train" / "a.bin", ROOT / "val" / "a.bin", ROOT / "test.bin"]
    assert named_splits(files, [ROOT / "train", ROOT / "val", ROOT / "test.bin"]) == ["train", "val", "test"]
    assert named_splits(files[:2], [ROOT / "train" / "a.bin", ROOT / "val" / "a.bin"]) == ["", ""]


@pytest.mark.parametrize("name", ["train/val.bin", "train_val.bin", "test/dev/0.npy"])
def test_a_name_of_two_splits_is_refused_with_the_lines_to_type(name):
    with pytest.raises(ArgumentError, match=r"found \w+ and \w+: name the file or the folder .*, or pass split='all'"):
        splits(name, "train.bin")


def test_a_lone_file_is_what_it_is():
    assert named_splits([ROOT / "train_val.bin"], [ROOT]) == [""]
    assert named_splits([ROOT / "train" / "val.bin"], [ROOT / "train" / "val.bin"]) == ["val"]


def test_a_name_without_a_split_beside_one_with_is_refused():
    with pytest.raises(ArgumentError, match=r"extra.bin: expected a name that tells its split, as val.bin tells val"):
        splits("val.bin", "extra.bin")


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (AUTO_SPLIT, ["train_a", "train_b"]),
        ("train", ["train_a", "train_b"]),
        ("val", ["val_a"]),
        ("validation", ["val_a"]),
        ("dev", ["val_a"]),
        (None, ["train_a", "train_b", "val_a"]),
        (ALL_SPLITS, ["train_a", "train_b", "val_a"]),
    ],
)
def test_the_files_of_a_split(asked, names):
    files = [ROOT / name for name in ("train_a", "train_b", "val_a")]
    found = SplitFiles.at([ROOT], files, asked)
    assert [file.name for file in found.files] == names
    assert found.splits == [name.split("_")[0] for name in names]


def test_the_only_split_is_read_by_default_and_by_its_name(tmp_path):
    files = [tmp_path / "val_a", tmp_path / "val_b"]
    for asked in (AUTO_SPLIT, "val", None):
        assert SplitFiles.at([tmp_path], files, asked) == (files, ["val", "val"])
    with pytest.raises(ArgumentError, match=r"expected a split that its files have \(val\), found 'train'"):
        SplitFiles.at([tmp_path], files, "train")
    lone = tmp_path / "val_a"
    assert SplitFiles.at([lone], [lone], "train").files == [lone]


def test_the_default_is_said_once_in_one_line(capfd, tmp_path):
    files = [tmp_path / name for name in ("train.bin", "val.bin", "test_0.bin", "test_1.bin")]
    for _ in range(2):
        SplitFiles.at([tmp_path], files, AUTO_SPLIT)
    line = f"note: {tmp_path}: only the files of the split train are read; others: val (1 file) and test (2 files)\n"
    assert capfd.readouterr().err == line


def test_without_files_for_training_a_split_has_to_be_named():
    with pytest.raises(ArgumentError, match=r"\(val, test\), found 'train': pass split='val'"):
        SplitFiles.at([ROOT], [ROOT / "val.bin", ROOT / "test.bin"], AUTO_SPLIT)


@given(
    st.lists(
        st.tuples(
            st.text("xyz", min_size=1), st.sampled_from([*SPLIT_OF_WORD]), st.sampled_from([*"_-./ 0"]), st.booleans()
        ),
        min_size=2,
        max_size=6,
    )
)
def test_any_word_is_found_between_characters_that_are_no_letters(parts):
    names = [
        f"{number}/{before}{mark}{word.upper() if is_loud else word}{mark}0.bin".replace("..", ".")
        for number, (before, word, mark, is_loud) in enumerate(parts)
    ]
    assert splits(*names) == [split_named(word) for _, word, _, _ in parts]
