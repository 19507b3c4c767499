"""The drafter computes what transformers computes, in every form mlx-lm gives it."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import convert, load
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model
from tiny import plain, shared_kv

from mlx_lm_mtp import MTPError, MTPStats, load_assistant, mtp_generate_step
from mlx_lm_mtp.target import Target

TOLERANCE = 1e-4


def golden_kv(goldens, i, newest):
    """The reference's own keys and values of prompt i."""

    def entries(name, count):
        return mx.array(goldens[f"p{i}_{name}"])[None, :, -count:]

    size = goldens[f"p{i}_prompt"].size
    return {
        "full_attention": (entries("k_full", size), entries("v_full", size)),
        "sliding_attention": (
            entries("k_sliding", newest),
            entries("v_sliding", newest),
        ),
    }


def draft(drafter, target, goldens, i, shared_kv, position):
    """Four greedy steps from the reference's seed: tokens, logits, hidden states."""
    token = mx.array([int(goldens[f"p{i}_bonus"])])
    hidden = mx.array(goldens[f"p{i}_hidden"])[None, None]
    steps = []
    for _ in range(4):
        inputs = mx.concatenate([target.embed(token[:, None]), hidden], axis=-1)
        hidden, logits = drafter(inputs, shared_kv, position)
        token = mx.argmax(logits[:, -1], axis=-1)
        steps.append((token.item(), np.array(logits[0, 0]), np.array(hidden[0, 0])))
    tokens, logits, hidden = zip(*steps, strict=True)
    return list(tokens), np.stack(logits), np.stack(hidden)


