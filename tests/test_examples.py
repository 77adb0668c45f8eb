"""The examples: train_gpt.py, killed and resumed, trains on exactly the same records; all learn what they should."""

import hashlib
import importlib
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from contents import write_batches, write_stream
from interpreter import run_training, start_training
from processes import running

from zb_hdf5 import Loader, load_tokenizer, open_corpus
from zb_hdf5.commands.zb import zb

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_gpt.py"
SHAPE = ["--global-batch", "8", "--width", "16", "--layers", "1", "--vocab-size", "100", "--save-every", "5"]
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start(data, out, processes, steps):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launch, str(EXAMPLE), str(data), "--out", str(out), "--steps", str(steps), *SHAPE]
    how = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **how)


def environment(**variables):
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    outside = {name: value for name, value in outside.items() if name not in LAUNCHERS}
    return {**outside, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parent.parent), **variables}


def task_of(variables, *arguments):
    """Start train_gpt.py as a task that has these variables and no launcher's own."""
    return start_training(EXAMPLE, *SHAPE, *arguments, env=environment(**variables))


def ended(*tasks):
    """Wait for the end of tasks, which must succeed; return what each one prints."""
    with running(*tasks):
        found = [task.communicate() for task in tasks]
    assert not any(task.returncode for task in tasks), found
    return [text for text, _ in found]


