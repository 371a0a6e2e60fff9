"""Pairs of completions as they are read, and reward models as they score: in the RL scripts too."""

import json
import math
from pathlib import Path

import pytest
import torch
from small import letter_tokenizer, reward_model_job, rows_of, save_model, small_gpt2, small_llama
from tokenizers import processors
from transformers import AutoModelForSequenceClassification, GPT2Config, T5Config, XLNetConfig

import grpo
import reward_model
from plumbing import preferences
from plumbing.errors import InputError
from plumbing.preferences import RewardModel, pair_of, read_pairs, text_ids

CPU = torch.device("cpu")


@pytest.fixture
def job(tmp_path):
    return reward_model_job(tmp_path)


def lines_of(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


USER, GOOD, BAD, SYSTEM = (
    {"role": role, "content": text}
    for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"), ("system", "s"))
)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("q", "a", "b"), ("q", "a", "b")),
        (("q", "a", ""), ("q", "a", "")),
        ((None, "qa", "qb"), ("q", "a", "b")),
        ((None, "qab", "qa"), ("qa", "b", "")),
        (([USER], [GOOD], [BAD]), ([USER], [GOOD], [BAD])),
        (([USER], "a", "b"), ([USER], [GOOD], [BAD])),
        (("q", [GOOD], [BAD]), ([USER], [GOOD], [BAD])),
        ((None, [USER, GOOD], [USER, BAD]), ([USER], [GOOD], [BAD])),
        ((None, [USER, GOOD, USER, GOOD], [USER, BAD, USER, BAD]),
         ([USER], [GOOD, USER, GOOD], [BAD, USER, BAD])),
        (("q ", [USER, GOOD], [USER, BAD]), ([USER], [GOOD], [BAD])),
        (("q", [SYSTEM, USER, GOOD], [SYSTEM, USER, BAD]), ([SYSTEM, USER], [GOOD], [BAD])),
        (([USER], [USER | {"name": None}, GOOD], [USER, BAD]), ([USER], [GOOD], [BAD])),
    ],
)  # fmt: skip
def test_each_format_of_trl_is_read(row, expected):
    names = ("prompt", "chosen", "rejected")
    row = {key: value for key, value in zip(names, row) if value is not None}
    expected = dict(zip(names, expected))
    found, with_margin = pair_of(row), pair_of(row | {"margin": 2, "more": 1})
    found.pop("texts", None), with_margin.pop("texts", None)  # as they came
    assert found == expected | {"margin": 0.0} and with_margin == expected | {"margin": 2.0}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([1], "not an object"),
        ({"prompt": "q", "chosen": "a"}, 'no key "rejected"'),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, '"prompt" is neither'),
        ({"chosen": "a", "rejected": ""}, '"rejected" is neither'),
        ({"prompt": "q", "chosen": "a", "rejected": [{"role": "user"}]}, "has no text as .content"),
        ({"prompt": "q", "chosen": "a", "rejected": [BAD]}, "both text or both messages"),
        ({"prompt": "x", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "don't begin with"),
        ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER]}, "end with the assistant's"),
        ({"chosen": "a", "rejected": "b", "margin": True}, '"margin" is True'),
        ({"chosen": "a", "rejected": "b", "margin": math.nan}, '"margin" is nan'),
    ],
)
def test_a_bad_pair_is_refused_with_its_line_and_what_is_wrong(row, fault, tmp_path):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    path = lines_of(tmp_path / "pairs.jsonl", [good, row])
    with pytest.raises(InputError, match=f"pairs.jsonl, line 2: .*{fault}.*each line must be"):
        read_pairs(str(path))


def test_equal_and_long_pairs_are_left_out_and_counted(job, tmp_path, capsys):
    rows = rows_of(20)
    rows[3]["rejected"] = rows[3]["chosen"]
    for number, key in ((5, "chosen"), (6, "rejected")):
        rows[number][key] = "a" * 30
    own = lines_of(tmp_path / "own.jsonl", rows)
    job(pairs=own, max_length=20, eval_pairs=tmp_path / "pairs.jsonl", num_eval_pairs=9)
    out = capsys.readouterr().out
    assert "1 of the 20 pairs to train on are left out: both texts are the same." in out
    assert "2 of the 20 pairs to train on are left out: longer than 20 tokens." in out
    assert "17 pairs to train on, 9 held out" in out


