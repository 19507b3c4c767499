"""The throughput command, and depths that are learnt by rows."""

import mlx.core as mx
import pytest

from mlx_lm_mtp import throughput
from mlx_lm_mtp.__main__ import main
from mlx_lm_mtp.batch import MTPBatchGenerator
from mlx_lm_mtp.depth import MAX_DRAFTS, Adaptives, learnt


def test_the_command_prints_a_table(capsys, monkeypatch):
    monkeypatch.setattr(throughput, "SETTLE", 20)
    options = ["--rows", "1", "3", "--num-draft-tokens", "0", "2", "--seconds", "0.01"]
    options += ["--runs", "2"]
    assert main(["throughput", *options, "--context", "20"]) == 0
    *_, head, rule, one, three = capsys.readouterr().out.splitlines()
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in (head, one, three)]
    assert cells[0][:5] == ["rows", "plain", "0 drafts", "2 drafts", "adaptive"]
    assert set(rule) == set("|- ") and [c[0] for c in cells[1:]] == ["1", "3"]
    assert all(float(number) > 0 for line in cells[1:] for number in line)


def test_the_command_refuses_in_one_line(capsys):
    assert main(["throughput", "--rows", "0"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "--rows is 0, it must be at least 1" in line


def test_a_wrong_number_of_drafts_is_refused_before_any_work(capsys):
    assert main(["throughput", "--num-draft-tokens", "1", "-1"]) == 1
    told = capsys.readouterr()
    assert "num_draft_tokens is -1" in told.err and not told.out


# Seconds of a round of so many rows with so many drafts: many rows leave nothing idle.
def cost(rows, drafts):
    return 1.0 + 0.05 * drafts + 0.9 * (rows > 4) * drafts


def test_each_number_of_rows_has_its_own_depth():
    found = Adaptives()
    dice = iter(mx.random.uniform(shape=(100_000,), key=mx.random.key(0)).tolist())
    chosen = {}
    for rows in (2, 16):
        for _ in range(600):
            depth = found.of(rows)
            drafts = depth.choose(MAX_DRAFTS)
            accepted = []
            for _ in range(rows):
                stands = [next(dice) < 0.8 for _ in range(drafts)]
                accepted.append([*stands, False].index(False))
            depth.learn(drafts, accepted, cost(rows, drafts))
            chosen.setdefault(rows, []).append(drafts)
    assert sum(chosen[2][-100:]) / 100 > 4
    assert sum(chosen[16][-100:]) / 100 < 0.2
    assert found.of(3) is found.of(4) is not found.of(5)
    assert abs(found.of(16).acceptance[0] - 0.8) < 0.1


def test_every_row_is_an_observation():
    """Sixteen rows tell in a few rounds that a text has become hard."""
    depth = Adaptives().of(16)
    for accepted, rounds in ((3, 40), (0, 5)):
        for _ in range(rounds):
            depth.learn(3, [accepted] * 16, 1.0)
    assert depth.acceptance[0] < 0.4


@pytest.mark.parametrize("rows", [1, 3])
def test_batches_learn(pair_e, prompts, rows):
    generator = MTPBatchGenerator(pair_e.model, pair_e.drafter, max_tokens=40)
    generator.insert([prompts[i][:30].tolist() for i in range(rows)])
    while generator.next_generated():
        pass
    depth = learnt(pair_e.model, pair_e.drafter, rows)
    assert depth.costs[0].sure and any(cost.seen for cost in depth.costs[1:])
