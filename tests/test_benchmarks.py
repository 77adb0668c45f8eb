"""The benchmarks run, and give positive figures in every row; few modules run in the jobs that users do most."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from commandline import run

from benchmarks import beyond, field_sets, memory_cap, peers, read
from benchmarks import measure as m
from benchmarks.__main__ import PARTS, benchmarks
from benchmarks.peers import WHOLE
from benchmarks.report import QUIET_LOAD, busiest, faster, markdown, missed, pictured

ROOT = Path(__file__).resolve().parent.parent
#: Rows of each benchmark.
ROWS = {"peers": 14, "read": 20, "load": 39, "field_sets": 13, "train": 5, "convert": 13, "remote": 3}
#: Bytes of memory of a process that is capped.
CAP = 64 << 20
#: The run whose page is a part of the documentation.
RUN = ROOT / "docs" / "report" / "report.json"


@pytest.fixture
def place():
    """Return where the memory of a process may be capped."""
    try:
        return memory_cap.usable_place(CAP)
    except memory_cap.NoCapError as error:
        pytest.skip(str(error))


def measured(name, *options, timeout_s=120):
    command = [sys.executable, "-m", "benchmarks", name, "--quick", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_measured(tmp_path, name):
    if name == "remote" and shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("needs nginx (Debian: nginx-light)")
    path = tmp_path / "figures.json"
    options = ["--ours"] if name in ("peers", "field_sets") else []
    done = measured(name, *options, "--json", path, "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["figures.json"], "the data is removed at the end"
    assert "was expected" not in done.stdout, "too little was measured to judge by"
    rows = [row for table in json.loads(path.read_text())["tables"] for row in table["rows"]]
    assert len(rows) == ROWS[name]
    for row in rows:
        assert row["name"] in done.stdout
        assert all(0 < low <= median <= high for median, low, high in row["figures"].values() if low)


@pytest.mark.parametrize("name", PARTS)
def test_a_name_of_no_table_is_refused_with_all_names(name):
    done = run(benchmarks, name, "--quick", "--only", "nonsense")
    module = import_module(f"benchmarks.{name}")
    assert module.MIB > 0, "the size of a whole run, which no quick one asks for"
    known = [title for title in module.TITLES if title != "Against the older build"]
    assert done.exit_code == 2
    assert "; ".join(known) in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_name_measures_one_table_and_an_older_build_is_measured_beside_this_one(tmp_path):
    done = measured("read", "--only", "windows")
    assert done.stdout.count("\n| row |") == 1, done.stderr
    assert "## Windows of 2048 tokens of a stream" in done.stdout
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "zb_hdf5").symlink_to(ROOT / "zb_hdf5")
    done = measured("convert", "--only", "streams", "--old", tmp_path / "old")
    assert done.returncode == 0, done.stderr
    assert "parquet-to-hdf5, old" in done.stdout


# --- comparison --------------------------------------------------------------------------------------------------


def way(name, order, us, seen=1.0, baseline="", bar=None):
    def measure():
        order.append(name)
        return {m.LATER: us[len([each for each in order if each == name]) - 1], m.SEEN: seen}

    return m.Way(name, measure, baseline, {m.LATER: bar} if bar else {})


def test_rounds_go_there_and_back_and_a_ratio_compares_two_rows_of_one_round():
    order = []
    ways = [way("a", order, [10, 20, 30]), way("b", order, [20, 20, 20], baseline="a"), way("c", order, [1, 2, 3])]
    table = m.compare("title", ways, 3)
    assert "".join(order) == "abccbaabc"
    assert table["rows"][0]["figures"] == {m.LATER: [20, 10, 30]}, "the median, the least, the largest"
    assert table["rows"][1]["ratios"] == {m.LATER: [1, 0.5, 1.5]}


def test_rows_that_have_read_other_tokens_are_not_compared():
    ways = [way("a", [], [10]), way("b", [], [20], seen=2.0, baseline="a")]
    with pytest.raises(m.UnequalError, match="b: read other tokens than a"):
        m.compare("title", ways, 1)


def test_a_row_that_cannot_be_measured_is_named_with_the_reason():
    def fail():
        raise m.UnavailableRow("no such library")

    table = m.compare("title", [m.Way("a", fail), way("b", [], [1, 1])], 2)
    assert [row["name"] for row in table["rows"]] == ["b"]
    assert table["skipped"] == {"a": "no such library"}


#: Functions that end in several ways.
ENDS = """
import os, signal

