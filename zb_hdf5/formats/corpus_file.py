"""A file of a corpus: its place, its tokens and its digests. It is not open; a corpus of many makes each when asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

from zb_hdf5.files.listing import name_below
from zb_hdf5.formats.flat_digest import FlatDigest
from zb_hdf5.spec import NO_SHA256, NOT_KNOWN


class CorpusFile(NamedTuple):
    """One file that holds tokens of a corpus.

    Attributes
    ----------
    folder
        The folder of the corpus.
    name
        The path of the file from there on, with "/" between parts; that of a growing shard ends in `.partial`.
    num_tokens
        Its tokens, of a growing shard as far as the index has them; -1: not known before it is open.
    sha256
        The digest of its tokens, stored or made; None: none is known before it is open.
    made
        The digests that were made of it, since it holds none; None: none were made.
    """

    folder: Path
    name: str
    num_tokens: int = NOT_KNOWN
    sha256: str | None = None
    made: FlatDigest | None = None

    def __repr__(self) -> str:
        size = "tokens not known" if self.num_tokens == NOT_KNOWN else f"{self.num_tokens:,} tokens"
        return f"{type(self).__name__}({str(self.path)!r}, {size}, sha256={(self.sha256 or '')[:16]!r})"

    @classmethod
    def at(cls, path: Path, file: Path, made: Mapping[str, FlatDigest]) -> Self:
        """Return a file that a look has found at a path: the file itself, or one in or below a folder.

        Parameters
        ----------
        made
            The digests that were made of the files at the path, by their names.
        """
        name = name_below(path, file)
        digest = made.get(name)
        folder = file.parent if name == file.name else path
        return cls(folder, name) if digest is None else cls(folder, name, digest.num_tokens, digest.sha256, digest)

    @property
    def path(self) -> Path:
        """The path of the file. It takes microseconds, so that a corpus of 100,000 files keeps none."""
        return self.folder / self.name


class CorpusFiles(Sequence[CorpusFile]):
    """The files of a corpus, in the order of their tokens, over the arrays of an index.

    Parameters
    ----------
    folder
        The folder of the corpus.
    names, num_tokens, sha256
        The facts of each file, as `CorpusFile` has them; a digest of zeros: none is stored.
    made
        Name -> the digests that were made of a file.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        num_tokens: Any,
        sha256: Sequence[str],
        made: Mapping[str, FlatDigest],
    ) -> None:
        self._folder = folder
        self._names = names
        self._num_tokens = num_tokens
        self._sha256 = sha256
        self._made = made

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, number: int) -> CorpusFile: ...

    @overload
    def __getitem__(self, number: slice) -> list[CorpusFile]: ...

    def __getitem__(self, number: int | slice) -> CorpusFile | list[CorpusFile]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        name = self._names[number]
        sha256: str | None = self._sha256[number]
        made = self._made.get(name)
        if sha256 == NO_SHA256:
            sha256 = None if made is None else made.sha256
        return CorpusFile(self._folder, name, int(self._num_tokens[number]), sha256, made)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._folder)!r}, {len(self):,} files)"
