"""What pyproject.toml promises of versions is what .ci/run installs and tests."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
#: What users install; `ecosystem` and `dev` are for this project's own tests.
EXTRAS = ("text", "remote", "codecs", "mpi", "test")


def pinned(name):
    lines = (ROOT / name).read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {package: Version(found) for package, found in pins.items()}


def floors():
    wanted = [*PROJECT["dependencies"], *(each for extra in EXTRAS for each in PROJECT["optional-dependencies"][extra])]
    found = [re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)(?:; .*)?", each).groups() for each in wanted]
    return {package: Version(least) for package, least in found}


def test_the_tested_floors_are_the_declared_ones():
    tested = pinned("constraints-floors.txt")
    assert tested.pop("torch") == pinned("constraints.txt")["torch"]  # no older one can be had without CUDA
    declared = floors()
    assert declared.pop("torch") <= pinned("constraints.txt")["torch"]
    assert tested == declared


@pytest.mark.parametrize(("package", "least"), [("click", "8.4"), ("h5py", "3.16"), ("tiktoken", "0.11")])
def test_versions_that_are_known_to_fail_are_not_allowed(package, least):
    assert floors()[package] >= Version(least)


@pytest.mark.parametrize("package", floors())
def test_this_environment_is_one_of_those_that_are_allowed(package):
    assert Version(version(package)) >= floors()[package]


def test_every_room_is_in_the_wheel():
    assert PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["zb_hdf5*"]
    rooms = {path.parent for path in (ROOT / "zb_hdf5").rglob("*.py")}
    assert ROOT / "zb_hdf5" / "commands" in rooms
    assert not [room for room in rooms if not (room / "__init__.py").exists()]  # else it is left out


def test_every_dependency_has_a_tested_version():
    assert floors().keys() <= pinned("constraints.txt").keys() | {"pytest", "hypothesis"}
