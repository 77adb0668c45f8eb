"""The memory of steps: nothing that somebody still has is filled again, whatever keeps it; the rest is."""

import os
import pickle
import threading

import numpy as np
import pytest
import torch

from zb_hdf5.files.large_array import AFTER_PAGE
from zb_hdf5.loaders import step_memory
from zb_hdf5.loaders.step_memory import LEAST_BYTES, MOST_KEPT, StepMemory

F2 = np.dtype("f2")
SHAPE = (8, LEAST_BYTES // 8)


def place_of(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array,
        lambda array: array[3:, 5:7],
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[1].view(torch.int16),
        lambda array: torch.from_numpy(array).untyped_storage(),
        lambda array: memoryview(array.view(np.uint8)),
    ],
    ids=["array", "slice", "tensor", "view of a tensor", "storage", "buffer"],
)
def test_memory_that_somebody_has_is_not_given_again(keep):
    memory = StepMemory()
    array = memory.array(SHAPE, F2)
    place = place_of(array)
    kept = keep(array)
    del array
    others = [memory.array(SHAPE, F2) for _ in range(3)]
    assert place not in map(place_of, others)
    assert len({*map(place_of, others)}) == 3
    del kept
    assert place_of(memory.array(SHAPE, F2)) == place


def test_memory_is_filled_again_also_for_fewer_values_of_another_dtype():
    memory = StepMemory()
    place = place_of(memory.array(SHAPE, F2))
    assert place_of(memory.array((LEAST_BYTES,), np.dtype("u1"))) == place
    larger = memory.array((SHAPE[0] * 2, SHAPE[1]), F2)
    assert larger.flags.writeable
    assert larger.flags.c_contiguous
    assert (larger.shape, larger.dtype) == ((SHAPE[0] * 2, SHAPE[1]), F2)
    assert place_of(larger) % os.sysconf("SC_PAGE_SIZE") == AFTER_PAGE
    larger[...] = 1  # all of it is memory


def test_few_arrays_are_kept():
    memory = StepMemory()
    many = [memory.array(SHAPE, F2) for _ in range(3 * MOST_KEPT)]
    places = {*map(place_of, many)}
    del many
    again = [memory.array(SHAPE, F2) for _ in range(MOST_KEPT)]
    assert {*map(place_of, again)} <= places
    assert not memory._kept


def test_threads_never_have_the_same_memory(monkeypatch):
    monkeypatch.setattr(step_memory, "LEAST_BYTES", 64)
    memory = StepMemory()
    wrong = []

    def work(number):
        for _ in range(2000):
            array = memory.array((4, 16), np.dtype("i4"))
            array[...] = number
            if (array != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_copy_has_no_memory():
    memory = StepMemory()
    memory.array(SHAPE, F2)
    assert len(memory._kept) == 1
    assert not pickle.loads(pickle.dumps(memory))._kept
