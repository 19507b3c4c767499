"""Whole generations above temperature zero, beside mlx-lm's plain decoding."""

import itertools
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler
from test_generate import assert_cold, mtp
from tiny import VOCAB, Scripted, make_target, plain

from mlx_lm_mtp import MTPStats, mtp_generate_step

SAMPLERS = {
    "temperature": {"temp": 1.0},
    "top-k, top-p": {"temp": 1.0, "top_k": 20, "top_p": 0.9},
    "min-p": {"temp": 0.7, "min_p": 0.05, "min_tokens_to_keep": 3},
    "xtc": {
        "temp": 1.0,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.1,
        "xtc_special_tokens": [1, 5],
    },
    "all": {
        "temp": 1.3,
        "top_p": 0.95,
        "min_p": 0.01,
        "top_k": 30,
        "xtc_probability": 0.3,
    },
}
PROCESSORS = {
    "none": {},
    "repetition": {"repetition_penalty": 1.3},
    "presence, frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {3: 2.0, 7: -4.0}},
}


class Grammar:
    """A user's state machine: after an even token odd ones may follow, and back.

    It believes what it is told: its state is the number of calls and the last token.
    """

    def __init__(self):
        self.seen = []

    def __call__(self, tokens, logits):
        last = tokens[-1].item()
        self.seen.append(last)
        parity = mx.arange(logits.shape[-1]) % 2
        return mx.where(parity == (last + len(self.seen)) % 2, logits, -mx.inf)


class InPlace:
    """Modifies the logits it is given, and looks at the last tokens only."""

    def __call__(self, tokens, logits):
        logits[:, tokens[-3:]] = -mx.inf
        return logits


def opaque(logprobs):
    """A sampler of unknown origin."""
    return mx.random.categorical(logprobs * 1.1)


# Coupled: the text of plain decoding ------------------------------------------------


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_coupled_is_plain_decoding_with_the_same_seed(
    pair_e, prompts, sampler, processors
):
    prompt = prompts[4][:70].tolist()

    def options():
        mx.random.seed(3)
        return {
            "sampler": make_sampler(**SAMPLERS[sampler]),
            "logits_processors": make_logits_processors(**PROCESSORS[processors]),
        }

    wanted = plain(pair_e.model, prompt, 40, **options())
    for num in (0, 1, 3, 8, None):
        found = mtp(
            pair_e.model,
            pair_e.drafter,
            prompt,
            num_draft_tokens=num,
            max_tokens=40,
            verification="coupled",
            **options(),
        )
        assert found == wanted, num


@given(
    accepts=st.lists(st.integers(0, 4), max_size=10),
    num=st.integers(0, 4),
    seed=st.integers(0, 2**32),
    stop=st.integers(1, 20),
)
def test_coupled_text_does_not_depend_on_the_drafter(accepts, num, seed, stop):
    model, prompt = TARGET, [3, 1, 4]
    sampler = make_sampler(1.0, top_k=9)
    mx.random.seed(seed)
    wanted = plain(model, prompt, 20, sampler=sampler)
    drafter, caches = Scripted(prompt + wanted, accepts), make_prompt_cache(model)
    mx.random.seed(seed)
    steps = mtp_generate_step(
        mx.array(prompt),
        model,
        drafter,
        num_draft_tokens=num,
        max_tokens=20,
        sampler=sampler,
        verification="coupled",
        prompt_cache=caches,
    )
    found = [token for token, _, _ in itertools.islice(steps, stop)]
    steps.close()
    assert found == wanted[:stop]
    assert_cold(model, caches, prompt + found)


TARGET = make_target("e", seed=4)


# Processors and samplers that can only be called -------------------------------------


@pytest.mark.parametrize("sampler", [None, greedy_sampler, opaque, make_sampler(0.8)])
@pytest.mark.parametrize("make", [Grammar, InPlace])
@pytest.mark.parametrize("verification", ["block", "coupled"])
def test_processors_with_state_see_what_plain_decoding_shows(
    pair_e, prompts, make, sampler, verification
):
    model, prompt = pair_e.model, prompts[5][:40].tolist()
    ours, theirs = make(), make()
    mx.random.seed(9)
    wanted = plain(model, prompt, 50, sampler=sampler, logits_processors=[theirs])
    mx.random.seed(9)
    stats = MTPStats()
    found = mtp(
        model,
        pair_e.drafter,
        prompt,
        max_tokens=50,
        sampler=sampler,
        logits_processors=[ours],
        verification=verification,
        stats=stats,
    )
    assert found == wanted
    assert sum(stats.drafted) > 0
    if make is Grammar:
        # Plain decoding calls once more, for a token that nobody gets.
        assert ours.seen == theirs.seen[: len(ours.seen)]
        assert len(ours.seen) == 50


