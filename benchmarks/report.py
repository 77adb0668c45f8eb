"""The report: a page and plots, made from the JSON of a run and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import measure as m
from benchmarks.peers import WHOLE

#: The folder of the JSON and of the plots, beside the page.
FOLDER: Final = "report"
RATE: Final = "M tokens/s"
#: Figures of timed batches that only the JSON has, so that the tables fit a page. The rate is that of later passes.
LEFT_OUT: Final = (m.LATER, m.P50, m.P99, m.MAPPED, m.CPU)
#: The ratio of this figure is shown, where batches are timed.
RATIO: Final = m.LATER
#: Legible on a light page and on a dark one.
GREY: Final = "#7d8590"
OURS_COLOUR: Final = "#2f81f7"
OTHERS_COLOUR: Final = "#9aa4af"
#: Rows whose rates differ by more than this factor are drawn on a logarithmic scale.
LINEAR_UP_TO: Final = 20
#: Cores that other programs kept busy, at most, in a quiet run.
QUIET_LOAD: Final = 0.3
#: A node of 8 H100 that trains a model of 8 billion parameters: each of them takes 4 s for 8 x 4,096 tokens.
NODE_TOKENS_PER_S: Final = 8 * 8 * 4096 / 4
#: The rows of the first picture: ours, a bare loop, and the fastest setting of five libraries.
PICTURED_ROWS: Final = (
    "Loader",
    'Loader, verify="none"',
    "np.memmap loop",
    "Megatron IndexedDataset, a slice for each batch",
    "HF datasets, Arrow",
    "litdata",
    "Streaming, predownload",
    "grain, num_threads=0",
)
PICTURE: Final = "rates.svg"
WHY: Final = """\
A loop over a memory map compares nothing, and has no order that another number of ranks can go on with. A checked batch
is read twice, once for its crc32, whose time depends on the processor (it is in the line of the machine): the loop over
a memory map that computes one as well is the limit of a checked loader. A `DataLoader` adds its own time to each
batch."""
#: Rows of this package are named so.
OURS: Final = ("Loader", "dataset()", "hdf5", "batch,", "packed", "windows,", "our stream")
TOP: Final = """\
# Report

This page compares the loaders and conversions of this package with bare reads and with other libraries. One command
made it, with its plots, from the JSON of one run; each other library has an environment of its own, which
`ZB_BENCHMARKS_PYTHON` names:

```
pip install 'zb_hdf5[bench]'
python -m benchmarks report --out report/
```
"""
NODE: Final = f"""\
## A GPU node needs

A node of 8 H100 that trains a model of 8 billion parameters takes {NODE_TOKENS_PER_S / 1e6:.3f} M tokens/s: each GPU
about 4 s for 8 x 4,096 tokens. A model of 1 billion takes eight times as many. The column `nodes` of the tables below
is the number of nodes with the model of 8 billion that a rate would feed. Nearly every rate on this page is enough for
one; a loader costs a node the memory and the cores that it takes from other work, and the time until its first batch.
"""
HOW: Final = """\
## How it was measured

The figures are medians of all rounds; the least and the largest are in brackets. Each row runs in a process of its own,
all rows in turns, there and back, so that the noise of a machine meets all of them; a ratio compares two rows of one
round. A row and the one that it is compared with have read the same tokens, or there is no report.

- The rate is that of later passes; `one pass` is the first in a fresh process, in microseconds a batch.
- `first batch` begins before the data are opened, and ends with the batch. The imports of the libraries are not in it.
- `own` is anonymous memory that was added.
- A ratio compares the rate with that of the row that it names. [The JSON](report/report.json) has quantiles, processor
  time and mapped memory, too.
