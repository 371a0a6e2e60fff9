"""One test per known mistake in systems like this one, named after it; where it was seen, and how.

Threads are huggingface/trl unless another repository is named.
"""

import copy
import dataclasses
import inspect
import json
import math
import random
from functools import partial

import pytest
import torch
from small import (
    EOS,
    RAGGED,
    byte_tokenizer,
    in_float64,
    letter_tokenizer,
    make_rollout,
    more_padding,
    save_model,
    small_gpt2,
    small_llama,
)
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
)

import grpo
import ppo
import rloo
import sampling
from common import (
    Rollout,
    ValueModel,
    completion_mask,
    disable_dropout,
    gae,
    importance_ratio,
    kl_estimate,
    masked_mean,
    masked_whiten,
    policy_ratio,
    reference,
    token_entropy,
    token_logprobs,
)
from grpo import group_advantages, grpo_loss
from plumbing.config import parse_flags
from plumbing.data import RewardModel, Task
from plumbing.errors import InputError
from plumbing.forward import completion_logprobs, completion_values, micro_batches
from plumbing.inputs import model_inputs
from plumbing.loading import add_adapter, load_policy
from plumbing.scoring import prompt_tokens, score
from ppo import policy_loss, shape_rewards
from rloo import rloo_advantages, rloo_loss
from sampling import draw, generate

SCRIPTS = [ppo, grpo, rloo]
LOSS_TYPES = ["grpo", "dapo", "dr_grpo", "cispo"]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def losses(logprobs, old, advantages, mask) -> dict[str, torch.Tensor]:
    """The scalar loss of RLOO and of each loss type of GRPO on the same rows. That of PPO is made
    in its loop: see the tests that run it.
    """
    options = {"clip_range": 0.2, "clip_range_high": 1.5, "cispo_bound": 1.5}
    options["max_new_tokens"] = mask.shape[1]
    return {"rloo": rloo_loss(logprobs, old, advantages, mask, clip_range=0.2)[0]} | {
        loss_type: grpo_loss(logprobs, old, advantages, mask, loss_type=loss_type, **options)[0]
        for loss_type in LOSS_TYPES
    }


def logprobs_of(model, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """completion_logprobs without the entropies: (B, T)."""
    return completion_logprobs(model, rollout, temperature)[0]


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__)
def job(request, make_job):
    return make_job(request.param)


@pytest.fixture(params=[grpo, rloo], ids=lambda script: script.__name__)
def group_job(request, make_job):
    return make_job(request.param)


def spy_on(monkeypatch, module, name: str, after) -> None:
    """Call after(result, *args) at every call of module.name; what it returns, if anything, takes
    the place of the result.
    """
    original = getattr(module, name)

    def spied(*args, **kwargs):
        result = original(*args, **kwargs)
        other = after(result, *args)
        return result if other is None else other

    monkeypatch.setattr(module, name, spied)


def early_stopper(folder, pad_is_eos: bool = False) -> str:
    """A small model that ends its completions at any of three tokens, so that rows are ragged."""
    model, tokenizer = small_gpt2(0.1, vocab_size=20), letter_tokenizer()
    model.generation_config.eos_token_id = [3, 5, 19]
    tokenizer.pad_token = tokenizer.eos_token if pad_is_eos else None
    return save_model(folder / "early-stopper", model, tokenizer)


def logprobs_of_the_update(monkeypatch, script) -> list[tuple[Rollout, torch.Tensor]]:
    """(rows, log-probs) of every micro-batch; after the run the log-probs hold their gradient."""
    seen = []

    def after(result, model, rows, *args):
        logprobs = result[0] if isinstance(result, tuple) else result
        if logprobs.requires_grad:
            logprobs.retain_grad()
            seen.append((rows, logprobs))

    spy_on(monkeypatch, script, "completion_logprobs", after)
    return seen


def generated_for_training(monkeypatch, script) -> list[tuple[dict, Rollout]]:
    """(options, rollout) of every call of sampling.generate that the loop makes, evaluations left
    out.
    """
    seen, generate, sample = [], sampling.generate, script.sample

    def spy(*args, **options):
        seen.append((options, generate(*args, **options)))
        return seen[-1][1]

    def sample_for_training(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "generate", spy)
            return sample(*args, **options)

    monkeypatch.setattr(script, "sample", sample_for_training)
    return seen


# --- Masks, padding, EOS ---


