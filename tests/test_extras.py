"""Options that are off by default: --oversample, what long and cut completions get, --stop."""

import json

import pytest
import torch
from small import byte_tokenizer, letter_tokenizer, lines_of, make_rollout, small_gpt2

import grpo
import tasks
from common import InputError
from grpo import overlong_penalty
from plumbing.data import decode, sampling_options

# --- Groups that teach something: DAPO (arXiv 2503.14476) eq. 11 ---


@pytest.mark.parametrize(("oversample", "num_flat"), [(1, 3), (5, 1), (9, 0)])
def test_of_the_groups_that_are_drawn_those_that_teach_are_kept_first(
    oversample, num_flat, make_job, tmp_path, monkeypatch
):
    def flat_with_an_a(prompts, completions):
        calls.append(list(zip(prompts, completions)))
        return [float("a" not in prompt) * (i % 2) for i, prompt in enumerate(prompts)]

    calls, prompts = [], [f"{x}{y}" for x in "abcdeh" for y in ("", "a", "ba", "da", "ae", "abc")]
    monkeypatch.setitem(tasks.REWARDS, "mine", flat_with_an_a)
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps({"prompt": x}) for x in prompts))
    job = make_job(grpo)
    flags = {"prompts": tmp_path / "some.jsonl", "reward": "mine", "num_generations": 2}
    metrics = job(oversample=oversample, **flags)[0]
    drawn = calls[2]  # after the two of the evaluation
    groups = [drawn[i : i + 2] for i in range(0, len(drawn), 2)]
    assert len(groups) == 4 * oversample
    kept = sorted(groups, key=lambda group: oversample > 1 and "a" in group[0][0])[:4]
    samples = [x for x in lines_of(job.folder / "samples.jsonl") if x["split"] == "train"]
    found = [(x["prompt"], x["completion"], x["score"]) for x in samples[:8]]
    assert found == [
        (p, text, float("a" not in p) * i) for g in kept for i, (p, text) in enumerate(g)
    ]
    assert metrics["reward/frac_flat_groups"] == num_flat / 4 and metrics["episode"] == 8
    # What is trained on: tokens, prompts, padding and log-probs belong together.
    tokens = ["".join(line["tokens"]) for line in lines_of(job.folder / "tokens.jsonl")[:8]]
    assert [text.removesuffix("<eos>") for text in tokens] == [text for _, text, _ in found]
    assert metrics["val/sampler_kl"] < 1e-6


# --- The length penalty, eq. 13, and completions that are cut ---


def test_the_length_penalty_is_equation_13_at_every_length(make_job):
    """|y| <= L_max - L_cache: 0; then ((L_max - L_cache) - |y|) / L_cache."""
    mask = make_rollout([[1]] * 10, [[5] * n for n in range(1, 11)]).completion_mask
    expected = [0, 0, 0, 0, 0, 0, -0.25, -0.5, -0.75, -1]
    assert overlong_penalty(mask, 4).tolist() == pytest.approx(expected)
    assert overlong_penalty(mask, 0).tolist() == [0] * 10
    job = make_job(grpo)
    plain, less = job()[0], job(overlong_buffer=6)[0]  # of 6 tokens: every one costs a sixth
    assert less["objective/scores"] == pytest.approx(
        plain["objective/scores"] - plain["length/mean"] / 6, abs=1e-5
    )


def test_of_completions_that_are_all_cut_nothing_is_trained_even_with_an_entropy_bonus(make_job):
    flags = dict(mask_truncated_completions=True, max_new_tokens=1, entropy_coef=0.1, kl_coef=0)
    metrics = make_job(grpo)(num_mini_batches=4, learning_rate=0.1, **flags)[0]
    assert metrics["length/truncated_frac"] == 1 and metrics["grad_norm"] == 0


def test_cut_completions_without_a_gradient_take_no_forward_pass_in_the_update(
    make_job, monkeypatch
):
    rows, forward = [], grpo.completion_logprobs

    def noted(model, part, *args, **options):
        rows.append(len(part.finished))
        return forward(model, part, *args, **options)

    monkeypatch.setattr(grpo, "completion_logprobs", noted)
    metrics = make_job(grpo)(mask_truncated_completions=True, kl_coef=0, stop=["w"])[0]
    cut = round(8 * metrics["length/truncated_frac"])
    assert 0 < cut < 8 and metrics["reward/frac_flat_groups"] == 0 and sum(rows) == 8 - cut


def test_with_bfloat16_on_a_cpu_every_layer_takes_plain_attention(make_job, monkeypatch):
    """Also GPT-2's, whose layers get a config of their own for their dropout."""
    found, forward = set(), grpo.completion_logprobs

    def noted(model, *args, **options):
        layers = (module for module in model.modules() if hasattr(module, "config"))
        found.update(layer.config._attn_implementation for layer in layers)
        return forward(model, *args, **options)

    monkeypatch.setattr(grpo, "completion_logprobs", noted)
    make_job(grpo)(bf16=True)
    assert found == {"eager"}


# --- Stop strings ---


def test_a_stop_string_that_is_a_token_is_one_more_eos_and_one_that_no_token_ends_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    options = sampling_options(grpo.Config(stop=["<|im_end|>", "x"]), small_gpt2(), tokenizer)
    assert options["eos_token_ids"][-1] == 257 and options["stop"].stop_strings == ("x",)
    with pytest.raises(InputError, match=r"--stop \['ü'\]: "):
        sampling_options(grpo.Config(stop=["ü"]), small_gpt2(), letter_tokenizer())


def test_a_character_of_several_tokens_is_found_at_its_last_one():
    tokenizer = byte_tokenizer()
    stop = sampling_options(grpo.Config(stop=["é"]), small_gpt2(), tokenizer)["stop"]
    ids = torch.tensor([tokenizer("aé!").input_ids])
    assert [stop(ids[:, :n], None).item() for n in range(1, 5)] == [False, False, True, False]


def test_the_reward_reads_the_stop_string_that_ended_a_completion_and_no_eos(make_job, monkeypatch):
    def texts_of(completions):
        texts.extend(completions)
        return [len(text) for text in completions]

    texts = []
    monkeypatch.setitem(tasks.REWARDS, "mine", texts_of)
    make_job(grpo)(reward="mine", completions=16, stop=["ww", "y"], max_new_tokens=12)
    ends = {text[-2:] if text[-2:] == "ww" else text[-1:] for text in texts}
    assert {"ww", "y"} < ends and not any("<eos>" in text for text in texts)
    assert not any("y" in text[:-1] or "ww" in text[:-1] for text in texts)
    rollout = make_rollout([[1]] * 2, [[1, 2, 19], [2, 5]], eos=19)
    assert decode(letter_tokenizer(), rollout, [19]) == ["ab", "be"]
