"""The ways from a file of a format that is not read to one that is: words that end in a line to type."""

from __future__ import annotations

import json
import re
import shlex
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from zb_hdf5.errors import conversion_call
from zb_hdf5.files.paths import head_of

#: The magic, the version, the code of the dtype and the size of a chunk in the header of lit-gpt.
LITGPT_HEADER: Final = struct.Struct("<7sQBQ")
#: Code -> dtype of the ids; the codes 6 and 7 are of floats.
LITGPT_DTYPES: Final = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
#: The dtypes of integers of safetensors, as numpy spells them.
SAFETENSORS_DTYPES: Final = {
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
}
#: The bytes of a header of safetensors that are read, and the bytes of a table of text.
MAX_TENSORS_BYTES: Final = 1 << 20
CSV_BYTES: Final = 4096
#: A table that has numbers and nothing else.
NUMBERS_IN_CSV: Final = re.compile(rb"[\d\s,-]+")
#: The names of arrays that a message shows.
ARRAYS_SHOWN: Final = 5
#: The ending of compressed lines -> the modules that read them in Python, and the expression of the lines.
LINES_OF: Final = {
    ".gz": ("gzip, json", "gzip.open({path})"),
    ".zst": (
        "io, json, zstandard",
        'io.TextIOWrapper(zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(open({path}, "rb"), '
        'read_across_frames=True), "utf-8")',
    ),
}
#: The words for a format that has none.
NO_IDS: Final = "it has no ids: pass the files that have them"
#: The words for a format that only its own library reads.
BY_LIBRARY: Final = "write its ids with {name} as Parquet, JSON lines or .npy"


def statements_line(*statements: str) -> str:
    """Return the line for some statements of Python, whose texts stand in double quotes."""
    return shlex.join(["python", "-c", "; ".join(statements)])


def quoted(text: object) -> str:
    """Return a text as Python spells it in double quotes."""
    return json.dumps(str(text), ensure_ascii=False)


def array_line(path: Path, array: str, imported: str = "numpy") -> str:
    """Return the line that saves an array beside the file that has it."""
    return statements_line(f"import {imported}; numpy.save({quoted(f'{path}.npy')}, {array})")


def of_litgpt(path: Path) -> str:
    """Leave out the header."""
    head, _ = head_of(path, LITGPT_HEADER.size)
    code = head[15] if len(head) == LITGPT_HEADER.size else 0
    dtype = LITGPT_DTYPES.get(code, "uint16")
    call = conversion_call(path, "stream", source_dtype=dtype, skip_bytes=LITGPT_HEADER.size, tokens_only=True)
    return f"its ids follow a header: {call}"