def test_held_out_pairs_share_no_prompt_with_the_others_or_are_those_that_are_named(
    job, tmp_path, monkeypatch
):
    made, load_pairs = [], reward_model.load_pairs
    monkeypatch.setattr(
        reward_model, "load_pairs", lambda *args: made.append(load_pairs(*args)) or made[-1]
    )
    rows = [row | {"prompt": "abcdehno"[n % 8] * (n // 8 + 1)} for n, row in enumerate(rows_of(60))]
    own = lines_of(tmp_path / "own.jsonl", rows + rows[:30])
    job(pairs=own, num_steps=1)
    job(pairs=own, num_steps=1, eval_pairs=tmp_path / "pairs.jsonl", num_eval_pairs=7)
    # Of pairs without a prompt many have the same beginning, or none: they are not one pair.
    starts = ["x" * (n // 2) if n % 2 else "" for n in range(60)]
    texts = [{"chosen": f"{x}a{'o' * n}", "rejected": f"{x}b"} for n, x in enumerate(starts)]
    job(pairs=lines_of(tmp_path / "texts.jsonl", texts), num_steps=1)
    assert len(made[2].heldout) == 6
    train, heldout = ({p["prompt"] for p in part} for part in (made[0].train, made[0].heldout))
    assert heldout and not train & heldout and len(made[1].train) == 90
    assert [p["chosen"] for p in made[1].heldout] == [row["chosen"] for row in rows_of(80)[:7]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pairs": "same.jsonl"}, "no pair is left to train on"),
        ({"pairs": "nowhere.jsonl"}, "--pairs nowhere.jsonl: can't be read"),
        ({"max_length": 65}, "--max_length 65: the model takes 64 tokens"),
        ({"center_rewards_coef": -1}, "--center_rewards_coef -1.0: must be 0 or greater"),
        ({"model": "odd"}, "they don't belong together"),
        ({"eval_pairs": "odd.jsonl"}, "--eval_pairs: 'c.*' can't be tokenised .*; leave it out"),
        # z is the largest id, and only in the held-out pairs.
        ({"model": "odd", "pairs": "b.jsonl", "eval_pairs": "z.jsonl"}, "don't belong together"),
    ],
)
def test_what_can_not_be_trained_on_is_refused_in_a_line(
    flags, message, job, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "odd", small_llama(vocab_size=12), letter_tokenizer())
    for name, text in (("same", "a"), ("b", "b"), ("z", "z"), ("odd", "\ud800")):
        lines_of(Path(f"{name}.jsonl"), [{"prompt": "c", "chosen": text, "rejected": "a"}] * 12)
    with pytest.raises(InputError, match=message) as error:
        job(**flags)
    assert "\n" not in str(error.value)


def judge(folder: Path, causal: torch.nn.Module, ends_with_eos: bool | None = False) -> str:
    """A reward model with a random head, whose pad is EOS, as on most checkpoints."""
    tokenizer = letter_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    save_model(folder, causal, tokenizer)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.config.pad_token_id = tokenizer.eos_token_id
    if ends_with_eos is not None:
        model.config.ends_with_eos = ends_with_eos
    return save_model(folder, model, tokenizer)


def score_by_hand(folder: str, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = torch.tensor([letter_tokenizer()(text).input_ids])
    return model.score(model.base_model(ids).last_hidden_state[0, -1]).item()


@pytest.mark.parametrize("kind", [small_gpt2, small_llama])
def test_a_score_is_that_of_the_text_alone_up_to_its_last_token_even_if_that_is_eos(kind, tmp_path):
    model = RewardModel(folder := judge(tmp_path / "judge", kind(vocab_size=20)), CPU)
    prompts, completions = ["a", "a", "", "ca", "e"], ["b", "b<eos>", "cadbe", "dbe<eos>", ""]
    expected = [score_by_hand(folder, p + c) for p, c in zip(prompts, completions)]
    assert model(prompts, completions) == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == 5
    assert len(model(["a" * 60], ["bcde"])) == 1
    with pytest.raises(InputError, match=r"takes 64 tokens, .* has 65 of them: begin anew"):
        model(["a" * 60], ["bcdeb"])


@pytest.mark.parametrize("hint", [None, True])
def test_a_causal_reward_model_reads_text_with_one_eos_at_its_end_unless_its_config_says_no(
    hint, tmp_path, capsys
):
    model = RewardModel(folder := judge(tmp_path / "judge", small_llama(vocab_size=20), hint), CPU)
    expected = [score_by_hand(folder, text + "<eos>") for text in ("ab", "ab", "e")]
    assert model(["a", "a", "e"], ["b", "b<eos>", ""]) == pytest.approx(expected, abs=1e-5)
    model.check_prompts(["a"], 4)
    assert ("TRL and OpenRLHF train so" in (out := capsys.readouterr().out)) == (hint is None)
    assert "as 'a<eos>'" in out


@pytest.mark.parametrize(
    ("prompts", "template", "fault"),
    [
        (["a", "ab" * 30], None, "takes 64 tokens, and a prompt .* has 65 of them: begin anew"),
        (["a", "a<new>"], None, "gives id 20, and the model knows 20 tokens"),
        (["a", "\ud800"], None, "can't be tokenised"),
        ([[USER], [SYSTEM]], "{{ raise_exception('no ' + messages[0].role) }}", "Error: no user"),
        ([[USER] * 2], "{% for m in messages %}{{ m.content * 15 }}{% endfor %}" * 2, "has 65 of"),
    ],
)
def test_prompts_that_a_reward_model_can_not_read_are_refused_before_the_first_step(
    prompts, template, fault, tmp_path
):
    tokenizer = letter_tokenizer()
    tokenizer.add_tokens("<new>")
    tokenizer.chat_template = template
    model = RewardModel(judge(tmp_path / "judge", small_llama(vocab_size=20), True), CPU)
    model.tokenizer = tokenizer
    with pytest.raises(InputError, match=f"^--reward_model .*{fault}") as error:
        model.check_prompts(prompts, 4 if template is None else 5)
    assert "\n" not in str(error.value)


def test_in_bfloat16_the_scores_keep_their_order_and_are_rounded_alone(tmp_path, monkeypatch):
    folder = judge(tmp_path / "judge", small_llama(vocab_size=20))
    texts = ["abcdeabc", "b", "cadbe", "dbe<eos>", "ea", "cc"]
    exact, rounded = (
        RewardModel(folder, CPU, batch_size=2, bf16=bf16)([""] * 6, texts) for bf16 in (False, True)
    )
    error = [abs(x - y) for x, y in zip(exact, rounded, strict=True)]
    assert 0 < max(error) < 0.05 * (max(exact) - min(exact))
    widths, pad = [], preferences.pad_rows
    monkeypatch.setattr(preferences, "pad_rows", lambda *a: widths.append(pad(*a)) or widths[-1])
    assert RewardModel(folder, CPU, batch_size=2)([""] * 6, texts) == exact
    assert [tokens.shape[1] for tokens, _ in widths[-3:]] == [2, 4, 8], "sorted by length"


def test_messages_go_through_the_template_and_get_no_second_bos():
    tokenizer = letter_tokenizer()
    bos = tokenizer.eos_token
    user, answer = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    # Without a template a line break is between them, which this tokenizer takes for a space.
    assert tokenizer.decode(text_ids(tokenizer, user, answer)) == "q a"
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.eos_token_id)]
    )
    tokenizer.chat_template = bos + "{% for m in messages %}x{{ m.content }}z{% endfor %}"
    ids = text_ids(tokenizer, user, answer)
    assert tokenizer.decode(ids) == f"{bos}xqzxaz"
    assert text_ids(tokenizer, [], [*user, *answer]) == ids
    begun = text_ids(tokenizer, [*user, *answer], [BAD])  # a last message that is continued
    assert tokenizer.decode(begun) == f"{bos}xqzxabz"
    assert tokenizer.decode(text_ids(tokenizer, "q", "a")) == f"{bos}qa"


def test_a_run_adds_the_scores_of_a_reward_model_to_other_rewards(make_job, tmp_path):
    folder, own = judge(tmp_path / "judge", small_llama(vocab_size=20)), tmp_path / "reward.py"
    make_job(grpo)(reward=f"{own}:share_of_a", reward_model=folder, reward_weights=[3.0, 0.5])
    records = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    for record in map(json.loads, records):
        text = record["completion"]
        share = (text.count("a") + 1) / (len(text) + 4)
        expected = 3 * share + 0.5 * score_by_hand(folder, record["prompt"] + text)
        assert record["score"] == pytest.approx(expected, abs=1e-4)
    assert len({json.loads(record)["score"] for record in records}) > 2


UNFIT = {
    "xlnet": "can't be used as a reward model.* its padding",
    "t5": "can't be used as a reward model.*ValueError",
    "run/adapter": "is an adapter",
    "two": "has 2 labels, and a reward model has one",
    "causal": r"its checkpoint has no score\.weight",
}


def test_no_reward_model_is_what_reads_padding_has_no_head_or_is_an_adapter(job, tmp_path):
    sizes = {"vocab_size": 20, "d_model": 16, "num_labels": 1}
    t5 = {"num_layers": 1, "num_heads": 2, "d_ff": 16, "d_kv": 8, "decoder_start_token_id": 0}
    configs = {
        "xlnet": XLNetConfig(n_layer=1, n_head=2, d_inner=16, **sizes),
        "t5": T5Config(**t5, **sizes),
        "two": GPT2Config(vocab_size=20, n_embd=32, n_layer=1, n_head=2, num_labels=2),
    }
    models = {k: AutoModelForSequenceClassification.from_config(c) for k, c in configs.items()}
    models["causal"] = small_gpt2(vocab_size=20)
    models["causal"].config.num_labels = 1
    for name, model in models.items():
        save_model(tmp_path / name, model, letter_tokenizer())
    job(lora_r=2, num_steps=1)
    for name, fault in UNFIT.items():
        with pytest.raises(InputError, match=f"--reward_model .*{fault}") as error:
            RewardModel(str(tmp_path / name), CPU)
        assert "\n" not in str(error.value)
        if name in ("xlnet", "t5", "run/adapter"):  # the others can be trained
            with pytest.raises(InputError, match=f"--model .*{fault}"):
                job(model=tmp_path / name)
