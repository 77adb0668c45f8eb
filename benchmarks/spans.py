"""How much slower a step is when it also reads spans, documents or a field, and how much slower spans are to write.

Windows of 4,096 tokens of a stream whose documents have 20 spans of 160 bytes each; and batches of 32 x 512 of packed
documents. All rows run in short turns in one process, page cache warm; ratios are of pairs of the same turn. Rates are
per second of this process's CPU time, of all its threads, so that a busy machine changes them less; those with prefetch
per second of the clock. The bars:

- windows with their spans, with `prefetch`, reach 0.5 of windows alone, and 100 times a loop of one seek and read for
  each span: from the page cache, and from a server that answers 20 ms late;
- writing documents with spans reaches 0.7 of writing them without;
- `documents=True` reaches 0.6 of tokens alone, with `document_ids` and `position_ids` 0.2; a field of the same size
  reaches 0.45.

The project that this package learned from reports 45 batches per second with a seek for each span, and 6,508 with two
reads for each batch, on 12 cores (EPYC 7J13). It began with a loop in Python over the ids of all tokens that opens two
files for each span; such a loop is a row too.
"""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.measure import (
    BATCH_SIZE,
    SEQ_LEN,
    Bar,
    Spread,
    bar_plot,
    machine,
    machine_line,
    markdown_table,
    say_progress,
    verdict,
    warm,
)
from benchmarks.remote import DELAY_S, ECHO, serve
from zb_hdf5 import HDF5ShardWriter, Loader, open_writer
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.formats.pieces import PiecesWriter

WINDOW: Final = 4096
SPANS: Final = 20
VALUE_BYTES: Final = 160
#: A span as the loops read it: its start and its stop, and its value.
RECORD_BYTES: Final = 16 + VALUE_BYTES
#: A token, and the number of its span.
PAIR: Final = np.dtype([("token", "<u2"), ("span", "<u4")])
NO_SPAN: Final = 2**32 - 1
#: Tokens of a document of the batches.
DOCUMENT_TOKENS: Final = 500
REPORTED: Final = "reported by the seed on 12 cores: 45 batches/s with a seek for each span, 6,508 with two reads"
PREFETCH: Final = 4
#: Row -> the row that it is compared with, and the least share of its rate.
BARS: Final = {
    "spans": ("windows", None),
    "spans, prefetch": ("windows, prefetch", 0.5),
    "spans, seek and read each": ("windows", None),
    "spans, a loop over the tokens": ("windows", None),
    "cu_seqlens": ("batches", 0.6),
    "document_ids, position_ids": ("batches", 0.2),
    "field": ("batches", 0.45),
    "write with spans": ("write", 0.7),
    "write with spans, as JSON": ("write", None),
}
#: Of "spans, prefetch" over the loop.
SEEK_BAR: Final = 100.0


def measure(folder: Path, *, quick: bool, repeats: int | None) -> dict[str, Any]:
    """Measure all rows in turn; steps, or documents written, per second."""
    documents = 40 if quick else 4000
    write_stream(folder / "stream.h5", documents)
    write_batches(folder / "batches.h5", 64 if quick else 1024)
    warm(folder)
    ways = _reading(folder) | _writing(folder, 40 if quick else 2000)
    far = _far(folder, *((1, 40) if quick else (5, 2000)))
    steps = 5 if quick else 60
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats or (1 if quick else 41)):
        for name, way in ways.items():
            say_progress(f"{name}, round {number + 1}")
            clock = time.perf_counter if "prefetch" in name else time.process_time
            start_s = clock()
            count = way(steps)
            rates[name].append(count / (clock() - start_s))
    rows = []
    for name, found in rates.items():
        other, bar = BARS.get(name, (name, None))
        ratios = [a / b for a, b in zip(found, rates[other], strict=True)]
        row = {"name": name, "beside": other, "bar": bar, "per_s": Spread.quartiles(found).as_json()}
        rows.append({**row, "ratio": Spread.quartiles(ratios).as_json()})
    pairs = zip(rates["spans, prefetch"], rates["spans, seek and read each"], strict=True)
    seeks = Spread.quartiles([a / b for a, b in pairs]).as_json()
    about = {"machine": machine(), "machine_line": machine_line()}
    return {"benchmark": "spans", **about, "quick": quick, "rows": rows, "over_seeks": seeks, "far": far}


# --- data --------------------------------------------------------------------------------------------------------


