"""The patches for mlx-lm: each applies, proves its defect, and changes nothing else.

Without the slow ones this is about the newest release. Archives come from the package
index and are kept, see ``releases.archive``.
"""

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from releases import ARCHIVES, LATEST, install, make_hub, outcomes, unpack

ROOT = Path(__file__).parent.parent
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
MODULES = ("tests.test_generate", "tests.test_prompt_cache", "tests.test_sample_utils")
# Their other tests of what the patches touch.
FURTHER = {"tests.test_server": "*", "tests.test_models": "*gemma*"}
RELEASES = [
    pytest.param(v, marks=() if v == LATEST else pytest.mark.slow) for v in ARCHIVES
]


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    return make_hub(tmp_path_factory.mktemp("hub"))


class Release:
    """A release, as published and with patches on copies of it."""

    def __init__(self, root, version):
        self.root, self.folder = root, unpack(version, root)
        self._copies = itertools.count()

    def patched(self, patches, package=True):
        """A copy with patches applied, or with only the tests that they bring."""
        copy = self.root / f"copy-{next(self._copies)}"
        shutil.copytree(self.folder, copy)
        for path in patches:
            apply(path, copy)
        if not package:
            shutil.rmtree(copy / "mlx_lm")
            shutil.copytree(self.folder / "mlx_lm", copy / "mlx_lm")
        return copy


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    """Releases by their version."""
    held = {}

    def get(version):
        if version not in held:
            held[version] = Release(tmp_path_factory.mktemp("release"), version)
        return held[version]

    return get


