"""One page of HTML with the statistics of a store."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5.commands.description import describe_lines, is_finished, problem_of
from zb_hdf5.commands.markup import Mark, Markup, bars, facts, shares, table, tag
from zb_hdf5.commands.rows import (
    COLOURS,
    PADDING,
    Part,
    Row,
    origin_text,
    value_text,
)
from zb_hdf5.commands.set_summary import set_facts_in_words
from zb_hdf5.commands.statistics import Counts, SplitStatistics, Statistics
from zb_hdf5.console import (
    counted,
    format_bytes,
    format_count,
    printable,
)
from zb_hdf5.files.paths import any_path
from zb_hdf5.formats.batches import Batches
from zb_hdf5.store.index import source_files
from zb_hdf5.text.readable import NEWLINE, readable, readable_runs
from zb_hdf5.text.tokenizers import Tokenizer
from zb_hdf5.version import __version__

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
NOT_ON_THE_PAGE: Final = (
    "access", "fastest", "fingerprint", "health", "kind", "layout", "reads", "source", "tokens",
)  # fmt: skip
#: Splits that have figures of their own.
SPLITS_DRAWN: Final = 4
#: Keys of a source that are for programs, or that other facts name.
NOT_FOR_PEOPLE: Final = ("files", "path", "note", "format", "work", "max_token", "vocab_size", "packing")
#: Keys of a source: their names for people, and their values in words.
IN_WORDS: Final = {
    "boundary_token_id": ("boundary token", "id {:,}"),
    "boundary": ("its place", "{} each document"),
    "max_document_tokens": ("longest document", "{:,} tokens, longer ones were cut"),
    "val_fraction": ("held out", "{:.3g} of the documents or records"),
    "val_seed": ("drawn with", "seed {}"),
    "pad_id": ("padding token", "id {:,}"),
    "remainder": ("records that fill no batch", "{}"),
    "dataset": ("dataset", "{}"),
}
REMAINDERS: Final = {"drop": "dropped", "pad": "filled up with padding", "error": "there were none"}


def report_json(path: Path, found: Statistics, vocab_size: int) -> dict[str, Any]:
    """Return the numbers of the page for programs."""
    used = int(np.count_nonzero(found.counts[: vocab_size or None]))
    # of ids that occur equally often, the smaller first
    order = np.argsort(-found.counts, kind="stable")[:FREQUENT]
    return {
        "path": str(path),
        "tokens": found.num_tokens,
        "tokens_counted": found.tokens,
        "compared": found.compared,
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
        "splits": {each.name: _split_json(each) for each in found.splits},
    }


def _split_json(split: SplitStatistics) -> dict[str, Any]:
    return {
        "tokens": split.tokens,
        "ids_used": int(np.count_nonzero(split.counts)),
        "padding": split.padding,
        "document_lengths": None if split.lengths is None else _length_facts(split.lengths),
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
    batches: Batches,
    rows: list[Row],
    tokenizer: Tokenizer | None,
    description: dict[str, Any],
    making: Provenance | None = None,
) -> str:
    """Return the page. The same files, with the same times, give the same bytes.

    Parameters
    ----------
    numbers
        The result of `report_json`, and "field_sets", the facts of the field sets.
    rows
        The rows that are shown as text; as ids without a tokenizer.
    making
        The command that makes the page, and the time; None: neither is on it.
    """
    d = description
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
        **({"Splits": [_splits(found)]} if found.splits else {}),
        "Tokens": _token_parts(found, numbers, tokenizer),
        "Documents": _document_parts(d, found, numbers["document_lengths"]),
        **({"Sources": [_sources(found)]} if found.sources else {}),
        **({"Field sets": [*_set_parts(numbers["field_sets"])]} if numbers.get("field_sets") else {}),
        f"Repeated {found.unit}s": _duplicate_parts(found, batches, tokenizer),
        "Samples": [_row(row, tokenizer) for row in rows],
    }
    content = [
        tag("h1", name),
        _health(d, found, making),
        tag("p", subtitle, class_="soft"),
        _cards(d, found, numbers, batches),
        *([tag("p", sample, class_="box")] if found.tokens < found.num_tokens else []),
        *(tag("section", tag("h2", title), *parts) for title, parts in sections.items()),
        *([_footer(making)] if making else []),
    ]
    template = Template(files("zb_hdf5.commands").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(title=html.escape(name), content="\n".join([*content, ""]))


def _set_parts(sets: list[dict[str, Any]]) -> Iterator[Markup]:
    """Yield the facts of each field set."""
    for each in sets:
        yield tag("h3", printable(f"{each['name']} ({each['split']})"))
        yield facts([*set_facts_in_words(each), *([("words", ", ".join(each["words"]))] if each["words"] else [])])


class Provenance(NamedTuple):
    """How and when a page is made."""

    command: str  # as it was typed
    time: str


def _health(d: dict[str, Any], found: Statistics, making: Provenance | None) -> Markup:
    """Return the first sentence: whether the store is as it was written, as far as this page has seen it."""
    verify = tag("code", printable(f"zb verify {shlex.quote(d['path'])}"))
    problem = problem_of(d)
    if problem:
        return tag("p", tag("b", "Damaged."), f" {printable(problem)}. Run ", verify, ".", class_="health bad")
    if not is_finished(d):
        text = " Its writer is at work, or was killed. The page has what was committed."
        return tag("p", tag("b", "Not finished."), text, class_="health open")
    if not found.compared:
        text = " No crc32 is stored that its tokens could be compared with. Run "
        return tag("p", tag("b", "Not verified."), text, verify, ", which names the way to one.", class_="health open")
    if found.tokens < found.num_tokens:
        text = " This page has looked at a sample only. Run "
        return tag("p", tag("b", "Not verified."), text, verify, ".", class_="health open")
    when = [" on ", tag("span", making.time, class_="moment")] if making else []
    text = f" All {found.num_tokens:,} tokens agreed with their crc32 when this page was made"
    others = "fields" if d["fields"] else ""
    if d["document_tables"]:
        others = "fields and documents" if others else "documents"
    rest = [" The command ", verify, f" compares the {others} as well."] if others else []
    return tag("p", tag("b", "Healthy."), text, *when, ".", *rest, class_="health good")


def _footer(making: Provenance) -> Markup:
    text = f"Made by zb_hdf5 {__version__} on {making.time} with "
    return tag("footer", text, tag("code", printable(making.command)), class_="soft")


def _splits(found: Statistics) -> Markup:
    """Return a table of the splits."""
    has_padding = found.packing is not None
    has_lengths = found.lengths is not None
    head = ["split", "#tokens", "#share", "#ids used"]
    head += ["#documents", "#mean length in tokens"] if has_lengths else []
    head += ["#padding"] if has_padding else []
    rows = []
    for each in found.splits:
        row = [printable(each.name), *shares(each.tokens, found.num_tokens)[:2]]
        row.append(f"{np.count_nonzero(each.counts):,}")
        if each.lengths is not None:
            row += [f"{len(each.lengths):,}", f"{each.lengths.mean() if len(each.lengths) else 0:,.1f}"]
        if has_padding:
            row.append(f"{each.padding / max(1, each.tokens):.2%}")
        rows.append(row)
    return table(head, rows)


def _cards(d: dict[str, Any], found: Statistics, numbers: dict[str, Any], batches: Batches) -> Markup:
    copies, outside, vocab_size = (numbers[k] for k in ("duplicates", "tokens_outside_vocabulary", "vocab_size"))
    padding = 0 if found.packing is None else found.packing["padding"] / max(1, found.num_tokens)
    share = copies / max(1, found.units)
    noun = "file" if found.unit == "file" else "document"
    items = [
        (True, format_count(found.num_tokens), "tokens", False),
        (d["documents"], f"{d['documents'] or 0:,}", f"{noun}s", False),
        (d["kind"] != "stream", f"{batches.num_records:,}", "records in batches", False),
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
    return [
        ("path", d["path"]),
        ("tokens", f"{d['tokens']:,} of {d['dtype']}, {format_bytes(d['bytes'])} on disk"),
        *(line for line in describe_lines(d)[1:] if line[0] not in NOT_ON_THE_PAGE),
        *([("made from", str(source["format"]))] if source.get("format") else []),
        *(("" if number else "source", str(name)) for number, name in enumerate(names[:FILES_SHOWN])),
        *([("", f"and {more:,} files more")] if more > 0 else []),
        *_source_facts(source),
        *([("sha256", d["sha256"] or "none stored")] if "sha256" in d else []),
        ("fingerprint", d["fingerprint"]),
    ]


def _source_facts(source: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts of a source in words; facts of a format that nobody here knows by their own names."""
    for key, value in source.items():
        if key in NOT_FOR_PEOPLE or value is None:
            continue
        name, words = IN_WORDS.get(key, (str(key).replace("_", " "), "{}"))
        known = REMAINDERS.get(str(value), value) if key == "remainder" else value
        try:
            yield name, words.format(known)
        except (TypeError, ValueError):  # the source is free JSON
            yield name, value_text(value)


