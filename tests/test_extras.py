"""Options that are off by default: dynamic sampling, penalties, entropy bonus, stop strings."""

import contextlib
import json

import pytest
import torch
from pretended_cuda import pretended_cuda
from small import byte_tokenizer, make_rollout, save_model, small_gpt2, small_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import grpo
from common import Rollout
from plumbing.data import decode, sampling_options, stop_criteria
from plumbing.decoding import Decoder
from plumbing.errors import InputError
from plumbing.extras import overlong_penalty
from sampling import generate

# --- Dynamic sampling: DAPO (arXiv 2503.14476) eq. 11 ---

REWARD = """
import json

def reward(prompts, completions):
    with open("asked.jsonl", "a") as file:
        file.write(json.dumps([prompts, completions]) + "\\n")
    return [float("a" not in prompt) * (i % 2) for i, prompt in enumerate(prompts)]
"""


@pytest.fixture
def run(make_job, tmp_path, monkeypatch):
    """run(prompts, rounds) -> (groups of step 0, groups that were asked for, metrics), of 4 groups
    of 2. A group is a prompt and its completions; the groups of prompts with an a are flat.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "heldout"}')

    def groups(prompts, completions):
        return list(zip(prompts[::2], zip(completions[::2], completions[1::2])))

    def run(prompts: list[str], rounds: int):
        (tmp_path / "asked.jsonl").write_text("")
        lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        flags = {"prompts": "prompts.jsonl", "eval_prompts": "heldout.jsonl", "num_generations": 2}
        metrics = make_job(grpo)(dynamic_sampling=rounds, reward="reward.py:reward", **flags)[0]
        asked, samples = (
            [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
            for name in ("asked.jsonl", "run/samples.jsonl")
        )
        asked = [groups(*call) for call in asked if "heldout" not in call[0]]
        samples = [sample for sample in samples if sample["split"] == "train"]
        found = groups(*([s[key] for s in samples] for key in ("prompt", "completion")))
        scores = [(p, float("a" not in p) * i) for p, _ in found for i in range(2)]
        assert [(s["prompt"], s["score"]) for s in samples] == scores
        return found, asked, metrics

    return run


def test_flat_groups_are_replaced_in_their_places_until_none_is_left(run):
    prompts = [f"{first}{then}" for first in "abcdeh" for then in ("", "a", "ba", "d", "ee", "abc")]
    before, (first,), metrics = run(prompts, 0)
    assert first == before and "reward/groups_dropped" not in metrics
    assert any("a" in prompt for prompt, _ in before)
    after, (same, *others), metrics = run(prompts, 20)
    assert same == before and metrics["reward/frac_flat_groups"] == 0
    drawn = [group for call in others for group in call]
    for old, new in zip(before, after):
        assert new == old if "a" not in old[0] else new in drawn
    asked = [prompt for prompt, _ in before + drawn]
    assert len(set(asked)) == len(asked), "no prompt twice"
    num_flat = sum("a" in prompt for prompt, _ in before)
    for call in others:  # a group for each one that is still flat
        assert len(call) == num_flat
        num_flat -= sum("a" not in prompt for prompt, _ in call)
    assert num_flat <= 0 and metrics["reward/groups_dropped"] == len(drawn)
    # Prompts, padding and log-probs belong together.
    assert metrics["val/sampler_max_dev"] < 1e-4
    assert run(prompts, 20)[:2] == (after, [same, *others]), "the same in a run that is resumed"


def test_what_is_still_flat_after_the_last_round_or_the_last_prompt_stays(run):
    for num_prompts, rounds, sizes in ((20, 1, [4]), (6, 9, [2])):
        flat = [f"a{'bcdeh'[i % 5]}{'a' * (i // 5)}" for i in range(num_prompts)]
        found, (first, *others), metrics = run(flat, rounds)
        assert found == first and [len(call) for call in others] == sizes
        assert metrics["reward/groups_dropped"] == sum(sizes)


# --- The length penalty, eq. 13 ---


def test_the_length_penalty_is_equation_13_at_every_length(make_job):
    """|y| <= L_max - L_cache: 0; then ((L_max - L_cache) - |y|) / L_cache."""
    rollout = make_rollout([[1]] * 10, [[5] * length for length in range(1, 11)])
    expected = [0, 0, 0, 0, 0, 0, -0.25, -0.5, -0.75, -1]
    assert overlong_penalty(rollout, 4).tolist() == pytest.approx(expected)
    job = make_job(grpo)
    plain, less = job()[0], job(overlong_buffer=6)[0]  # of 6 tokens: every one costs a sixth
    assert less["objective/scores"] == pytest.approx(
        plain["objective/scores"] - plain["length/mean"] / 6, abs=1e-5
    )


# --- Completions that are cut ---


def test_of_completions_that_are_all_cut_nothing_is_trained_even_with_an_entropy_bonus(make_job):
    flags = dict(mask_truncated_completions=True, max_new_tokens=1, entropy_coef=0.1, kl_coef=0)
    metrics = make_job(grpo)(num_mini_batches=4, learning_rate=0.1, **flags)[0]
    assert metrics["length/truncated_frac"] == 1 and metrics["grad_norm"] == 0


# --- Stop strings ---


# Pieces that cross the borders of "</a>" and "x y", EOS last. StopStringCriteria needs "abcdef".
PIECES = ["</", "a", ">", "<", "/a", "a>b", "x", " y", " ", "y", "x y", "bb", "c", "é", *"bdef"]
PIECES += ["<eos>"]
LAST = len(PIECES) - 1
STOP = ["</a>", "x y"]
# The first holds a stop string itself and the last the beginning of one: neither ends anything.
PROMPTS = torch.tensor([[3, 4, 2], [0, 0, 3], [12, 11, 6]])
PROMPT_MASK = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]]).bool()


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(PIECES)}, unk_token="c"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZER = pieces_tokenizer()


def sample(model, stop=STOP, length=12, static=None) -> Rollout:
    options = {"decoder": Decoder(model, static=static)}
    options |= {"num_generations": 20, "temperature": 2.0, "max_new_tokens": length}
    options |= {"eos_token_ids": [LAST], "pad_token_id": 0}
    options |= {"generator": torch.Generator(model.device).manual_seed(1)}
    criteria = stop_criteria(TOKENIZER, stop) if stop else None
    return generate(model, PROMPTS, PROMPT_MASK, stop=criteria, **options)


def first_end(ids: list[int]) -> int | None:
    """By the definition: of the whole text, a token at a time."""
    texts = ["".join(PIECES[i] for i in ids[:n]) for n in range(1, len(ids) + 1)]
    return next((n for n, t in enumerate(texts, 1) if any(s in t for s in STOP)), None)


@pytest.mark.parametrize(
    ("make", "static", "on_device", "length"),
    [
        (small_gpt2, False, False, 12),
        (small_llama, True, False, 12),
        (small_llama, None, True, 17),
    ],
)
def test_a_completion_is_what_it_would_be_up_to_the_token_that_completes_a_stop_string(
    make, static, on_device, length
):
    """Rows are dropped at every eighth token alone on a device: until then they go on drawing."""
    model = make(vocab_size=len(PIECES)).eval()
    plain = sample(model, stop=None, length=length)
    with pretended_cuda() if on_device else contextlib.nullcontext():
        cut = sample(model.to("cuda" if on_device else "cpu"), static=static, length=length)
        cut, stopped = Rollout(*(x.cpu() for x in vars(cut).values())), 0
    for row in range(len(plain.tokens)):
        n = int(plain.completion_mask[row].sum())
        end = first_end(plain.tokens[row, 3:][:n].tolist())
        expected = n if end is None else end
        assert int(cut.completion_mask[row].sum()) == expected
        assert cut.completion_mask[row, :expected].all()
        assert torch.equal(cut.tokens[row, : 3 + expected], plain.tokens[row, : 3 + expected])
        assert (cut.tokens[row, 3 + expected :] == 0).all()
        assert torch.allclose(cut.logprobs[row, :expected], plain.logprobs[row, :expected])
        assert cut.finished[row] == (end is not None or plain.finished[row])
        stopped += end is not None and end < n
    assert 10 < stopped < 60 and cut.finished.sum() > stopped, "some rows end by EOS"
    assert torch.equal(cut.attention_mask[:, 3:], cut.completion_mask)


def test_looking_for_stop_strings_never_waits_for_the_device():
    model, criteria = small_gpt2(vocab_size=len(PIECES)).eval(), stop_criteria(TOKENIZER, STOP)
    options = {"max_new_tokens": 16, "eos_token_ids": [], "pad_token_id": 0}
    with pretended_cuda() as gpu:
        waits, model = [], model.to("cuda")
        for stop in (None, criteria, criteria):  # which itself moves to the device at first
            gpu.waits.clear()
            generate(model, PROMPTS, PROMPT_MASK, stop=stop, **options)
            waits.append(gpu.waits.total())
    assert waits[2] == waits[0], waits


def ends(tokenizer: PreTrainedTokenizerFast, strings: list[str], ids: list[int]) -> list[bool]:
    """Of each of the completion's ids: whether it completes one of the strings."""
    criteria, ids = stop_criteria(tokenizer, strings), torch.tensor([ids])
    return [criteria(ids[:, :n], None).item() for n in range(1, ids.shape[1] + 1)]


