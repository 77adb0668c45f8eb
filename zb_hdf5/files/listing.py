"""The files that a path stands for: of a folder all in and below it, listed once by the look at it."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from zb_hdf5.errors import ConvertError, FormatError, NotFoundError, UnavailableError, counted
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.files.line_file import JSON_SUFFIX, SUFFIXES_OF_JSON_LINES
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import is_url, open_with_room, require_regular
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.spec import INDEX_NAME

#: Endings of the names of files of tokens or text, of all formats.
SUFFIXES_OF_TOKENS: Final = frozenset(
    (
        *(".npy", ".npz", ".h5", ".hdf5", ".hdf", ".he5", ".batch", ".bin", ".ds", ".mds"),
        *(".parquet", ".arrow", ".txt"),
        *SUFFIXES_OF_JSON_LINES,
    )
)
#: Files of facts about the folders that they are in.
_FACTS: Final = frozenset(
    ("index.json", INDEX_NAME, "state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
)
#: Endings of compressed files.
SUFFIXES_OF_COMPRESSION: Final = frozenset((".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4", ".br", ".zip"))
#: Endings of files that have JSON lines for sure: a lone `.json` may have other things.
_OF_JSON_LINES: Final = (
    *(name + packed for name in SUFFIXES_OF_JSON_LINES for packed in ("", *sorted(SUFFIXES_OF_COMPRESSION))),
    *(JSON_SUFFIX + packed for packed in sorted(SUFFIXES_OF_COMPRESSION)),
)
#: Compressed files that belong to files of tokens.
_COMPRESSED_BESIDE: Final = (".csv.gz",)
#: A folder of the file system itself, which nobody but its owner may list.
_OF_FILE_SYSTEM: Final = "lost+found"
#: A file or folder, whatever its name is.
_Inode: TypeAlias = tuple[int, int]


class _Tree(NamedTuple):
    """The visible files in and below a folder, by their names from it on, in their order.

    Attributes
    ----------
    names
        The regular files.
    links
        Those of them that are links, and their files.
    special
        FIFOs, sockets and devices.
    stores
        The indexes of the stores below it.
    listings
        The listings that were asked for, by the endings.
    last_parts
        The part of each name behind its last dot, in lower case: most formats are ruled out by them.
    """

    names: list[str]
    links: dict[str, _Inode]
    special: list[str]
    stores: list[str]
    listings: dict[tuple[str, ...], Listing]
    last_parts: set[str]

    def ending(self, suffixes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the regular files that have one of the endings, in any case.

        A `.json` may have facts about the files beside it: it is read where there are no other files of tokens or text.
        """
        possible = [suffix for suffix in suffixes if "." not in suffix or _last_part(suffix) in self.last_parts]
        endings = tuple(suffix for suffix in possible if suffix != JSON_SUFFIX)
        found = tuple([name for name in self.names if name.lower().endswith(endings)]) if endings else ()
        if JSON_SUFFIX in possible and not found and not self.left_out(()):
            found = tuple([name for name in self.names if is_lone_json(name)])
        return found

    def left_out(self, read: Sequence[str]) -> list[str]:
        """Return the other files that are named as tokens or text are, and the indexes; none if a store is read."""
        stores = tuple(name.removesuffix(INDEX_NAME) for name in self.stores)
        if INDEX_NAME in self.names or any(name.startswith(stores) for name in read):
            return []
        known = set(read)
        has_json = any(name.lower().endswith(_OF_JSON_LINES) for name in read)
        found = [name for name in self.names if name not in known and _is_of_tokens(name, has_json=has_json)]
        return sorted([*found, *self.stores], key=_order) if self.stores else found


