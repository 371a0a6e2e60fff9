"""Log-probs and values of completions: what a plain forward pass gives, with less work."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small import EOS, IN_GROUPS, RAGGED, RAGGED_ROWS, make_rollout, small_gpt2, small_llama
from torch import Tensor
from transformers import masking_utils

from common import Rollout, ValueModel, token_logprobs
from plumbing import forward
from plumbing.forward import (
    completion_logprobs,
    completion_values,
    micro_batches,
)
from plumbing.models import load_causal


def value_model_of(model) -> ValueModel:
    """One whose head is not 0 any more."""
    value_model = ValueModel.on_backbone_of(model).eval()
    torch.nn.init.normal_(value_model.head.weight)
    return value_model


def scores(model, value_model: ValueModel, rollout: Rollout, bf16: bool = False) -> Tensor:
    """Log-probs, entropies and values: (3, B, T)."""
    pair = completion_logprobs(model, rollout, 0.7, bf16=bf16)
    return torch.stack([*pair, completion_values(value_model, rollout, bf16=bf16)])


def scores_in_parts(model, value_model: ValueModel, rollout: Rollout, **limits) -> Tensor:
    """The same, one micro-batch after the other."""
    found = model.get_output_embeddings().weight.new_zeros(3, *rollout.completion_mask.shape)
    for rows, part in micro_batches(rollout, **limits):
        found[:, rows] = scores(model, value_model, part)
    return found


def backward(x: Tensor) -> None:
    """From a sum in which every number of x has a weight of its own."""
    (x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum().backward()


def gradients_of(*models: torch.nn.Module) -> list[Tensor]:
    return [p.grad.clone() for model in models for p in model.parameters() if p.grad is not None]


# --- Against plain forward passes ---


@pytest.mark.problem("completion_logprobs", 2)
def test_all_three_equal_a_loop_that_reads_one_more_token_each_time(small_model):
    """An off-by-one in the shift of logits or values shows here and nowhere else as plainly."""
    rollout, value_model = make_rollout([[1, 2, 3]], [[12, 7, EOS]]), value_model_of(small_model)
    found = scores(small_model, value_model, rollout)[:, 0]
    for t in range(3):
        seen, token = rollout.tokens[:, : 3 + t], rollout.tokens[0, 3 + t]
        log_p = (small_model(seen).logits[0, -1] / 0.7).log_softmax(-1)
        value = value_model.head(value_model.backbone(seen).last_hidden_state[0, -1])
        expected = [log_p[token].item(), -(log_p.exp() @ log_p).item(), value.item()]
        assert found[:, t].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.problem("completion_logprobs", 2)
def test_a_row_alone_equals_the_row_in_a_padded_batch_and_all_is_0_off_the_mask(small_model):
    """Without position ids GPT-2 fails here by whole nats (huggingface/trl#6800)."""
    value_model = value_model_of(small_model)
    rollout = make_rollout(*RAGGED_ROWS, extra_left=2, extra_right=3)
    rollout.tokens[~rollout.attention_mask] = EOS  # the mask says what is padding, not the ids
    batch = scores(small_model, value_model, rollout)
    for row, (prompt, completion) in enumerate(zip(*RAGGED_ROWS)):
        alone = make_rollout([prompt], [completion])
        expected = scores(small_model, value_model, alone)[:, 0]
        assert torch.allclose(batch[:, row, : len(completion)], expected, atol=1e-5), row
    assert (batch[:, ~rollout.completion_mask] == 0).all()


@pytest.mark.problem("completion_logprobs", 1)
def test_the_log_probs_carry_a_gradient_and_the_entropies_none(small_model):
    logprobs, entropies = completion_logprobs(small_model, RAGGED, 0.7)
    weight = small_model.get_output_embeddings().weight
    assert torch.autograd.grad(logprobs.sum(), weight, retain_graph=True)[0].abs().max() > 1
    if entropies.requires_grad:  # as a part of the tensor that holds both
        assert not torch.autograd.grad(entropies.sum(), weight)[0].any()


def test_in_bfloat16_the_backbone_rounds_and_what_is_returned_stays_float32(small_model):
    """Values in bfloat16 would have three digits."""
    value_model = value_model_of(small_model)
    exact = scores(small_model, value_model, RAGGED)
    rounded = scores(small_model, value_model, RAGGED, bf16=True)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded[2], rounded[2].bfloat16().float())
    for x, expected, tolerance in zip(rounded, exact, (0.05, 0.05, 0.1 * exact[2].abs().mean())):
        assert 0 < (x - expected).abs().mean() < tolerance


# --- Micro-batches ---


