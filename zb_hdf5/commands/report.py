"""`zb report`: one page of HTML with the statistics of a store."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import log10
from pathlib import Path
from typing import Any, Final

import numpy as np

from zb_hdf5.commands.info import describe, describe_lines, source_files
from zb_hdf5.commands.rows import (
    COLOURS,
    NO_SPAN,
    PADDING,
    Part,
    Row,
    cut_by_spans,
    notes_of,
    origin_text,
    part_title,
    parts_of,
    value_text,
)
from zb_hdf5.commands.statistics import Counts, Statistics
from zb_hdf5.console import counted, format_count, printable
from zb_hdf5.files.paths import any_path
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.text.tokenizers import NEWLINE, Tokenizer, readable, readable_runs

FREQUENT: Final = 30
NEVER_SHOWN: Final = 120
SAMPLE_TOKENS: Final = 384
BINS: Final = 128
FILES_SHOWN: Final = 20
SOURCES_SHOWN: Final = 30
#: Share of padding that is worth a warning.
MUCH_PADDING: Final = 0.05
#: Share of repeated units that is worth one.
MANY_COPIES: Final = 0.01
QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
#: Facts of `zb info` that depend on the machine, or that the page has elsewhere.
NOT_ON_THE_PAGE: Final = ("kind", "tokens", "layout", "access", "reads", "source", "sha256", "fingerprint")
#: The head of the page. It lets nothing run or be fetched that the data could smuggle in.
HEAD: Final = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
#: A figure, and the margins of its bars.
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 190, 64, 22, 14
STYLE: Final = """
:root { --ink: #1c2430; --soft: #5d6b7e; --line: #dfe4ea; --card: #fff; --back: #f5f7f9; --bar: #2f6f9f;
  --mark: #b4541a; --d0: #e3eff8; --d1: #fbf0d9; --d2: #e4f3e2; --d3: #f5e6f3; --d4: #e7e8f9;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ef; --soft: #97a5b6; --line: #323c48; --card: #1c232b;
  --back: #13181e; --bar: #5fa5d6; --mark: #f0a35e; --d0: #1d3345; --d1: #3b3119; --d2: #1f3a22; --d3: #3b2439;
  --d4: #272a4c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .7rem; }
p { margin: .4rem 0; max-width: 48rem; }
.soft, figcaption, th { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem; margin: 1.4rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.35rem; font-weight: 600; line-height: 1.3; }
.card span { color: var(--soft); font-size: .85rem; }
.card.warn b { color: var(--mark); }
figure, .box { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; margin: .7rem 0;
  padding: .8rem 1rem; overflow-x: auto; }
figcaption { font-size: .85rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11px; }
svg .bar { fill: var(--bar); }
svg .bar:hover { fill: var(--mark); }
svg .grid { stroke: var(--line); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; font-weight: 500; }
th, td { padding: .22rem .8rem .22rem 0; vertical-align: top; border-top: 1px solid var(--line); }
tr:first-child > * { border-top: 0; }
.facts th { width: 9rem; white-space: nowrap; }
.facts td { overflow-wrap: anywhere; }
td:has(.share) { width: 40%; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
code, pre, .token { font: .86em/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
.token { background: var(--back); border: 1px solid var(--line); border-radius: .3rem; padding: 0 .3rem;
  white-space: pre-wrap; overflow-wrap: anywhere; display: inline-block; max-width: 100%; }
.share { background: var(--bar); height: .6rem; min-width: 1px; border-radius: .2rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: .5rem .8rem; border-radius: .4rem; }
.part { margin: .5rem 0; }
.d { background: var(--back); } .d0 { background: var(--d0); } .d1 { background: var(--d1); }
.d2 { background: var(--d2); } .d3 { background: var(--d3); } .d4 { background: var(--d4); }
.span { border-bottom: 2px solid var(--mark); }
.note { font-size: .82rem; color: var(--soft); overflow-wrap: anywhere; }
@media print { body { background: none; } figure, .box, .card { break-inside: avoid; } }
"""


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
        "packing": None if found.packing is None else found.packing._asdict(),
        "sources": [source._asdict() for source in found.sources],
        "document_lengths": None if found.lengths is None else _length_facts(found.lengths),
        "duplicates": found.duplicates.units,
        "duplicate_tokens": found.duplicates.tokens,
        "duplicate_groups": [group.units.tolist() for group in found.duplicates.groups],
    }


def report_page(
    numbers: dict[str, Any], found: Statistics, reader: BatchReader, rows: list[Row], tokenizer: Tokenizer | None
) -> str:
    """Return the page. The same store gives the same bytes."""
    d, name = describe(numbers["path"]), printable(any_path(numbers["path"]).resolve().name)
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
    sections: dict[str, Iterable[Markup]] = {
        "Facts": [facts(_facts(d))],
        "Tokens": _token_parts(found, numbers, tokenizer),
        "Documents": _document_parts(d, found, numbers["document_lengths"]),
        **({"Sources": [_sources(found)]} if found.sources else {}),
        f"{found.unit.capitalize()}s that are there twice": _duplicate_parts(found, reader, tokenizer),
        "Samples": [_row(row, tokenizer) for row in rows],
    }
    parts = [
        tag("h1", name),
        tag("p", subtitle, class_="soft"),
        _cards(d, found, numbers, reader),
        *([tag("p", sample, class_="box")] if found.tokens < found.num_tokens else []),
        *(Markup(tag("section", tag("h2", title), *children) + "\n") for title, children in sections.items()),
    ]
    head = tag("head", Markup(HEAD), tag("title", f"{name} · zb report"), tag("style", Markup(STYLE)))
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('main', chr(10), *parts)), lang='en')}\n"


def _cards(d: dict[str, Any], found: Statistics, numbers: dict[str, Any], reader: BatchReader) -> Markup:
    copies, outside, vocab_size = (numbers[k] for k in ("duplicates", "tokens_outside_vocabulary", "vocab_size"))
    padding = 0 if found.packing is None else found.packing.padding / max(1, found.num_tokens)
    share, noun = copies / max(1, found.units), "file" if found.unit == "file" else "document"
    items = [
        (True, format_count(found.num_tokens), "tokens", False),
        (d["documents"], f"{d['documents']:,}" if d["documents"] else "", f"{noun}s", False),
        (d["kind"] != "stream", f"{reader.num_records:,}", "records", False),
        (found.packing is not None, f"{padding:.2%}", "padding", padding > MUCH_PADDING),
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
    source, files = d.get("source") or {}, source_files(d.get("source") or {})
    others = {key: value for key, value in source.items() if key not in ("files", "path") and value is not None}
    lines = [
        ("path", d["path"]),
        ("tokens", f"{d['tokens']:,} {d['dtype']}"),
        *(line for line in describe_lines(d)[1:] if line[0] not in NOT_ON_THE_PAGE),
        *(("" if number else "source", str(file)) for number, file in enumerate(files[:FILES_SHOWN])),
        *([("", f"and {len(files) - FILES_SHOWN:,} files more")] if len(files) > FILES_SHOWN else []),
        *((f"source {key}", value_text(value)) for key, value in others.items()),
        *([("sha256", d["sha256"] or "none stored")] if "sha256" in d else []),
        ("fingerprint", d["fingerprint"]),
    ]
    return [(printable(name), printable(text)) for name, text in lines]


def _token_parts(found: Statistics, numbers: dict[str, Any], tokenizer: Tokenizer | None) -> list[Markup]:
    total = max(1, int(found.counts.sum()) + found.uncounted)  # padding is not counted
    most, vocab_size = max(found.counts.tolist(), default=1), numbers["vocab_size"] or 0
    rows = [
        [str(token), *([_token(tokenizer, token)] if tokenizer else []), *shares(count, total, most)]
        for token, count in numbers["most_frequent"]
    ]
    frequent = table(["#id", *(["token"] if tokenizer else []), "#count", "#share", ""], rows)
    counts = np.zeros(max(vocab_size, len(found.counts), 1), np.int64)
    counts[: len(found.counts)] = found.counts
    step = -(-len(counts) // BINS)
    starts = np.arange(0, len(counts), step)
    values = np.add.reduceat(counts, starts).tolist()
    middle, last = (len(values) / 2, f"{len(values) // 2 * step:,}"), (float(len(values)), f"id {len(counts) - 1:,}")
    caption = f"How often ids occur; a bar is {counted(step, 'id')}; logarithmic."
    figure = bars(values, [*starts.tolist(), len(counts)], [(0.0, "0"), middle, last], log=True, caption=caption)
    return [
        figure,
        tag("p", f"The {len(rows)} most frequent of them:"),
        frequent,
        *_never_used(counts[:vocab_size], tokenizer),
    ]


def _never_used(counts: Counts, tokenizer: Tokenizer | None) -> list[Markup]:
    """Return the ids of the vocabulary, which has all of `counts`, that do not occur."""
    if not len(counts):
        return [
            tag("p", "The store names no vocabulary, so that tokens that are never used are not known.", class_="soft")
        ]
    never = np.flatnonzero(counts == 0)
    if not len(never):
        return [tag("p", f"Each of the {len(counts):,} ids of the vocabulary is used.")]
    more, share = len(never) - NEVER_SHOWN, len(never) / len(counts)
    shown = [Markup(_token(tokenizer, token) + " ") for token in never[:NEVER_SHOWN].tolist()]
    last = [tag("span", f"and {more:,} more", class_="soft")] if more > 0 else []
    text = f"{len(never):,} of the {len(counts):,} ids of the vocabulary ({share:.2%}) are never used:"
    return [tag("p", text), tag("div", shown, *last, class_="box")]


def _token(tokenizer: Tokenizer | None, token: int) -> Markup:
    """Return one token so that it differs from others: spaces at its ends are seen."""
    text = str(token) if tokenizer is None else printable(readable(tokenizer, np.array([token])))
    if text.strip() != text or not text:
        text = text.replace(" ", "␣")
    if "\ufffd" in text:  # a part of a character
        text = f"id {token}"
    return tag("span", text, class_="token", title=f"id {token}")


def _length_facts(lengths: Counts) -> dict[str, float]:
    """Return the extremes, quantiles and mean of some lengths."""
    if not len(lengths):
        return {}
    points = np.quantile(lengths, QUANTILES, method="inverted_cdf").tolist()
    named = {f"{quantile:.0%}": int(point) for quantile, point in zip(QUANTILES, points, strict=True)}
    return {"min": int(lengths.min()), **named, "max": int(lengths.max()), "mean": round(float(lengths.mean()), 1)}


def _document_parts(d: dict[str, Any], found: Statistics, named: dict[str, float] | None) -> list[Markup]:
    if found.lengths is None or named is None:
        count = f"{d['documents']:,} documents were packed into the records. " if d["documents"] else ""
        return [tag("p", count + "The documents of the tokens, and the padding, are not stored with these batches.")]
    if not len(found.lengths):
        return [tag("p", "There are none.")]
    powers = np.bincount(np.frexp(found.lengths.astype(np.float64))[1])  # 2**(k-1) <= length < 2**k
    low = int(np.flatnonzero(powers)[0])
    edges = [0 if k == 0 else 1 << (k - 1) for k in range(low, len(powers) + 1)]
    marks = [(float(number), f"{edge:,}") for number, edge in enumerate(edges)]
    caption = f"Lengths of {found.unit}s, in tokens; each bar is twice as wide as the one before."
    figure = bars(powers[low:].tolist(), edges, marks, log=False, caption=caption)
    return [
        figure,
        table([f"#{name}" for name in named], [[f"{value:,}" for value in named.values()]]),
        _packing(found),
    ]


def _packing(found: Statistics) -> Markup:
    """Return the lines on padding, and on whole, split and missing documents."""
    count, packing = max(1, found.num_units), found.packing
    if packing is None:
        text = "Each lies in one file, whole: a stream is cut into records only when it is read."
        return tag("p", text, class_="soft")
    whole = found.num_units - packing.cropped - packing.absent
    lines = [
        ("padding", f"{packing.padding:,} tokens, {packing.padding / found.num_tokens:.2%} of all; not counted above"),
        ("whole", f"{whole:,} documents, {whole / count:.2%}, are in the store with all of their tokens"),
        ("split", f"{packing.split:,} documents, {packing.split / count:.2%}, lie in several pieces"),
    ]
    if packing.lost:
        lost = f"{packing.cropped:,} documents are there in part, and {packing.absent:,} not at all: "
        lines.append(("not there", f"{lost}{packing.lost:,} tokens"))
    return facts(lines)


def _sources(found: Statistics) -> Markup:
    total = max(1, sum(each.tokens for each in found.sources))
    shown, left = found.sources[:SOURCES_SHOWN], found.sources[SOURCES_SHOWN:]
    rows = [[printable(name) or "not known", f"{count:,}", *shares(tokens, total)] for name, count, tokens in shown]
    if left:
        documents, tokens = sum(each.documents for each in left), sum(each.tokens for each in left)
        rows.append([f"{len(left):,} more", f"{documents:,}", *shares(tokens, total)[:2], ""])
    return table(["source", "#documents", "#tokens", "#share", ""], rows)


def _duplicate_parts(found: Statistics, reader: BatchReader, tokenizer: Tokenizer | None) -> list[Markup]:
    repeats = found.duplicates
    compared = f"{found.units:,} {found.unit}s" + (" that are there whole" if found.packing is not None else "")
    if not repeats.units:
        return [tag("p", f"None: no two of the {compared} have the same tokens.")]
    share = repeats.tokens / max(1, found.tokens)
    text = f"{repeats.units:,} of the {compared} repeat an earlier one: {repeats.tokens:,} tokens, {share:.2%} of all."
    rows, documents = [], reader.documents if found.unit == "document" else None
    for group in repeats.groups:  # tokens behind the last document count as one
        units = ", ".join(f"{unit:,}" for unit in group.units[:4].tolist()) + (" …" if len(group.units) > 4 else "")
        origins = [
            origin_text(documents.document(unit))
            for unit in group.units[:2].tolist()
            if documents is not None and unit < len(documents)
        ]
        names = [tag("div", origin, class_="note") for origin in origins if origin]
        rows.append(
            [
                f"{len(group.units):,}",
                f"{group.length:,}",
                units,
                tag("div", tag("code", _lines(readable(tokenizer, group.beginning))), *names),
            ]
        )
    return [tag("p", text), table(["#copies", "#tokens", f"{found.unit}s", "begins with"], rows)]


def _row(row: Row, tokenizer: Tokenizer | None) -> Markup:
    parts, at = [], 0
    left = len(row.tokens) - min(SAMPLE_TOKENS, len(row.tokens))
    for part in parts_of(row, SAMPLE_TOKENS):
        if part.column > at:
            parts.append(tag("p", f"… {left:,} tokens left out …", class_="note"))
        at = part.stop
        parts.append(_part(row, part, tokenizer))
    size = tag("span", f" · {len(row.tokens):,} tokens", class_="soft")
    return tag("div", tag("b", row.name), size, *parts, class_="box")


def _part(row: Row, part: Part, tokenizer: Tokenizer | None) -> Markup:
    title = part_title(row, part)
    origin = origin_text(row.known.get(part.document))
    inside = [tag("div", " · ".join(filter(None, (title, origin))), class_="note")] if title else []
    if part.document != PADDING:
        colour = f"d d{part.document % len(COLOURS)}" if part.document >= 0 else "d"
        texts = []
        for first, last, span in cut_by_spans(row, part):
            known = {} if span == NO_SPAN else {"class_": "span", "title": value_text(row.spans[span][2])}
            runs = readable_runs(tokenizer, row.tokens[first:last])
            words = [tag("span", _lines(text), class_="note" if is_count else None) for text, is_count in runs]
            texts.append(tag("span", *words, **known))
        inside.append(tag("pre", *texts, class_=colour))
    inside += [tag("div", note, class_="note") for note in notes_of(row, part)]
    return tag("div", *inside, class_="part")


def _lines(text: str) -> str:
    """Return text with its line breaks, and without other control characters."""
    return f"{NEWLINE}\n".join(printable(line) for line in text.split("\n"))


# --- elements --------------------------------------------------------------------------------------------------


class Markup(str):
    """Text that is HTML already. All other text is escaped when it becomes part of a page."""

    __slots__ = ()


def tag(name: str, *children: str | Iterable[Markup], **attributes: str | float | None) -> Markup:
    """Return an element; a final underscore of an attribute's name is left out (`class_`)."""
    texts = [[child] if isinstance(child, str) else child for child in children]
    inner = "".join(each if isinstance(each, Markup) else html.escape(each) for text in texts for each in text)
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
    rows = [tag("tr", tag("th", name), tag("td", value)) for name, value in lines]
    return tag("div", tag("table", *rows, class_="facts"), class_="box")


def shares(count: int, total: int, most: int | None = None) -> list[str]:
    """Return cells: a count, its share of a total, and a bar that is full at `most`, by default the total."""
    bar = tag("div", class_="share", style=f"width:{100 * count / (most or total):.1f}%")
    return [f"{count:,}", f"{count / total:.2%}", bar]


def bars(
    values: Sequence[int], edges: Sequence[int], marks: Sequence[tuple[float, str]], *, log: bool, caption: str
) -> Markup:
    """Return a figure of bars between edges, with marks (position in bars, text) below; `log` shows also small ones."""
    height, width = HEIGHT - TOP - BOTTOM, WIDTH - LEFT
    top = max(max(values, default=0), 1)

    def level(value: float) -> float:
        return height * (log10(1 + value) / log10(1 + top) if log else value / top)

    step = width / max(len(values), 1)
    parts = []
    for line in [10**k for k in range(0, len(str(top)), max(1, len(str(top)) // 4))] if log else [top // 2, top]:
        y = f"{TOP + height - level(line):.1f}"
        parts.append(tag("line", x1=LEFT, x2=WIDTH, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", f"{line:,}", x=LEFT - 6, y=y, dy=4, text_anchor="end"))
    for number, (value, (first, end)) in enumerate(zip(values, pairwise(edges), strict=True)):
        if value:
            size, title = level(value), f"{first:,} to {max(first, end - 1):,}: {value:,}"
            corner = {"x": f"{LEFT + number * step:.2f}", "y": f"{TOP + height - size:.2f}"}
            parts.append(tag("rect", tag("title", title), **corner, width=f"{max(step - 1, step * 0.8):.2f}",
                             height=f"{max(size, 1):.2f}", class_="bar"))  # fmt: skip
    for position, text in marks:
        anchor = "start" if position <= 0 else "end" if position >= len(values) else "middle"
        parts.append(tag("text", text, x=f"{LEFT + position * step:.1f}", y=HEIGHT - 5, text_anchor=anchor))
    drawing = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=caption)
    return tag("figure", drawing, tag("figcaption", caption))
