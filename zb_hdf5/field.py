"""Fields: values that are aligned with the tokens, one value, or one small array, for each token."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Self, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ConvertError, require_choice

#: Names that a loader gives to its own values.
RESERVED_NAMES: Final = frozenset(
    {
        "tokens",
        "targets",
        "cu_seqlens",
        "max_seqlen",
        "seq_lens",
        "document_ids",
        "documents",
        "sources",
        "records",
        "spans",
        "span_index",
    }
)
#: The tokens in a structured array, or dtype, that has their fields as well.
TOKEN: Final = "token"
#: A field of this name has targets; this value is no target, as trainers have it.
LABELS: Final = "labels"
IGNORED_LABEL: Final = -100
#: A field of this name is 0 for tokens that are not targets.
LOSS_MASK: Final = "loss_mask"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
#: The things that may have a value each; a field that is stored with the tokens has one for each token.
UNITS: Final = ("token", "record", "document")
#: Numbers of 16 bits that neither numpy nor HDF5 has: stored as the integers of their bits.
BFLOAT16: Final = "bfloat16"
_BFLOAT16_NAN: Final = 0x7FC0
#: The field of a set of documents that has the codes of words.
CODE: Final = "code"
#: Between a field set and its field in the name of both: "teacher/logprobs".
SET_MARK: Final = "/"
#: Kinds of dtype that HDF5 and numpy both have, of a fixed size.
_KINDS: Final = "biufcS"


@dataclass(frozen=True, slots=True)
class Field:
    """One array that is aligned with the tokens.

    Attributes
    ----------
    name
        An identifier, and none of `RESERVED_NAMES`.
    dtype
        Type of one value: of a fixed size, also structured. As NumPy takes it, such as "uint8", or ("f4", (8,)), whose
        shape is then at the end of `shape`; the attribute is a `numpy.dtype`.
    shape
        Shape of the values of one token: () for one value, (8,) for a vector of 8.
    unit
        The thing that has these values: "token"; of a field set also "record" or "document".
    fill
        The value of padding, and of what is missing in a field set; None: 0, or -100 for labels.
    allow_nan
        False: a value that is NaN is refused when it is written.
    kind
        "bfloat16": the values are numbers of this type, whose bits the dtype, uint16, has. "": as the dtype has them.

    Raises
    ------
    ArgumentError
        If the name or the dtype cannot be stored.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    unit: str = UNITS[0]
    fill: float | None = None
    allow_nan: bool = True
    kind: str = ""

    def __post_init__(self) -> None:
        require_choice("unit", self.unit, UNITS)
        require_choice("kind", self.kind, ("", BFLOAT16))
        dtype = _dtype_of(self.name, self.dtype)
        object.__setattr__(self, "dtype", dtype.base)
        object.__setattr__(self, "shape", (*_shape_of(self.name, self.shape), *dtype.shape))
        if self.kind == BFLOAT16 and self.dtype != np.uint16:
            raise ArgumentError(f"field {self.name}: bfloat16 is stored as uint16, found {self.dtype}")
        if not is_field_name(self.name):
            raise ArgumentError(
                f"expected a name of letters, digits and _ for a field, none of {', '.join(sorted(RESERVED_NAMES))}; "
                f"found {self.name!r}"
            )
        if not _is_stored(self.dtype) or min(self.shape, default=1) < 1:
            raise ArgumentError(
                f"field {self.name}: expected numbers, truth values or bytes of a fixed size, found {self.dtype} "
                f"of shape {self.shape}"
            )

    @property
    def size(self) -> int:
        """Values of one token."""
        return prod(self.shape)

    @property
    def padding(self) -> npt.NDArray[Any]:
        """The value of padding, shape (): `fill`; without one 0, or -100 for labels, which no loss counts."""
        if self.fill is not None:
            return self.filled(self.fill)
        is_labels = self.name == LABELS and self.dtype.kind in "if"
        return np.full((), IGNORED_LABEL, self.dtype) if is_labels else np.zeros((), self.dtype)

    def filled(self, value: float) -> npt.NDArray[Any]:
        """Return a value as it is stored, shape (): of bfloat16 its bits.

        Raises
        ------
        ArgumentError
            If the dtype does not hold it.
        """
        if self.kind == BFLOAT16:
            bits = int(np.array(value, np.float32).view(np.uint32))
            rounded = bits + 0x7FFF + (bits >> 16 & 1)  # to nearest, ties to even, as torch rounds
            return np.array(_BFLOAT16_NAN if value != value else rounded >> 16, np.uint16)
        try:
            with np.errstate(all="ignore"):  # the error below names the value
                found = np.asarray(value).astype(self.dtype)
            is_float = self.dtype.kind in "fc"
            holds = bool(np.isfinite(found) == np.isfinite(value) if is_float else found == value)
        except (TypeError, ValueError, OverflowError):
            holds = False
        if not holds:
            raise ArgumentError(f"field {self.name}: expected a fill value of {self.dtype}, found {value!r}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the argument of `from_json`: what differs from the defaults is named."""
        plain = self.dtype.names is None
        dtype = self.dtype.str if plain else [list(part) for part in np.lib.format.dtype_to_descr(self.dtype)]
        found: dict[str, Any] = {"dtype": dtype, "shape": list(self.shape)}
        for name, usual in _USUAL.items():
            if getattr(self, name) != usual:
                found[name] = getattr(self, name)
        return found

    @classmethod
    def from_json(cls, name: str, value: Any) -> Self:
        """Return the field that an index describes. Raises `ArgumentError` if it describes none."""
        try:
            dtype = value["dtype"]
            shape = tuple(map(int, value["shape"]))
            found = np.dtype(dtype if isinstance(dtype, str) else [tuple(part) for part in dtype])
            others = {key: value[key] for key in _USUAL if key in value}
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"field {name!r}: expected dtype and shape, found {value!r}") from error
        return cls(name, found, shape, **others)

    def as_stored(self, values: npt.ArrayLike, tokens_shape: tuple[int, ...], what: object) -> npt.NDArray[Any]:
        """Return values as a C-contiguous array of shape `(*tokens_shape, *shape)` and the stored dtype.

        Parameters
        ----------
        values
            The values of each token.
        tokens_shape
            The shape of the tokens.
        what
            The store or the source, for messages.

        Raises
        ------
        ArgumentError
            If they have another shape, or a dtype of another kind.
        ConvertError
            If a value does not fit the stored dtype.
        """
        found = np.asarray(values)
        expected = (*tokens_shape, *self.shape)
        if found.shape != expected:
            raise ArgumentError(f"{what}: field {self.name}: expected shape {expected}, found {found.shape}")
        if not self.allow_nan and has_nan(found):
            raise ConvertError(f"{what}: field {self.name}: expected numbers, found NaN")
        if found.dtype == self.dtype:
            return np.ascontiguousarray(found)
        if not np.can_cast(found.dtype, self.dtype, "same_kind") and not {found.dtype.kind, self.dtype.kind} <= _COUNTS:
            raise ArgumentError(f"{what}: field {self.name}: expected {self.dtype}, found {found.dtype}")
        if self.dtype.names is not None:
            raise ArgumentError(f"{what}: field {self.name}: expected exactly {self.dtype}, found {found.dtype}")
        with np.errstate(over="ignore"):  # the error below names the value
            stored = np.ascontiguousarray(found.astype(self.dtype))
        lost = np.isfinite(found) & ~np.isfinite(stored) if self.dtype.kind in "fc" else stored != found
        if lost.any():
            bad = found.reshape(-1)[int(lost.reshape(-1).argmax())]
            raise ConvertError(f"{what}: field {self.name}: {bad} does not fit {self.dtype}")
        return stored


