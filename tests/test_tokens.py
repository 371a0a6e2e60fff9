"""tokens.jsonl. Its numbers are checked by test_ppo_by_hand.py and test_groups_by_hand.py."""

import json
import re
from pathlib import Path

import pytest
import torch
from small import letter_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import grpo
import ppo
import rloo
from plumbing import runs, tokens
from plumbing.tokens import fitting, token_texts

SCRIPTS = {"ppo": ppo, "grpo": grpo, "rloo": rloo}
METRICS = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_has_each_key_of_each_script_once_and_no_other(name, make_job):
    table = METRICS[METRICS.index("## tokens.jsonl") :]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE)
    documented = {key for key, where in rows if where == "all" or name.upper() in where}
    described = set(re.findall(r"`(\w+)`", table[: table.index("| key")]))
    job = make_job(SCRIPTS[name])
    job(record_tokens=True, num_steps=2)
    keys = {key for line in lines_of(job.folder) for key in line}
    assert len(rows) == len(dict(rows)) and documented <= keys and keys <= documented | described


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_changes_nothing_else_of_a_run_even_with_dropout(name, make_job):
    job, found = make_job(SCRIPTS[name]), []
    for on in (True, False):
        metrics = job(record_tokens=on, num_steps=3, eval_every=2, disable_dropout=False)
        kept = [{k: x for k, x in line.items() if not k.startswith(MEASURED)} for line in metrics]
        files = [job.folder / "samples.jsonl", *sorted(job.folder.glob("model/*.safetensors"))]
        found.append((kept, [file.read_bytes() for file in files]))
        assert (job.folder / "tokens.jsonl").exists() == on
    assert found[0] == found[1]


MEASURED = ("time/", "memory/", "tokens_per_second")