def one():
    return 1

def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)

def leave():
    os._exit(3)

def kill_all():
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
"""
SIGKILL = "killed by SIGKILL, as the kernel does where memory is short"


@pytest.fixture
def build(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    build = m.Build("ends", tmp_path)
    yield build
    build.close()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("kill_itself", SIGKILL),
        ("leave", "the process ended with exit code 3, and without a result"),
        ("kill_all", "killed by SIGTERM"),
    ],
)
@pytest.mark.thin
def test_a_process_that_is_killed_is_an_error_at_once_and_the_next_call_works(build, function, reason):
    with pytest.raises(m.KilledError, match=re.escape(f"{function}(): {reason}")):
        build.call(function)
    assert build.call("one") == 1


def test_a_row_whose_process_is_killed_is_named_with_the_signal_and_the_others_go_on(build, capsys):
    ways = [
        m.Way("Loader", m.way_of(build, "kill_itself")),
        m.Way("loop", lambda: {m.LATER: build.call("one")}, "Loader"),
    ]
    table = m.compare("Whole batches", ways, 2)
    assert [row["name"] for row in table["rows"]] == ["loop"]
    assert table["skipped"] == {"Loader": f"{SIGKILL} (round 1 of 2)"}
    assert f"Whole batches: Loader: {SIGKILL} (round 1 of 2)" in capsys.readouterr().err


def test_a_preparation_that_is_killed_is_the_reason_for_the_tables_that_it_leaves_out(build, monkeypatch, tmp_path):
    def measure(run):
        yield table_of(title="Codecs")
        raise m.KilledError("prepare()", -9)

    monkeypatch.setattr(read, "measure", measure)
    monkeypatch.setattr(m, "Build", lambda *_: build)
    path = tmp_path / "figures.json"
    done = run(benchmarks, "read", "--quick", "--folder", tmp_path, "--json", path)
    assert done.exit_code == 0, done.output
    tables = json.loads(path.read_text())["tables"]
    assert tables[0]["rows"]
    titles = [title for title in read.TITLES if title != "Codecs"]
    assert [table["skipped"] for table in tables[1:]] == [{title: SIGKILL} for title in titles]


def test_tokens_are_the_same_in_any_order_of_their_rows_and_no_others():
    tokens = np.random.default_rng(1).integers(0, 50_000, (8, 4, m.SEQ_LEN))
    shuffled = tokens.reshape(32, -1)[np.random.default_rng(2).permutation(32)].reshape(tokens.shape)
    assert m.tokens_seen(tokens) == m.tokens_seen([{"tokens": batch} for batch in shuffled.astype(np.int32)])
    others = tokens.copy()
    others[0, 0, :2] = others[0, 0, 1::-1]
    assert m.tokens_seen(others) != m.tokens_seen(tokens)
    assert m.tokens_seen(np.concatenate([tokens, tokens[:1]])) != m.tokens_seen(tokens)


def test_passes_have_all_figures():
    batches = np.zeros((4, m.BATCH_SIZE, m.SEQ_LEN), np.int64)
    figures = m.passes(lambda: lambda epoch: iter(batches))
    assert figures.keys() == {m.FIRST, m.LATER, m.P50, m.P99, m.OPEN, m.OWN, m.MAPPED, m.CPU, m.SEEN}
    assert 0 < figures[m.P50] <= figures[m.P99]


# --- other libraries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [peers.OURS, peers.MEMMAP, *peers.OTHERS])
def test_a_file_of_a_library_has_what_is_asked_of_it(name):
    tree = ast.parse((ROOT / "benchmarks" / "peers" / f"{name}.py").read_text(encoding="utf-8"))
    targets = [node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)]
    targets += [node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)]
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert {"LIBRARY", "PACKAGES", "BATCHES", "ROWS"} <= set(targets)
    assert "prepare" in functions


def test_every_file_of_a_library_is_measured():
    files = {path.stem for path in (ROOT / "benchmarks" / "peers").glob("[!_]*.py")}
    assert files == {peers.OURS, peers.MEMMAP, *peers.OTHERS}


def test_a_library_that_is_missing_is_a_reason():
    build = m.Build("benchmarks.peers", None, sys.executable, ["benchmarks.peers.nothing"])
    try:
        with pytest.raises(m.CallError, match=r"No module named 'benchmarks.peers.nothing'$"):
            build.call("describe", "nothing")
    finally:
        build.close()


def test_an_interpreter_that_is_none_is_refused():
    done = run(benchmarks, "peers", "--python", "hf=nowhere")
    assert done.exit_code == 2
    assert "expected NAME=INTERPRETER, found 'hf=nowhere'" in done.stderr


# --- data that are larger than memory ----------------------------------------------------------------------------

V1 = "4:memory:/user/one\n3:cpu,cpuacct:/\n0::/user\n"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "0::/user.slice/shell.scope\n"
V2_MOUNTS = "26 23 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("groups", "mounts", "folders"),
    [
        (V1, V1_MOUNTS, ["/sys/fs/cgroup/memory/user/one"]),
        (V1, V1_MOUNTS.replace("0:32 / ", "0:32 /user "), ["/sys/fs/cgroup/memory/one"]),  # of a container
        (V1, V1_MOUNTS.replace("0:32 / ", "0:32 /other "), []),
        (V1, V2_MOUNTS, []),
        (V2, V2_MOUNTS, ["/sys/fs/cgroup/user.slice/shell.scope", "/sys/fs/cgroup/user.slice"]),
        ("0::/\n", V2_MOUNTS, ["/sys/fs/cgroup"]),
        ("", "", []),
    ],
)
def test_a_group_is_made_below_that_of_this_process(groups, mounts, folders):
    assert [str(place.folder) for place in memory_cap.places(groups, mounts)] == folders


@pytest.mark.parametrize("kind", [memory_cap.V1, memory_cap.V2])
def test_a_folder_without_limits_of_memory_is_left_as_it_was(tmp_path, kind):
    with pytest.raises(FileNotFoundError, match=kind.limit):
        memory_cap.Group(memory_cap.Place(tmp_path, kind), CAP)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_page_cache_of_a_process_is_capped_and_one_that_allocates_more_is_killed(tmp_path, place):
    path = tmp_path / "large"
    path.write_bytes(bytes(2 * CAP))
    m.evict(path)
    read_it = "f = open(sys.argv[2], 'rb', buffering=0); print(sum(map(len, iter(lambda: f.read(1 << 20), b''))))"
    enter = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); "
    with memory_cap.group(place, CAP) as group:
        command = [sys.executable, "-c", enter + read_it, group.entrance, path]
        assert subprocess.run(command, capture_output=True, text=True).stdout == f"{2 * CAP}\n"
        assert CAP / 2 < group.peak_mib() * m.MIB <= CAP
        done = subprocess.run([sys.executable, "-c", enter + f"bytearray({2 * CAP})", group.entrance])
        assert done.returncode == -signal.SIGKILL
    assert not group.folder.exists()


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.usefixtures("place")
def test_data_that_are_larger_than_memory_are_read_and_a_tensor_of_them_is_killed(tmp_path):
    path = tmp_path / "figures.json"
    done = measured("beyond", "--json", path, "--folder", tmp_path, timeout_s=400)
    assert done.returncode == 0, done.stderr
    [table] = json.loads(path.read_text())["tables"]
    rows = {row["name"]: row for row in table["rows"]}
    assert {"Loader", "Loader, .batch, sequential", "np.memmap loop", "O_DIRECT, sequential"} <= rows.keys()
    cap_mib = table["mib"] / beyond.SHARE
    assert all(0 < row["figures"][beyond.PEAK][0] <= cap_mib for row in rows.values())
    killed = table["skipped"]["torch.load, int64 batches in memory, in a DataLoader"]
    assert killed == f"{SIGKILL} (round 1 of 1)"
    assert table["conclusion"] in done.stdout


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.usefixtures("place")
def test_field_sets_that_are_larger_than_memory_are_read(tmp_path):
    path = tmp_path / "figures.json"
    done = measured("field_sets", "--only", "larger", "--json", path, "--folder", tmp_path, timeout_s=400)
    assert done.returncode == 0, done.stderr
    [table] = json.loads(path.read_text())["tables"]
    assert not table["skipped"]
    cap_mib = table["mib"] / beyond.SHARE
    assert [row["name"] for row in table["rows"]] == list(field_sets.BEYOND)
    assert all(0 < row["figures"][beyond.PEAK][0] <= cap_mib + 1 for row in table["rows"])


def test_what_was_measured_is_written_when_a_later_table_fails(build, monkeypatch, tmp_path):
    def measure(run):
        assert run.mib == 200
        yield table_of(title=run.titles[0])
        raise RuntimeError("a row that nobody expected to fail")

    monkeypatch.setattr(read, "measure", measure)
    monkeypatch.setattr(m, "Build", lambda *_: build)
    with pytest.raises(RuntimeError, match="nobody expected"):
        run(benchmarks, "read", "--json", tmp_path / "figures.json", "--folder", tmp_path)
    [table] = json.loads((tmp_path / "figures.json").read_text())["tables"]
    assert [row["name"] for row in table["rows"]] == ["np.memmap loop", "Loader", "another"]


def test_a_machine_that_cannot_cap_memory_is_a_reason(build, monkeypatch, tmp_path):
    monkeypatch.setattr(memory_cap, "places", lambda groups, mounts: [])
    monkeypatch.setattr(m, "Build", lambda *_: build)
    done = run(benchmarks, "beyond", "--quick", "--folder", tmp_path)
    assert done.exit_code == 0, done.output
    reason = (
        "the memory of one process cannot be capped here (no control groups of memory are mounted for this process)"
    )
    assert f"- Not measured: Larger than memory: {reason}" in done.stdout


def test_the_conclusion_is_made_of_the_numbers():
    ways = [
        way("Loader", [], [40, 400], baseline="np.memmap loop"),
        way("Loader, sequential", [], [20, 20], baseline="np.memmap loop, sequential"),
        way("np.memmap loop", [], [400, 800]),
        way("np.memmap loop, sequential", [], [15, 15]),
    ]
    table = m.compare("title", ways, 2) | {"skipped": {"tensor": f"{SIGKILL} (round 1 of 2)", "hf": "no such library"}}
    found = beyond.conclusion(table, 1024)
    assert found == (
        "With 256 MiB of memory for 1,024 MiB of data, `Loader` reads 74 (41 to 410) M tokens/s shuffled, "
        "6.00 (2.00 to 10.00) of `np.memmap loop`; `Loader, sequential` reads 819 (819 to 819) M tokens/s in sequence, "
        "0.75 (0.75 to 0.75) of `np.memmap loop, sequential`; `tensor` is killed."
    )
    page = markdown(result_of({**table, "conclusion": found, "note": "", "mib": 1024}))
    for row in table["rows"][:2]:  # the sentence has the numbers of the table
        line = next(line for line in page.splitlines() if line.startswith(f"| {row['name']} |"))
        _, rate, *_, ratio, _ = (cell.strip() for cell in line.split("|")[1:])
        assert f"`{row['name']}` reads {rate} M tokens/s" in found
        assert ratio.replace(" of ", " of `") + "`" in found
    assert "is killed." in markdown(result_of(table_of(conclusion="It is killed.")))


# --- the report --------------------------------------------------------------------------------------------------


def result_of(*tables, quick=False):
    return {"machine": "one of 1970", "seconds": 61, "quick": quick, "tables": list(tables)}


def table_of(**others):
    ways = [
        way("np.memmap loop", [], [10, 10]),
        way("Loader", [], [16, 20], baseline="np.memmap loop", bar=0.8),
        way("another", [], [12, 12], baseline="Loader"),
    ]
    table = m.compare("A table", ways, 2) | {"note": "A note.", "mib": 1, **others}
    for row in table["rows"]:
        row["load"] = [0.0, 0.0, 0.0]  # whatever else runs here
    return table


def test_the_page_says_where_it_loses():
    result = result_of(table_of(libraries={}))
    assert missed(result) == ["`Loader` has 0.56 of the rate of `np.memmap loop` (later); 0.80 was expected (A table)."]
    assert faster(result) == [
        "`np.memmap loop` (1,638) is ahead of `Loader`.",
        "`another` (1,365) is ahead of `Loader`.",
    ]
    for row in result["tables"][0]["rows"][1:]:
        row["name"] += " in a DataLoader"
    assert faster(result) == ["`another in a DataLoader` (1,365) is ahead of `Loader in a DataLoader`."]
    page = markdown(result_of(table_of()))
    assert "## Where it loses\n\n- `Loader` has 0.56" in page
    assert "| Loader | 910 (819 to 1,024) | 13,889 | 0.56 (0.50 to 0.62) of np.memmap loop |" in page
    assert page.index("## A table") < page.index("## Where it loses")


def test_a_quick_run_is_not_judged():
    page = markdown(result_of(table_of(), quick=True))
    assert "was expected" not in page
    assert "Where it loses" not in page


def test_a_busy_run_has_the_load_of_each_row_and_says_so():
    table = table_of()
    quiet = markdown(result_of(table))
    assert "busy" not in quiet
    for number, row in enumerate(table["rows"]):
        row["load"] = [number / 2, 0, 4]
    page = markdown(result_of(table))
    assert "**A busy run**: other programs kept up to 1.0 cores busy" in page
    assert "| np.memmap loop | 1,638 (1,638 to 1,638) | 25,000 | 0.0 |" in page
    assert "| another | 1,365 (1,365 to 1,365) | 20,833 | 1.0 |" in page


def test_a_quiet_run_tells_its_load_of_the_rounds_too():
    table = table_of()
    for number, row in enumerate(table["rows"]):
        row["load"] = [0.1 * number, 0.0, 0.3 + number]
    page = markdown(result_of(table))
    assert "the medians of the rows are 0.0 to 0.2, the most before one round is 2.3, and 2 of 3 rows have" in page
    assert "**A busy run**" not in page


#: Writes a report twice, in a process of its own: matplotlib leaves its fonts open.
WRITE = """
import json, pathlib, sys
from benchmarks.report import write
result = json.load(sys.stdin)
folder = pathlib.Path(sys.argv[1])
write(result, folder / "first")
print(write(result, folder / "second"))
"""


@pytest.mark.slow
def test_the_report_is_one_json_a_page_and_plots(tmp_path):
    pytest.importorskip("matplotlib")
    without_rows = {"title": "Another", "note": "A note.", "mib": 1, "rounds": 0, "rows": [], "skipped": {"it": "why"}}
    result = result_of(table_of(), without_rows)
    command = [sys.executable, "-c", WRITE, tmp_path]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(result), capture_output=True, text=True, check=True)
    page = tmp_path / "second" / "report.md"
    assert done.stdout == f"{page}\n"
    assert page.read_text() == markdown(result)
    assert "](report/a-table.svg)" in page.read_text()
    assert "- Not measured: it: why" in page.read_text()
    assert json.loads((tmp_path / "second" / "report" / "report.json").read_text()) == result
    assert not (tmp_path / "second" / "report" / "rates.svg").exists(), "no row of the first picture was measured"
    plots = [(tmp_path / name / "report" / "a-table.svg").read_text() for name in ("first", "second")]
    assert "another" in plots[0]
    assert plots[0] == plots[1], "the same figures give the same plot"


def plots_of(result):
    return [table for table in result["tables"] if table["rows"]]


def test_the_page_of_the_documentation_is_made_from_its_run():
    result = json.loads(RUN.read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "report.md").read_text(encoding="utf-8") == markdown(result)
    assert not result["quick"]
    assert busiest(result) <= QUIET_LOAD, "a busy run is never shown as the figures of the project"
    assert {table["rounds"] for table in result["tables"]} == {5}
    assert next(table["mib"] for table in result["tables"] if table["title"] == WHOLE) >= 200
    assert next(table["mib"] for table in result["tables"] if table["title"] == "Larger than memory") >= 4096
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    [words] = re.findall(r'img\[alt\*="(.*?)"\]', (ROOT / "docs" / "_static" / "site.css").read_text(encoding="utf-8"))
    assert page.count(f"{words}](report/") == len(plots_of(result)), "the plots that are as wide as the column"
    plots = sorted(path.name for path in RUN.parent.glob("*.svg"))
    assert len(plots) == sum(bool(table["rows"]) for table in result["tables"]) + bool(pictured(result))
    assert all(path.stat().st_size < 100_000 for path in RUN.parent.iterdir() if path.suffix == ".svg")