def test_a_character_of_several_tokens_is_found_at_its_last_one():
    tokenizer = byte_tokenizer()
    ids = tokenizer("aé!").input_ids
    assert ends(tokenizer, ["é"], ids) == [False, False, True, False]


def test_spaces_and_bytes_of_sentencepiece_are_found():
    """It drops the space at the start of a text; a character may be several tokens of a byte."""
    words = ["<unk>", "▁x", "▁y", "<0xC3>", "<0xA9>", *"▁abcdef", "</s>"]
    tokenizer = Tokenizer(models.Unigram([(x, -1.0) for x in words], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])  # as Llama 2's
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    assert tokenizer.decode([1]) == "x", "as such tokenizers do"
    assert ends(tokenizer, [" x"], [1, 2, 1]) == [True, False, True]
    assert ends(tokenizer, ["é"], [2, 3, 4, 4]) == [False, False, True, False]


def test_the_name_of_a_special_token_is_no_text():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|pad|>"]})
    ids = tokenizer("a<|pad|>|>").input_ids
    assert ends(tokenizer, ["|>"], ids) == [False, False, False, True]


def test_a_stop_string_that_no_token_can_complete_is_refused():
    with pytest.raises(InputError, match=r"--stop \['ü'\]: can't be found with this tokenizer"):
        stop_criteria(TOKENIZER, ["ü"])


