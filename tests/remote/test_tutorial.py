"""The tutorial of buckets runs as it stands, with the server that it starts."""

import re

import pytest
from modules import ROOT
from pages import run_page

PAGE = ROOT / "docs" / "tutorials" / "buckets.md"


@pytest.mark.slow
def test_the_tutorial_of_buckets_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("moto")
    text = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"AWS_\w+", text):  # the page sets them
        monkeypatch.setenv(name, "")
    run_page(text, {"__name__": "__main__"}, capsys)
