"""One page of HTML with the statistics of a store."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files
from itertools import pairwise
from math import log10
from pathlib import Path
from string import Template
from typing import Any, Final

import numpy as np

from zb_hdf5.commands.description import describe, describe_lines
from zb_hdf5.commands.rows import (
    COLOURS,
    PADDING,
    Part,
    Row,
    origin_text,
    value_text,
)
from zb_hdf5.commands.statistics import Counts, Statistics
from zb_hdf5.console import (
    counted,
    format_count,
    printable,
)
from zb_hdf5.files.paths import any_path
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.store.index import source_files
from zb_hdf5.store.opening import NO_CHOICE, Choice
from zb_hdf5.text.readable import NEWLINE, readable, readable_runs
from zb_hdf5.text.tokenizers import Tokenizer

#: So many of each kind are shown.
FREQUENT: Final = 30
NEVER_SHOWN: Final = 120
FILES_SHOWN: Final = 20
SOURCES_SHOWN: Final = 30
UNITS_SHOWN: Final = 4
SAMPLE_TOKENS: Final = 384
BINS: Final = 128
#: Shares of padding and of repeated units that are worth a warning.
MUCH_PADDING: Final = 0.05
MANY_COPIES: Final = 0.01
QUANTILES: Final = {"min": 0, "5%": 0.05, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95, "max": 1}
#: Facts of `zb info` that depend on the machine, or that the page has elsewhere.
NOT_ON_THE_PAGE: Final = ("kind", "tokens", "layout", "access", "reads", "source", "sha256", "fingerprint")
#: The size of a figure, and the margins of its bars.
WIDTH: Final = 900
HEIGHT: Final = 190
LEFT: Final = 64
BOTTOM: Final = 22
TOP: Final = 14


def report_json(path: Path, found: Statistics, vocab_size: int) -> dict[str, Any]:
    """Return the numbers of the page for programs."""
    used = int(np.count_nonzero(found.counts[: vocab_size or None]))
    # of ids that occur equally often, the smaller first
    order = np.argsort(-found.counts, kind="stable")[:FREQUENT]
    return {
        "path": str(path),
        "tokens": found.num_tokens,
        "tokens_counted": found.tokens,
        f"{found.unit}s": found.num_units,
        f"{found.unit}s_compared": found.units,
        "vocab_size": vocab_size or None,
        "ids_used": used,
        "ids_never_used": max(0, vocab_size - used) if vocab_size else None,
        "tokens_outside_vocabulary": found.uncounted + (int(found.counts[vocab_size:].sum()) if vocab_size else 0),
        "most_frequent": [[token, int(found.counts[token])] for token in order.tolist() if found.counts[token]],
        "packing": found.packing,
        "sources": found.sources,
        "document_lengths": None if found.lengths is None else _length_facts(found.lengths),
        "duplicates": found.duplicates,
        "duplicate_tokens": found.duplicate_tokens,
        "duplicate_groups": [group.units for group in found.duplicate_groups],
    }


def _length_facts(lengths: Counts) -> dict[str, float]:
    """Return the extremes, quantiles and mean of some lengths."""
    if not len(lengths):
        return {}
    points = np.quantile(lengths, [*QUANTILES.values()], method="inverted_cdf").astype(int).tolist()
    return {**dict(zip(QUANTILES, points, strict=True)), "mean": round(float(lengths.mean()), 1)}


def report_page(
    numbers: dict[str, Any],
    found: Statistics,
    reader: BatchReader,
    rows: list[Row],
    tokenizer: Tokenizer | None,
    choice: Choice = NO_CHOICE,
) -> str:
    """Return the page. The same files, with the same times, give the same bytes.

    Parameters
    ----------
    numbers
        The result of `report_json`.
    rows
        The rows that are shown as text; as ids without a tokenizer.
    """
    d = describe(numbers["path"], choice)
    name = printable(any_path(numbers["path"]).resolve().name)
    if d["kind"] == "stream":
        subtitle = f"A token stream in {counted(d['num_files'], 'file')}"
    else:
        shards = f" in {counted(d['shards']['count'], 'shard')}" if "shards" in d else ""
        shape = f"{d['num_batches']:,} batches of {d['batch_size']:,} × {d['seq_len']:,}"
        subtitle = f"{shape} tokens{shards}, {d['state']}"
    sample = (
        f"An even sample: {found.tokens:,} of {found.num_tokens:,} tokens ({found.tokens / found.num_tokens:.2%}) were "
        f"looked at, in {found.units:,} of {found.num_units:,} {found.unit}s. Counts and repeats are of the sample."
    )
    sections: dict[str, list[Markup]] = {
        "Facts": [facts(_facts(d))],
        "Tokens": _token_parts(found, numbers, tokenizer),
        "Documents": _document_parts(d, found, numbers["document_lengths"]),
        **({"Sources": [_sources(found)]} if found.sources else {}),
        f"Repeated {found.unit}s": _duplicate_parts(found, reader, tokenizer),
        "Samples": [_row(row, tokenizer) for row in rows],
    }
    content = [
        tag("h1", name),
        tag("p", subtitle, class_="soft"),
        _cards(d, found, numbers, reader),
        *([tag("p", sample, class_="box")] if found.tokens < found.num_tokens else []),
        *(tag("section", tag("h2", title), *parts) for title, parts in sections.items()),
    ]
    template = Template(files("zb_hdf5.commands").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(title=html.escape(name), content="\n".join([*content, ""]))


def _cards(d: dict[str, Any], found: Statistics, numbers: dict[str, Any], reader: BatchReader) -> Markup:
    copies, outside, vocab_size = (numbers[k] for k in ("duplicates", "tokens_outside_vocabulary", "vocab_size"))
    padding = 0 if found.packing is None else found.packing["padding"] / max(1, found.num_tokens)
    share = copies / max(1, found.units)
    noun = "file" if found.unit == "file" else "document"
    items = [
        (True, format_count(found.num_tokens), "tokens", False),
        (d["documents"], f"{d['documents'] or 0:,}", f"{noun}s", False),
        (d["kind"] != "stream", f"{reader.num_records:,}", "records", False),
        (found.packing, f"{padding:.2%}", "padding", padding > MUCH_PADDING),
        (True, f"{numbers['ids_used']:,}", f"ids used of {vocab_size:,}" if vocab_size else "ids used", False),
        (outside, f"{outside:,}", "tokens outside the vocabulary", True),
        (True, f"{copies:,}", f"repeated {found.unit}s ({share:.2%})", share > MANY_COPIES),
    ]
    cards = [
        tag("div", tag("b", value), tag("span", text), class_="card warn" if warn else "card")
        for is_there, value, text, warn in items
        if is_there
    ]
    return tag("div", *cards, class_="cards")


def _facts(d: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a store, without those that depend on the machine that reads it."""
    source = d.get("source") or {}
    names = source_files(source)
    more = len(names) - FILES_SHOWN
    others = [key for key, value in source.items() if key not in ("files", "path", "note") and value is not None]
    return [
        ("path", d["path"]),
        ("tokens", f"{d['tokens']:,} {d['dtype']}"),
        *(line for line in describe_lines(d)[1:] if line[0] not in NOT_ON_THE_PAGE),
        *(("" if number else "source", str(name)) for number, name in enumerate(names[:FILES_SHOWN])),
        *([("", f"and {more:,} files more")] if more > 0 else []),
        *((f"source {key}", value_text(source[key])) for key in others),
        *([("sha256", d["sha256"] or "none stored")] if "sha256" in d else []),
        ("fingerprint", d["fingerprint"]),
    ]