@pytest.mark.parametrize("name", ["rloo", *LOSS_TYPES])
def test_01_masks_inferred_from_ids_drop_eos_where_pad_equals_eos(name):
    """#4970, #3091: `ids != pad` takes EOS out of the loss. Also tiny-grpo, nanochat."""
    prompts, prompt_mask = (
        torch.tensor([[1, EOS, 2], [0, 0, 3]]),
        torch.tensor([[1] * 3, [0, 0, 1]]),
    )
    values = []
    for pad in (0, EOS):
        model = small_gpt2().eval()
        rollout = generate(
            model, prompts, prompt_mask, num_generations=12, max_new_tokens=6, temperature=2.0,
            eos_token_ids=[EOS], pad_token_id=pad, generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        ends = (rollout.tokens[:, 3:] == EOS) & (rollout.tokens[:, 3:] == EOS).cumsum(1).eq(1)
        assert 3 < ends.any(1).sum() < 24, "no row ended with EOS, or all did"
        assert rollout.completion_mask[ends].all(), "the EOS token is not in the mask?"
        logprobs = logprobs_of(model, rollout, 0.7)
        logprobs.retain_grad()
        loss = losses(logprobs, logprobs.detach(), torch.ones(24), rollout.completion_mask)[name]
        loss.backward()
        assert (logprobs.grad[ends] != 0).all(), "the EOS token is not in the loss?"
        assert (logprobs.grad[~rollout.completion_mask] == 0).all(), "padding is in the loss?"
        values.append((rollout.completion_mask, logprobs.detach(), loss.item()))
    assert torch.equal(values[0][0], values[1][0]), "the mask depends on the id of the padding?"
    assert torch.allclose(values[0][1], values[1][1], atol=1e-6)
    assert values[0][2] == pytest.approx(values[1][2])


def test_01_in_a_run_where_pad_equals_eos_every_eos_token_gets_a_gradient(
    job, tmp_path, monkeypatch
):
    folder = early_stopper(tmp_path, pad_is_eos=True)
    seen = logprobs_of_the_update(monkeypatch, job.script)
    job(model=folder, completions=32, temperature=3.0, num_epochs=1, num_mini_batches=1)
    num_eos = 0
    for rows, logprobs in seen:
        width = rows.completion_mask.shape[1]
        for ids, gradient in zip(rows.tokens[:, -width:].tolist(), logprobs.grad, strict=True):
            n = next((i + 1 for i, token in enumerate(ids) if token in (3, 5, 19)), width)
            assert (gradient[n:] == 0).all(), "what follows EOS is in the loss?"
            if gradient.any():  # the advantage is not 0
                num_eos += n < width
                assert (gradient[:n] != 0).all(), "the EOS token is not in the mask of the loss?"
    assert num_eos > 5, "no row ended with EOS"


def test_02_left_padding_without_position_ids_shifts_learned_positions():
    """#6800: 34 nats on GPT-2, whose positions are learned. Also minRLHF, rlhf-book."""
    short = make_rollout([[1, 2, 3]], [[5, 6, EOS]])
    padded = make_rollout([[1, 2, 3], [8] * 8], [[5, 6, EOS], [5, 6, EOS]])
    model = small_gpt2()
    a, b = (logprobs_of(model, rollout)[:1] for rollout in (short, padded))
    assert torch.allclose(a, b, atol=1e-5), "position ids not counted from the attention mask?"


def test_03_one_of_several_eos_ids_is_missed():
    """#7039: with Phi 3.5 and Llama 3 nearly every row counted as truncated."""
    completions = torch.tensor([[5, 38, 7], [5, 39, 7], [5, 6, 7]])
    mask = completion_mask(completions, [38, 39]).long().tolist()
    expected = [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert mask == expected, "the EOS token is not in the mask, or only one EOS id counts?"


@pytest.mark.parametrize("name", ["rloo", *LOSS_TYPES])
def test_04_an_empty_completion_divides_by_zero(name):
    """grpo_trainer.py:3225 divides by a mask that may be empty: EOS alone, or a masked row; where
    truncated completions are masked, a whole minibatch.
    """
    for lengths in ([1, 0], [0, 0]):
        mask = torch.arange(3) < torch.tensor(lengths)[:, None]
        logprobs = randn(2, 3).requires_grad_()
        loss = losses(logprobs, logprobs.detach(), torch.ones(2).double(), mask)[name]
        loss.backward()
        assert loss.isfinite() and logprobs.grad.isfinite().all(), "divided by a count of 0?"
        assert (logprobs.grad[~mask] == 0).all() and (logprobs.grad[mask] != 0).all()


def test_05_the_score_is_read_at_the_wrong_token(tmp_path):
    """#5813, #6805: a classifier's head read before EOS, or at a pad, where pad equals EOS."""
    config = GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, num_labels=1)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 256
    folder = save_model(tmp_path, GPT2ForSequenceClassification(config), byte_tokenizer())
    model = RewardModel(folder, torch.device("cpu"))
    texts = ["a", "a longer text", "<|endoftext|>", "ends<|endoftext|>", "no"]
    together = model([""] * 5, texts)
    for text, value in zip(texts, together, strict=True):
        ids = byte_tokenizer()(text).input_ids
        with torch.no_grad():
            hidden = model.model.transformer(torch.tensor([ids])).last_hidden_state
            expected = model.model.score(hidden)[0, -1, 0].item()
        assert value == pytest.approx(expected, abs=1e-5)


def test_06_the_score_sits_in_the_slot_after_eos():
    """#3750, #5338: with lambda below 1 only a part of it reaches EOS."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    scores = torch.tensor([2.0, 3.0])
    rewards = shape_rewards(scores, torch.zeros(2, 3), mask, 0.0)
    every, _ = gae(rewards, torch.zeros(2, 3), mask, 1.0, 1.0)
    last, _ = gae(rewards, torch.zeros(2, 3), mask, 1.0, 0.0)
    assert every.tolist() == [[2, 2, 0], [3, 3, 3]], "the score is not on the last real token?"
    assert last.tolist() == [[0, 2, 0], [0, 0, 3]], "the score is not on the last real token?"


@pytest.mark.parametrize("extra", [1, 7])
def test_07_advantages_and_losses_feel_the_padding(extra):
    """SkyRL #1305, miles #1827, minRLHF: means and GAE over pads."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    logprobs, old, ref, values = (randn(3, 4, seed=s) for s in range(4))

    def numbers(extra: int) -> list[float]:
        def pad(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, torch.full((3, extra), 9.0, dtype=torch.float64)], dim=1)

        m = torch.cat([mask, torch.zeros(3, extra).bool()], dim=1)
        rewards = shape_rewards(torch.ones(3), pad(old - ref), m, 0.1)
        advantages, returns = gae(rewards, pad(values), m, 1.0, 0.95)
        white = masked_whiten(advantages, m)
        results = losses(pad(logprobs), pad(old), torch.tensor([1.0, -1, 2]).double(), m)
        del results["dr_grpo"]  # its constant is max_new_tokens, here the width
        sums = [advantages.sum(), returns.sum(), (white**3).sum(), masked_mean(pad(old), m)]
        return [x.item() for x in [*sums, *results.values()]]

    assert numbers(0) == pytest.approx(numbers(extra)), "a sum or a mean over padding?"