@dataclass(frozen=True)
class Listing:
    """The files that a path stands for, and those that it has besides.

    A folder stands for all regular files in and below it that have one of the endings, in any case. Links are
    followed, and each folder is listed once; one with a `shards.json` below it is a store, and none of its files are
    read. Names that begin with a dot are left out, and so are unfinished results of ours. The order is that of the
    names in each folder, folders among files.

    Attributes
    ----------
    path
        The path: a file that is named stands for itself, whatever its name is.
    names
        The names of the files, from a folder on; (): a file stands for itself.
    """

    path: Path
    names: tuple[str, ...]
    _tree: _Tree | None

    @cached_per_process
    def files(self) -> tuple[Path, ...]:
        """The files."""
        return (self.path,) if self._tree is None else tuple(map(self.path.joinpath, self.names))

    @property
    def texts(self) -> list[str]:
        """The paths of the files as text, in a tenth of the time of `files`."""
        text = os.fspath(self.path)
        if self._tree is None:
            return [text]
        folder = os.path.join(text, "")
        return [f"{folder}{name}" for name in self.names]

    @cached_per_process
    def left_out(self) -> tuple[Path, ...]:
        """Other files that are named as tokens or text are, in their order; of a store below the folder its index."""
        return () if self._tree is None else tuple(map(self.path.joinpath, self._tree.left_out(self.names)))


#: The tree of a folder that is not listed.
_NOTHING: Final = _Tree([], {}, [], [], {}, set())


def listed(look: Look, *suffixes: str) -> Listing:
    """Return the files of a path, which may be none. See `Listing`.

    Parameters
    ----------
    look
        A look at a file, a folder, or a URL, whose folder is never listed.
    suffixes
        The endings of the files in a folder, in lower case.

    Raises
    ------
    FormatError
        If a file that would be read is a FIFO, a socket or a device, or is there by two names.
    NotFoundError
        If there is no such file or folder, or a link leads nowhere.
    UnavailableError
        If a folder cannot be listed.
    """
    path = look.path
    if look.is_far:
        return Listing(path, (), _NOTHING if look.is_dir else None)
    if not look.is_dir:
        require_regular(_status(path).st_mode, path)
        return Listing(path, (), None)
    tree = _tree_of(look)
    if suffixes not in tree.listings:
        tree.listings[suffixes] = _listing(path, tree, suffixes)
    return tree.listings[suffixes]


def may_have(folder: Look, ending: str) -> bool:
    """Return whether something in or below a folder may have an ending. Raises as `listed`.

    A format that looks for a file beside each of thousands asks no file system for what is not there.
    """
    return _last_part(ending) in _tree_of(folder).last_parts


def folders_in(folder: Look) -> list[Path]:
    """Return the folders in another one that have files in or below them, in their order. Raises as `listed`."""
    tree = _tree_of(folder)
    names = {name.partition("/")[0] for name in (*tree.names, *tree.stores) if "/" in name}
    return [folder.path / name for name in sorted(names)]


def own_files(folder: Look) -> list[Path]:
    """Return all files in a folder itself, in their order, whatever their names are. Raises as `listed`."""
    return [folder.path / name for name in _tree_of(folder).names if "/" not in name]


def _listing(path: Path, tree: _Tree, suffixes: tuple[str, ...]) -> Listing:
    """Return the files of a folder that is listed. Raises as `listed`."""
    special = next((name for name in tree.special if name.lower().endswith(suffixes)), None)
    if special is not None:
        require_regular(_status(path / special).st_mode, path / special)
    names = tree.ending(suffixes)
    _require_read_once(path, names, tree.links)
    return Listing(path, names, tree)


def files_left_out(look: Look, read: Sequence[Path]) -> list[Path]:
    """Return the files in and below a folder that are named as tokens or text are, and are not read.

    Parameters
    ----------
    look
        A look at the folder. A store has none, and neither has a file or a URL.
    read
        The files that are read.
    """
    path = look.path
    if look.is_far or not look.is_dir or (path / INDEX_NAME).exists():
        return []
    below = os.path.join(path, "")
    names = [text.removeprefix(below) for file in read if (text := os.fspath(file)).startswith(below)]
    found = [path / name for name in _tree_of(look).left_out(names)]
    if not found:
        return []
    known = {file.resolve() for file in read}  # by whatever name
    return [file for file in found if file.resolve() not in known]


