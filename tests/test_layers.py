"""Imports go one way: to the own floor or a lower one; and importing the package loads nothing heavy."""

import ast
import importlib
import re
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from modules import FILES, MODULES, ROOT

import zb_hdf5
from zb_hdf5.store.format_list import FORMATS

#: From the ground up. Each folder has a floor of its own; the files of the ground share one.
FLOORS = (
    ("errors", "field", "notes", "packages", "read_as", "signals", "spec", "version"),
    ("files",),
    ("hdf5",),
    ("documents",),
    ("text",),
    ("formats",),
    ("trainers",),
    ("store",),
    ("loaders",),
    ("option_groups", "pace"),
    ("console",),
    ("field_sets",),
    ("converters",),
    ("commands",),
    ("compat",),
    ("__main__",),
)
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}
#: "zb_hdf5.store.shards", and "zb_hdf5.formats.native:BatchFileReader".
NAME_IN_TEXT = re.compile(r"zb_hdf5(\.\w+)+(:\w+)?")


CONVERTERS = [module for module in MODULES if module.startswith("zb_hdf5.converters")]


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path):
    """Return all nodes of a file, but for the constant ones that say how a name is used: a third of them."""
    nodes = [tree_of(path)]
    for node in nodes:  # which grow meanwhile; `ast.walk` takes twice as long
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                nodes += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                nodes.append(value)
    return nodes


def trees_and_names(module):
    """Yield (module, name or None) of every import of a module, also late ones, and of names of modules in texts."""
    for node in nodes_of(FILES[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import, line {node.lineno}"
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME_IN_TEXT.fullmatch(node.value):
            name, _, attribute = node.value.partition(":")
            yield name, attribute or None


@cache
def needs_of(module):
    """Return the modules of the package that a module needs: also those that are imported late, or by a text."""
    needs = set()
    for name, imported in trees_and_names(module):
        if f"{name}.{imported}" in FILES:
            needs.add(f"{name}.{imported}")
        elif name in FILES:
            needs.add(name)
    return needs - {module}


def floor_of(module):
    return FLOOR_OF[module.split(".")[1]]


def test_every_module_has_a_floor_and_imports_go_down():
    assert {module.split(".")[1] for module in MODULES} == set(FLOOR_OF)
    folders = {module.split(".")[1] for module in MODULES if module.count(".") > 1}
    assert not [names for names in FLOORS if len(names) > 1 and folders.intersection(names)]
    pairs = [(module, other) for module in MODULES for other in needs_of(module)]
    assert not [f"{module} imports {other}" for module, other in pairs if floor_of(other) > floor_of(module)]


def test_a_module_names_the_folder_that_it_needs_and_converters_are_a_part_of_the_package():
    """`from zb_hdf5 import Loader` inside the package would hide which folder it needs."""
    inside = [module for module in MODULES if module not in CONVERTERS]
    assert not [module for module in inside if "zb_hdf5" in [name for name, _ in trees_and_names(module)]]
    # `import converters` in the source tree would make a second copy of each module
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *FILES.values()]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) converters\b", text, re.MULTILINE), path
    assert "converters" not in sys.modules


#: A corpus makes batches, which have it: the first file names the noun of the second one in types, and nowhere else.
NAMED_IN_TYPES = ("zb_hdf5.formats.batches", "zb_hdf5.formats.corpus")


def test_batches_need_no_corpus_but_in_their_types():
    lower, upper = NAMED_IN_TYPES
    blocks = [node for node in tree_of(FILES[lower]).body if isinstance(node, ast.If)]
    for_types = {id(node) for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for node in block.body}
    imports = [node for node in nodes_of(FILES[lower]) if getattr(node, "module", None) == upper]
    assert len(imports) == 1
    assert id(imports[0]) in for_types
    code = f"import sys, {lower}; print({upper!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_no_modules_import_each_other():
    lower, upper = NAMED_IN_TYPES
    waiting = {module: needs_of(module) - ({upper} if module == lower else set()) for module in MODULES}
    while free := [module for module, others in waiting.items() if not others & waiting.keys()]:
        for module in free:
            del waiting[module]
    assert not waiting, f"in a circle: {waiting}"


#: A command or an option, as it is typed.
TYPED = re.compile(r"\bzb [a-z]|(^|[\s'\"(/])--[a-z]|\bconvert [a-z0-9]+-to-")
#: The help of the options and the reports are of the command line.
OF_COMMANDS = {
    f"zb_hdf5.converters.{name}"
    for name in ("capabilities", "cli", "command_options", "conversion", "reports", "sources")
}
LIBRARY = [
    module
    for module in MODULES
    if floor_of(module) < FLOOR_OF["console"] or (module in CONVERTERS and module not in OF_COMMANDS)
]


def typed_words_in(module):
    """Return the texts of a module that tell somebody what to type; docstrings may."""
    nodes = nodes_of(FILES[module])
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text.value for text in texts if id(text) not in docstrings and TYPED.search(text.value)]


def test_the_library_states_facts_and_the_command_line_what_to_type():
    assert not {module: typed for module in LIBRARY if (typed := typed_words_in(module))}


def test_the_tests_see_imports_by_text_and_what_is_typed(tmp_path, monkeypatch):
    late = tmp_path / "late.py"
    late.write_text('import_module("zb_hdf5.loaders.loader")\nROW = "zb_hdf5.store.index:ShardIndex"\n')
    monkeypatch.setitem(FILES, "zb_hdf5.files.late", late)
    assert needs_of("zb_hdf5.files.late") == {"zb_hdf5.loaders.loader", "zb_hdf5.store.index"}
    late = tmp_path / "typed.py"
    late.write_text('"""Of zb verify."""\nA = f"{1}: run \'zb verify {2}\'"\nB = "pass --force"\nC = "a -- b"\n')
    monkeypatch.setitem(FILES, "zb_hdf5.files.typed", late)
    assert typed_words_in("zb_hdf5.files.typed") == ["pass --force", ": run 'zb verify "]


