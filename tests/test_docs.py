"""The documentation says what is so: its tables, commands, files, links and examples are compared with the code."""

import ast
import errno
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import click
import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from commandline import commands_of
from interpreter import run_training
from pages import BLOCK, COMMANDS_RUN, EXAMPLE, PAGES, README, ROOT, TEXT, TUTORIALS, name_of, run_page, untagged_in
from processes import PROGRAMS, command_of, environment, running

import zb_hdf5
from zb_hdf5 import open_writer, spec
from zb_hdf5.commands.zb import zb
from zb_hdf5.converters import conversion
from zb_hdf5.converters.cli import convert_any
from zb_hdf5.converters.cli import convert_commands as convert
from zb_hdf5.files import objects
from zb_hdf5.files.bounded import BOUND_BYTES
from zb_hdf5.formats.document_source import DocumentSource
from zb_hdf5.formats.format_row import FormatRow
from zb_hdf5.formats.native import BATCH_HEADER_FIELDS
from zb_hdf5.store.format_list import backends
from zb_hdf5.store.set_facts import SET_KEYS, BoundFile


def rows_of(page, header):
    """Return the cells of each row of the one table of a page that begins with `header`."""
    _, lines = TEXT[page].split(header)
    table = [line for line in lines.split("\n\n")[0].splitlines()[2:] if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def names_in(header):
    """Return the names in the first column of a table of the page of formats."""
    return [row[0] for row in rows_of("formats.md", header)]


def blocks_of(text):
    return re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def outside_of_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def test_tables_of_headers_codecs_and_backends_are_the_code():
    rows = rows_of("formats.md", "| offset | type | field | value |")
    assert tuple((int(offset), kind, name) for offset, kind, name, _ in rows) == BATCH_HEADER_FIELDS
    rows = rows_of("formats.md", "| codec | HDF5 filter | levels |")
    assert rows == [
        [name, str(facts.filter_id), f"1 to {facts.max_level}, {facts.default_level} by default"]
        for name, facts in spec.CODECS.items()
    ]
    documented = {row[0]: row[1] for row in rows_of("formats.md", "| backend | files | access | for |")}
    assert documented == {name: backend.suffix for name, backend in backends().items()}


def test_hdf5_tables_are_the_spec():
    kinds = {"uint64": "<u8", "uint8": "|u1", "S64": "|S64", "int64": "<i8", "uint32": "<u4"}
    for name, attributes in (("batches", spec.BATCHES_ATTRIBUTES), ("tokens", spec.TOKENS_ATTRIBUTES)):
        rows = rows_of("formats.md", f"| attribute of `{name}` | type | meaning |")
        assert {name: kinds[kind] for name, kind, _ in rows} == {name: dtype.str for name, dtype in attributes.items()}
    field = spec.field_column("<name>")
    for header, names in (
        ("object", [spec.BATCHES, spec.CRC32]),
        ("object of a stream", [spec.TOKENS, spec.DOC_OFFSETS, spec.CRC32]),
        ("object of a compressed file", [spec.EXTENTS, spec.extents_column(field)]),
        ("object of a field", [field, spec.crc32_column(field)]),
    ):
        assert names_in(f"| {header} | shape | holds |") == names
    versions = re.findall(r"^## .*version (\d)$", TEXT["formats.md"], re.MULTILINE)
    known = spec.BATCH_VERSION, spec.HDF5_VERSION, spec.HDF5_VERSION, spec.TABLES_VERSION, spec.INDEX_VERSION
    assert tuple(map(int, versions)) == (*known, spec.SET_VERSION, spec.DIGESTS_VERSION)
    text = TEXT["formats.md"].split("The root group carries")[1].split("\n\n")[0]
    names = {*spec.ROOT_ATTRIBUTES, *spec.OPTIONAL_ATTRIBUTES, *spec.ORIGIN_ATTRIBUTES}
    assert names <= set(re.findall(r"`(\w+)`", text))


def test_tables_of_index_and_documents_are_the_spec():
    assert names_in("| key of `shards` | element |") == list(spec.INDEX_SHARD_KEYS)
    assert names_in("| key of a column | array |") == list(spec.INDEX_COLUMN_KEYS)
    assert names_in("| key of a field | element |") == list(spec.INDEX_FIELD_KEYS)
    assert names_in("| key of `files` | element |") == list(spec.DIGESTS_FILE_KEYS)
    keys = set(re.findall(r"\w+", ", ".join(names_in("| key | value |"))))
    assert {key for keys in spec.INDEX_META_KEYS.values() for key in keys} <= keys
    kinds = {"uint64": "<u8", "uint32": "<u4", "uint8": "|u1"}
    for kind, datasets in spec.TABLES.items():
        rows = rows_of("formats.md", f"| dataset in a {kind} file | type | holds |")
        documented = [
            (name.strip("`"), kinds[dtype])
            for names, dtypes, _ in rows
            for name, dtype in zip(names.split(", "), dtypes.split(", "), strict=True)
        ]
        assert dict(documented) == datasets
    text = TEXT["formats.md"].split("## HDF5 tables")[1].split("\n## ")[0]
    names = {*spec.TABLES_ATTRIBUTES, *(name for names in spec.TABLES_KIND_ATTRIBUTES.values() for name in names)}
    assert names <= set(re.findall(r"`(\w+)`", text))
    for kind, keys in {**spec.INDEX_OPTIONAL_KEYS, "documents": spec.INDEX_DOCUMENTS_KEYS}.items():
        assert re.findall(r"\w+", " ".join(names_in(f"| key of `{kind}` | element |"))) == list(keys)


#: The head of the table of exit codes.
CODES = "| exit code | meaning | in Python |"
COMMANDS = {f"zb {name}" for name, command in commands_of(zb) if not isinstance(command, click.Group)}


#: The one command that converts from any format to any other: its first word is a source, unless it is a pair.
ANY_PAIR = re.compile(r"zb convert (?!\w+-to-\w+)")


def is_command(line):
    if line in ("zb", "zb convert") or ANY_PAIR.match(line):
        return True
    return any(f"{line} ".startswith(f"{name} ") for name in COMMANDS)


def test_every_command_is_documented():
    assert {row[0] for row in rows_of("commands.md", "| command | does |")} == {"zb convert", *COMMANDS}


@pytest.mark.parametrize("page", TEXT)
def test_every_command_line_is_a_command(page):
    """Also those in backticks."""
    lines = [line for block in blocks_of(TEXT[page]) for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", outside_of_blocks(TEXT[page]))
    assert not [line for line in lines if re.match(r"zb( |$)", line) and not is_command(line)]


def unknown_options(line):
    """Return the options of a line that its command does not have."""
    words = [word.rstrip(";") for word in shlex.split(line, comments=True)[1:]]
    command = zb
    while words and isinstance(command, click.Group):
        named = command.get_command(click.Context(command), words[0])
        if named is None:
            break
        command = named
        words.pop(0)
    if isinstance(command, click.Group):
        command = convert_any
    known = {name for param in command.params for name in param.opts} | {"--help"}
    return [word for word in words if word.startswith("-") and word not in known]


@pytest.mark.parametrize("page", TEXT)
def test_every_option_in_a_block_is_one_of_its_command(page):
    lines = [line for block in blocks_of(TEXT[page]) for line in block.splitlines() if line.startswith("zb ")]
    assert not [(line, unknown) for line in lines if (unknown := unknown_options(line))]


#: Options in prose that belong to programs of others: Slurm, torchrun, h5py, and the trainers that a page is about.
OF_OTHERS = {
    *(
        "--array",
        "--ntasks",
        "--nproc-per-node",
        "--reset-attention-mask",
        "--data-path",
        "--no-deps",
        "--compression",
        "--validate",
    ),
    *("--checkpoint", "--dataloader-type", "--dataloader-save", "--no-create-attention-mask-in-dataloader"),
    *("--eval-iters", "--logits-save-top-p", "--logits-load-kd-loss-alpha"),
}


def test_every_option_in_prose_is_one_of_a_command_or_of_a_program_of_the_project():
    commands = [command for _, command in commands_of(zb)] + [convert_any]
    known = {name for each in commands for param in each.params for name in (*param.opts, *param.secondary_opts)}
    for folder in ("examples", "benchmarks"):
        for program in (ROOT / folder).glob("*.py"):
            known |= set(re.findall(r"\"(--[a-z][\w-]*)\"", program.read_text(encoding="utf-8")))
    found = {
        (page, option)
        for page, text in TEXT.items()
        for words in re.findall(r"`([^`\n]+)`", outside_of_blocks(text))
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", words)
    }
    assert len(found) > 100
    assert not [each for each in sorted(found) if each[1] not in known | OF_OTHERS | {"--help", "--version"}]


def calls_in(text):
    """Yield each call in the backticks of a page that is an expression of Python: its name, and its keywords."""
    for words in re.findall(r"`([^`\n]+)`", outside_of_blocks(text)):
        with suppress(SyntaxError):  # most are no Python
            for node in ast.walk(ast.parse(words.replace("...", "*_"), mode="eval")):
                if isinstance(node, ast.Call):
                    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                    yield name, [each.arg for each in node.keywords if each.arg]


def test_every_keyword_of_a_call_in_prose_is_a_parameter_of_it():
    owners = [zb_hdf5, *(getattr(zb_hdf5, name) for name in ("Loader", "MixedLoader", "DocumentLoader", "Corpus"))]
    compared = 0
    for page, text in TEXT.items():
        for name, keywords in calls_in(text):
            named = [each for owner in owners if callable(each := getattr(owner, name, None))]
            known = {each for function in named for each in inspect.signature(function).parameters}
            assert not named or set(keywords) <= known, (page, name, keywords)
            compared += bool(named and keywords)
    assert compared > 20


@pytest.mark.parametrize("name", ["demo", "test", "bench", "docs"])
def test_documented_make_targets_exist(name):
    assert any(f"make {name}" in text for text in TEXT.values())
    assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def anchors_of(text):
    """Return the anchors that a page's headings have."""
    headings = re.findall(r"^#+ (.*)", outside_of_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


#: The place of the project's files, in links of pages that are read elsewhere.
BLOB = "https://github.com/zb-hdf5/zb_hdf5/blob/main/"


def links_of(text):
    """Return the links of a page, also of its definitions; those to files of the project without their place."""
    text = outside_of_blocks(text)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[.+\]: (\S+)$", text, re.MULTILINE)
    return [link.removeprefix(BLOB) for link in found]


@pytest.mark.parametrize("page", [README, *PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in links_of(page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target.read_text(encoding="utf-8")), link


def pages_linked_in(text):
    """Return the pages that a page links, by the names of their files."""
    names = {link.partition("#")[0].removeprefix("docs/") for link in links_of(text)}
    return names & {name_of(page) for page in PAGES}


#: The pages that the README links by itself: those for the first days.
MAIN_PAGES = {
    "start.md",
    "coming_from.md",
    "convert.md",
    "text.md",
    "train.md",
    "operate.md",
    "remote.md",
    "commands.md",
    "formats.md",
    "speed.md",
}


def test_the_readme_links_the_main_pages_and_the_index():
    linked = pages_linked_in(TEXT["README.md"])
    assert linked >= MAIN_PAGES | {"index.md"}


def script_of_the_docs(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_for_coding_agents_are_made_of_the_pages():
    for_agents = script_of_the_docs("for_agents")
    made = for_agents.texts()
    there = {path.relative_to(for_agents.AGENTS).as_posix() for path in for_agents.AGENTS.rglob("*") if path.is_file()}
    assert there == made.keys()
    for name, text in made.items():
        assert (for_agents.AGENTS / name).read_text(encoding="utf-8") == text, f"{name}: run python docs/for_agents.py"
        assert not [
            link for link in links_of(text) if "://" not in link and not (ROOT / link.partition("#")[0]).exists()
        ]
    assert pages_linked_in(made["llms.txt"]) == {name_of(page) for page in PAGES} - {"index.md"}
    assert re.match(r"---\nname: zb-hdf5\ndescription: [^:\n]{50,1000}\n---\n", made["skills/zb-hdf5/SKILL.md"])
    assert blocks_of(TEXT["README.md"])[0] in made["skills/zb-hdf5/SKILL.md"]


def test_the_index_links_every_page_and_its_headings_are_the_navigation_of_the_site():
    parts = script_of_the_docs("for_agents").navigation(TEXT["index.md"])
    pages = [page for pages in parts.values() for page in pages]
    assert sorted(f"{page}.md" for page in pages) == sorted(name_of(page) for page in PAGES if page.name != "index.md")
    assert {f"{page}.md" for page in pages} == pages_linked_in(TEXT["index.md"])


def test_the_drawing_of_the_readme_is_what_loaders_give(tmp_path):
    """48 records in 3 shards; 8 ranks take two steps, and 4 ranks go on from their state."""
    lines = re.findall(
        r"^(shuffled order|(\d) ranks, step \d) +((?: ?\d+ ?)+)(?: .*)?$", TEXT["README.md"], re.MULTILINE
    )
    drawn = [(int(ranks or 0), [int(number) for number in numbers.split()]) for _, ranks, numbers in lines]
    np.save(tmp_path / "tokens.npy", np.repeat(np.arange(48, dtype="<u2"), 4).reshape(48, 4))
    zb_hdf5.convert(tmp_path / "tokens.npy", "hdf5", tmp_path / "h5", batch_size=4, seq_len=4, shards=3)
    assert len(list((tmp_path / "h5").glob("shard-*.h5"))) == 3
    how = {"shuffle": "records", "seed": 42, "batch_size": 1}
    (_, order), *steps = drawn
    assert [ranks for ranks, _ in steps] == [8, 8, 4, 4]
    assert order == [number for _, numbers in steps for number in numbers]
    state = None
    for ranks in (8, 4):
        loaders = [zb_hdf5.Loader(tmp_path / "h5", rank=rank, world_size=ranks, **how) for rank in range(ranks)]
        for loader in loaders if state else ():
            loader.load_state_dict(state)
        for _, numbers in [step for step in steps if step[0] == ranks]:
            assert [int(next(loader)[0, 0]) for loader in loaders] == numbers
        state = loaders[0].state_dict()
        for loader in loaders:
            loader.close()
        assert ranks == 4 or f'{{"position": {state["position"]}, "seed": {state["seed"]}, ...}}' in TEXT["README.md"]


#: Words that people search for.
SEARCHED = ("corrupt", "deterministic", "out of memory", "hangs", "Llama 3 vocabulary", "Windows")


@pytest.mark.parametrize("words", SEARCHED)
def test_the_search_of_the_site_finds_a_question_in_these_words(words):
    """It ranks headings first, unless a word is in no other page: then it takes it for a part of other words."""
    headings = re.findall(r"^### (.*)", TEXT["questions.md"], re.MULTILINE)
    wanted = [re.compile(rf"\b{word}\b") for word in words.split()]
    assert [heading for heading in headings if all(word.search(heading) for word in wanted)]
    others = "".join(
        outside_of_blocks(text) for page, text in TEXT.items() if page not in ("README.md", "questions.md")
    )
    assert all(word.search(others) for word in wanted)


def test_the_pages_that_the_search_ranks_first_or_last_are_pages():
    script = (ROOT / "docs" / "search_scorer.js").read_text(encoding="utf-8")
    named = [name for names in re.findall(r"/\^\((.*)\)\$/", script) for name in re.findall(r"^\w+|(?<=\|)\w+", names)]
    assert len(named) > 5
    assert not [name for name in named if f"{name}.md" not in TEXT]


#: Pages that give a speed, or lead to one.
SPEEDS = ("README.md", "index.md", "questions.md", "speed.md", "text.md")


def test_all_speeds_are_of_one_file_of_one_run():
    report = json.loads((ROOT / "docs" / "report" / "report.json").read_text(encoding="utf-8"))
    [table] = [table for table in report["tables"] if table["title"] == "Other loaders: whole batches"]
    rates = {f"{32 * 512 / row['figures']['later, µs'][0]:,.0f}" for row in table["rows"]}
    for page in SPEEDS:
        assert "report/report.json" in links_of(TEXT[page]) or "docs/report/report.json" in links_of(TEXT[page]), page
        found = re.findall(r"(?<![\d.])(\d[\d,]+) million", outside_of_blocks(TEXT[page]))
        assert set(found) <= rates, page


#: The rows of the table of field sets on the page of speeds: the row of the report that each has, and its limit.
FIELD_SETS = {
    "whole batches": ("Loader", "np.memmap loop, crc32"),
    'whole batches, `verify="none"`': ('Loader, verify="none"', None),
    "shuffled records": ("Loader, rows", "np.take, crc32"),
    'shuffled records, `verify="none"`': ('Loader, rows, verify="none"', None),
    "larger than memory, whole batches": ("Loader", None),
    "larger than memory, shuffled records": ("Loader, rows", None),
    "written, a flush for 12 MiB": ("Field set, 64 records", "pwrite and fdatasync, 64 records"),
    "written, a flush for 1.5 MiB": ("Field set, 8 records", "pwrite and fdatasync, 8 records"),
}


def test_the_table_of_field_sets_is_of_the_same_run():
    report = json.loads((ROOT / "docs" / "report" / "report.json").read_text(encoding="utf-8"))
    tables = {table["title"]: {row["name"]: row for row in table["rows"]} for table in report["tables"]}
    for row, (name, limit) in FIELD_SETS.items():
        title = "Field sets in memory"
        if row.startswith("larger"):
            title = "Field sets larger than memory"
        elif row.startswith("written"):
            title = "Writing a field set"
        [cells] = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", TEXT["speed.md"], re.MULTILINE)
        ratio, _, shown = (cell.strip() for cell in cells.split("|"))
        figure = "s" if row.startswith("written") else "later, µs"
        assert ratio == f"{tables[title][name]['ratios'][figure][0]:.2f}", row
        assert float(shown.partition(",")[0]) == (
            round(tables[title][limit]["ratios"][figure][0], 2) if limit else 1
        ), row
    assert not [page for page in TEXT if page != "report.md" and "M tokens/s" in TEXT[page]]


def first_words_in(header):
    """Return the names in the first column of a table of the page of new formats, without their arguments."""
    cells = [row[0] for row in rows_of("add_a_format.md", header)]
    return [name for cell in cells for name in re.findall(r"\w+", cell.partition("(")[0])]


def test_the_page_of_new_formats_names_every_part_of_a_row_and_every_member_without_a_default():
    parts = [each.name for each in fields(FormatRow)]
    assert first_words_in("| part of the row | names |") == parts[: parts.index("takes_batches") + 1]
    needed = {name for name in DocumentSource.__annotations__ if not hasattr(DocumentSource, name)}
    assert set(first_words_in("| member | value |")) == {*needed, "read"}


def typed_in(text):
    """Return the commands of a page, without the comments beside them."""
    typed = re.compile(r"^(?:zb|pip|python|convert) .*?(?=\s{2,}# |$)", re.MULTILINE)
    return [command for code in untagged_in(text) for command in typed.findall(code)]


@pytest.mark.parametrize("page", sorted(page for page in TEXT if (ROOT / "docs" / page).exists()))
def test_the_site_cuts_no_line_of_code_and_no_command_is_another_one(page):
    fitting = script_of_the_docs("fitted_code")
    text = fitting.fitted(TEXT[page])
    shown = re.sub(r"^```\{eval-rst\}\n.*?^```\n", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for _, code in re.findall(BLOCK, shown) for line in code.splitlines()]
    texts = re.compile(r"\s*(\"\w+\": )?f?\".*\"")  # a text of Python is not cut
    assert not [line for line in lines if len(line) > fitting.WIDTH + 12 and not texts.fullmatch(line)]
    assert typed_in(re.sub(r" \\\n    ", " ", text)) == typed_in(TEXT[page])


def test_comments_and_options_move_to_lines_of_their_own():
    fitting = script_of_the_docs("fitted_code")
    long = f"zb convert a b --codec zstd {'--seq-len 4096 ' * 4}--name 'two words' --shards 4   # {'why ' * 20}"
    text = f"```\nzb info b   # short\n{long}\n```\n\n```\nan output {'x' * 99}\n```\n"
    assert fitting.fitted(text) == (
        "```bash\n# short\nzb info b\n\n# " + ("why " * 20).strip() + "\n"
        "zb convert a b --codec zstd --seq-len 4096 --seq-len 4096 --seq-len 4096 \\\n"
        "    --seq-len 4096 --name 'two words' --shards 4\n```\n\n"
        f"```\nan output {'x' * 99}\n```\n"
    )
    python = f"```python\nx = call({', '.join(f'name{n}={n}' for n in range(9))}, more=1)  # shown above\n```"
    assert fitting.fitted(python).startswith("```python\n# shown above\nx = call(\n    name0=0")


def test_the_page_of_formats_has_what_lies_in_a_field_set():
    text = TEXT["formats.md"].split("## Field sets")[1].split("\n## ")[0]
    files = (spec.SET_FACTS, f"{spec.SET_GROWN}00001.json", spec.SET_INDEX, spec.VALUES_PREFIX, spec.VALUES_SUFFIX)
    objects = (f"{spec.VALUES_GROUP}/<field>", f"{spec.CRC32}/<field>", spec.MARKS, spec.CLAIM_SUFFIX)
    names = {*spec.VALUES_ATTRIBUTES, *spec.SET_PARTS_KEYS, *spec.SET_FIELD_KEYS, *SET_KEYS, *BoundFile._fields}
    assert not [each for each in (*files, *objects) if each not in text]
    assert not [name for name in names if f"`{name}`" not in text]
    assert f'"{spec.SET_FORMAT}", {spec.SET_VERSION}' in text
    assert f'"{spec.VALUES_FORMAT}"' in text


def test_the_api_page_lists_every_public_name():
    listed = re.findall(r"^   (\w+)$", TEXT["api.md"], re.MULTILINE)
    assert sorted(listed) == zb_hdf5.__all__


def test_the_exit_codes_are_those_of_the_errors():
    rows = {int(code): re.findall(r"\w+", names) for code, _, names in rows_of("exit_codes.md", CODES)}
    errors_of_code = {}
    for name in (name for name in zb_hdf5.__all__ if name.endswith("Error")):
        errors_of_code.setdefault(getattr(zb_hdf5, name).exit_code, set()).add(name)
    for code, names in errors_of_code.items():
        assert not {name for name in rows[code] if name.endswith("Error") and hasattr(zb_hdf5, name)} - names
        assert code == 1 or names <= set(rows[code])
    assert {130, 143} <= rows.keys()


def test_links_of_the_readme_are_whole_so_that_they_lead_somewhere_on_an_index_page():
    text = TEXT["README.md"]
    assert not re.findall(r"\]\((?!https://)", text)
    used = {*re.findall(r"\[([^\]\n]+)\](?![(:])", outside_of_blocks(text))}
    defined = {*re.findall(r"^\[(.+)\]: https://", text, re.MULTILINE)}
    assert defined
    assert defined == {name for name in used if name in defined}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_begins_with_what_it_is_for(page):
    title, _, purpose = TEXT[name_of(page)].split("\n", 3)[:3]
    assert title.startswith("# ")
    assert purpose.startswith("This page ")


#: File or folder of files of another trainer -> its names on the page for those who come from there.
FILES_OF_TRAINERS = {
    "bin/nanogpt/train.bin": "train.bin",
    "bin/gpt2": "fineweb",
    "megatron/uint16/corpus_text_document.bin": "corpus.bin",
    "megatron/uint16/corpus_text_document.idx": "corpus.idx",
    "olmo/uint16": "olmo",
    "datatrove/uint16/00000_unshuffled.ds": "tokens.ds",
    "datatrove/uint16/00000_unshuffled.ds.index": "tokens.ds.index",
    "datatrove/uint16/00000_unshuffled.ds.metadata": "tokens.ds.metadata",
    "hf/saved": "saved",
    "hf/records.parquet": "records.parquet",
    "hf/corpus.parquet": "corpus.parquet",
    "mds/ndarray": "mds",
    "mds/bytes": "mds-bytes",
    "litdata/tensor": "litdata",
}


def copy_files_of_trainers():
    for source, name in FILES_OF_TRAINERS.items():
        path = ROOT / "tests" / "data" / "trainers" / source
        if path.is_dir():
            shutil.copytree(path, name, ignore=shutil.ignore_patterns("truth.json"))
        else:
            shutil.copy(path, name)
    np.save("tokens.npy", np.arange(20_000, dtype=np.uint16) % 300)


#: Pages whose examples run in a process each, or beside a server (remote/test_tutorial.py).
RUN_ELSEWHERE = {"recipes.md", "tutorials/buckets.md"}
#: Page -> the claims beside its code, at least, that are compared with it.
CLAIMS = {"README.md": 2, "train.md": 1, "documents.md": 1, "coming_from.md": 1, "tutorials/masks.md": 2}
#: Pages that take seconds, besides all tutorials.
SLOW_PAGES = {"coming_from.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_PAGES | TUTORIALS else [])
        for name, text in TEXT.items()
        if "```python" in text and name not in RUN_ELSEWHERE
    ],
)
def test_python_examples_run(page, tmp_path, monkeypatch, capsys):
    """The examples of a page run one after the other, as a reader would type them."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    tokens = np.arange(2 * 32 * 512, dtype=np.uint16).reshape(2, 32, 512)
    with open_writer("train-h5.h5", batch_size=32, seq_len=512, dtype="uint16") as writer:
        writer.write(tokens)
    with h5py.File("other.h5", "w") as file:
        file["tokens"] = tokens.reshape(-1)
    Path("theirs").mkdir()
    for number, part in enumerate(tokens):
        with h5py.File(f"theirs/{number}.h5", "w") as file:
            file["tokens"] = part.reshape(-1)
    ids = tokens.reshape(-1, 512)
    with h5py.File("zoo.h5", "w") as file:
        file["data"] = np.stack([ids, np.ones_like(ids), np.roll(ids, -1, axis=1)], axis=1)
    Path("data").mkdir()
    for name in ("train-h5", "data/web", "data/code"):
        Path(name).symlink_to(tmp_path / "train-h5.h5")
    Path("text").mkdir()
    for name in ("shard_00000", "shard_00001"):
        parquet.write_table(table({"text": ["once upon a time"] * 5000}), f"text/{name}.parquet")
    arguments = ["parquet-to-hdf5", "text", "text-h5", "--tokenizer", "byte", "--workers", "1", "--quiet"]
    assert page != "text.md" or CliRunner().invoke(convert, arguments).exit_code == 0
    if page == "tutorials/text.md":
        pytest.importorskip("tokenizers")
        pytest.importorskip("tiktoken")
    if page == "coming_from.md":
        pytest.importorskip("datasets")
        copy_files_of_trainers()
    seen = []
    names = {"step": seen.append, "tokenized": lambda: tokens, "documents": lambda: tokens[0], "__name__": "__main__"}
    compared = run_page(TEXT[page], names, capsys, with_commands=page in COMMANDS_RUN)
    assert compared >= CLAIMS.get(page, 0)
    steps = {"README.md": 3 * len(tokens), "train.md": 3 * len(tokens), "mixtures.md": 20}
    steps |= dict.fromkeys(("operate.md", "remote.md", "index.md", "large_jobs.md"), len(tokens))
    assert len(seen) == steps.get(page, 0)


def test_an_array_of_the_tutorial_gives_the_store_that_its_page_shows(tmp_path, monkeypatch):
    """Each job of its `sbatch` line, by the line of the script, and the merge; `tests/cluster/` has a Slurm."""
    monkeypatch.chdir(tmp_path)
    text = TEXT["tutorials/slurm.md"]
    exec(EXAMPLE.findall(text)[0])
    [(last, line)] = re.findall(r"^sbatch .*--array=0-(\d+) examples/slurm/array\.sh (.*)", text, re.MULTILINE)
    source, target, parts, *options = shlex.split(line)
    script = (ROOT / "examples" / "slurm" / "array.sh").read_text(encoding="utf-8")
    [command] = re.findall(r"^srun zb (.*) &$", script, re.MULTILINE)
    for job in range(int(last) + 1):
        values = {"$1": [source], "$2": [target], "$part": [f"{job}/{parts}"], "${@:4}": options, "12GiB": ["1GiB"]}
        words = [word for each in shlex.split(command) for word in values.get(each, [each])]
        done = CliRunner().invoke(zb, words)
        assert (done.exit_code, "this part has no shard" in done.output) == (0, False), done.output
    for words in (["index", "merge", target], ["verify", target]):
        done = CliRunner().invoke(zb, words)
        assert done.exit_code == 0, done.output
    shown = re.findall(r"^```text\n(shards  .*?)^```", text, re.DOTALL | re.MULTILINE)
    assert shown
    assert not [line for line in shown[0].splitlines() if line not in done.stdout], done.stdout


def test_each_array_on_the_pages_has_as_many_jobs_as_parts():
    found = [each for text in TEXT.values() for each in re.findall(r"--array=0-(\d+) \S+\.sh \S+ \S+ (\d+)", text)]
    assert len(found) > 3
    assert not [each for each in found if int(each[0]) + 1 != int(each[1])]


#: A count in prose -> its value in the code: of every page that has the words.
COUNTS = {
    r"would be over (\d+); of a stream": conversion.MOST_SHARDS,
    r"source file, or of several where these are over (\d+)": conversion.MOST_SHARDS,
    r"By default 1 GiB each, and (\d+) at most": conversion.MOST_SHARDS,
    r"By default a shard has (\d+) GiB": conversion.DEFAULT_SHARD_BYTES >> 30,
    r"By default (\d+) GiB each, and 500 at most": conversion.DEFAULT_SHARD_BYTES >> 30,
    r"raise the bound of (\d+) MiB": BOUND_BYTES >> 20,
    r"All attempts together end within (\d+) seconds": objects.LIMIT_S,
    r"slow or away for (\d+) seconds": objects.LIMIT_S,
    r"ends with an error after (\d+) seconds": objects.LIMIT_S,
}


@pytest.mark.parametrize("words", COUNTS)
def test_a_count_in_prose_is_that_of_the_code(words):
    found = [int(count) for text in TEXT.values() for count in re.findall(words, " ".join(text.split()))]
    assert {*found} == {COUNTS[words]}


def test_the_keys_that_documents_give_are_those_of_the_page_and_of_the_docstring(tmp_path):
    [row] = re.findall(r"^\| (.*?) \|.*`documents=True` asks for these two", TEXT["documents.md"], re.MULTILINE)
    with zb_hdf5.HDF5ShardWriter(tmp_path / "stream.h5", dtype="uint16") as writer:
        writer.write_document(range(9))
    shape = {"batch_size": 1, "seq_len": 4, "rank": 0, "world_size": 1}
    with zb_hdf5.Loader(tmp_path / "stream.h5", documents=True, **shape) as loader:
        keys = set(next(loader)) - {"tokens"}
    assert keys == set(re.findall(r"`(\w+)`", row))
    [named] = re.findall(r"True for `(\w+)` and `(\w+)`", zb_hdf5.Loader.__doc__)
    assert keys == set(named)


def messages():
    """Return the texts of the package, with `…` for each value in them."""
    for path in (*(ROOT / "zb_hdf5").rglob("*.py"), *(ROOT / "converters").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_errors_are_messages_of_the_package():
    documented = re.findall(r"^\*\*`(.+)`\*\*$", TEXT["errors.md"], re.MULTILINE)
    assert len(documented) > 40
    assert len(documented) == TEXT["errors.md"].count("**`")
    known = {*messages(), *(f"…: {os.strerror(code)}" for code in (errno.EACCES, errno.EROFS, errno.ENOSPC))}
    assert not [text for text in documented if text not in known]


def test_what_a_message_installs_is_the_package_and_no_folder_of_a_checkout():
    """And the page of errors has the same lines."""
    texts = [text for text in messages() if "pip install" in text] + TEXT["errors.md"].splitlines()
    lines = [line for text in texts for line in re.findall(r"pip install (\S+)", text)]
    assert len(lines) > 8
    assert not [line for line in lines if not line.startswith("'zb_hdf5[")]


def test_the_pictures_show_what_the_commands_print_now():
    """And are small; `make pictures` makes them again."""
    pictures = script_of_the_docs("pictures")
    for name, text in pictures.terminals().items():
        assert (pictures.PICTURES / name).read_text(encoding="utf-8") == text, f"{name}: run make pictures"
    assert all(path.stat().st_size < 100_000 for path in pictures.PICTURES.iterdir())


#: Heading on the page of recipes -> the library that it needs.
RECIPES = {
    "A plain loop with DDP": "torch",
    "Checkpoints of torch.distributed": "torch",
    "The Trainer of Hugging Face": "transformers",
    "TRL": "trl",
    "Values of a teacher: a plain loop": "torch",
    "Values of a teacher: TRL": "trl",
    "accelerate": "accelerate",
    "Lightning": "lightning",
    "Lightning Fabric": "lightning",
    "StatefulDataLoader of torchdata": "torchdata",
    "Context parallel: a slice of each row": "torch",
    "DeepSpeed": "deepspeed",
    "torchtitan": "torchtitan.components.data.loader",
    "Ray Train": "ray",
    "grain": "grain",
    "MaxText": "maxtext.trainers.pre_train",
    "nanochat": "torch",
    "Megatron-LM": "torch",
}
#: Heading -> the lines that use the objects of a recipe as its framework does.
USES = {
    "torchtitan": """
batch = {"max_context_length": 64, "num_tokens_per_batch": 512, "tokenizer": None}
built = dataloader.build(dp_rank=0, dp_world_size=1, **batch)
if Path("state.json").exists():
    built.load_state_dict(json.loads(Path("state.json").read_text()))
for _, (inputs, labels) in zip(range(4), built):
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (512,)
    step(inputs["input"].view(8, 64))
Path("state.json").write_text(json.dumps(built.state_dict()))
built.close()
for inputs, _ in replace(held_out, repeat=False).build(dp_rank=0, dp_world_size=1, **batch):
    evaluate(inputs["input"].view(8, 64))
""",
    "MaxText": """
from maxtext_job import train_up_to
train_up_to(8 if Path("run").exists() else 4, 8, training.__globals__, step, evaluate)
""",
    "nanochat": """
if Path("state.json").exists():
    batches = stored_batches("train-h5", 8, resume_state_dict=json.loads(Path("state.json").read_text()))
    inputs, targets, state = next(batches)
step(inputs)
for _ in range(3):
    inputs, targets, state = next(batches)
    step(inputs)
Path("state.json").write_text(json.dumps(state))
for inputs, targets in held_out_batches("train-h5", 8):
    evaluate(inputs)
""",
    "Megatron-LM": """
state = json.loads(Path("state.json").read_text()) if Path("state.json").exists() else None
tokens = StoredTokens("train-h5", rank=0, world_size=1, micro_batch_size=8, state=state)
for _, batch in zip(range(4), tokens):
    assert {value.shape for value in batch.values()} == {(8, 64)}
    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
    step(batch["tokens"])
Path("state.json").write_text(json.dumps(tokens.save_state()))
assert set(next(iter(held_out))) == set(batch)
""",
}
#: Recipes whose framework chooses the order, or whose evaluation is one of a part of the data.
OWN_ORDER = {"The Trainer of Hugging Face", "TRL", "Values of a teacher: TRL"}
OF_A_PART = {"Megatron-LM"}
#: Recipe -> its processes, each of which takes four steps.
WORKERS = {"Ray Train": 2}
#: Recipes that give slices of the rows.
CUT = {"Context parallel: a slice of each row"}


def recipes():
    """Return heading -> the Python below it."""
    _, *sections = re.split(r"^## ", TEXT["recipes.md"], flags=re.MULTILINE)
    return {section.partition("\n")[0]: "".join(EXAMPLE.findall(section)) for section in sections}


def test_every_recipe_runs_or_says_that_it_does_not():
    found = recipes()
    assert {name for name, code in found.items() if code} == RECIPES.keys()
    for name in found.keys() - RECIPES.keys():
        assert f"## {name}\n\nNot run: " in TEXT["recipes.md"]


def skip_without(module):
    """Skip a test that needs a module, which its own process is to import: that takes seconds."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # no package above it
        found = None
    if found is None:
        pytest.skip(f"needs {module}")


@pytest.fixture(scope="module")
def store_of_recipes(tmp_path_factory):
    """Return a store of packed documents with two splits, each with the values of a teacher."""
    folder = tmp_path_factory.mktemp("recipes")
    rows = [[*(np.arange(number, number + 50) % 300).tolist()] for number in range(400)]
    (folder / "ids.jsonl").write_text("".join(f'{{"input_ids": {row}}}\n' for row in rows))
    how = {"batch_size": 8, "seq_len": 64, "packing": "concat", "val_fraction": 0.2, "workers": 1}
    zb_hdf5.convert(folder / "ids.jsonl", "hdf5", folder / "train-h5", source_format="hf", **how)
    kinds = {"ids": ("i4", (8,)), "logprobs": ("f2", (8,))}
    for split in ("train", "val"):
        with (
            zb_hdf5.open_corpus(folder / "train-h5", split=split) as corpus,
            zb_hdf5.open_field_set(corpus, "teacher", kinds) as taught,
        ):
            for step in taught.missing(batch_size=50, quiet=True):
                ids = (step["tokens"].numpy()[..., None] + np.arange(8)) % 300
                taught.write(step["records"], ids=ids, logprobs=np.full(ids.shape, np.log(1 / 8)))
            taught.finish()
    return folder / "train-h5"


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_the_next_job_goes_on(name, store_of_recipes, tmp_path):
    """Its lines run in an empty namespace, and again as the next job, which goes on where the first one ended."""
    skip_without(RECIPES[name])
    (tmp_path / "train-h5").symlink_to(store_of_recipes)
    (tmp_path / "recipe.py").write_text(recipes()[name])
    (tmp_path / "use.py").write_text(USES.get(name, ""))
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    variables |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    variables |= {"DECOUPLE_GCLOUD": "TRUE"}  # MaxText without the libraries of Google Cloud
    done = run_training(PROGRAMS / "next_job.py", folder=tmp_path, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = (tmp_path / "seen.txt").read_text().splitlines()
    train = [line.partition(" ")[2] for line in seen if line.startswith("train ")]
    held_out = [line.partition(" ")[2] for line in seen if line.startswith("held-out ")]
    expected = rows_of_store(store_of_recipes, "train")
    validated = 2 * rows_of_store(store_of_recipes, "val")
    if name in CUT:
        assert (len(train), len(held_out)) == (64, len(validated))
        return
    if name in OWN_ORDER:
        assert (len(train), set(train) <= set(expected)) == (64, True)
    elif name in WORKERS:  # beside each other, in any order
        assert sorted(train) == sorted(expected[: 64 * WORKERS[name]])
    else:
        assert train == expected[:64]
    assert sorted(held_out) == sorted(validated) or name in OF_A_PART


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A plain loop with DDP", "Checkpoints of torch.distributed"])
def test_a_recipe_of_two_ranks_takes_each_row_once_and_evaluates_all_of_them(name, store_of_recipes, tmp_path):
    (tmp_path / "train-h5").symlink_to(store_of_recipes)
    (tmp_path / "recipe.py").write_text(recipes()[name])
    (tmp_path / "use.py").write_text("")
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for job in "01":
        logs = tmp_path / f"logs{job}"  # of each rank by itself: in one pipe the lines of two ranks may be mixed
        ranks = (PROGRAMS / "forked_ranks.py", 2, logs, PROGRAMS / "next_job.py")
        done = run_training(*ranks, folder=tmp_path, env=variables | {"JOB": job})
        printed = {f"{path.parent.name}/{path.name}": path.read_text() for path in logs.rglob("std*.log")}
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{printed}"
        losses = [re.search(r"\d\.\d{3,}", path.read_text())[0] for path in logs.rglob("stdout.log")]
        assert len(losses) == 2, printed
        assert len(set(losses)) == 1, "both ranks have the loss of all tokens"
    seen = (tmp_path / "seen.txt").read_text().splitlines()
    train = [line.partition(" ")[2] for line in seen if line.startswith("train ")]
    held_out = [line.partition(" ")[2] for line in seen if line.startswith("held-out ")]
    assert sorted(train) == sorted(rows_of_store(store_of_recipes, "train")[:128])
    assert sorted(held_out) == sorted(2 * rows_of_store(store_of_recipes, "val"))


@pytest.mark.slow
def test_the_checkpoints_of_torchtitan_go_on_with_another_degree_and_end_on_any(store_of_recipes, tmp_path):
    """Its `CheckpointManager` saves after 20 steps of 1 rank, and loads on 3 ranks, up to the end of the epoch."""
    pytest.importorskip(RECIPES["torchtitan"])
    (tmp_path / "train-h5").symlink_to(store_of_recipes)
    (tmp_path / "recipe.py").write_text(recipes()["torchtitan"])
    parts = [run_together("torchtitan_job.py", tmp_path, count, steps) for count, steps in ((1, 20), (3, 0))]
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    how = {"targets": True, "documents": ("position_ids",), "last": "short", "rank": 0, "world_size": 1}
    with zb_hdf5.Loader(store_of_recipes, **how) as loader:
        steps = list(loader)
    for name, key in {"input": "tokens", "positions": "position_ids", "labels": "targets"}.items():
        expected = np.concatenate([step[key].numpy() for step in steps])
        assert np.array_equal(found[name][: len(expected)], expected)
    assert (len(parts[0]["labels"]), (tmp_path / "run" / "checkpoint" / "step-20").is_dir()) == (40, True)
    assert (found["labels"][len(expected) :] == -100).all()
    assert len(found["labels"]) - len(expected) < 6


@pytest.mark.slow
def test_the_trainer_of_maxtext_goes_on_in_another_number_of_processes(store_of_recipes, tmp_path):
    """It takes 20 batches of 6 rows in one process, and 20 more in three, from its checkpoint."""
    pytest.importorskip(RECIPES["MaxText"])
    (tmp_path / "train-h5").symlink_to(store_of_recipes)
    (tmp_path / "recipe.py").write_text(recipes()["MaxText"])
    parts = [run_together("maxtext_job.py", tmp_path, count, steps, 6 // count) for count, steps in ((1, 20), (3, 40))]
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    how = {"targets": True, "documents": ("position_ids", "document_ids"), "rank": 0, "world_size": 1}
    with zb_hdf5.Loader(store_of_recipes, **how) as loader:
        steps = list(loader)
    expected = {name: np.concatenate([step[name].numpy() for step in steps])[:240] for name in steps[0]}
    learned = expected["targets"] >= 0
    assert np.array_equal(found["inputs"], expected["tokens"])
    assert np.array_equal(found["targets"], np.where(learned, expected["targets"], 0))
    assert np.array_equal(found["inputs_position"], expected["position_ids"])
    assert np.array_equal(found["inputs_segmentation"] == 0, expected["document_ids"] < 0)
    assert np.array_equal(np.diff(found["inputs_segmentation"]), np.diff(expected["document_ids"]))
    assert np.array_equal(found["targets_segmentation"], np.where(learned, found["inputs_segmentation"], 0))


def run_together(name, folder, count, *arguments):
    """Run a program in some processes, which join at a port; return the rows of their steps, in the order of steps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(folder / f"{count}.log", "w+") as log:
        how = {"cwd": folder, "env": environment(DECOUPLE_GCLOUD="TRUE"), "stdout": log, "stderr": log}
        commands = [command_of(PROGRAMS / name, process, count, port, *arguments) for process in range(count)]
        with running(*(subprocess.Popen(command, **how) for command in commands)) as jobs:
            codes = [job.wait() for job in (jobs if count > 1 else [jobs])]
        assert codes == [0] * count, log.seek(0) or log.read()[-3000:]
    files = [np.load(folder / f"{process}-of-{count}.npz") for process in range(count)]
    return {name: np.stack([file[name] for file in files], 1).reshape(-1, 64) for name in files[0]}


def rows_of_store(path, split):
    """Return the beginnings of the rows of an epoch, as `programs/next_job.py` notes them; no row of padding."""
    how = {"split": split, "last": "short", "rank": 0, "world_size": 1}
    with zb_hdf5.Loader(path, **how) as loader:
        return [" ".join(map(str, row[:40].tolist())) for batch in loader for row in batch if row.any()]


@pytest.mark.parametrize("width", [128, 2048])
def test_the_first_commands_convert_rows_of_any_length(width, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tokens").mkdir()
    np.save("tokens/part-000.npy", np.arange(130 * width).reshape(130, width) % 50_000)
    [block] = re.findall(r"^```\n(zb convert npy-to-hdf5 .*?)^```", TEXT["README.md"], re.DOTALL | re.MULTILINE)
    for line in block.splitlines():
        done = CliRunner().invoke(zb, shlex.split(line)[1:])
        assert done.exit_code == 0, done.output
    assert f"4 of 32 x {width:,} uint16" in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_imports_public_names_only(path):
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    imports = [
        node for node in tree if isinstance(node, ast.Import | ast.ImportFrom) and "zb_hdf5" in ast.unparse(node)
    ]
    assert {ast.unparse(node).split(" import ")[0] for node in imports} == {"from zb_hdf5"}
    assert {alias.name for node in imports for alias in node.names} <= set(zb_hdf5.__all__)