@pytest.mark.parametrize("extra", [0, 7])
def test_07_in_ppo_every_token_of_a_minibatch_weighs_the_same_and_padding_nothing(
    extra, make_job, tmp_path, monkeypatch
):
    """The derivative of the loss in ppo.py by the loss of each token: 1 / tokens of the minibatch,
    and for the value loss vf_coef times that.
    """
    job, seen = make_job(ppo), {"policy_loss": [], "value_loss": []}
    spy_on(monkeypatch, ppo, "sample", lambda rollout, *args: more_padding(rollout, extra))
    rows_seen = logprobs_of_the_update(monkeypatch, ppo)

    def keep(terms: list, result: tuple[torch.Tensor, torch.Tensor], *args) -> None:
        result[0].retain_grad()
        terms.append(result[0])

    for name, terms in seen.items():
        spy_on(monkeypatch, ppo, name, partial(keep, terms))
    flags = {"num_mini_batches": 2, "num_epochs": 1, "micro_batch_size": 3, "vf_coef": 0.4}
    job(model=early_stopper(tmp_path), completions=16, temperature=3.0, **flags)
    masks = [rows.completion_mask for rows, _ in rows_seen]
    assert [len(mask) for mask in masks] == [3, 3, 2] * 2
    for start in (0, 3):
        chosen = slice(start, start + 3)
        num_tokens = torch.cat(masks[chosen]).sum()
        assert num_tokens < 8 * 6, "no row ended early: nothing is padded"
        for name, weight in (("policy_loss", 1.0), ("value_loss", 0.4)):
            for term, mask in zip(seen[name][chosen], masks[chosen], strict=True):
                hint = f"{name} not divided by the tokens of the minibatch, or not masked?"
                assert torch.allclose(term.grad, mask * weight / num_tokens), hint


# --- Log-probs and sampling ---


def test_08_the_temperature_is_missing_from_the_log_probs():
    """#3029, #4159, open-instruct #1678: the ratio is about 2 before the first update."""
    model = small_gpt2().eval()
    prompts = torch.tensor([[1, 2], [3, 4]])
    rollout = generate(
        model, prompts, torch.ones_like(prompts), num_generations=8, max_new_tokens=6,
        temperature=0.7, eos_token_ids=[EOS], pad_token_id=0,
    )  # fmt: skip
    logprobs = logprobs_of(model, rollout, 0.7)
    hint = "logits not divided by the temperature, or read one position off?"
    assert torch.allclose(logprobs, rollout.logprobs, atol=1e-5), hint
    assert not torch.allclose(logprobs_of(model, rollout), rollout.logprobs, atol=0.1)


