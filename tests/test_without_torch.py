"""All that comes before training works without torch; the rest names in one line what to install."""

import importlib
import io
import json
import os
import re
import shlex
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from commandline import commands_of, run_zb
from modules import MODULES
from processes import PROGRAMS, environment, python

from zb_hdf5.commands.zb import zb

MESSAGE = "this needs the package torch: pip install 'zb_hdf5[torch]'"
#: Its classes are those of torch.
NEED_TORCH = {"zb_hdf5.loaders.datasets", "zb_hdf5.commands.timing"}
#: Every process that starts with this on its path finds no torch.
BLOCKER = """import sys


class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, NoTorch())
"""
TOKENS = np.arange(1024, dtype=np.uint16) % 300
SHAPE = "--batch-size 4 --seq-len 16"
#: Every command, in an order in which each has what it needs.
COMMANDS = f"""
fetch {{url}}/tokens_{{{{}}}}.npy -n 1 -o fetched
convert npy-to-hdf5 fetched/tokens_0.npy h5 {SHAPE} --vocab-size 300 --shards 3 --workers 2
convert npy-to-batch fetched/tokens_0.npy batch {SHAPE} --dtype uint16
convert hdf5-to-batch h5 h5-batch
convert hdf5-to-hdf5 h5 zstd --codec gzip
convert batch-to-hdf5 h5-batch h5-again
convert hdf5-to-npy h5 of-h5.npy
convert batch-to-npy batch of-batch.npy
convert npy-to-stream flat.npy stream --boundary-token-id 7
convert stream-to-hdf5 stream rows {SHAPE}
convert stream-to-batch stream rows-batch {SHAPE} --tokens-only
tokenizer train text.parquet --vocab-size 300 -o tok.json
convert parquet-to-hdf5 text.parquet parquet-h5 --tokenizer byte {SHAPE}
convert jsonl-to-hdf5 text.jsonl jsonl-h5 --tokenizer byte {SHAPE} --metadata-columns lang
fields make jsonl-h5 lang --meta lang
fields list jsonl-h5
fields info jsonl-h5 lang
fields finish jsonl-h5 lang
fields verify jsonl-h5 lang
fields release jsonl-h5 lang
fields drop jsonl-h5 lang --yes
convert text-to-hdf5 text.txt text-h5 --tokenizer byte {SHAPE}
info parquet-h5
show parquet-h5 --batch 0
report parquet-h5 -o report.html
which parquet-h5 --batch 0
verify h5
verify stream
index merge h5
index rebuild h5 --force
index crc32 {{batch}}
index digests flat.npy -o flat.digests.json
verify flat.npy --digests flat.digests.json
repair h5
cache ls .
cache rm .
stage h5 cache
doctor h5
bench h5
plan h5 --ranks 1
"""


@pytest.fixture
def no_torch(tmp_path):
    """Return the environment of processes that find no torch."""
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker" / "sitecustomize.py").write_text(BLOCKER)
    paths = (str(tmp_path / "blocker"), environment()["PYTHONPATH"])
    return environment(PYTHONPATH=os.pathsep.join(paths))


class OneFile(BaseHTTPRequestHandler):
    """Gives ranges of one file."""

    def do_GET(self):
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        content = self.server.content
        part = content[first : last + 1]
        covered = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        self._begin(206, len(part), **{"Content-Range": covered})
        self.wfile.write(part)

    def do_HEAD(self):
        self._begin(200, len(self.server.content))

    def _begin(self, status, length, **headers):
        self.send_response(status)
        for name, value in {"ETag": '"1"', "Content-Length": length, **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, *arguments):
        pass


