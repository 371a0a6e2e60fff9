"""The mathematics of common.py against definitions, brute force and known mistakes."""

import copy
import inspect
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import transformers
from small import EOS, IN_GROUPS, RAGGED, SMALL_MODELS, make_rollout, small_gpt2, small_llama
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    masking_utils,
)

from common import (
    ValueModel,
    at_least_float32,
    disable_dropout,
    gae,
    importance_ratio,
    kl_estimate,
    masked_mean,
    masked_whiten,
    policy_ratio,
    token_entropy,
    token_logprobs,
)
from plumbing import forward, inputs
from plumbing.errors import InputError
from plumbing.forward import completion_logprobs, completion_values, micro_batches
from plumbing.loading import (
    context_length,
    eos_token_ids,
    load_policy,
    load_tokenizer,
    pick_device,
    set_up_training,
)

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- Masked statistics ---


def test_masked_mean_ignores_what_is_masked_even_nan():
    x = random(3, 4).masked_fill(~MASK, torch.nan)
    assert masked_mean(x, MASK).item() == pytest.approx(x[MASK].mean().item())
    rows = masked_mean(x, MASK, dim=1)
    assert rows.tolist() == pytest.approx([x[i][MASK[i]].mean().item() for i in range(3)])


def test_masked_mean_of_an_empty_mask_is_zero():
    assert masked_mean(torch.ones(2, 3), torch.zeros(2, 3)).item() == 0


def test_whitened_values_have_mean_0_and_unbiased_std_1_on_the_mask_and_are_0_off_it():
    white = masked_whiten(random(3, 4) * 7 + 100, MASK)
    assert white[MASK].mean().item() == pytest.approx(0, abs=1e-9)
    assert white[MASK].std().item() == pytest.approx(1, abs=1e-6)  # torch's std has Bessel's N - 1
    assert (white[~MASK] == 0).all()


def test_whitening_without_shift_keeps_the_mean():
    x = random(3, 4) * 7 + 100
    white = masked_whiten(x, MASK, shift_mean=False)
    assert white[MASK].mean().item() == pytest.approx(x[MASK].mean().item())
    assert white[MASK].std().item() == pytest.approx(1, abs=1e-6)
    assert (white[~MASK] == 0).all()


def test_whitening_is_over_the_batch_not_per_row():
    x = torch.tensor([[0.0], [1.0]])
    white = masked_whiten(x, torch.ones(2, 1))
    assert white[0].item() == pytest.approx(-white[1].item()) and white[1] > 0.5


@pytest.mark.parametrize("value", [0.1, 0.3, 1.1])
def test_whitening_a_constant_or_a_single_value_gives_no_nan_and_no_blow_up(value):
    assert masked_whiten(torch.full((3, 4), value), MASK).abs().max() < 1e-2
    assert masked_whiten(torch.full((1, 1), value), torch.ones(1, 1)).item() == 0


def test_two_values_have_the_unbiased_variance_too():
    white = masked_whiten(torch.tensor([[3.0, 5.0]]), torch.ones(1, 2))
    assert torch.allclose(white, torch.tensor([[-(0.5**0.5), 0.5**0.5]]))


# --- Log-probs and entropy ---


def test_token_logprobs_equal_the_gathered_log_softmax():
    logits, tokens = random(3, 4, 9), torch.randint(9, (3, 4))
    expected = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert torch.equal(token_logprobs(logits, tokens), expected)
    assert token_logprobs(logits, tokens).dtype == torch.float64


def test_half_precision_logits_are_scored_in_float32():
    logits = random(2, 3, 50).bfloat16()
    tokens = torch.randint(50, (2, 3))
    assert torch.equal(token_logprobs(logits, tokens), token_logprobs(logits.float(), tokens))
    assert token_entropy(logits).dtype == torch.float32


def test_half_precision_becomes_float32_to_the_bit_and_more_precision_stays():
    for dtype in (torch.float16, torch.bfloat16):
        x = random(50).to(dtype)
        assert at_least_float32(x).dtype == torch.float32
        assert torch.equal(at_least_float32(x).to(dtype), x)
    for dtype in (torch.float32, torch.float64):
        x = random(50).to(dtype)
        assert at_least_float32(x).dtype == dtype and torch.equal(at_least_float32(x), x)


def test_entropy_is_that_of_the_softmax_and_a_zero_probability_adds_nothing():
    logits = torch.tensor([[[0.7, 0.2, 0.08, 0.02]]]).log()
    expected = -(0.7 * 0.35667 + 0.2 * 1.60944 + 0.08 * 2.52573 + 0.02 * 3.91202) * -1
    assert token_entropy(logits).item() == pytest.approx(expected, abs=1e-4)
    impossible = torch.tensor([[[0.0, 0.0, -torch.inf]]])
    assert token_entropy(impossible).item() == pytest.approx(0.693147, abs=1e-5)


