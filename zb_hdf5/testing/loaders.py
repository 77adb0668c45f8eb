"""What every loader must do, whatever it reads: the protocol of `TokenLoader`."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, StateError
from zb_hdf5.loaders.protocol import TokenLoader
from zb_hdf5.loaders.states import KINDS, STATE_VERSION
from zb_hdf5.testing.refusals import refuses

#: A new loader, at its begin.
Make: TypeAlias = Callable[[], TokenLoader]
#: A batch as arrays: one, inputs and targets, or those of a dictionary by their names.
Arrays: TypeAlias = tuple[npt.NDArray[Any], ...]


def check_loader(make: Make, *, steps: int = 4) -> None:
    """What every loader must do.

    Parameters
    ----------
    make
        Returns a new loader, at its begin, over the same data each time.
    steps
        How many batches are looked at: at least 2, and no more than it gives.
    """
    with make() as loader:
        assert isinstance(loader, TokenLoader)
        expected = taken(loader, steps)
    check_ways_to_the_next_batch(make, expected)
    check_length(make, expected)
    check_states(make, expected)
    check_refused_states(make, expected)
    check_epochs(make, expected)
    check_copies(make, expected)
    check_loader_closing(make)


def taken(batches: Iterable[Any], count: int) -> list[Arrays]:
    """Return the next batches, as copies."""
    found = [tuple(np.asarray(part).copy() for part in parts_of(batch)) for batch in islice(batches, count)]
    assert len(found) == count, f"expected {count} batches, found {len(found)}"
    return found


def parts_of(batch: Any) -> tuple[Any, ...]:
    if isinstance(batch, dict):
        return tuple(batch[name] for name in sorted(batch))
    return batch if isinstance(batch, tuple) else (batch,)


def assert_same(found: list[Arrays], expected: list[Arrays]) -> None:
    """Fail unless these are the same batches, in the same order."""
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert [part.dtype for part in batch] == [part.dtype for part in other]
        for part, same in zip(batch, other, strict=True):
            np.testing.assert_array_equal(part, same)


def check_ways_to_the_next_batch(make: Make, expected: list[Arrays]) -> None:
    """`iter`, `next` and `get_batch` give the same batches; each goes on where the one before has stopped."""
    steps = len(expected)
    for way in (next, lambda loader: loader.get_batch()):
        with make() as loader:
            assert_same(taken((way(loader) for _ in range(steps)), steps), expected)
    with make() as loader:
        first = taken([next(loader), loader.get_batch()], 2)
        assert_same(first, expected[:2])


def check_length(make: Make, expected: list[Arrays]) -> None:
    """A length is the number of batches of each iteration; without one, `len` is a TypeError."""
    with make() as loader:
        if not has_length(loader):
            with refuses(TypeError):
                len(loader)  # type: ignore[arg-type]
            return
        count: int = len(loader)  # type: ignore[arg-type]
        assert count >= len(expected)
        for _ in range(2):
            assert_same(taken(loader, count)[: len(expected)], expected)
            assert sum(1 for _ in loader) == count


def has_length(loader: TokenLoader) -> bool:
    try:
        len(loader)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def check_states(make: Make, expected: list[Arrays]) -> None:
    """A state is JSON, says its kind, counts what was given, and another loader goes on exactly there."""
    for done in range(len(expected)):
        with make() as loader:
            for _ in range(done):
                next(loader)
            state = loader.state_dict()
        assert json.loads(json.dumps(state)) == state
        assert state["kind"] in KINDS
        assert state["version"] == STATE_VERSION
        for force in (False, True):
            with make() as other:
                other.load_state_dict(json.loads(json.dumps(state)), force=force)
                assert other.state_dict() == state
                assert_same(taken(other, len(expected) - done), expected[done:])


def check_refused_states(make: Make, expected: list[Arrays]) -> None:
    """What is no state of such a loader is refused, also by force, and nothing is taken over."""
    with make() as loader:
        next(loader)
        state = loader.state_dict()
        others = [{**state, "kind": kind} for kind in (*KINDS, "none", None, 7) if kind != state["kind"]]
        no_states: list[Any] = [*others, None, [], "state", {}]
        for bad in no_states:
            for force in (False, True):
                with refuses(StateError, "state"):
                    loader.load_state_dict(bad, force=force)
        for bad in ({**state, "version": 1}, {**state, "more": 1}, {k: v for k, v in state.items() if k != "kind"}):
            with refuses(StateError, "state"):
                loader.load_state_dict(bad)
        assert loader.state_dict() == state
        assert_same(taken([next(loader)], 1), expected[1:2])


def check_epochs(make: Make, expected: list[Arrays]) -> None:
    """The epoch that is chosen again keeps its position; what is no epoch is refused."""
    with make() as loader:
        next(loader)
        loader.set_epoch(0)
        assert_same(taken([next(loader)], 1), expected[1:2])
        with refuses(ArgumentError, "epoch"):
            loader.set_epoch(-1)
        state = loader.state_dict()
        try:
            loader.set_epoch(1)
        except ArgumentError:  # it has one epoch
            assert loader.state_dict() == state
            return
        assert loader.state_dict() != state
        loader.set_epoch(0)
        assert_same(taken([next(loader)], 1), expected[:1])


def check_copies(make: Make, expected: list[Arrays]) -> None:
    """A pickled loader goes on where this one would: with the next batch."""
    with make() as loader:
        for done in range(len(expected)):
            with pickle.loads(pickle.dumps(loader)) as copy:
                assert copy.state_dict() == loader.state_dict()
                assert_same(taken([next(copy)], 1), expected[done : done + 1])
            assert_same(taken([next(loader)], 1), expected[done : done + 1])


def check_loader_closing(make: Make) -> None:
    """The block closes what was entered, in the middle of an iteration too; closing again does nothing."""
    loader = make()
    with loader as entered:
        assert entered is loader
        next(loader)
    loader.close()