def test_09_the_checkpoints_generation_config_leaks_into_sampling():
    """#5783: temperature 1 counted as unset, and Qwen sampled nearly greedily."""
    model = small_gpt2().eval()
    poison = {"temperature": 1e-6, "top_k": 1, "repetition_penalty": 1.3, "do_sample": True}
    model.generation_config.update(**poison, suppress_tokens=[1, 2, 3])
    prompt = torch.tensor([[1, 2]])
    rollout = generate(
        model, prompt, torch.ones_like(prompt), num_generations=4000, max_new_tokens=1,
        temperature=2.0, eos_token_ids=[EOS], pad_token_id=0,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    with torch.no_grad():
        expected = (model(prompt).logits[0, -1] / 2.0).softmax(-1)
    shares = torch.bincount(rollout.tokens[:, -1], minlength=40) / 4000
    assert (shares - expected).abs().max() < 0.03


def test_10_dropout_that_is_no_module_stays_on():
    """#2042, LlamaFactory #10779: Llama's attention_dropout is a float, not an nn.Dropout."""
    model = small_llama(dropout=0.5).train()
    tokens = torch.arange(12).view(2, 6)
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    disable_dropout(model)
    hint = "dropout that is a float attribute, not a module, is still on?"
    assert torch.equal(model(tokens).logits, model(tokens).logits), hint


def test_11_top_k_and_top_p_make_the_kl_negative(job, monkeypatch):
    """#351, #1161: the sampler is not the policy. The scripts never ask for either."""
    in_float64(monkeypatch, job.script)
    seen = generated_for_training(monkeypatch, job.script)
    assert job()[0]["objective/kl"] == pytest.approx(0, abs=1e-9)
    assert len(seen) == 2, "8 completions, 4 at a time"
    assert not any({"top_k", "top_p"} & set(options) for options, _ in seen)


@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_p": 0.5}])
def test_11_what_top_k_and_top_p_do_to_the_estimate(options):
    """The KL to a sharper reference is positive; from the likely tokens alone it looks negative."""
    model = small_gpt2().eval()
    prompt = torch.tensor([[1, 2, 3]])
    rollout = generate(
        model, prompt, torch.ones_like(prompt), num_generations=200, max_new_tokens=4,
        eos_token_ids=[EOS], pad_token_id=0, generator=torch.Generator().manual_seed(0), **options,
    )  # fmt: skip
    policy = logprobs_of(model, rollout)
    sharper = logprobs_of(model, rollout, 0.7)
    kl = kl_estimate(policy, sharper, "k1").sum(1).mean()
    assert kl < 0 if options else kl > 0


def test_12_old_log_probs_of_the_decode_loop_differ_from_those_of_the_training_forward(
    job, monkeypatch
):
    """#2906, arXiv 2510.26788: in bfloat16 the clip then voids tokens before any update. Here they
    are far off, and nothing may feel it.
    """

    def after(rollout, *args):
        return dataclasses.replace(rollout, logprobs=rollout.logprobs - 0.5)

    in_float64(monkeypatch, job.script)
    spy_on(monkeypatch, job.script, "sample", after)
    line = job(num_epochs=2)[0]
    hint = "the old log-probs are those of the sampler?"
    assert line["val/ratio_max_dev_first"] < 1e-12 and line["objective/kl"] == 0, hint


def test_13_small_steps_are_lost_in_bfloat16_weights(tmp_path):
    """#7268: a learning rate of 1e-6 is below the resolution of 8 bits of mantissa."""
    small_gpt2().bfloat16().save_pretrained(tmp_path)
    model = load_policy(str(tmp_path))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    logprobs_of(model, RAGGED).sum().backward()
    optimizer.step()
    moved = [(p != b)[p.grad != 0] for p, b in zip(model.parameters(), before, strict=True)]
    assert torch.cat(moved).float().mean() > 0.9


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_14_log_probs_drift_with_the_batch_shape(make):
    """transformers #25420: with other padding, other kernels. A row in the batch, alone with the
    same padding, and alone without any.
    """
    model, width = make().eval(), RAGGED.completion_mask.shape[1]
    whole = logprobs_of(model, RAGGED)
    for i, (tokens, real) in enumerate(zip(RAGGED.tokens, RAGGED.attention_mask, strict=True)):
        prompt, completion = tokens[:-width][real[:-width]], tokens[-width:][real[-width:]]
        bare = make_rollout([prompt.tolist()], [completion.tolist()])
        alone = logprobs_of(model, RAGGED[i : i + 1])[0]
        assert torch.allclose(alone, whole[i], atol=1e-5)
        alone, n = logprobs_of(model, bare)[0], len(completion)
        assert torch.allclose(alone, whole[i, :n], atol=1e-5), "padding is read, or shifts a row?"


def test_15_the_fast_log_softmax_of_half_precision_is_not_that_of_float32():
    """#7125, #2773: a softmax over a large vocabulary in bfloat16 is off by percents."""
    logits = 5 * randn(2, 3, 1000).bfloat16()
    tokens = torch.randint(1000, (2, 3), generator=torch.Generator().manual_seed(0))
    expected = logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    assert torch.equal(token_logprobs(logits, tokens), expected)


# --- Losses and gradients ---


@pytest.mark.parametrize("name", ["rloo", *LOSS_TYPES])
def test_16_gradient_accumulation_is_not_the_gradient_of_the_big_batch(name):
    """#2617, #5619, #6369: each micro-batch normalised by itself."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]] * 4).bool()
    old, advantages = randn(8, 4, seed=1), torch.linspace(-1, 2, 8).double()
    function, options = rloo_loss, {"clip_range": 0.2, "num_rows": 8}
    if name != "rloo":
        function, options = grpo_loss, options | {"clip_range_high": 1.5, "loss_type": name}
        options |= {"cispo_bound": 1.5, "max_new_tokens": 4, "num_tokens": mask.sum()}
    gradients = []
    for size in (8, 4, 2, 1):
        logprobs = randn(8, 4).requires_grad_()
        for start in range(0, 8, size):
            rows = slice(start, start + size)
            arguments = logprobs[rows], old[rows], advantages[rows], mask[rows]
            function(*arguments, **options)[0].backward()
        gradients.append(logprobs.grad)
    same = all(torch.allclose(g, gradients[0], atol=1e-12) for g in gradients)
    assert same, "normalised by the rows or tokens of the micro-batch, not of the minibatch?"


def test_16_in_a_run_the_gradient_does_not_depend_on_the_micro_batch(job, tmp_path, monkeypatch):
    """For ppo.py, whose loss is made in its loop, and for the counts that the others hand in."""
    gradients, clip = [], torch.nn.utils.clip_grad_norm_

    def on_clip(parameters, max_norm):
        gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
        return clip(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", on_clip)
    in_float64(monkeypatch, job.script)
    flags = {"model": early_stopper(tmp_path), "completions": 16, "temperature": 3.0}
    flags |= {"num_epochs": 1, "num_mini_batches": 2}
    lengths = [job(micro_batch_size=size, **flags)[0]["length/mean"] for size in (8, 5, 1)]
    assert lengths[0] < 6, "no row ended early: all normalisers are the same"
    assert len(gradients) == 6
    for index, gradient in enumerate(gradients):
        whole = gradients[index % 2]
        difference = (gradient - whole).norm() / whole.norm()
        assert difference < 1e-6, "normalised by the rows or tokens of the micro-batch?"


def test_17_num_mini_batches_adds_no_optimiser_steps(job, monkeypatch):
    """#5645, #321."""
    steps = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *args: steps.append(1) or step(self, *args)
    )
    job(num_steps=2, num_epochs=3, num_mini_batches=4)
    assert len(steps) == 2 * 3 * 4


