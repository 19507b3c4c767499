"""mlx-lm's own commands, as a user types them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PAIRS
from mlx_lm import generate as generate_text
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

SCRIPTS = Path(sys.executable).parent
SPELLINGS = {
    "mlx_lm.generate": [str(SCRIPTS / "mlx_lm.generate")],
    "mlx_lm generate": [str(SCRIPTS / "mlx_lm"), "generate"],
    "python -m mlx_lm generate": [sys.executable, "-m", "mlx_lm", "generate"],
}
TARGET = str(PAIRS / "e" / "target")
ASSISTANT = str(PAIRS / "e" / "assistant")


def run(*arguments, spelling="mlx_lm.generate", **environment):
    return subprocess.run(
        [*SPELLINGS[spelling], *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def generate(*arguments, prompt="def main():", tokens=60, **options):
    return run(
        *("--model", TARGET, "--prompt", prompt, "--max-tokens", tokens),
        *arguments,
        **options,
    )


@pytest.fixture(scope="module")
def plain():
    return generate(MLX_LM_MTP_DISABLE="1").stdout


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_same_text_with_one_more_flag(spelling, plain):
    found = generate("--mtp-assistant", ASSISTANT, spelling=spelling)
    assert (found.returncode, found.stderr) == (0, "")
    text, _, numbers = plain.rpartition("==========")
    assert found.stdout.startswith(text)
    assert "MTP: " in found.stdout and "MTP: " not in plain
    assert " tokens per target forward, accepted by position " in found.stdout
    assert len(numbers.splitlines()) + 1 == len(
        found.stdout.rpartition("==========")[2].splitlines()
    )


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_help_lists_the_flag(spelling):
    assert "--mtp-assistant PATH_OR_REPO" in run("--help", spelling=spelling).stdout


def test_not_verbose_prints_the_text_alone(plain):
    found = generate("--mtp-assistant", ASSISTANT, "--verbose", "False")
    assert found.stdout.strip() == plain.split("==========")[1].strip()


@pytest.mark.parametrize("number", ["0", "1", "7"])
def test_the_number_of_drafts_is_pinned(number, plain):
    found = generate("--mtp-assistant", ASSISTANT, "--num-draft-tokens", number)
    assert found.stderr == ""
    assert found.stdout.startswith(plain.rpartition("==========")[0])
    positions = found.stdout.split("by position ")[1].split(",")[0].split()
    assert len(positions) == max(int(number), 1)


def test_the_assistant_is_quantised_on_loading(plain):
    found = generate("--mtp-assistant", ASSISTANT, "--mtp-quantize", "8")
    assert found.stderr == ""
    assert found.stdout.startswith(plain.rpartition("==========")[0])
    alone = generate("--mtp-quantize", "8")
    assert alone.returncode == 2
    assert "--mtp-quantize needs --mtp-assistant" in alone.stderr


def test_a_seed_gives_plain_text_when_coupled():
    options = ("--temp", "1", "--seed", "11", "--verbose", "False")
    plain = generate(*options)
    coupled = ("--mtp-verification", "coupled")
    found = generate(*options, "--mtp-assistant", ASSISTANT, *coupled)
    assert found.stdout == plain.stdout != ""


def test_a_seed_reproduces_a_run():
    options = ("--temp", "1", "--seed", "11", "--mtp-assistant", ASSISTANT)
    options += ("--num-draft-tokens", "3")  # else it depends on the machine's times
    one, two = (generate(*options, "--verbose", "False").stdout for _ in range(2))
    assert one == two != ""


def test_prompt_cache_files_work(tmp_path, plain):
    file = tmp_path / "cache.safetensors"
    command = [sys.executable, "-m", "mlx_lm", "cache_prompt", "--model", TARGET]
    command += ["--prompt", "import os\n" * 30, "--prompt-cache-file", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    options = ("--prompt-cache-file", file, "--verbose", "False")
    wanted = generate(*options).stdout
    assert generate(*options, "--mtp-assistant", ASSISTANT).stdout == wanted != ""


def test_a_cache_of_ours_goes_on_without_us(tmp_path, pair_e):
    """Saved in mlx-lm's format after drafts, read where MTP is switched off."""
    file, target = tmp_path / "cache.safetensors", pair_e.target_path
    cache = make_prompt_cache(pair_e.model)
    options = {"max_tokens": 90, "prompt_cache": cache}
    prompt = pair_e.tokenizer.encode("import os\n")
    text = generate_text(
        pair_e.model, pair_e.tokenizer, prompt, draft_model=pair_e.drafter, **options
    )
    metadata = {"model": target, "tokenizer_config": "{}"}
    save_prompt_cache(str(file), cache, metadata)
    found = run(
        *("--prompt-cache-file", file, "--prompt", "x = 1", "--ignore-chat-template"),
        *("--max-tokens", 30, "--verbose", "False"),
        MLX_LM_MTP_DISABLE="1",
    )
    tokens = pair_e.tokenizer.encode
    whole = [*prompt, *tokens(text, add_special_tokens=False), *tokens("x = 1")]
    wanted = generate_text(pair_e.model, pair_e.tokenizer, whole, max_tokens=30)
    assert found.stdout == wanted + "\n", found.stderr


