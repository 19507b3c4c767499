"""MTP costs the drafter's weights, and nearly nothing else, in memory."""

import gc
import json
import subprocess
import sys

import mlx.core as mx
import pytest
from tiny import Lean, make_target

from mlx_lm_mtp import MTPStats, mtp_generate_step

MEASURE = """
import json, sys
import mlx.core as mx
from mlx.utils import tree_reduce
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma4_text
from mlx_lm_mtp import mtp_generate_step
from mlx_lm_mtp.pair import model_file

layers = ["sliding_attention", "full_attention"]
text = dict(
    hidden_size=320, num_hidden_layers=2, intermediate_size=640,
    num_attention_heads=4, num_key_value_heads=1, head_dim=64, global_head_dim=128,
    vocab_size=262144, sliding_window=512, num_kv_shared_layers=0,
    hidden_size_per_layer_input=0, layer_types=layers,
)
model = gemma4_text.Model(gemma4_text.ModelArgs(**text))
file = model_file()
drafter = file.Model(file.ModelArgs(
    text_config=dict(text, hidden_size=32, intermediate_size=64,
                     num_hidden_layers=2, layer_types=layers),
    backbone_hidden_size=320))
mx.eval(model.parameters(), drafter.parameters())

def size(module):
    return tree_reduce(lambda n, x: n + x.nbytes, module.parameters(), 0)

def peak(steps):
    mx.clear_cache()
    mx.reset_peak_memory()
    for _ in steps:
        pass
    return mx.get_peak_memory()

prompt = mx.arange(4000)
options = dict(max_tokens=20)
# The drafter's weights lie in memory in both runs.
print(json.dumps({
    "target": size(model),
    "plain": peak(generate_step(prompt, model, **options)),
    "mtp": peak(mtp_generate_step(
        prompt, model, drafter, num_draft_tokens=4, **options)),
}))
"""


@pytest.mark.slow
def test_peak_memory():
    run = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    assert found["target"] > 300e6
    assert found["mtp"] <= 1.02 * found["plain"], found


@pytest.mark.slow
@pytest.mark.parametrize("num", [0, 2])
def test_ten_thousand_rounds_hold_nothing(num):
    """With sliding layers alone, all that could grow is what a round leaves behind."""
    model = make_target(pattern=4 * ["sliding_attention"])
    drafter = Lean(20_000 * [1], [])
    stats = MTPStats()
    steps = mtp_generate_step(
        mx.array([1, 2, 3]),
        model,
        drafter,
        num_draft_tokens=num,
        max_tokens=-1,
        stats=stats,
    )
    held = []
    for _ in steps:
        if stats.rounds in (1_000, 10_000) and len(held) < 1 + (stats.rounds > 1_000):
            gc.collect()
            held.append((mx.get_active_memory(), len(gc.get_objects())))
        if stats.rounds > 10_000:
            break
    (early, early_objects), (late, late_objects) = held
    assert late <= early + 100_000
    assert late_objects <= early_objects + 1_000