#: The fields of a call: a structured dtype, name -> dtype (of a value, or of a small array), or `Field`s.
Fields: TypeAlias = np.dtype[Any] | Mapping[str, Any] | Iterable[Field]
#: The bits of a float16 without its sign, and the bits of infinity: only NaN has larger ones.
_F2_MAGNITUDE: Final = np.uint16(0x7FFF)
_F2_INFINITY: Final = np.uint16(0x7C00)
#: The facts that a field seldom has, and their values where it has none.
_USUAL: Final = {"unit": UNITS[0], "fill": None, "allow_nan": True, "kind": ""}
#: Kinds of whole numbers and truth values: casts between these are checked value by value.
_COUNTS: Final = frozenset("iub")


def _is_stored(dtype: np.dtype[Any]) -> bool:
    if dtype.names is not None:
        return all(_is_stored(dtype[name].base) for name in dtype.names)
    return dtype.kind in _KINDS and dtype.itemsize > 0 and dtype.isnative


def has_nan(values: npt.NDArray[Any]) -> bool:
    """Return whether some values are NaN. Those of 16 bits are compared as integers, in a tenth of the time."""
    if values.dtype == np.float16 and values.flags.c_contiguous:
        bits = values.reshape(-1).view(np.uint16) & _F2_MAGNITUDE
        return bool(bits.max(initial=0) > _F2_INFINITY)
    return values.dtype.kind in "fc" and bool(np.isnan(values).any())


def is_field_name(name: str) -> bool:
    """Return whether a field may have this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and name not in RESERVED_NAMES


def parse_fields(fields: Fields | None) -> tuple[Field, ...]:
    """Return the fields that a call names, in the order of their names.

    Parameters
    ----------
    fields
        A structured dtype, names and dtypes, or `Field`s; None: no fields.
    """
    if fields is None:
        return ()
    if isinstance(fields, np.dtype):
        if fields.names is None:
            raise ArgumentError(f"fields: expected a structured dtype, or names and dtypes; found {fields}")
        fields = {name: fields[name] for name in fields.names if name != TOKEN}
    found = [Field(name, dtype) for name, dtype in fields.items()] if isinstance(fields, Mapping) else list(fields)
    if others := [field for field in found if not isinstance(field, Field)]:
        raise ArgumentError(f"fields: expected names and their dtypes, found {others[0]!r} without a dtype")
    names = [field.name for field in found]
    if len(set(names)) != len(names):
        raise ArgumentError(f"fields: expected each name once, found {', '.join(names)}")
    return tuple(sorted(found, key=lambda field: field.name))


def _dtype_of(name: object, described: npt.DTypeLike) -> np.dtype[Any]:
    """Return what NumPy takes for a dtype as one; `ArgumentError` with the name of the field if it is none."""
    try:
        return np.dtype(described)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"field {name}: expected a dtype, found {described!r}: {error}") from error


def _shape_of(name: object, shape: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Return the shape of the values of a token; `ArgumentError` with the name of the field if it is none."""
    try:
        return tuple(map(operator.index, shape))
    except TypeError as error:
        raise ArgumentError(f"field {name}: expected a shape such as (8,), found {shape!r}") from error
