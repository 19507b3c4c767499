"""mlx_lm.chat and mlx_lm.benchmark with an assistant."""

import os
import pty
import re
import select
import subprocess

import pytest
from conftest import PAIRS
from serving import SCRIPTS

TURNS = ("import os", "def main(argv):", "class Test(unittest.TestCase):")


def arguments(name):
    return ["--model", str(PAIRS / name / "target")]


def assistant(name):
    return ["--mtp-assistant", str(PAIRS / name / "assistant")]


def talk(*options, turns=TURNS):
    """A chat in a terminal: what the screen showed, by turn."""
    master, slave = pty.openpty()
    command = [str(SCRIPTS / "mlx_lm.chat"), *options]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, close_fds=True
    )
    os.close(slave)
    screens = [read_until_prompt(master)]
    for turn in [*turns, "q"]:
        os.write(master, turn.encode() + b"\n")
        screens.append(read_until_prompt(master))
    assert process.wait(timeout=60) == 0, screens
    os.close(master)
    return screens


def read_until_prompt(terminal):
    """Everything until the chat waits for a line, or ends."""
    seen = b""
    while not seen.rstrip(b"\x01\x02\x1b[0m ").endswith("›".encode()):
        assert select.select([terminal], [], [], 120)[0], seen
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        seen += part
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", seen.decode())


def without_times(screen):
    return re.sub(r"[\d.]+ (tok/s|GB)", r"\1", screen)


@pytest.mark.parametrize("name", ["e", "moe"])
def test_three_turns_equal_chat_without_the_flag(name):
    """The cache goes from turn to turn, past the window."""
    options = [*arguments(name), "--max-tokens", "40"]
    *plain, bye = map(without_times, talk(*options))
    *ours, end = map(without_times, talk(*options, *assistant(name)))
    assert ours == plain and len(set(ours)) == 4
    found = re.fullmatch(r"(.*bye\s+)(MTP: [\d.]+ tokens per .* round\s+)", end, re.S)
    assert found and found[1] == bye


def test_a_seed_gives_plain_chat_when_coupled():
    options = [*arguments("e"), "--max-tokens", "20", "--temp", "1", "--seed", "3"]
    coupled = ["--mtp-verification", "coupled", "--num-draft-tokens", "2"]
    *plain, _ = map(without_times, talk(*options, turns=TURNS[:1]))
    *ours, _ = map(
        without_times, talk(*options, *assistant("e"), *coupled, turns=TURNS[:1])
    )
    assert ours == plain


def run(command, *options):
    script = str(SCRIPTS / f"mlx_lm.{command}")
    return subprocess.run(
        [script, *options], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


SHORT = ["-p", "20", "-g", "30", "-n", "1"]


def test_benchmark_reports_what_the_assistant_did():
    found = run("benchmark", *arguments("e"), *assistant("e"), *SHORT)
    assert found.returncode == 0, found.stderr
    *_, averages, mtp = found.stdout.splitlines()
    assert averages.startswith("Averages: prompt_tps=") and mtp.startswith("MTP: ")
    plain = run("benchmark", *arguments("e"), *SHORT)
    assert plain.stdout.splitlines()[-1].startswith("Averages: ")


MISTAKES = {
    "no such rule": ("chat", ["--mtp-verification", "x"], "'x'"),
    "another size": ("chat", assistant("moe"), "does not fit"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(case):
    command, options, words = MISTAKES[case]
    found = run(command, *arguments("e"), *assistant("e"), *options)
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1
    assert found.stderr.startswith("mlx-lm-mtp: error: ") and words in found.stderr


def test_a_flag_without_the_assistant_is_refused():
    found = run("chat", *arguments("e"), "--num-draft-tokens", "2")
    assert found.returncode == 2 and "needs --mtp-assistant" in found.stderr
