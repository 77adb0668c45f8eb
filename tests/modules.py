"""The modules of the package, and their files."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def module_files():
    """Return module name -> file, of the whole package: `converters` is in it by a link."""
    found = {}
    for folder, package in ((ROOT / "zb_hdf5", "zb_hdf5"), (ROOT / "converters", "zb_hdf5.converters")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if "converters" not in path.relative_to(folder).parts and parts != ("__init__",):
                module = ".".join([package, *parts]).removesuffix(".__init__")
                assert module not in found, f"{path}: is also {found[module]}, and one of them is never imported"
                found[module] = path
    return found


#: Module name -> file.
FILES = module_files()
MODULES = sorted(FILES)
