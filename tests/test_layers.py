"""Imports go one way: from a room to its own layer or a lower one; and importing the package loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zb_hdf5

ROOT = Path(__file__).parent.parent
LAYERS = (
    {"errors", "spec"},
    {
        "order",
        "ranks",
        "extents",
        "digest",
        "publish",
        "prefetch",
        "bytepair",
        "tokenizer",
        "documents",
        "npyheader",
        "states",
        "openfile",
        "openfiles",
    },
    {"source", "reader", "writer", "store", "datasets", "scatter"},
    {
        "native",
        "dual",
        "h5file",
        "h5room",
        "h5source",
        "h5read",
        "h5write",
        "index",
        "shards",
        "verify",
        "repair",
        "rebuild",
        "streamwrite",
        "streamindex",
        "streamread",
        "tokenstore",
        "windows",
        "verifystream",
        "livestore",
    },
    {"loader", "follow", "mixture", "textloader", "zerobatch", "datasetloader"},
    {"console", "info", "which", "doctor", "fetch", "tokenizer_training", "demo", "verdict", "cli"},
)
LAYER_OF = {module: number for number, modules in enumerate(LAYERS) for module in modules}
MODULES = sorted(path.stem for path in (ROOT / "zb_hdf5").glob("*.py") if path.stem != "__init__")
CONVERTERS = sorted(path.stem for path in (ROOT / "converters").glob("*.py"))


def imports_of(package, module):
    """Return (full module name, imported name or None) of every import, wherever it stands."""
    tree = ast.parse((ROOT / package / f"{module}.py").read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{package}.{module}: relative import, line {node.lineno}"
            found += [(node.module, alias.name) for alias in node.names]
    return found


def rooms_of(package, module):
    """Return the modules of zb_hdf5 that a module imports, also as `from zb_hdf5 import spec`."""
    rooms = set()
    for name, imported in imports_of(package, module):
        if name == "zb_hdf5" and imported in LAYER_OF:
            rooms.add(imported)
        elif name.startswith("zb_hdf5."):
            rooms.add(name.split(".")[1])
    return rooms


def test_every_module_has_a_layer():
    assert set(LAYER_OF) == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    upwards = {room for room in rooms_of("zb_hdf5", module) if LAYER_OF[room] > LAYER_OF[module]}
    assert not upwards, f"zb_hdf5.{module} (layer {LAYER_OF[module]}) imports {upwards}"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_names_the_room_and_not_the_house(module):
    """`from zb_hdf5 import Loader` inside the package would hide which room it needs."""
    assert not [imported for name, imported in imports_of("zb_hdf5", module) if name == "zb_hdf5"]


def test_no_modules_import_each_other():
    waiting = {module: rooms_of("zb_hdf5", module) for module in MODULES}
    while free := [module for module, rooms in waiting.items() if not rooms & waiting.keys()]:
        for module in free:
            del waiting[module]
    assert not waiting, f"in a circle: {waiting}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_the_command_line(module):
    assert "cli" not in rooms_of("zb_hdf5", module)


@pytest.mark.parametrize("module", CONVERTERS)
def test_converters_do_not_import_the_command_line(module):
    assert "cli" not in rooms_of("converters", module)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"cli", "demo"}))
def test_the_package_does_not_know_its_converters(module):
    assert not [name for name, _ in imports_of("zb_hdf5", module) if name.split(".")[0] == "converters"]


@pytest.mark.parametrize("module", CONVERTERS)
def test_converters_use_public_names(module):
    names = [
        f"{name}.{imported or ''}".rstrip(".")
        for name, imported in imports_of("converters", module)
        if name.split(".")[0] == "zb_hdf5"
    ]
    assert not [name for name in names if any(part.startswith("_") for part in name.split("."))]


@pytest.mark.parametrize("module", CONVERTERS)
def test_converters_touch_no_private_attribute_of_others(module):
    tree = ast.parse((ROOT / "converters" / f"{module}.py").read_text(encoding="utf-8"))
    private = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os"))
    ]
    assert not private


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("zb_hdf5", ["torch", "h5py", "click"]),
        ("zb_hdf5.commands.zb", ["numpy", "torch", "h5py"]),
        ("zb_hdf5.converters.cli", ["numpy", "torch", "h5py"]),
        ("zb_hdf5.core.order", ["torch", "h5py", "click"]),
        ("zb_hdf5.formats.native", ["torch", "h5py", "click"]),
        ("zb_hdf5.opening", ["torch", "h5py", "click"]),
        ("zb_hdf5.loaders.loader", ["torch", "h5py", "click"]),
    ],
)
def test_importing_is_light(module, heavy):
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", zb_hdf5.__all__)
def test_every_exported_name_resolves(name):
    assert getattr(zb_hdf5, name) is not None
    assert name in dir(zb_hdf5)


def test_exported_names_are_those_of_the_type_checkers():
    tree = ast.parse((ROOT / "zb_hdf5" / "__init__.py").read_text(encoding="utf-8"))
    shown = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("zb_hdf5.")
        for alias in node.names
    ]
    assert sorted(name for _, name in shown) == zb_hdf5.__all__
    for module, name in shown:
        assert getattr(sys.modules[module], name) is getattr(zb_hdf5, name)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        zb_hdf5.nonsense  # noqa: B018