def test_18_the_kl_in_the_loss_has_no_gradient_or_one_whose_mean_is_0():
    """open-instruct #530, #534: descending k3, and nothing else, must lower the exact KL."""
    ref = torch.tensor([0.7, 0.2, 0.08, 0.02]).log()
    logits = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=0.2)
    generator = torch.Generator().manual_seed(0)

    def exact() -> float:
        logp = logits.log_softmax(-1)
        return (logp.exp() * (logp - ref)).sum().item()

    before = exact()
    for _ in range(150):
        probs = logits.detach().softmax(-1)
        drawn = torch.multinomial(probs, 64, replacement=True, generator=generator)[:, None]
        logprobs = logits.log_softmax(-1)[drawn]
        options = {"ref_logprobs": ref[drawn], "kl_coef": 1.0, "clip_range": 0.2}
        loss, _ = grpo_loss(
            logprobs, logprobs.detach(), torch.zeros(64), torch.ones_like(drawn), **options
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before > 0.6 and exact() < 0.1, "a KL without gradient, or k1 in the loss?"


def test_18_the_gradient_of_k3_is_0_at_the_reference_and_in_expectation_that_of_the_kl():
    """#4967, verl #2953. The expectation moves with the policy in two ways: through the samples
    and through k3. Together they give the gradient of KL(policy || reference). The loss has the
    second alone, the gradient of KL(reference || policy): also 0 at the reference alone.
    """
    ref = torch.tensor([0.7, 0.2, 0.08, 0.02]).double().log()
    logits = randn(4).requires_grad_()
    policy = logits.log_softmax(-1)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def kl_in_the_loss(logprobs: torch.Tensor, ref: torch.Tensor, coefficient: float):
        one = torch.ones(4, 1)
        loss, _ = grpo_loss(
            logprobs[:, None], logprobs.detach()[:, None], torch.zeros(4), one,
            ref_logprobs=ref[:, None], kl_coef=coefficient, clip_range=0.2,
        )  # fmt: skip
        return 4 * loss

    at_reference = gradient(kl_in_the_loss(policy, policy.detach(), 1.0))
    assert (at_reference == 0).all(), "k1 in the loss?"
    exact = (policy.exp() * (policy - ref)).sum()
    expectation = (policy.exp() * kl_estimate(policy, ref, "k3")).sum()
    assert expectation.item() == pytest.approx(exact.item())
    assert torch.allclose(gradient(expectation), gradient(exact)), "k3 is not unbiased?"
    # Each token once, weighed by its probability: what the loss is on average.
    tokens = policy.detach().exp() * kl_estimate(policy, ref, "k3")
    forward = (ref.exp() * (ref - policy)).sum()
    assert torch.allclose(gradient(tokens.sum()), gradient(forward))
    unweighed = kl_estimate(policy, ref, "k3").sum()
    assert torch.allclose(gradient(kl_in_the_loss(policy, ref, 0.3)), 0.3 * gradient(unweighed))


@pytest.mark.parametrize("advantages", [group_advantages, rloo_advantages])
@pytest.mark.parametrize("group_size", [2, 8, 12, 16])
def test_19_a_group_of_equal_rewards_gets_an_advantage_of_rounding_errors(advantages, group_size):
    """#4158: 7428. rlhf-book, policy-gradients, tiny-grpo: .4 to .9. NeMo-RL #1518: a million."""
    for reward in (0.0, 0.1, 0.3, 0.7, 1.1):
        result = advantages(torch.full((group_size,), reward), group_size)
        assert (result == 0).all(), "a rounding error divided by a std of about 0?"
    with pytest.raises(ValueError, match="a group needs 2 or more"):
        advantages(torch.ones(4), 1)


def test_20_a_missing_reward_counts_as_0_and_a_short_list_goes_unnoticed():
    """#5902, #5775."""
    rewards = torch.tensor([1.0, math.nan, 3.0])
    assert group_advantages(rewards, 3, "none").tolist() == [-1, 0, 1]
    assert rloo_advantages(rewards, 3).tolist() == [-2, 0, 2]
    rollout = make_rollout([[1], [2]], [[3, EOS], [4, EOS]])
    task = Task([], [], [lambda completions: [1.0]], [1.0])
    with pytest.raises(InputError, match="returned 1 values for 2 completions"):
        score(task, [{"prompt": "a"}, {"prompt": "b"}], rollout, letter_tokenizer())


def test_21_groups_are_mixed_up(group_job, monkeypatch):
    """#2961, #3725: a reward that the prompt alone decides must give advantage 0 everywhere. The
    prompt is the one that the model read, row by row, and the reward function is given the same.
    """
    job, seen, tokenizer = group_job, [], letter_tokenizer()

    def on_score(result, task, rows, rollout, *args):
        width, group_size = rollout.completion_mask.shape[1], len(rollout.tokens) // len(rows)
        prompts, real = rollout.tokens[:, :-width], rollout.attention_mask[:, :-width]
        scores = torch.tensor([hash(tuple(x[m].tolist())) % 97 / 7 for x, m in zip(prompts, real)])
        for i, (x, m) in enumerate(zip(prompts, real, strict=True)):
            given = rows[i // group_size]["prompt"]
            assert tokenizer.decode(x[m]) == given, "the reward is given another prompt?"
        return scores, result[1]

    name = "group_advantages" if job.script is grpo else "rloo_advantages"
    spy_on(monkeypatch, job.script, name, lambda result, *args: seen.append(result))
    spy_on(monkeypatch, job.script, "score", on_score)
    line = job(prompts_per_step=6, rollout_batch_size=8, kl_coef=0)[0]
    assert len(seen[0]) == 24 and line["objective/scores"] != 0
    assert (seen[0] == 0).all(), "a group is not the consecutive rows of one prompt?"
    assert line["grad_norm"] == 0


def test_22_max_grad_norm_is_ignored(job, monkeypatch):
    """#3961: TRL's PPO had the flag and never clipped."""
    steps = []
    step = torch.optim.AdamW.step

    def spy(self, *args):
        grads = [p.grad.flatten() for group in self.param_groups for p in group["params"]]
        steps.append(torch.cat(grads).norm().item())
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    flags = {"scale_rewards": "none"} if job.script is grpo else {}
    job(reward=f"{job.folder.parent}/reward.py:huge", max_grad_norm=0.25, **flags)
    assert max(steps) <= 0.25 * (1 + 1e-4)


def test_23_the_learning_rate_counts_another_unit_than_the_loop(job, monkeypatch):
    """SkyRL #872, open-instruct #537: it reached 0 early, or never. That of the optimiser: what is
    logged need not be what is used.
    """
    used, step = [], torch.optim.AdamW.step

    def spy(self, *args):
        used.append({group["lr"] for group in self.param_groups})
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    flags = {"num_steps": 4, "learning_rate": 0.4, "warmup_steps": 2, "num_epochs": 2}
    logged = [line["lr"] for line in job(**flags)[:-1]]
    per_step = len(used) // 4
    expected = [rate for rate in (0.2, 0.3, 0.2, 0.1) for _ in range(per_step)]
    assert per_step >= 2 and all(len(rates) == 1 for rates in used)
    hint = "counted in updates or episodes, or the optimiser's groups not told?"
    assert [rate for (rate,) in used] == pytest.approx(expected), hint
    assert logged == pytest.approx([0.2, 0.3, 0.2, 0.1])


def test_24_the_ratio_is_not_1_before_the_first_update(job, monkeypatch):
    """#454, trlx #107; with dropout 0.1 in the checkpoint, as gpt2 has (CS285, minChatGPT)."""
    in_float64(monkeypatch, job.script)
    assert job(num_epochs=2, num_mini_batches=2)[0]["val/ratio_max_dev_first"] < 1e-12


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_25_logits_or_values_are_read_one_token_off(make):
    """Against a loop that reads one more token at a time."""
    model = make().eval()
    value_model = ValueModel.on_backbone_of(model).eval()
    torch.nn.init.normal_(value_model.head.weight)
    prompt, completion = [1, 2, 3], [5, 6, EOS]
    rollout = make_rollout([prompt], [completion])
    logprobs = logprobs_of(model, rollout)[0]
    values = completion_values(value_model, rollout)[0]
    for t, token in enumerate(completion):
        seen = torch.tensor([prompt + completion[:t]])
        logits = model(seen).logits[0, -1]
        expected = logits.log_softmax(-1)[token].item()
        assert logprobs[t].item() == pytest.approx(expected, abs=1e-5), "one position off?"
        hidden = value_model.backbone(seen).last_hidden_state[0, -1]
        value = value_model.head(hidden).item()
        assert values[t].item() == pytest.approx(value, abs=1e-5), "the value knows the action?"


# --- Models ---


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_26_the_reference_is_not_the_policy_that_the_run_starts_from(kind):
    """#1193, #3194: read again by name, or the base model under an adapter that was trained."""
    policy = small_llama()
    policy = add_adapter(policy, 4) if kind == "adapter" else policy
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05)
    started_from = logprobs_of(policy.eval(), RAGGED)  # outside: the adapter is on
    with reference(policy.train(), 0.1) as model:
        assert not model.training and not any(p.requires_grad for p in model.parameters())
        kl = started_from - logprobs_of(model, RAGGED)
    assert (kl == 0).all(), "the reference was read again, or is the base under the adapter?"


def test_27_gradient_checkpointing_switches_the_cache_off_while_sampling(monkeypatch):
    """#2653, #3683: generation became quadratic, and the state was not restored on errors. Training
    mode does that: the cache is ignored, so a loop that feeds it one token reads that token alone.
    """
    model = small_gpt2()
    prompt = torch.tensor([[1, 2, 3]])
    options = {"num_generations": 4, "max_new_tokens": 9, "eos_token_ids": [], "pad_token_id": 0}

    def sample() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return generate(
            model, prompt, torch.ones_like(prompt), generator=generator, **options
        ).tokens

    expected = sample()
    model.train()
    model.gradient_checkpointing_enable()
    assert torch.equal(sample(), expected), "the cache is off?"

    read, forward = [], type(model.transformer).forward

    def spy(self, *args, **kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        read.append((ids.shape[1], self.training))
        if len(read) == 4:
            raise RuntimeError("out of something")
        return forward(self, *args, **kwargs)

    spy.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(model.transformer), "forward", spy)
    with pytest.raises(RuntimeError, match="out of something"):
        sample()
    assert read == [(3, False), (1, False), (1, False), (1, False)], "not in evaluation mode?"
    assert model.training and model.is_gradient_checkpointing, "not restored after an error?"


def test_28_the_value_head_starts_at_random():
    """#1063, trlx #203: the first advantages are noise. And it is not the policy's backbone."""
    policy = small_gpt2()
    value_model = ValueModel.on_backbone_of(policy)
    assert (completion_values(value_model, RAGGED) == 0).all()
    assert not {p.data_ptr() for p in policy.parameters()} & {
        p.data_ptr() for p in value_model.parameters()
    }


def test_29_what_is_saved_is_not_what_was_trained(job, monkeypatch):
    """#3293: saved and loaded again, the model gives the same logits. PPO's value model is no part
    of it, on purpose: model/ is a plain language model, complete and loaded alone.
    """
    kept = []
    spy_on(monkeypatch, job.script, "load_policy", lambda policy, *args: kept.append(policy))
    job(num_steps=2, learning_rate=0.01)
    tokens = torch.arange(12).view(2, 6)
    again, info = AutoModelForCausalLM.from_pretrained(
        job.folder / "model", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    hint = "saved before the training, or another model than the policy?"
    assert torch.equal(again.eval()(tokens).logits, kept[0].eval()(tokens).logits), hint
    assert len(AutoTokenizer.from_pretrained(job.folder / "model")) == 20


# --- Metrics ---


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (ppo, {"whiten_rewards": "true"}),
        (grpo, {}),
        (grpo, {"loss_type": "dapo", "mask_truncated_completions": "true"}),
        (grpo, {"importance_sampling_level": "sequence"}),
        (rloo, {}),
    ],
)
def test_31_metrics_average_over_padding(script, flags, make_job, tmp_path, monkeypatch):
    """#2022, #6121: entropies below 0, ratios pulled to 1. Here every rollout gets columns of
    padding that hold garbage: no metric, no gradient and no weight may feel them.
    """
    job, extra = make_job(script), 0
    in_float64(monkeypatch, script)  # or Adam would blow up the rounding of other shapes
    spy_on(monkeypatch, script, "sample", lambda rollout, *args: more_padding(rollout, extra))
    flags |= {"num_steps": 2, "completions": 16, "temperature": 3.0, "num_epochs": 2}
    flags |= {"model": early_stopper(tmp_path)}
    flags |= {"num_mini_batches": 2, "learning_rate": 0.01, "kl_coef": 0.3, "clip_range": 0.02}
    flags |= {"clip_range_value": 0.05} if script is ppo else {}
    plain = job(**flags)
    extra = 7
    padded = job(**flags)
    timed = ("time/", "memory/", "tokens_per_second")
    for ours, theirs in zip(plain, padded, strict=True):
        for name in ours:
            if not name.startswith(timed) and ours[name] is not None:
                assert theirs[name] == pytest.approx(ours[name], rel=1e-5, abs=1e-7), name
    line = plain[1]
    assert 1 < line["length/mean"] < 6, "all rows have the same length: nothing to see"
    assert 0 < line["policy/clipfrac_avg"] < 1 and 0 < line["policy/entropy_avg"] < math.log(20)
    assert abs(line["val/ratio"] - 1) > 1e-4 and abs(line["objective/kl"]) > 1e-4