def _token_parts(found: Statistics, numbers: dict[str, Any], tokenizer: Tokenizer | None) -> list[Markup]:
    total = max(1, int(found.counts.sum()) + found.uncounted)  # padding is not counted
    most = max(found.counts.tolist(), default=1)
    vocab_size = numbers["vocab_size"] or 0
    rows = [
        [str(token), *([_token(tokenizer, token)] if tokenizer else []), *shares(count, total, most)]
        for token, count in numbers["most_frequent"]
    ]
    counts = np.pad(found.counts, (0, max(0, vocab_size - len(found.counts), 1 - len(found.counts))))
    step = -(-len(counts) // BINS)
    starts = np.arange(0, len(counts), step)
    values = np.add.reduceat(counts, starts).tolist()
    size = len(values)
    half = size // 2 * step
    marks = [(0.0, "0"), (size / 2, f"{half:,}"), (float(size), f"id {len(counts) - 1:,}")]
    caption = f"How often ids occur; a bar is {counted(step, 'id')}; logarithmic."
    return [
        bars(values, [*starts.tolist(), len(counts)], marks, log=True, caption=caption),
        tag("p", f"The {len(rows)} most frequent of them:"),
        table(["#id", *(["token"] if tokenizer else []), "#count", "#share", ""], rows),
        *_never_used(counts[:vocab_size], tokenizer),
    ]


def _never_used(counts: Counts, tokenizer: Tokenizer | None) -> list[Markup]:
    """Return the ids of the vocabulary, which has all of `counts`, that do not occur."""
    if not len(counts):
        text = "The store names no vocabulary, so that tokens that are never used are not known."
        return [tag("p", text, class_="soft")]
    never = np.flatnonzero(counts == 0)
    if not len(never):
        return [tag("p", f"Each of the {len(counts):,} ids of the vocabulary is used.")]
    more = len(never) - NEVER_SHOWN
    share = len(never) / len(counts)
    shown = [Markup(_token(tokenizer, token) + " ") for token in never[:NEVER_SHOWN].tolist()]
    last = [tag("span", f"and {more:,} more", class_="soft")] if more > 0 else []
    text = f"{len(never):,} of the {len(counts):,} ids of the vocabulary ({share:.2%}) are never used:"
    return [tag("p", text), tag("div", *shown, *last, class_="box")]


def _token(tokenizer: Tokenizer | None, token: int) -> Markup:
    """Return one token so that it differs from others: spaces at its ends are seen."""
    text = str(token) if tokenizer is None else printable(readable(tokenizer, np.array([token])))
    if text.strip() != text or not text:
        text = text.replace(" ", "␣")
    # half of a character has no text of its own
    return tag("span", f"id {token}" if "\ufffd" in text else text, class_="token", title=f"id {token}")


def _document_parts(d: dict[str, Any], found: Statistics, named: dict[str, float]) -> list[Markup]:
    if found.lengths is None:
        count = f"{d['documents']:,} documents were packed into the records. " if d["documents"] else ""
        return [tag("p", count + "The documents of the tokens, and the padding, are not stored with these batches.")]
    if not len(found.lengths):
        return [tag("p", "There are none.")]
    powers = np.bincount(np.frexp(found.lengths.astype(np.float64))[1])  # 2**(k-1) <= length < 2**k
    low = int(np.flatnonzero(powers)[0])
    edges = [1 << k >> 1 for k in range(low, len(powers) + 1)]
    marks = [(float(number), f"{edge:,}") for number, edge in enumerate(edges)]
    caption = f"Lengths of {found.unit}s, in tokens; each bar is twice as wide as the one before."
    return [
        bars(powers[low:].tolist(), edges, marks, log=False, caption=caption),
        table([f"#{name}" for name in named], [[f"{value:,}" for value in named.values()]]),
        _packing(found),
    ]


def _packing(found: Statistics) -> Markup:
    """Return the lines on padding, and on whole, split and missing documents."""
    if found.packing is None:
        text = "Each is whole, in one file: a stream is cut into records only when it is read."
        return tag("p", text, class_="soft")
    padding, split, cropped, absent, lost = found.packing.values()
    count = max(1, found.num_units)
    whole = found.num_units - cropped - absent
    lines = [
        ("padding", f"{padding:,} tokens, {padding / found.num_tokens:.2%} of all; not counted above"),
        ("whole", f"{whole:,} documents, {whole / count:.2%}, are in the store with all of their tokens"),
        ("split", f"{split:,} documents, {split / count:.2%}, lie in several pieces"),
    ]
    missing = f"{cropped:,} documents are there in part, and {absent:,} not at all: {lost:,} tokens"
    return facts([*lines, *([("not there", missing)] if lost else [])])


def _sources(found: Statistics) -> Markup:
    total = max(1, sum(each["tokens"] for each in found.sources))
    left = found.sources[SOURCES_SHOWN:]
    rows = [
        [printable(each["name"]) or "not known", f"{each['documents']:,}", *shares(each["tokens"], total)]
        for each in found.sources[:SOURCES_SHOWN]
    ]
    if left:
        documents = sum(each["documents"] for each in left)
        tokens = sum(each["tokens"] for each in left)
        rows.append([f"{len(left):,} more", f"{documents:,}", *shares(tokens, total)[:2], ""])
    return table(["source", "#documents", "#tokens", "#share", ""], rows)


def _duplicate_parts(found: Statistics, reader: BatchReader, tokenizer: Tokenizer | None) -> list[Markup]:
    compared = f"{found.units:,} {found.unit}s"
    if found.packing is not None:
        compared += " that are there whole"
    if not found.duplicates:
        return [tag("p", f"None: no two of the {compared} have the same tokens.")]
    share = found.duplicate_tokens / max(1, found.tokens)
    repeats = f"{found.duplicate_tokens:,} tokens, {share:.2%} of all"
    text = f"{found.duplicates:,} of the {compared} repeat an earlier one: {repeats}."
    documents = reader.documents if found.unit == "document" else None
    rows = []
    for group in found.duplicate_groups:
        units = ", ".join(f"{unit:,}" for unit in group.units[:UNITS_SHOWN])
        if len(group.units) > UNITS_SHOWN:
            units += " …"
        # tokens after the last document count as one
        known = [documents.document(unit) for unit in group.units[:2] if documents and unit < len(documents)]
        names = [tag("div", origin, class_="note") for origin in map(origin_text, known) if origin]
        begins = tag("div", tag("code", _lines(readable(tokenizer, group.beginning))), *names)
        rows.append([f"{len(group.units):,}", f"{group.length:,}", units, begins])
    return [tag("p", text), table(["#copies", "#tokens", f"{found.unit}s", "begins with"], rows)]


def _row(row: Row, tokenizer: Tokenizer | None) -> Markup:
    parts = [_part(row, part, tokenizer) for part in row.parts(SAMPLE_TOKENS)]
    size = tag("span", f" · {len(row.tokens):,} tokens", class_="soft")
    return tag("div", tag("b", row.name), size, *parts, class_="box")


def _part(row: Row, part: Part, tokenizer: Tokenizer | None) -> Markup:
    title = row.title(part)
    origin = origin_text(row.known.get(part.document))
    inside = [tag("div", " · ".join(filter(None, (title, origin))), class_="note")] if title else []
    if part.document != PADDING:
        texts = []
        for tokens, span in row.runs(part):
            runs = readable_runs(tokenizer, tokens)
            words = [tag("span", _lines(text), class_="note" if is_count else None) for text, is_count in runs]
            texts.append(tag("span", *words, class_=None if span is None else "span", title=span))
        colour = f"d d{part.document % len(COLOURS)}" if part.document >= 0 else "d"
        inside.append(tag("pre", *texts, class_=colour))
    inside += [tag("div", note, class_="note") for note in row.notes(part)]
    before = tag("p", f"… {part.left_out:,} tokens left out …", class_="note") if part.left_out else ""
    return Markup(before + tag("div", *inside, class_="part"))


def _lines(text: str) -> str:
    """Return text with its line breaks, and without other control characters."""
    return f"{NEWLINE}\n".join(printable(line) for line in text.split("\n"))


# --- elements --------------------------------------------------------------------------------------------------


class Markup(str):
    """Text that is HTML already. All other text is escaped when it becomes part of a page."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """Return an element; a final underscore of an attribute's name is left out (`class_`)."""
    inner = "".join(child if isinstance(child, Markup) else html.escape(child) for child in children)
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    words = "".join(f' {key}="{html.escape(str(value))}"' for key, value in given.items())
    return Markup(f"<{name}{words}>{inner}</{name}>")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table; a column whose name begins with "#" has numbers, which are aligned to the right."""
    classes = ["number" if name.startswith("#") else None for name in head]

    def cells(kind: str, row: Sequence[str]) -> Markup:
        return tag("tr", *(tag(kind, cell, class_=each) for cell, each in zip(row, classes, strict=True)))

    names = [name.removeprefix("#") for name in head]
    return tag("div", tag("table", cells("th", names), *(cells("td", row) for row in rows)), class_="box")


def facts(lines: Iterable[tuple[str, str]]) -> Markup:
    """Return a table of names and values."""
    rows = [tag("tr", tag("th", printable(name)), tag("td", printable(value))) for name, value in lines]
    return tag("div", tag("table", *rows, class_="facts"), class_="box")


def shares(count: int, total: int, most: int | None = None) -> list[str]:
    """Return cells: a count, its share of a total, and a bar that is full at `most`, by default the total."""
    bar = tag("div", class_="share", style=f"width:{100 * count / (most or total):.1f}%")
    return [f"{count:,}", f"{count / total:.2%}", bar]


def bars(
    values: list[int],
    edges: list[int],
    marks: list[tuple[float, str]],
    *,
    log: bool,
    caption: str,
) -> Markup:
    """Return a figure of bars.

    Parameters
    ----------
    edges
        The first value of each bar, and the end of the last one.
    marks
        Positions, in bars, and the texts below them.
    log
        Whether heights are logarithmic, so that small ones are seen too.
    """
    height = HEIGHT - TOP - BOTTOM
    step = (WIDTH - LEFT) / len(values)
    top = max(1, *values)

    def level(value: float) -> float:
        return height * (log10(1 + value) / log10(1 + top) if log else value / top)

    digits = len(str(top))
    lines = [10**k for k in range(0, digits, max(1, digits // 4))] if log else [top // 2, top]
    parts = []
    for line in lines:
        y = f"{TOP + height - level(line):.1f}"
        name = tag("text", f"{line:,}", x=LEFT - 6, y=y, dy=4, text_anchor="end")
        parts += [tag("line", x1=LEFT, x2=WIDTH, y1=y, y2=y, class_="grid"), name]
    for number, (value, (first, end)) in enumerate(zip(values, pairwise(edges), strict=True)):
        if value:
            title = tag("title", f"{first:,} to {max(first, end - 1):,}: {value:,}")
            box = LEFT + number * step, TOP + height - level(value), max(step - 1, step * 0.8), max(level(value), 1)
            x, y, width, size = (f"{length:.2f}" for length in box)
            parts.append(tag("rect", title, x=x, y=y, width=width, height=size, class_="bar"))
    for position, text in marks:
        anchor = "middle"
        if position <= 0:
            anchor = "start"
        elif position >= len(values):
            anchor = "end"
        parts.append(tag("text", text, x=f"{LEFT + position * step:.1f}", y=HEIGHT - 5, text_anchor=anchor))
    drawing = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=caption)
    return tag("figure", drawing, tag("figcaption", caption))