def test_a_drafter_that_was_not_used_is_reported():
    found = generate("--mtp-assistant", ASSISTANT, tokens=1)
    assert found.stderr == "MTP: the assistant was not used: the text ended before\n"


def test_a_plain_run_is_byte_for_byte_mlx_lms_own(plain):
    found = generate().stdout
    assert found.rpartition("==========")[0] == plain.rpartition("==========")[0]
    error = generate("--num-draft-tokens", "x")
    wanted = generate("--num-draft-tokens", "x", MLX_LM_MTP_DISABLE="1")
    assert error.stderr.splitlines()[-1] == wanted.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def rubbish(tmp_path_factory):
    """Folders that are no assistants."""
    root = tmp_path_factory.mktemp("rubbish")
    weights = (PAIRS / "e" / "assistant" / "model.safetensors").read_bytes()
    config = (PAIRS / "e" / "assistant" / "config.json").read_bytes()
    for name in ("empty", "weightless", "truncated", "llama"):
        (root / name).mkdir()
    (root / "weightless" / "config.json").write_bytes(config)
    (root / "truncated" / "config.json").write_bytes(config)
    (root / "truncated" / "model.safetensors").write_bytes(weights[:300_000])
    (root / "llama" / "config.json").write_text('{"model_type": "llama"}')
    (root / "llama" / "model.safetensors").write_bytes(weights)
    return root


BAD = {
    "a missing path": (["/no/such/folder"], "there is no folder"),
    "an empty folder": (["{rubbish}/empty"], "no config.json"),
    "no weights": (["{rubbish}/weightless"], "weights are missing"),
    "truncated weights": (["{rubbish}/truncated"], "damaged"),
    "a Llama": (["{rubbish}/llama"], "'llama'"),
    "a target": ([TARGET], "'gemma4'"),
    "another size": ([str(PAIRS / "moe" / "assistant")], "does not fit"),
    "a negative number": ([ASSISTANT, "--num-draft-tokens", "-1"], "is -1"),
    "no number": ([ASSISTANT, "--num-draft-tokens", "few"], "'few'"),
    "half a number": ([ASSISTANT, "--num-draft-tokens", "1.5"], "'1.5'"),
    "kv bits": ([ASSISTANT, "--kv-bits", "8"], "--kv-bits does not go"),
    "two drafters": ([ASSISTANT, "--draft-model", TARGET], "exclude each other"),
    "no such rule": ([ASSISTANT, "--mtp-verification", "lossy"], "'lossy'"),
    "no path": ([], "expected one argument"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, rubbish):
    arguments, words = BAD[case]
    arguments = [a.format(rubbish=rubbish) for a in arguments]
    found = generate("--mtp-assistant", *arguments)
    assert found.returncode != 0 and found.stdout == ""
    assert len(found.stderr.splitlines()) == 1 and words in found.stderr


def test_a_rule_without_a_drafter_is_refused():
    found = generate("--mtp-verification", "block")
    assert found.returncode != 0
    assert found.stderr.startswith("mlx-lm-mtp: error: --mtp-verification needs")


def test_a_cache_file_names_its_model(tmp_path):
    file = tmp_path / "cache.safetensors"
    command = [sys.executable, "-m", "mlx_lm", "cache_prompt", "--prompt", "hello"]
    command += ["--model", str(PAIRS / "moe" / "target"), "--prompt-cache-file", file]
    subprocess.run(command, check=True, capture_output=True)
    found = run(
        *("--prompt-cache-file", file, "--max-tokens", 5),
        *("--mtp-assistant", PAIRS / "moe" / "assistant"),
    )
    assert found.returncode == 0, found.stderr
