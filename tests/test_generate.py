"""Greedy MTP is plain greedy decoding, and every stop leaves the cache it should."""

import itertools
import threading

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    KVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from tiny import KINDS, VOCAB, Lean, Scripted, make_target, plain, poison

from mlx_lm_mtp import MTPError, MTPStats, mtp_generate_step

TOKENS = 400
TARGETS = {kind: make_target(kind) for kind in KINDS}


def mtp(model, drafter, prompt, **options):
    # Adaptive depth may well find that drafting does not pay on a busy machine.
    options = {"num_draft_tokens": 3} | options
    steps = mtp_generate_step(mx.array(prompt), model, drafter, **options)
    return [token for token, _, _ in steps]


def assert_cold(model, caches, tokens):
    """The caches continue as a cold run over the same tokens does."""
    cold = make_prompt_cache(model)
    model(mx.array([tokens]), cache=cold)
    assert [type(c) for c in caches] == [type(c) for c in cold]
    assert {c.offset for c in caches} == {len(tokens)}
    following = mx.array([[1]])
    for _ in range(3):
        warm_logits, cold_logits = (
            model(following, cache=caches),
            model(following, cache=cold),
        )
        assert mx.allclose(warm_logits, cold_logits, atol=1e-3), len(tokens)
        following = mx.argmax(cold_logits[:, -1:], axis=-1)
    assert mx.allclose(
        model(mx.array([[2, 3, 4]]), cache=caches),
        model(mx.array([[2, 3, 4]]), cache=cold),
        atol=1e-3,
    )