def assert_close(found, wanted):
    mask = np.isfinite(found)
    assert mask.any()
    np.testing.assert_allclose(found[mask], wanted[mask], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("i", [0, 1, 2])
def test_drafts_equal_the_reference(pair, i):
    goldens = pair.goldens
    kv = golden_kv(goldens, i, newest=pair.window + 1)
    position = int(goldens[f"p{i}_position"])
    tokens, logits, hidden = draft(
        pair.drafter, Target(pair.model), goldens, i, kv, position
    )
    assert tokens == goldens[f"p{i}_draft_tokens"].tolist()
    assert_close(logits, goldens[f"p{i}_draft_logits"])
    assert_close(hidden, goldens[f"p{i}_draft_hidden"])


@pytest.mark.parametrize(("i", "suffix"), [(0, ""), (1, ""), (2, "_w")])
def test_our_keys_and_values_give_the_reference_drafts(pair, i, suffix):
    goldens = pair.goldens
    target, caches = Target(pair.model), make_prompt_cache(pair.model)
    hidden = target.hidden(mx.array(goldens[f"p{i}_prompt"])[None], caches)
    assert_close(np.array(hidden[0, -1]), goldens[f"p{i}_hidden"])
    rows = goldens[f"p{i}_logits"]
    assert_close(np.array(target.logits(hidden)[0, -len(rows) :]), rows)
    tokens, logits, _ = draft(
        pair.drafter,
        target,
        goldens,
        i,
        shared_kv(target, caches),
        int(goldens[f"p{i}_position"]),
    )
    assert tokens == goldens[f"p{i}_draft_tokens{suffix}"].tolist()
    assert_close(logits, goldens[f"p{i}_draft_logits{suffix}"])


def test_the_position_is_an_argument(pair):
    goldens = pair.goldens
    kv = golden_kv(goldens, 2, newest=pair.window)
    position = int(goldens["p2_position"]) - 1
    tokens, logits, _ = draft(
        pair.drafter, Target(pair.model), goldens, 2, kv, position
    )
    assert tokens == goldens["p2_draft_tokens_pm1"].tolist()
    assert_close(logits, goldens["p2_draft_logits_pm1"])


def test_rows_of_a_batch_have_their_own_positions(pair):
    goldens = pair.goldens
    kv = golden_kv(goldens, 1, newest=pair.window + 1)
    both = {k: tuple(mx.repeat(x, 2, axis=0) for x in v) for k, v in kv.items()}
    inputs = mx.random.normal((1, 1, 2 * 128), key=mx.random.key(0))
    positions = mx.array([63, 17])
    together, _ = pair.drafter(mx.repeat(inputs, 2, axis=0), both, positions)
    for row, position in enumerate(positions.tolist()):
        alone, _ = pair.drafter(inputs, kv, position)
        assert mx.allclose(together[row], alone[0], atol=1e-5)


def test_candidates_are_the_possible_tokens(pair_e):
    drafter = pair_e.drafter
    hidden = mx.random.normal((1, 1, 64), key=mx.random.key(1))
    ids, logits = drafter.candidates(hidden)
    dense = drafter.model.embed_tokens.as_linear(hidden)
    assert ids.shape == (1, 1, 8 * 2048 // 64) and len(set(ids[0, 0].tolist())) == 256
    assert mx.allclose(logits, mx.take_along_axis(dense, ids, -1), atol=1e-5)


RECIPES = {
    "4 bits": {"quantize": True, "q_bits": 4, "q_group_size": 32},
    "8 bits": {"quantize": True, "q_bits": 8, "q_group_size": 64},
    "mixed": {
        "quantize": True,
        "q_group_size": 32,
        "quant_predicate": lambda path, _: {
            "bits": 8 if "embed_tokens" in path else 4,
            "group_size": 32,
        },
    },
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_converted_drafters_load_and_draft(pair, tmp_path, recipe):
    folder = str(tmp_path / "out")
    convert(pair.assistant_path, folder, **RECIPES[recipe])
    drafter = load_assistant(folder, pair.model)
    quantised = hasattr(drafter.model.embed_tokens, "scales")
    assert quantised == ("quantize" in RECIPES[recipe])
    goldens, target = pair.goldens, Target(pair.model)
    caches = make_prompt_cache(pair.model)
    target.hidden(mx.array(goldens["p2_prompt"])[None], caches)
    arguments = goldens, 2, shared_kv(target, caches), int(goldens["p2_position"])
    tokens, logits, _ = draft(drafter, target, *arguments)
    if quantised:
        plain = draft(dequantize_model(drafter), target, *arguments)
        assert tokens == plain[0]
        assert_close(logits, plain[1])
    if "4" not in recipe and recipe != "mixed":
        assert tokens == goldens["p2_draft_tokens_w"].tolist()


@pytest.mark.parametrize("bits", [4, 8])
def test_drafters_quantised_on_loading(pair, prompts, bits):
    drafter = load_assistant(pair.assistant_path, pair.model, bits)
    head = drafter.model.embed_tokens
    assert head.bits == bits
    stats = MTPStats()
    prompt, options = prompts[1][:60], {"num_draft_tokens": 3, "max_tokens": 60}
    found = mtp_generate_step(prompt, pair.model, drafter, stats=stats, **options)
    assert [t for t, _, _ in found] == plain(pair.model, prompt.tolist(), 60)
    assert stats.tokens_per_forward > 2


def test_quantisation_that_cannot_be_is_refused(pair_e, tmp_path):
    with pytest.raises(MTPError, match="cannot be quantised to 7 bits"):
        load_assistant(pair_e.assistant_path, pair_e.model, 7)
    folder = str(tmp_path / "out")
    convert(pair_e.assistant_path, folder, quantize=True, q_bits=4)
    with pytest.raises(MTPError, match="quantised already"):
        load_assistant(folder, pair_e.model, 4)


def test_the_ordering_survives_conversion_as_integers(pair_e, tmp_path):
    convert(pair_e.assistant_path, str(tmp_path / "out"), quantize=True, q_bits=4)
    saved = mx.load(str(tmp_path / "out" / "model.safetensors"))
    ordering = saved["masked_embedding.token_ordering"]
    original = pair_e.drafter.masked_embedding.token_ordering
    assert mx.issubdtype(ordering.dtype, mx.integer)
    assert ordering.tolist() == original.tolist()


def test_mlx_lm_loads_drafters_by_both_names(pair_e, tmp_path):
    folder = tmp_path / "unified"
    shutil.copytree(pair_e.assistant_path, folder)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "gemma4_unified_assistant"
    (folder / "config.json").write_text(json.dumps(config))
    model, _ = load(str(folder))
    assert model.model_type == "gemma4_unified_assistant" and model.make_cache() == []
    drafter = load_assistant(str(folder), pair_e.model)
    assert type(drafter) is type(model) is type(pair_e.drafter)


def test_sanitize_is_idempotent(pair):
    weights = mx.load(pair.assistant_path + "/model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    once = pair.drafter.sanitize(weights)
    twice = pair.drafter.sanitize(once)
    assert "lm_head.weight" not in once and once.keys() == twice.keys()
    assert all(once[k].dtype == twice[k].dtype for k in once)


def test_a_drafter_cannot_generate_alone(pair_e):
    with pytest.raises(ValueError, match="reads its target's keys and values"):
        pair_e.drafter(mx.array([[1]]), cache=[])
