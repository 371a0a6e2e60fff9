"""reward_model.py: the loss, a step and an evaluation by hand, pairs, and whole runs."""

import itertools
import json
import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from small import (
    letter_pairs,
    letter_tokenizer,
    lines_of,
    near,
    reward_model_job,
    save_model,
    small_llama,
)
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification as Classifier

import reward_model
import tasks
from plumbing.preferences import RewardModel, last_real_token
from reward_model import PairMeter, load_pairs, pair_batches, preference_loss


@pytest.fixture
def job(tmp_path):
    return reward_model_job(tmp_path)


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.problem("preference_loss", 1)
def test_the_loss_of_a_pair_far_apart_stays_finite():
    """test_taught.py has pairs that are near each other."""
    chosen, rejected = torch.tensor([-200.0, 1e4, -1e4], requires_grad=True), torch.zeros(3)
    loss = preference_loss(chosen, rejected, margin=1.0)
    assert loss.tolist() == [201, 0, 10001], "a loss of 201, not infinity"
    loss.sum().backward()
    assert chosen.grad.tolist() == [-1, 0, -1], "and slopes of -1, not NaN"


RIGHT = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]])


@pytest.mark.problem("last_real_token", 1)
@pytest.mark.parametrize(
    ("mask", "last"), [(RIGHT, [0, 7, 10]), (RIGHT.bool(), [0, 7, 10]), (RIGHT.flip(1), [3, 7, 11])]
)
def test_last_real_token_allows_padding_on_either_side(mask, last):
    x = torch.arange(12.0).view(3, 4).masked_fill(mask == 0, math.nan)
    assert last_real_token(x, mask).tolist() == last, "of a mask of bool or numbers, x of (B, L)"
    both = torch.stack([x, -x], dim=2)
    assert last_real_token(both, mask).tolist() == [[i, -i] for i in last], "x of (B, L, D)"


def test_micro_batches_hold_every_pair_once():
    assert pair_batches([{"ids": [[1] * 9] * 2}], 8) == [[{"ids": [[1] * 9] * 2}]]
    lengths = [(1, 2), (9, 1), (1, 1), (2, 2), (2, 1)]
    pairs = [{"ids": [[1] * a, [1] * b]} for a, b in lengths]
    parts = pair_batches(pairs, 8)
    assert [len(part) for part in parts] == [2, 2, 1] and parts[2] == [pairs[1]]
    assert sorted(map(str, itertools.chain(*parts))) == sorted(map(str, pairs))


def by_hand(folder, rows):
    """The model that is saved there, and its scores, chosen and rejected (2, N): of one text at a
    time the head on the state of EOS.
    """
    model, scores = Classifier.from_pretrained(folder).eval(), []
    for key, row in itertools.product(("chosen", "rejected"), rows):
        ids = letter_tokenizer()(row["prompt"] + row[key] + "<eos>").input_ids
        scores.append(model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1])[0])
    return model, torch.stack(scores).view(2, -1)