def spans_of(number: int) -> list[tuple[int, int, str]]:
    """Return the spans of a document."""
    starts = range(0, WINDOW - WINDOW // SPANS, WINDOW // SPANS)
    return [(start, start + 100, f"{number:08}{start:08}".ljust(VALUE_BYTES, "x")) for start in starts]


def write_stream(path: Path, count: int) -> None:
    """Write documents of a window each, and beside them tokens and spans again as the loops read them."""
    with (
        HDF5ShardWriter(path, spans_codec="str") as writer,
        open(path.with_suffix(".values"), "wb") as values,
        open(path.with_suffix(".pairs"), "wb") as pairs,
    ):
        for number in range(count):
            pair = np.empty(WINDOW, PAIR)
            pair["token"], pair["span"] = _document(number), NO_SPAN
            writer.write_document(pair["token"], spans=spans_of(number))
            for place, (start, stop, value) in enumerate(spans_of(number), number * SPANS):
                pair["span"][start:stop] = place
                values.write(struct.pack("<QQ", number * WINDOW + start, number * WINDOW + stop) + value.encode())
            pairs.write(pair.tobytes())
    np.arange(0, (count * SPANS + 1) * RECORD_BYTES, RECORD_BYTES, "<u8").tofile(path.with_suffix(".ends"))


def _document(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 50_257, WINDOW).astype("<u2")


def write_batches(path: Path, count: int) -> None:
    """Write packed documents of `DOCUMENT_TOKENS` with their pieces, and a field of the dtype of the tokens."""
    shape = (count, BATCH_SIZE, SEQ_LEN)
    tokens = np.random.default_rng(1).integers(0, 50_257, shape).astype("<u2")
    with open_writer(
        path, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, dtype="uint16", expected_batches=count, fields={"field": "<u2"}
    ) as writer:
        writer.write(tokens, {"field": tokens})
        sha256 = writer.sha256()
    starts = np.union1d(np.arange(0, tokens.size, SEQ_LEN), np.arange(0, tokens.size, DOCUMENT_TOKENS))
    ends = starts.searchsorted(np.arange(0, tokens.size + 1, SEQ_LEN))
    pieces = PiecesWriter(path)
    pieces.append(Pieces(ends, (starts % SEQ_LEN).astype(np.uint32), starts.astype(np.uint64), SEQ_LEN))
    pieces.publish(SEQ_LEN, "train", sha256)


# --- ways --------------------------------------------------------------------------------------------------------


def _reading(folder: Path) -> dict[str, Callable[[int], int]]:
    whole = {"seed": 1, "rank": 0, "world_size": 1}
    windows = {"batch_size": 1, "seq_len": WINDOW, **whole}
    documents = ("document_ids", "position_ids")
    loaders = {
        "windows": Loader(folder / "stream.h5", prefetch=0, **windows),
        "spans": Loader(folder / "stream.h5", prefetch=0, spans=True, **windows),
        "windows, prefetch": Loader(folder / "stream.h5", prefetch=PREFETCH, **windows),
        "spans, prefetch": Loader(folder / "stream.h5", prefetch=PREFETCH, spans=True, **windows),
        "batches": Loader(folder / "batches.h5", prefetch=0, **whole),
        "cu_seqlens": Loader(folder / "batches.h5", prefetch=0, documents=True, **whole),
        "document_ids, position_ids": Loader(folder / "batches.h5", prefetch=0, documents=documents, **whole),
        "field": Loader(folder / "batches.h5", prefetch=0, fields=("field",), **whole),
    }
    ways = {name: lambda steps, loader=loader: _steps(loader, steps) for name, loader in loaders.items()}
    plain = Loader(folder / "stream.h5", prefetch=0, **windows)
    return {
        **ways,
        "spans, seek and read each": lambda steps: _seeks(plain, folder / "stream.values", steps),
        "spans, a loop over the tokens": lambda steps: _opens(folder / "stream", steps // 5),
    }


def _steps(loader: Loader, steps: int) -> int:
    for _ in range(steps):
        loader.get_batch()
    return steps


def _seeks(loader: Loader, path: Path, steps: int) -> int:
    """Read windows, and each of their spans by a seek and a read."""
    order = _shuffled_windows(path)
    with open(path, "rb", buffering=0) as values:
        for number in order[:steps].tolist():
            loader.get_batch()
            found = []
            for span in range(number * SPANS, (number + 1) * SPANS):
                values.seek(span * RECORD_BYTES)
                data = values.read(RECORD_BYTES)
                found.append((*struct.unpack_from("<QQ", data), data[16:].decode()))
    return min(steps, len(order))


def _shuffled_windows(values: Path) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).permutation(values.stat().st_size // RECORD_BYTES // SPANS)


def _opens(path: Path, steps: int) -> int:
    """Look at the span of each token, one by one, and open two files for each new one."""
    order = _shuffled_windows(path.with_suffix(".values"))
    for number in order[:steps].tolist():
        with open(path.with_suffix(".pairs"), "rb") as stream:
            stream.seek(number * WINDOW * PAIR.itemsize)
            pairs = np.frombuffer(stream.read(WINDOW * PAIR.itemsize), PAIR)
        torch.from_numpy(pairs["token"].astype(np.int64))
        spans, index, values, before = pairs["span"], np.empty(WINDOW, np.int32), list[str](), NO_SPAN
        for place in range(WINDOW):
            span = spans[place]
            if span != before and span != NO_SPAN:
                values.append(_look_up(path, int(span)))
            before, index[place] = span, -1 if span == NO_SPAN else len(values) - 1
    return min(steps, len(order))


def _look_up(path: Path, span: int) -> str:
    with open(path.with_suffix(".ends"), "rb") as ends:
        ends.seek(8 * span)
        start, stop = struct.unpack("<QQ", ends.read(16))
    with open(path.with_suffix(".values"), "rb") as values:
        values.seek(start)
        return values.read(stop - start)[16:].decode()


def _far(folder: Path, few: int, many: int) -> dict[str, float] | None:
    """Read from a server that answers late: steps per second of the clock, of a loop of reads, and of a loader.

    The loader is opened anew, which fetches the table of the documents whole.
    """
    nginx = shutil.which("nginx", path=f"{os.defpath}:/usr/sbin:/sbin")
    if nginx is None or not ECHO.exists():
        return None
    import obstore

    folder.chmod(0o755)
    with serve(nginx, folder, "127.0.0.1", 8392, [], late=True) as url:
        base = url.rsplit("/", 1)[0]
        server = obstore.store.from_url(base, client_options={"allow_http": True})
        start_s = time.perf_counter()
        for number in range(few):
            obstore.get_range(server, "stream.pairs", start=number * WINDOW * 2, length=WINDOW * 2)
            for span in range(number * SPANS, (number + 1) * SPANS):
                bytes(obstore.get_range(server, "stream.values", start=span * RECORD_BYTES, length=RECORD_BYTES))
        each = few / (time.perf_counter() - start_s)
        start_s = time.perf_counter()
        loader = Loader(f"{base}/stream.h5", batch_size=1, seq_len=WINDOW, seed=1, rank=0, world_size=1, spans=True)
        _steps(loader, many)
        together = many / (time.perf_counter() - start_s)
        loader.close()
    return {"each": each, "together": together}


def _writing(folder: Path, count: int) -> dict[str, Callable[[int], int]]:
    documents = [_document(number) for number in range(count)]
    spans: list[Any] = [spans_of(number) for number in range(count)]
    objects = [[(start, stop, {"concept": value[:146]}) for start, stop, value in each] for each in spans]

    def write(values: list[Any], codec: str) -> int:
        with HDF5ShardWriter(folder / "written.h5", overwrite=True, spans_codec=codec) as writer:
            for document, each in zip(documents, values, strict=True):
                writer.write_document(document, spans=each)
        return count

    return {
        "write": lambda _: write([()] * count, "str"),
        "write with spans": lambda _: write(spans, "str"),
        "write with spans, as JSON": lambda _: write(objects, "json"),
    }


# --- report ------------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Return the table and the bars, as markdown."""
    quick = result["quick"]
    table = [
        [row["name"], Spread(**row["per_s"]).text(), "" if row["beside"] == row["name"] else
         f"{Spread(**row['ratio']).text(2)} of {row['beside']}"]
        for row in result["rows"]
    ]  # fmt: skip
    lines = [
        f"## Windows of {WINDOW:,} tokens with {SPANS} spans of {VALUE_BYTES} bytes, batches of {BATCH_SIZE} x "
        f"{SEQ_LEN}",
        f"{result['machine_line']}. Interleaved; median (quartiles) of steps, or documents written, per second "
        "of CPU time; with prefetch, of the clock.",
        f"For comparison, {REPORTED}.",
        "",
        markdown_table(("row", "per second", "ratio"), table),
        "",
    ]
    for row in result["rows"]:
        if row["bar"]:
            met = verdict(row["ratio"]["median"] >= row["bar"], quick)
            lines.append(f"- {row['name']}: {row['ratio']['median']:.2f} of {row['beside']}, bar {row['bar']}: {met}")
    over, far = result["over_seeks"]["median"], result["far"]
    lines.append(
        f"- spans, prefetch: {over:.1f} times the loop of seeks, bar {SEEK_BAR:.0f}: {verdict(over >= SEEK_BAR, quick)}"
    )
    if far:
        over = far["together"] / far["each"]
        lines.append(
            f"- from a server that answers {1000 * DELAY_S:.0f} ms late, opening included: {far['together']:,.0f} per "
            f"second, {over:,.0f} times a loop of a read for each span ({far['each']:.1f}), bar {SEEK_BAR:.0f}: "
            f"{verdict(over >= SEEK_BAR, quick)}"
        )
    else:
        lines.append("- no server that answers late on this machine: needs nginx with its module echo")
    return "\n".join(lines)


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw the rates of all rows that read."""
    rows = [row for row in result["rows"] if not row["name"].startswith("write")]
    bars = [Bar(row["name"], Spread(**row["per_s"]), row["beside"]) for row in rows]
    about = result["machine"]
    subtitle = f"page cache warm, {about['cores']} cores ({about['cpu']})"
    bar_plot(path, bars, title="Tokens with what belongs to them", subtitle=subtitle, unit="steps per second")
