"""The project around the code: one version, guides that name what is there, and the versions that .ci/run tests."""

import ast
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from importlib.metadata import version

import pytest
from click.testing import CliRunner
from modules import ROOT
from packaging.version import Version

import zb_hdf5
from zb_hdf5.commands.zb import zb

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def test_the_version_is_written_once_and_zb_says_it_also_where_nothing_is_installed(monkeypatch):
    assert PROJECT["dynamic"] == ["version"]
    assert "version" not in PROJECT
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "zb_hdf5.version.__version__"
    sources = [path for folder in ("zb_hdf5", "converters") for path in (ROOT / folder).rglob("*.py")]
    holders = {path.resolve() for path in sources if f'"{zb_hdf5.__version__}"' in path.read_text(encoding="utf-8")}
    assert holders == {ROOT / "zb_hdf5" / "version.py"}

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    result = CliRunner().invoke(zb, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"zb, version {zb_hdf5.__version__}\n")


GUIDES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", ".github/pull_request_template.md")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
#: A name in backticks that holds a slash, or ends like a file.
PATH_IN_TEXT = re.compile(r"`([\w.][\w./-]*(?:/[\w./-]*|\.(?:py|md|toml|txt|yml|yaml)))`")


def code_of(text):
    """Return what is set as code: in backticks, and in blocks."""
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))])


@pytest.mark.parametrize("guide", GUIDES)
def test_every_make_target_that_a_guide_names_exists(guide):
    named = set(re.findall(r"\bmake (\w+)", code_of((ROOT / guide).read_text(encoding="utf-8"))))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets
    if guide == "CONTRIBUTING.md":
        assert named == targets


@pytest.mark.parametrize("guide", GUIDES)
def test_every_path_that_a_guide_names_exists(guide):
    named = PATH_IN_TEXT.findall((ROOT / guide).read_text(encoding="utf-8"))
    missing = [name for name in named if not (ROOT / name).exists() and not name.startswith(".venv")]
    assert not missing


def test_the_readme_of_the_tests_names_files_that_are_there():
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)?\w+\.py)`", text))
    assert len(named) > 40
    assert not sorted(name for name in named if not (ROOT / "tests" / name).is_file())


#: Lines of code in the body of one function. Its signature, with one parameter a line, is a list to look things up in.
MAX_FUNCTION_LINES = 55


def lines_of_code(function, lines):
    """Return how many lines of the body of a function are code: no docstring, comment or blank line."""
    first = function.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str)
    begin = first.end_lineno + 1 if has_docstring else first.lineno
    numbers = range(begin, function.end_lineno + 1)
    return sum(1 for n in numbers if lines[n - 1].strip() and not lines[n - 1].lstrip().startswith("#"))


def test_no_function_has_more_code_than_a_reader_takes_in():
    found = {}
    for folder in ("zb_hdf5", "converters"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines()
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[f"{path.relative_to(ROOT)}:{node.name}"] = lines_of_code(node, lines)
    assert len(found) > 1_000
    assert not {name: count for name, count in found.items() if count > MAX_FUNCTION_LINES}


def test_the_workflow_runs_what_ci_runs_and_the_changelog_has_what_is_not_released_on_top():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert "run: .ci/run" in workflow
    promised = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    assert re.findall(r'"(3\.\d+)"', workflow) == promised
    assert PROJECT["requires-python"] == f">={promised[0]}"
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"


def test_a_release_is_tested_on_each_python_and_is_the_tag_that_was_pushed():
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    matrix = re.compile(r"python: (\[.*\])")
    assert matrix.findall(release) == matrix.findall(ci)
    assert "from zb_hdf5.version import __version__" in release
    assert ".ci/wheel" in release


def test_the_conda_recipe_needs_what_the_package_needs():
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    _, _, run = recipe.partition("  run:\n")
    found = set(re.findall(r"^    - (\w[\w-]*) >=([\d.]+)$", run, re.MULTILINE))
    needed = {re.match(r"([\w-]+)>=([\d.]+)", each).groups() for each in PROJECT["dependencies"]}
    names = {("python-isal" if name == "isal" else name, least) for name, least in needed}
    assert found == names | {("python", PROJECT["requires-python"].removeprefix(">="))}
    scripts = set(re.findall(r"- (\w+) = ([\w.:]+)", recipe))
    # no `convert`: ImageMagick's package has a file of that name, and both may be in one environment
    assert scripts == {(name, place) for name, place in PROJECT["scripts"].items() if name != "convert"}
    assert 'rm "$PREFIX/bin/convert"' in recipe


def test_elsewhere_than_on_linux_the_import_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    spec = importlib.util.spec_from_file_location("zb_hdf5_elsewhere", ROOT / "zb_hdf5" / "__init__.py")
    with pytest.raises(ImportError, match="runs on Linux only, found darwin"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


#: The extras that users install; `ecosystem` and `dev` are for this project's own tests.
EXTRAS = ("torch", "text", "remote", "codecs", "mpi", "test")


def test_torch_is_an_extra_that_every_guide_for_training_installs():
    extras = PROJECT["optional-dependencies"]
    assert not [each for each in PROJECT["dependencies"] if each.startswith("torch")]
    assert "zb_hdf5[torch]" in extras["ecosystem"]
    assert any(each.startswith("zb_hdf5[torch,") for each in extras["dev"])
    for name, command in ((".ci/run", "'.[torch,"), ("Makefile", "'.[torch]'"), (".ci/wheel", '"$wheel[torch]"')):
        assert command in (ROOT / name).read_text(encoding="utf-8"), name
    first, *_ = re.findall(r"^```\n(.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first.startswith("pip install 'zb_hdf5[torch]'")


def pinned(name):
    lines = (ROOT / name).read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {package: Version(found) for package, found in pins.items()}


def floors():
    wanted = [*PROJECT["dependencies"], *(each for extra in EXTRAS for each in PROJECT["optional-dependencies"][extra])]
    found = [re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)(?:; .*)?", each).groups() for each in wanted]
    return {package: Version(least) for package, least in found}


def test_the_tested_floors_are_the_declared_ones_and_every_dependency_has_a_tested_version():
    tested = pinned("constraints-floors.txt")
    assert tested.pop("torch") == pinned("constraints.txt")["torch"]  # no older one can be had without CUDA
    declared = floors()
    assert declared.pop("torch") <= pinned("constraints.txt")["torch"]
    assert tested == declared
    assert floors().keys() <= pinned("constraints.txt").keys()


def test_versions_that_are_known_to_fail_are_not_allowed_and_those_here_are():
    for package, least in {"click": "8.4", "h5py": "3.16", "tiktoken": "0.13"}.items():
        assert floors()[package] >= Version(least)
    assert not {package: least for package, least in floors().items() if Version(version(package)) < least}


def test_every_room_is_in_the_wheel():
    assert PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["zb_hdf5*"]
    rooms = {path.parent for path in (ROOT / "zb_hdf5").rglob("*.py")}
    assert ROOT / "zb_hdf5" / "commands" in rooms
    assert not [room for room in rooms if not (room / "__init__.py").exists()]  # else it is left out
    pages = {path.relative_to(ROOT / "zb_hdf5").as_posix() for path in (ROOT / "zb_hdf5").rglob("*.html")}
    assert pages == {*PYPROJECT["tool"]["setuptools"]["package-data"]["zb_hdf5"]} - {"py.typed"}
