"""common.py at its extremes: NaN, overflow, nothing on the mask. test_taught.py has its formulas by
numbers, and test_by_hand.py by pages. forward.py: log-probs and values of completions against plain
forward passes.
"""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from small import (
    EOS,
    IN_GROUPS,
    RAGGED,
    RAGGED_ROWS,
    make_rollout,
    near,
    small_gpt2,
    small_llama,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import forward
from common import (
    Rollout,
    completion_mask,
    disable_dropout,
    gae,
    kl_estimate,
    masked_mean,
    masked_whiten,
    policy_ratio,
    schedule,
    token_entropy,
    token_logprobs,
)
from forward import ValueModel, completion_logprobs, completion_values, micro_batches
from plumbing.models import add_adapter, fuse, set_up_training

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
OFF = ~MASK


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- Masks and statistics over them ---


@pytest.mark.problem("completion_mask", 1)
def test_the_first_of_several_eos_ids_ends_a_completion():
    completions = torch.tensor([[5, 38, 7], [5, 0, 38], [5, 6, 7], [0, 0, 1]])
    mask = completion_mask(completions, [38, 0])
    assert mask.dtype == torch.bool, "of bool: whoever calls it inverts it with ~"
    near(mask, [[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]], "38 and 0 are EOS: which comes first?")
    assert completion_mask(completions, []).all(), "without an EOS id nothing is masked"


@pytest.mark.problem("masked_whiten", 1)
def test_means_and_whitening_ignore_nan_off_the_mask():
    x = (random(3, 4) * 7 + 100).masked_fill(OFF, torch.nan)
    assert masked_mean(x, MASK).item() == pytest.approx(x[MASK].mean().item())
    assert masked_mean(x, MASK, dim=1).tolist() == pytest.approx(x.nanmean(1).tolist())
    white = masked_whiten(x, MASK)
    hint = "NaN at padding has no influence: 0 * NaN is NaN, so fill, don't multiply"
    assert white[MASK].mean().item() == pytest.approx(0, abs=1e-9), hint
    assert (white[OFF] == 0).all(), "0 off the mask"


@pytest.mark.problem("masked_whiten", 1)
def test_no_number_and_no_variance_give_no_nan():
    assert masked_mean(torch.ones(2, 3), torch.zeros(2, 3)).item() == 0
    equal = masked_whiten(torch.full((3, 4), 0.3), MASK)
    near(equal, torch.zeros(3, 4), "equal numbers become 0", atol=1e-2)
    single = masked_whiten(torch.full((1, 1), 1.1), torch.ones(1, 1))
    near(single, [[0.0]], "a single number becomes 0: n - 1 is 0, and 0 / 0 is NaN", atol=0)
    tiny = torch.tensor([[1e-6, -1e-6]]).double()  # so small that n or n - 1 is no matter
    near(
        masked_whiten(tiny, tiny != 0), [[0.01, -0.01]], "1e-8 is added to the variance", rtol=1e-3
    )


# --- Log-probs and entropy ---


@pytest.mark.problem("token_logprobs", 1)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_log_probs_have_any_shape_and_large_logits(shape):
    chances = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    tokens = torch.arange(math.prod(shape)).view(shape) % 3
    logits = (chances.log() + 1e3).expand(*shape, 3).clone().requires_grad_()  # exp overflows
    found = token_logprobs(logits, tokens)
    assert found.dtype == torch.float64, "only half precision is converted: float64 stays"
    assert token_entropy(logits).shape == shape
    near(found, chances[tokens].log(), "of logits near 1000, whose exp overflows", 0, 1e-9)
    gradient = torch.autograd.grad(found.sum(), logits)[0]
    assert gradient.isfinite().all(), "the gradient is finite, though exp(1000) isn't"


@pytest.mark.problem("token_logprobs", 1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_scored_in_float32(dtype):
    logits, tokens = (5 * random(2, 3, 50)).to(dtype), torch.arange(6).view(2, 3)
    found, expected = token_logprobs(logits, tokens), token_logprobs(logits.float(), tokens)
    near(found, expected, "half precision becomes float32 before the softmax, not after", 0, 0)
    assert torch.equal(token_entropy(logits), token_entropy(logits.float()))
    assert token_entropy(logits).dtype == torch.float32


def test_entropy_counts_a_probability_of_0_as_0():
    for needs_gradient in (False, True):
        impossible = torch.tensor([[[0.0, -torch.inf, 0.0]]], requires_grad=needs_gradient)
        assert token_entropy(impossible).item() == pytest.approx(math.log(2))


# --- KL, ratio, GAE ---


@pytest.mark.problem("kl_estimate", 2)
def test_k3_is_never_negative_and_exact_near_0():
    d = torch.tensor([-1e-4, 0.0, 1e-4, 2.0])
    k3 = kl_estimate(d, torch.zeros(4), "k3")
    assert (k3 >= 0).all() and k3[3].item() == pytest.approx(1.135335), "never negative"
    hint = "5e-9 at 1e-4: a difference of nearly equal numbers loses all its digits"
    assert k3[2].item() == pytest.approx(5e-9, rel=0.2), hint
    with pytest.raises(ValueError):
        kl_estimate(d, d, "k4")


def test_ratio_and_k3_keep_gradients_where_exp_overflows():
    """In float32 above 88. Up to 20, beyond any clip range, the ratio is exp to the bit."""
    log_ratio = torch.linspace(-120, 20, 1000)
    assert torch.equal(policy_ratio(log_ratio), log_ratio.exp())
    x = torch.tensor([0.5, 20.5, 89.0, 1e6], requires_grad=True)
    exp = torch.tensor([0.5, 20, 20, 20]).exp()
    ratio, k3 = policy_ratio(x), kl_estimate(torch.zeros(4), x, "k3")
    for found, expected, slope in ((ratio, exp, exp), (k3, exp - 1 - x, exp - 1)):
        assert torch.allclose(found, expected)
        assert torch.allclose(torch.autograd.grad(found.sum(), x)[0], slope)


@pytest.mark.problem("gae", 1, "padding")
@pytest.mark.problem("gae", 1, "one_token")
@pytest.mark.parametrize(
    "mask",
    [MASK, MASK & torch.tensor([1, 0, 1, 1]).bool(), MASK[:, :1]],
    ids=["padding", "holes", "one_token"],
)
def test_gae_is_0_and_reads_nothing_off_the_mask(mask):
    rewards, values = random(*mask.shape), random(*mask.shape, seed=1)
    before = [x.clone() for x in (rewards, values, mask)]
    advantages, returns = gae(rewards, values, mask, 0.9, 0.5)
    assert all(map(torch.equal, before, (rewards, values, mask))), "no input is changed"
    last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    near(advantages[last], (rewards - values)[last], "at the last token: V after it is 0")
    near(returns, (advantages + values) * mask, "returns: advantages plus values, 0 off the mask")
    dirty = (x.masked_fill(~mask, torch.nan) for x in (rewards, values))
    for x, expected in zip(gae(*dirty, mask.long(), 0.9, 0.5), (advantages, returns), strict=True):
        near(x, expected, "NaN at padding has no influence: 0 * NaN is NaN")
        assert (x[~mask] == 0).all(), "0 off the mask"


# --- Dropout, the value head ---


SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
OPT = SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16}  # as in OPT-350m, where the two differ
EXPERTS = {"num_local_experts": 4, "num_key_value_heads": 1, "intermediate_size": 24}
DROPOUT_CONFIGS = {
    "OPT": OPT | {"dropout": 0.5, "layerdrop": 0.5},
    "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 2, "attn_pdrop": 0.5, "resid_pdrop": 0.5},
    "Falcon": SIZES | {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "Mixtral": SIZES | EXPERTS | {"router_jitter_noise": 0.5},
}


def from_config(name: str, **settings: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=40, **settings)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.problem("disable_dropout", 2, "GPT2")
@pytest.mark.problem("disable_dropout", 1, "OPT Falcon Mixtral")
@pytest.mark.parametrize("name", DROPOUT_CONFIGS)
def test_after_disable_dropout_training_forwards_are_bit_identical(name):
    model = from_config(name, **DROPOUT_CONFIGS[name]).train()

    def all_equal() -> bool:
        first, *others = (model(torch.arange(20).view(2, 10)).logits for _ in range(5))
        return all(torch.equal(first, other) for other in others)

    settings = model.config.to_dict()
    assert not all_equal()
    disable_dropout(model)
    model.train()
    assert all_equal(), "in training mode two passes still differ"
    assert model.config.to_dict() == settings, "the config that is saved keeps its dropout"


@pytest.mark.problem("disable_dropout", 1)
def test_disable_dropout_finds_modules_numbers_and_configs():
    model, other = (
        torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(1, 1)),
        torch.nn.Dropout2d(0.5),
    )
    model[1].attention_dropout, model[1].layerdrop, model[1].dropout_kind = 0.2, 0.3, 4
    model[1].config = config = SimpleNamespace(hidden_dropout=0.4, jitter_noise=0.1)
    sites = disable_dropout(model, other)
    assert (sites, disable_dropout(model, other)) == (6, 0), "probabilities that were above 0"
    assert model[0].p == other.p == 0, "modules, of all models"
    floats = model[1].attention_dropout, model[1].layerdrop
    assert floats == (0, 0), "probabilities that a module has as attributes"
    assert model[1].dropout_kind == 4, "an attribute that is no probability stays"
    assert not any(vars(model[1].config).values()), "probabilities of a module's config"
    assert config.hidden_dropout == 0.4, "the config that is shared stays: change a copy of it"


def test_the_config_under_an_adapter_keeps_its_dropout():
    policy = add_adapter(small_gpt2(dropout=0.1), 2)
    disable_dropout(policy)
    assert policy.get_base_model().config.attn_pdrop == 0.1


@pytest.mark.parametrize("make", [small_gpt2, small_llama, lambda: from_config("OPT", **OPT)])
def test_a_new_value_model_predicts_exactly_0(make):
    origin = make()
    value_model = ValueModel.on_backbone_of(origin)
    assert (completion_values(value_model, RAGGED) == 0).all()
    assert all(p.requires_grad for p in value_model.parameters())
    memory = {p.data_ptr() for p in origin.parameters()}
    assert not memory & {p.data_ptr() for p in value_model.parameters()}
    assert ValueModel.on_backbone_of(origin.bfloat16()).head.weight.dtype == torch.float32


def test_model_inputs_name_the_cache_as_the_model_does():
    x, of_old = torch.ones(2, 3), lambda past_key_values: 0
    for takes, name in ((lambda cache: 0, "cache"), (of_old, "past_key_values")):
        given = forward.model_inputs(SimpleNamespace(forward=takes), x, x, "kept", logits_to_keep=1)
        assert given == {name: "kept"}, "what it doesn't take is left out"


def test_a_model_of_pictures_uses_its_text_config():
    model, states = small_gpt2(), torch.randn(3, 32)
    text = SimpleNamespace(final_logit_softcapping=2.0, hidden_size=16)
    model.config.get_text_config = lambda: text
    expected = 2 * torch.tanh(model.lm_head(states) / 2)
    assert torch.allclose(forward.logits_from(model, states), expected)
    assert ValueModel.on_backbone_of(model).head.in_features == 16


# --- The learning rate ---

RATES = {  # (warm-up, the shares of the rate)
    "long": [(0, [1, 0.8, 0.6, 0.4, 0.2]), (4, [0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.4, 0.2])],
    "short": [(10, [1]), (10, [0.5, 1, 1, 2 / 3, 1 / 3])],  # the rise takes half of the steps
}


@pytest.mark.problem("schedule", 2, "long")
@pytest.mark.problem("schedule", 1, "short")
@pytest.mark.parametrize("run", RATES)
def test_the_rate_rises_in_equal_steps_then_falls(run):
    for warmup_steps, shares in RATES[run]:
        found = [schedule(step, len(shares), warmup_steps) for step in range(len(shares))]
        near(found, shares, f"the rates of {len(shares)} steps, of which {warmup_steps} warm up")


# --- Log-probs and values of completions, in micro-batches ---


def value_model_of(model: PreTrainedModel) -> ValueModel:
    """One whose head is not 0 any more."""
    value_model = ValueModel.on_backbone_of(model)
    torch.nn.init.normal_(value_model.head.weight)
    return value_model


def scores(model: PreTrainedModel, value_model: ValueModel, rollout: Rollout, **options) -> Tensor:
    """Log-probs, entropies and values: (3, B, T)."""
    pair = completion_logprobs(model, rollout, 0.7, entropy_grad=True, **options)
    return torch.stack([*pair, completion_values(value_model, rollout, **options)])


def plain_scores(model: PreTrainedModel, value_model: ValueModel, rollout: Rollout) -> Tensor:
    """The same, of one row after the other, each read once more for each of its tokens."""
    found = value_model.head.weight.new_zeros(3, *rollout.completion_mask.shape)
    for row, (tokens, real) in enumerate(zip(rollout.tokens, rollout.attention_mask)):
        length = int(rollout.completion_mask[row].sum())
        ids = tokens[real]
        for t in range(length):
            seen, token = ids[: len(ids) - length + t], ids[len(ids) - length + t]
            log_p = (model(seen[None]).logits[0, -1] / 0.7).log_softmax(-1)
            state = value_model.backbone(seen[None]).last_hidden_state[0, -1]
            entropy, value = -(log_p.exp() * log_p).sum(), value_model.head(state)[0]
            found[:, row, t] = torch.stack([log_p[token], entropy, value])
    return found


def gradients(x: Tensor, *models: torch.nn.Module) -> list[Tensor]:
    """Of a sum in which every number of x has a weight of its own."""
    weights = [p for model in models for p in model.parameters()]
    weighted = (x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum()
    found = torch.autograd.grad(weighted, weights, retain_graph=True, allow_unused=True)
    return [g for g in found if g is not None]


WIDE = make_rollout(*RAGGED_ROWS, extra_left=2, extra_right=3)
WIDE.tokens[~WIDE.attention_mask] = EOS  # the mask says what is padding, not the ids


@pytest.mark.problem("completion_logprobs", 3)
def test_a_batch_gives_the_log_probs_of_single_rows(small_model):
    hint = "other {}: one column too far, no position ids, no temperature, or not 0 at padding?"
    expected = plain_scores(small_model, value_model_of(small_model), RAGGED)
    found = completion_logprobs(small_model, RAGGED, 0.7)
    near(found[0], expected[0], hint.format("log-probs"), atol=1e-4)
    near(found[1], expected[1], hint.format("entropies"), atol=1e-4)
    assert found[0].requires_grad, "no gradient gets through: is something detached?"
    pairs = zip(gradients(found[0], small_model), gradients(expected[0], small_model), strict=True)
    for x, y in pairs:
        near(x, y, "the log-probs are right, a gradient of the weights isn't", atol=1e-3)


@pytest.mark.problem("completion_logprobs", 1)
def test_entropies_have_no_gradient_and_masks_may_be_numbers(small_model):
    logprobs, entropies = completion_logprobs(small_model, RAGGED, 0.7)
    masks = {"attention_mask": RAGGED.attention_mask, "completion_mask": RAGGED.completion_mask}
    of_numbers = Rollout(**vars(RAGGED) | {name: x.long() for name, x in masks.items()})
    again = completion_logprobs(small_model, of_numbers, 0.7)[0]
    near(again, logprobs, "other log-probs where masks are of 0 and 1 and not of bool", 0, 0)
    value_model = value_model_of(small_model)
    values, again = (completion_values(value_model, x) for x in (RAGGED, of_numbers))
    assert torch.equal(values, again), "masks of 0 and 1"
    if entropies.requires_grad:  # as a part of the tensor that holds both
        no_gradient = not any(g.any() for g in gradients(entropies, small_model))
        assert no_gradient, "entropies have a gradient only with entropy_grad"
    assert completion_logprobs(small_model, RAGGED, 0.7, entropy=False)[1] is None, "not wanted"


@pytest.mark.problem("completion_logprobs", 1)
@pytest.mark.parametrize("rollout", [WIDE, IN_GROUPS], ids=["wide", "in groups"])
def test_padding_shared_prompts_and_micro_batches_change_nothing(small_model, rollout):
    """They equal a loop that reads one more token each time. Without position ids GPT-2 fails here
    by whole nats (huggingface/trl#6800); an off-by-one in logits or values shows as plainly.
    """
    model = small_model.double().train()
    fuse(model)  # Llama's own norm is in float32, whatever its weights are
    models = model, value_model_of(model).train()
    expected = plain_scores(*models, rollout)
    wanted, before = [expected, *gradients(expected, *models)], copy.deepcopy(rollout)
    found = forward.rollout_values(
        models[1], rollout, SimpleNamespace(bf16=False, micro_batch_tokens=18)
    )
    assert torch.allclose(found, expected[2]) and not found.requires_grad
    training = SimpleNamespace(bf16=False, half=None, gradient_checkpointing=True)
    for max_tokens, checkpointed in ((1000, False), (27, False), (1, False), (1000, True)):
        if checkpointed:
            set_up_training(training, model)
            models[1].backbone = copy.deepcopy(model.base_model)  # as a run copies it
            for module in models:
                assert any(getattr(x, "gradient_checkpointing", False) for x in module.modules())
        parts = micro_batches(rollout, max_tokens=max_tokens)
        order = torch.cat([rows for rows, _ in parts]).argsort()
        found = torch.cat([scores(*models, part) for _, part in parts], dim=1)[:, order]
        assert (found[:, ~rollout.completion_mask] == 0).all(), "0 off the mask"
        hint = f"log-probs, entropies and values in micro-batches of {max_tokens} tokens"
        for x, y in zip([found, *gradients(found, *models)], wanted, strict=True):
            near(x, y, hint, 0, 1e-10)
            hint = f"the values are right, a gradient isn't: micro-batches of {max_tokens} tokens"
    assert all(map(torch.equal, vars(rollout).values(), vars(before).values())), "it is changed"


def test_a_pass_reads_each_prompt_once(small_model):
    shapes = []
    small_model.train().base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    for rollout, expected in (
        (IN_GROUPS, [(3, 4), (6, 4)]),  # and not the last token, which predicts nothing
        # A prompt each in one pass, and no column of padding alone.
        (make_rollout([[1, 2, 3], [4]], [[5, 6, EOS], [7]], 4, 6), [(2, 5)]),
        (make_rollout([[1, 2, 3]] * 2, [[5], [6]]), [(1, 3)]),  # of one token: its prompt alone
    ):
        completion_logprobs(small_model, rollout, 1.0)
        assert shapes == expected
        shapes.clear()


def test_chunks_of_logits_change_no_value_and_no_gradient(monkeypatch):
    """(rows, T, V) in float32 is what a step would run out of memory with."""
    model, kept = small_gpt2(vocab_size=5000).double(), []

    def keep(x: Tensor) -> Tensor:
        if x.shape[-1:] == (5000,) and x.shape != (32, 5000):
            kept.append(x)
        return x

    def result(entropy_grad: bool) -> list[Tensor]:
        both = torch.stack(completion_logprobs(model, RAGGED, 0.7, entropy_grad=entropy_grad))
        return [both, *gradients(both, model)]

    wholes = [result(False), result(True)]
    monkeypatch.setattr(forward, "CHUNK", 2 * 5000)  # 9 chunks
    for entropy_grad, whole in enumerate(wholes):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            parts = result(bool(entropy_grad))
        assert all(torch.allclose(x, y, atol=1e-10) for x, y in zip(parts, whole, strict=True))
        assert {len(x) for x in kept} == {2}
        num_kept = len({x.data_ptr() for x in kept})
        assert num_kept == (4 if entropy_grad else 5), "of one chunk, or the log-probs of five"


@pytest.mark.parametrize("make", [small_gpt2, small_llama, lambda: from_config("OPT", **OPT)])
def test_autocast_leaves_logits_and_values_in_float32(make):
    """Large logits show it: rounded to bfloat16 they put log-probs about .1 off. OPT's backbone
    ends with a linear layer: its states are in bfloat16.
    """
    model = make()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)
    value_model, row, states = value_model_of(model), RAGGED[2:3], []
    for backbone in (model.base_model, value_model.backbone):
        backbone.register_forward_hook(lambda _, __, out: states.append(out[0][0, 1:].float()))
    logprobs, _, values = scores(model, value_model, row, bf16=True)[:, 0]
    logits = model.get_output_embeddings()(states[0]) / 0.7
    assert torch.allclose(logprobs, token_logprobs(logits, row.tokens[0, -5:]), atol=1e-3)
    assert torch.allclose(values, value_model.head(states[1]).squeeze(1), atol=1e-5)
    scores(model, value_model, row)
    assert not torch.equal(states[0], states[2]) and not torch.equal(states[1], states[3])


@pytest.mark.parametrize("max_tokens", [1, 14, 18, 19, 27, 1000])
def test_micro_batches_hold_every_row_once(max_tokens):
    lengths, rows = IN_GROUPS.completion_mask.sum(1), torch.tensor([5, 0, 3, 2, 4])

    def num_tokens(rows):  # a prompt of 4 tokens that rows share is read once
        return 4 * len(IN_GROUPS.tokens[rows, :4].unique(dim=0)) + len(rows) * lengths[rows].max()

    parts = micro_batches(IN_GROUPS, rows, max_tokens=max_tokens)
    batches = [batch for batch, _ in parts]
    expected = rows[lengths[rows].argsort(descending=True, stable=True)]
    assert torch.equal(torch.cat(batches), expected), "long rows together, or short ones are padded"
    for batch, part in parts:
        for name, x in vars(part).items():
            assert torch.equal(x, getattr(IN_GROUPS, name)[batch]), name
        assert len(batch) == 1 or num_tokens(batch) <= max_tokens
    for batch, following in itertools.pairwise(batches):
        assert num_tokens(torch.cat([batch, following[:1]])) > max_tokens, "one more fits"
    alike = make_rollout([[n, 1, 2] for n in range(30)], [[3]] * 30)  # 16 keep it in any sort
    order = torch.cat([rows for rows, _ in micro_batches(alike, max_tokens=30)])
    assert torch.equal(order, torch.arange(30))
