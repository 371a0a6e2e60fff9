"""reward_model.py: the loss, a step and held-out accuracy by hand, and whole runs."""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from small import (
    computed,
    letter_tokenizer,
    lines_of,
    reward_model_job,
    rows_of,
    save_model,
    small_llama,
)
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM, GPT2Config

import reward_model
from plumbing.errors import Fault
from plumbing.preferences import (
    KEYS,
    PairMeter,
    Pairs,
    RewardModel,
    evaluate_pairs,
    last_real_token,
    pair_batches,
    pair_scores,
)
from reward_model import preference_loss

BERT = BertConfig(
    vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=16, max_position_embeddings=32, num_labels=1,
)  # fmt: skip
TWO_LABELS = GPT2Config(vocab_size=20, n_embd=32, n_layer=1, n_head=2, num_labels=2)


@pytest.fixture
def job(tmp_path):
    return reward_model_job(tmp_path)


def with_a_head(folder: Path, dropout: float = 0.0) -> str:
    """A reward model that is saved there, with a head that is not 0."""
    save_model(folder, small_llama(dropout, vocab_size=20), letter_tokenizer())
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.config.ends_with_eos = False
    return save_model(folder, model, letter_tokenizer())


@pytest.mark.problem("preference_loss", 3)
@pytest.mark.parametrize("center", [0.0, 0.3])
@pytest.mark.parametrize("margins", [[0.0, 0.0, 0.0], [0.7, -0.2, 2.0]])
def test_the_loss_is_that_of_bradley_and_terry_with_a_margin_and_a_pull_to_0(margins, center):
    scores = [(2.0, 0.5), (0.0, 0.0), (-1.0, 3.0)]
    expected = [
        -math.log(1 / (1 + math.exp(b + m - a))) + center * (a + b) ** 2
        for (a, b), m in zip(scores, margins, strict=True)
    ]
    inputs = [*torch.tensor(scores).double().T, torch.tensor(margins).double()]
    before = [x.clone() for x in inputs]
    loss = preference_loss(*inputs, center)
    assert loss.tolist() == pytest.approx(expected) and loss.dtype == torch.float64
    assert all(torch.equal(x, y) for x, y in zip(inputs, before))


@pytest.mark.problem("preference_loss", 1)
def test_loss_and_gradient_are_finite_and_right_however_wrong_a_pair_is():
    chosen = torch.tensor([-1e4, -200.0, -1e-6, 0.0, 200.0, 1e4], requires_grad=True)
    rejected = torch.zeros(6, requires_grad=True)
    loss = preference_loss(chosen, rejected)
    loss.sum().backward()
    exact = chosen.detach().double()
    assert torch.allclose(loss.double(), softplus(-exact), atol=1e-6)
    assert torch.allclose(chosen.grad.double(), -torch.sigmoid(-exact), atol=1e-6)
    assert torch.equal(rejected.grad, -chosen.grad)


PADDED_RIGHT = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]])


@pytest.mark.problem("last_real_token", 2)
@pytest.mark.parametrize("mask", [PADDED_RIGHT, PADDED_RIGHT.bool()])
def test_the_last_real_token_is_found_by_the_mask(mask):
    x = torch.arange(24.0).view(3, 4, 2).masked_fill(mask[..., None] == 0, math.nan)
    before = x.clone().requires_grad_()
    found = last_real_token(before, mask)
    assert torch.equal(found, x[torch.arange(3), [0, 3, 2]]) and found.requires_grad
    assert torch.equal(last_real_token(x[..., 0], mask), found[:, 0])
    assert torch.equal(before.nan_to_num(-1), x.nan_to_num(-1)), "an input was changed"


@pytest.mark.problem("last_real_token", 1)
def test_the_last_real_token_is_found_where_padding_is_on_the_left():
    x = torch.arange(24.0).view(3, 4, 2)
    assert torch.equal(last_real_token(x, PADDED_RIGHT.flip(1)), x[:, 3])


def by_hand(model: torch.nn.Module, rows: list[dict]) -> torch.Tensor:
    """The head on the last hidden state, one text at a time: chosen and rejected, (2, N)."""

    def score(text: str) -> torch.Tensor:
        ids = torch.tensor([letter_tokenizer()(text).input_ids])
        return model.score(model.model(ids).last_hidden_state[0, -1])[0]

    texts = [[row["prompt"] + row[key] for row in rows] for key in ("chosen", "rejected")]
    return torch.stack([torch.stack([score(text) for text in part]) for part in texts])


