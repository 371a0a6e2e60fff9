"""The decode loop: what it draws from, where rows end, and that its shortcuts change nothing."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from small import EOS, VOCAB, letter_tokenizer, small_gpt2, small_llama
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    DynamicCache,
    Gemma3TextConfig,
    MistralConfig,
    StaticCache,
    StopStringCriteria,
)

import sampling
from common import Rollout, completion_mask, disable_dropout
from forward import model_inputs
from plumbing.data import Task
from plumbing.decoder import Decoder, masks_of_layers, rounded_copy
from plumbing.errors import Fault
from plumbing.models import add_adapter, set_up_training
from sampling import draw, generate, without_windows

# Padding is 0, and 0 is a token as well.
PROMPTS = torch.tensor([[1, 2, 5, 1], [0, 0, 0, 4], [0, 5, 0, 6]])
PROMPT_MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]]).bool()


def sample(model, seed=0, prompts=PROMPTS, prompt_mask=PROMPT_MASK, decoder=None, **options):
    options = {"max_new_tokens": 8, "eos_token_ids": [EOS], "pad_token_id": 0} | options
    options["generator"] = torch.Generator().manual_seed(seed)
    with decoder or Decoder(model) as decoder:
        return generate(model, prompts, prompt_mask, decoder=decoder, **options)


def shapes_read(model) -> list[tuple[int, int]]:
    """The shapes (rows, tokens) that the model reads, from here on."""
    shapes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@torch.no_grad()
def plain_rollout(model, ends_of, pad: int = 0, group_size: int = 40, length: int = 8) -> Rollout:
    """What `sample` has to give at a temperature of 2, by a loop without a shortcut: all rows to
    the end, a cache that grows by a token. ends_of: tokens (B, T) -> which of them end a row.
    """
    uniforms = torch.rand(length, 3 * group_size, generator=torch.Generator().manual_seed(0))
    prompts, mask = (x.repeat_interleave(group_size, 0) for x in (PROMPTS, PROMPT_MASK))
    cache, read, tokens, logprobs = DynamicCache(), prompts, [], []
    for t, uniform in enumerate(uniforms):
        seen = torch.nn.functional.pad(mask, (0, t), value=True)
        logits = model.eval()(**model_inputs(model, read, seen, cache)).logits[:, -1]
        log_p = (logits / 2).log_softmax(-1)
        read = (log_p.exp().cumsum(-1) <= uniform.unsqueeze(1)).sum(1, keepdim=True)  # multinomial
        tokens.append(read)
        logprobs.append(log_p.gather(1, read))
    tokens, logprobs = torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1)
    ends = ends_of(tokens)
    real = completion_mask(ends.long(), [1])
    return Rollout(
        tokens=torch.cat([prompts, tokens.masked_fill(~real, pad)], dim=1),
        attention_mask=torch.cat([mask, real], dim=1),
        completion_mask=real,
        logprobs=logprobs.masked_fill(~real, 0),
        finished=ends.any(1),
    )


def compare(rollout: Rollout, expected: Rollout) -> None:
    """Every tensor of a rollout with that of the plain loop."""
    for name, x in vars(expected).items():
        words = f"not the {name} of the plain loop: {{}}"
        assert_close(vars(rollout)[name], x, rtol=0, atol=1e-4, msg=words.format)


@pytest.mark.problem("decode", 1)
@pytest.mark.parametrize(("pad", "ends"), [(0, [EOS]), (EOS, [EOS]), (0, [EOS, 7]), (0, [0])])
def test_sampling_pads_all_that_follows_the_eos(pad, ends):
    options = {"num_generations": 40, "temperature": 2.0}
    rollout = sample(small_gpt2(), pad_token_id=pad, eos_token_ids=ends, **options)
    of_ids = lambda tokens: torch.isin(tokens, torch.tensor(ends))  # noqa: E731
    compare(rollout, plain_rollout(small_gpt2(), of_ids, pad))
    last = rollout.tokens[:, 4:].gather(1, rollout.lengths.unsqueeze(1) - 1).squeeze(1)
    assert {*last[rollout.finished].tolist()} == {*ends}, "the last tokens of rows that have ended"
    assert not rollout.finished.all(), "some rows fill the width"


PIECES = ["a", "b", "ab", "ba", "d", "c", "bc", "e", "f", "<eos>"]


@pytest.mark.problem("decode", 1)
def test_a_stop_string_changes_no_token_before_it():
    """The first prompt holds a stop string and ends with the beginning of one: b, ab, c, b."""
    model, strings = small_gpt2(vocab_size=10), ["bab", "abc"]
    stop = StopStringCriteria(letter_tokenizer(PIECES[:-1]), strings)
    options = {"num_generations": 40, "temperature": 2.0, "eos_token_ids": [9]}
    rollout = sample(model, stop=stop, **options)

    def ends_of(tokens: Tensor) -> Tensor:
        ends = tokens == 9
        for row, ids in enumerate(tokens.tolist()):
            begun = ["".join(PIECES[i] for i in ids[: t + 1]) for t in range(8)]
            ends[row] |= torch.tensor([any(x in text for x in strings) for text in begun])
        return ends

    compare(rollout, plain_rollout(model, ends_of))
    last = rollout.tokens[:, 4:].gather(1, rollout.lengths.unsqueeze(1) - 1).squeeze(1)
    assert 10 < (last != 9)[rollout.finished].sum() < rollout.finished.sum(), "some end by EOS"
    assert (rollout.tokens[:40, 4] == 2).any(), "ab, after a prompt that ends with b"


# --- What is drawn ---


def test_sampling_draws_from_softmax_of_logits_over_temperature(small_model):
    """huggingface/trl#5783: Qwen2.5 was sampled nearly greedily through its generation_config."""
    config = small_model.generation_config
    config.temperature, config.top_k, config.repetition_penalty = 1e-6, 1, 1.3
    config.suppress_tokens, config.do_sample, config.max_new_tokens = [3, 4, 5], False, 1
    n, prompt = 4000, {"prompts": PROMPTS[:1], "prompt_mask": PROMPT_MASK[:1]}
    options = {"num_generations": n, "max_new_tokens": 1, "temperature": 0.7}
    rollout = sample(small_model, **prompt, **options)
    counts = torch.bincount(rollout.tokens[:, -1], minlength=VOCAB)
    p = (small_model(PROMPTS[:1]).logits[0, -1] / 0.7).softmax(-1)
    common = n * p > 5  # the number of rarer tokens is far from normal
    deviation = (counts / n - p).abs() / (p * (1 - p) / n).sqrt()
    assert deviation[common].max() < 4.5 and counts[~common].sum() < 3 * n * p[~common].sum() + 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 1000])
