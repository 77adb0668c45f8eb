"""Batches and documents that are told by their numbers; programs import them as well."""

import numpy as np

#: The fields whose values `fields_of` makes.
FIELDS = {"mask": "u1", "pair": ("<u4", (2,))}


def numbered_batches(first, count, shape):
    """Return batches `first`, `first + 1`, ...: each is told by its number alone."""
    numbers = np.arange(first, first + count).reshape(-1, 1, 1)
    return (numbers * 31 + np.arange(shape[0] * shape[1]).reshape(shape)) % 65536


def documents_of(first, count, length):
    """Return the tokens of documents `first`, `first + 1`, ..., one after the other."""
    numbers = np.repeat(np.arange(first, first + count), length)
    return (numbers * 31 + np.arange(len(numbers)) % length) % 65536


def fields_of(tokens):
    """Return the values of two fields: each is told by its token alone."""
    return {"mask": (tokens * 7 % 251).astype("u1"), "pair": np.stack([tokens * 3, tokens], -1).astype("u4")}