def padded(pairs: list[dict]) -> int:
    """The tokens of a forward pass over these pairs, with its padding."""
    return 2 * len(pairs) * max(len(pair[f"{key}_ids"]) for pair in pairs for key in KEYS)


def test_a_pair_that_is_longer_than_a_micro_batch_is_one_alone():
    lengths = [(1, 2), (9, 1), (1, 1), (2, 2), (2, 1)]
    pairs = [{"chosen_ids": [1] * a, "rejected_ids": [1] * b} for a, b in lengths]
    assert [len(part) for part in pair_batches(pairs, 8)] == [1, 1, 2, 1]
    assert [len(part) for part in pair_batches(pairs, None)] == [5]
    assert [len(part) for part in pair_batches(pairs[:1] * 300, None)] == [128, 128, 44]


def test_metrics_and_gradient_of_a_step_are_those_by_hand_whatever_the_micro_batch(
    job, tmp_path, monkeypatch
):
    margins = [0.0, 0.5, 1.5, -0.5, 1.0]
    rows = [row | {"margin": margins[n % 5]} for n, row in enumerate(rows_of(20, seed=1))]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    judge = with_a_head(tmp_path / "judge", dropout=0.1)
    gradients, parts = [], []
    clip, scores_of = torch.nn.utils.clip_grad_norm_, reward_model.pair_scores

    def noted_clip(parameters, most):
        gradients.extend(p.grad.clone() for p in parameters)
        return clip(parameters, most)

    def noted_scores(model, pairs, *args):
        parts.append(pairs)
        return scores_of(model, pairs, *args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noted_clip)
    monkeypatch.setattr(reward_model, "pair_scores", noted_scores)
    first, last = job(
        model=judge, pairs=tmp_path / "own.jsonl", eval_pairs=tmp_path / "pairs.jsonl",
        num_eval_pairs=12, num_steps=1, pairs_per_step=20, micro_batch_tokens=60,
        center_rewards_coef=0.3,
    )  # fmt: skip
    assert sum(map(len, parts)) == 20 and len(parts) > 3 and len({*map(len, parts)}) > 1
    assert all(padded(part) <= 60 for part in parts), "a pair is two rows"
    assert all(padded([*part, after[0]]) > 60 for part, after in itertools.pairwise(parts))

    model = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    a, b = by_hand(model, rows)
    margin = torch.tensor([row["margin"] for row in rows])
    loss = (softplus(b + margin - a) + 0.3 * (a + b) ** 2).mean()
    loss.backward()
    for ours, (name, p) in zip(gradients, model.named_parameters(), strict=True):
        assert torch.allclose(ours, p.grad, atol=1e-5) and p.grad.abs().max() > 1e-4, name
    agree = {
        "loss/pairs": loss, "reward/accuracy": (a > b).float().mean(),
        "reward/margin": (a - b).mean(), "reward/mean": (a + b).mean() / 2,
    }  # fmt: skip
    assert_equal(first, agree)
    for metrics, folder in ((first, judge), (last, tmp_path / "run" / "model")):
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        a, b = by_hand(model, rows_of(80)[:12])
        agree = {
            "eval/loss": softplus(b - a).mean(), "eval/accuracy": (a > b).float().mean(),
            "eval/margin": (a - b).mean(), "eval/score_mean": (a + b).mean() / 2,
            "eval/score_std": torch.cat([a, b]).std(),
        }  # fmt: skip
        assert_equal(metrics, agree)


def assert_equal(metrics: dict[str, float], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), abs=1e-5), name


@pytest.mark.parametrize("config", [BERT, TWO_LABELS])
def test_scores_are_float32_under_bfloat16_autocast(config):
    model = AutoModelForSequenceClassification.from_config(config).eval()
    pairs = [{"chosen_ids": [1, 2], "rejected_ids": [3]}]
    (chosen, rejected, count), (plain, *_) = (pair_scores(model, pairs, x) for x in (True, False))
    assert chosen.dtype == rejected.dtype == torch.float32 and count == 3
    # Of BERT all is float32, of GPT-2 the head alone.
    assert torch.equal(chosen, plain) == (config is BERT)