def test_draw_takes_the_first_token_above_the_number(vocab, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(500, vocab, generator=generator)).to(dtype)
    uniform = torch.rand(500, generator=generator)
    for temperature in (0.7, 1.0):
        drawn, logprobs = draw(logits, uniform, temperature=temperature)
        exact = (logits.double() / temperature).softmax(-1)
        cumulative = exact.cumsum(-1).gather(1, drawn.unsqueeze(1)).squeeze(1)
        p = exact.gather(1, drawn.unsqueeze(1)).squeeze(1)
        assert ((cumulative - p - 1e-6 <= uniform) & (uniform < cumulative + 1e-6)).all()
        assert logprobs.dtype == torch.float32
        assert torch.allclose(logprobs.double(), p.log(), atol=1e-5)
    for options in ({"top_k": 20}, {"top_p": 0.5}):  # of half precision as of float32
        found, expected = (draw(x, uniform, **options) for x in (logits, logits.float()))
        assert all(map(torch.equal, found, expected))


def test_a_token_of_probability_0_is_never_drawn():
    """Every second one has it, the last too; and the probabilities add up to 1 only nearly."""
    weights = torch.rand(5000, 127, generator=torch.Generator().manual_seed(0))
    logits = torch.full((5000, 255), -torch.inf)
    logits[:, 1::2] = weights.log()
    between = weights[:, :63].sum(1) / weights.sum(1)  # of two tokens
    for number, token in ((0.0, 1), (between, None), (1 - 2**-24, 253)):  # the least, the greatest
        tokens, _ = draw(logits, torch.as_tensor(number).expand(5000))
        assert (tokens % 2 == 1).all()
        assert token is None or token in tokens


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 3}, [1, 2, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),  # there are no more
        ({"top_p": 0.6}, [1, 3]),  # the smallest set of likeliest tokens that reaches it
        ({"top_p": 0.5}, [1]),  # one that is reached exactly
        ({"top_k": 3, "top_p": 0.83}, [1, 3]),  # the share of those that top_k leaves
        ({"top_p": 0.6, "temperature": 0.5}, [1]),  # the temperature comes first
    ],
)
def test_top_k_and_top_p_keep_the_likeliest_tokens(options, kept):
    p = torch.tensor([0.0625, 0.5, 0.125, 0.3125])
    tokens, logprobs = draw(p.log().expand(1000, 4), torch.linspace(0, 0.9999, 1000), **options)
    assert sorted(set(tokens.tolist())) == kept
    assert torch.allclose(logprobs.exp(), p[tokens] / p[kept].sum())


