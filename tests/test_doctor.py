"""doctor tells whether a pair fits, measures what does, and says what to mend."""

import copy
import json
from math import inf

import pytest
from conftest import PAIRS
from mlx.utils import tree_flatten

from mlx_lm_mtp import MTPStats, mtp_generate_step
from mlx_lm_mtp.__main__ import main
from mlx_lm_mtp.doctor import advice, examine, fit
from mlx_lm_mtp.doctor.text import text
from mlx_lm_mtp.subject import Subject
from mlx_lm_mtp.synthetic import make_pair

BRIEF = ("--max-tokens", "12", "--positions", "12", "--time-limit", "5")
SMALL = ("--synthetic", "e2b", "--bits", "16", "--shrink", "64", *BRIEF)


def of(target, assistant):
    return (
        *("--model", str(PAIRS / target / "target")),
        *("--mtp-assistant", str(PAIRS / assistant / "assistant")),
    )


@pytest.fixture(scope="module", params=["e", "moe"])
def examined(request):
    """Status and report of a trained pair."""
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda *a, **_: printed.extend(a))
        status = main(["doctor", *of(request.param, request.param), *BRIEF, "--json"])
    [line] = printed
    return status, json.loads(line)


def test_a_pair_that_fits(examined):
    status, report = examined
    assert status == 0 and report["fit"] and report["reasons"] == []
    assert report["about"]["mlx-lm"] and report["about"]["device"].startswith("cpu")
    assert report["plugin"]["tested"]
    assert report["target"]["bytes"] > report["drafter"]["bytes"] > 0
    assert "float32" in report["target"]["types"]
    times = report["times"]
    assert set(times["verify"]) == set(map(str, range(1, 10)))
    assert set(times["draft"]) == set(map(str, range(1, 9)))
    keys = {(a["temperature"], a["draft_position"]) for a in report["acceptance"]}
    assert keys == {(0, 0), (0, -1), (1, 0), (1, -1)}
    assert report["exactness"][0]["width"] == 2
    depth = report["depth"]
    assert str(depth["chosen"]) in depth["predicted"]
    assert depth["measured"]["plain"] > 0 and depth["measured"]["adaptive"] > 0


def test_the_report_as_text(examined):
    _, report = examined
    told = text(report)
    for words in ("fits", "plain step", "temperature 1, draft_position -1", "GB"):
        assert words in told
    assert f"drafts per round that pay most  {report['depth']['chosen']}" in told
    assert all(warning in told for warning in report["warnings"])


def test_acceptance_is_what_generating_counts(pair_e):
    subject = Subject("e", pair_e.model, pair_e.drafter, pair_e.tokenizer)
    found = examine.acceptance(subject, tokens=20, deadline=inf)
    stats = MTPStats()
    for kind in subject.kinds:
        steps = mtp_generate_step(
            subject.prompt(kind, 0),
            pair_e.model,
            pair_e.drafter,
            num_draft_tokens=examine.DRAFTS,
            max_tokens=20,
            stats=stats,
        )
        for token, *_ in steps:
            if token in subject.ends:
                break
    assert found[0]["accepted"] == stats.acceptance
    assert found[0]["tokens_per_forward"] == stats.tokens_per_forward > 1


def test_on_a_cpu_wide_forwards_compute_the_same_bits():
    # Within the window: beyond it a ring holds its keys in another order.
    target, drafter = make_pair("31b", 16, shrink=16)
    for width in examine.exactness(Subject("x", target, drafter), 24, inf):
        assert width["equal"] == width["positions"] >= 18
        assert width["largest"] == width["other_token"] == width["gap"] == 0


def test_after_the_deadline_the_least_is_measured(pair_e):
    subject = Subject("e", pair_e.model, pair_e.drafter, pair_e.tokenizer)
    assert [w["width"] for w in examine.exactness(subject, 10, -inf)] == [2]
    found = examine.acceptance(subject, tokens=4, deadline=-inf)
    assert len(found) == 4


def test_what_differs_is_counted(monkeypatch):
    target, drafter = make_pair("31b", 16, shrink=64)
    monkeypatch.setattr(examine, "WIDTHS", (3,))
    honest = type(target).__call__

    def odd_when_wide(self, tokens, cache=None):
        logits = honest(self, tokens, cache)
        return -logits if tokens.shape[1] == 3 else logits

    monkeypatch.setattr(type(target), "__call__", odd_when_wide)
    [width] = examine.exactness(Subject("x", target, drafter), 11, inf)
    assert (width["width"], width["positions"]) == (3, 9)
    assert (width["equal"], width["other_token"]) == (0, 9)
    assert width["gap"] > 0 and width["largest"] > 1


