"""Stop strings: where a completion ends, whatever the tokens, the batch and the device."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pretended_cuda import pretended_cuda
from small import byte_tokenizer, make_rollout, save_model, small_gpt2, small_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ppo
from common import Rollout
from plumbing.data import Task
from plumbing.scoring import decode, sampling_options, score
from plumbing.stopping import CONTEXT, StopStrings
from sampling import generate

# Pieces that cross the borders of "</a>" and "x y", EOS last.
PIECES = ["</", "a", ">", "<", "/a", "a>b", "x", " y", " ", "y", "x y", "bb", "c", "é", "<eos>"]
LAST = len(PIECES) - 1
STOP = ["</a>", "x y"]


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(PIECES)}, unk_token="c"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZER = pieces_tokenizer()
PROMPTS = torch.tensor([[3, 4, 2], [0, 0, 3], [12, 11, 6]])
PROMPT_MASK = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]]).bool()


def sample(model, stop=STOP, length=12, **options) -> Rollout:
    generator = torch.Generator().manual_seed(1)
    options = {"num_generations": 20, "temperature": 2.0, "generator": generator} | options
    return generate(
        model, PROMPTS, PROMPT_MASK, max_new_tokens=length, eos_token_ids=[LAST], pad_token_id=0,
        stops=StopStrings(TOKENIZER, stop) if stop else None, **options,
    )  # fmt: skip


def first_end(ids: list[int]) -> int | None:
    """By the definition: of the whole text, a token at a time."""
    texts = ["".join(PIECES[i] for i in ids[:n]) for n in range(1, len(ids) + 1)]
    return next((n for n, t in enumerate(texts, 1) if any(s in t for s in STOP)), None)


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
@pytest.mark.parametrize("static", [False, True])
def test_a_completion_is_what_it_would_be_up_to_the_token_that_completes_a_stop_string(
    make, static
):
    model = make(vocab_size=len(PIECES)).eval()
    plain, cut = sample(model, stop=None), sample(model, static=static)
    stopped = 0
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


def test_a_string_that_does_not_occur_changes_no_bit():
    model = small_gpt2(vocab_size=len(PIECES)).eval()
    plain, found = sample(model, stop=None), sample(model, stop=["no such text"])
    for name in ("tokens", "logprobs", "completion_mask", "finished"):
        assert torch.equal(getattr(plain, name), getattr(found, name))


@pytest.mark.parametrize("length", [7, 8, 9, 17])
def test_on_a_device_that_is_asked_at_every_eighth_token_alone_the_rows_are_the_same(length):
    model = small_llama(vocab_size=len(PIECES)).eval()
    expected = sample(model, length=length)
    with pretended_cuda():
        there = sample(model.to("cuda"), length=length, generator=None)
        lengths = there.completion_mask.sum(1).cpu()
        ids = there.tokens[:, 3:].cpu()
    assert expected.finished.any()
    for row, n in zip(ids.tolist(), lengths.tolist()):
        end = first_end(row[:n])
        assert end in (None, n), "cut at the token that completes it, not at the eighth"


@pytest.mark.parametrize("strings", [["</a>"], ["x", "</a>"]])
@pytest.mark.parametrize("looked_at", [0, 1, 4, 5])
def test_it_is_found_wherever_the_last_look_ended(strings, looked_at):
    ids = [PIECES.index(p) for p in ("c", "bb", "</", "c", "<", "/a", ">", "c", "c")]
    stops = StopStrings(TOKENIZER, strings)
    assert stops.end([], ids, looked_at) == 7
    assert stops.end([], ids[:6], looked_at) is None
    assert stops.end([], [12] * 500 + ids, 500 + looked_at) == 507, "in a long text"


def test_what_the_prompt_holds_ends_nothing_and_completes_nothing():
    stops = StopStrings(TOKENIZER, ["</a>"])
    whole, half = [0, 1, 2], [0, 1]
    assert stops.end(whole, [12, 12], 0) is None
    assert stops.end(half, [2, 12], 0) is None, "half of it is the prompt's"
    assert stops.end(whole * CONTEXT, whole, 0) == 3


def test_a_character_of_several_tokens_is_found_at_its_last_one():
    tokenizer = byte_tokenizer()
    ids = tokenizer("aé!").input_ids  # four bytes
    assert StopStrings(tokenizer, ["é"]).end([], ids, 0) == 3


def test_a_space_that_sentencepiece_drops_at_the_start_of_a_text_is_found():
    vocabulary = [("<unk>", 0.0), ("▁x", -1.0), ("▁y", -1.0), ("</s>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    assert tokenizer.decode([1]) == "x", "as such tokenizers do"
    stops = StopStrings(tokenizer, [" x"])
    assert stops.end([2], [1], 0) == 1
    assert stops.end([], [2] * 40 + [1], 40) == 41


def test_the_text_keeps_its_stop_string_and_loses_its_eos():
    rollout = make_rollout([[12]] * 4, [[11, 0, 1, 2], [11, LAST], [11, 12], [0, 5]], eos=LAST)
    rollout.finished[:] = torch.tensor([True, True, False, True])
    assert decode(TOKENIZER, rollout, STOP) == ["bb</a>", "bb", "bbc", "</a>b"]
    rollout = make_rollout([[12]], [[0, 1, 2]])
    rollout.finished[:] = True
    assert decode(TOKENIZER, rollout, STOP) == ["</a>"]
    task = Task([], [], [lambda completions: [float(len(c)) for c in completions]], [1.0])
    task.stop = STOP
    scores, texts = score(task, [{"prompt": "c"}], rollout, TOKENIZER)
    assert texts == ["</a>"] and scores.tolist() == [4.0], "what the reward reads"


def test_a_special_token_as_a_stop_string_is_one_more_eos():
    """Its text is skipped in decoding, so that it would never be found."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    model = small_gpt2(vocab_size=258)
    config = SimpleNamespace(stop=["<|im_end|>", "x"], max_new_tokens=4, temperature=1.0, seed=0)
    options = sampling_options(config, model, tokenizer)
    assert options["eos_token_ids"][-1] == 257 and options["stops"].strings == ["x"]
    config.stop = ["<|im_end|>"]
    assert sampling_options(config, model, tokenizer)["stops"] is None


