"""The search of the site, by its own scripts, finds a page that says what people ask for. It needs node."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from pages import ROOT, TEXT
from processes import PROGRAMS

#: Words that people search for -> a page among the first hits, and what it says.
SEARCHES = {
    "corrupt": ("questions", "Restore the file from a copy, or keep its good batches with `zb repair`"),
    "deterministic": ("questions", "is the same on each machine and in each run"),
    "reproducible": ("questions", "is the same on each machine and in each run"),
    "out of memory": ("questions", "lower `--memory` or `--workers`"),
    "hangs": ("questions", "compare `repr(loader)` of the ranks"),
    "Llama 3 vocabulary": ("questions", "Into 32 bits: it has 128,256 ids"),
    "Windows": ("questions", "No, on Linux only: work in a container there"),
    "another number of GPUs": ("questions", "The state counts records of all ranks together"),
    "how many shards": ("questions", "By default 1 GiB each, and 500 at most"),
    "too many open files": ("large_jobs", "`ulimit -n`, larger shards"),
    "JSON lines": ("questions", "Text in them, with a tokenizer"),
    "validation split": ("text", "`--val-fraction 0.01` holds out documents by a seeded draw"),
    "mix data sets": ("questions", "`MixedLoader("),
    "NFS": ("questions", "Reading, converting and training: yes"),
    "Lustre": ("questions", "lfs setstripe -c 4 -S 4M train-h5.partial"),
    "disk full": ("errors", "The disk is too full"),
    "killed": ("questions", "`--resume` keeps the others"),
    "exit code": ("exit_codes", "| exit code | meaning | in Python |"),
    "loss mask": ("fine_tune", "-100"),
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
}
HITS = 3


@pytest.fixture
def site(tmp_path):
    """Return the folder of the site, which is built of a copy of the pages: the build writes those of the API there."""
    pytest.importorskip("sphinx")
    pytest.importorskip("pydata_sphinx_theme")
    for path in ROOT.iterdir():
        if path.name != "docs" and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "api"))
    command = [sys.executable, "-m", "sphinx", "-q", tmp_path / "docs", tmp_path / "site"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    return tmp_path / "site"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node (Debian: nodejs)")
def test_the_first_hits_of_a_search_have_a_page_that_says_it(site):
    command = ["node", PROGRAMS / "search_site.js", site]
    done = subprocess.run(command, input=json.dumps([*SEARCHES]), capture_output=True, text=True, check=True)
    found = zip(SEARCHES.items(), json.loads(done.stdout), strict=True)
    assert not {
        words: hits[:HITS] for (words, (page, _)), hits in found if page not in [name for name, _, _ in hits[:HITS]]
    }


def test_the_pages_that_are_found_say_it():
    said = {words: answer in " ".join(TEXT[f"{page}.md"].split()) for words, (page, answer) in SEARCHES.items()}
    assert not [words for words, is_said in said.items() if not is_said]