def _token_parts(found: Statistics, numbers: dict[str, Any], tokenizer: Tokenizer | None) -> list[Markup]:
    total = max(1, int(found.counts.sum()) + found.uncounted)  # padding is not counted
    most = max(found.counts.tolist(), default=1)
    vocab_size = numbers["vocab_size"] or 0
    rows = [
        [str(token), *([_token(tokenizer, token)] if tokenizer else []), *shares(count, total, most)]
        for token, count in numbers["most_frequent"]
    ]
    size = max(1, vocab_size, len(found.counts))
    counts = np.pad(found.counts, (0, size - len(found.counts)))
    drawn = [(each.name, each.counts) for each in found.splits[:SPLITS_DRAWN]] or [("", found.counts)]
    return [
        *(_id_figure(name, of_split, size) for name, of_split in drawn),
        tag("p", f"The {len(rows)} most frequent ids{' of all splits' if found.splits else ''}:"),
        table(["#id", *(["token"] if tokenizer else []), "#times", "#share", ""], rows),
        *_never_used(counts[:vocab_size], tokenizer),
    ]


def _id_figure(split: str, found: Counts, size: int) -> Markup:
    """Return the figure of how often the ids below `size` occur in a split; "": there is one only."""
    counts = np.pad(found, (0, size - len(found)))
    step = -(-size // BINS)
    starts = np.arange(0, size, step)
    values = np.add.reduceat(counts, starts).tolist()
    quarters = [len(values) * part // 4 for part in (1, 2, 3)]
    between = [Mark(float(at), f"{at * step:,}") for at in quarters if 0 < at < len(values)]
    marks = [Mark(0.0, "0"), *between, Mark(float(len(values)), f"id {size - 1:,}")]
    each = f"{counted(step, 'id')} a bar" if step > 1 else "a bar for each id"
    caption = f"{_of_split(split)}How many times ids occur: {each}, from id 0 at the left; logarithmic."
    return bars(values, [*starts.tolist(), size], marks, log=True, caption=caption)


def _of_split(split: str) -> str:
    return f"{printable(split)}: " if split else ""


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
    """Return one token in a form that differs from the other tokens: spaces at its ends are seen."""
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
    of_splits = [(each.name, each.lengths) for each in found.splits if each.lengths is not None and len(each.lengths)]
    drawn = [*of_splits[:SPLITS_DRAWN]] or [("", found.lengths)]
    names = ["all", *(name for name, _ in of_splits)] if of_splits else []
    known = [named, *(_length_facts(lengths) for _, lengths in of_splits)]
    rows = [[f"{value:,}" for value in each.values()] for each in known]
    if names:
        rows = [[printable(name), *row] for name, row in zip(names, rows, strict=True)]
    head = ["split", *(f"#{name}" for name in named)] if names else [f"#{name}" for name in named]
    return [
        *(_length_figure(name, lengths, found.unit) for name, lengths in drawn),
        tag("p", f"Tokens of a {found.unit}: the shortest, the quantiles, the longest, and the mean."),
        table(head, rows),
        _packing(found),
    ]


def _length_figure(split: str, lengths: Counts, unit: str) -> Markup:
    """Return the figure of the lengths of the documents of a split; "": there is one only."""
    powers = np.bincount(np.frexp(lengths.astype(np.float64))[1])  # 2**(k-1) <= length < 2**k
    low = int(np.flatnonzero(powers)[0])
    edges = [1 << k >> 1 for k in range(low, len(powers) + 1)]
    marks = [Mark(float(number), f"{edge:,}") for number, edge in enumerate(edges)]
    marks[-1] = Mark(marks[-1].position, f"{edges[-1]:,} tokens")
    caption = f"{_of_split(split)}How many {unit}s have a length: each bar is twice as wide as the one before."
    return bars(powers[low:].tolist(), edges, marks, log=False, caption=caption)


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


def _duplicate_parts(found: Statistics, batches: Batches, tokenizer: Tokenizer | None) -> list[Markup]:
    compared = f"{found.units:,} {found.unit}s"
    if found.packing is not None:
        compared += " that are there whole"
    if not found.duplicates:
        return [tag("p", f"None: no two of the {compared} have the same tokens.")]
    share = found.duplicate_tokens / max(1, found.tokens)
    repeats = f"{found.duplicate_tokens:,} tokens, {share:.2%} of all"
    text = f"{found.duplicates:,} of the {compared} repeat an earlier one: {repeats}."
    documents = batches.corpus.document_table if found.unit == "document" else None
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