def test_32_means_of_means_and_the_last_micro_batch_alone_are_logged(job):
    """#6380, #7012; GRPO-Zero and CleanRL log the last micro-batch."""
    flags = {"temperature": 3.0, "completions": 16, "num_epochs": 1, "num_mini_batches": 1}
    lines = [job(micro_batch_size=size, **flags)[0] for size in (16, 5)]
    for name in ("policy/entropy_avg", "loss/policy_avg", "val/ratio"):
        assert lines[0][name] == pytest.approx(lines[1][name], abs=1e-5), name


def test_33_decoded_text_is_encoded_again():
    """#5242: other ids than those that were sampled. The reward gets the sampled ones."""
    seen = {}

    def reward(completions, completion_ids, **columns):
        seen["ids"], seen["texts"] = completion_ids, completions
        return [0.0] * len(completions)

    rollout = make_rollout([[1], [2]], [[0, 0, 19], [3, 19]])
    score(Task([], [], [reward], [1.0]), [{"prompt": "a"}] * 2, rollout, letter_tokenizer())
    assert seen["ids"] == [[0, 0, 19], [3, 19]] and seen["texts"] == ["  ", "c"]


def test_33_the_ids_that_are_trained_on_are_those_that_were_sampled(job, monkeypatch):
    """Masks included, each row once per epoch: nothing was encoded again, cut or padded anew."""
    sampled = generated_for_training(monkeypatch, job.script)
    seen = logprobs_of_the_update(monkeypatch, job.script)
    job(num_epochs=1, num_mini_batches=2, completions=16, temperature=3.0)

    def rows(rollouts: list[Rollout]) -> list[list[int]]:
        fields = [(r.tokens, r.attention_mask, r.completion_mask) for r in rollouts]
        return sorted(row for parts in fields for row in torch.cat(parts, dim=1).tolist())

    trained = rows([rollout for rollout, _ in seen])
    assert len(trained) == 16 and trained == rows([r for _, r in sampled]), (
        "other ids than the sampled ones?"
    )