def _is_of_tokens(name: str, *, has_json: bool) -> bool:
    """Return whether a file is named as tokens or text are; a `.json` beside others than JSON lines has facts."""
    name = name.lower()
    ending = os.path.splitext(name)[1]
    if ending in SUFFIXES_OF_COMPRESSION:
        return not name.endswith(_COMPRESSED_BESIDE)
    return ending in SUFFIXES_OF_TOKENS or (has_json and ending == JSON_SUFFIX)


def is_lone_json(name: str) -> bool:
    """Return whether a file is named `.json`, and not as one of facts about its folder."""
    return name.lower().endswith(JSON_SUFFIX) and name.rpartition("/")[2] not in _FACTS


def _tree_of(folder: Look) -> _Tree:
    """Return the files in and below a folder, which is walked once: all who have the look see the same files."""
    if folder.tree is None:
        folder.tree = _Walk(folder.path).tree()
    tree: _Tree = folder.tree
    return tree


class _Walk:
    """A walk through a folder and those below it. Folders that links lead to are entered after all others.

    Parameters
    ----------
    root
        The folder. The folders below a store are not a part of it.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root)
        self._found = _Tree([], {}, [], [], {}, set())
        self._folders = [""]
        self._names: list[str] = []  # of the folders that were entered
        self._linked: list[str] = []
        self._entered: set[_Inode] = set()

    def tree(self) -> _Tree:
        """Return the files."""
        while self._folders or self._linked:
            if not self._folders:
                self._linked.sort(key=_order, reverse=True)
                self._folders.append(self._linked.pop())
            self._enter(self._folders.pop())
        key = _order if len(self._entered) > 1 else None
        for names in (self._found.names, self._found.special, self._found.stores):
            names.sort(key=key)
        every = (*self._found.names, *self._found.special, *self._names)
        endings = {name.rpartition(".")[2] for name in every}  # a few, of 100,000 names
        self._found.last_parts.update(map(str.lower, endings))
        return self._found

    def _enter(self, name: str) -> None:
        """Take over the entries of a folder, once."""
        folder = os.path.join(self._root, name) if name else self._root
        status = _status(folder)
        if (status.st_dev, status.st_ino) in self._entered:
            return
        self._entered.add((status.st_dev, status.st_ino))
        with _listing_errors(folder), open_with_room(lambda: os.scandir(folder)) as found:
            entries = list(found)
        is_store = INDEX_NAME in [entry.name for entry in entries]
        if is_store and name:
            self._found.stores.append(f"{name}/{INDEX_NAME}")
            return
        self._names.append(name)
        before = f"{name}/" if name else ""
        others: list[os.DirEntry[str]] = []
        with _listing_errors(folder):  # the system tells the kind of an entry with its name, mostly
            for entry in entries:
                if entry.name.startswith(".") or entry.name == _OF_FILE_SYSTEM:
                    continue
                if entry.is_file(follow_symlinks=False):
                    self._found.names.append(before + entry.name)
                else:
                    others.append(entry)
        for entry in others:
            self._take(before + entry.name, entry.path, is_store)

    def _take(self, name: str, path: str, is_store: bool) -> None:
        """Take over an entry that is not a regular file: a folder, or a link."""
        is_link = os.path.islink(path)
        status = _status(path)
        if stat.S_ISREG(status.st_mode):
            self._found.names.append(name)
            self._found.links[name] = status.st_dev, status.st_ino
        elif not stat.S_ISDIR(status.st_mode):
            self._found.special.append(name)
        elif not is_store and not name.endswith(PARTIAL_SUFFIX):
            (self._linked if is_link else self._folders).append(name)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _order(name: str) -> list[str]:
    """Return the key by which names are sorted: as the names of folders and files, one after the other."""
    return name.split("/")


def _status(path: str | os.PathLike[str]) -> os.stat_result:
    """Return the status of the file or folder at a path; links are followed."""
    try:
        return os.stat(path)
    except FileNotFoundError as error:
        if not os.path.islink(path):
            raise NotFoundError(f"{os.fspath(path)}: no such file or folder") from error
        raise NotFoundError(
            f"{os.fspath(path)}: expected a link to a file or folder, found one to {os.readlink(path)}, which is not "
            "there; restore that, or remove the link"
        ) from error
    except OSError as error:
        raise _cannot_list(path, error) from error


@contextmanager
def _listing_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _cannot_list(path, error) from error


def _cannot_list(path: str | os.PathLike[str], error: OSError) -> UnavailableError:
    return UnavailableError(
        f"{os.fspath(path)}: expected a folder or file that can be listed, found {error.strerror or error}: ask for "
        "access, or name the files to read, so that none is left out unseen"
    )


def _require_read_once(folder: Path, names: Sequence[str], links: dict[str, _Inode]) -> None:
    """Raise `FormatError` for a link to a file that is read by another name too."""
    if links.keys().isdisjoint(names):
        return
    known: dict[_Inode, str] = {}
    for name in names:
        inode = links.get(name)
        if inode is None:
            status = _status(folder / name)
            inode = status.st_dev, status.st_ino
        other = known.setdefault(inode, name)
        if other != name and (name in links or other in links):
            link, file = (name, other) if name in links else (other, name)
            raise FormatError(
                f"{folder / link}: is a link to a file that is read as {folder / file} too: it would be read twice; "
                "remove the link"
            )


def files_at(looks: Iterable[Look], *suffixes: str) -> list[Path]:
    """Replace folders by the files in and below them, by path; `ConvertError` for none, or one named twice.

    Parameters
    ----------
    looks
        Looks at files, and at folders of them.
    suffixes
        The endings of the files in folders.
    """
    files: list[Path] = []
    for look in looks:
        path = look.path
        if not look.is_dir and not path.is_file():  # a FIFO would block for ever
            expected = "expected a file or folder, found neither" if path.exists() else "no such file or folder"
            raise ConvertError(f"{path}: {expected}")
        found = listed(look, *suffixes).files
        if not found:
            raise ConvertError(f"{path}: no {suffixes[0]} files in this folder, nor below it")
        files += found
    require_named_once(files)
    return files


def name_below(path: Path, file: Path) -> str:
    """Return the name of a file from a folder on, such as "part/0.npy"; one that is not below it has its own name.

    Parameters
    ----------
    path
        The folder, or another path that stands for the file.
    file
        The file.
    """
    text = os.fspath(file)
    folder = os.path.join(path, "")
    return text.removeprefix(folder) if text.startswith(folder) else file.name


def left_out_in_words(left_out: Sequence[Path]) -> str:
    """Return how many files are left out, and the first of them; "" for none."""
    if not left_out:
        return ""
    if len(left_out) == 1:
        return f"1 file is left out: {left_out[0]}"
    return f"{counted(len(left_out), 'file')} are left out, the first is {left_out[0]}"


def counts_of_left_out(left_out: Sequence[Path]) -> dict[str, Any]:
    """Return the same for programs; {} for none."""
    return {"files_left_out": len(left_out), "first_left_out": str(left_out[0])} if left_out else {}


def require_named_once(files: Iterable[Path], values: str = "tokens") -> None:
    """Raise `ConvertError` for a file that is named twice, also by another name of it: a link, or its folder.

    Parameters
    ----------
    files
        The files.
    values
        The values in them, for the message.
    """
    for path, count in Counter(file if is_url(file) else file.resolve() for file in files).items():
        if count > 1:
            raise ConvertError(f"{path}: is named {count} times; its {values} would be stored as often: name it once")
