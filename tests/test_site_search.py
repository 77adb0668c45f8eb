"""The search of the site, by its own scripts, finds a page that says what people ask for. It needs node."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, TEXT
from processes import PROGRAMS

#: Words that people search for -> a page among the first hits, or a part of one, and what it says.
SEARCHES = {
    "corrupt": (
        "questions#how-do-i-find-corrupt-data",
        "Restore the file from a copy, or keep its good batches with `zb repair`",
    ),
    "deterministic": ("questions", "is the same on each machine and in each run"),
    "reproducible": ("questions", "is the same on each machine and in each run"),
    "out of memory": ("questions#what-do-i-do-when-a-job-runs-out-of-memory", "lower `--memory` or `--workers`"),
    "hangs": ("questions#what-do-i-do-when-training-hangs", "compare `repr(loader)` of the ranks"),
    "Llama 3 vocabulary": ("questions", "Into 32 bits: it has 128,256 ids"),
    "Windows": ("questions#does-it-run-on-windows-or-a-mac", "No, on Linux only: work in a container there"),
    "another number of GPUs": ("questions", "The state counts records of all ranks together"),
    "how many shards": ("questions", "By default 1 GiB each, and 500 at most"),
    "too many open files": ("large_jobs", "`ulimit -n`, larger shards"),
    "JSON lines": ("questions", "Text in them, with a tokenizer"),
    "validation split": ("text", "`--val-fraction 0.01` holds out documents by a seeded draw"),
    "mix data sets": ("questions#how-do-i-mix-data-sets", "`MixedLoader("),
    "NFS": ("questions", "Reading, converting and training: yes"),
    "Lustre": ("questions", "lfs setstripe -c 4 -S 4M train-h5.partial"),
    "disk full": ("errors", "The disk is too full"),
    "killed": ("questions", "`--resume` keeps the others"),
    "exit code": ("exit_codes", "| exit code | meaning | in Python |"),
    "loss mask": ("fine_tune#labels-and-loss-masks", "-100"),
    "Slurm array": ("slurm_jobs", "examples/slurm/array.sh tokens/ train-h5 16"),
    "compress": ("questions", "Choose uint16 first. Then `--codec zstd`"),
    "C++": ("questions", "Yes, by its HDF5 library"),
    "password": ("errors", "A web server asks for a password: write it into the URL"),
    "padding": ("questions", "With `--packing best-fit` about 0.1 %"),
    "duplicates": ("questions", "counts the documents, or the records, that are repeated"),
    "NaN": ("questions", "names the documents of that step and prints them"),
    "upgrade": ("questions", "every version reads each earlier file, index and state"),
    "evaluation": ("questions", 'With `last="masked"`, and with `last="short"`'),
    "S3 bucket": ("remote", "Then a URL stands where a path stands"),
    "train a tokenizer": ("text", "zb tokenizer train corpus/"),
    "ddp hang": (
        "questions#what-do-i-do-when-training-hangs",
        "At the end of an epoch in DDP or FSDP, stuck until the NCCL timeout",
    ),
    "stuck": ("questions#what-do-i-do-when-training-hangs", "stuck until the NCCL timeout"),
    "deadlock": ("questions#what-do-i-do-when-training-hangs", "(a deadlock)"),
    "nccl timeout": ("questions#what-do-i-do-when-training-hangs", "stuck until the NCCL timeout"),
    "OOM": ("questions#what-do-i-do-when-a-job-runs-out-of-memory", "| out of memory (OOM) | do |"),
    "macos": ("questions#does-it-run-on-windows-or-a-mac", "on Windows as on macOS"),
    "too many files": (
        "questions#my-site-counts-files-how-many-does-a-store-have",
        "Write fewer, larger shards: `--shard-size 16GiB`",
    ),
    "prompt tokens": ("fine_tune#labels-and-loss-masks", "-100 where the mask is 0"),
    "ignore prompt": ("tutorials/masks", "so that the prompt is ignored and only the answers count in the loss"),
    "multiple datasets weights": ("mixtures", "mixes several or multiple datasets"),
    "which dataset": ("convert_hdf5#records-and-streams", "the only integer dataset of one to three axes is read"),
    "add field": ("questions#may-i-add-a-field-to-a-finished-store", "another job adds values later"),
    "add values later": ("tutorials/teacher", "This page lets another job add values later (distillation)"),
    "benchmark memmap": ("questions#is-it-faster-than-a-memmap", "the bare loop 1,484 million"),
    "huggingface trainer": ("recipes#the-trainer-of-hugging-face", "## The Trainer of Hugging Face"),
    "shorter sequence": ("questions#may-i-change-the-sequence-length-later", "cuts records of 2,048 into four"),
    "steps per epoch": ("questions#how-many-steps-does-an-epoch-have", "counts the steps per epoch"),
    "two writers": ("questions#may-two-processes-write-at-once", "it has one writer"),
    "simultaneous writers": ("questions#may-two-processes-write-at-once", "it has one writer"),
    "concurrent writes": ("questions#may-two-processes-write-at-once", "concurrent writers share the work"),
    "eos": ("questions#which-token-stands-between-documents-eos-bos", "`--no-boundary` leaves it out"),
    "add_bos": ("questions#which-token-stands-between-documents-eos-bos", "A BOS is never added"),
    "export npy": ("convert_stores", "back to `.npy` (export)"),
    "128256": ("questions#does-the-llama-3-vocabulary-fit", "`--vocab-size 128256`"),
    "128,256": ("questions#does-the-llama-3-vocabulary-fit", "it has 128,256 ids"),
}
HITS = 3
#: Words that people search for -> what each excerpt of a hit shows of them.
EXCERPTS = {
    "hang": r"(?i)\bhang",
    "memory": r"(?i)\bmemory\b",
    "OOM": r"\bOOM\b",
    "npy": r"\bnpy\b",
    "prompt": r"(?i)\bprompt",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the site: that of `ZB_SITE`, which `.ci/run` has built, or one that is built here.

    It is built of a copy of the pages, since the build writes those of the API beside them.
    """
    if "ZB_SITE" in os.environ:
        return Path(os.environ["ZB_SITE"])
    pytest.importorskip("sphinx")
    pytest.importorskip("pydata_sphinx_theme")
    folder = tmp_path_factory.mktemp("project")
    for path in ROOT.iterdir():
        if path.name != "docs" and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("_build", "api"))
    command = [sys.executable, "-m", "sphinx", "-q", folder / "docs", folder / "site"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(folder)})
    return folder / "site"


