"""Training: the loss against a slow reference, resuming, and what is refused."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import shared_kv

from mlx_lm_mtp import load_assistant
from mlx_lm_mtp.__main__ import main
from mlx_lm_mtp.target import Target
from mlx_lm_mtp.training import distil
from mlx_lm_mtp.training.clusters import order_by_cluster
from mlx_lm_mtp.training.data import Row, batch_of, collate
from mlx_lm_mtp.training.fresh import fresh_config, fresh_drafter

PAIR = Path(__file__).parent / "pairs" / "e"
TEXTS = [f"def f{i}(x):\n    return x + {i}\n" * 3 for i in range(12)]


@pytest.fixture(scope="module")
def target(pair_e):
    return Target(pair_e.model)


@pytest.fixture
def drafter(pair_e):
    loaded = load_assistant(pair_e.assistant_path, pair_e.model)
    distil.freeze_fixed(loaded)
    return loaded


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, texts in (("train", TEXTS[:9]), ("valid", TEXTS[9:])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(rows)
    return folder


def arguments(data, out, *more, iters=4):
    return [
        *("train", "--model", str(PAIR / "target"), "--data", str(data)),
        *("--mtp-assistant", str(PAIR / "assistant"), "--save-path", str(out)),
        *("--iters", str(iters), "--batch-size", "2", "--num-draft-tokens", "2"),
        *("--val-batches", "1", "--save-every", "1", "--learning-rate", "1e-3"),
        *more,
    ]


@pytest.fixture(scope="session")
def trained(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "drafter"
    assert main(arguments(data, out)) == 0
    return out


def weights(folder):
    return mx.load(str(folder / "model.safetensors"))


# The parallel loss


@pytest.mark.parametrize("position", [5, 63, 64, 65, 100])
def test_states_are_those_of_a_round(pair_e, target, drafter, prompts, position):
    """All positions in parallel agree with a round from a cache of ``position``."""
    tokens = prompts[:1, :128]
    distiller = distil.Distiller(target, drafter, 3)
    states = distiller._unroll(tokens, distil.read(target, tokens))
    caches = pair_e.model.make_cache()
    hidden = target.hidden(tokens[:, :position], caches)[:, -1:]
    kv = shared_kv(target, caches)
    for k, state in enumerate(states):
        token = tokens[:, position + k : position + k + 1]
        inputs = mx.concatenate([target.embed(token), hidden], -1)
        hidden, h = drafter.step(inputs, kv, position)
        assert mx.allclose(state[:, position - 1], h[:, 0], atol=1e-4)


def slow_loss(distiller, tokens, learnt):
    """The definition, position by position."""
    target, drafter = distiller.target, distiller.drafter
    reading = distil.read(target, tokens)
    law_logits = target.logits(reading.hidden)
    law_probs = mx.softmax(law_logits, -1)
    head = drafter.masked_embedding
    total = mx.array(0.0)
    for k, state in enumerate(distiller._unroll(tokens, reading), 1):
        ours = nn.log_softmax(drafter.model.embed_tokens.as_linear(state), -1)
        scores = nn.log_softmax(head.centroids(state), -1)
        losses = []
        for b in range(tokens.shape[0]):
            for j in range(k, tokens.shape[1]):
                if learnt[b, j].item():
                    law = law_probs[b, j]
                    mass = law[head.token_ordering].reshape(head.num_centroids, -1)
                    loss = -(law * ours[b, j - k]).sum()
                    clusters = -(mass.sum(-1) * scores[b, j - k]).sum()
                    losses.append(loss + distil.CLUSTER_WEIGHT * clusters)
        total = total + distil.STEP_DECAY ** (k - 1) * mx.stack(losses).mean()
    return total


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("chunk", [2**25, 2 * 3 * 24 * 200])
def test_loss_and_gradient_are_the_definition(
    target, drafter, prompts, monkeypatch, chunk, checkpoint
):
    monkeypatch.setattr(distil, "CHUNK_NUMBERS", chunk)
    tokens = prompts[:2, :24]
    learnt = mx.array(np.arange(24)[None] < np.array([[23], [11]]))
    distiller = distil.Distiller(target, drafter, 2, checkpoint)
    assert bool(distiller._chunks(3 * 2 * 24)) == (chunk < 2**25)
    fast, grads = nn.value_and_grad(drafter, distiller.loss)(tokens, learnt)
    slow, expected = nn.value_and_grad(
        drafter, lambda *batch: slow_loss(distiller, *batch)
    )(tokens, learnt)
    assert mx.allclose(fast, slow, rtol=1e-4)
    for (name, g), (_, e) in zip(
        tree_flatten(grads), tree_flatten(expected), strict=True
    ):
        assert mx.allclose(g, e, rtol=1e-3, atol=1e-4), name


def test_every_weight_learns_and_nothing_else(target, drafter, prompts):
    distiller = distil.Distiller(target, drafter, 2)
    learnt = mx.ones((1, 32), mx.bool_)
    _, grads = nn.value_and_grad(drafter, distiller.loss)(prompts[:1, :32], learnt)
    grads = dict(tree_flatten(grads))
    fixed = ("token_ordering", "layer_scalar")
    names = {k for k, _ in tree_flatten(drafter.parameters()) if not k.endswith(fixed)}
    assert grads.keys() == names
    assert all(mx.abs(g).max().item() > 0 for g in grads.values())


def test_more_drafts_than_the_text_has_tokens(target, drafter, prompts):
    tokens, learnt = prompts[:1, :4], mx.ones((1, 4), mx.bool_)
    distiller = distil.Distiller(target, drafter, 6)
    assert all(
        counts.tolist() == 6 * [0] for counts in distiller.agreement(tokens, learnt)
    )
    assert mx.isfinite(distiller.loss(tokens, learnt))
    assert distil.Distiller(target, drafter, 3).agreement(tokens, learnt)[1][0] == 1


def test_agreement_counts_prefixes(target, drafter, prompts):
    tokens = prompts[:3, :128]
    learnt = mx.ones(tokens.shape, mx.bool_)
    agreed, possible = distil.Distiller(target, drafter, 3).agreement(tokens, learnt)
    agreed, possible = agreed.tolist(), possible.tolist()
    assert agreed == sorted(agreed, reverse=True)
    # These drafters agree on more than half of their corpus at the first position.
    assert possible[0] // 2 < agreed[0] < possible[0]


# The head of a part of the vocabulary


@pytest.mark.parametrize("quantised", [False, True])
def test_logits_of_some_tokens(quantised):
    from mlx_lm import load

    model, _ = load(str(PAIR / "target"))
    if quantised:
        nn.quantize(
            model,
            group_size=32,
            bits=4,
            class_predicate=lambda path, _: path.endswith("embed_tokens"),
        )
    target = Target(model)
    hidden = target.hidden(mx.array([[2, 40, 41]]), None)
    ids = mx.array([7, 2000, 3])
    assert mx.allclose(
        target.logits(hidden, ids), target.logits(hidden)[..., ids], atol=1e-4
    )


# New drafters


def test_clusters_are_a_balanced_permutation():
    rows = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
    rows[:48] += 20
    order = order_by_cluster(rows, 6)
    assert sorted(order) == list(range(96))
    assert {*order[:48]} in ({*range(48)}, {*range(48, 96)})
    with pytest.raises(ValueError, match="7 clusters"):
        order_by_cluster(rows, 7)


def test_a_fresh_drafter_fits_and_its_seed_decides(target):
    config = fresh_config(target, 32)
    one, same, other = (fresh_drafter(target, config, seed) for seed in (1, 1, 2))
    flat = [dict(tree_flatten(d.parameters())) for d in (one, same, other)]
    assert all(mx.array_equal(flat[0][k], flat[1][k]) for k in flat[0])
    name = "model.layers.0.mlp.up_proj.weight"
    assert not mx.array_equal(flat[0][name], flat[2][name])


# Data


def test_an_epoch_sees_every_row_once():
    rows = [Row([i]) for i in range(10)]
    seen = [r.tokens[0] for step in range(5) for r in batch_of(rows, 2, 0, step)]
    assert sorted(seen) == list(range(10))
    assert seen != [r.tokens[0] for s in range(5, 10) for r in batch_of(rows, 2, 0, s)]


def test_what_is_learnt_starts_at_the_answer():
    tokens, learnt = collate([Row([5, 6, 7, 8], 2), Row([5, 6])])
    assert tokens.shape == (2, 32)
    # Row 1 holds the law of token 2, the first of the answer.
    assert learnt[0].tolist()[:5] == [False, True, True, False, False]
    assert learnt[1].tolist()[:3] == [True, False, False]


# The command


def test_training_lowers_the_loss_and_writes_a_card(trained, data):
    facts = json.loads((trained / "training.json").read_text())
    assert facts["before"]["rounds"] and facts["after"]["rounds"]
    card = (trained / "README.md").read_text()
    assert "| before |" in card and "target" in card and str(data) not in card
    assert not (trained / "checkpoint.safetensors").exists()
    start = weights(PAIR / "assistant")
    assert any(not mx.array_equal(v, start[k]) for k, v in weights(trained).items())


def test_the_folder_is_what_transformers_loads(trained):
    """Names, shapes and types of the file equal those it started from."""

    def header(folder):
        with (folder / "model.safetensors").open("rb") as f:
            (size,) = struct.unpack("<Q", f.read(8))
            found = json.loads(f.read(size))
        assert found.pop("__metadata__")["format"] == "pt"
        return {k: (v["dtype"], v["shape"]) for k, v in found.items()}

    assert header(trained) == header(PAIR / "assistant")
    configs = [
        json.loads((folder / "config.json").read_text())
        for folder in (trained, PAIR / "assistant")
    ]
    assert configs[0] == configs[1]


def test_a_fresh_config_has_the_keys_of_the_format(target):
    made = fresh_config(target, 64)
    theirs = json.loads((PAIR / "assistant" / "config.json").read_text())
    optional = {
        *("moe_intermediate_size", "num_experts", "top_k_experts", "use_cache"),
        *("use_bidirectional_attention", "dtype"),
    }
    assert theirs["text_config"].keys() - optional <= made["text_config"].keys()
    assert theirs.keys() - {"transformers_version"} <= made.keys()
    assert made["num_centroids"] == theirs["num_centroids"]


def run_until(args, folder, step, how):
    """Start the command and send a signal once it has saved ``step``."""
    from mlx_lm_mtp.training.state import read_about

    process = subprocess.Popen([sys.executable, "-m", "mlx_lm_mtp", *args])
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        about = read_about(folder)
        if about is not None and about["step"] >= step:
            break
        time.sleep(0.02)
    process.send_signal(how)
    return process.wait()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("how", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_interrupted_run_ends_where_a_whole_one_does(
    trained, data, tmp_path, how, status
):
    out = tmp_path / "drafter"
    assert run_until(arguments(data, out), out, 1, how) in (status, 0)
    if not (out / "training.json").exists():
        assert main(arguments(data, out, "--resume")) == 0
    whole = weights(trained)
    for name, found in weights(out).items():
        assert mx.allclose(found, whole[name], rtol=0, atol=1e-6), name


def test_own_text_is_learnt_from(data, tmp_path, capsys):
    out = tmp_path / "drafter"
    more = ("--own-text", "2", "--own-tokens", "8")
    assert main(arguments(data, out, *more, iters=1)) == 0
    assert len(json.loads((out / "own_text.json").read_text())) <= 2


def refused(capsys, args):
    status = main(args)
    lines = capsys.readouterr().err.strip().split("\n")
    assert status == 1
    return lines[-1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--iters", "0"), "--iters is 0"),
        (("--learning-rate", "0"), "--learning-rate"),
        (("--learning-rate", "inf"), "--learning-rate is inf"),
        (("--learning-rate", "1e38"), "came apart"),
        (("--seed", "-1"), "--seed is -1"),
        (("--batch-size", "100"), "fewer than --batch-size 100"),
        (("--max-seq-length", "10"), "more than --max-seq-length 10"),
        (("--max-seq-length", "9999"), "the target reads at most"),
        (("--resume",), "nothing to resume"),
        (("--model", "/nowhere"), "cannot load the target"),
        (("--mtp-assistant", str(PAIR / "target")), "needs a Gemma 4 assistant"),
        (
            ("--mtp-assistant", str(PAIR.parent / "moe" / "assistant")),
            "does not fit this target",
        ),
        (("--save-path", "/proc/drafter"), "cannot write to --save-path"),
        (("--save-path", str(PAIR / "assistant")), "already holds a model"),
    ],
)
def test_mistakes_are_told_in_one_line(data, tmp_path, capsys, more, said):
    assert said in refused(capsys, arguments(data, tmp_path / "out", *more))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ('{"text": 1', "cannot read the data"),
        ('{"nothing": 1}\n', "cannot read the data"),
        ('{"text": "a b c d"}\n{"other": 1}\n', "row 2 of train"),
        ('{"text": "a"}\n', "too little text"),
    ],
)
def test_bad_data_are_told_in_one_line(tmp_path, capsys, text, said):
    (tmp_path / "train.jsonl").write_text(text)
    assert said in refused(capsys, arguments(tmp_path, tmp_path / "out"))


def test_another_setting_cannot_resume(data, tmp_path, capsys):
    out = tmp_path / "out"
    run_until(arguments(data, out, iters=500), out, 0, signal.SIGKILL)
    again = arguments(data, out, "--seed", "7", "--resume", iters=500)
    assert "--seed 0, now it is 7" in refused(capsys, again)
    assert "add --resume" in refused(capsys, arguments(data, out))
