"""The contracts of readers, writers and loaders, as functions: for the tests of a backend or a loader of your own.

Each takes what is to be checked and raises an AssertionError for what it does not do. They need no test framework;
with pytest, `pytest.register_assert_rewrite("zb_hdf5.testing")` before the import shows the values of a failure. They
are plain assertions, which `python -O` leaves out.

Examples
--------
>>> tokens = random_tokens(7, 3, 10)
>>> with my_reader(my_file(tokens)) as reader:                                        # doctest: +SKIP
...     check_reader(reader, tokens)
"""

from zb_hdf5.testing.loaders import check_loader
from zb_hdf5.testing.readers import (
    check_byte_order,
    check_closing,
    check_fields,
    check_pickling,
    check_read_only_buffers,
    check_reader,
    read_everything,
)
from zb_hdf5.testing.refusals import refuses
from zb_hdf5.testing.tokens import random_tokens
from zb_hdf5.testing.writers import check_writer, check_writer_of_fields

__all__ = [
    "check_byte_order",
    "check_closing",
    "check_fields",
    "check_loader",
    "check_pickling",
    "check_read_only_buffers",
    "check_reader",
    "check_writer",
    "check_writer_of_fields",
    "random_tokens",
    "read_everything",
    "refuses",
]
