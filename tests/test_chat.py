"""examples/finetune_chat.py: of a conversation, only what the assistant says is learned."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zb_hdf5 import MmapTokenStore, load_tokenizer

EXAMPLE = Path(__file__).parent.parent / "examples" / "finetune_chat.py"
pytest.importorskip("transformers"), pytest.importorskip("jinja2"), pytest.importorskip("tiktoken")
SIZES = ["--steps", "8", "--width", "16", "--layers", "1", "--max-tokens", "256"]


def finetune(*arguments):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(EXAMPLE.parent.parent),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(EXAMPLE), *map(str, arguments), *SIZES]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations, one of which has what templates and masks stumble over."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    chats = [[("user", f"Add {n} and 1."), ("assistant", f"It is {n + 1}.")] for n in range(40)]
    chats.append([
        ("system", "Be brief."),
        ("user", "Say <|im_end|> assistant"),
        ("assistant", "No.\n"),
        ("user", "Naïve 🦊?"),
        ("assistant", "🦊 Ünïcode, twice."),
    ])  # fmt: skip
    chats.append([("user", "nobody answers")])
    lines = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path, chats


@pytest.fixture(scope="module")
def run(chats):
    """Return the folder of a run, and what it printed."""
    out = chats[0].parent / "run"
    done = finetune("--data", chats[0], "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.slow
def test_only_what_the_assistant_says_has_a_gradient(run):
    masked, counted = re.search(r"at most (\S+) where no target counts, at least (\S+) where", run[1]).groups()
    assert float(masked) == 0
    assert float(counted) > 0


@pytest.mark.slow
def test_the_stored_masks_are_the_words_of_the_assistant(run, chats):
    tokenizer = load_tokenizer(f"hf:{run[0] / 'tokenizer' / 'tokenizer.json'}")
    with MmapTokenStore(run[0] / "chats.h5") as store, store.field("loss_mask") as masks:
        assert store.document_count == len(chats[1])
        for number, chat in enumerate(chats[1]):
            tokens = store.document(number)
            start = int(store.doc_offsets[number])
            mask = masks.get_slice(start, start + len(tokens)).astype(bool)
            edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
            said = [tokenizer.decode(tokens[a:b]) for a, b in edges.tolist()]
            assert said == [f"{text}<|im_end|>" for role, text in chat if role == "assistant"]


@pytest.mark.slow
def test_a_template_that_marks_nothing_is_refused(run, chats, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for path in (run[0] / "tokenizer").iterdir():
        text = path.read_text(encoding="utf-8")
        (folder / path.name).write_text(re.sub(r"\{% (end)?generation %\}", "", text), encoding="utf-8")
    done = finetune("--data", chats[0], "--out", tmp_path / "run", "--tokenizer", folder)
    assert done.returncode == 1
    assert "its chat template has no {% generation %}: nothing would be learned" in done.stderr


@pytest.mark.slow
def test_conversations_of_which_nothing_would_be_learned_are_told(tmp_path):
    chats = [{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(30)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    done = finetune("--data", tmp_path / "chats.jsonl", "--out", tmp_path / "run")
    assert done.returncode == 1
    assert "the assistant says nothing in the first --max-tokens tokens of any conversation" in done.stderr