# --- KL estimators: signs and expectations, not only non-negativity ---


P = torch.tensor([0.7, 0.2, 0.08, 0.02], dtype=torch.float64)
Q = torch.full((4,), 0.25, dtype=torch.float64)
KL = (P * (P / Q).log()).sum().item()  # .5344; the other way round it would be .7435


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_for_the_kl_of_policy_to_reference(estimator):
    expectation = (P * kl_estimate(P.log(), Q.log(), estimator)).sum().item()
    assert pytest.approx(0.5344, abs=1e-4) == KL
    assert expectation == pytest.approx(KL, abs=1e-9)


@pytest.mark.slow
def test_the_estimators_are_right_on_every_answer_that_the_tiny_model_can_give():
    """By enumeration, no sampling: E[k1] = E[k3] = the exact KL of the answers, E[k2] is not."""
    policy = load_policy("tiny").double()
    ref = copy.deepcopy(policy)
    with torch.no_grad():
        for p in ref.parameters():
            p.mul_(0.97)
    tokenizer = load_tokenizer("tiny")
    prompt, eos = tokenizer("12+34=").input_ids, tokenizer.eos_token_id
    others = [token for token in range(len(tokenizer)) if token != eos]
    answers = [[eos]] + [[a, b] for a in others for b in range(len(tokenizer))]
    rollout = make_rollout([prompt] * len(answers), answers)

    def logprobs(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return completion_logprobs(model, rollout, 1.0, max_rows=1000)[0]

    def next_log_p(model: torch.nn.Module, written: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([prompt + written])).logits[0, -1].log_softmax(-1)

    def exact(written: list[int], depth: int) -> float:
        """The KL of what follows, by the chain rule."""
        log_p, log_q = next_log_p(policy, written), next_log_p(ref, written)
        total = (log_p.exp() * (log_p - log_q)).sum().item()
        if depth > 1:
            total += sum(log_p[t].exp().item() * exact([*written, t], depth - 1) for t in others)
        return total

    log_p, log_q = logprobs(policy), logprobs(ref)
    weights = log_p.sum(1).exp()
    assert weights.sum().item() == pytest.approx(1, abs=1e-9)
    truth = exact([], 2)
    means = {
        k: (weights * kl_estimate(log_p, log_q, k).sum(1)).sum().item() for k in ("k1", "k2", "k3")
    }
    assert truth > 1e-3
    assert means["k1"] == pytest.approx(truth, rel=1e-6)
    assert means["k3"] == pytest.approx(truth, rel=1e-6)
    assert abs(means["k2"] / truth - 1) > 1e-3


def test_the_gradient_of_log_probs_and_entropy_equals_finite_differences():
    logits, tokens = random(2, 3, 5).requires_grad_(), torch.tensor([[0, 1, 2], [4, 3, 0]])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, tokens), (logits,))
    assert torch.autograd.gradcheck(token_entropy, (logits,))


def test_as_a_reward_k1_has_the_gradient_of_the_kl_and_k2_and_k3_nearly_none_near_the_reference():
    """A reward has no gradient of its own: it acts through E[k grad log pi]."""
    ref = torch.tensor([0.7, 0.2, 0.08, 0.02], dtype=torch.float64).log()

    def shares(distance: float) -> list[float]:
        """The gradients with k2 and k3 as rewards, over that of the KL: their norms."""
        direction = torch.tensor([1.0, -2.0, 0.5, 3.0])
        logits = (ref + distance * direction).requires_grad_()
        logprobs = logits.log_softmax(-1)
        probs = logprobs.exp()

        def gradient(x: Tensor) -> Tensor:
            return torch.autograd.grad(x, logits, retain_graph=True)[0]

        k1, k2, k3 = (
            gradient((probs * kl_estimate(logprobs, ref, name)).detach() @ logprobs)
            for name in ("k1", "k2", "k3")
        )
        forward = gradient((probs * (logprobs - ref)).sum())
        backward = gradient((ref.exp() * (ref - logprobs)).sum())
        assert torch.allclose(k1, forward, atol=1e-12)
        assert torch.allclose(k3, forward - backward, atol=1e-12)
        return [(k.norm() / forward.norm()).item() for k in (k2, k3)]

    far, near = shares(0.1), shares(0.01)
    assert max(far) < 0.2 and max(near) < max(far) / 5


