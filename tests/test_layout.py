"""Imports point one way, files and functions stay small."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mlx_lm_mtp"
FILES = sorted(PACKAGE.rglob("*.py"))
# From arrays to host: a file imports only from those before it.
ORDER = [
    "kinds",
    "rounds",
    "options",
    "tape",
    "buffers",
    "cache",
    "live",
    "target",
    "forward",
    "law",
    "verify",
    "stats",
    "clock",
    "hub",
    "pair",
    "estimate",
    "depth",
    "propose",
    "rule",
    "compare",
    "residual",
    "loop",
    "generate",
    "flight",
    "decoding",
    "batch",
    "training",
    "train",
    "demo",
    "synthetic",
    "prompts",
    "subject",
    "machine",
    "measure",
    "bench",
    "throughput",
    "host",
    "doctor",
]


def room(path):
    """The part of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """Rooms of this package that a file imports."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module] if node.module else [a.name for a in node.names]
            rooms = (name.split(".")[0] for name in names)
            yield from (name for name in rooms if name != "__version__")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_one_way(path):
    if room(path) in ORDER:
        before = ORDER[: ORDER.index(room(path)) + 1]
        assert set(imported(path)) <= set(before), path


def test_the_map_names_every_room_in_order():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    named = re.findall(r"`(\w+)(?:\.py|/)`", page[: page.index("## Where a change")])
    assert [name for name in named if name in ORDER] == ORDER
    others = {"__init__", "__main__", *named}
    assert {room(path) for path in FILES} <= others


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_and_functions_are_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = node.end_lineno - node.lineno - len(docstring.splitlines())
            assert lines <= 60, f"{path}:{node.lineno} {node.name} has {lines} lines"


def test_only_the_host_assigns_into_mlx_lm():
    for path in FILES:
        if room(path) != "host":
            assert "setattr(" not in path.read_text(), path


def test_only_target_names_the_inside_of_gemma_4():
    inside = ("embed_scale", "final_logit_softcapping", "num_kv_shared_layers")
    for path in FILES:
        if room(path) not in ("target", "models", "recipe", "training", "synthetic"):
            assert not any(name in path.read_text() for name in inside), path