def test_an_opaque_sampler_draws_as_in_plain_decoding(pair_e, prompts):
    model, prompt = pair_e.model, prompts[6][:70].tolist()
    mx.random.seed(2)
    wanted = plain(model, prompt, 40, sampler=opaque)
    mx.random.seed(2)
    stats = MTPStats()
    options = {"sampler": opaque, "max_tokens": 40, "stats": stats}
    assert mtp(model, pair_e.drafter, prompt, **options) == wanted
    assert sum(stats.accepted) > 0


class TellsItsLaw:
    """A sampler object of a user's, which offers the law it draws from."""

    def law(self, logprobs):
        return logprobs * 1.5

    def __call__(self, logprobs):
        return mx.random.categorical(self.law(logprobs))


def test_a_sampler_that_tells_its_law(pair_e, prompts):
    stats = MTPStats()
    options = {"sampler": TellsItsLaw(), "max_tokens": 120, "stats": stats}
    mx.random.seed(0)
    assert len(mtp(pair_e.model, pair_e.drafter, prompts[7][:60], **options)) == 120
    assert stats.tokens_per_forward > 2


def test_a_seed_set_before_the_first_token_counts(pair_e, prompts):
    """As with mlx-lm's generators, which draw nothing before they are asked.

    What block verification draws depends on the numbers of drafts, so they are pinned.
    """

    def text(verification, num):
        steps = mtp_generate_step(
            prompts[7][:60],
            pair_e.model,
            pair_e.drafter,
            num_draft_tokens=num,
            sampler=make_sampler(1.0),
            max_tokens=40,
            verification=verification,
        )
        mx.random.seed(3)
        return [token for token, _, _ in steps]

    for options in [("block", 0), ("block", 3), ("coupled", None)]:
        assert text(*options) == text(*options)


@pytest.mark.parametrize("penalty", [1.1, 1.5])
def test_greedy_with_a_penalty_equals_plain(pair, prompts, penalty):
    for i in range(3):
        prompt = prompts[i][:90].tolist()
        wanted = plain(
            pair.model,
            prompt,
            120,
            logits_processors=make_logits_processors(repetition_penalty=penalty),
        )
        stats = MTPStats()
        found = mtp(
            pair.model,
            pair.drafter,
            prompt,
            max_tokens=120,
            logits_processors=make_logits_processors(repetition_penalty=penalty),
            stats=stats,
        )
        assert found == wanted and stats.tokens_per_forward > 1.2


@pytest.mark.parametrize("verification", ["block", "coupled"])
@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("fails_at", [1, 2, 5, 9])
def test_an_error_in_a_processor_leaves_the_cache_exact(fails_at, pure, verification):
    model, prompt = TARGET, list(range(12))
    calls = itertools.count(1)

    def failing(tokens, logits):
        if next(calls) == fails_at:
            raise ArithmeticError("no")
        return logits

    wanted = plain(model, prompt, 20)
    caches, found = make_prompt_cache(model), []
    processors = [failing]
    if pure:
        processors = [*make_logits_processors(logit_bias={0: 0.0}), failing]
    with pytest.raises(ArithmeticError):
        for token, _, _ in mtp_generate_step(
            mx.array(prompt),
            model,
            Scripted(prompt + wanted, [1, 3, 0]),
            num_draft_tokens=3,
            max_tokens=20,
            logits_processors=processors,
            prompt_cache=caches,
            verification=verification,
        ):
            found.append(token)
    assert found == wanted[: fails_at - 1]
    assert_cold(model, caches, prompt + found)


def test_an_error_in_a_sampler_leaves_the_cache_exact():
    model, prompt = TARGET, [5, 6]
    wanted, calls = plain(model, prompt, 20), itertools.count(1)

    def failing(logprobs):
        if next(calls) == 6:
            raise ArithmeticError("no")
        return mx.argmax(logprobs, axis=-1)

    caches, found = make_prompt_cache(model), []
    options = {"sampler": failing, "prompt_cache": caches}
    with pytest.raises(ArithmeticError):
        for token, _, _ in mtp_generate_step(
            mx.array(prompt), model, Scripted(prompt + wanted, [2, 0]), **options
        ):
            found.append(token)
    assert found == wanted[:5]
    assert_cold(model, caches, prompt + found)