def test_greedy_takes_the_first_of_equally_likely_tokens():
    """Logits in bfloat16 are often equal: greedy answers would differ from one call to the next."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.5, 0.5, -1.0, 0.5]]).bfloat16()
    for number in (0.0, 0.6, 0.99):
        tokens, logprobs = draw(logits, torch.full((2,), number), temperature=0.7, top_k=1)
        assert tokens.tolist() == [1, 0] and tokens.tolist() == logits.argmax(-1).tolist()
        assert logprobs.dtype == torch.float32 and logprobs.tolist() == [0, 0], "it is certain"


@pytest.mark.parametrize("token", [0, 1])
@pytest.mark.parametrize(("half", "top_k"), [(None, 0), (torch.float16, 0), (torch.float16, 1)])
def test_sampling_refuses_logits_that_are_not_finite(half, top_k, token):
    """There is no distribution to draw from. On a GPU an index out of range would end the process
    before it has saved anything.
    """
    model, passes = small_gpt2(), itertools.count()

    def spoil(module, inputs, logits):
        if next(passes) == token:
            logits[2, ..., 5] = torch.inf if half else torch.nan  # a single one; float16 overflows

    model.get_output_embeddings().register_forward_hook(spoil)
    rollout = sample(model, decoder=Decoder(model, half), top_k=top_k, eos_token_ids=[])
    with pytest.raises(Fault, match=r"not finite: lower .*, or --fp16 false; .* --model"):
        Task([], [], []).score([], rollout)


# --- The model is left as it was ---


def test_dropout_never_touches_a_sample():
    model = small_gpt2(dropout=0.5).train()
    found = sample(model, num_generations=4).tokens
    assert model.training, "the mode is as before"
    assert torch.equal(found, sample(model.eval(), num_generations=4).tokens)
    assert not model.training
    assert not torch.equal(found, sample(model, seed=1, num_generations=4).tokens)


@torch.no_grad()
def test_the_copy_that_decodes_sees_no_later_token():
    """disable_dropout gives attention modules a config of their own, which must follow the change
    of attention: plain attention without a mask sees all tokens.
    """
    model = small_gpt2(dropout=0.1)
    set_up_training(SimpleNamespace(bf16=True, half=None, gradient_checkpointing=False), model)
    disable_dropout(model)
    tokens = torch.arange(1, 9).view(2, 4)
    logits, found = (x(tokens).logits for x in (model, rounded_copy(model, torch.float32)))
    assert torch.allclose(found, logits, atol=1e-4)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_decodes_with_the_weights_of_now(half):
    """But not of rotary frequencies, which would put late tokens at wrong positions. Attention is
    fused also where training on a CPU has plain attention.
    """
    model = add_adapter(small_llama(), 4)
    model.set_attn_implementation("eager")
    decoder = Decoder(model, half)
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.02)
        rounded = rounded_copy(model, half)
        for name, x in rounded.state_dict().items():
            assert torch.equal(x, model.state_dict()[name].to(half)), name
        for name, x in rounded.named_buffers():
            assert torch.equal(x, model.get_buffer(name))
        kinds = [x.get_base_model().config._attn_implementation for x in (model, rounded)]
        assert kinds == ["eager", "sdpa"]
        found, expected = sample(model, decoder=decoder), sample(rounded)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.logprobs, expected.logprobs)
        assert {p.dtype for p in model.parameters()} == {found.logprobs.dtype} == {torch.float32}


@pytest.mark.parametrize("kinds", [None, ["sliding_attention", "full_attention"]])
def test_the_mask_of_a_graph_hides_tokens_behind_windows(kinds):
    config = (Gemma3TextConfig if kinds else MistralConfig)(num_hidden_layers=2, layer_types=kinds)
    config.sliding_window, model = 4, SimpleNamespace(config=config)
    cache = StaticCache(without_windows(model), max_cache_len=64)
    assert not any(layer.is_sliding for layer in cache.layers) and config.sliding_window == 4
    token_7 = torch.zeros(9), torch.arange(9), torch.tensor([7])
    masks = masks_of_layers(model, *token_7)
    if kinds:
        assert masks["full_attention"].tolist() == [0] * 9
    windowed = masks["sliding_attention"] if kinds else masks
    assert windowed.tolist() == [-torch.inf] * 4 + [0] * 5
    config.layer_types = ["sliding_attention"] * 2  # no layer would take the other mask
    assert torch.equal(masks_of_layers(model, *token_7), windowed)


# --- Shortcuts that must change nothing ---


def test_rows_that_end_and_leave_change_no_completion(small_model):
    shapes = shapes_read(small_model)
    rollout = sample(small_model, num_generations=16, max_new_tokens=20, temperature=2.0)
    assert shapes[0] == (3, 4), "each prompt is read once"
    assert {length for _, length in shapes[1:]} == {1}, "and each token"
    sizes = [rows for rows, _ in shapes[1:]]
    assert sizes[-1] < 0.7 * 48 and sizes == sorted(sizes, reverse=True)
    compare(rollout, plain_rollout(small_model, lambda tokens: tokens == EOS, 0, 16, 20))
    shapes.clear()
    sample(small_model, eos_token_ids=list(range(VOCAB)))
    assert len(shapes) == 1, "decoding ends when all rows have"


@pytest.mark.parametrize("max_rows", [3, 5, 8, 100])  # the completions of a prompt are 4
def test_sub_batches_are_generated_in_turn_and_put_together(max_rows):
    model, order = small_gpt2(), [0, 1, 2, 0, 1]
    prompts, mask = PROMPTS[order], PROMPT_MASK[order]
    options = {"max_new_tokens": 8, "eos_token_ids": [EOS], "pad_token_id": 0}
    options |= {"num_generations": 4, "generator": torch.Generator().manual_seed(0)}
    shapes = shapes_read(model)
    rollout = sampling.sample(model, prompts, mask.long(), max_rows=max_rows, **options)
    assert max(rows for rows, length in shapes if length == 1) <= max(4, max_rows)
    options["generator"].manual_seed(0)
    size = max(1, max_rows // 4)
    parts = zip(prompts.split(size), mask.split(size))
    expected = [generate(model, *part, **options) for part in parts]
    for name, x in vars(rollout).items():
        whole = torch.cat([vars(part)[name] for part in expected])
        assert torch.equal(x, whole) and x.dtype == whole.dtype, name