def test_the_text_keeps_its_stop_string_and_loses_its_eos():
    rollout = make_rollout([[12]] * 4, [[11, 0, 1, 2], [11, LAST], [11, 12], [0, 5]], eos=LAST)
    rollout.finished[:] = torch.tensor([True, True, False, True])
    assert decode(TOKENIZER, rollout, STOP) == ["bb</a>", "bb", "bbc", "</a>b"]


def test_a_special_token_as_a_stop_string_is_one_more_eos():
    """Its text is skipped in decoding, so that it would never be found."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    model = small_gpt2(vocab_size=258)
    config = grpo.Config(stop=["<|im_end|>", "x"])
    options = sampling_options(config, model, tokenizer)
    assert options["eos_token_ids"][-1] == 257 and options["stop"].stop_strings == ("x",)


def test_the_reward_of_a_run_reads_the_stop_string_that_ended_a_completion(make_job, tmp_path):
    (tmp_path / "ends.py").write_text(
        "def ends(completions):\n    return [float(c.endswith('bb')) for c in completions]\n"
    )
    job, model = make_job(grpo), small_gpt2(vocab_size=len(PIECES))
    flags = {"model": save_model(tmp_path / "pieces", model, TOKENIZER), "stop": "bb"}
    job(reward=f"{tmp_path}/ends.py:ends", temperature=3.0, completions=16, **flags)
    lines = map(json.loads, (job.folder / "samples.jsonl").read_text().splitlines())
    scores = {x["completion"]: x["score"] for x in lines if "bb" in x["completion"]}
    assert scores and all(text.endswith("bb") and scores[text] == 1 for text in scores)