def of_zip(path: Path) -> str:
    """Save an array of numpy, or a tensor of torch; or take the files out of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        names = []
    arrays = [name.removesuffix(".npy") for name in names if name.endswith(".npy")]
    if arrays:
        shown = ", ".join(arrays[:ARRAYS_SHOWN])
        array = f"numpy.load({quoted(path)})[{quoted(arrays[0])}]"
        return f"save one of its arrays ({shown}) as .npy: {array_line(path, array)}"
    if any(name.endswith("/data.pkl") for name in names):
        return of_torch(path)
    folder = f"{path}.files"
    return f"take its files out of it: {shlex.join(['python', '-m', 'zipfile', '-e', str(path), folder])}"


def of_torch(path: Path) -> str:
    """Save the tensor."""
    array = f"torch.load({quoted(path)}, weights_only=True).numpy()"
    return f"if it is a tensor, save it as .npy: {array_line(path, array, 'numpy, torch')}"


def of_pickle(path: Path) -> str:
    """Save the array, which runs the code of the pickle."""
    array = f"pickle.load(open({quoted(path)}, {quoted('rb')}))"
    return (
        f"it runs code when it is loaded; if you trust it, save it as .npy: {array_line(path, array, 'numpy, pickle')}"
    )


def of_safetensors(path: Path) -> str:
    """Save the first tensor of integers."""
    found: dict[str, Any] = {}
    head, _ = head_of(path, MAX_TENSORS_BYTES)
    length = int.from_bytes(head[:8], "little")
    try:
        found = json.loads(head[8 : 8 + length])
        name = next(key for key, each in found.items() if each.get("dtype") in SAFETENSORS_DTYPES)
        start, stop = found[name]["data_offsets"]
        dtype = SAFETENSORS_DTYPES[found[name]["dtype"]]
        size = int(dtype[-1])
        array = (
            f"numpy.fromfile({quoted(path)}, {quoted(dtype)}, {(stop - start) // size}, "
            f"offset={8 + length + start}).reshape({found[name]['shape']})"
        )
    except (ValueError, AttributeError, KeyError, TypeError, StopIteration, RecursionError):
        return "save a tensor of its ids as .npy, with safetensors.numpy.load_file and numpy.save"
    return f"save its tensor {name!r} as .npy: {array_line(path, array)}"


def of_packed(program: str) -> Callable[[Path], str]:
    """Return the way of files that a program has compressed: unpack them."""

    def way(path: Path) -> str:
        words = [program, "-dk", str(path)]
        return f"unpack it: {shlex.join(words)}"

    return way


def of_tar(path: Path) -> str:
    """Take the files out of it, into a folder."""
    folder = shlex.quote(f"{path}.files")
    return f"take its files out of it: mkdir {folder} && tar -xf {shlex.quote(str(path))} -C {folder}"


def of_7z(path: Path) -> str:
    """Take the files out of it, into a folder."""
    return f"take its files out of it: {shlex.join(['7z', 'x', str(path), f'-o{path}.files'])}"


def no_ids(_: Path) -> str:
    """Name the other files: this one has no ids."""
    return NO_IDS


def of_sidecar(path: Path) -> str:
    """Name the file that has the ids."""
    return f"pass {path.with_suffix('')}"


def of_its_library(name: str) -> Callable[[Path], str]:
    """Return the way of files that only a library of their own reads."""
    return lambda path: BY_LIBRARY.format(name=name)


def of_json(path: Path) -> str:
    """Save the array."""
    return f"save it as .npy: {array_line(path, f'json.load(open({quoted(path)}))', 'numpy, json')}"


def of_csv(path: Path) -> str:
    """Write JSON lines: lists of ids if it has numbers alone, else an object of each row."""
    head, _ = head_of(path, CSV_BYTES)
    delimiter = ', delimiter="\\t"' if path.suffix == ".tsv" else ""
    if NUMBERS_IN_CSV.fullmatch(head):
        row, reader = '{"input_ids": [*map(int, row)]}', "reader"
    else:
        row, reader = "row", "DictReader"
    code = f"import csv, json; [print(json.dumps({row})) for row in csv.{reader}(open({quoted(path)}){delimiter})]"
    return f"write it as JSON lines: {statements_line(code)} > {shlex.quote(f'{path}.jsonl')}"


def of_chats(path: Path, column: str) -> str:
    """Write the text of each chat with the marks of ChatML."""
    imported, lines = LINES_OF.get(path.suffix.lower(), ("json", "open({path})"))
    rows = f"map(json.loads, {lines.format(path=quoted(path))})"
    if path.suffix == ".parquet":
        imported, rows = "json, pyarrow.parquet", f"pyarrow.parquet.read_table({quoted(path)}).to_pylist()"
    chat = '"".join("<|im_start|>" + each["role"] + "\\n" + each["content"] + "<|im_end|>\\n"'
    texts = f'{{"text": {chat} for each in row[{quoted(column)}])}}'
    line = statements_line(f"import {imported}; [print(json.dumps({texts})) for row in {rows}]")
    return (
        f"column {column!r} has chats; examples/finetune_chat.py makes tokens and a loss mask of them; or write their "
        f"text, such as that of ChatML: {line} > {shlex.quote(f'{path}.text.jsonl')}"
    )


def of_text(path: Path) -> str:
    """Tokenize it."""
    named = {} if path.suffix == ".txt" else {"source_format": "text"}
    return f"tokenize it: {conversion_call(path, 'stream', **named, tokenizer='byte')}"