# Block and token: the same law ------------------------------------------------------


# Two layers: twenty thousand generations in a few minutes.
SMALL = make_target(window=4, seed=6, pattern=["sliding_attention", "full_attention"])
SMALL.model.norm.weight *= 0.15  # less sure of itself
FOLDED = 6  # tokens that a logit bias leaves possible


class Noisy:
    """A drafter whose law is near the target's own: the target, blurred."""

    def __init__(self, model, blur):
        self.model, self.blur = model, blur

    def __call__(self, inputs_embeds, shared_kv, position):
        half = inputs_embeds.shape[-1] // 2
        hidden = inputs_embeds[..., half:]
        logits = self.model.model.embed_tokens.as_linear(hidden)
        return hidden + self.blur * inputs_embeds[..., :half], logits


LAW_CASES = [
    pytest.param("temperature", "token", 1_500),
    pytest.param("top-k, top-p", "block", 1_500),
    pytest.param("xtc", "block", 1_500),
    pytest.param("all", "block", 20_000, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "verification", "runs"), LAW_CASES)
def test_the_law_of_short_texts(name, verification, runs):
    """Chi-square of many texts of three tokens against the exact law."""
    options = SAMPLERS[name]
    if "top_k" in options:
        options = options | {"top_k": 4}
    processors = make_logits_processors(
        logit_bias=dict.fromkeys(range(FOLDED, VOCAB), -1000000000.0)
    )
    prompt, sampler = mx.array([2, 3]), make_sampler(**options)
    law = exact_law(SMALL, prompt.tolist(), options, processors)
    assert abs(sum(law.values()) - 1) < 1e-4
    mx.random.seed(17)
    counts = Counter(
        tuple(
            mtp(
                SMALL,
                Noisy(SMALL, 0.02),
                prompt,
                num_draft_tokens=2,
                max_tokens=3,
                sampler=sampler,
                logits_processors=processors,
                verification=verification,
            )
        )
        for _ in range(runs)
    )
    assert all(law.get(text, 0) > 0 for text in counts), "an impossible text"
    assert chi_square_is_plausible(counts, law, runs)


def test_the_chi_square_sees_a_wrong_law():
    law = {(i,): 1 / 30 for i in range(30)}
    right = Counter({(i,): 500 + i for i in range(30)})
    wrong = Counter({(i,): 400 + 10 * i for i in range(30)})
    assert chi_square_is_plausible(right, law, sum(right.values()))
    assert not chi_square_is_plausible(wrong, law, sum(wrong.values()))


def exact_law(model, prompt, options, processors):
    """The law of three tokens, by enumeration with mlx-lm's own functions."""
    law = {}
    for text in itertools.product(range(FOLDED), repeat=3):
        chance = 1.0
        for i in range(3):
            history = mx.array(prompt + list(text[:i]))
            logits = model(history[None])[:, -1]
            for processor in processors:
                logits = processor(history, logits)
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            chance *= position_law(logprobs, options)[text[i]]
        law[text] = chance
    return law


def position_law(logprobs, options):
    from mlx_lm_mtp.law import law_of

    chain = law_of(make_sampler(**options))
    xtc = options.get("xtc_probability", 0.0)
    branches = [(1 - xtc, 1.0), (xtc, 0.0)]
    return sum(
        weight * np.exp(np.array(chain(logprobs, mx.array([[coin]])))[0])
        for weight, coin in branches
    )


def chi_square_is_plausible(counts, law, runs):
    expected = {text: runs * p for text, p in law.items()}
    common = [t for t, e in expected.items() if e >= 5]
    rest = runs - sum(expected[t] for t in common)
    found_rest = runs - sum(counts[t] for t in common)
    assert len(common) > 20, "the law is too narrow to test"
    terms = [(counts[t] - expected[t]) ** 2 / expected[t] for t in common]
    if rest >= 5:
        terms.append((found_rest - rest) ** 2 / rest)
    degrees = len(terms) - 1
    # Five standard deviations of a chi-square with so many degrees of freedom.
    return sum(terms) < degrees + 5 * (2 * degrees) ** 0.5