@pytest.mark.problem("reward_script", 6, "causal")
@pytest.mark.parametrize("kind", ["causal", "bert", "two labels"])
def test_a_new_head_starts_at_0_and_learns_the_preference(kind, job, tmp_path, capsys):
    folder = str(tmp_path / "small")
    if kind == "bert":
        folder = save_model(tmp_path / "m", BertForMaskedLM(BERT), letter_tokenizer())
    if kind == "two labels":
        two = AutoModelForSequenceClassification.from_config(TWO_LABELS)
        folder = save_model(tmp_path / "m", two, letter_tokenizer())
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, rows_of(500))))
    first, *_, last = job(model=folder, pairs=tmp_path / "more.jsonl", num_steps=40, eval_every=40)
    assert first["loss/pairs"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["eval/loss"] == pytest.approx(math.log(2)) and first["eval/accuracy"] == 0.5
    assert first["reward/mean"] == 0 and first["grad_norm"] > 0
    assert last["eval/accuracy"] > 0.8 and last["eval/loss"] < 0.5
    assert ("its head is replaced" in capsys.readouterr().out) == (kind == "two labels")


@pytest.mark.parametrize("flags", [{}, {"disable_dropout": "false"}, {"lora_r": 2}])
def test_the_saved_model_gives_as_a_reward_the_scores_that_were_recorded(flags, job, tmp_path):
    metrics = job(**flags)
    run = tmp_path / "run"
    last = lines_of(run / "samples.jsonl")[-8:]
    found = RewardModel(str(run / "model"), torch.device("cpu"))
    for key in ("chosen", "rejected"):
        scores = found([r["prompt"] for r in last], [r[key] for r in last])
        assert scores == pytest.approx([r[f"score_{key}"] for r in last], abs=1e-4)
    assert len({r["score_chosen"] for r in last}) > 1
    if "lora_r" in flags:  # merged into model/, and beside it with the head
        weights = load_file(run / "adapter" / "adapter_model.safetensors")
        assert any("lora_B" in name and w.any() for name, w in weights.items())
        assert any("score" in name for name in weights)
    else:  # it is trained on from where it is
        more = job(model=run / "model", output_dir=tmp_path / "more", **flags)
        assert more[0]["eval/loss"] == pytest.approx(metrics[-1]["eval/loss"], abs=1e-6)


def test_without_num_steps_a_run_is_one_pass_at_a_rate_that_rises_and_falls(job, tmp_path):
    flags = f"--model {tmp_path}/small --pairs {tmp_path}/pairs.jsonl --output_dir {tmp_path}/pass"
    flags += " --pairs_per_step 10 --warmup_steps 2 --learning_rate 0.008 --device cpu"
    reward_model.main(flags.split())
    steps = lines_of(tmp_path / "pass" / "metrics.jsonl")
    assert [m["step"] for m in steps] == [*range(8), 8] and steps[7]["episode"] == 80  # of 72
    rates = [0.004, 0.008, *(0.008 * left / 6 for left in (6, 5, 4, 3, 2, 1))]
    assert [m["lr"] for m in steps[:8]] == pytest.approx(rates)


def test_an_interrupted_run_that_is_resumed_equals_one_that_was_not(job, tmp_path, monkeypatch):
    flags = {"num_steps": 6, "save_every": 3}
    whole = job(**flags)
    files = [tmp_path / "run" / name for name in ("model/model.safetensors", "samples.jsonl")]
    expected = [file.read_bytes() for file in files]
    real, calls = reward_model.preference_loss, []

    def fails_in_step_4(*args):
        calls.append(1)
        if len(calls) > 4:
            raise Fault("broken")
        return real(*args)

    with monkeypatch.context() as m:
        m.setattr(reward_model, "preference_loss", fails_in_step_4)
        with pytest.raises(Fault, match=r"step 4: broken; .*is saved up to step 4"):
            job(**flags)
    assert computed(job(**flags, resume="true")) == computed(whole)
    assert [file.read_bytes() for file in files] == expected
    assert computed(job(**flags, resume="true")) == computed(whole), "nothing left to do"


def test_an_evaluation_shows_what_length_alone_says_and_leaves_no_trace(tmp_path):
    folder = with_a_head(tmp_path / "m", dropout=0.5)
    model = AutoModelForSequenceClassification.from_pretrained(folder).train()
    lengths = ((3, 1), (1, 2), (2, 2), (5, 2))
    texts = {"prompt": "", "chosen": "", "rejected": "", "margin": 0.0}
    rows = [texts | {"chosen_ids": [1] * a, "rejected_ids": [2] * b} for a, b in lengths]
    config = SimpleNamespace(micro_batch_tokens=10, bf16=False)
    pairs = Pairs([], rows, letter_tokenizer())
    graphs = []
    model.score.register_forward_hook(lambda *args: graphs.append(args[-1].requires_grad))
    found = evaluate_pairs(config, model, pairs)
    assert model.training and graphs == [False] * 3
    assert found.metrics["eval/longer_is_better"] == (2 + 0.5) / 4
    margins = [r["score_chosen"] - r["score_rejected"] for r in found.records]
    s, n = torch.tensor([margins, [2.0, -1, 0, 3]], dtype=torch.float64)
    expected = (s * n).sum() / ((s**2).sum() * (n**2).sum()).sqrt()
    assert found.metrics["eval/length_correlation"] == pytest.approx(expected.item())
    model.score.weight.data.fill_(torch.nan)
    with pytest.raises(Fault, match="are not finite: lower --learning_rate"):
        evaluate_pairs(config, model, pairs)


FINE = {"reward/mean": 0.0, "reward/accuracy": 0.7, "eval/loss": 0.5, "eval/length_correlation": 0}


@pytest.mark.parametrize(
    ("change", "times", "names"),
    [
        ({}, 30, []),
        ({"eval/loss": 0.61}, 1, ["overfitting"]),
        ({"eval/loss": 0.59}, 1, []),
        ({"reward/mean": -11.0}, 1, ["far scores"]),
        ({"eval/length_correlation": -0.8}, 1, ["length"]),
        ({"reward/accuracy": 0.45}, 20, ["worse than chance"]),
        ({"reward/accuracy": 0.45}, 18, []),
    ],
)
def test_a_run_warns_of_what_goes_wrong(change, times, names):
    assert [name for name, _ in PairMeter.warnings([FINE] + [FINE | change] * times)] == names


@pytest.mark.slow
def test_the_embedded_model_prefers_right_sums_with_some_labels_flipped_and_learns_to(
    tmp_path, monkeypatch
):
    made, load_pairs = [], reward_model.load_pairs
    monkeypatch.setattr(
        reward_model, "load_pairs", lambda *args: made.append(load_pairs(*args)) or made[0]
    )
    reward_model.main(f"--num_steps 30 --device cpu --output_dir {tmp_path}/run".split())
    assert lines_of(tmp_path / "run" / "metrics.jsonl")[-1]["eval/accuracy"] > 0.7

    for part, share in ((made[0].train, 0.1), (made[0].heldout, 0.0)):
        sums = [str(sum(map(int, p["prompt"].strip("=").split("+")))) for p in part]
        right = [(p["chosen"] == s, p["rejected"] == s) for p, s in zip(part, sums)]
        assert all(sum(verdicts) == 1 for verdicts in right)
        assert sum(b for _, b in right) / len(part) == pytest.approx(share, abs=0.02)
    train, heldout = ({p["prompt"] for p in part} for part in (made[0].train, made[0].heldout))
    assert len(train) > 400 and len(heldout) > 50 and not train & heldout


def test_a_resumed_run_keeps_the_number_of_steps_that_it_began_with(job, tmp_path):
    """Without the flag it is one pass over the pairs, and the learning rate falls to 0 over it."""
    job(num_steps=4)
    config = tmp_path / "run" / "config.json"
    before, metrics = config.read_text(), tmp_path / "run" / "metrics.jsonl"
    num_lines = len(metrics.read_text().splitlines())
    flags = [f"--{k}={v}" for k, v in json.loads(before).items() if v not in (None, [])]
    left_out = ("--num_steps", "--script", "--resume", "--overwrite")
    reward_model.main([f for f in flags if not f.startswith(left_out)] + ["--resume"])
    assert json.loads(config.read_text())["num_steps"] == 4
    assert len(metrics.read_text().splitlines()) == num_lines
