"""The marks of batches that were compared take little memory."""

import tracemalloc

from zb_hdf5.loaders.mapped_windows import MARKS_OF_PAGE, Marks


def test_marks_are_a_bit_each_and_made_on_demand():
    numbers = [0, 7, 8, MARKS_OF_PAGE - 1, MARKS_OF_PAGE, 10**9, 10**12]
    tracemalloc.start()
    marks = Marks()
    for number in numbers:
        assert number not in marks
        marks.add(number)
    assert tracemalloc.get_traced_memory()[0] < 5 * MARKS_OF_PAGE // 8
    tracemalloc.stop()
    assert all(number in marks for number in numbers)
    assert not any(number + 1 in marks for number in numbers if number + 1 not in numbers)