def test_the_steps_are_those_of_evaluations_and_samples_and_the_prompts_held_out_the_same(make_job):
    job = make_job(rloo)
    job(record_tokens=True, num_steps=5, eval_every=2, sample_every=3, completions=16)
    lines = lines_of(job.folder)
    steps = {
        split: {x["step"] for x in lines if x["split"] == split} for split in ("heldout", "train")
    }
    assert steps == {"heldout": {0, 2, 4, 5}, "train": {0, 3}}
    prompts = [
        [x["prompt"] for x in lines if x["split"] == "heldout" and x["step"] == s] for s in (0, 4)
    ]
    assert prompts[0] == prompts[1] and len(set(prompts[0])) > 1
    places = [(x["prompt_index"], x["completion_index"]) for x in lines if x["split"] == "train"]
    assert sorted(places[:8]) == [(i // 4, i % 4) for i in range(8)]
    assert places[:3] == [(0, 0), (1, 0), (0, 1)]  # what doesn't fit is the end of each group


def test_held_out_completions_are_drawn_with_the_same_random_numbers_each_time(make_job):
    job = make_job(ppo)
    job(record_tokens=True, num_steps=3, eval_every=1, learning_rate=1e-12)
    lines = [line for line in lines_of(job.folder) if line["split"] == "heldout"]
    drawn = [[x["tokens"] for x in lines if x["step"] == step] for step in range(4)]
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3] and len(drawn[0]) == 6
    assert drawn[0][0] != drawn[0][3], "the two completions of a prompt are one"


def test_held_out_advantages_are_those_of_the_scores_with_the_length_penalty(make_job):
    job = make_job(grpo)
    long = {"max_new_tokens": 30, "temperature": 3.0, "overlong_buffer": 29}
    long |= {"num_generations": 2, "scale_rewards": "none"}
    job(record_tokens=True, num_eval_prompts=8, **long)
    lines = [x for x in lines_of(job.folder) if x["split"] == "heldout" and x["step"] == 0]
    lines.sort(key=lambda line: line["prompt_index"])
    penalties = [(line["num_tokens"] - 1) / 29 for line in lines]
    rewards = torch.tensor([line["score"] - p for line, p in zip(lines, penalties)])
    expected = grpo.group_advantages(rewards, 2, "none").tolist()
    assert [line["advantages"] for line in lines] == pytest.approx(expected, abs=1e-3)
    assert len(lines) == 6 and len(set(penalties)) > 2


def test_to_record_takes_no_graph_and_no_dropout(make_job, monkeypatch):
    seen = []

    def noting(real):
        def noted(model, *args, **options):
            seen.append((torch.is_grad_enabled(), model.training))
            return real(model, *args, **options)

        return noted

    for name in ("completion_logprobs", "completion_values"):
        monkeypatch.setattr(tokens, name, noting(getattr(tokens, name)))
    make_job(ppo)(record_tokens=True, num_steps=2, eval_every=1, disable_dropout=False)
    assert len(seen) > 10 and set(seen) == {(False, False)}


def test_of_long_completions_fewer_prompts_are_recorded(make_job):
    job, found = make_job(grpo), []
    for longest in (6, 40, 55):
        job(record_tokens=True, max_new_tokens=longest)
        lines = lines_of(job.folder)
        found.append({x["prompt_index"] for x in lines if x["split"] == "heldout"})
    assert found == [{0, 1, 2}, {0, 1}, {0}]


def test_the_overlong_penalty_counts_in_the_credit_of_held_out_completions(make_job, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def one(completions):\n    return [1] * len(completions)\n"
    )
    job = make_job(grpo)
    for buffer in (0, 6):
        flags = dict(reward=f"{tmp_path}/reward.py:one", overlong_buffer=buffer, temperature=2)
        job(record_tokens=True, **flags)
        advantages = {x["advantages"] for x in lines_of(job.folder) if x["split"] == "heldout"}
        assert (advantages == {0}) == (buffer == 0)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_rows_that_are_left_out_of_the_update_have_no_ratio(name, make_job, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def flat(prompts, completions):\n"
        "    pairs = zip(prompts, completions)\n"
        "    return [len(p) % 2 * sum(map(ord, c)) % 7 for p, c in pairs]\n"
    )
    job = make_job(SCRIPTS[name])
    reward = f"{tmp_path}/reward.py:flat"
    job(record_tokens=True, kl_coef=0, reward=reward, completions=8, num_epochs=2)
    lines = [line for line in lines_of(job.folder) if line["split"] == "train"]
    for line in lines:
        assert "kl" not in line and "ref_logprobs" not in line
        numbers = line["ratio"] if isinstance(line["ratio"], list) else [line["ratio"]]
        assert (line["advantages"] == 0) == (numbers == [None] * len(numbers)), line
    assert {line["advantages"] == 0 for line in lines} == {True, False}


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_reward_of_none_is_null(name, make_job, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def some(completions):\n    return [None if 'a' in c else len(c) for c in completions]\n"
    )
    job = make_job(SCRIPTS[name])
    job(record_tokens=True, reward=f"{tmp_path}/reward.py:some")
    lines = lines_of(job.folder)
    assert {line["score"] is None for line in lines} == {True, False}
    for line in lines:
        assert (line["score"] is None) == ("a" in line["tokens"])


def test_the_file_keeps_its_bound_and_each_recording_has_a_completion(make_job, monkeypatch):
    job, flags = make_job(ppo), dict(record_tokens=True, num_steps=6, eval_every=1, sample_every=2)
    job(**flags)
    whole = (job.folder / "tokens.jsonl").stat().st_size
    monkeypatch.setattr(tokens, "MOST_BYTES", whole // 4)
    job(**flags)
    assert whole // 12 < (job.folder / "tokens.jsonl").stat().st_size <= whole // 4
    steps = [(x["split"], x["step"]) for x in lines_of(job.folder)]
    assert set(steps) == {("heldout", s) for s in range(7)} | {("train", s) for s in (0, 2, 4)}


def test_a_completion_that_does_not_fit_loses_its_end_and_keeps_its_length():
    record = {"num_tokens": 100, "tokens": ["ab"] * 100, "kl": [0.5] * 100, "advantages": 2.0}
    size = len(json.dumps(record))
    (short,) = fitting([record, record], size // 2)
    assert (
        20 < len(short["tokens"]) == len(short["kl"]) < 50 and len(json.dumps(short)) <= size // 2
    )
    assert short["num_tokens"] == 100 and short["advantages"] == 2.0
    assert fitting([record, record], 2 * size + 2) == [record, record]
    assert fitting([record, record], 2 * size) == [record]
    assert len(record["tokens"]) == 100


def sentencepiece() -> PreTrainedTokenizerFast:
    """Words with a mark for the space in front, and bytes: as in Llama 2."""
    vocab = {"<s>": 0, "▁the": 1, "▁cat": 2, "s": 3, "<0xC3>": 4, "<0xA9>": 5}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<s>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def test_texts_of_tokens_keep_the_space_in_front_and_show_special_tokens():
    assert token_texts(sentencepiece(), [1, 2, 3, 1]) == [" cat", "s", " the"]
    letters = letter_tokenizer()
    ids = letters("abc").input_ids
    assert token_texts(letters, [*ids, letters.eos_token_id]) == ["b", "c", letters.eos_token]


def test_halves_of_a_character_are_shown_as_such_and_none_is_lost():
    texts = token_texts(sentencepiece(), [1, 4, 5, 2])
    assert len(texts) == 3 and "�" in texts[0] and texts[2] == " cat"


def test_a_run_goes_on_without_recording_and_with_it_again(make_job):
    job = make_job(rloo)
    flags = dict(num_steps=4, eval_every=1, sample_every=1, save_every=1, resume="true")
    job(record_tokens=True, **flags | {"num_steps": 1, "resume": "false"})
    args = dict(overwrite="false", **flags)
    job(record_tokens=False, **args | {"num_steps": 2})
    job(record_tokens=True, **args)
    steps = {x["step"] for x in lines_of(job.folder)}
    assert steps == {0, 2, 3, 4}  # step 1 was done without


def test_a_folder_that_is_gone_when_a_file_is_closed_is_no_second_error(tmp_path):
    path = tmp_path / "tokens.jsonl"
    file = path.open("ab")
    path.unlink()
    runs._close(file)
    assert file.closed
