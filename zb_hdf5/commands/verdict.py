"""The verdict of `zb verify`: the bad files, how many are right, and the worst outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from zb_hdf5.console import (
    Output,
    counted,
    format_count,
    message_of,
    typed,
)
from zb_hdf5.errors import ChecksumError, FormatError, Remedy, UnverifiableError, ZbError
from zb_hdf5.files.paths import any_path
from zb_hdf5.store.shard_report import Outcome, ShardReport

#: The word for each outcome, and its sense for one file; the worst outcome is the first.
_OUTCOMES: Final = {
    Outcome.BAD: ("BAD", "the file is not as it was written, or not finished"),
    Outcome.UNVERIFIED: ("NOT VERIFIED", "there is nothing to compare the file with"),
    Outcome.VERIFIED: ("verified", "the file is as it was written"),
}


def verdict(path: Path, reports: list[ShardReport]) -> Output:
    """Return the result of a check: the bad files, how many are right, and the worst outcome; as JSON each file."""
    counts = Counter(report.outcome for report in reports)
    outcome = next(each for each in _OUTCOMES if counts[each])
    word, result = _OUTCOMES[outcome]
    if len(reports) > 1:
        others = {Outcome.UNVERIFIED: "could not be compared with anything", Outcome.BAD: "not"}
        result = f"{counts[Outcome.VERIFIED]:,} of {len(reports):,} files are as they were written"
        for each, text in others.items():
            if each in counts:
                result += f", {counts[each]:,} {text}"
    files = [
        {**vars(each), "outcome": each.outcome, "missing": _missing(path, each), "problem": _problem(each)}
        for each in reports
    ]
    codes = [code_of_damage(report.problem) for report in reports if report.problem is not None]
    if outcome is Outcome.UNVERIFIED:
        codes.append(UnverifiableError.exit_code)
    rows = [("path", str(path)), *_rows_of_files(path, reports), ("result", f"{word}: {result}")]
    return Output(
        {"ok": outcome is Outcome.VERIFIED, "outcome": outcome, "files": files},
        rows,
        exit_code=max(codes, default=0),
    )


def code_of_damage(error: ZbError) -> int:
    """Return the exit code of a command that has met damage in a store."""
    # damaged metadata is damage: elsewhere a malformed file may be a mistake of the user's
    damaged = isinstance(error, FormatError) and error.exit_code == FormatError.exit_code
    return ChecksumError.exit_code if damaged else error.exit_code


def _missing(path: Path, report: ShardReport) -> str:
    """Return the digests that a file lacks; digests of files of other programs are made for the whole path at once."""
    is_foreign = report.missing.endswith(Remedy.DIGESTS.about(""))
    return typed(report.missing, str(path) if is_foreign else report.path)


def _problem(report: ShardReport) -> str | None:
    return None if report.problem is None else message_of(report.problem)


def _rows_of_files(path: Path, reports: list[ShardReport]) -> Iterator[tuple[str, str]]:
    """Yield the files that are bad, the first of those that lack the same digest, and the others by their number."""
    if len(reports) == 1:
        [report] = reports
        name = "file" if report.path == str(path) else _name_in(path, report)
        yield name, _line_of(path, report)
        return
    told = set[str]()
    for report in reports:
        if report.outcome is not Outcome.VERIFIED and (report.problem or report.missing not in told):
            yield _name_in(path, report), _line_of(path, report)
            told.add(report.missing)
    for name, is_table in (("shards", False), ("documents", True)):
        kind = [report for report in reports if bool(report.document_count) == is_table]
        good = [report for report in kind if report.outcome is Outcome.VERIFIED]
        if good:
            yield name, f"{len(good):,} of {len(kind):,} verified: {_amount_of(good)} ({_compared(good)})"


def _name_in(path: Path, report: ShardReport) -> str:
    """Return the name of a file by its place in the folder of a store."""
    found = any_path(report.path)
    folder = path if path.is_dir() else path.parent
    return str(found.relative_to(folder)) if found.is_relative_to(folder) else report.path


def _line_of(path: Path, report: ShardReport) -> str:
    if report.problem is not None:
        return f"BAD: {_problem(report)}"
    amount = _amount_of([report])
    if report.missing:
        facts = ("NOT VERIFIED", amount, _missing(path, report))
        return ": ".join(fact for fact in facts if fact)
    return f"verified: {amount or '0 tokens'} ({_compared([report])})"


def _amount_of(reports: list[ShardReport]) -> str:
    """Return how many documents, batches or tokens some files have; the first of these that there are."""
    documents = sum(each.document_count for each in reports)
    batches = sum(each.num_batches for each in reports)
    tokens = sum(each.token_count for each in reports)
    if documents:
        return counted(documents, "document")
    if batches:
        return counted(batches, "batch")
    return f"{format_count(tokens).strip()} tokens" if tokens else ""


def _compared(reports: list[ShardReport]) -> str:
    """Return the digests that agreed, each one once."""
    return ", ".join(dict.fromkeys(check for report in reports for check in report.checks))