@pytest.mark.parametrize(
    ("max_rows", "max_tokens"), [(None, None), (1, None), (4, None), (None, 18), (None, 24), (2, 1)]
)
def test_micro_batches_hold_every_row_once_and_no_more_than_allowed(max_rows, max_tokens):
    rows = torch.tensor([5, 0, 3, 2, 4])
    pairs = micro_batches(IN_GROUPS, rows, max_rows=max_rows, max_tokens=max_tokens)
    batches = [batch for batch, _ in pairs]
    assert sorted(torch.cat(batches).tolist()) == [0, 2, 3, 4, 5]
    lengths = IN_GROUPS.completion_mask.sum(1)
    order = lengths[torch.cat(batches)].tolist()
    assert order == sorted(order, reverse=True), "long rows together, or short ones are padded"
    for batch, part in pairs:
        assert torch.equal(part.tokens, IN_GROUPS.tokens[batch])
        real = zip(part.tokens[:, :4], part.attention_mask[:, :4])
        prompts = {tuple(row[mask].tolist()) for row, mask in real}
        tokens = len(prompts) * max(map(len, prompts))
        tokens += len(batch) * part.completion_mask.sum(1).max()
        assert max_rows is None or len(batch) <= max_rows
        assert max_tokens is None or len(batch) == 1 or tokens <= max_tokens
    if (max_rows, max_tokens) == (None, 18):
        assert [len(batch) for batch in batches] == [2, 3]


def test_a_micro_batch_that_is_a_quarter_full_is_not_filled_up_with_much_shorter_rows():
    """The rows have 12, 12, 12, 9, 7 and 2 tokens, prompts of 1 included."""
    lengths = [11, 11, 11, 8, 6, 1]
    rollout = make_rollout([[i] for i in range(6)], [[9] * n for n in lengths])
    for max_tokens, expected in ((72, [4, 2]), (260, [5, 1]), (1000, [6])):
        parts = micro_batches(rollout, max_tokens=max_tokens)
        assert [len(rows) for rows, _ in parts] == expected
    # Completions of one length are not parted by their prompts, which are in no order.
    rollout = make_rollout([[i] * (1, 12)[i % 2] for i in range(1, 9)], [[9] * 4] * 8)
    parts = micro_batches(rollout, max_tokens=64)
    assert [len(rows) for rows, _ in parts] == [4, 4]


def test_rows_that_are_not_wanted_are_left_out_whatever_the_order_of_the_others():
    wanted = torch.tensor([True, False, True, False, True, False])
    pairs = micro_batches(IN_GROUPS, torch.tensor([5, 4, 3, 0, 1]), wanted, max_rows=2)
    assert sorted(row for rows, _ in pairs for row in rows.tolist()) == [0, 4]
    (rows, part), *more = micro_batches(IN_GROUPS, torch.tensor([5, 3, 1]), wanted)
    assert rows.tolist() == [5] and len(part.tokens) == 1 and not more, "one, for the optimiser"


# --- What is read, and what is kept ---


def counted(model, value_model: ValueModel, **limits) -> tuple[int, Tensor, list[Tensor]]:
    """(Tokens read, log-probs and values, gradients) of IN_GROUPS."""
    read = []
    model.zero_grad()
    value_model.zero_grad()
    hook = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    both = scores_in_parts(model, value_model, IN_GROUPS, **limits)[[0, 2]]
    hook.remove()
    backward(both)
    return sum(read), both.detach(), gradients_of(model, value_model)


@pytest.mark.parametrize(("make", "tolerance"), [(small_gpt2, 1e-12), (small_llama, 1e-5)])
@pytest.mark.parametrize("max_tokens", [None, 18])
def test_a_prompt_is_read_once_for_all_its_completions_and_the_gradient_is_the_same(
    make, tolerance, max_tokens
):
    """Llama normalises in float32, whatever its weights are."""
    model = make().double().train()
    value_model = value_model_of(model).train()
    shared = counted(model, value_model, max_tokens=max_tokens)
    alone = counted(model, value_model, max_rows=1)
    if max_tokens is None:  # 3 prompts of up to 4 tokens, then 6 rows of up to 4 tokens
        assert shared[0] == 3 * 4 + 6 * 4
    assert shared[0] < (IN_GROUPS.tokens.shape[1] - 1) * 6
    assert torch.allclose(shared[1], alone[1], rtol=tolerance, atol=tolerance)
    assert max(g.abs().max() for g in alone[2]) > 10
    for g, expected in zip(shared[2], alone[2], strict=True):
        assert torch.allclose(g, expected, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.slow
def test_the_gradient_is_the_same_to_the_bit_each_time_on_several_threads():
    """Indexing sums the gradients of rows that are taken twice in whatever order threads come."""
    model = load_causal("tiny").eval()
    prompts = [torch.arange(6).add(k).remainder(10).tolist() for k in range(8)]
    completions = [[k % 10, 1, 2] for k in range(512)]  # fewer are added up by one thread
    rollout = make_rollout([prompts[k % 8] for k in range(512)], completions)

    def gradient() -> Tensor:
        model.zero_grad()
        logprobs, _ = completion_logprobs(model, rollout, 1.0)
        backward(logprobs)
        return torch.cat([g.flatten() for g in gradients_of(model)])

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(4))
    finally:
        torch.set_num_threads(threads)


