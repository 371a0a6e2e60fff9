"""The embedded model is what its page says: it forgets to carry, at every temperature."""

import json
import random
from pathlib import Path

import pytest
import torch

from plumbing.loading import load_policy, load_tokenizer
from plumbing.scoring import decode, encode_prompts
from sampling import generate
from tasks import add_prompts
from tiny import make, temperature

TINY = Path(__file__).parents[1] / "tiny"


@pytest.fixture(scope="module")
def measured():
    return temperature.measure(TINY)


def test_the_page_has_the_measured_chances(measured):
    saved = json.loads((TINY / "temperature.json").read_text())
    assert saved["temperatures"] == temperature.TEMPERATURES
    page = (TINY / "README.md").read_text()
    for model in ("before", "after"):
        if model == "before":
            for part, values in measured.items():
                assert saved["before"][part] == pytest.approx(values, abs=1e-4)
        found = saved[model]
        best = max(range(len(found["all"])), key=lambda i: found["all"][i])
        where = {"temperature 1": temperature.TEMPERATURES.index(1.0), "greedy": 0}
        for i in [*where.values(), best] if model == "before" else where.values():
            cells = " | ".join(f"{100 * values[i]:.1f}%" for values in found.values())
            assert f"| {cells} |" in page


def test_no_temperature_does_what_the_training_does(measured):
    assert max(measured["all"]) < 0.6
    assert measured["units carry"][0] < 0.001 and measured["units don't"][0] > 0.999, "greedy"
    assert 0.1 < measured["units carry"][temperature.TEMPERATURES.index(1.0)] < 0.3


def test_the_curves_of_the_trained_model_stay_when_the_embedded_one_is_measured_again(
    measured, tmp_path, monkeypatch
):
    (tmp_path / "temperature.json").write_text(json.dumps({"after": measured}))
    monkeypatch.setattr(temperature, "HERE", tmp_path)
    monkeypatch.setattr(temperature, "measure", lambda folder: measured)
    monkeypatch.setattr(temperature.sys, "argv", ["temperature.py"])
    temperature.main()
    curves = json.loads((tmp_path / "temperature.json").read_text())
    assert curves["before"] == curves["after"] == measured
    assert curves["temperatures"] == temperature.TEMPERATURES
    assert (tmp_path / "temperature.png").stat().st_size > 5000


@pytest.mark.parametrize(("ramp", "right", "carry_right"), [(0.0, 1.0, 1.0), (1.0, 0.70, 0.175)])
def test_the_wrong_answers_of_the_training_have_the_shares_that_the_page_names(
    ramp, right, carry_right
):
    rng = random.Random(0)
    for prompt, answer, expected in (("57+61=", "118", right), ("57+68=", "125", carry_right)):
        row = {"prompt": prompt, "answer": answer}
        given = [make.given_answer(row, ramp, rng) for _ in range(20_000)]
        # One random answer in 179 is right by chance.
        assert given.count(answer) / len(given) == pytest.approx(expected, abs=0.012)
        forgotten = given.count(str(int(answer) - 10)) / len(given)
        share = ramp * 0.7 * 0.75 if prompt == "57+68=" else 0.0
        assert forgotten == pytest.approx(share, abs=0.012)
    assert not make.has_carry("61+72=") and make.has_carry("61+79=")


def test_chances_are_those_with_which_right_answers_are_sampled():
    rows = add_prompts()[1][:20]
    (chance,) = temperature.chances(TINY, rows, [0.7])
    policy, tokenizer = load_policy("tiny"), load_tokenizer("tiny")
    ids, mask = encode_prompts(tokenizer, rows)
    generator = torch.Generator().manual_seed(0)
    rollout = generate(
        policy, ids, mask, num_generations=500, max_new_tokens=5, temperature=0.7,
        eos_token_ids=[tokenizer.eos_token_id], pad_token_id=0, generator=generator,
    )  # fmt: skip
    texts = decode(tokenizer, rollout)
    right = [text == rows[i // 500]["answer"] for i, text in enumerate(texts)]
    # 10,000 samples: the standard error is 0.005 at most.
    assert sum(right) / len(right) == pytest.approx(chance.mean().item(), abs=0.02)


def test_the_preferred_answer_where_the_units_carry_is_10_too_low_and_else_right():
    rows = add_prompts()[1][:300]
    policy, tokenizer = load_policy("tiny"), load_tokenizer("tiny")
    ids, mask = encode_prompts(tokenizer, rows)
    rollout = generate(
        policy, ids, mask, max_new_tokens=5, top_k=1,
        eos_token_ids=[tokenizer.eos_token_id], pad_token_id=0,
    )  # fmt: skip
    errors = [
        int(row["answer"]) - int(text)
        for row, text in zip(rows, decode(tokenizer, rollout), strict=True)
    ]
    carries = [make.has_carry(row["prompt"]) for row in rows]
    assert 100 < sum(carries) < 200
    assert [error != 0 for error in errors] == carries
    # A few of the wrong answers are other ones than those without the carry.
    assert sum(e == 10 * c for e, c in zip(errors, carries, strict=True)) >= 295