def test_k2_is_half_the_squared_log_ratio_and_second_order_right():
    d = torch.tensor([0.3, -0.2])
    assert torch.allclose(kl_estimate(d, torch.zeros(2), "k2"), d**2 / 2)
    near = (P.log() + 1e-3 * random(4)).softmax(0)
    exact = (P * (P / near).log()).sum()
    expectation = (P * kl_estimate(P.log(), near.log(), "k2")).sum()
    assert expectation.item() == pytest.approx(exact.item(), rel=1e-2)


def test_k3_is_never_negative_and_exact_near_zero():
    d = torch.tensor([-2.0, -1e-4, 0.0, 1e-4, 2.0])
    k3 = kl_estimate(d, torch.zeros(5), "k3")
    assert (k3 >= 0).all()
    assert k3[3].item() == pytest.approx(
        5e-9, rel=0.2
    )  # exp(-d) - 1 + d in float32 gives 0 or 6e-8


def test_an_unknown_estimator_is_refused_by_name():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


# --- Ratio ---


def test_the_ratio_is_exp_to_the_bit_up_to_far_beyond_any_clip_range():
    log_ratio = torch.linspace(-120, 20, 1000)
    assert torch.equal(policy_ratio(log_ratio), log_ratio.exp())


@pytest.mark.parametrize("log_ratio", [20.5, 89.0, 100.0, 1e6])
def test_a_ratio_beyond_that_stays_finite_and_keeps_its_gradient(log_ratio):
    """In float32 exp overflows above 88."""
    x = torch.tensor([log_ratio, 0.5], requires_grad=True)
    ratio = policy_ratio(x)
    ratio.sum().backward()
    expected = [math.exp(20), math.exp(0.5)]
    assert ratio.tolist() == pytest.approx(expected, rel=1e-5)
    assert x.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_ratio_of_tokens_is_that_of_each_and_that_of_a_sequence_their_geometric_mean():
    logprobs, old = random(3, 4), random(3, 4, seed=1)
    ratio, whole = (importance_ratio(logprobs, old, MASK, name) for name in ("token", "sequence"))
    for row, length in enumerate(MASK.sum(1).tolist()):
        d = (logprobs - old)[row, :length]
        assert torch.allclose(ratio[row, :length], d.exp())
        assert whole[row, :length].tolist() == pytest.approx([math.exp(d.mean().item())] * length)
    assert (ratio[~MASK] == 1).all() and (whole[~MASK] == 1).all()
    assert torch.equal(importance_ratio(logprobs, old, MASK.long(), "sequence"), whole)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_garbage_at_padding_changes_no_ratio_and_gets_no_gradient(level):
    x = random(3, 4).masked_fill(~MASK, torch.nan).requires_grad_()
    old = random(3, 4, seed=1)
    ratio = importance_ratio(x, old.masked_fill(~MASK, -1e9), MASK, level)
    assert torch.equal(ratio, importance_ratio(random(3, 4), old, MASK, level))
    ratio.sum().backward()
    assert (x.grad[~MASK] == 0).all() and (x.grad[MASK] != 0).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_of_the_ratio_equals_finite_differences(level):
    old = random(3, 4, seed=1)
    x = random(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: importance_ratio(x, old, MASK, level), (x,))


def test_the_ratio_of_a_row_without_a_token_is_1():
    mask = torch.zeros(3, 4).bool()
    for level in ("token", "sequence"):
        assert (importance_ratio(random(3, 4), random(3, 4, seed=1), mask, level) == 1).all()


def test_an_unknown_level_of_the_ratio_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown importance_sampling_level 'row'"):
        importance_ratio(random(3, 4), random(3, 4), MASK, "row")


# --- GAE ---


def brute_force_gae(rewards, values, mask, gamma, lam):
    """The defining double sum: A_t = sum_l (gamma lam)^l delta_{t+l}, row by row."""
    advantages = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        n = int(mask[row].sum())
        v = [*values[row, :n].tolist(), 0.0]
        delta = [rewards[row, t].item() + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            advantages[row, t] = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n))
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0)])
def test_gae_equals_the_defining_double_sum_on_ragged_rows(gamma, lam):
    rewards, values = random(3, 4), random(3, 4, seed=1)
    advantages, returns = gae(rewards, values, MASK, gamma, lam)
    expected = brute_force_gae(rewards, values, MASK, gamma, lam)
    assert torch.allclose(advantages, expected)
    assert torch.allclose(returns, (expected + values) * MASK)


def test_of_a_single_token_the_advantage_is_the_reward_less_the_value():
    advantages, returns = gae(torch.tensor([[5.0]]), torch.tensor([[2.0]]), torch.ones(1, 1), 1, 1)
    assert advantages.tolist() == [[3.0]] and returns.tolist() == [[5.0]]