@contextmanager
def served(content):
    """Serve some bytes as a file; return the URL of its folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), OneFile) as server:
        server.content = content
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def rows():
    """Return the bytes of a `.npy` file."""
    file = io.BytesIO()
    np.save(file, TOKENS.reshape(64, 16))
    return file.getvalue()


def write_sources(folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    np.save(folder / "flat.npy", TOKENS)
    texts = ["once upon a time there was a house"] * 20
    parquet.write_table(pyarrow.table({"text": texts}), folder / "text.parquet")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text, "lang": "en"}) + "\n" for text in texts))
    (folder / "text.txt").write_text("\n".join(texts))


def outcomes_of(lines):
    """Run commands in this process; return the exit code and the errors of each."""
    assert "torch" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch")
    for module in MODULES:
        if module not in NEED_TORCH:
            importlib.import_module(module)
    found = {}
    for line in lines:
        done = run_zb(*shlex.split(line))
        found[line] = done.exit_code, done.output
    assert "torch" not in sys.modules
    return found


RUN = "import json, sys, test_without_torch as these; print(json.dumps(these.outcomes_of(sys.argv[1:])))"


def test_every_module_is_imported_and_every_command_runs(tmp_path, no_torch):
    pytest.importorskip("tokenizers")
    pytest.importorskip("tiktoken")
    write_sources(tmp_path)
    with served(rows()) as url:
        lines = COMMANDS.format(url=url, batch="h5-batch/shard-00000-of-00003.batch").strip().splitlines()
        done = python(RUN, *lines, cwd=tmp_path, env=no_torch)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    for line, (exit_code, errors) in outcomes.items():
        if line.split()[0] in ("stage", "doctor", "bench", "plan"):
            assert (exit_code, errors) == (5, f"Error: {MESSAGE}\n"), line
        else:
            assert exit_code == 0, (line, errors)
    commands = [name for name, command in commands_of(zb) if not hasattr(command, "commands")]
    # a bucket is in tests/remote
    assert [name for name in commands if not any(line.startswith(f"{name} ") for line in outcomes)] == ["fields upload"]
    assert not (tmp_path / "cache").exists()


def test_readers_give_numpy_and_every_loader_names_what_to_install(tmp_path, no_torch):
    write_sources(tmp_path)
    done = python(PROGRAMS / "need_torch.py", cwd=tmp_path, env=no_torch)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [MESSAGE] * 11


@pytest.mark.parametrize(
    "cause",
    [
        "raise ImportError('libcudart.so.12: cannot open shared object file')",
        "import torch_dependency_that_is_missing",
        "raise OSError('libgomp.so.1: file too short')",
        "from torch import _C",
        "raise RuntimeError('module compiled against another numpy')",
    ],
)
@pytest.mark.thin
def test_a_broken_torch_is_not_called_missing(cause, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"{cause}\n")
    np.save(tmp_path / "x.npy", TOKENS)
    code = """
import sys
from zb_hdf5 import Loader, UnavailableError
try:
    Loader("x.npy", batch_size=1, seq_len=8)
except UnavailableError as error:
    print(error)
"""
    done = python(code, cwd=tmp_path, env=environment(PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"))
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith("the package torch is installed, and its import fails: ")
    assert "pip install" not in line


@pytest.mark.slow
def test_a_broken_h5py_is_an_error_in_one_line(tmp_path):
    (tmp_path / "h5py").mkdir()
    (tmp_path / "h5py" / "__init__.py").write_text("raise RuntimeError('module compiled against another numpy')\n")
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(512))
    np.save(tmp_path / "x.npy", TOKENS)
    code = """
from commandline import run_zb
from zb_hdf5 import Loader, UnavailableError
for words in ("info x.h5", "convert x.npy out --seq-len 16 --batch-size 4"):
    print(run_zb(*words.split(), code=5).stderr, end="")
try:
    Loader("x.h5")
except UnavailableError as error:
    print(error)
"""
    done = python(code, cwd=tmp_path, env=environment(PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}"))
    assert done.returncode == 0, done.stderr
    reason = "the package h5py is installed, and its import fails: RuntimeError: module compiled against another numpy"
    assert [line.removeprefix("Error: ").partition(";")[0] for line in done.stdout.splitlines()] == [reason] * 3