"""


# --- rates and bars -----------------------------------------------------------------------------------------------


def rate(row: dict[str, Any]) -> list[float]:
    """Return millions of tokens a second: the median, the least and the largest."""
    median, low, high = row["figures"][m.LATER]
    return [m.BATCH_TOKENS / us for us in (median, high, low)]


def missed(result: dict[str, Any]) -> list[str]:
    """Return a sentence for each row that falls short of its expected ratio."""
    found = []
    for table in result["tables"]:
        for row in table["rows"]:
            for figure, bar in row["bars"].items():
                ratio = row["ratios"].get(figure)
                if ratio and ratio[0] < bar:
                    found.append(
                        f"`{row['name']}` has {ratio[0]:.2f} of the rate of `{row['baseline']}` ({_kind(figure)}); "
                        f"{bar:.2f} was expected ({table['title']})."
                    )
    return found


def faster(result: dict[str, Any]) -> list[str]:
    """Return a sentence for each row of another library that is ahead of ours."""
    found = []
    for table in result["tables"]:
        if "libraries" not in table:
            continue
        ours = [row for row in table["rows"] if is_ours(row)]
        for row in table["rows"]:
            alike = [each for each in ours if is_in_data_loader(each) == is_in_data_loader(row)]
            ahead = [each["name"] for each in alike if rate(each)[0] < rate(row)[0]]
            if ahead and row not in ours:
                found.append(
                    f"`{row['name']}` ({rate(row)[0]:,.0f}) is ahead of {_and(f'`{name}`' for name in ahead)}."
                )
    return found


def is_ours(row: dict[str, Any]) -> bool:
    return bool(row["name"].startswith(OURS))


def is_in_data_loader(row: dict[str, Any]) -> bool:
    return "in a DataLoader" in row["name"]


def _and(words: Iterable[str]) -> str:
    found = list(words)
    return " and ".join(filter(None, [", ".join(found[:-1]), found[-1]]))


def _kind(figure: str) -> str:
    return figure.partition(",")[0]


# --- the page -----------------------------------------------------------------------------------------------------


def markdown(result: dict[str, Any], pictures: str | None = FOLDER) -> str:
    """Return the page; `pictures` is the folder of its plots, None: it has none."""
    lines = [TOP, f"The machine: {result['machine']}. The run took {result['seconds'] / 60:,.0f} minutes.", ""]
    load = busiest(result)
    if load > QUIET_LOAD:
        lines += [
            f"**A busy run**: other programs kept up to {load:.1f} cores busy; the column `load` has it for each row. "
            "Its figures are not those of the project.",
            "",
        ]
    elif load_of_rounds := _load_of_rounds(result):
        lines += [load_of_rounds, ""]
    if pictures and pictured(result):
        lines += ["## Rates", "", f"![The rates of ours, a bare loop and other libraries]({pictures}/{PICTURE})", ""]
    lines += [NODE, HOW] if pictures else [HOW]
    for table in result["tables"]:
        lines += _section(table, load > QUIET_LOAD, pictures)
    if result["quick"]:
        lines += ["Little data and few rounds (`--quick`): nothing here is judged.", ""]
    else:
        lines += _losses(result)
    return "\n".join(lines).rstrip() + "\n"


def busiest(result: dict[str, Any]) -> float:
    """Return the most cores that other programs kept busy before a row, the median of its rounds; 0: not measured."""
    rows = [row for table in result["tables"] for row in table["rows"]]
    return max((row["load"][0] for row in rows if "load" in row), default=0.0)


def _load_of_rounds(result: dict[str, Any]) -> str:
    """Return the load of all rows in words; "": it was not measured."""
    loads = [row["load"] for table in result["tables"] for row in table["rows"] if "load" in row]
    if not loads:
        return ""
    medians, _, most = zip(*loads, strict=True)
    busy = sum(load > QUIET_LOAD for load in most)
    return (
        "The cores that other programs used were counted before each round of each row: the medians of the rows are "
        f"{min(medians):.1f} to {max(medians):.1f}, the most before one round is {max(most):.1f}, and {busy} of "
        f"{len(loads)} rows have a round with more than {QUIET_LOAD}. The load of the machine is its average over the "
        "minute before the run, rounded."
    )


def pictured(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the first picture that were measured, in its order."""
    rows = {row["name"]: row for table in result["tables"] if table["title"] == WHOLE for row in table["rows"]}
    return [rows[name] for name in PICTURED_ROWS if name in rows]


def _losses(result: dict[str, Any]) -> list[str]:
    lines = ["## Where it loses", ""]
    losses = [*missed(result), *faster(result)]
    lines += [f"- {loss}" for loss in losses] or [
        "Nowhere in this run: each row has the ratio that was expected, and no other library is ahead."
    ]
    lines += ["", WHY] if losses else []
    return [*lines, ""]


def _section(table: dict[str, Any], is_busy: bool, pictures: str | None) -> list[str]:
    rounds = f"{table['rounds']} {'round' if table['rounds'] == 1 else 'rounds'}"
    lines = [f"## {table['title']}", "", f"{table['note']} {table['mib']:,} MiB of data, {rounds}.", ""]
    if table["rows"]:
        if pictures:
            lines += [f"![{table['title']}: all rows]({pictures}/{_file_name(table)})", ""]
        lines += [*_table(table["rows"], is_busy), ""]
    if table.get("conclusion"):
        lines += [table["conclusion"], ""]
    for facts in table.get("libraries", {}).values():
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        lines.append(f"- {facts['library']}: {versions}")
    lines += [f"- Not measured: {name}: {reason}" for name, reason in table["skipped"].items()]
    return [*lines, ""]