def test_advantages_and_returns_are_0_wherever_the_mask_is_also_in_the_middle_of_a_row():
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]]).bool()
    advantages, returns = gae(torch.ones(2, 3), torch.ones(2, 3), mask, 0.9, 0.9)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_garbage_at_padding_never_reaches_advantages_or_returns():
    rewards, values = random(3, 4), random(3, 4, seed=1)
    clean = gae(rewards, values, MASK, 1.0, 0.95)
    dirty = gae(
        rewards.masked_fill(~MASK, torch.nan), values.masked_fill(~MASK, 1e9), MASK, 1.0, 0.95
    )
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert all((x[~MASK] == 0).all() for x in dirty)


# --- Forward passes ---


def test_logprobs_and_entropies_equal_a_loop_that_reads_one_more_token_each_time(small_model):
    """An off-by-one in the shift of logits shows here and nowhere else as plainly."""
    rollout = make_rollout([[1, 2, 3]], [[12, 7, EOS]])
    logprobs, entropies = completion_logprobs(small_model, rollout, temperature=0.7)
    for t in range(3):
        logits = small_model(rollout.tokens[:, : 3 + t]).logits[0, -1] / 0.7
        log_p = logits.log_softmax(-1)
        expected = log_p[rollout.tokens[0, 3 + t]].item(), -(log_p.exp() @ log_p).item()
        found = logprobs[0, t].item(), entropies[0, t].item()
        assert found == pytest.approx(expected, abs=1e-5)


def test_the_log_probs_carry_a_gradient_and_the_entropies_none(small_model):
    logprobs, entropies = completion_logprobs(small_model, RAGGED, 0.7)
    weight = small_model.get_output_embeddings().weight
    assert torch.autograd.grad(logprobs.sum(), weight, retain_graph=True)[0].abs().max() > 1
    if entropies.requires_grad:  # as a part of the tensor that holds both
        assert not torch.autograd.grad(entropies.sum(), weight)[0].any()


def test_values_are_read_before_their_token_is_seen(small_model):
    model = ValueModel.on_backbone_of(small_model).eval()
    torch.nn.init.normal_(model.head.weight)
    rollout = make_rollout([[1, 2, 3]], [[12, 7, EOS]])
    values = completion_values(model, rollout)
    for t in range(3):
        tokens = rollout.tokens[:, : 3 + t]
        expected = model.head(model.backbone(tokens).last_hidden_state)[0, -1].item()
        assert values[0, t].item() == pytest.approx(expected, abs=1e-5)


def test_a_row_alone_equals_the_row_in_a_padded_batch(small_model):
    """Without position ids GPT-2 fails here by whole nats (huggingface/trl#6800)."""
    batch, entropies = completion_logprobs(small_model, RAGGED, 0.7)
    for row in range(len(RAGGED.tokens)):
        tokens = RAGGED.tokens[row][RAGGED.attention_mask[row]].tolist()
        length = int(RAGGED.completion_mask[row].sum())
        alone = make_rollout([tokens[:-length]], [tokens[-length:]])
        logprobs, entropy = completion_logprobs(small_model, alone, 0.7)
        assert torch.allclose(batch[row, :length], logprobs[0], atol=1e-5), row
        assert torch.allclose(entropies[row, :length], entropy[0], atol=1e-5), row


@pytest.mark.parametrize("padding", [(5, 0), (0, 5), (3, 4)])
def test_more_padding_on_either_side_changes_no_logprob_and_no_value(small_model, padding):
    prompts, completions = [[1, 2, 3], [4]], [[12, EOS], [13, 14, 15]]
    plain = make_rollout(prompts, completions)
    # A long row keeps the others' padding from being cut off.
    padded = make_rollout([*prompts, [9] * 9], [*completions, [9] * 9], *padding)
    model = ValueModel.on_backbone_of(small_model).eval()
    torch.nn.init.normal_(model.head.weight)
    for values_of in (
        lambda r: completion_logprobs(small_model, r, 0.7)[0],
        lambda r: completion_logprobs(small_model, r, 0.7)[1],
        lambda r: completion_values(model, r),
    ):
        assert torch.allclose(values_of(padded)[:-1, :3], values_of(plain), atol=1e-5)
        assert (values_of(padded)[~padded.completion_mask] == 0).all()


@pytest.mark.parametrize("size", [1, 2, 4, None])
def test_the_micro_batch_changes_no_logprob_no_entropy_and_no_value(small_model, size):
    value_model = ValueModel.on_backbone_of(small_model).eval()
    torch.nn.init.normal_(value_model.head.weight)

    def scores(**limits: int | None) -> list[Tensor]:
        pair = completion_logprobs(small_model, RAGGED, 0.7, **limits)
        return [*pair, completion_values(value_model, RAGGED, **limits)]

    for part, whole in zip(scores(max_rows=size), scores(), strict=True):
        assert torch.allclose(part, whole, atol=1e-5)


