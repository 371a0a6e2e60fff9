"""Stop strings: where a completion ends, whatever the tokens, the batch and the device."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from pretended_cuda import pretended_cuda
from small import byte_tokenizer, make_rollout, small_gpt2, small_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common import Rollout
from plumbing.scoring import decode, sampling_options
from plumbing.stopping import StopStrings
from sampling import generate

# Pieces that cross the borders of "</a>" and "x y", EOS last.
PIECES = ["</", "a", ">", "<", "/a", "a>b", "x", " y", " ", "y", "x y", "bb", "c", "é", "<eos>"]
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


def sample(model, stop=STOP, length=12, **options) -> Rollout:
    options |= {"num_generations": 20, "temperature": 2.0, "max_new_tokens": length}
    options |= {"eos_token_ids": [LAST], "pad_token_id": 0}
    options |= {"generator": torch.Generator(model.device).manual_seed(1)}
    stops = StopStrings(TOKENIZER, stop) if stop else None
    return generate(model, PROMPTS, PROMPT_MASK, stops=stops, **options)


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
    """The device is asked at every eighth token alone."""
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


def test_a_character_of_several_tokens_is_found_at_its_last_one():
    tokenizer = byte_tokenizer()
    assert StopStrings(tokenizer, ["é"]).end([], tokenizer("aé!").input_ids, 0) == 3


def test_a_space_that_sentencepiece_drops_at_the_start_of_a_text_is_found():
    vocabulary = [("<unk>", 0.0), ("▁x", -1.0), ("▁y", -1.0), ("</s>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    assert tokenizer.decode([1]) == "x", "as such tokenizers do"
    assert StopStrings(tokenizer, [" x"]).end([2], [1], 0) == 1


def test_the_text_keeps_its_stop_string_and_loses_its_eos():
    rollout = make_rollout([[12]] * 4, [[11, 0, 1, 2], [11, LAST], [11, 12], [0, 5]], eos=LAST)
    rollout.finished[:] = torch.tensor([True, True, False, True])
    assert decode(TOKENIZER, rollout, STOP) == ["bb</a>", "bb", "bbc", "</a>b"]


def test_a_special_token_as_a_stop_string_is_one_more_eos():
    """Its text is skipped in decoding, so that it would never be found."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    model = small_gpt2(vocab_size=258)
    config = SimpleNamespace(stop=["<|im_end|>", "x"], max_new_tokens=4, temperature=1.0, seed=0)
    options = sampling_options(config, model, tokenizer)
    assert options["eos_token_ids"][-1] == 257 and options["stops"].strings == ["x"]