def _table(rows: Sequence[dict[str, Any]], is_busy: bool) -> list[str]:
    has_rates = any(m.LATER in row["figures"] for row in rows)
    known = list(dict.fromkeys(column for row in rows for column in row["figures"]))
    columns = [column for column in known if not (has_rates and column in LEFT_OUT)]
    ratios = [column for column in known if any(column in row["ratios"] for row in rows)]
    ratios = [RATIO] if has_rates else ratios
    numbers = [*([RATE, "nodes"] if has_rates else []), *columns, *(["load"] if is_busy else [])]
    headers = ["row", *numbers, *(f"{_kind(column)}, ratio" for column in ratios)]
    lines = [_line(headers), _line(["---", *["---:"] * len(numbers), *["---"] * len(ratios)])]
    for row in rows:
        cells = [row["name"].replace("|", "\\|")]
        cells += _rate_cells(row) if has_rates else []
        cells += [_cell(row, column) for column in columns]
        cells += [f"{row['load'][0]:.1f}" if "load" in row else ""] if is_busy else []
        cells += [_ratio(row, column) for column in ratios]
        lines.append(_line(cells))
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rate_cells(row: dict[str, Any]) -> list[str]:
    """Return the rate, and the number of nodes that it would feed."""
    if m.LATER not in row["figures"]:
        return ["", ""]
    median, low, high = map(_short, rate(row))
    return [f"{median} ({low} to {high})", f"{rate(row)[0] * 1e6 / NODE_TOKENS_PER_S:,.0f}"]


def _short(value: float) -> str:
    """Return a number with two digits or more that count."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _cell(row: dict[str, Any], column: str) -> str:
    if column not in row["figures"]:
        return ""
    median, low, high = row["figures"][column]
    if m.LATER in row["figures"]:
        return f"{median:,.1f}"
    return f"{median:,.2f} ({low:,.2f} to {high:,.2f})"


def _ratio(row: dict[str, Any], column: str) -> str:
    if column not in row["ratios"]:
        return ""
    median, low, high = row["ratios"][column]
    digits = 2 if median >= 0.1 else 3
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f}) of {row['baseline']}"


# --- the plots ----------------------------------------------------------------------------------------------------


def _file_name(table: dict[str, Any]) -> str:
    words = "".join(c if c.isalnum() else " " for c in table["title"].lower()).split()
    return f"{'-'.join(words)}.svg"


def draw(rows: Sequence[dict[str, Any]], path: Path, *, need: float | None = None) -> None:
    """Draw the rows of a table: rates where batches are timed, else the first figure; whiskers to least and largest.

    Parameters
    ----------
    rows
        The rows of the table.
    path
        The file of the plot.
    need
        M tokens/s that a line marks. None: no line.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    has_rates = all(m.LATER in row["figures"] for row in rows)
    shown = [row for row in rows if has_rates or _first(rows) in row["figures"]]
    values = [rate(row) if has_rates else row["figures"][_first(rows)] for row in shown]
    settings = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.family": "sans-serif", "font.size": 9}
    colours = {"text.color": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY}
    with mpl.rc_context(settings | colours | {"axes.edgecolor": GREY}):
        figure = Figure(figsize=(7.2, 0.6 + 0.24 * len(shown)), layout="constrained")
        axes = figure.subplots()
        medians = [value[0] for value in values]
        whiskers = [[value[0] - value[1] for value in values], [value[2] - value[0] for value in values]]
        names = [f"{number}. {row['name']}" for number, row in enumerate(shown, start=1)]  # two names may be equal
        bars = axes.barh(names, medians, xerr=whiskers, ecolor=GREY, height=0.7)
        for bar, row in zip(bars, shown, strict=True):
            bar.set_color(OURS_COLOUR if is_ours(row) else OTHERS_COLOUR)
        axes.invert_yaxis()
        axes.set_xlabel(f"{RATE}, later passes" if has_rates else _first(rows))
        least = min([*medians, *([] if need is None else [need])])
        if max(medians) > LINEAR_UP_TO * least > 0:
            axes.set_xscale("log")
            axes.set_xlim(left=least / 2)
        if need is not None:
            axes.axvline(need, color=GREY, linestyle="--")
            axes.set_title(f"- - {need:.3f}: a node of 8 H100, 8 billion parameters", loc="left", fontsize=9)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def _first(rows: Sequence[dict[str, Any]]) -> str:
    """Return the first figure that the rows have."""
    return str(next(iter(rows[0]["figures"])))


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write the JSON, the plots and the page, and return the path of the page."""
    to = folder / FOLDER
    to.mkdir(parents=True, exist_ok=True)
    for old in to.glob("*.svg"):
        old.unlink()
    (to / "report.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for table in result["tables"]:
        if table["rows"]:
            draw(table["rows"], to / _file_name(table))
    if chosen := pictured(result):
        draw(chosen, to / PICTURE, need=NODE_TOKENS_PER_S / 1e6)
    page = folder / "report.md"
    page.write_text(markdown(result), encoding="utf-8")
    return page