def run(folder: Path, *flags: str) -> tuple[list[dict], list[dict]]:
    save_model(folder / "model", small_gpt2(vocab_size=len(PIECES)), TOKENIZER)
    rows = [json.dumps({"prompt": p}) for p in ("c", "a", "y", "bb")]
    (folder / "p.jsonl").write_text("\n".join(rows))
    (folder / "r.py").write_text("def zero(completions): return [0.0 for c in completions]")
    command = (
        f"--model {folder}/model --prompts {folder}/p.jsonl --reward {folder}/r.py:zero --bf16 no"
        f" --num_steps 1 --prompts_per_step 64 --temperature 2 --max_new_tokens 12"
        f" --missing_eos_penalty 1 --overwrite --output_dir {folder}/run"
    )
    ppo.main([*command.split(), *flags])
    files = (folder / "run" / name for name in ("metrics.jsonl", "samples.jsonl"))
    return tuple([json.loads(line) for line in f.read_text().splitlines()] for f in files)


def test_in_a_run_a_stop_string_counts_as_an_end_and_is_trained_on(tmp_path):
    flags = ["--device", "cpu"]
    (plain, *_), _ = run(tmp_path, *flags)
    (metrics, *_), samples = run(tmp_path, *flags, "--stop", *STOP)
    cut = [s["completion"] for s in samples if any(x in s["completion"] for x in STOP)]
    assert cut and metrics["length/mean"] < plain["length/mean"]
    assert metrics["length/truncated_frac"] < plain["length/truncated_frac"]
    # The penalty is for completions that don't end; the rewards are 0.
    assert metrics["objective/scores"] == pytest.approx(-metrics["length/truncated_frac"])
    assert metrics["objective/scores"] > plain["objective/scores"]


def test_a_run_with_stop_strings_on_the_device_equals_one_on_the_cpu_to_the_bit(tmp_path):
    expected, samples = run(tmp_path, "--device", "cpu", "--stop", *STOP)
    with pretended_cuda() as gpu:
        found, there = run(tmp_path, "--device", "cuda", "--stop", *STOP)
    assert gpu.replays > 5 and there == samples
    for name in ("length/mean", "objective/scores", "objective/kl", "grad_norm"):
        assert found[0][name] == expected[0][name]