def test_a_step_and_an_evaluation_are_those_by_hand(job, tmp_path, monkeypatch):
    rows = [row | {"margin": n % 5 / 2 - 0.5} for n, row in enumerate(letter_pairs(21, seed=2))]
    own = write(tmp_path / "own.jsonl", rows)
    model = Classifier.from_pretrained(tmp_path / "small", num_labels=1)  # with dropout
    torch.nn.init.normal_(model.score.weight)
    judge = save_model(tmp_path / "judge", model, letter_tokenizer())
    gradients, clip = [], torch.nn.utils.clip_grad_norm_

    def noted_clip(parameters, most):
        gradients.extend(p.grad.clone() for p in parameters)
        return clip(parameters, most)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noted_clip)
    first, last = job(
        model=judge, pairs=own, eval_pairs=own, num_steps=1, pairs_per_step=21,
        micro_batch_tokens=60, center_rewards_coef=0.3,
    )  # fmt: skip
    model, (a, b) = by_hand(judge, rows)
    margin = torch.tensor([row["margin"] for row in rows])
    loss = (softplus(b + margin - a) + 0.3 * (a + b) ** 2).mean()
    loss.backward()
    means = {"loss/pairs": softplus(b - a), "reward/margin": a - b, "reward/mean": (a + b) / 2}
    assert_means(first, means | {"reward/accuracy": a > b})
    for ours, (name, p) in zip(gradients, model.named_parameters(), strict=True):
        near(ours, p.grad, f"loss and metrics are right, the gradient of {name} isn't", 1e-5, 1e-5)
        assert p.grad.abs().max() > 1e-4, f"{name} has a gradient"
    assert (a > b).sum() != (a + b > 0).sum()
    seconds = sum(x for name, x in first.items() if name.startswith("time/"))
    texts = [row["prompt"] + row[key] for row in rows for key in ("chosen", "rejected")]
    num_tokens = sum(len(text) + 1 for text in texts)  # a letter is a token; EOS
    assert first["tokens_per_second"] * seconds == pytest.approx(num_tokens)
    longer = torch.tensor([float(len(row["chosen"]) - len(row["rejected"])) for row in rows])
    for metrics, folder in ((first, judge), (last, tmp_path / "run" / "model")):
        a, b = by_hand(folder, rows)[1].detach()
        correlation = (a - b) @ longer / ((a - b).norm() * longer.norm())
        means = {"eval/loss": softplus(b - a), "eval/accuracy": a > b, "eval/margin": a - b}
        means |= {"eval/score_mean": (a + b) / 2, "eval/score_std": torch.cat([a, b]).std()}
        means |= {"eval/longer_is_better": longer.sign() / 2 + 0.5}
        assert_means(metrics, means | {"eval/length_correlation": correlation})


def assert_means(metrics, expected):
    for name, values in expected.items():
        assert metrics[name] == pytest.approx(values.float().mean().item(), abs=1e-5), name


@pytest.mark.problem("reward_script", 6)
def test_a_new_head_starts_at_0_and_learns(job, tmp_path):
    more = write(tmp_path / "more.jsonl", letter_pairs(500))
    first, *_, last = job(pairs=more, num_steps=40, eval_every=40)
    assert first["loss/pairs"] == pytest.approx(math.log(2)), "a new head scores all texts with 0"
    assert first["eval/accuracy"] == 0.5, "a tie of scores counts half"
    assert last["eval/loss"] < 0.5, "the loss of held-out pairs after 40 steps; it begins at 0.69"
    assert last["eval/accuracy"] > 0.8, "the share of held-out pairs in the right order"


@pytest.mark.filterwarnings("error:Already found a .peft_config. attribute")  # else peft finds two
@pytest.mark.parametrize("flags", [{"disable_dropout": "false"}, {"lora_r": 1}])
def test_the_saved_reward_model_gives_the_recorded_scores(flags, job, tmp_path):
    metrics = job(**flags)
    last = lines_of(tmp_path / "run" / "samples.jsonl")[-8:]
    found = RewardModel(str(tmp_path / "run" / "model"), "cpu")
    for key in ("chosen", "rejected"):
        scores = found([r["prompt"] for r in last], [r[key] for r in last])
        assert scores == pytest.approx([r[f"score_{key}"] for r in last], abs=1e-4)
    assert len({r["score_chosen"] for r in last}) > 1
    assert (tmp_path / "run" / "model" / "adapter_config.json").exists() == ("lora_r" in flags)
    if "lora_r" not in flags:  # it is trained on from where it is
        more = job(model=tmp_path / "run" / "model", output_dir=tmp_path / "more", **flags)
        assert more[0]["eval/loss"] == pytest.approx(metrics[-1]["eval/loss"], abs=1e-6)
        assert job()[1]["loss/pairs"] != metrics[1]["loss/pairs"], "dropout was on"


