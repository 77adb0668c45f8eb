"""Type checkers see the kind of a loader's batches, and mistakes before a run does."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import get_args, get_type_hints

import pytest
import torch
from pages import EXAMPLE, ROOT, TEXT

import zb_hdf5
from zb_hdf5 import ArgumentError, DocumentLoader, Loader, MixedLoader, TextLoader, convert
from zb_hdf5.converters.conversion import OPTIONS
from zb_hdf5.loaders import loader_options
from zb_hdf5.loaders.order import LASTS, SHUFFLES
from zb_hdf5.loaders.step_values import DOCUMENT_NUMBERS, DOCUMENT_VALUES, SOURCES
from zb_hdf5.spec import SPLITS

FOLDER = ROOT / "tests" / "types"
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


#: The module of batches is below that of corpora, and imports none at run time.
NAME_THEIR_MAKER = ("Batches.__init__", "Batches.with_windows")


def typed_parts_of(name):
    """Yield the name and the code of whatever has types in a public name: itself, its methods and properties."""
    thing = getattr(zb_hdf5, name)
    yield name, thing
    for part, value in vars(thing).items() if isinstance(thing, type) else ():
        code = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if inspect.isfunction(code) and (part == "__init__" or not part.startswith("_")):
            yield f"{name}.{part}", code


@pytest.mark.parametrize("name", zb_hdf5.__all__)
def test_the_types_of_what_is_public_are_found_at_run_time(name):
    for part, code in typed_parts_of(name):
        if part not in NAME_THEIR_MAKER:
            assert isinstance(get_type_hints(code), dict), part


def test_the_types_of_a_call_are_classes_and_an_import_of_them_loads_no_torch():
    hints = get_type_hints(Loader.__init__)
    assert (
        hints["cache"] == get_type_hints(zb_hdf5.open_corpus)["cache"] == str | os.PathLike[str] | zb_hdf5.Cache | None
    )
    assert hints["dtype"] == torch.dtype | None
    assert hints["fields"] == Sequence[str] | Mapping[str, str]
    assert get_type_hints(zb_hdf5.LoaderOptions)["device"] == str | torch.device | None
    assert get_type_hints(DocumentLoader.__init__)["verify"] == get_type_hints(zb_hdf5.open_reader)["verify"]
    modules = ("loader_options", "loader", "document_loader", "text_loader", "mixture")
    light = f"import sys, {', '.join(f'zb_hdf5.loaders.{each}' for each in modules)}\n"
    light += "print({'torch', 'h5py', 'obstore', 'click'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", light], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_words_for_type_checkers_are_those_of_the_code():
    assert get_args(loader_options.ShuffleWord) == SHUFFLES
    assert get_args(loader_options.Last) == LASTS
    assert get_args(loader_options.DocumentValue) == (*DOCUMENT_VALUES, DOCUMENT_NUMBERS, SOURCES)
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


def run_checker(module, folder, *options):
    """Run a type checker on all files of a folder, which is not part of the project, and return what it prints."""
    if find_spec(module) is None:
        pytest.skip(f"no {module} here")
    for name in ("right.py", "wrong.py"):
        (folder / name).write_text((FOLDER / name).read_text())
    command = [sys.executable, "-m", module, *options, *sorted(path.name for path in folder.glob("*.py"))]
    environment = {"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment).stdout


def require_each_mistake(printed):
    """See that a type checker takes what is right, and names each mistake."""
    found = {int(line) for line in re.findall(r"wrong\.py:(\d+):.*?error", printed)}
    lines = (FOLDER / "wrong.py").read_text().splitlines()
    assert found == {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}, printed
    assert not re.findall(r"right\.py:\d+.*error.*", printed), printed


#: The names that an example takes from its reader.
GIVEN = """from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt


def step(batch: Any) -> None: ...
def train(batch: Any) -> None: ...
def tokenized() -> Iterator[npt.NDArray[np.uint16]]: raise NotImplementedError
def documents() -> Iterator[npt.NDArray[np.uint16]]: raise NotImplementedError


"""


def examples():
    """Yield a module for each page: its examples follow each other, as a reader meets them."""
    for page, text in TEXT.items():
        if page != "recipes.md" and (found := EXAMPLE.findall(text)):  # those are of libraries with types of their own
            yield page.removesuffix(".md").replace("/", "_").replace("-", "_"), "\n".join(found)


@pytest.mark.slow
def test_mypy_takes_what_is_right_and_every_example_and_names_each_mistake(tmp_path):
    """In one run: it reads the package, numpy and torch first, which takes most of its time."""
    named = dict(examples())
    assert len(named) >= 3
    for name, code in named.items():
        (tmp_path / f"{name}.py").write_text(GIVEN + code)
    (tmp_path / "seed.py").write_text('from zb_hdf5 import Loader\n\nLoader("train-h5", seed="42")\n')
    # as pyproject.toml has it: numpy and torch were read by the check of the package, if that ran before
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / "cache")
    sections = {"mypy": "strict = True\npython_version = 3.12\ncache_dir = cache"}
    # of packages without types
    sections["mypy-" + ",".join(named)] = "allow_untyped_calls = True\ndisable_error_code = import-untyped"
    [untyped] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    sections["mypy-" + ",".join(untyped["module"])] = "ignore_missing_imports = True"
    (tmp_path / "mypy.ini").write_text("".join(f"[{name}]\n{lines}\n" for name, lines in sections.items()))
    printed = run_checker("mypy", tmp_path, "--config-file", "mypy.ini", "--no-error-summary")
    require_each_mistake(printed)
    assert 'seed.py:3: error: No overload variant of "Loader" matches argument types "str", "str"' in printed
    assert not [line for line in printed.splitlines() if line.partition(".py:")[0] not in ("wrong", "seed")]


@pytest.mark.slow
def test_basedpyright_takes_what_is_right_and_names_each_mistake(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.basedpyright]\ntypeCheckingMode = 'standard'\n")
    require_each_mistake(run_checker("basedpyright", tmp_path, "--pythonpath", sys.executable))
