"""Every code block runs, every flag exists, every link leads somewhere."""

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
]


# Its blocks fail with the released mlx-lm, see test_patches.py.
DEFECTS = ROOT / "patches/README.md"


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


@pytest.mark.parametrize("line", COMMANDS)
def test_flags_exist(line):
    _, _, line = line.rpartition("&&")
    asked = set(re.findall(r"(?<= )--[a-z][a-z-]*", line))
    package, dot, name = re.search(r"(mlx_lm(?:_mtp)?)([. ])(\w+)", line).groups()
    module = [f"{package}.{name}"] if dot == "." else [package, name]
    if package == "mlx_lm":
        module = [package, name]  # the script mlx_lm.NAME
    command = [sys.executable, "-m", *module, "--help"]
    told = subprocess.run(command, capture_output=True, text=True).stdout
    assert asked <= set(re.findall(r"--[a-z][a-z-]*", told)), line


@pytest.mark.parametrize("page", [*PAGES, DEFECTS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_readme_is_short_and_ci_runs_its_commands():
    text = (ROOT / "README.md").read_text()
    ours = (ROOT / ".ci" / "run").read_text()
    assert len(text.splitlines()) < 120
    for command in ("python -m mlx_lm_mtp demo\n", "python -m pytest"):
        assert command in text and command in ours
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