def apply(path, folder):
    """Apply a patch exactly: no line of its context may differ."""
    command = ["patch", "-p1", "-F0", "-s", "-i", str(path)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, f"{path.name}: {run.stdout}{run.stderr}"


def changed(path):
    """The files that a patch changes."""
    return re.findall(r"^\+\+\+ b/(.*)$", path.read_text(), re.M)


def brought(*paths):
    """The names of the tests that patches bring."""
    pattern = r"^\+ {4}def (test_\w+)"
    return {n for p in paths for n in re.findall(pattern, p.read_text(), re.M)}


def split(told, names):
    """Outcomes of the tests with these names, and of the others."""
    ours = {i: o for i, o in told.items() if i.rpartition(".")[-1] in names}
    return ours, {i: o for i, o in told.items() if i not in ours}


@functools.cache
def run(folder, hub, modules=MODULES, patterns="*"):
    return outcomes(folder, hub, modules, patterns, MLX_LM_MTP_DISABLE="1")


# They apply --------------------------------------------------------------------------


@pytest.mark.parametrize("version", ARCHIVES)
def test_each_alone_and_all_in_any_order(release, version):
    for path in PATCHES:
        release(version).patched([path])
    forth = release(version).patched(PATCHES)
    back = release(version).patched(PATCHES[::-1])
    for name in {name for path in PATCHES for name in changed(path)}:
        assert (forth / name).read_bytes() == (back / name).read_bytes()


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_is_a_plain_small_diff(path):
    text = path.read_text()
    assert text.startswith("diff --git "), "no commit message, no covering letter"
    assert brought(path), "it brings its own tests"
    lines = text[: text.index("diff --git a/tests/")].splitlines()
    assert sum(line[:1] in "+-" for line in lines) <= 75


@pytest.mark.slow
def test_their_formatters_agree(release, tmp_path):
    tools = install(tmp_path, "black==25.1.0", "isort==6.0.0", "ruff")
    for patches in [*([path] for path in PATCHES), PATCHES]:
        folder = release(LATEST).patched(patches)
        files = sorted({name for path in patches for name in changed(path)})
        for command in (
            ["black", "--check"],
            ["isort", "--profile", "black", "--check"],
            ["ruff", "check", "--preview"],
        ):
            found = subprocess.run(
                [sys.executable, "-m", *command, *files],
                cwd=folder,
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONPATH": str(tools)},
            )
            assert found.returncode == 0, found.stdout + found.stderr


# Their tests fail before and pass after ----------------------------------------------


@pytest.mark.parametrize("version", RELEASES)
def test_all_together(release, hub, version):
    names = brought(*PATCHES)
    before = run(release(version).patched(PATCHES, package=False), hub)
    after = run(release(version).patched(PATCHES), hub)
    ours_before, others_before = split(before, names)
    ours_after, others_after = split(after, names)
    assert len(ours_before) == len(names)
    assert set(ours_before.values()) == {"failed"}, ours_before
    assert set(ours_after.values()) == {"ok"}, ours_after
    assert others_after == others_before
    # Two tests need the real model, one fails in 0.32.0 and 0.32.1.
    assert len(others_after) > 70
    assert sum(outcome == "failed" for outcome in others_after.values()) <= 3


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", RELEASES)
def test_each_alone(release, hub, version, path):
    names = brought(path)
    patterns = " ".join(f"*.{name}" for name in names)
    told = run(release(version).patched([path]), hub, patterns=patterns)
    assert list(told.values()) == ["ok"] * len(names), told


@pytest.mark.slow
@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_nothing_else_changes_for_each_alone(release, hub, path):
    before = run(release(LATEST).folder, hub)
    _, others = split(run(release(LATEST).patched([path]), hub), brought(path))
    assert others == before


@pytest.mark.slow
@pytest.mark.parametrize("module", FURTHER)
@pytest.mark.parametrize("version", ARCHIVES)
def test_nothing_else_changes_further_away(release, hub, version, module, tmp_path):
    # Their server tests need it, their extra does not name it.
    path = {"PYTHONPATH": str(install(tmp_path, "requests"))}
    before, after = (
        outcomes(folder, hub, [module], FURTHER[module], MLX_LM_MTP_DISABLE="1", **path)
        for folder in (release(version).folder, release(version).patched(PATCHES))
    )
    assert len(before) > 5 and set(before.values()) <= {"ok", "skipped"}, before
    assert after == before


# The page about them -----------------------------------------------------------------

PAGE = (ROOT / "patches" / "README.md").read_text()
SECTIONS = dict(re.findall(r"^## (\d{4}): .*?\n(.*?)(?=^## )", PAGE, re.M | re.S))
RUN_BLOCKS = """
import json, sys
for block in json.loads(sys.argv[1]):
    try:
        exec(block, {})
        print("ran")
    except Exception as error:
        print(type(error).__name__, error)
"""


def reproduce(package):
    """What became of the blocks of the page, in order."""
    blocks = [re.search(r"```python\n(.*?)```", s, re.S)[1] for s in SECTIONS.values()]
    found = subprocess.run(
        [sys.executable, "-c", RUN_BLOCKS, json.dumps(blocks)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(package), "MLX_LM_MTP_DISABLE": "1"},
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def test_the_page_reproduces_every_defect(release):
    assert list(SECTIONS) == [path.name[:4] for path in PATCHES]
    errors = ("AssertionError", "AttributeError", "ValueError")
    before = reproduce(release(LATEST).folder)
    assert all(line.startswith(errors) for line in before), before
    assert reproduce(release(LATEST).patched(PATCHES)) == ["ran"] * len(PATCHES)


# Ours hold with them -----------------------------------------------------------------


def ours(folder, *arguments):
    """Run tests of ours on the mlx-lm of a folder."""
    # The folder's tests/ has names of ours too: only its package is taken.
    (folder / "package").mkdir()
    (folder / "mlx_lm").rename(folder / "package" / "mlx_lm")
    before = os.environ.get("PYTHONPATH", "")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(folder / "package"), before])},
    )


@pytest.mark.parametrize(
    "arguments",
    [
        # A wrapped sampler tells its law with patch 5, and is not opaque.
        pytest.param(["tests/test_sampler_laws.py"], id="laws"),
        pytest.param(
            ["tests/test_law.py", "-k", "not opaque"],
            id="law",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["tests/test_sampling.py", "-k", "test_coupled"],
            id="coupled",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ours_hold_with_the_patches(release, arguments):
    found = ours(release(LATEST).patched(PATCHES), *arguments)
    assert found.returncode == 0, found.stdout + found.stderr
    assert " passed" in found.stdout and "skipped" not in found.stdout