def test_entropy_lies_between_0_and_log_v_and_is_0_off_the_mask(small_model):
    _, entropy = completion_logprobs(small_model, RAGGED, 1.0, max_rows=4)
    mask = RAGGED.completion_mask
    assert (entropy[mask] > 0).all() and (entropy[mask] <= torch.tensor(40.0).log() + 1e-5).all()
    assert (entropy[~mask] == 0).all()


def test_the_mask_not_the_token_id_says_what_is_padding(small_model):
    """With pad == EOS, and an EOS inside the prompt, the log-probs are those with another pad."""
    rollout = make_rollout([[EOS, 2, EOS], [4]], [[12, EOS], [13, 14, EOS]])
    pad_is_eos = copy.deepcopy(rollout)
    pad_is_eos.tokens = rollout.tokens.masked_fill(~rollout.attention_mask, EOS)
    first, _ = completion_logprobs(small_model, rollout, 1.0)
    assert torch.allclose(first, completion_logprobs(small_model, pad_is_eos, 1.0)[0], atol=1e-6)
    assert (first[rollout.completion_mask] != 0).all()


# --- Dropout ---


SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
MLP = SIZES | {"intermediate_size": 32, "attention_dropout": 0.5, "pad_token_id": 0}
DROPOUT_CONFIGS = {
    "Llama": MLP,
    "Qwen2": MLP | {"num_key_value_heads": 2},
    "GPTNeoX": MLP,
    "Phi": MLP,
    "OPT": SIZES
    | {"ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.5, "attention_dropout": 0.5}
    | {"layerdrop": 0.5},
    "OPT, layerdrop alone": SIZES
    | {"ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.0, "layerdrop": 0.5},
    "GPT2": {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.5}
    | {"resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "GPTNeo": {"vocab_size": 40, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    | {"attention_types": [[["global", "local"], 1]], "attention_dropout": 0.5}
    | {"embed_dropout": 0.5, "resid_dropout": 0.5},
    "Bloom": {"vocab_size": 40, "hidden_size": 32, "n_layer": 2, "n_head": 2}
    | {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "Falcon": SIZES | {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "Mpt": {"vocab_size": 40, "d_model": 32, "n_layers": 2, "n_heads": 2}
    | {"resid_pdrop": 0.5, "emb_pdrop": 0.5},
}


def dropout_model(name: str, attn_implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.split(',')[0]}Config")(**DROPOUT_CONFIGS[name])
    kwargs = {"attn_implementation": attn_implementation}
    model = AutoModelForCausalLM.from_config(config, **kwargs).train()
    for module in model.modules():
        if hasattr(module, "attn_dropout_p"):  # MPT's config takes whole numbers only
            module.attn_dropout_p = 0.5
    return model


ONLY_EAGER = {"GPTNeo", "Bloom", "Mpt"}
DROPOUT_CASES = [(name, "eager") for name in DROPOUT_CONFIGS] + [
    (name, "sdpa") for name in DROPOUT_CONFIGS if name not in ONLY_EAGER
]


@pytest.mark.parametrize(("name", "attn_implementation"), DROPOUT_CASES)
def test_after_disable_dropout_two_training_forwards_are_bit_identical(name, attn_implementation):
    model = dropout_model(name, attn_implementation)
    tokens = torch.arange(20).reshape(2, 10)
    before = [model(tokens).logits for _ in range(4)]
    assert not all(torch.equal(before[0], other) for other in before[1:])
    settings = model.config.to_dict()
    assert disable_dropout(model) > 0
    assert model.config.to_dict() == settings  # what is saved keeps its dropout
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    assert disable_dropout(model) == 0


def test_disable_dropout_counts_what_it_switches_off_and_nothing_else():
    model = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Dropout(0.0), torch.nn.Linear(1, 1))
    model[2].attention_dropout, model[2].layerdrop, model[2].dropout_kind = 0.2, 0.3, 4
    assert disable_dropout(model, torch.nn.Dropout2d(0.5)) == 4


# --- Models ---


def test_a_fresh_value_model_predicts_exactly_0(small_model):
    values = completion_values(ValueModel.on_backbone_of(small_model), RAGGED)
    assert (values == 0).all()


def test_a_value_model_on_a_frozen_reward_model_trains_all_its_weights_and_copies_them():
    reward_model = small_gpt2().requires_grad_(False)
    value_model = ValueModel.on_backbone_of(reward_model)
    assert all(p.requires_grad for p in value_model.parameters())
    memory = {p.data_ptr() for p in reward_model.parameters()}
    assert not memory & {p.data_ptr() for p in value_model.parameters()}


def test_the_value_model_shares_no_weight_with_the_policy(small_model):
    model = ValueModel.on_backbone_of(small_model)
    shared = {p.data_ptr() for p in small_model.parameters()}
    assert not shared & {p.data_ptr() for p in model.parameters()}
    assert all(p.requires_grad for p in model.parameters())


def test_every_eos_id_of_the_model_is_found():
    """Llama 3 and Phi 3.5 have several; missing one, rows never stop (huggingface/trl#7039)."""
    model = small_llama()
    model.generation_config.eos_token_id = [39, 38]
    model.config.eos_token_id = 37

    class Tokenizer:
        eos_token_id = 36

    assert eos_token_ids(model, Tokenizer()) == [36, 37, 38, 39]
    model.config.eos_token_id = 0  # GPT-NeoX
    assert 0 in eos_token_ids(model, Tokenizer())


def test_bf16_checkpoints_are_trained_in_float32_so_that_small_steps_count(tmp_path):
    """AdamW at 1e-6 is lost in bfloat16 weights, which have 8 bits of mantissa."""
    small_gpt2().bfloat16().save_pretrained(tmp_path)
    model = load_policy(str(tmp_path)).train()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    completion_logprobs(model, RAGGED, 1.0)[0].sum().backward()
    with_gradient = [p.grad != 0 for p in model.parameters()]
    optimizer.step()
    changed = [p != b for p, b in zip(model.parameters(), before, strict=True)]
    share = torch.cat([c[g] for c, g in zip(changed, with_gradient, strict=True)]).float().mean()
    assert share > 0.9


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_causal_model_loads_and_gives_the_same_logits(name, tmp_path):
    model = SMALL_MODELS[name]().eval()
    model.save_pretrained(tmp_path)
    tokens = torch.arange(10).unsqueeze(0)
    assert torch.equal(load_policy(str(tmp_path)).eval()(tokens).logits, model(tokens).logits)


def test_the_context_length_is_found_under_either_name():
    assert context_length(small_gpt2()) == context_length(small_llama()) == 64
    mpt = MptForCausalLM(
        MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=40, max_seq_len=16)
    )
    assert context_length(mpt) == 16


def test_a_device_that_is_not_there_is_refused():
    for name in ("tpu9", "nonsense", *([] if torch.cuda.is_available() else ["cuda"])):
        with pytest.raises(InputError, match=name):
            pick_device(name)
    assert pick_device("cpu") == torch.device("cpu")


# --- Purity ---


def test_no_function_of_the_mathematics_changes_its_inputs(small_model):
    x, y, mask = random(3, 4), random(3, 4, seed=1), MASK.clone()
    logits, tokens = random(3, 4, 9), torch.randint(9, (3, 4))
    rollout = copy.deepcopy(RAGGED)
    inputs = [x, y, mask, logits, tokens, *vars(rollout).values()]
    before = [t.clone() for t in inputs]
    masked_mean(x, mask)
    masked_whiten(x, mask, shift_mean=False)
    token_logprobs(logits, tokens)
    token_entropy(logits)
    for estimator in ("k1", "k2", "k3"):
        kl_estimate(x, y, estimator)
    policy_ratio(100 * x)
    for level in ("token", "sequence"):
        importance_ratio(x, y, mask, level)
    gae(x, y, mask, 1.0, 0.95)
    completion_logprobs(small_model, rollout, 0.7, max_rows=2)
    completion_values(ValueModel.on_backbone_of(small_model), rollout, max_tokens=9)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_after_an_error_in_a_forward_pass_transformers_has_its_own_function_again():
    before = masking_utils._ignore_causal_mask_sdpa
    with pytest.raises(ZeroDivisionError), inputs.mask_is_known(nn.Linear(1, 1), no_padding=True):
        assert masking_utils._ignore_causal_mask_sdpa is not before
        raise ZeroDivisionError
    assert masking_utils._ignore_causal_mask_sdpa is before


def test_threads_that_tell_transformers_about_their_masks_leave_it_as_it_was(monkeypatch):
    before, inside = masking_utils._ignore_causal_mask_sdpa, threading.Event()
    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", before)  # for other tests

    def forward_pass() -> None:
        with inputs.mask_is_known(nn.Linear(1, 1), no_padding=True):
            inside.set()
            time.sleep(0.05)

    thread = threading.Thread(target=forward_pass)
    with inputs.mask_is_known(nn.Linear(1, 1), no_padding=True):
        thread.start()
        inside.wait(0.05)  # the other one may be inside now, or wait until this one is done
    thread.join()
    assert masking_utils._ignore_causal_mask_sdpa is before


def test_what_one_thread_knows_of_its_mask_is_not_believed_of_another_threads_mask():
    expected = small_llama()(input_ids=RAGGED.tokens, attention_mask=RAGGED.attention_mask).logits
    model = small_llama()
    masked = {"input_ids": RAGGED.tokens, "attention_mask": RAGGED.attention_mask}
    with ThreadPoolExecutor(1) as other, inputs.mask_is_known(model, no_padding=True):
        found = other.submit(lambda: model(**masked).logits).result()
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_a_compiled_forward_pass_leaves_transformers_as_it_is():
    """torch.compile guards on the functions that it has seen: a new one each time would be compiled
    again in every forward pass.
    """
    torch._dynamo.reset()  # after too many other forward passes it compiles nothing, in silence
    model, traced = small_gpt2(), []

    def noting(graph, inputs):
        traced.append(masking_utils._ignore_causal_mask_sdpa)
        return graph

    model.base_model.compile(backend=noting, dynamic=True)
    with torch.no_grad():
        found, _ = completion_logprobs(model, RAGGED, 1.0)
        expected, _ = completion_logprobs(small_gpt2(), RAGGED, 1.0)
    assert set(traced) == {masking_utils._ignore_causal_mask_sdpa}
    assert torch.allclose(found, expected, atol=1e-5)


# --- Micro-batches and chunks ---


@pytest.mark.parametrize(
    ("max_rows", "max_tokens"), [(None, None), (1, None), (4, None), (None, 18), (None, 24), (2, 1)]
)
def test_micro_batches_hold_every_row_once_and_no_more_than_allowed(max_rows, max_tokens):
    rows = torch.tensor([5, 0, 3, 2, 4])
    pairs = micro_batches(IN_GROUPS, rows, max_rows=max_rows, max_tokens=max_tokens)
    batches = [batch for batch, _ in pairs]
    assert sorted(torch.cat(batches).tolist()) == [0, 2, 3, 4, 5]
    assert all(torch.equal(part.tokens, IN_GROUPS.tokens[batch]) for batch, part in pairs)
    lengths = IN_GROUPS.completion_mask.sum(1)
    order = lengths[torch.cat(batches)].tolist()
    assert order == sorted(order, reverse=True), "long rows together, or short ones are padded"
    for batch in batches:
        part = IN_GROUPS[batch]
        real = zip(part.tokens[:, :4], part.attention_mask[:, :4].bool())
        prompts = {tuple(row[mask].tolist()) for row, mask in real}
        tokens = len(prompts) * max(map(len, prompts))
        tokens += len(batch) * part.completion_mask.sum(1).max()
        assert max_rows is None or len(batch) <= max_rows
        assert max_tokens is None or len(batch) == 1 or tokens <= max_tokens
    if (max_rows, max_tokens) == (None, 18):
        assert [len(batch) for batch in batches] == [2, 3]


def test_rows_that_are_not_wanted_are_left_out_whatever_the_order_of_the_others():
    wanted = torch.tensor([True, False, True, False, True, False])
    pairs = micro_batches(IN_GROUPS, torch.tensor([5, 4, 3, 0, 1]), wanted, max_rows=2)
    assert sorted(row for rows, _ in pairs for row in rows.tolist()) == [0, 4]
    (rows, part), *more = micro_batches(IN_GROUPS, torch.tensor([5, 3, 1]), wanted)
    assert rows.tolist() == [5] and len(part.tokens) == 1 and not more, "one, for the optimiser"


def counted_gradients(model, monkeypatch, **options) -> tuple[int, Tensor, list[Tensor]]:
    """(tokens read, log-probs and values, gradients) of IN_GROUPS, in float64."""
    backbone, read = model.base_model, []
    forward = type(backbone).forward

    def spy(self, input_ids, *args, **kwargs):
        read.append(input_ids.numel())
        return forward(self, input_ids, *args, **kwargs)

    spy.__signature__ = inspect.signature(forward)
    model.zero_grad()
    value_model = ValueModel(backbone, model.config.hidden_size).double()
    torch.nn.init.ones_(value_model.head.weight)
    with monkeypatch.context() as m:
        m.setattr(type(backbone), "forward", spy)
        logprobs, _ = completion_logprobs(model, IN_GROUPS, 0.7, **options)
        num_tokens = sum(read)
        values = completion_values(value_model, IN_GROUPS, **options)
    both = torch.stack([logprobs, values])
    (both * torch.linspace(-1, 1, both.numel()).view_as(both)).sum().backward()
    return num_tokens, both.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(("make", "tolerance"), [(small_gpt2, 1e-12), (small_llama, 1e-5)])
@pytest.mark.parametrize("max_tokens", [None, 18])
def test_a_prompt_is_read_once_for_all_its_completions_and_the_gradient_is_the_same(
    make, tolerance, max_tokens, monkeypatch
):
    """Llama normalises in float32, whatever its weights are."""
    model = make().double().train()
    shared = counted_gradients(model, monkeypatch, max_tokens=max_tokens)
    alone = counted_gradients(model, monkeypatch, max_rows=1)
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
    model = load_policy("tiny").eval()
    prompts = [torch.arange(6).add(k).remainder(10).tolist() for k in range(8)]
    completions = [[k % 10, 1, 2] for k in range(512)]  # fewer are added up by one thread
    rollout = make_rollout([prompts[k % 8] for k in range(512)], completions)

    def gradient() -> Tensor:
        model.zero_grad()
        logprobs, _ = completion_logprobs(model, rollout, 1.0)
        (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(5))
    finally:
        torch.set_num_threads(threads)


def test_entropy_with_excluded_tokens_is_that_of_the_others():
    logits = torch.tensor([[[0.3, -1.0, -torch.inf, 2.0]]], dtype=torch.float64)
    expected = token_entropy(logits[..., [0, 1, 3]])
    assert torch.allclose(token_entropy(logits), expected, rtol=1e-12)


def gradients_of(model, *args, **kwargs) -> tuple[list[Tensor], Tensor, Tensor]:
    model.zero_grad()
    logprobs, entropy = completion_logprobs(model, RAGGED, *args, **kwargs)
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
    return [p.grad.clone() for p in model.parameters()], logprobs.detach(), entropy


def test_log_probs_in_chunks_have_the_same_values_and_gradients(small_model, monkeypatch):
    whole = gradients_of(small_model, 0.7)
    monkeypatch.setattr(forward, "CHUNK", 3 * small_model.config.vocab_size)
    chunked = gradients_of(small_model, 0.7, max_tokens=20)
    for g, expected in zip(chunked[0], whole[0], strict=True):  # sums in another order
        assert torch.allclose(g, expected, atol=2e-6 * float(expected.abs().max()))
    assert torch.allclose(chunked[1], whole[1], atol=1e-5)
    assert torch.allclose(chunked[2], whole[2], atol=1e-5)


def test_no_tensor_of_all_logits_is_ever_made_neither_forward_nor_backward(monkeypatch):
    """(rows, T, V) in float32 is what a step would run out of memory with."""
    model, largest = small_gpt2(vocab_size=5000), []
    monkeypatch.setattr(forward, "CHUNK", 2 * 5000)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                weight = (32, 5000)
                if isinstance(x, torch.Tensor) and x.shape[-1:] == (5000,) and x.shape != weight:
                    largest.append(x.numel())
            return out

    def keep(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1:] != (5000,) or x.shape == (32, 5000), "logits kept for the backward pass"
        return x

    with Watch(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gradients_of(model, 1.0)
    assert largest and max(largest) <= 2 * 5000


def test_padding_columns_are_not_read(small_model, monkeypatch):
    widths, forward = [], type(small_model.base_model).forward

    def spy(self, *args, **kwargs):
        widths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    spy.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(small_model.base_model), "forward", spy)
    prompts, completions = [[1, 2, 3], [4]], [[5, 6, EOS], [7, EOS]]
    wide = make_rollout(prompts, completions, extra_left=4, extra_right=6)
    assert torch.allclose(
        completion_logprobs(small_model, wide, 1.0)[0][:, :3],
        completion_logprobs(small_model, make_rollout(prompts, completions), 1.0)[0],
        atol=1e-5,
    )
    assert widths == [5, 5]  # and not the last token, which predicts nothing


def test_in_bfloat16_the_backbone_rounds_and_values_stay_float32(small_model):
    """In bfloat16 they would have three digits."""
    value_model = ValueModel.on_backbone_of(small_model)
    torch.nn.init.normal_(value_model.head.weight)
    exact = completion_values(value_model, RAGGED)
    values = completion_values(value_model, RAGGED, bf16=True)
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
    assert 0 < (values - exact).abs().mean() < 0.1 * exact.abs().mean()


def test_in_bfloat16_log_probs_and_entropies_are_float32_and_close(small_model):
    exact = completion_logprobs(small_model, RAGGED, 1.0)
    rounded = completion_logprobs(small_model, RAGGED, 1.0, bf16=True)
    for x, expected in zip(rounded, exact, strict=True):
        assert x.dtype == torch.float32
        assert 0 < (x - expected).abs().mean() < 0.05


def test_a_model_without_gradient_checkpointing_is_refused_in_one_line(small_model, monkeypatch):
    monkeypatch.setattr(type(small_model.base_model), "supports_gradient_checkpointing", False)
    config = SimpleNamespace(gradient_checkpointing=True, bf16=False, compile=False)
    with pytest.raises(InputError, match=r"^--gradient_checkpointing: [^\n]*$"):
        set_up_training(config, small_model)
