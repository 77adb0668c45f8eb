"""One option of a conversion: its words, the kind of its values, and who takes it, with which default."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Final, NamedTuple

from zb_hdf5.errors import ArgumentError
from zb_hdf5.read_as import ARGUMENTS
from zb_hdf5.store.format_list import batch_format, document_targets, format_named

#: The smallest value of each kind of numbers.
LEAST: Final[Mapping[str, int]] = {"positive": 1, "size": 1, "natural": 0}


class Role(StrEnum):
    """A part that a source plays in a conversion. A kind of source has several, and takes the options of all."""

    #: Any source, for any target.
    ANY = auto()
    #: Any source that becomes batches.
    BATCHES = auto()
    #: Ids that are cut into records, and shuffled.
    ARRAYS = auto()
    #: HDF5 files of other programs.
    FOREIGN = auto()
    #: Batches as a store has them.
    STORES = auto()
    #: HDF5 files, be they stores or of other programs: the help has words for both.
    ANY_HDF5 = auto()
    #: Files that may have no header.
    HEADERLESS = auto()
    #: Files that tell documents apart.
    DOCUMENTS = auto()
    #: Documents that become rows of one length.
    ROWS = auto()
    #: Documents, some of which may be held out.
    HELD_OUT = auto()
    #: One token stream, whose documents become rows where it lies; all other documents become a stream first.
    STREAM = auto()
    #: Token streams whose documents are kept.
    KEPT = auto()
    #: Rows of ids in files of another trainer, whose format names the options that it takes.
    IDS = auto()
    #: Texts, which are tokenized.
    TEXTS = auto()
    #: Texts in columns, or below keys.
    COLUMNS = auto()
    #: Texts in lines.
    LINES = auto()


class Taking(NamedTuple):
    """An option as some sources take it.

    Attributes
    ----------
    roles
        The roles that take it so.
    default
        Its value, unless another is given; None: it depends on the data.
    words
        The default in the help; "": it is not named there. None: the default itself.
    choices
        The values that are taken; (): all of its kind.
    required
        Whether it has to be given.
    """

    roles: tuple[Role, ...]
    default: Any = None
    words: str | None = None
    choices: tuple[str, ...] = ()
    required: bool = False


def by(
    *roles: Role, default: Any = None, words: str | None = None, choices: tuple[str, ...] = (), required: bool = False
) -> Taking:
    """Return how some roles take an option. See `Taking`."""
    return Taking(roles, default, "" if words is None and default is None else words, choices, required)


class Pair:
    """A kind of source and a target, and what the options of their conversion depend on.

    Parameters
    ----------
    roles
        Those of the source.
    target
        The name of a target.
    """

    def __init__(self, roles: Collection[Role], target: str) -> None:
        self.roles = roles
        self._target = target
        self._row = batch_format(target)
        #: Whether the target is a format of another trainer, which has documents.
        self.is_of_trainer = target in document_targets()

    @property
    def is_stream(self) -> bool:
        """Whether documents are kept, and do not become rows."""
        return self._row is None

    @property
    def default_dtype(self) -> str:
        """The dtype of new tokens of the target; "auto": the smaller one that fits."""
        return "auto" if self._row is None else self._row.default_dtype

    def always(self) -> bool:
        """Return that an option applies."""
        return True

    def has_a_codec(self) -> bool:
        """Return whether the target is more than plain tokens."""
        return self._row is None or not self._row.tokens_only

    def has_an_index(self) -> bool:
        """Return whether a folder of the target is a store."""
        return self._row is None or self._row.holds_batches

    def may_grow(self) -> bool:
        """Return whether others may read the batches of the target while it is written."""
        return self._row is not None and not self._row.tokens_only and Role.DOCUMENTS not in self.roles

    def makes_batches(self) -> bool:
        """Return whether records are joined or shuffled; each may be a document of another trainer instead."""
        return not self.is_of_trainer or Role.ARRAYS not in self.roles or Role.STORES in self.roles

    def takes_memory(self) -> bool:
        """Return whether memory is bounded, or decides a shuffle; documents that become other files are not held."""
        if self.is_of_trainer and may_be_bounded(self.roles):
            return format_named(self._target).is_flat
        return self.makes_batches()

    def may_leave_fields(self) -> bool:
        """Return whether fields and documents are left behind where that is asked for."""
        if self._row is not None and self._row.tokens_only:
            return True
        takes_files_whole = self._row is None and Role.KEPT in self.roles  # where no documents are told apart
        drops_fields = Role.FOREIGN in self.roles and Role.ARRAYS in self.roles
        return drops_fields or self.is_of_trainer or takes_files_whole

    def may_have_sets(self) -> bool:
        """Return whether the target is a store of records, with which field sets may lie."""
        return self._row is not None and self._row.holds_batches

    def has_shards_of_a_size(self) -> bool:
        """Return whether the size of the result is known before it is written."""
        return not is_staged(self.roles)

    def is_shared_out(self) -> bool:
        """Return whether each of several jobs may write a part: rows are cut from all documents together."""
        return not is_staged(self.roles) or self._row is None or Role.TEXTS in self.roles


def is_staged(roles: Collection[Role]) -> bool:
    """Return whether the documents of a source become a stream before they become rows."""
    return Role.DOCUMENTS in roles and Role.STREAM not in roles


def may_be_bounded(roles: Collection[Role]) -> bool:
    """Return whether the memory of a conversion of documents can be told before its work."""
    return Role.STREAM in roles or Role.KEPT in roles


@dataclass(frozen=True)
class Option:
    """An option of a conversion. Its name, its group and its type come from a field of a class of options.

    Parameters
    ----------
    kind
        The kind of its values: "positive", "natural", "fraction", "share", "size", "text", "tokenizer", "names",
        "channels", "codec", "range", "store" or "flag"; or the words that may be given; or such words, and the value
        that each stands for.
    help
        One or two sentences.
    takers
        How each role takes it that does. The last of the roles of a source decides.
    where
        Whether it applies to a pair of a source that takes it and a target.
    instead_of
        Another option: only one of the two may be given.
    of_trainers
        Whether it applies where files of another trainer are written.
    of_live
        Whether it applies to a live store, which one process writes into a new folder.
    group
        Its group in the help.
    """

    kind: str | tuple[str, ...] | Mapping[str, Any]
    help: str
    takers: Mapping[Role, Taking]
    where: Callable[[Pair], bool]
    instead_of: str
    of_trainers: bool
    of_live: bool
    group: str = ""

    def taking(self, roles: Sequence[Role]) -> Taking | None:
        """Return how a source of some roles takes it; None if it does not."""
        return next((self.takers[role] for role in reversed(roles) if role in self.takers), None)

    def applies(self, pair: Pair) -> bool:
        """Return whether it applies to a target, of a source that takes it."""
        return self.where(pair) and (self.of_trainers or not pair.is_of_trainer)

    def words_of(self, taking: Taking) -> str:
        """Return the words for a default in the help; "": it has none there, as a flag has none."""
        if self.kind == "flag":
            return ""
        if taking.words is not None:
            return taking.words
        if isinstance(self.kind, Mapping):
            return next(word for word, value in self.kind.items() if value == taking.default)
        return str(taking.default)

    def value_of(self, word: Any) -> Any:
        """Return the value that is given on the command line: some words stand for one."""
        return self.kind[word] if isinstance(self.kind, Mapping) else word

    def require(self, name: str, value: Any) -> None:
        """Raise `ArgumentError` for a value that is not of this kind."""
        least = LEAST.get(str(self.kind))
        if least is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise ArgumentError(f"{name} must be a whole number, found {value!r}", options=[name])
        if least is not None and value < least:
            raise ArgumentError(f"{name} must be at least {least}, found {value}", options=[name])
        if self.kind == "share" and not 0 <= value <= 1:
            raise ArgumentError(f"{name} must be from 0 to 1, found {value}", options=[name])
        possible: list[Any] = []
        if isinstance(self.kind, tuple):
            possible = list(self.kind)
        elif isinstance(self.kind, Mapping):
            possible = list(self.kind.values())
        if possible and value not in possible:
            words = ", ".join(map(str, possible))
            raise ArgumentError(f"{name} must be one of {words}, found {value!r}", options=[name])


def option(
    kind: str | tuple[str, ...] | Mapping[str, Any],
    text: str,
    *takers: Taking,
    where: Callable[[Pair], bool] = Pair.always,
    instead_of: str = "",
    of_trainers: bool = True,
    of_live: bool = True,
) -> Any:
    """Return a field that declares an option, as `Option` has it; its default is that of its first taker."""
    by_role = {role: taking for taking in takers for role in taking.roles}
    declared = Option(kind, text, by_role, where, instead_of, of_trainers, of_live)
    return field(default=takers[0].default, metadata={"option": declared})


def read_as_option(name: str, *takers: Taking) -> Any:
    """Return a field that declares an option by the argument of `ReadAs` of this name, whose words it has."""
    argument = ARGUMENTS[name]
    named = [each._replace(words=each.words or argument.words) for each in takers]
    return option(argument.kind, argument.help, *named)