#: Methods of named tuples, and private names of other projects that have no public one.
NOT_OURS = {
    "_replace", "_asdict", "_fields", "_getframe", "_store",
    "_pat_str", "_mergeable_ranks", "_special_tokens", "_encode_single_piece",
}  # fmt: skip


def own_names(nodes):
    """Return the attributes of a file's own classes, and its functions."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def private_reaches_of(module):
    nodes = nodes_of(FILES[module])
    known = {*own_names(nodes), *NOT_OURS}
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not re.match("_[^_]", node.attr) or node.attr in known:
            continue
        if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls", "os"):
            yield f"{module}, line {node.lineno}: {ast.unparse(node)}"


def test_no_file_imports_or_reaches_into_the_private_parts_of_another():
    names = [(module, f"{name}.{imported or ''}") for module in MODULES for name, imported in trees_and_names(module)]
    names = [(module, name) for module, name in names if name.startswith("zb_hdf5")]
    assert not [pair for pair in names if any(re.match("_[^_]", part) for part in pair[1].split("."))]
    assert not [reach for module in MODULES for reach in private_reaches_of(module)]


#: What the files of several formats are made of.
SHARED_BY_FORMATS = {f"zb_hdf5.trainers.{name}" for name in ("id_tables", "index_folder", "row_columns")}
#: The files of a format that has several.
PARTS_OF_FORMATS = {
    "zb_hdf5.trainers.ragged": {
        f"zb_hdf5.trainers.{name}" for name in ("dataset_file", "list_file", "offset_file", "ragged_layout")
    }
}


def test_a_format_of_another_trainer_imports_no_other_one():
    parts = [{place.partition(":")[0] for place in (row.place, row.writer)} for row in FORMATS.values()]
    formats = {module for modules in parts for module in modules if module.startswith("zb_hdf5.trainers")}
    for module in formats:
        own = set().union(*(modules for modules in parts if module in modules), PARTS_OF_FORMATS.get(module, ()))
        others = {need for need in needs_of(module) if need.startswith("zb_hdf5.trainers.")} - own - SHARED_BY_FORMATS
        assert not others, f"{module} imports {others}"


#: An import of a file of tests: the first statement of a line, or a later one.
IMPORT_OF_TESTS = re.compile(r"^(?:.*; *)? *(?:from|import) (?:[\w., ]+[., ])?(test_\w+|conftest)\b", re.MULTILINE)


def test_tests_share_helpers_and_never_a_test_file():
    """`store` is one fixture and `run` one helper; a module that needs another thing gives it another name."""
    definers = {"store": [], "run": []}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        files = IMPORT_OF_TESTS.findall(text)
        assert not files, f"{path} imports {files}: put what is shared into a helper beside tests/conftest.py"
        for name in re.findall(r"^def (store|run)\(", text, re.MULTILINE):
            definers[name].append(path.relative_to(ROOT / "tests").as_posix())
    assert definers == {"store": ["conftest.py"], "run": ["commandline.py"]}


@pytest.mark.parametrize(("module", "heavy"), [
    ("zb_hdf5", ["torch", "h5py", "click"]),
    ("zb_hdf5.commands.zb", ["numpy", "torch", "h5py"]),
    ("zb_hdf5.converters.cli", ["numpy", "torch", "h5py"]),
    ("zb_hdf5.loaders.order", ["torch", "h5py", "click"]),
    ("zb_hdf5.formats.native", ["torch", "h5py", "click"]),
    ("zb_hdf5.store.opening", ["torch", "h5py", "click"]),
    ("zb_hdf5.loaders.loader", ["torch", "h5py", "click"]),
])  # fmt: skip
def test_importing_is_light(module, heavy):
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("shuffle", ["global", "records"])
def test_a_loader_of_a_store_reads_it_without_h5py(shuffle, tmp_path):
    np.save(tmp_path / "t.npy", np.arange(64 * 8, dtype=np.uint16).reshape(64, 8))
    zb_hdf5.convert(tmp_path / "t.npy", "hdf5", tmp_path / "store", batch_size=4, workers=1)
    code = (
        "import sys; from zb_hdf5 import Loader\n"
        f"with Loader({str(tmp_path / 'store')!r}, shuffle={shuffle!r}, rank=0, world_size=1) as loader:\n"
        "    print(sum(len(batch) for batch in loader), 'h5py' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["64", "False"]


@pytest.mark.parametrize("name", zb_hdf5.__all__)
def test_every_exported_name_resolves_and_no_other(name):
    assert getattr(zb_hdf5, name) is not None
    assert name in dir(zb_hdf5)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        zb_hdf5.nonsense  # noqa: B018


def test_exported_names_are_those_of_the_type_checkers():
    tree = ast.parse((ROOT / "zb_hdf5" / "__init__.py").read_text(encoding="utf-8"))
    shown = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("zb_hdf5.")
        for alias in node.names
        if alias.asname == alias.name  # others are not exported, as mypy and pyright read it
    ]
    assert [(name, module) for module, name in shown] == list(zb_hdf5._MODULES.items())
    assert sorted(zb_hdf5._MODULES) == zb_hdf5.__all__
    for module, name in shown:
        assert getattr(importlib.import_module(module), name) is getattr(zb_hdf5, name)
