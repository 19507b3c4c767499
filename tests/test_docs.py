"""Every code block runs, every flag exists, every link leads somewhere."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "tests/README.md",
    ROOT / "mlx_lm_mtp/demo/README.md",
]
# Its blocks fail with the released mlx-lm, see test_patches.py.
DEFECTS = ROOT / "patches/README.md"
# Whose flags the pages may name beside a command line.
PROGRAMS = [
    *(("mlx_lm", name) for name in ("generate", "server", "lora", "benchmark")),
    *(("mlx_lm_mtp", name) for name in ("bench", "doctor", "train", "demo")),
    ("mlx_lm_mtp", "throughput"),
    ("mlx_lm_mtp.recipe",),
    ("tests.measure_acceptance",),
]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


PYTHON = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(blocks(page, "python"))
]


@pytest.mark.parametrize("code", PYTHON)
def test_python_blocks_run(code):
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def commands(page):
    """Indented lines that call us, with their continuations joined."""
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"^ {4}(\S.*)$", text, re.M)
    return [line for line in lines if "mlx_lm" in line and "--" in line]


COMMANDS = [
    pytest.param(line, id=line[:40]) for page in PAGES for line in commands(page)
]


FLAG = r"(?<![\w-])--[a-z][a-z-]*"


@functools.cache
def flags(*module):
    """The flags that a command lists."""
    told = subprocess.run(
        [sys.executable, "-m", *module, "--help"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path_with(ROOT / "tests")},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    return set(re.findall(FLAG, told.stdout))


def path_with(folder):
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize("line", COMMANDS)
def test_flags_exist(line):
    _, _, line = line.rpartition("&&")
    package, dot, name = re.search(r"(mlx_lm(?:_mtp)?)([. ])(\w+)", line).groups()
    ours = dot == "." and package == "mlx_lm_mtp"  # else the script mlx_lm.NAME
    known = flags(f"{package}.{name}") if ours else flags(package, name)
    assert set(re.findall(FLAG, line)) <= known, line


def test_flags_named_in_passing_exist():
    named = {
        flag: page.name for page in PAGES for flag in re.findall(FLAG, page.read_text())
    }
    for module in PROGRAMS:
        for flag in flags(*module) & set(named):
            del named[flag]
    assert not named


def anchors(page):
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", [*PAGES, DEFECTS], ids=str)
def test_links_lead_somewhere(page):
    for path, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", page.read_text()):
        if not path.startswith("http"):
            target = page.parent / path if path else page
            assert target.exists(), path
            assert not anchor or anchor in anchors(target), anchor


def test_every_page_is_in_the_reading_order():
    order = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in order, page


def test_the_page_about_tests_names_all_of_them():
    page = (ROOT / "tests/README.md").read_text()
    files = {path.name for path in (ROOT / "tests").glob("test_*.py")}
    assert set(re.findall(r"`(test_\w+\.py)`", page)) == files


def test_readme_is_short_and_ci_runs_its_commands():
    text = (ROOT / "README.md").read_text()
    ours = (ROOT / ".ci" / "run").read_text()
    assert len(text.splitlines()) < 120
    for command in ("python -m mlx_lm_mtp demo\n", "python -m pytest"):
        assert command in text and command in ours
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


VARIABLE = "\0"


def sayings():
    """Every text in the package that could be a message."""
    for file in (ROOT / "mlx_lm_mtp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [getattr(part, "value", VARIABLE) for part in parts]
            yield "".join(t if isinstance(t, str) else VARIABLE for t in texts)


def quoted():
    """The second column of the table of refusals: what each line says."""
    page = (ROOT / "docs/compatibility.md").read_text()
    table = page[page.index("| found | the line says |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield from re.findall(r"`([^`]+)`", line.split("|")[2])


@pytest.mark.parametrize("line", list(quoted()))
def test_quoted_refusals_are_what_the_code_says(line):
    """The wording; that it is said is tested where each is refused."""
    for saying in sayings():
        if len(saying.replace(VARIABLE, "")) < 12:
            continue
        if all(part in saying for part in line.split("...")):
            return
        pattern = re.escape(saying).replace(re.escape(VARIABLE), ".+")
        if re.fullmatch(pattern, line.replace("...", "x"), re.S):
            return
    pytest.fail("nobody says this")