# --- Seen in other educational code ---


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_negated_and_k3_with_the_ratio_upside_down(estimator):
    """rlhf-book: tests of non-negativity pass either way, an exact expectation does not."""
    policy, ref = torch.tensor([0.7, 0.2, 0.08, 0.02]).double(), torch.full((4,), 0.25).double()
    expected = (policy * kl_estimate(policy.log(), ref.log(), estimator)).sum().item()
    assert expected == pytest.approx(0.5344, abs=1e-4), "policy and reference exchanged?"


def test_dr_grpo_still_divides_by_each_length():
    """rlhf-book utils.py:140, policy-gradients train.py:73."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    logprobs = torch.zeros(2, 4, requires_grad=True)
    args = torch.zeros(2, 4), torch.ones(2), mask
    options = {"clip_range": 0.2, "loss_type": "dr_grpo", "max_new_tokens": 4}
    loss, _ = grpo_loss(logprobs, *args, **options)
    loss.backward()
    assert logprobs.grad[0].sum() == 2 * logprobs.grad[1].sum()


def test_inputs_are_changed_in_place():
    """nano-aha-moment utils.py:190: labels overwritten through a view."""
    tensors = [randn(2, 4, seed=s) for s in range(4)]
    mask, rewards = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]), torch.tensor([1.0, 2.0])
    before = copy.deepcopy([*tensors, mask, rewards])
    a, b, c, d = tensors
    masked_whiten(a, mask), masked_mean(a, mask), kl_estimate(a, b, "k3")
    gae(a, b, mask, 0.9, 0.9), shape_rewards(rewards, a, mask, 0.1)
    losses(a, b, rewards.double(), mask.bool()), policy_loss(a, b, c, 0.2)
    ppo.value_loss(a, b, d, 0.2)
    group_advantages(rewards, 2), rloo_advantages(rewards, 2), rloo_advantages(rewards, 2, True)
    policy_ratio(a), importance_ratio(a, b, mask, "token"), importance_ratio(a, b, mask, "sequence")
    for x, y in zip([*tensors, mask, rewards], before, strict=True):
        assert torch.equal(x, y)


def test_the_tokens_and_masks_that_a_model_reads_are_changed_in_place():
    """Padding that is not 0, as it would be after a masked_fill_ of what the caller holds."""
    rollout = make_rollout([[1, 2], [3]], [[5, EOS], [6, 7, EOS]], extra_left=2, extra_right=2)
    rollout.tokens[~rollout.attention_mask] = 7
    before, model = copy.deepcopy(rollout), small_gpt2()
    value_model = ValueModel.on_backbone_of(model)
    completion_logprobs(model, rollout, 0.7)
    completion_logprobs(model, rollout, 0.7, max_rows=1)
    completion_logprobs(model, rollout, 0.7, max_tokens=6, bf16=True)
    completion_values(value_model, rollout)
    completion_values(value_model, rollout, max_rows=1)
    micro_batches(rollout, torch.tensor([1, 0]), max_rows=1, max_tokens=6)
    model_inputs(model, rollout.tokens, rollout.attention_mask, use_cache=False)
    completion_mask(rollout.tokens[:, 4:], [EOS])
    score(
        Task([], [], [lambda completions: [0.0] * 2], [1.0]),
        [{"prompt": "a"}],
        rollout,
        letter_tokenizer(),
    )
    generate(
        model, rollout.tokens, rollout.attention_mask, num_generations=2, max_new_tokens=3,
        temperature=0.7, eos_token_ids=[EOS], pad_token_id=0,
    )  # fmt: skip
    for name, value in vars(before).items():
        assert torch.equal(getattr(rollout, name), value), f"{name} was changed in place"


def test_a_few_likely_tokens_are_all_that_is_ever_drawn():
    """top_k 50 by default in nanochat and rlhf-book, and in a generation_config left alone. With a
    vocabulary of a thousand and all its tokens about equally likely: a small one would hide it.
    """
    uniform = torch.rand(2000, generator=torch.Generator().manual_seed(0))
    drawn, logprobs = draw(torch.zeros(2000, 1000), uniform)
    assert len(drawn.unique()) > 500
    assert torch.allclose(logprobs, torch.tensor(1 / 1000).log())

    model = small_gpt2(vocab_size=1000).eval()
    # Not exactly equal, or top_k would keep all the ties. The head itself is tied to the input.
    torch.nn.init.constant_(model.transformer.ln_f.weight, 1e-3)
    model.generation_config.update(top_k=50, top_p=0.9, do_sample=True)
    prompt = torch.tensor([[1, 2]])
    rollout = generate(
        model, prompt, torch.ones_like(prompt), num_generations=2000, max_new_tokens=2,
        eos_token_ids=[], pad_token_id=0, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for column in (2, 3):
        assert len(rollout.tokens[:, column].unique()) > 500, "top_k is on by default?"
    hint = "top_p is on by default?"
    assert torch.allclose(rollout.logprobs, torch.tensor(1 / 1000).log(), atol=0.05), hint


@pytest.mark.parametrize("function", [generate, draw])
def test_top_k_and_top_p_are_off_by_default(function):
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    assert defaults["top_k"] == 0 and defaults["top_p"] == 1 and defaults["temperature"] == 1


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 1.5])
def test_minimum_for_maximum_where_the_advantage_is_negative(ratio, advantage):
    """rasbt 7_5_plus_kl.py:220: the gradient was stopped where it was needed."""
    stopped = (ratio > 1) == (advantage > 0)
    for script in ("ppo", "grpo", "rloo"):
        logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
        old, mask, A = torch.zeros(1, 1), torch.ones(1, 1).bool(), torch.tensor([advantage])
        if script == "ppo":
            loss, clipped = policy_loss(logprobs, old, A[:, None], 0.2)
        else:
            function = {"grpo": grpo_loss, "rloo": rloo_loss}[script]
            loss, clipped = function(logprobs, old, A, mask, clip_range=0.2)
        loss.sum().backward()
        expected = 0.0 if stopped else -advantage * ratio
        assert logprobs.grad.item() == pytest.approx(expected), "minimum for maximum?"
        assert clipped.item() == stopped, "counted as clipped where the gradient flows?"


def test_whitening_adds_the_mean_back_or_goes_row_by_row():
    """torchtune, minRLHF: two one-token rows with rewards 0 and 1 must get opposite advantages."""
    x, mask = torch.tensor([[0.0, 9.0], [1.0, 9.0]]), torch.tensor([[1, 0], [1, 0]])
    white = masked_whiten(x, mask)
    assert white[0, 0] == -white[1, 0] and white[1, 0] > 0
    assert masked_mean(white, mask) == 0 and (white[:, 1] == 0).all()


def test_returns_depend_on_the_whitening(make_job, monkeypatch):
    """RLHF_in_notebooks: computed after it, the value model learns whitened rewards."""
    job, seen = make_job(ppo), []
    original = ppo.value_loss
    monkeypatch.setattr(
        ppo, "value_loss", lambda v, o, r, c: seen.append((v, r)) or original(v, o, r, c)
    )
    job(kl_coef=0, lam=1.0, num_epochs=1)
    returns = torch.cat([r for _, r in seen])
    # With lambda 1 and no KL the return of every token is the score, a whole number.
    assert torch.allclose(returns, returns.round(), atol=1e-5) and returns.abs().max() >= 1


def test_a_chat_template_and_the_tokenizer_both_write_bos():
    """tiny-grpo, rlhf-book, nanoGRPO."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    assert tokenizer("hello").input_ids.count(tokenizer.bos_token_id) == 1
    ids = prompt_tokens(tokenizer, [{"role": "user", "content": "hello"}])
    assert ids.count(tokenizer.bos_token_id) == 1, "special tokens added to a rendered template?"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_misspelt_flag_is_silently_ignored(script):
    """rlhf-book: pydantic dropped it."""
    with pytest.raises(InputError, match="did you mean --num_generations"):
        parse_flags(script.Config, "", ["--num_generation", "4"])