def test_columns_of_padding_are_not_read(small_model):
    wide, widths = make_rollout([[1, 2, 3], [4]], [[5, 6, EOS], [7, EOS]], 4, 6), []
    small_model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    completion_logprobs(small_model, wide, 1.0)
    assert widths == [5]  # and not the last token, which predicts nothing


def test_logits_are_made_for_a_few_tokens_at_a_time_with_the_same_values_and_gradients(monkeypatch):
    """(rows, T, V) in float32 is what a step would run out of memory with."""
    model = small_gpt2(vocab_size=5000)

    def keep(x: Tensor) -> Tensor:
        is_logits = x.shape[-1:] == (5000,) and x.shape != (32, 5000)
        assert not is_logits, "logits kept for the backward pass"
        return x

    def result() -> list[Tensor]:
        model.zero_grad()
        both = torch.stack(completion_logprobs(model, RAGGED, 0.7))
        backward(both)
        return [both.detach(), *gradients_of(model)]

    whole = result()
    monkeypatch.setattr(forward, "CHUNK", 2 * 5000)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        parts = result()
    for x, expected in zip(parts, whole, strict=True):  # sums in another order
        assert torch.allclose(x, expected, atol=2e-6 * float(expected.abs().max()))


# --- transformers is told of the mask in a forward pass, and of nothing after it ---

UNPADDED = make_rollout([[1, 2, 3]], [[12, 7, EOS]])


def during_the_forward_pass(model, action) -> None:
    """Log-probs of a rollout without padding; `action` is called in their forward pass."""

    def hook(module, args) -> None:
        action()

    model.base_model.register_forward_pre_hook(hook)
    completion_logprobs(model, UNPADDED, 1.0)


def test_a_thread_is_told_nothing_of_another_ones_mask_and_nothing_of_it_stays(monkeypatch):
    before, first_is_done = masking_utils._ignore_causal_mask_sdpa, threading.Event()
    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", before)  # for other tests
    models, started = [small_llama() for _ in range(3)], []
    masked = {"input_ids": RAGGED.tokens, "attention_mask": RAGGED.attention_mask}
    expected = models[2](**masked).logits
    with ThreadPoolExecutor(2) as others:

        def fail_late() -> None:
            first_is_done.wait(0.2)
            raise ZeroDivisionError

        def meanwhile() -> None:
            assert torch.equal(others.submit(lambda: models[2](**masked).logits).result(), expected)
            started.append(others.submit(during_the_forward_pass, models[1], fail_late))
            time.sleep(0.05)  # it may be inside now, or wait until this one is done

        during_the_forward_pass(models[0], meanwhile)
        first_is_done.set()
        with pytest.raises(ZeroDivisionError):
            started[0].result()
    assert masking_utils._ignore_causal_mask_sdpa is before


def test_under_autocast_the_logits_are_not_rounded_before_the_softmax(small_model):
    """Large logits show it: rounded to bfloat16 they put log-probs about .1 off."""
    with torch.no_grad():
        small_model.get_output_embeddings().weight.mul_(30)
    states = []
    small_model.base_model.register_forward_hook(lambda _, __, out: states.append(out[0]))
    logprobs, _ = completion_logprobs(small_model, RAGGED[:1], 1.0, bf16=True)
    hidden = states[-1][0, -RAGGED.completion_mask[0].sum() :].float()
    logits = small_model.get_output_embeddings()(hidden)
    tokens = RAGGED.tokens[0, -RAGGED.completion_mask.shape[1] :][: len(hidden)]
    expected = token_logprobs(logits, tokens)
    assert torch.allclose(logprobs[0, : len(hidden)], expected, atol=1e-3)
    assert torch.get_float32_matmul_precision() == "highest"  # of all other products


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_in_float32_has_the_gradients_of_its_rounded_factors(bias, monkeypatch):
    """A GPU's kernel; here a product of float32 is in its place."""
    monkeypatch.setattr(forward, "_mm_to_float32", lambda a, b: a.float() @ b.float())
    layer, x = torch.nn.Linear(16, 40, bias=bias), torch.randn(8, 16, requires_grad=True)
    weights = torch.randn(8, 40).bfloat16().float()  # of the outputs
    inputs = [x, *layer.parameters()]
    out = forward.linear_in_float32(x, layer.weight.bfloat16(), layer.bias)
    exact = torch.nn.functional.linear(
        x.bfloat16().float(), layer.weight.bfloat16().float(), layer.bias
    )
    assert torch.equal(out, exact) and not torch.equal(out, layer(x))
    pairs = zip(*(torch.autograd.grad((y * weights).sum(), inputs) for y in (out, exact)))
    for gradient, expected in pairs:
        assert gradient.dtype == torch.float32
        assert torch.allclose(gradient, expected, rtol=2**-7, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(forward.linear_in_float32(x, layer.weight.bfloat16(), layer.bias), out)