# Trained pairs -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def references(pair, prompts):
    """Plain decoding of prompts around the window."""
    sizes = {1, pair.window - 1, pair.window, pair.window + 1, 3 * pair.window}
    asked = {size: prompts[size % 12][:size].tolist() for size in sorted(sizes)}
    return {
        size: (prompt, plain(pair.model, prompt, TOKENS))
        for size, prompt in asked.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("num", range(1, 9))
def test_greedy_equals_plain_around_the_window(pair, references, num):
    """Each number of drafts at each length of prompt, 400 tokens."""
    for size, (prompt, wanted) in references.items():
        stats = MTPStats()
        found = mtp(
            pair.model,
            pair.drafter,
            prompt,
            num_draft_tokens=num,
            max_tokens=TOKENS,
            stats=stats,
        )
        assert found == wanted, size
        assert stats.tokens_per_forward > 1.3, (size, stats.summary())


def test_greedy_equals_plain_past_the_window(pair, prompts):
    """The short form of the test above, for every day."""
    for num, size in enumerate([1, pair.window - 1, pair.window + 1, 100], start=1):
        prompt = prompts[num][:size].tolist()
        wanted = plain(pair.model, prompt, 60)
        options = {"num_draft_tokens": num, "max_tokens": 60}
        assert mtp(pair.model, pair.drafter, prompt, **options) == wanted, size


@pytest.mark.parametrize("num", [3, 4])
@pytest.mark.parametrize("i", [0, 1, 2])
def test_rounds_accept_what_the_reference_accepts(pair, i, num):
    wanted = pair.goldens[f"p{i}_rounds_k{num}"]
    stats = MTPStats()
    found = mtp(
        pair.model,
        pair.drafter,
        pair.goldens[f"p{i}_prompt"].tolist(),
        num_draft_tokens=num,
        max_tokens=64,
        stats=stats,
    )
    assert found == pair.goldens[f"p{i}_greedy"].tolist()
    # transformers shows the drafter stale entries after a rejection and one more of
    # the window, so a round may differ.
    assert abs(stats.tokens_per_forward - (1 + wanted.mean())) < 0.25


def test_logprobs_are_those_of_plain_decoding(pair, prompts):
    prompt = prompts[3][:50]
    wanted = list(generate_step(prompt, pair.model, max_tokens=40))
    found = list(mtp_generate_step(prompt, pair.model, pair.drafter, max_tokens=40))
    for (token, logprobs), (ours, our_logprobs, _) in zip(wanted, found, strict=True):
        assert token == ours and logprobs.shape == our_logprobs.shape
        assert mx.allclose(logprobs, our_logprobs, atol=1e-4)


def test_from_draft_marks_the_accepted(pair, prompts):
    stats = MTPStats()
    steps = list(
        mtp_generate_step(
            prompts[0][:70], pair.model, pair.drafter, max_tokens=60, stats=stats
        )
    )
    assert sum(from_draft for _, _, from_draft in steps) == sum(stats.accepted)
    assert not steps[0][2]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_targets(pair_e, prompts, dtype):
    from mlx_lm import load

    model, _ = load(pair_e.target_path)
    model.set_dtype(dtype)
    prompt = prompts[1][:80].tolist()
    wanted = plain(model, prompt, 60)
    stats = MTPStats()
    found = mtp(model, pair_e.drafter, prompt, max_tokens=60, stats=stats)
    assert found == wanted and stats.tokens_per_forward > 1.3


def test_quantised_targets(pair, prompts, tmp_path):
    from mlx_lm import convert, load

    from mlx_lm_mtp import load_assistant

    convert(
        pair.target_path,
        str(tmp_path / "q"),
        quantize=True,
        q_bits=8,
        q_group_size=32,
    )
    model, _ = load(str(tmp_path / "q"))
    drafter = load_assistant(pair.assistant_path, model)
    prompt = prompts[1][:80].tolist()
    stats = MTPStats()
    found = mtp(model, drafter, prompt, max_tokens=60, stats=stats)
    assert found == plain(model, prompt, 60)
    assert stats.tokens_per_forward > 1.3


# Every acceptance, every stop -------------------------------------------------------


# A drafter that is called as documented, and one that flies ahead of the host.
DOORS = [Scripted, Lean]


def scripted(kind, prompt, accepts, tokens, door=Scripted):
    """The plain answer, and a drafter that accepts by the script."""
    wanted = plain(TARGETS[kind], prompt, tokens)
    return wanted, door(prompt + wanted, accepts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("door", DOORS)
def test_every_pair_of_accepted_counts(kind, num, door):
    """Each count follows each other one, across and past the window."""
    pairs = itertools.product(range(num + 1), repeat=2)
    accepts = [count for pair in pairs for count in pair]
    tokens = 1 + sum(a + 1 for a in accepts)
    wanted, drafter = scripted(kind, [7, 3, 9], accepts, tokens, door)
    stats = MTPStats()
    found = mtp(
        TARGETS[kind],
        drafter,
        [7, 3, 9],
        num_draft_tokens=num,
        max_tokens=tokens,
        stats=stats,
    )
    assert found == wanted
    assert sum(stats.accepted) >= sum(accepts) - num


@given(
    kind=st.sampled_from(sorted(KINDS)),
    num=st.integers(0, 5),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    accepts=st.lists(st.integers(0, 5), max_size=12),
    stop=st.integers(0, 30),
    door=st.sampled_from(DOORS),
    max_tokens=st.integers(1, 31),
)
def test_any_stop_leaves_what_was_yielded(
    kind, num, prompt, accepts, stop, door, max_tokens
):
    model, stop = TARGETS[kind], min(stop, max_tokens)
    wanted, drafter = scripted(kind, prompt, accepts, 31, door)
    caches = make_prompt_cache(model)
    steps = mtp_generate_step(
        mx.array(prompt),
        model,
        drafter,
        num_draft_tokens=num,
        max_tokens=max_tokens,
        prompt_cache=caches,
    )
    found = []
    for token, _, _ in itertools.islice(steps, stop):
        poison(caches)
        found.append(token)
    steps.close()
    assert found == wanted[:stop]
    if stop:
        poison(caches)
        assert_cold(model, caches, prompt + found)


@given(first=st.integers(1, 12), second=st.integers(1, 12), num=st.integers(0, 4))
@pytest.mark.parametrize("door", DOORS)
def test_a_conversation_continues_in_either_way(door, first, second, num):
    """MTP then plain, and plain then MTP, on one cache."""
    model, prompt, more = TARGETS["e"], [5, 8, 13], [21, 2]
    caches, reference = make_prompt_cache(model), make_prompt_cache(model)
    one = plain(model, prompt, first, prompt_cache=reference)
    two = plain(model, more, second, prompt_cache=reference)
    three = plain(model, more, second, prompt_cache=reference)
    history = prompt + one + more + two + more + three
    drafter = door(history, [1, 0, 2])
    options = {"num_draft_tokens": num, "prompt_cache": caches}
    assert mtp(model, drafter, prompt, max_tokens=first, **options) == one
    assert plain(model, more, second, prompt_cache=caches) == two
    assert mtp(model, drafter, more, max_tokens=second, **options) == three


@pytest.mark.parametrize("roomy", [0, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_may_have_different_room(kind, roomy):
    """Where the first or the last has more slots than the others."""
    model, prompt = TARGETS[kind], [n % VOCAB for n in range(3, 243)]
    caches = make_prompt_cache(model)
    model(mx.array([prompt[:-1]]), cache=caches)
    cache = [c for c in caches if isinstance(c, KVCache)][roomy]
    more = mx.zeros((*cache.keys.shape[:2], 600, cache.keys.shape[3]))
    cache.keys = mx.concatenate([cache.keys, more], axis=2)
    cache.values = mx.concatenate([cache.values, more], axis=2)
    wanted, drafter = scripted(kind, prompt, [0, 1, 2, 3] * 6, 60, Lean)
    options = {"num_draft_tokens": 3, "max_tokens": 60, "prompt_cache": caches}
    assert mtp(model, drafter, prompt[-1:], **options) == wanted
    assert_cold(model, caches, prompt + wanted)


def test_caches_travel_through_files(pair, prompts, tmp_path):
    """cache_prompt then MTP, MTP then plain, as mlx-lm saves and loads them."""
    file = str(tmp_path / "cache.safetensors")
    prompt, more = prompts[2][:90].tolist(), prompts[2][90:100].tolist()
    reference = make_prompt_cache(pair.model)
    list(
        generate_step(
            mx.array(prompt), pair.model, max_tokens=0, prompt_cache=reference
        )
    )
    save_prompt_cache(file, reference)
    wanted = plain(pair.model, more, 30, prompt_cache=reference)
    then = plain(pair.model, [9], 30, prompt_cache=reference)
    caches = load_prompt_cache(file)
    assert (
        mtp(pair.model, pair.drafter, more, max_tokens=30, prompt_cache=caches)
        == wanted
    )
    save_prompt_cache(file, caches)
    assert plain(pair.model, [9], 30, prompt_cache=load_prompt_cache(file)) == then


@pytest.mark.parametrize("door", DOORS)
def test_an_error_inside_the_target_leaves_the_cache_exact(monkeypatch, door):
    """Interrupted between two layers of a verify, past the window."""
    model, prompt = TARGETS["dense"], list(range(20))
    wanted, drafter = scripted("dense", prompt, [1, 2, 0, 1], 20, door)
    layer = type(model.layers[0])
    plain_call, calls = layer.__call__, itertools.count()

    def interrupted(self, *args, **kwargs):
        if self is model.layers[3] and next(calls) == 4:
            raise KeyboardInterrupt
        return plain_call(self, *args, **kwargs)

    monkeypatch.setattr(layer, "__call__", interrupted)
    caches, found = make_prompt_cache(model), []
    with pytest.raises(KeyboardInterrupt):
        for token, _, _ in mtp_generate_step(
            mx.array(prompt), model, drafter, max_tokens=20, prompt_cache=caches
        ):
            found.append(token)
    assert found and found == wanted[: len(found)]
    assert_cold(model, caches, prompt + found)


# The protocol of generate_step -------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("num", [0, 1, 4])
@pytest.mark.parametrize("door", DOORS)
def test_max_tokens_is_exact(max_tokens, num, door):
    wanted, drafter = scripted("e", [4], [], 8, door)
    found = mtp(TARGETS["e"], drafter, [4], num_draft_tokens=num, max_tokens=max_tokens)
    assert found == wanted[:max_tokens]


def test_minus_one_has_no_end():
    wanted, drafter = scripted("e", [4], [0, 1], 300)
    steps = mtp_generate_step(mx.array([4]), TARGETS["e"], drafter, max_tokens=-1)
    assert [token for token, _, _ in itertools.islice(steps, 300)] == wanted


@pytest.mark.parametrize("step_size", [1, 3, 8, 2048])
def test_progress_is_mlx_lms(step_size):
    model, prompt = TARGETS["e"], list(range(19))
    seen, wanted = [], []
    options = {"max_tokens": 3, "prefill_step_size": step_size}
    reference = plain(
        model,
        prompt,
        3,
        prefill_step_size=step_size,
        prompt_progress_callback=lambda *a: wanted.append(a),
    )
    drafter = Scripted(prompt + reference, [])
    assert (
        mtp(
            model,
            drafter,
            prompt,
            prompt_progress_callback=lambda *a: seen.append(a),
            **options,
        )
        == reference
    )
    assert seen == wanted


@pytest.mark.parametrize("with_tokens", [True, False])
def test_input_embeddings_are_prefilled_then_drafted(with_tokens):
    model = TARGETS["dense"]
    prompt = mx.array([3, 1, 4, 1, 5, 9, 2, 6])
    embeddings = model.model.embed_tokens(prompt) + 0.1
    tokens = prompt if with_tokens else mx.array([], mx.int32)
    options = {"input_embeddings": embeddings, "max_tokens": 20}
    wanted = [t for t, _ in generate_step(tokens, model, **options)]
    drafter = Scripted(prompt.tolist() + wanted, [2, 1, 0])
    stats = MTPStats()
    found = mtp_generate_step(
        tokens, model, drafter, num_draft_tokens=3, stats=stats, **options
    )
    assert [t for t, _, _ in found] == wanted and sum(stats.accepted) > 0


def test_it_runs_in_another_thread(pair, prompts):
    prompt, found = prompts[0][:40].tolist(), []
    wanted = plain(pair.model, prompt, 20)

    def work():
        found.extend(mtp(pair.model, pair.drafter, prompt, max_tokens=20))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == wanted


def test_two_generations_share_a_drafter(pair, prompts):
    asked = [prompts[i][:60].tolist() for i in (0, 1)]
    wanted = [plain(pair.model, prompt, 30) for prompt in asked]
    runs = [
        mtp_generate_step(mx.array(p), pair.model, pair.drafter, max_tokens=30)
        for p in asked
    ]
    found = zip(*runs, strict=True)
    assert [[a[0], b[0]] for a, b in found] == [
        list(x) for x in zip(*wanted, strict=True)
    ]


def test_a_drafter_of_ones_own_is_called_as_documented(pair, prompts):
    """A subclass that changes the call, and a wrapper around a drafter."""
    calls = []

    class Counting(type(pair.drafter)):
        def __call__(self, inputs_embeds, shared_kv, position):
            calls.append(position)
            return pair.drafter(inputs_embeds, shared_kv, position)

    class Around:
        def __getattr__(self, name):
            return getattr(pair.drafter, name)

        def __call__(self, inputs_embeds, shared_kv, position):
            calls.append(position)
            return pair.drafter(inputs_embeds, shared_kv, position)

    prompt = prompts[8][:40].tolist()
    wanted = plain(pair.model, prompt, 24)
    for drafter in (Counting(pair.drafter.args), Around()):
        calls.clear()
        stats = MTPStats()
        found = mtp(pair.model, drafter, prompt, max_tokens=24, stats=stats)
        assert found == wanted
        assert len(calls) == sum(stats.drafted) > 0 and stats.accepted[0] > 0


def test_zero_drafts_never_call_the_drafter():
    wanted, drafter = scripted("e", [4], [], 12)
    stats = MTPStats()
    options = {"num_draft_tokens": 0, "max_tokens": 12, "stats": stats}
    assert mtp(TARGETS["e"], drafter, [4], **options) == wanted
    assert drafter.rounds == 0 and stats.drafted == [] and stats.rounds == 11


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"num_draft_tokens": 1.5}, "num_draft_tokens is 1.5"),
        ({"kv_bits": 4}, "kv_bits is 4"),
        ({"verification": "typical"}, "verification is 'typical'"),
        ({"prompt_cache": [KVCache()]}, "the prompt cache has 1 layers"),
    ],
)
def test_bad_options_are_refused_at_the_call(options, message):
    with pytest.raises(MTPError, match=message):
        mtp_generate_step(mx.array([1]), TARGETS["e"], Scripted([], []), **options)


def test_an_empty_prompt_is_refused():
    with pytest.raises(MTPError, match="the prompt is empty"):
        mtp_generate_step(mx.array([]), TARGETS["e"], Scripted([], []))


def test_prompt_and_embeddings_must_agree():
    with pytest.raises(
        MTPError, match="input_embeddings has 3 positions, the prompt 2"
    ):
        mtp_generate_step(
            mx.array([1, 2]),
            TARGETS["e"],
            Scripted([], []),
            input_embeddings=mx.zeros((3, 16)),
        )
