"""Tokenizing: this package's `Tokenizer.encode` beside the bare library, same text, same number of threads.

The text is the Python standard library's sources, which every machine has; the tokenizer is trained on it first. Both
sides start from a list of strings. Ours ends with one array of ids and the lengths, the bare libraries with lists.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.measure import Bar, Spread, bar_plot, machine, machine_line, markdown_table, verdict
from zb_hdf5.text.corpus import open_documents
from zb_hdf5.text.tokenizers import Tokenizer, load_tokenizer
from zb_hdf5.text.training import train_tokenizer

REPEATS: Final = 5
QUICK_FILES: Final = 40
VOCAB_SIZE: Final = 8192
BAR_SHARE: Final = 0.9
Encode = Callable[[list[str], int], object]


def measure(folder: Path, *, quick: bool, repeats: int | None) -> dict[str, Any]:
    """Time every row in turn, `repeats` times."""
    repeats = repeats or REPEATS
    files = open_documents(sorted(Path(os.__file__).parent.glob("**/*.py"))[: QUICK_FILES if quick else None], "text")
    texts = [text for file in files for block in file.blocks() for text in block.texts]
    trained = train_tokenizer(files, folder / "tok.json", 512 if quick else VOCAB_SIZE)
    cores = len(os.sched_getaffinity(0))
    fast, slow = load_tokenizer(f"tiktoken:{trained.ranks_path}"), load_tokenizer(f"hf:{trained.path}")
    cases = [(fast, threads, _bare_tiktoken(trained.ranks_path)) for threads in _thread_counts(cores)]
    cases += [(slow, threads, _bare_tokenizers(trained.path)) for threads in sorted({1, cores})]
    tokens = len(fast.encode(texts)[0])
    rows = [_measure_row(*case, texts, tokens, repeats) for case in cases]
    return {
        "benchmark": "tokenize",
        "machine": machine(),
        "machine_line": machine_line(),
        "quick": quick,
        "repeats": repeats,
        "documents": len(texts),
        "characters": sum(map(len, texts)),
        "tokens": tokens,
        "rows": rows,
    }


def _thread_counts(cores: int) -> list[int]:
    return sorted({cores, *(1 << k for k in range(cores.bit_length()) if 1 << k <= cores)})


def _bare_tiktoken(ranks_path: Path) -> Encode:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    from zb_hdf5.text.training import SPLIT_PATTERN

    ranks = load_tiktoken_bpe(str(ranks_path))
    encoding = tiktoken.Encoding("bare", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return lambda texts, threads: encoding.encode_ordinary_batch(texts, num_threads=threads)


def _bare_tokenizers(path: Path) -> Encode:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def encode(texts: list[str], threads: int) -> object:
        # the library's pool has one size for good, that of the machine; it can only be switched off
        os.environ["TOKENIZERS_PARALLELISM"] = "false" if threads == 1 else "true"
        try:
            return tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        finally:
            del os.environ["TOKENIZERS_PARALLELISM"]

    return encode


def _measure_row(
    tokenizer: Tokenizer, threads: int, bare: Encode, texts: list[str], tokens: int, repeats: int
) -> dict[str, Any]:
    pairs = [(_seconds(bare, texts, threads), _seconds(tokenizer.encode, texts, threads)) for _ in range(repeats)]
    return {
        "name": f"{tokenizer.kind}, {threads} thread{'s' if threads > 1 else ''}",
        "kind": tokenizer.kind,
        "threads": threads,
        "bare_tokens_per_s": Spread.of([tokens / bare_s for bare_s, _ in pairs]).as_json(),
        "tokens_per_s": Spread.of([tokens / ours_s for _, ours_s in pairs]).as_json(),
        "share": median(bare_s / ours_s for bare_s, ours_s in pairs),
        "bar": BAR_SHARE,
    }


def _seconds(encode: Encode, texts: list[str], threads: int) -> float:
    start_s = time.perf_counter()
    encode(texts, threads)
    return time.perf_counter() - start_s


def report(result: dict[str, Any]) -> str:
    """Return the table, as markdown."""
    table = [
        [
            row["name"],
            Spread(*(value / 1e6 for value in row["bare_tokens_per_s"].values())).text(2),
            Spread(*(value / 1e6 for value in row["tokens_per_s"].values())).text(2),
            f"{row['share']:.2f}",
            verdict(row["share"] >= row["bar"], result["quick"]),
        ]
        for row in result["rows"]
    ]
    lines = [
        f"## Tokenizing {result['documents']:,} documents, {result['tokens'] / 1e6:.2f} M tokens",
        f"{result['machine_line']}. {result['repeats']} interleaved repeats; median (min..max); shares are medians of "
        "pairs.",
        "",
        markdown_table(("row", "bare, M tokens/s", "ours, M tokens/s", "share", f">= {BAR_SHARE}"), table),
    ]
    if result["quick"]:
        lines.append("(A --quick run: too little data to mean anything.)")
    return "\n".join(lines)


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw both sides of every row."""
    bars = []
    for row in result["rows"]:
        bars.append(Bar(f"{row['name']}, bare", Spread(**row["bare_tokens_per_s"]), "bare library"))
        bars.append(Bar(row["name"], Spread(**row["tokens_per_s"]), "zb_hdf5"))
    subtitle = f"{result['characters'] / 1e6:.0f} M characters of Python sources, median of {result['repeats']}"
    bar_plot(path, bars, title="Tokenizing", subtitle=subtitle, unit="M tokens per second", scale=1e-6, digits=2)
