"""Type checkers see the kind of a loader's batches, and mistakes before a run does."""

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from zb_hdf5 import ArgumentError, DocumentLoader, Loader, MixedLoader, TextLoader, convert
from zb_hdf5.converters.conversion import OPTIONS
from zb_hdf5.loaders import loader_options
from zb_hdf5.loaders.order import LASTS, SHUFFLES
from zb_hdf5.loaders.step_values import DOCUMENT_NUMBERS, DOCUMENT_VALUES
from zb_hdf5.spec import SPLITS

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "types"
#: The program of each type checker, and its module.
CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--no-error-summary"],
    "basedpyright": ["-m", "basedpyright", "--pythonpath", sys.executable],
}
#: The options that decide the kind of a loader's batches.
KINDS = {"targets", "fields", "documents", "spans"}


def names_of(function):
    """Return the names of the keyword arguments of a function."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}


def test_the_options_for_type_checkers_are_those_of_the_loaders():
    loader = {*loader_options.LoaderOptions.__annotations__}
    source = {*loader_options.SourceOptions.__annotations__}
    text = {*loader_options.TextLoaderOptions.__annotations__}
    assert loader | KINDS == names_of(Loader.__init__)
    assert source < loader
    assert names_of(MixedLoader.__init__) < source
    assert text == names_of(TextLoader.__init__) - {"tokenizer", "batch_size", "seq_len", "targets"}


def test_the_words_for_type_checkers_are_those_of_the_code():
    assert get_args(loader_options.ShuffleWord) == SHUFFLES
    assert get_args(loader_options.Last) == LASTS
    assert get_args(loader_options.DocumentValue) == (*DOCUMENT_VALUES, DOCUMENT_NUMBERS)
    assert get_args(loader_options.TextSplit) == SPLITS
    for words, given in (
        ("Collate", {"collate": "another"}),
        ("TooLong", {"max_tokens": (8, "another")}),
        ("DocumentShuffle", {"shuffle": "another"}),
    ):
        with pytest.raises(ArgumentError, match=f"must be one of {', '.join(get_args(vars(loader_options)[words]))}"):
            DocumentLoader("stream", **{"collate": "pad", "batch_size": 1, **given})


def test_the_words_of_a_conversion_are_those_of_its_options():
    hints = inspect.get_annotations(convert)
    words = {name: re.findall(r"'([^']+)'", hint) for name, hint in hints.items() if "Literal" in hint}
    assert words
    assert words == {name: list(OPTIONS[name].kind) for name in words}
    fixed = {name for name, option in OPTIONS.items() if isinstance(option.kind, tuple) and len(option.kind) > 1}
    assert fixed == words.keys()


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_take_what_is_right_and_name_each_mistake(checker, tmp_path):
    if find_spec(checker) is None:
        pytest.skip(f"no {checker} here")
    (tmp_path / "pyproject.toml").write_text("[tool.basedpyright]\ntypeCheckingMode = 'standard'\n")
    for name in ("right.py", "wrong.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    done = subprocess.run(
        [sys.executable, *CHECKERS[checker], "right.py", "wrong.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)},
    )
    found = {int(line) for line in re.findall(r"wrong\.py:(\d+):.*?error", done.stdout)}
    lines = (FOLDER / "wrong.py").read_text().splitlines()
    assert found == {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}, done.stdout
    assert not re.findall(r"right\.py:\d+.*error.*", done.stdout), done.stdout