def hits_of(site, searches):
    """Return [page, heading, anchor, excerpt] of each hit of each search."""
    if shutil.which("node") is None:
        pytest.skip("needs node (Debian: nodejs)")
    command = ["node", PROGRAMS / "search_site.js", site]
    done = subprocess.run(command, input=json.dumps([*searches]), capture_output=True, text=True, check=True)
    return zip(searches, json.loads(done.stdout), strict=True)


@pytest.mark.slow
def test_the_first_hits_of_a_search_have_a_page_that_says_it(site):
    missed = {}
    for words, hits in hits_of(site, SEARCHES):
        first = [place for page, _, anchor, _ in hits[:HITS] for place in (page, page + anchor)]
        if SEARCHES[words][0] not in first:
            missed[words] = first
    assert not missed


@pytest.mark.slow
def test_an_excerpt_shows_whole_words_of_the_search(site):
    for words, hits in hits_of(site, EXCERPTS):
        first = [excerpt for _, _, _, excerpt in hits[:HITS]]
        assert not [excerpt for excerpt in first if not re.search(EXCERPTS[words], excerpt)], words


@pytest.mark.slow
def test_a_part_of_a_page_is_shown_once(site):
    for words, hits in hits_of(site, SEARCHES):
        places = [page + anchor for page, _, anchor, _ in hits]
        assert len(places) == len({*places}), words


def test_the_pages_that_are_found_say_it():
    pages = {words: (page.partition("#")[0], answer) for words, (page, answer) in SEARCHES.items()}
    said = {words: answer in " ".join(TEXT[f"{page}.md"].split()) for words, (page, answer) in pages.items()}
    assert not [words for words, is_said in said.items() if not is_said]
