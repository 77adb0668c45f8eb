"""What the documentation shows is typed: `mypy --strict` accepts each Python example, as it is in a user's file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
#: What an example takes from its reader.
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
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if found := EXAMPLE.findall(page.read_text(encoding="utf-8")):
            yield page.stem.replace("-", "_"), "\n".join(found)


def run_mypy(folder, files):
    """Run mypy on files that do not lie in the project, with none of its settings."""
    pytest.importorskip("mypy")
    (folder / "mypy.ini").write_text("[mypy]\n")
    options = ["--strict", "--config-file", "mypy.ini", "--cache-dir", "cache", "--follow-imports", "silent"]
    command = [sys.executable, "-m", "mypy", *options, *files]
    environment = {"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_type_checker_accepts_every_example_and_no_wrong_argument(tmp_path):
    written = []
    for name, code in examples():
        (tmp_path / f"{name}.py").write_text(GIVEN + code)
        written.append(f"{name}.py")
    assert len(written) >= 3
    done = run_mypy(tmp_path, written)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "wrong.py").write_text('from zb_hdf5 import Loader\n\nLoader("train-h5", seed="42")\n')
    done = run_mypy(tmp_path, ["wrong.py"])
    assert done.returncode == 1
    assert 'Argument "seed" to "Loader" has incompatible type "str"; expected "int"' in done.stdout