def test_gae_runs_over_padding_to_the_end_of_the_row():
    """minRLHF buffer.py:174: the terminal state was the last pad. Against the double sum."""
    rng = random.Random(0)
    for _ in range(20):
        length, width = rng.randint(1, 6), 6
        rewards, values = randn(1, width, seed=length), randn(1, width, seed=length + 9)
        mask = (torch.arange(width) < length)[None]
        advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
        v = [*values[0, :length].tolist(), 0.0]
        delta = [rewards[0, t].item() + 0.9 * v[t + 1] - v[t] for t in range(length)]
        expected = [
            sum((0.9 * 0.8) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)
        ]
        assert advantages[0].tolist() == pytest.approx([*expected, *[0.0] * (width - length)])
        assert returns[0, :length].tolist() == pytest.approx(
            [a + b for a, b in zip(expected, v, strict=False)]
        )


def test_a_nan_loss_is_skipped_without_a_word(job, monkeypatch):
    """rlhf-book, tiny-grpo: it must stop the run, and name the step."""
    names = {ppo: "policy_loss", grpo: "grpo_loss", rloo: "rloo_loss"}
    spy_on(
        monkeypatch,
        job.script,
        names[job.script],
        lambda result, *args: (result[0] * math.nan, result[1]),
    )
    with pytest.raises(Exception, match="step 0: the gradient is nan"):
        job()
    assert json.loads((job.folder / "config.json").read_text())


def test_an_entropy_of_a_token_of_probability_0_is_nan():
    logits = torch.tensor([[[0.0, -torch.inf, 0.0]]])
    assert token_entropy(logits).item() == pytest.approx(math.log(2))