def test_a_pair_that_does_not_fit(capsys):
    assert main(["doctor", *of("e", "moe"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["fit"] and "times" not in report
    told = " ".join(report["reasons"])
    assert "sliding_window is 32, the target needs 64" in told
    assert "K/V heads" in told
    assert main(["doctor", *of("e", "moe")]) == 1
    assert "does not fit:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "/no/x", "--mtp-assistant", "/no/y"], "/no/y"),
        ([*of("e", "e")[:2], "--mtp-assistant", of("e", "e")[1]], "'gemma4'"),
        ([*of("e", "e")[2:], "--model", str(PAIRS)], "cannot load the model"),
    ],
)
def test_what_is_no_pair(options, words, capsys):
    assert main(["doctor", *options]) == 1
    assert words in capsys.readouterr().out


def test_official_assistants_are_told_by_their_target():
    [told] = fit._belongs(2816, 5376)
    assert "26B-A4B's" in told and "31B-it-assistant" in told
    [told] = fit._belongs(77, 2560)
    assert "another target" in told and "E4B-it-assistant" in told
    assert fit._belongs(2560, 2560) == fit._belongs(1536, 96) == []


def test_a_synthetic_pair_with_a_dial(capsys):
    assert main(["doctor", *SMALL, "--acceptance", "0.9", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["pair"] == "synthetic E2B, bfloat16"
    assert not report["trained"] and len(report["depth"]["predicted"]) == 9
    assert not any("made for other weights" in w for w in report["warnings"])


def test_weights_are_told_by_their_types():
    target, drafter = make_pair("26b-a4b", 4, shrink=64)
    found = examine.weights(target)
    assert found["types"] == ["4-bit", "8-bit", "bfloat16"] and found["quantised"]
    found = examine.weights(drafter)
    assert found["types"] == ["bfloat16"] and not found["quantised"]
    assert found["bytes"] == sum(
        v.nbytes for _, v in tree_flatten(drafter.parameters())
    )


def changed(report, **changes):
    """A copy of a report with values replaced, named by their path."""
    out = copy.deepcopy(report)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = out
        for name in parents:
            place = place[int(name) if name.isdigit() and type(place) is list else name]
        place[last] = value
    return out


WARNINGS = {
    "do not know MTP here: broken": {"plugin__reason": "broken"},
    "hook is switched off": {"plugin__enabled": False},
    "was tested with": {"plugin__tested": False},
    "reference BLAS": {"reference_blas": True},
    "quantise the drafter": {
        "drafter__bytes": 8e8,
        "drafter__quantised": False,
        "times__draft": {"1": 1.0},
        "times__plain": 5.0,
    },
    "made for other weights": {"acceptance__0__accepted": [0.1, 0.0]},
    "draft_position=-1 gives": {"acceptance__1__tokens_per_forward": 99.0},
    "within 0.25 of each other": {
        "exactness__0__other_token": 2,
        "exactness__0__gap": 0.25,
    },
    "drafting does not pay": {"depth__chosen": 0},
    "were in use": {"memory__peak": 90, "memory__available": 100},
    "slower at the end": {"depth__measured__plain": 1.0, "times__plain": 0.1},
}
SOUND = {
    "plugin__reason": None,
    "plugin__tested": True,
    "plugin__enabled": True,
    "reference_blas": False,
    "acceptance__0__accepted": [0.9],
    "acceptance__1__tokens_per_forward": 1.0,
    "depth__chosen": 3,
    "depth__measured__plain": 100.0,
    "times__plain": 0.01,
    "times__draft": {"1": 0.0001},
    "exactness": [{"other_token": 0, "gap": 0.0}],
}


@pytest.mark.parametrize("words", WARNINGS)
def test_a_warning_for_each_thing_to_mend(examined, words):
    sound = changed(examined[1], **SOUND)
    assert advice.warnings(sound) == []
    [warning] = advice.warnings(changed(sound, **WARNINGS[words]))
    assert words in warning


@pytest.mark.parametrize("name", ["max-tokens", "positions", "time-limit"])
def test_numbers_that_mean_nothing_are_refused(name, capsys):
    assert main(["doctor", f"--{name}", "0"]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and f"--{name} is 0" in error