def test_a_run_without_num_steps_is_one_pass(job, tmp_path):
    flags = f"--model {tmp_path}/small --pairs {tmp_path}/pairs.jsonl --output_dir {tmp_path}/pass"
    flags += " --pairs_per_step 11 --warmup_steps 2 --learning_rate 0.008 --device cpu"
    reward_model.main(flags.split())
    steps = lines_of(tmp_path / "pass" / "metrics.jsonl")
    assert [m["step"] for m in steps] == [*range(8), 8] and steps[7]["episode"] == 88  # of 80
    rates = [0.004, 0.008, *(0.008 * left / 6 for left in (6, 5, 4, 3, 2, 1))]
    assert [m["lr"] for m in steps[:8]] == pytest.approx(rates)


# --- Pairs ---


def pairs_of(model="m", **flags):
    settings = {"pairs": None, "eval_pairs": None, "max_length": None, "num_eval_pairs": 512}
    config = SimpleNamespace(model=model, **settings | flags)
    return load_pairs(config, small_llama(vocab_size=20), letter_tokenizer())


def test_pairs_come_from_the_model_or_from_files(tmp_path, monkeypatch, capsys):
    own, first, second = (
        (letter_pairs(8, 1), letter_pairs(4, 2)),
        letter_pairs(6, 3),
        letter_pairs(20, 4),
    )
    monkeypatch.setattr(tasks, "add_pairs", lambda: own)
    monkeypatch.setattr(reward_model, "context_length", lambda model: None)
    a, b = write(tmp_path / "a", first), write(tmp_path / "b", second)
    for flags, train, heldout in (
        ({}, *own),
        ({"eval_pairs": b}, own[0], second),
        ({"pairs": a, "eval_pairs": b}, first, second),
    ):
        found = pairs_of("tiny", **flags)
        assert [x["chosen"] for x in found.train] == [x["chosen"] for x in train], flags
        assert {x["chosen"] for x in found.heldout} == {x["chosen"] for x in heldout}, flags
    assert "left out" not in capsys.readouterr().out


def test_equal_and_long_pairs_are_left_out_and_counted(tmp_path, capsys):
    rows = [row | {"margin": 2} for row in letter_pairs(20)]
    rows[3]["rejected"] = rows[3]["chosen"]
    rows[5]["chosen"] = rows[6]["rejected"] = "a" * 30
    rows[7] |= {"prompt": "a", "chosen": "a" * 18}  # with EOS as long as allowed
    rows[8]["chosen"] = "a" * 70
    own = write(tmp_path / "own.jsonl", rows)
    pairs = pairs_of(pairs=own, eval_pairs=own, max_length=20, num_eval_pairs=9)
    assert "4 of 20 pairs are left out: longer than 20 tokens, or both" in capsys.readouterr().out
    assert len(pairs.train) == 16 and max(len(pair["ids"][0]) for pair in pairs.train) == 20
    places = [pairs.train.index(pair) for pair in pairs.heldout]
    assert len(places) == 9 and max(places) > 8, "not the first of a file, which may be sorted"
    pairs_of(pairs=own, eval_pairs=own, max_length=80)
    assert "longer than 64 tokens" in capsys.readouterr().out, "which is the model's context"


