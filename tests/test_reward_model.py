"""reward_model.py: the loss by hand, the pairs, the pitfalls, whole runs."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small import (
    byte_tokenizer,
    letter_tokenizer,
    reward_model_job,
    rows_of,
    save_model,
    small_gpt2,
    small_llama,
)
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)

import plumbing.pairs
import reward_model
from plumbing.advice import pair_warnings
from plumbing.errors import Fault, InputError
from plumbing.judging import evaluate_pairs, length_correlation, reliability
from plumbing.loading import load_tokenizer
from plumbing.pairs import load_pairs, pair_of, pair_scores, read_pairs
from plumbing.prompts import prompt_batch
from plumbing.reward_models import (
    RewardModel,
    last_real_token,
    load_for_training,
    sequence_scores,
    text_ids,
)
from reward_model import preference_loss
from tasks import TASKS, add_prompts

MEASURED = ("time/", "memory/", "tokens_per_second")


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., list[dict]]:
    return reward_model_job(tmp_path)


def of_the_model(metrics: list[dict]) -> list[dict]:
    return [{k: v for k, v in m.items() if not k.startswith(MEASURED)} for m in metrics]


# --- The loss ---


def test_the_loss_is_minus_the_log_of_the_probability_of_bradley_and_terry():
    chosen, rejected = torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.5, 0.0, 3.0])
    expected = [-math.log(1 / (1 + math.exp(b - a))) for a, b in ((2, 0.5), (0, 0), (-1, 3))]
    assert preference_loss(chosen, rejected).tolist() == pytest.approx(expected, abs=1e-6)
    assert preference_loss(torch.zeros(1), torch.zeros(1)).item() == pytest.approx(math.log(2))


def test_a_margin_asks_for_that_much_more():
    a, b, m = torch.tensor([2.0, 1.0]), torch.tensor([0.5, 0.0]), torch.tensor([0.7, -0.2])
    assert torch.allclose(preference_loss(a, b, m), preference_loss(a - m, b))
    assert (preference_loss(a, b, 1.0) > preference_loss(a, b)).all()


def test_only_the_second_term_sees_what_is_added_to_all_scores():
    a, b = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 1.5])
    assert torch.allclose(preference_loss(a + 5, b + 5), preference_loss(a, b))
    found = preference_loss(a + 5, b + 5, center_rewards_coef=0.1) - preference_loss(a, b)
    assert found.tolist() == pytest.approx([0.1 * 12.5**2, 0.1 * 10.5**2], rel=1e-5)


@pytest.mark.parametrize("difference", [-1e4, -200.0, -1e-6, 0.0, 200.0, 1e4])
def test_loss_and_gradient_are_finite_and_right_however_wrong_a_pair_is(difference):
    chosen = torch.tensor([difference], requires_grad=True)
    loss = preference_loss(chosen, torch.zeros(1))
    loss.sum().backward()
    assert loss.item() == pytest.approx(
        max(0, -difference) + math.log1p(math.exp(-abs(difference)))
    )
    expected = -torch.sigmoid(-torch.tensor(difference, dtype=torch.float64)).item()
    assert chosen.grad.item() == pytest.approx(expected, abs=1e-6)


def test_the_loss_changes_none_of_its_inputs_and_keeps_their_dtype():
    a, b, m = (torch.randn(4, dtype=torch.float64) for _ in range(3))
    before = [x.clone() for x in (a, b, m)]
    assert preference_loss(a, b, m, 0.3).dtype == torch.float64
    assert all(torch.equal(x, y) for x, y in zip((a, b, m), before))


# --- The last real token ---


@pytest.mark.parametrize("left", [False, True])
def test_the_last_real_token_is_found_by_the_mask_on_whichever_side_padding_is(left):
    lengths, width = [1, 4, 3], 4
    mask = torch.zeros(3, width, dtype=torch.bool)
    for row, n in enumerate(lengths):
        mask[row, width - n if left else 0 : width if left else n] = True
    x = torch.arange(24.0).view(3, width, 2)
    columns = [width - 1 if left else n - 1 for n in lengths]
    for values in (x, x[..., 0]):
        for kind in (mask, mask.long()):
            expected = torch.stack([values[row, column] for row, column in enumerate(columns)])
            assert torch.equal(last_real_token(values, kind), expected)


# --- Scores of texts: the pitfalls ---


@pytest.fixture(params=["gpt2", "llama", "bert"])
def judge(request, tmp_path) -> Path:
    """A reward model with pad == EOS, of three kinds, and its tokenizer."""
    torch.manual_seed(1)
    if request.param == "bert":
        config = BertConfig(
            vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=32, num_labels=1, initializer_range=0.3,
        )  # fmt: skip
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        folder = tmp_path / "causal"
        save_model(folder, {"gpt2": small_gpt2, "llama": small_llama}[request.param](
            vocab_size=20), letter_tokenizer())  # fmt: skip
        model = load_for_training(str(folder))
        torch.nn.init.normal_(model.score.weight)
    tokenizer = letter_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.eos_token_id
    save_model(tmp_path / "judge", model, tokenizer)
    return tmp_path / "judge"


def test_a_score_depends_on_no_row_beside_it_and_on_a_real_eos_though_pad_is_eos(judge):
    model = RewardModel(str(judge), torch.device("cpu"))
    texts = ["ab", "ab<eos>", "cadbe", "cadbe<eos>", "e"]
    alone = [model([""], [text])[0] for text in texts]
    assert model([""] * 5, texts) == pytest.approx(alone, abs=1e-5)
    assert len({round(value, 4) for value in alone}) == 5


def test_the_score_of_a_causal_model_is_its_head_on_the_last_real_token(tmp_path):
    save_model(tmp_path / "m", small_llama(vocab_size=20), letter_tokenizer())
    model = load_for_training(str(tmp_path / "m")).eval()
    torch.nn.init.normal_(model.score.weight)
    rows = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    states = [
        model.model(input_ids=ids).last_hidden_state[0, -1] for ids in (rows[:1], rows[1:, :2])
    ]
    expected = torch.stack([model.score(state)[0] for state in states])
    assert torch.allclose(sequence_scores(model, rows, mask), expected, atol=1e-5)


def test_transformers_gives_the_scores_that_we_give_where_it_knows_the_pad(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, num_labels=1, pad_token_id=0)
    model = GPT2ForSequenceClassification(config).eval()
    rows, mask = torch.tensor([[3, 4, 5], [7, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert torch.allclose(
        sequence_scores(model, rows, mask), model(rows, attention_mask=mask).logits[:, 0]
    )


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_scores_are_float32_under_bfloat16_autocast(kind, tmp_path):
    if kind == "bert":
        config = BertConfig(
            vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=32, num_labels=1,
        )  # fmt: skip
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        save_model(tmp_path / "m", small_llama(vocab_size=20), letter_tokenizer())
        model = load_for_training(str(tmp_path / "m"))
    pairs = [{"chosen_ids": [1, 2], "rejected_ids": [3]}]
    chosen, rejected, count = pair_scores(model, pairs, bf16=True)
    assert chosen.dtype == rejected.dtype == torch.float32 and count == 3


def test_a_model_that_looks_for_the_last_token_by_itself_or_needs_eos_is_refused(tmp_path):
    sizes = {"vocab_size": 20, "d_model": 16, "num_labels": 1}
    xlnet = XLNetForSequenceClassification(XLNetConfig(n_layer=1, n_head=2, d_inner=16, **sizes))
    t5 = T5ForSequenceClassification(
        T5Config(num_layers=1, num_heads=2, d_ff=16, d_kv=8, decoder_start_token_id=0, **sizes)
    )
    for name, model, fault in (("xlnet", xlnet, "its padding"), ("t5", t5, "ValueError")):
        folder = save_model(tmp_path / name, model, letter_tokenizer())
        with pytest.raises(InputError, match=f"--model .*can't be used as a reward model.*{fault}"):
            load_for_training(folder)
        with pytest.raises(InputError, match=f"--reward_model .*can't be used .*{fault}") as error:
            RewardModel(folder, torch.device("cpu"))
        assert "\n" not in str(error.value)


def test_an_adapter_is_no_reward_model_and_no_start_for_one(job, tmp_path):
    job(lora_r=2, merge_adapter="false")
    folder = str(tmp_path / "run" / "model")
    with pytest.raises(InputError, match="is an adapter; train with --merge_adapter true"):
        RewardModel(folder, torch.device("cpu"))
    with pytest.raises(InputError, match="is an adapter; give the model that it is merged into"):
        load_for_training(folder)


def test_a_template_that_writes_bos_gets_no_second_one():
    tokenizer = byte_tokenizer()
    eos = tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", eos)]
    )
    tokenizer.chat_template = "<|endoftext|>{% for m in messages %}[{{ m.content }}]{% endfor %}"
    user, answer = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    ids = text_ids(tokenizer, user, answer)
    assert ids.count(eos) == 1 and tokenizer.decode(ids) == "<|endoftext|>[q][a]"
    assert text_ids(tokenizer, [], [*user, *answer]) == ids
    assert text_ids(tokenizer, "q", "a").count(eos) == 1


def test_the_scores_of_a_trained_model_are_those_that_the_reward_gives_later(job, tmp_path):
    job()
    pairs = [json.loads(x) for x in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    last = [p for p in pairs if p["step"] == 3]
    found = RewardModel(str(tmp_path / "run" / "model"), torch.device("cpu"))
    for key in ("chosen", "rejected"):
        scores = found([p["prompt"] for p in last], [p[key] for p in last])
        assert scores == pytest.approx([p[f"score_{key}"] for p in last], abs=1e-5)
    assert len({p["score_chosen"] for p in last}) > 1


# --- Which models can be trained ---


def test_a_new_head_starts_at_0_and_the_first_loss_is_log_2(job):
    first = job(num_steps=1)[0]
    assert first["loss/pairs"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["eval/loss"] == pytest.approx(math.log(2)) and first["eval/accuracy"] == 0.5
    assert first["reward/mean"] == 0 and first["grad_norm"] > 0


def test_a_reward_model_is_trained_on_from_where_it_is(job, tmp_path):
    before = job()
    after = job(model=tmp_path / "run" / "model", output_dir=tmp_path / "more")
    assert after[0]["eval/loss"] == pytest.approx(before[-1]["eval/loss"], abs=1e-6)


def test_a_bert_learns_too(job, tmp_path):
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32,
    )  # fmt: skip
    save_model(tmp_path / "bert", BertForMaskedLM(config), letter_tokenizer())
    metrics = job(model=tmp_path / "bert", num_steps=30)
    assert metrics[0]["eval/loss"] == pytest.approx(math.log(2))
    assert metrics[-1]["eval/loss"] < 0.5


def test_a_classifier_with_two_labels_gets_a_new_head_and_a_run_says_so(job, tmp_path, capsys):
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, num_labels=2, pad_token_id=0)
    save_model(tmp_path / "two", GPT2ForSequenceClassification(config), letter_tokenizer())
    first = job(model=tmp_path / "two", num_steps=1)[0]
    assert first["loss/pairs"] == pytest.approx(math.log(2), abs=1e-6)
    assert RewardModel(str(tmp_path / "run" / "model"), torch.device("cpu")).model.num_labels == 1
    assert "its head is replaced" in capsys.readouterr().out
    job(model=tmp_path / "small", num_steps=1)
    assert "its head is replaced" not in capsys.readouterr().out


def test_an_adapter_trains_with_the_head_and_is_merged_into_what_is_saved(job, tmp_path):
    metrics = job(lora_r=2, num_steps=20)
    assert metrics[-1]["eval/loss"] < 0.6 and (tmp_path / "run" / "adapter").is_dir()
    found = RewardModel(str(tmp_path / "run" / "model"), torch.device("cpu"))
    records = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    last = [r for r in map(json.loads, records) if r["step"] == 20]
    scores = found([r["prompt"] for r in last], [r["chosen"] for r in last])
    assert scores == pytest.approx([r["score_chosen"] for r in last], abs=1e-4)
    weights = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert any("lora_A" in name for name in weights) and any("score" in name for name in weights)


# --- Pairs ---

USER, GOOD, BAD, SYSTEM = (
    {"role": role, "content": text}
    for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"), ("system", "s"))
)


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "q", "a", "b"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "q", "a", ""),
        ({"chosen": "qa", "rejected": "qb"}, "q", "a", "b"),
        ({"chosen": "qab", "rejected": "qa"}, "qa", "b", ""),
        ({"chosen": "a", "rejected": "b"}, "", "a", "b"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, [USER], [GOOD], [BAD]),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, [USER], [GOOD], [BAD]),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER], [GOOD], [BAD]),
        (
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD, USER, BAD]},
            [USER], [GOOD, USER, GOOD], [BAD, USER, BAD],
        ),
        ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER], [GOOD], [BAD]),
        ({"prompt": "q ", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER], [GOOD], [BAD]),
        (
            {"prompt": "q", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
            [SYSTEM, USER], [GOOD], [BAD],
        ),
        (
            {"prompt": [USER], "chosen": [USER | {"name": None}, GOOD], "rejected": [USER, BAD]},
            [USER], [GOOD], [BAD],
        ),
        ({"prompt": "q", "chosen": [GOOD], "rejected": [BAD]}, [USER], [GOOD], [BAD]),
        (
            {
                "prompt": [SYSTEM, USER],
                "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD],
            },
            [SYSTEM, USER], [GOOD], [BAD],
        ),
    ],
)  # fmt: skip
def test_each_format_of_pairs_is_read(row, prompt, chosen, rejected):
    expected = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": 0.0}
    assert pair_of(row) == expected
    assert pair_of(row | {"margin": 2, "more": 1}) == expected | {"margin": 2.0}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([1], "not an object"),
        ({"prompt": "q", "chosen": "a"}, 'no key "rejected"'),
        ({"prompt": "q", "rejected": "a"}, 'no key "chosen"'),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, '"prompt" is neither'),
        ({"prompt": "q", "chosen": 3, "rejected": "b"}, '"chosen" is neither'),
        ({"chosen": "a", "rejected": ""}, '"rejected" is neither'),
        ({"prompt": "q", "chosen": "a", "rejected": []}, '"rejected" is neither'),
        ({"prompt": "q", "chosen": "a", "rejected": None}, '"rejected" is neither'),
        ({"prompt": "q", "chosen": "a", "rejected": [{"role": "user"}]}, '"rejected" is neither'),
        ({"prompt": "q", "chosen": "a", "rejected": [BAD]}, "both text or both messages"),
        ({"prompt": "x", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "don't begin with"),
        ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER]}, "ends with its prompt"),
        ({"chosen": "a", "rejected": "b", "margin": "big"}, "\"margin\" is 'big'"),
        ({"chosen": "a", "rejected": "b", "margin": True}, '"margin" is True'),
        ({"chosen": "a", "rejected": "b", "margin": math.nan}, '"margin" is nan'),
    ],
)
def test_a_bad_pair_is_refused_with_its_line_and_what_is_wrong(row, fault, tmp_path):
    path = tmp_path / "pairs.jsonl"
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    path.write_text("\n".join(map(json.dumps, [good, row])))
    with pytest.raises(InputError, match=f"pairs.jsonl, line 2: .*{fault}.*each line must be") as e:
        read_pairs(str(path))
    assert "\n" not in str(e.value)


def with_pairs(job: Callable, tmp_path: Path, rows: list[dict], **flags: object) -> list[dict]:
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return job(pairs=tmp_path / "own.jsonl", **flags)


def test_equal_and_long_pairs_are_left_out_and_counted(job, tmp_path, capsys):
    rows = rows_of(20)
    rows[3]["rejected"] = rows[3]["chosen"]
    for number, key in ((5, "chosen"), (6, "rejected")):
        rows[number][key] = "a" * 30
    with_pairs(job, tmp_path, rows, max_length=20, eval_pairs=tmp_path / "pairs.jsonl")
    out = capsys.readouterr().out
    assert "1 of the 20 pairs to train on are left out: both texts are the same." in out
    assert "2 of the 20 pairs to train on are left out: longer than 20 tokens." in out
    assert "17 pairs to train on, 80 held out" in out


def test_where_no_pair_is_left_or_the_limit_is_beyond_the_context_one_line_says_so(job, tmp_path):
    same = [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 12
    with pytest.raises(InputError, match="no pair is left to train on"):
        with_pairs(job, tmp_path, same)
    with pytest.raises(InputError, match="--max_length 65: the model takes 64 tokens"):
        job(max_length=65)
    assert job(max_length=64)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": "gpt2"}, "no such folder"),
        ({"pairs": "nowhere.jsonl"}, "--pairs nowhere.jsonl: can't be read"),
        ({"eval_split": "test"}, "is one file, and has no splits; --eval_pairs takes another"),
        ({"subset": "main"}, "is one file, and has no subsets"),
        ({"label_noise": 1.5}, "--label_noise 1.5: must be between 0 and 1"),
        ({"label_noise": 0.2}, "--label_noise 0.2: is about the pairs that tiny makes"),
        ({"num_pairs": 20}, "--num_pairs 20: is about the pairs that tiny makes"),
        ({"num_pairs": 0}, "--num_pairs 0: must be greater than 0"),
        ({"center_rewards_coef": -1}, "--center_rewards_coef -1.0: must be 0 or greater"),
    ],
)
def test_bad_flags_are_refused_in_a_line(flags, message, job):
    with pytest.raises(InputError, match=message) as error:
        job(**flags)
    assert "\n" not in str(error.value)


def test_only_the_embedded_model_makes_its_own_pairs(tmp_path):
    save_model(tmp_path / "small", small_llama(vocab_size=20), letter_tokenizer())
    with pytest.raises(InputError, match="--pairs: is needed for --model"):
        reward_model.main(["--model", str(tmp_path / "small"), "--output_dir", str(tmp_path / "r")])
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("flag", ["eval_pairs", "eval_split", "subset"])
def test_what_has_no_effect_without_pairs_is_refused(flag, tmp_path):
    with pytest.raises(InputError, match=f"--{flag} x: needs --pairs"):
        reward_model.main([f"--{flag}", "x", "--output_dir", str(tmp_path / "r")])


@pytest.mark.parametrize("held_out", [False, True])
def test_a_vocabulary_that_is_not_the_models_is_refused(held_out, job, tmp_path):
    save_model(tmp_path / "odd", small_llama(vocab_size=12), letter_tokenizer())
    flags = {"model": tmp_path / "odd"}
    if held_out:  # "z" is the largest id, and only in the held-out pairs
        (tmp_path / "z.jsonl").write_text('{"chosen": "z", "rejected": "a"}')
        (tmp_path / "few.jsonl").write_text('{"chosen": "b", "rejected": "a"}')
        flags |= {"pairs": tmp_path / "few.jsonl", "eval_pairs": tmp_path / "z.jsonl"}
    with pytest.raises(InputError, match="they don't belong together"):
        job(**flags)


def test_held_out_pairs_share_no_prompt_with_the_others_or_come_from_where_they_are_said(
    job, tmp_path
):
    rows = [row | {"prompt": f"{row['prompt']} {n}"} for n, row in enumerate(rows_of(60))]
    with_pairs(job, tmp_path, rows)
    held = {
        json.loads(line)["prompt"]
        for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    }
    assert len(held) == 6
    model = load_for_training(str(tmp_path / "small"))
    flags = {"eval_pairs": str(tmp_path / "pairs.jsonl"), "num_eval_pairs": 7}
    pairs = loaded(tmp_path, model, "own.jsonl", **flags)
    assert len(pairs.train) == 60 and len(pairs.heldout) == 7
    expected = [pair_of(row)["chosen"] for row in rows_of(80)[:7]]
    assert [pair["chosen"] for pair in pairs.heldout] == expected


def own_pairs() -> dict[float, list]:
    """The pairs of the embedded model without and with flipped labels: {noise: Pairs}."""
    found = {}
    for noise in (0.0, 0.25):
        config = reward_model.parse_flags(
            reward_model.Config, "",
            ["--device", "cpu", "--num_pairs", "1200", "--label_noise", str(noise)],
        )  # fmt: skip
        torch.manual_seed(0)
        found[noise] = load_pairs(config, TASKS, load_for_training("tiny"), load_tokenizer("tiny"))
    return found


def test_the_embedded_model_prefers_right_sums_and_flips_a_share_of_the_labels():
    answers = {row["prompt"]: row["answer"] for rows in add_prompts() for row in rows}
    made = own_pairs()
    for noise, pairs in made.items():
        assert len(pairs.train) == 1200 and len(pairs.heldout) == 512
        for part, share in ((pairs.train, noise), (pairs.heldout, 0.0)):
            right = [(p["chosen"] == answers[p["prompt"]]) for p in part]
            wrong = [(p["rejected"] == answers[p["prompt"]]) for p in part]
            assert all(a != b for a, b in zip(right, wrong))
            assert sum(wrong) / len(part) == pytest.approx(share, abs=0.04)
    train, heldout = ({p["prompt"] for p in part} for part in (pairs.train, pairs.heldout))
    assert not train & heldout and len(train) > 400
    clean, noisy = (made[noise].train for noise in (0.0, 0.25))
    for a, b in zip(clean, noisy):
        assert {a["chosen"], a["rejected"]} == {b["chosen"], b["rejected"]}


# --- Runs ---


def test_a_run_learns_the_preference_and_writes_what_the_others_write(job, tmp_path, capsys):
    metrics = job(num_steps=40, learning_rate=5e-3)
    assert metrics[-1]["eval/accuracy"] > 0.9 > metrics[0]["eval/accuracy"]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "samples.jsonl", "model", "checkpoint"}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["script"] == "reward_model"
    assert "72 pairs to train on, 8 held out" in capsys.readouterr().out


def test_the_metrics_of_a_step_are_those_recomputed_from_the_weights_before_it(job, tmp_path):
    """At step 2, with the weights that a run stopped after two of three steps leaves."""
    flags = {"center_rewards_coef": 0.3, "num_steps": 3, "eval_every": 2}
    metrics = job(**flags)
    real, calls = reward_model.preference_loss, []

    def fails_in_step_2(*args):
        calls.append(1)
        if len(calls) > 2:
            raise Fault("broken")
        return real(*args)

    reward_model.preference_loss = fails_in_step_2
    try:
        with pytest.raises(Fault):
            job(**flags, output_dir=tmp_path / "two")
    finally:
        reward_model.preference_loss = real
    model = load_for_training(str(tmp_path / "two" / "model")).eval()
    pairs = loaded(tmp_path, model)
    batch = prompt_batch(pairs.train, 2, 8, 0)

    def scores(rows: list[dict]) -> torch.Tensor:
        ids = [
            [torch.tensor([row[f"{key}_ids"]]) for row in rows] for key in ("chosen", "rejected")
        ]
        found = [[sequence_scores(model, i, torch.ones_like(i)) for i in part] for part in ids]
        return torch.tensor(found).double()

    with torch.no_grad():
        (a, b), (c, d) = scores(batch), scores(pairs.heldout)
    assert (a - b).abs().min() > 1e-4, "the model is not at its start"
    step = metrics[2]
    loss = torch.log1p(torch.exp(b - a)) + 0.3 * (a + b) ** 2
    expected = {
        "loss/pairs": loss.mean(), "reward/accuracy": (a > b).double().mean(),
        "reward/margin": (a - b).mean(), "reward/mean": (a + b).mean() / 2,
        "eval/loss": torch.log1p(torch.exp(d - c)).mean(), "eval/margin": (c - d).mean(),
        "eval/accuracy": (c > d).double().mean(), "eval/score_mean": (c + d).mean() / 2,
        "eval/score_std": torch.cat([c, d]).std(), "lr": 1e-2 / 3, "episode": 24,
    }  # fmt: skip
    for name, value in expected.items():
        assert step[name] == pytest.approx(float(value), abs=1e-5), name


def loaded(tmp_path: Path, model: torch.nn.Module, name: str = "pairs.jsonl", **flags: object):
    """The pairs of the job, with their tokens."""
    options = {"num_steps": 1, "learning_rate": 1.0, "eval_every": 1, "pairs_per_step": 2}
    options |= {"model": "x", "pairs": str(tmp_path / name), "num_pairs": None, "label_noise": None}
    config = reward_model.Config(**options | flags)
    return load_pairs(config, TASKS, model, load_tokenizer(str(tmp_path / "small")))


def test_the_size_of_a_micro_batch_changes_nothing(job):
    whole = job(center_rewards_coef=0.2)
    for size in (2, 6, 1):
        for a, b in zip(whole, job(center_rewards_coef=0.2, micro_batch_size=size)):
            for name in (x for x in a if not x.startswith(MEASURED)):
                assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), name


def test_the_gradient_is_that_of_the_mean_over_all_pairs_of_the_step(job, tmp_path, monkeypatch):
    found = []
    real = torch.nn.utils.clip_grad_norm_

    def noted(parameters, most):
        found.append([p.grad.clone() for p in parameters])
        return real(parameters, most)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noted)
    # With a head that is not 0: else nothing but the head has a gradient.
    model = load_for_training(str(tmp_path / "small"))
    torch.nn.init.normal_(model.score.weight)
    save_model(tmp_path / "judge", model, letter_tokenizer())
    flags = {"micro_batch_size": 2, "pairs_per_step": 72, "center_rewards_coef": 0.2}
    job(num_steps=1, model=tmp_path / "judge", **flags)
    model = load_for_training(str(tmp_path / "judge")).eval()
    pairs = loaded(tmp_path, model).train
    chosen, rejected, _ = pair_scores(model, pairs)
    preference_loss(chosen, rejected, 0.0, 0.2).mean().backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for ours, theirs in zip(found[0], expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert min(g.abs().max() for g in expected) > 1e-4


def test_the_margin_of_the_data_reaches_the_loss(job, tmp_path):
    rows = [row | {"margin": 1.5} for row in rows_of(40)]
    first = with_pairs(job, tmp_path, rows, num_steps=1)[0]
    assert first["loss/pairs"] == pytest.approx(math.log1p(math.exp(1.5)), abs=1e-5)


def test_centring_holds_the_mean_score_near_0(job):
    free, held = job(num_steps=30), job(num_steps=30, center_rewards_coef=0.5)
    mean = [abs(m[-1]["eval/score_mean"]) / m[-1]["eval/score_std"] for m in (free, held)]
    assert mean[1] < mean[0]


def test_dropout_is_off_unless_it_is_asked_for(job, tmp_path):
    off, on = job(num_steps=4), job(num_steps=4, disable_dropout="false")
    assert of_the_model(off) != of_the_model(on)
    again = job(num_steps=4, disable_dropout="false")
    assert of_the_model(on) == of_the_model(again), "a seeded run is the same again"


def test_an_evaluation_is_without_dropout_in_any_case(tmp_path):
    save_model(tmp_path / "m", small_llama(0.5, vocab_size=20), letter_tokenizer())
    model = load_for_training(str(tmp_path / "m")).train()
    torch.nn.init.normal_(model.score.weight)
    pairs = [{"chosen_ids": [1, 2, 3], "rejected_ids": [4, 5]}]
    first, second = (evaluate_pairs(model, pairs, False, 2)[2] for _ in range(2))
    assert torch.equal(first, second) and model.training
    assert not torch.equal(pair_scores(model, pairs)[0], pair_scores(model, pairs)[0])


@pytest.mark.parametrize("bf16", [False, True])
def test_the_forward_pass_is_under_autocast_where_it_is_asked_for(bf16, tmp_path, monkeypatch):
    save_model(tmp_path / "m", small_llama(vocab_size=20), letter_tokenizer())
    under, real = [], plumbing.pairs.sequence_scores

    def noted(*args):
        under.append(torch.is_autocast_enabled("cpu"))
        return real(*args)

    monkeypatch.setattr(plumbing.pairs, "sequence_scores", noted)
    pairs = [{"chosen_ids": [1, 2, 3], "rejected_ids": [4, 5]}]
    pair_scores(load_for_training(str(tmp_path / "m")), pairs, bf16)
    assert under == [bf16]


def test_an_evaluation_keeps_no_graph(tmp_path, monkeypatch):
    save_model(tmp_path / "m", small_llama(vocab_size=20), letter_tokenizer())
    needs_grad, real = [], plumbing.pairs.sequence_scores

    def noted(*args):
        scores = real(*args)
        needs_grad.append(scores.requires_grad)
        return scores

    monkeypatch.setattr(plumbing.pairs, "sequence_scores", noted)
    model = load_for_training(str(tmp_path / "m"))
    pairs = [{"chosen_ids": [1, 2, 3], "rejected_ids": [4, 5]}]
    evaluate_pairs(model, pairs, False, 2)
    pair_scores(model, pairs)
    assert needs_grad == [False, True]


@pytest.mark.parametrize(("size", "most"), [(4, 4), (5, 4), (1, 2), (64, 16)])
def test_a_forward_pass_has_no_more_rows_than_a_micro_batch_and_a_pair_stays_whole(
    size, most, job, monkeypatch
):
    rows, real = [], plumbing.pairs.sequence_scores

    def noted(model, tokens, mask):
        rows.append(len(tokens))
        return real(model, tokens, mask)

    monkeypatch.setattr(plumbing.pairs, "sequence_scores", noted)
    job(num_steps=1, micro_batch_size=size)  # 8 pairs a step, and 8 held out
    assert max(rows) == most and sum(rows) == 3 * 16


def test_an_interrupted_run_that_is_resumed_equals_one_that_was_not(job, tmp_path):
    whole = job(num_steps=6, save_every=3)
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    samples = (tmp_path / "run" / "samples.jsonl").read_bytes()
    real, calls = reward_model.preference_loss, []

    def fails_in_step_4(*args):
        calls.append(1)
        if len(calls) > 4:
            raise Fault("broken")
        return real(*args)

    reward_model.preference_loss = fails_in_step_4
    try:
        with pytest.raises(Fault, match=r"step 4: broken; .*is saved up to step 4"):
            job(num_steps=6, save_every=3)
    finally:
        reward_model.preference_loss = real
    metrics = job(num_steps=6, save_every=3, resume="true")
    assert of_the_model(metrics) == of_the_model(whole)
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    assert (tmp_path / "run" / "samples.jsonl").read_bytes() == samples


def test_a_run_that_is_done_can_be_resumed_and_is_evaluated_once_more(job):
    whole = job()
    assert of_the_model(job(resume="true")) == of_the_model(whole)


def test_another_setting_is_not_resumed(job):
    job()
    with pytest.raises(InputError, match=r"--center_rewards_coef 0.5: the run in"):
        job(resume="true", center_rewards_coef=0.5)


def test_without_num_steps_a_run_is_one_pass_over_the_pairs(job, tmp_path):
    args = [
        "--model", str(tmp_path / "small"), "--pairs", str(tmp_path / "pairs.jsonl"),
        "--pairs_per_step", "10", "--output_dir", str(tmp_path / "pass"), "--device", "cpu",
    ]  # fmt: skip
    reward_model.main(args)
    lines = (tmp_path / "pass" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [m["step"] for m in steps] == [*range(8), 8] and steps[7]["episode"] == 80


def test_the_best_evaluation_is_what_is_saved(job, tmp_path):
    metrics = job(num_steps=12, eval_every=1, learning_rate=0.1, save_best="true")
    best = max(m["eval/accuracy"] for m in metrics)
    model = RewardModel(str(tmp_path / "run" / "model"), torch.device("cpu"))
    rows = [json.loads(x) for x in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] == 12]
    a, b = (model([r["prompt"] for r in rows], [r[k] for r in rows]) for k in
            ("chosen", "rejected"))  # fmt: skip
    assert sum(x > y for x, y in zip(a, b)) / len(rows) == pytest.approx(best)
    assert metrics[-1]["eval/accuracy"] < best, "else the last one would do as well"


CHANGES = {  # flag: (another value, what else is set in both runs)
    "seed": (1, {}), "num_steps": (4, {}), "pairs_per_step": (4, {}), "eval_every": (1, {}),
    "learning_rate": (3e-2, {}), "warmup_steps": (4, {}), "disable_dropout": ("false", {}),
    "lora_r": (2, {}), "merge_adapter": ("false", {"lora_r": 2}), "bf16": ("true", {}),
    "center_rewards_coef": (0.5, {}), "max_length": (8, {}), "num_eval_pairs": (3, {}),
    "eval_pairs": ("pairs.jsonl", {}), "max_grad_norm": (1e-3, {"optimizer": "SGD"}),
    "save_best": ("true", {"learning_rate": 0.1, "eval_every": 1, "num_steps": 6}),
}  # fmt: skip
SAME = """model pairs eval_split subset split num_pairs label_noise output_dir overwrite resume
save_every device micro_batch_size gradient_checkpointing compile tensorboard wandb""".split()


def test_every_flag_is_changed_here_or_tested_elsewhere():
    flags = {field.name for field in dataclasses.fields(reward_model.Config)}
    assert flags == CHANGES.keys() | set(SAME) and not CHANGES.keys() & set(SAME)


@pytest.mark.parametrize("flag", CHANGES)
def test_another_value_leaves_another_run_behind(flag, job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value, others = CHANGES[flag]
    if others.get("optimizer"):  # Adam makes its steps as long for a scaled gradient
        others = {}
        make = lambda parameters, lr, **_: torch.optim.SGD(parameters, lr=lr)  # noqa: E731
        monkeypatch.setattr(torch.optim, "AdamW", make)
    found = []
    for changes in ({}, {}, {flag: value}):
        metrics = of_the_model(job(**(others | changes)))
        names = sorted(str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*"))
        weights = sorted((tmp_path / "run" / "model").glob("*.safetensors"))
        found.append((metrics, names, [w.read_bytes() for w in weights]))
    assert found[0] == found[1] != found[2]


def test_gradient_checkpointing_changes_no_number(job):
    plain, saved = job(), job(gradient_checkpointing="true")
    for a, b in zip(plain, saved):
        for name in (x for x in a if not x.startswith(MEASURED)):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name


# --- Evaluation ---


def test_the_reliability_curve_says_how_often_the_model_is_right_when_it_says_so():
    said = torch.tensor([0.55, 0.55, 0.55, 0.95, 0.95, 0.95, 0.95], dtype=torch.float64)
    sign = torch.tensor([1, -1, -1, 1, 1, 1, -1])
    curve, error = reliability(sign * torch.log(said / (1 - said)))
    expected = [(0.55, 1 / 3, 3), (0.95, 3 / 4, 4)]
    assert [(c["confidence"], c["accuracy"], c["pairs"]) for c in curve] == [
        pytest.approx(x) for x in expected
    ]
    assert error == pytest.approx(3 / 7 * (0.55 - 1 / 3) + 4 / 7 * 0.2)
    curve, error = reliability(torch.zeros(4))
    assert curve == [{"confidence": 0.5, "accuracy": 0.5, "pairs": 4}] and error == 0
    assert reliability(torch.tensor([50.0]))[0] == [{"confidence": 1, "accuracy": 1, "pairs": 1}]


def test_evaluation_counts_ties_as_half_and_shows_what_length_alone_would_say(tmp_path):
    save_model(tmp_path / "m", small_llama(vocab_size=20), letter_tokenizer())
    model = load_for_training(str(tmp_path / "m")).train()
    pairs = [{"chosen_ids": [1] * a, "rejected_ids": [2] * b} for a, b in ((3, 1), (1, 2), (2, 2))]
    metrics, _, _ = evaluate_pairs(model, pairs, bf16=False, max_rows=4)
    assert metrics["eval/accuracy"] == 0.5 and metrics["eval/longer_is_better"] == 0.5
    assert metrics["eval/length_correlation"] == 0 and model.training
    torch.nn.init.normal_(model.score.weight)
    metrics, _, scores = evaluate_pairs(model, pairs, bf16=False, max_rows=4)
    alone = [evaluate_pairs(model, [pair], False, 1)[2] for pair in pairs]
    assert torch.allclose(scores, torch.cat(alone, dim=1), atol=1e-5)
    s, n = scores[0] - scores[1], torch.tensor([2.0, -1, 0]).double()
    expected = (s * n).sum() / ((s**2).sum() * (n**2).sum()).sqrt()
    assert metrics["eval/length_correlation"] == pytest.approx(expected.item())
    pairs = [{"chosen_ids": [1] * 3, "rejected_ids": [2]}] * 3 + pairs[1:2]
    assert evaluate_pairs(model, pairs, False, 8)[0]["eval/longer_is_better"] == 0.75


def test_a_ruler_is_found_out_whatever_the_lengths_of_the_prompts():
    """The score is the length of the completion: the two correlate by 1 within the pairs."""
    longer = torch.tensor([3.0, -2.0, 1.0, 0.0])
    assert length_correlation(longer * 0.1, longer) == pytest.approx(1)
    assert length_correlation(-longer, longer) == pytest.approx(-1)
    assert length_correlation(torch.zeros(4), longer) == 0 == length_correlation(longer, 0 * longer)


def test_scores_that_are_not_finite_end_the_run_with_one_line(job, tmp_path):
    model = load_for_training(str(tmp_path / "small"))
    model.score.weight.data.fill_(torch.nan)
    save_model(tmp_path / "nan", model, letter_tokenizer())
    with pytest.raises((Fault, InputError), match=r"not finite|depends on its padding"):
        job(model=tmp_path / "nan")
    pairs = [{"chosen_ids": [1], "rejected_ids": [2]}]
    with pytest.raises(Fault, match="are not finite: lower --learning_rate"):
        evaluate_pairs(model, pairs, bf16=False, max_rows=2)


FINE = {
    "reward/mean": 0.0,
    "reward/accuracy": 0.7,
    "eval/loss": 0.5,
    "eval/length_correlation": 0.1,
}


@pytest.mark.parametrize(
    ("history", "names"),
    [
        ([FINE] * 30, []),
        ([FINE, FINE | {"eval/loss": 0.61}], ["overfitting"]),
        ([FINE, FINE | {"eval/loss": 0.59}], []),
        ([FINE, {"eval/loss": 0.61, "eval/length_correlation": 0.0}], ["overfitting"]),
        ([FINE | {"reward/mean": -11.0}], ["far scores"]),
        ([FINE | {"eval/length_correlation": -0.8}], ["length"]),
        ([FINE | {"reward/accuracy": 0.45}] * 20, ["worse than chance"]),
        ([FINE | {"reward/accuracy": 0.45}] * 19, []),
    ],
)
def test_a_run_warns_of_what_goes_wrong(history, names):
    assert [name for name, _ in pair_warnings(history)] == names


# --- The embedded example ---


@pytest.mark.slow
def test_the_commands_of_the_header_learn(tmp_path):
    """In short: 60 steps, and 15 of PPO with the verifier only watching."""
    import ppo

    flags = ["--num_pairs", "3840", "--num_steps", "60", "--eval_every", "60"]
    flags += ["--num_eval_pairs", "256"]
    reward_model.main([*flags, "--output_dir", str(tmp_path / "judge"), "--device", "cpu"])
    lines = (tmp_path / "judge" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["eval/accuracy"] > 0.8
    judge = str(tmp_path / "judge" / "model")
    flags = ["--reward_model", judge, "--num_steps", "15", "--num_eval_prompts", "128"]
    flags += ["--eval_every", "15"]
    ppo.main([*flags, "--output_dir", str(tmp_path / "ppo"), "--device", "cpu"])
    lines = (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    assert last["eval/accuracy"] > first["eval/accuracy"] + 0.15
    assert last["eval/accuracy_greedy"] > first["eval/accuracy_greedy"] + 0.15
    assert last["eval/reward"] != last["eval/accuracy"]
