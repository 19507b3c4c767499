"""A pair that cannot work is refused in one line that says what to do."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import gemma4_text, llama

from mlx_lm_mtp import MTPError, load_assistant, mtp_generate_step


@pytest.fixture
def folder(pair_e, tmp_path):
    """A copy of an assistant without its tokenizer files."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(pair_e.assistant_path, name), tmp_path)
    return tmp_path


def edit(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text = config["text_config"]
    for key, value in changes.items():
        (text if key in text and key not in config else config)[key] = value
    file.write_text(json.dumps(config))


def refusal(path, model):
    with pytest.raises(ValueError) as caught:
        load_assistant(str(path), model)
    message = str(caught.value)
    assert isinstance(caught.value, MTPError) and "\n" not in message
    return message


def test_no_tokenizer_files_are_needed(folder, pair_e):
    assert load_assistant(str(folder), pair_e.model).model_type == "gemma4_assistant"


def test_loading_leaves_the_random_numbers_alone(folder, pair_e):
    mx.random.seed(5)
    wanted = mx.random.uniform().item()
    mx.random.seed(5)
    load_assistant(str(folder), pair_e.model)
    assert mx.random.uniform().item() == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma4"}, ["'gemma4'", "gemma4_assistant"]),
        ({"model_type": "llama"}, ["'llama'", "gemma4_assistant"]),
        ({"backbone_hidden_size": 256}, ["backbone_hidden_size is 256", "needs 128"]),
        ({"vocab_size": 1024}, ["vocab_size is 1024", "needs 2048"]),
        ({"sliding_window": 63}, ["sliding_window is 63", "needs 64"]),
        ({"head_dim": 16}, ["sliding_attention head size is 16", "is 32"]),
        ({"global_head_dim": 32}, ["full_attention head size is 32", "is 64"]),
        ({"num_key_value_heads": 2}, ["2 full_attention K/V heads", "has 1"]),
        ({"layer_types": ["chunked_attention"] * 4}, ["K/V of chunked_attention"]),
        ({"num_centroids": 100}, ["num_centroids 100", "2048 tokens"]),
        ({"intermediate_size": 96}, ["do not match its config.json"]),
        ({"num_hidden_layers": 3}, ["not in model"]),
        ({"use_ordered_embeddings": True, "num_centroids": 32}, ["do not match"]),
    ],
)
def test_misfits_name_found_and_needed(folder, pair_e, changes, words):
    edit(folder, **changes)
    message = refusal(folder, pair_e.model)
    assert all(word in message for word in words), message


def test_extra_and_missing_weights(folder, pair_e):
    weights = mx.load(str(folder / "model.safetensors"))
    extra = weights | {"model.layers.0.self_attn.k_proj.weight": mx.zeros((1, 1))}
    mx.save_safetensors(str(folder / "model.safetensors"), extra)
    assert "k_proj" in refusal(folder, pair_e.model)
    del weights["pre_projection.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert "pre_projection" in refusal(folder, pair_e.model)


def test_a_damaged_ordering(folder, pair_e):
    weights = mx.load(str(folder / "model.safetensors"))
    name = "masked_embedding.token_ordering"
    weights[name] = weights[name].astype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert "not a permutation" in refusal(folder, pair_e.model)


def test_missing_and_damaged_files(folder, pair_e, tmp_path):
    model = pair_e.model
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    assert "lacks model-00001-of-00002.safetensors" in refusal(folder, model)
    (folder / "model.safetensors.index.json").unlink()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "damaged" in refusal(folder, model)
    (folder / "model.safetensors").unlink()
    assert "weights are missing" in refusal(folder, model)
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in refusal(folder, model)
    assert "is a file" in refusal(folder / "config.json", model)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder, model)
    assert "there is no folder" in refusal(folder / "nowhere" / "at" / "all", model)


def test_the_hub_is_asked_and_its_refusal_told(monkeypatch, pair_e):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal("mlx-community/no-such-assistant", pair_e.model)
    assert "'mlx-community/no-such-assistant'" in message and "hub failed" in message


def test_a_repository_is_downloaded(monkeypatch, folder, pair_e):
    """Up to the door: what the hub returns is loaded."""
    asked = []

    def snapshot_download(repo, **options):
        asked.append(repo)
        return str(folder)

    monkeypatch.setattr("mlx_lm.utils.snapshot_download", snapshot_download)
    load_assistant("someone/gemma-4-assistant", pair_e.model)
    assert asked == ["someone/gemma-4-assistant"] * len(asked) and asked


def test_a_target_that_is_not_gemma_4(pair_e):
    other = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=8,
            num_hidden_layers=1,
            intermediate_size=8,
            num_attention_heads=1,
            rms_norm_eps=1e-5,
            vocab_size=8,
        )
    )
    assert "'llama'" in refusal(pair_e.assistant_path, other)
    with pytest.raises(MTPError, match="'llama'"):
        mtp_generate_step(mx.array([1]), other, pair_e.drafter)


def test_a_target_whose_head_is_unknown(monkeypatch, pair_e):
    plain = gemma4_text.Model.__call__
    monkeypatch.setattr(
        gemma4_text.Model, "__call__", lambda *a, **k: plain(*a, **k) + 1
    )
    assert "does not know" in refusal(pair_e.assistant_path, pair_e.model)


def test_a_loaded_drafter_is_checked_again(pair, pair_e):
    if pair.name == "moe":
        with pytest.raises(MTPError, match="does not fit"):
            mtp_generate_step(mx.array([1]), pair.model, pair_e.drafter)


def test_the_text_model_alone_is_a_target(pair_e, prompts):
    text = pair_e.model.language_model
    drafter = load_assistant(pair_e.assistant_path, text)
    options = {"max_tokens": 20}
    alone = mtp_generate_step(prompts[0][:30], text, drafter, **options)
    wrapped = mtp_generate_step(prompts[0][:30], pair_e.model, drafter, **options)
    assert [t for t, _, _ in alone] == [t for t, _, _ in wrapped]