def run_example(name, *arguments, code=0):
    """Run an example to its end; return what it prints: where it fails, its errors."""
    offline = environment(HF_HUB_OFFLINE="1")
    done = run_training(EXAMPLE.with_name(name), *arguments, env=offline, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


@pytest.fixture
def data(tmp_path):
    tokens = np.random.default_rng(9).integers(0, 100, (100, 8, 32), dtype=np.uint16)
    return write_batches(tmp_path / "t.h5", tokens, dtype="uint16").path


def logged(out, rank):
    path = out / f"log.rank{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def digest(rows):
    """Return what the example logs of these records."""
    return hashlib.sha256(np.ascontiguousarray(rows[:, :-1])).hexdigest()[:16]


@pytest.mark.slow
def test_killed_and_resumed_on_another_number_of_processes(data, tmp_path):
    out = tmp_path / "run"
    first = start(data, out, 2, 100_000)
    deadline = time.monotonic() + 90
    while len(logged(out, 0)) < 12 and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    before = {rank: {record["step"]: record["data"] for record in logged(out, rank)} for rank in (0, 1)}
    assert max(before[0]) >= 12
    saved = max(step for step in before[0] if step % 5 == 0 and step < max(before[0]))
    second = start(data, out, 1, saved + 25)
    text, _ = second.communicate(timeout=120)
    assert second.returncode == 0, text
    assert re.search(r"waited \d+\.\d\d of \d+\.\d\d s for data \(\d+\.\d%\)", text)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    resumed_at = int(text.split("from step ")[1].split()[0])
    assert resumed_at % 5 == 0
    assert resumed_at >= 10

    loader = Loader(data, seed=1, rank=0, world_size=1, batch_size=8)
    steps = [loader.get_batch().numpy() for _ in range(max(saved + 25, max(before[0])))]
    for rank in (0, 1):
        assert before[rank] == {step: digest(steps[step - 1][4 * rank : 4 * rank + 4]) for step in before[rank]}
    after = {record["step"]: record["data"] for record in logged(out, 0)[len(before[0]) :]}
    assert after == {step: digest(steps[step - 1]) for step in range(resumed_at + 1, saved + 26)}


SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames n[1-2]" ] && printf '127.0.0.1\\n127.0.0.2\\n' && touch "$0.asked"
"""


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_the_tasks_of_srun_are_one_world(hosts, data, tmp_path):
    """Two processes with the variables that srun gives its tasks; of two hosts, `scontrol` names the first."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(SCONTROL)
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    job |= {"SLURM_STEP_NUM_NODES": str(hosts), "SLURM_STEP_NODELIST": "n[1-2]" if hosts == 2 else "n1"}
    job |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}" if hosts == 2 else os.environ["PATH"]}
    ranks = [job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    texts = ended(*(task_of(rank, data, "--out", tmp_path / "run", "--steps", 6) for rank in ranks))
    assert (tmp_path / "bin" / "scontrol.asked").exists() == (hosts == 2)
    assert "2 processes, from step 0 to 6, 100 steps an epoch" in texts[0]
    with Loader(data, seed=1, rank=0, world_size=1, batch_size=8) as loader:
        steps = [loader.get_batch().numpy() for _ in range(6)]
    for rank in range(2):
        expected = [digest(rows[4 * rank : 4 * rank + 4]) for rows in steps]
        assert [record["data"] for record in logged(tmp_path / "run", rank)] == expected


@pytest.mark.slow
def test_a_batch_script_without_srun_is_one_process(data, tmp_path):
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"}
    [text] = ended(task_of(job, data, "--out", tmp_path / "run", "--steps", 2))
    assert "1 processes, from step 0 to 2, 100 steps an epoch" in text


@pytest.mark.slow
def test_the_logits_of_a_document_do_not_depend_on_its_row_mates(tmp_path, monkeypatch):
    """With the masks they are those of the document alone; without them other row-mates change them."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from train_gpt import GPT, model_inputs

    rng = np.random.default_rng(4)
    path = tmp_path / "s.h5"
    lengths = rng.integers(3, 30, 60)
    write_stream(path, rng.integers(0, 100, lengths.sum()), lengths, vocab_size=100)
    wanted = ("cu_seqlens", "position_ids", "document_ids")
    with Loader(path, batch_size=4, seq_len=48, targets=True, documents=wanted, rank=0, world_size=1) as loader:
        step = next(loader)
    torch.manual_seed(0)
    model = GPT(100, 48, 32, 2)
    x, _, mask, positions = model_inputs(step)
    with torch.no_grad():
        masked = model.logits(x, mask, positions)
        plain = model.logits(x)
        for number in range(int(step["document_ids"].max()) + 1):
            ours = step["document_ids"] == number
            others = torch.where(ours, x, (x + torch.randint(1, 100, x.shape)) % 100)  # each one is another token
            torch.testing.assert_close(model.logits(others, mask, positions)[ours], masked[ours])
            torch.testing.assert_close(model.logits(x[ours].unsqueeze(0))[0], masked[ours])
            if not ours[:, 0].any():  # something lies before it in its row
                assert (model.logits(others)[ours] - plain[ours]).abs().amax(-1).min() > 1e-3


@pytest.mark.slow
def test_it_trains_on_packed_text_with_document_masks(tmp_path):
    text, packed, out = (str(tmp_path / name) for name in ("text.jsonl", "packed", "run"))
    lines = [json.dumps({"text": f"document {number} " * (1 + number % 9)}) for number in range(300)]
    Path(text).write_text("\n".join(lines), encoding="utf-8")
    sizes = ["--seq-len", "128", "--batch-size", "8", "--packing", "best-fit"]
    done = CliRunner().invoke(zb, ["convert", "jsonl-to-hdf5", text, packed, "--tokenizer", "byte", *sizes])
    assert done.exit_code == 0, done.output
    how = ["--vocab-size", 257, "--steps", 20, "--lr", 0.03]
    ended(task_of({}, packed, "--out", out, "--document-masks", *how))
    losses = [record["loss"] for record in logged(Path(out), 0)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_demo_takes_no_more_steps_than_its_text_has():
    demo = runpy.run_path(str(EXAMPLE.with_name("demo.py")))["demo"]
    done = CliRunner().invoke(demo, ["--steps", "5000"])
    assert (done.exit_code, "5000 is not in the range 10<=x<=1000" in done.stderr) == (2, True)


@pytest.mark.parametrize("name", ["train_gpt", "pretrain_books"])
def test_a_run_without_matplotlib_ends_with_the_name_of_the_package(name, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # its import fails
    importlib.import_module(name).plot(tmp_path, tmp_path)
    assert capsys.readouterr().out == "no curve is drawn: pip install matplotlib\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_student_on_stored_values_equals_one_beside_its_teacher():
    printed = run_example("distill.py")
    assert "ended by SIGKILL" in printed
    assert printed.count("✓") == 16
    assert "All of it holds." in printed


# --- books and chats --------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_bits_per_byte_of_books_fall_and_a_rerun_resumes(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    pytest.importorskip("tokenizers"), pytest.importorskip("tiktoken"), pytest.importorskip("matplotlib")
    books = tmp_path / "books"
    out = tmp_path / "run"
    books.mkdir()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::12]
    for number in range(3):
        texts = [path.read_text(encoding="utf-8") for path in sources[number::3]]
        parquet.write_table(table({"text": texts}), books / f"shard_{number:05d}.parquet")
    command = ["pretrain_books.py", books, "--out", out, "--vocab-size", 512, "--layers", 1, "--eval-every", 10]
    command += ["--lr", 0.01, "--width"]
    assert run_example(*command, 32, "--steps", 20).count("\n$ zb ") == 3
    assert (out / "bpb.png").read_bytes().startswith(b"\x89PNG")
    before = json.loads((out / "result.json").read_text())
    rows = before["evaluations"]
    assert [row["step"] for row in rows] == [0, 10, 20]
    assert rows[-1]["val_bpb"] < 0.9 * rows[0]["val_bpb"]
    second = run_example(*command, 32, "--steps", 40)
    assert second.count("\n$ zb ") == 1  # only verify
    assert "from step 20 to 40" in second
    after = json.loads((out / "result.json").read_text())
    assert after["evaluations"][:3] == rows
    assert [row["step"] for row in after["evaluations"]] == [0, 10, 20, 30, 40]
    for row in after["evaluations"]:
        assert row["tokens"] == row["step"] * 16 * 256
        assert row["val_bpb"] == pytest.approx(row["val_nats"] / math.log(2) / after["val_bytes"])
        assert row["waited_s"] <= row["seconds"]
    assert after["val_tokens"] < after["val_bytes"]
    assert after["evaluations"][-1]["val_bpb"] < after["evaluations"][2]["val_bpb"]
    said = run_example(*command, 64, "--steps", 40, code=1)
    assert "was made with width 32, not 64; pass another --out" in said


def finetune(*arguments, code=0):
    for package in ("transformers", "jinja2", "tiktoken"):
        pytest.importorskip(package)
    sizes = ["--steps", 8, "--width", 16, "--layers", 1, "--max-tokens", 256]
    return run_example("finetune_chat.py", *arguments, *sizes, code=code)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations, one of which has what templates and masks stumble over."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    chats = [[("user", f"Add {n} and 1."), ("assistant", f"It is {n + 1}.")] for n in range(40)]
    odd = [("system", "Be brief."), ("user", "Say <|im_end|> assistant"), ("assistant", "No.\n"), ("user", "Naïve 🦊?")]
    chats.append([*odd, ("assistant", "🦊 Ünïcode, twice.")])
    chats.append([("user", "nobody answers")])
    lines = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path, chats


@pytest.fixture(scope="module")
def finetuned(chats):
    """Return the folder of a run, and its output."""
    out = chats[0].parent / "run"
    return out, finetune("--data", chats[0], "--out", out)


@pytest.mark.slow
def test_only_what_the_assistant_says_has_a_gradient(finetuned):
    masked, counted = re.search(r"at most (\S+) where no target counts, at least (\S+) where", finetuned[1]).groups()
    assert float(masked) == 0
    assert float(counted) > 0


@pytest.mark.slow
def test_the_stored_masks_are_the_words_of_the_assistant(finetuned, chats):
    tokenizer = load_tokenizer(f"hf:{finetuned[0] / 'tokenizer' / 'tokenizer.json'}")
    with open_corpus(finetuned[0] / "chats.h5") as store, store.field("loss_mask") as masks:
        assert store.document_count == len(chats[1])
        for number, chat in enumerate(chats[1]):
            tokens = store.documents[number].ids
            start = int(store.doc_offsets[number])
            mask = masks.tokens[start : start + len(tokens)].astype(bool)
            edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
            said = [tokenizer.decode(tokens[a:b]) for a, b in edges.tolist()]
            assert said == [f"{text}<|im_end|>" for role, text in chat if role == "assistant"]


@pytest.mark.slow
def test_a_template_that_marks_nothing_is_refused(finetuned, chats, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for path in (finetuned[0] / "tokenizer").iterdir():
        text = path.read_text(encoding="utf-8")
        (folder / path.name).write_text(re.sub(r"\{% (end)?generation %\}", "", text), encoding="utf-8")
    said = finetune("--data", chats[0], "--out", tmp_path / "run", "--tokenizer", folder, code=1)
    assert "its chat template has no {% generation %}: nothing would be learned" in said


@pytest.mark.slow
def test_conversations_of_which_nothing_would_be_learned_are_told(tmp_path):
    chats = [{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(30)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    said = finetune("--data", tmp_path / "chats.jsonl", "--out", tmp_path / "run", code=1)
    assert "the assistant says nothing in the first --max-tokens tokens of any conversation" in said