def test_held_out_pairs_share_no_prompt_with_the_others(tmp_path, capsys):
    rows = [
        row | {"prompt": "abcdehno"[n % 8] * (n // 8 + 1)} for n, row in enumerate(letter_pairs(60))
    ]
    asked = [{"role": "user", "content": row["prompt"]} for row in rows]
    answer = {"role": "assistant", "content": "a"}
    talks = [{"chosen": [x, answer], "rejected": [x, answer, x, answer]} for x in asked]
    for some in (rows, talks):
        others = [row | {"chosen": row["chosen"][:1] * 2} for row in some[:30]]
        pairs = pairs_of(pairs=write(tmp_path / "own.jsonl", some + others))
        train, heldout = (
            {str(p.get("prompt") or p["chosen"][:1]) for p in part}
            for part in (pairs.train, pairs.heldout)
        )
        assert heldout and not train & heldout
    ids = [
        row | {"prompt": [{"role": "user", "content": "abcdehnofqrs"[n % 12], "id": n}]}
        for n, row in enumerate(rows)
    ]
    pairs = pairs_of(pairs=write(tmp_path / "own.jsonl", ids))
    sides = [{p["prompt"][0]["content"] for p in part} for part in (pairs.train, pairs.heldout)]
    assert list(map(len, sides)) == [11, 1] and not sides[0] & sides[1]
    texts = [{"chosen": f"a{'o' * n}", "rejected": "b"} for n in range(60)]
    pairs = pairs_of(pairs=write(tmp_path / "own.jsonl", texts))
    assert len(pairs.heldout) == 6, "they are not one prompt"
    assert "begin alike" not in capsys.readouterr().out
    dialogues = [
        {"chosen": f"{n % 9}{'a' * 40}", "rejected": f"{n % 9}{'a' * 39}"} for n in range(60)
    ]
    pairs_of(pairs=write(tmp_path / "own.jsonl", dialogues + texts[:5]))
    assert "begin alike: give what is in front of the answer" in capsys.readouterr().out


def test_own_pairs_prefer_right_sums():
    both = tasks.add_pairs()
    assert set.isdisjoint(*({pair["prompt"] for pair in part} for part in both))
    for part, share in zip(both, (0.1, 0.0)):
        sums = [str(sum(map(int, pair["prompt"].strip("=").split("+")))) for pair in part]
        assert all((p["chosen"] == s) != (p["rejected"] == s) for p, s in zip(part, sums))
        flipped = sum(p["rejected"] == s for p, s in zip(part, sums))
        assert flipped / len(part) == pytest.approx(share, abs=0.02)


# --- Runs ---


def test_an_evaluation_shows_its_pairs_with_their_scores(job, tmp_path, capsys):
    pair = {"prompt": None, "chosen": "abc " * 9, "rejected": "b\x1bc"}
    job(eval_pairs=write(tmp_path / "eval.jsonl", [pair]), num_steps=1)
    record, text = lines_of(tmp_path / "run" / "samples.jsonl")[-1], capsys.readouterr().out
    scores = f"  {record['score_chosen']:6.2f} {record['score_rejected']:6.2f}  "
    assert f"{scores} abc abc abc abc abc ... | b\\x1bc\n" in text


def test_each_step_draws_pairs_by_the_seed(job, monkeypatch):
    monkeypatch.setattr(reward_model, "prompt_batch", Mock(wraps=reward_model.prompt_batch))
    monkeypatch.setattr(torch.optim, "AdamW", Mock(wraps=torch.optim.AdamW))
    job(seed=3, num_steps=2)
    options = torch.optim.AdamW.call_args.kwargs
    assert (options["betas"], options["weight_decay"]) == ((0.9, 0.95), 0)
    calls = reward_model.prompt_batch.call_args_list
    assert [call.args[1:] for call in calls] == [(0, 8, 3), (1, 8, 3)]


def test_a_run_warns_of_what_goes_wrong():
    fine = {"reward/mean": 0.0, "eval/loss": 0.5, "eval/length_correlation": 0}
    first, between = ({"eval/loss": x} for x in (0.8, 0.55))  # the best is neither of them
    for change, names in (
        ({"eval/loss": 0.59}, []),
        ({"eval/loss": 0.61}, ["overfitting"]),
        ({"reward/mean": -11.0}, ["far scores"]),
        ({"eval/length_correlation": -0.8}, ["length"]),
        ({"eval/loss": 0.6, "reward/mean": 10.0, "eval/length_correlation": 0.7}, []),  # the limits
        (
            {"eval/loss": 0.7, "reward/mean": 11.0, "eval/length_correlation": 0.8},
            ["far scores", "overfitting", "length"],
        ),
    ):
        history = [fine | x for x in (first, {}, between, change)]
        assert [name for name, _ in PairMeter.warnings(history)] == names
