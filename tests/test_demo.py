"""The pair in the box: size, format, text, and the demo command."""

import json
import os
import struct
import subprocess
import sys

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

from mlx_lm_mtp import MTPStats, demo, load_assistant, mtp_generate_step
from mlx_lm_mtp.__main__ import main


@pytest.fixture(scope="module")
def box():
    model, tokenizer = load(str(demo.TARGET))
    return model, tokenizer, load_assistant(str(demo.ASSISTANT), model)


def header(folder):
    with (folder / "model.safetensors").open("rb") as f:
        (size,) = struct.unpack("<Q", f.read(8))
        return json.loads(f.read(size))


def test_the_pair_is_small():
    files = [f for f in demo.FOLDER.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 16_000_000


@pytest.mark.parametrize("folder", ["target", "assistant"])
def test_names_are_those_of_the_format(pair_e, folder):
    """The same names as a pair that transformers wrote, layer for layer."""
    theirs = {
        "target": pair_e.target_path,
        "assistant": pair_e.assistant_path,
    }[folder]
    known = {_without_number(k) for k in header(type(demo.FOLDER)(theirs))}
    ours = {_without_number(k) for k in header(demo.FOLDER / folder)}
    assert ours == known
    configs = [
        json.loads((path / "config.json").read_text())
        for path in (demo.FOLDER / folder, type(demo.FOLDER)(theirs))
    ]
    assert configs[0].keys() == configs[1].keys() - {"transformers_version"}
    assert configs[0]["text_config"].keys() == configs[1]["text_config"].keys()


def _without_number(name):
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def test_it_is_e2b_in_small(box):
    model, _, drafter = box
    args = model.language_model.args
    assert args.hidden_size_per_layer_input and args.num_kv_shared_layers
    assert {*args.layer_types} == {"sliding_attention", "full_attention"}
    assert drafter.args.use_ordered_embeddings
    # A draft step is under a tenth of a target step in layers, too.
    assert len(drafter.layers) * 10 <= args.num_hidden_layers


def test_held_out_prompts_give_the_same_text_and_the_card_is_right(box):
    """The first prompts of the card's figures; the stage ``measure`` does all."""
    model, tokenizer, drafter = box
    stats = MTPStats()
    for prompt in json.loads((demo.FOLDER / "prompts.json").read_text())[:3]:
        ids = mx.array(tokenizer.encode(prompt["text"]))
        plain = [token for token, _ in generate_step(ids, model, max_tokens=60)]
        options = {"num_draft_tokens": 3, "max_tokens": 60, "stats": stats}
        steps = mtp_generate_step(ids, model, drafter, **options)
        assert [token for token, *_ in steps] == plain
    assert stats.acceptance[0] > 0.8
    assert stats.acceptance[2] > 0.55
    assert stats.tokens_per_forward > 3


def test_it_answers_in_turns_and_ends(box):
    model, tokenizer, drafter = box
    turn = [{"role": "user", "content": "def is_prime(n):"}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True)
    options = {"num_draft_tokens": 3, "max_tokens": 200}
    steps = mtp_generate_step(mx.array(ids), model, drafter, **options)
    text = []
    for token, *_ in steps:
        if token in tokenizer.eos_token_ids:
            break
        text.append(token)
    else:
        pytest.fail("no end of turn")
    compile(tokenizer.decode(text), "answer", "exec")


def test_demo_ends_with_figures_and_the_command(capsys):
    assert main(["demo", "def read(self):", "--max-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert "the same text" in out
    assert "tokens per target forward" in out
    assert out.rstrip().split("\n")[-2].startswith("mlx_lm.generate --model")


def test_path_is_for_other_commands():
    """No MLX is loaded for it."""
    script = (
        "import sys; from mlx_lm_mtp.__main__ import main; main(['demo', '--path']); "
        "assert 'mlx.core' not in sys.modules"
    )
    run = [sys.executable, "-c", script]
    out = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert out.split() == [str(demo.TARGET), str(demo.ASSISTANT)]


def test_an_empty_prompt_is_refused(capsys):
    assert main(["demo", " "]) == 1
    assert "needs a prompt" in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_a_command_quietly():
    """As ``| head`` does: the end of the pipe is gone by the time of the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mlx_lm_mtp", "demo", "--path"]
    found = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (found.returncode, found.stderr) == (141, "")
