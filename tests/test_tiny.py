"""The embedded models, what they are made of, and the games of cups that one of them plays."""

import hashlib
import itertools
import random

import pytest
import torch
from small import ALGORITHMS, SCRIPTS, lines_of
from transformers import AutoModelForCausalLM

from plumbing.models import load, load_tokenizer
from sampling import generate
from tasks import cups_path, cups_prompts
from tiny import make


def test_a_game_ends_where_the_ball_is():
    pairs = [f"{a}{b}" for a, b in itertools.combinations("12345", 2)]
    for ball, *swaps in itertools.product("12345", pairs, pairs):
        row, path = [cup == ball for cup in "12345"], []
        for a, b in (map(int, swap) for swap in swaps):
            row[a - 1], row[b - 1] = row[b - 1], row[a - 1]
            path.append(str(1 + row.index(True)))
        assert cups_path(ball, swaps) == path


def test_games_differ_and_held_out_ones_are_untrained():
    train, heldout = cups_prompts()
    assert (len(train), len(heldout)) == (4096, 1024)
    assert len({row["prompt"] for row in train + heldout}) == 5120


def test_make_draws_the_data_of_the_embedded_models():
    """A hash of some batches: whoever changes what is drawn has to make the model anew."""
    for draw, seen in ((make.draw_sums, "bbc0adf0ed4b525b"), (make.draw_cups, "ead081fb212cd300")):
        rng, digest = random.Random(0), hashlib.sha256()
        for step in range(0, 1000, 50):
            for x in make.make_batch(draw(step / 1000, rng), make.make_tokenizer()):
                digest.update(x.numpy().tobytes())
        assert digest.hexdigest()[:16] == seen


def test_the_cups_model_works_one_game_in_ten_out():
    """Worked out, answers are right; said at once, one in five, as a guess is."""
    model, tokenizer = load(AutoModelForCausalLM, "tiny/cups"), load_tokenizer("tiny/cups")
    rows = cups_prompts()[1]
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    rollout = generate(
        model, prompts.input_ids, prompts.attention_mask, max_new_tokens=16,
        eos_token_ids=[tokenizer.eos_token_id], pad_token_id=0,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    texts = tokenizer.batch_decode(rollout.tokens[:, -16:], skip_special_tokens=True)
    right = {True: [], False: []}
    for row, text in zip(rows, texts, strict=True):
        right[text.startswith(">")].append(text[-1:] == row["answer"])
    shares = {worked_out: sum(x) / len(x) for worked_out, x in right.items()}
    assert len(right[True]) / len(rows) == pytest.approx(0.1, abs=0.04)
    assert shares[True] > 0.9 and shares[False] == pytest.approx(0.2, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("script", ALGORITHMS)
def test_the_cups_model_learns_to_work_games_out(script, tmp_path):
    flags = f"--task cups --num_eval_prompts 256 --eval_every 99 --output_dir {tmp_path}"
    SCRIPTS[script].main(flags.split())
    first, *_, last_step, last = lines_of(tmp_path / "metrics.jsonl")
    assert first["eval/accuracy_greedy"] < 0.4 and last["eval/accuracy_greedy"] > 0.97
    assert first["length/mean"] < 4 and 12 < last_step["length/mean"] < 14
