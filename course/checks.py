"""What the grader checks: for each problem a list of checks with points, run on a submission.

A check gets two modules, the student's, whose functions run in the sandbox (remote.py), and the
solution's, and raises where they disagree. Its docstring is what the student reads then. The right
answer is never in the process that runs the student's code, and inputs are drawn anew each time.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import math
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

COURSE = Path(__file__).parent
sys.path[:0] = [str(COURSE), str(COURSE.parent)]

import torch
from child import BUILD
from problems import BY_NAME, REPOSITORY
from remote import Fault, Student
from sandbox import Ended, Sandbox, folder_for
from torch import Tensor, nn
from wire import Handle, kind_of

NAN = math.nan
MESSAGE = 500  # characters of a fault that are told


@dataclass
class Check:
    points: int
    run: Callable[[Student, Solution], None]

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", " ")

    @property
    def advice(self) -> str:
        return " ".join(inspect.getdoc(self.run).split())


CHECKS: dict[str, list[Check]] = {name: [] for name in BY_NAME}


def check(problem: str, points: int) -> Callable:
    def register(run: Callable) -> Callable:
        CHECKS[problem].append(Check(points, run))
        return run

    return register


# --- Comparing ---


def same(
    found: object, expected: Tensor, what: str, tolerance: float = 1e-5, near_0: float = 1e-5
) -> None:
    """Raise AssertionError that names the first entry which differs by more than the tolerance
    times itself, plus `near_0`.
    """
    assert isinstance(found, Tensor), f"{what}: expected a tensor, got {kind_of(found)}"
    shapes = f"expected shape {tuple(expected.shape)}, got {tuple(found.shape)}"
    assert found.shape == expected.shape, f"{what}: {shapes}"
    found, expected = found.detach().double(), expected.detach().double()
    far = ~torch.isclose(found, expected, rtol=tolerance, atol=near_0, equal_nan=True)
    if far.any():
        where = tuple(far.nonzero()[0].tolist())
        values = f"expected {expected[where]:.6g}, got {found[where]:.6g}"
        raise AssertionError(f"{what}: {values}" + (f" at {list(where)}" if where else ""))


def raises_value_error(what: str, call: Callable) -> None:
    try:
        call()
    except ValueError:
        return
    raise AssertionError(f"{what} must raise ValueError")


def unchanged(call: Callable, *inputs: Tensor) -> None:
    before = [x.clone() for x in inputs]
    call(*inputs)
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x.nan_to_num(7), y.nan_to_num(7)), "one of the inputs has been changed"


@dataclass
class Draw:
    """Which inputs are drawn: a number that the grader draws for each grading."""

    salt: int = 0

    def seed(self, number: int) -> int:
        return self.salt * 1000 + number


DRAW = Draw()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(DRAW.seed(seed)))


def ragged(*lengths: int, width: int = 7) -> Tensor:
    """(B, width) bool: rows of the given lengths."""
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


MASK = ragged(7, 3, 1, 5, 6)
SHAPE = MASK.shape


def junk(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return x.masked_fill(~mask, value)


def loss_of(found: object) -> object:
    """The loss of what a loss function returned; a missing `clipped` costs its own check alone."""
    return found[0] if isinstance(found, (tuple, list)) and found else found


def same_clipped(found: object, expected: Tensor, what: str, where: Tensor | None = None) -> None:
    """Compare the second of what a loss function returned, at the entries `where` is True."""
    is_pair = isinstance(found, (tuple, list)) and len(found) == 2
    assert is_pair, f"{what}: expected the pair (loss, clipped), got {kind_of(found)}"
    clipped = found[1]
    assert isinstance(clipped, Tensor), f"{what}: clipped is a {kind_of(clipped)}"
    assert clipped.dtype == torch.bool, f"{what}: clipped is {clipped.dtype}, not bool"
    shapes = f"expected shape {tuple(expected.shape)}, got {tuple(clipped.shape)}"
    assert clipped.shape == expected.shape, f"{what}: clipped: {shapes}"
    where = torch.ones_like(expected) if where is None else where
    same(clipped & where, expected & where, f"{what}: clipped")


BUILDING = threading.Lock()  # the weights come from the generator that all threads share


def built(kind: str, **options: object) -> nn.Module:
    """One of the models of child.py."""
    with BUILDING:
        torch.manual_seed(DRAW.seed(0))
        return BUILD[kind](**options)


# --- token_logprobs ---


@check("token_logprobs", 1)
def the_log_softmax_at_the_tokens(student, right):
    """Each value must be the logit of the token less log-sum-exp over the vocabulary."""
    logits, tokens = randn(3, 5, 11) * 3, torch.arange(15).view(3, 5) % 11
    expected = logits.double().log_softmax(-1)
    expected = torch.stack([expected[b, t, tokens[b, t]] for b in range(3) for t in range(5)])
    same(student.token_logprobs(logits, tokens), expected.view(3, 5), "log-probs")


@check("token_logprobs", 1)
def any_shape_before_the_vocabulary_and_its_gradient(student, right):
    """logits (..., V): the loops call it with the n real tokens of a minibatch, (n, V)."""
    for shape in ((9, 11), (2, 3, 11), (11,), (2, 2, 2, 11)):
        logits, tokens = randn(*shape), torch.arange(math.prod(shape[:-1])).view(shape[:-1]) % 11
        gradients = [logits.clone().requires_grad_() for _ in range(2)]
        for module, x in zip((student, right), gradients):
            found = module.token_logprobs(x, tokens)
            if module is student:
                same(found, right.token_logprobs(logits, tokens), f"log-probs of logits {shape}")
            (found * randn(*shape[:-1], seed=1)).sum().backward()
        same(gradients[0].grad, gradients[1].grad, f"gradient of logits {shape}")


@check("token_logprobs", 1)
def half_precision_is_scored_in_float32(student, right):
    """bfloat16 logits must be converted to float32 before the softmax: it is off by percents."""
    for shape in ((6, 500), (2, 3, 500)):
        logits, tokens = (randn(*shape) * 2).bfloat16(), torch.arange(1, 7).view(shape[:-1])
        found = student.token_logprobs(logits, tokens)
        assert isinstance(found, Tensor), f"expected a tensor, got {kind_of(found)}"
        assert found.dtype in (torch.float32, torch.float64), f"bfloat16 logits gave {found.dtype}"
        same(found, right.token_logprobs(logits.float(), tokens), f"log-probs of logits {shape}")


@check("token_logprobs", 1)
def large_logits_overflow_nothing(student, right):
    """Logits of 1000 must give no infinity or NaN: use log_softmax or logsumexp, not exp alone."""
    logits, tokens = torch.tensor([[1000.0, 0.0, -1000.0]]), torch.tensor([1])
    same(student.token_logprobs(logits, tokens), torch.tensor([-1000.0]), "log-probs")
    unchanged(lambda x: student.token_logprobs(x, tokens), logits)


# --- kl_estimate ---


@check("kl_estimate", 1)
def the_sign_and_value_of_k1(student, right):
    """k1 is log policy - log reference, of samples from the policy; its sign is often turned."""
    a, b = randn(*SHAPE), randn(*SHAPE, seed=1)
    same(student.kl_estimate(a, b, "k1"), a - b, "k1")


@check("kl_estimate", 1)
def k2_is_half_the_square(student, right):
    """k2 is d squared, halved."""
    a, b = randn(*SHAPE), randn(*SHAPE, seed=1)
    same(student.kl_estimate(a, b, "k2"), 0.5 * (a - b) ** 2, "k2")


@check("kl_estimate", 1)
def k3_is_never_negative_and_has_the_ratio_the_right_way_up(student, right):
    """k3 = exp(-d) - 1 + d, where exp(-d) is reference over policy."""
    a, b = randn(*SHAPE), randn(*SHAPE, seed=1)
    d = (a - b).double()
    same(student.kl_estimate(a, b, "k3"), torch.exp(-d) - 1 + d, "k3")
    a.requires_grad_()
    student.kl_estimate(a, b, "k3").sum().backward()
    same(a.grad, 1 - torch.exp(-d), "gradient of k3 with respect to the policy's log-probs")


@check("kl_estimate", 1)
def k3_keeps_its_digits_where_d_is_small(student, right):
    """For d = 1e-3 the result is 5e-7, the difference of numbers near 1: use expm1."""
    d = torch.tensor([[1e-3, -1e-3, 2e-4]])
    expected = torch.expm1(-d.double()) + d.double()
    found = student.kl_estimate(d, torch.zeros_like(d), "k3").double()
    same(found / expected, torch.ones_like(expected), "k3 over its value", 0.01)


@check("kl_estimate", 1)
def an_unknown_estimator_is_refused(student, right):
    """Any name but k1, k2 and k3 must raise ValueError, or a typing error trains without KL."""
    x = torch.zeros(1, 1)
    raises_value_error("estimator 'k4'", lambda: student.kl_estimate(x, x, "k4"))


# --- completion_mask ---


@check("completion_mask", 1)
def eos_counts_and_nothing_after_it(student, right):
    """The first EOS is an action and belongs to the completion; what follows doesn't."""
    found = student.completion_mask(torch.tensor([[5, 9, 7, 9], [9, 1, 2, 3]]), [9])
    same(found, torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), "mask")
    tokens = torch.randint(0, 9, (40, 12), generator=torch.Generator().manual_seed(DRAW.seed(0)))
    same(student.completion_mask(tokens, [3]), right.completion_mask(tokens, [3]), "mask")


@check("completion_mask", 1)
def without_eos_all_tokens_count(student, right):
    """A completion that was cut at the length limit has no EOS, and all its tokens count."""
    same(student.completion_mask(torch.tensor([[5, 6, 7]]), [9]), torch.ones(1, 3), "mask")


@check("completion_mask", 1)
def every_eos_id_ends_a_completion(student, right):
    """Chat models have several EOS ids; the first of any of them ends the completion."""
    tokens = torch.tensor([[1, 8, 9, 2], [1, 9, 8, 2], [1, 2, 3, 8]])
    expected = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    same(student.completion_mask(tokens, [9, 8]), expected, "mask")


@check("completion_mask", 1)
def the_mask_is_boolean(student, right):
    """A mask of integers indexes rows instead of choosing them: return bool."""
    tokens = torch.tensor([[5, 9, 7]])
    assert student.completion_mask(tokens, [9]).dtype == torch.bool, "the mask isn't bool"
    unchanged(lambda x: student.completion_mask(x, [9]), tokens)


# --- masked_whiten ---


@check("masked_whiten", 1)
def mean_0_and_variance_1_under_the_mask(student, right):
    """Over the real entries the mean must be 0 and the variance, divided by n - 1, 1."""
    x = randn(*SHAPE) * 3 + 5
    found = student.masked_whiten(x, MASK)
    real = x[MASK].double()
    same(found[MASK], (real - real.mean()) / real.std(), "whitened values")


@check("masked_whiten", 1)
def what_is_off_the_mask_neither_counts_nor_stays(student, right):
    """Padding may hold anything, even NaN or 1e6: it must not count, and becomes 0."""
    x = randn(*SHAPE)
    for value in (1e6, NAN):
        found = student.masked_whiten(junk(x, MASK, value), MASK)
        same(found, right.masked_whiten(x, MASK), f"with {value} at padding")


@check("masked_whiten", 1)
def without_shifting_the_mean_stays(student, right):
    """shift_mean=False scales the distances from the mean and adds the mean again."""
    x = randn(*SHAPE) * 2 + 3
    found = student.masked_whiten(x, MASK, shift_mean=False)
    same(found, right.masked_whiten(x, MASK, shift_mean=False), "whitened values")
    same(found[MASK].mean(), x[MASK].mean(), "mean")


@check("masked_whiten", 1)
def a_constant_becomes_0_not_nan(student, right):
    """A constant has variance 0: add 1e-8 under the root. The mask may be of 0 and 1, and x stays
    as it is."""
    found = student.masked_whiten(torch.full(SHAPE, 2.0), MASK)
    same(found, torch.zeros(SHAPE), "whitened constant", near_0=1e-2)
    one = student.masked_whiten(torch.full((1, 3), 2.0), ragged(1, width=3))
    same(one, torch.zeros(1, 3), "a single value", near_0=1e-2)
    x = randn(*SHAPE)
    same(student.masked_whiten(x, MASK.long()), right.masked_whiten(x, MASK), "mask of integers")
    unchanged(lambda x: student.masked_whiten(x, MASK), junk(x, MASK, NAN))


# --- disable_dropout ---


def two_forwards_agree(student: Student, twin: Handle, model: nn.Module) -> None:
    """In training mode, with each other and with a forward of the model in evaluation mode."""
    tokens = torch.randint(0, 12, (2, 8), generator=torch.Generator().manual_seed(DRAW.seed(1)))
    student.child.mode(twin, True)
    first, second = (student.child.output(twin, tokens) for _ in range(2))
    assert torch.equal(first, second), "two forwards in training mode differ"
    same(first, logits_of(model.eval(), tokens), "logits in training mode")


@check("disable_dropout", 1)
def dropout_modules_are_off_for_good(student, right):
    """Every nn.Dropout of every model that is given must be off, also after model.train()."""
    options = {"dropout": 0.5}
    model = built("tiny_gpt2", **options)
    first = student.child.twin("tiny_gpt2", model, options)
    second = student.child.twin("dropouts", built("dropouts", spatial=True), {"spatial": True})
    student.child.mode(second, True)
    student.disable_dropout(first, second)
    two_forwards_agree(student, first, model)
    x = randn(2, 3, 4, 4)
    found = student.child.output(second, x)
    assert torch.equal(found, x), "a dropout module still changes its input"


@check("disable_dropout", 1)
def probabilities_kept_as_attributes_are_off(student, right):
    """Llama keeps attention_dropout as a float, OPT skips whole layers (layerdrop)."""
    for kind in ("llama", "opt"):
        model = built(kind)
        twin = student.child.twin(kind, model, {})
        student.disable_dropout(twin)
        two_forwards_agree(student, twin, model)


@check("disable_dropout", 1)
def a_probability_read_from_a_config_is_off_and_the_saved_config_stays(student, right):
    """Falcon's attention asks its config at each call: give it a quiet copy. The config of the
    model itself is saved with it and must not change."""
    for kind in ("falcon", "llama"):
        model = built(kind)
        twin = student.child.twin(kind, model, {})
        student.disable_dropout(twin)
        if kind == "falcon":
            two_forwards_agree(student, twin, model)
        kept = student.child.look(twin, None)["attention_dropout"]
        assert kept == 0.5, "the model's own config has been changed"


@check("disable_dropout", 1)
def the_number_of_sites_is_returned(student, right):
    """Count the sites that were on: 3 for three nn.Dropout of which none is 0, 0 the second
    time."""
    options = {"spatial": False}
    model = student.child.twin("dropouts", built("dropouts", **options), options)
    for expected in (3, 0):
        found = student.disable_dropout(model)
        assert found == expected, f"expected {expected}, got {found}"


# --- reference ---


def logits_of(model: nn.Module, tokens: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(TOKENS if tokens is None else tokens).logits


TOKENS = torch.arange(2, 9).unsqueeze(0)


def moved(model: nn.Module, names: str = "", by: float = 1.0) -> dict[str, Tensor]:
    """The weights of a model, those with `names` in their name moved at random."""
    state = {name: p.detach().clone() for name, p in model.state_dict().items()}
    for i, (name, p) in enumerate(state.items()):
        if names in name:
            p += by * randn(*p.shape, seed=100 + i)
    return state


@check("reference", 1)
def without_a_kl_there_is_no_reference(student, right):
    """kl_coef 0 must give None, and copy nothing."""
    policy = student.child.twin("tiny_gpt2", built("tiny_gpt2"), {})
    student.child.guarded(policy)
    ref = student.reference(policy, 0.0)
    for _ in range(2):
        model = student.child.enter(ref)
        assert model is None, f"got a {kind_of(model)} for kl_coef 0"
        student.child.exit(ref)


@check("reference", 2)
def it_is_a_frozen_copy_of_the_policy_as_it_was(student, right):
    """The reference keeps the weights of the beginning while the policy trains; it is in evaluation
    mode and has no gradients. It can be entered often."""
    options = {"dropout": 0.5}
    model = built("tiny_gpt2", **options).eval()
    policy = student.child.twin("tiny_gpt2", model, options)
    student.child.mode(policy, True)
    # In memory: a reload by name would miss it.
    model.load_state_dict(moved(model, "wte", by=0.5))
    student.child.set_weights(policy, model.state_dict())
    ref = student.reference(policy, 0.1)
    after = student.child.look(policy, None)
    assert after["training"], "the policy was in training mode, and isn't any more"
    before = logits_of(model)
    student.child.set_weights(policy, moved(model))
    for _ in range(2):
        found = student.child.enter(ref)
        same(student.child.output(found, TOKENS), before, "logits of the reference")
        seen = student.child.look(found, policy)
        assert not seen["training"], "the reference is in training mode"
        assert not any(seen["trains"]), "it has gradients"
        student.child.exit(ref)
    after = student.child.look(policy, None)
    assert after["training"] and all(after["trains"]), "the policy itself has been changed"


@check("reference", 1)
def a_new_adapter_is_switched_off_and_costs_no_memory(student, right):
    """With an adapter whose B is still 0, the policy with its adapter off is the reference."""
    model = built("adapted").eval()
    policy = student.child.twin("adapted", model, {})
    student.child.mode(policy, True)
    base = logits_of(model)
    ref = student.reference(policy, 0.1)
    weights = moved(model, "lora_B")
    student.child.set_weights(policy, weights)
    found = student.child.enter(ref)
    same(student.child.output(found, TOKENS), base, "logits of the reference")
    assert student.child.look(found, policy)["own"] == 0, "the model has been copied"
    student.child.exit(ref)
    model.load_state_dict(weights)
    after = student.child.output(policy, TOKENS)
    same(after, logits_of(model), "logits of the policy afterwards, with its adapter")
    after = student.child.look(policy, None)
    assert after["training"], "the policy was in training mode, and isn't any more"


@check("reference", 1)
def an_adapter_that_has_been_trained_is_part_of_the_reference(student, right):
    """If B isn't 0, the policy that the run starts from is base and adapter together."""
    model = built("adapted").eval()
    model.load_state_dict(moved(model, "lora_B"))
    before = logits_of(model)
    policy = student.child.twin("adapted", model, {})
    student.child.mode(policy, False)
    ref = student.reference(policy, 0.1)
    student.child.set_weights(policy, moved(model, "lora_B"))
    found = student.child.enter(ref)
    same(student.child.output(found, TOKENS), before, "logits of the reference")
    student.child.exit(ref)


# --- generate ---

EOS = [2, 7, 11]  # several, so that many rows end early
PROMPTS = torch.tensor([[0, 0, 1, 2], [3, 4, 5, 6], [0, 0, 0, 7]])
PROMPT_MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]).bool()


def sampled(
    module: object, model: object, seed: int = 0, mask: Tensor = PROMPT_MASK, **options: object
) -> object:
    """What `generate` makes of the prompts; the scripts give it more options than it needs."""
    defaults = {
        "max_new_tokens": 5, "eos_token_ids": EOS, "pad_token_id": 0, "bf16": False, "stops": None,
        "generator": torch.Generator().manual_seed(DRAW.seed(seed)),
    }  # fmt: skip
    return module.generate(model, PROMPTS, mask, **(defaults | options))


@check("generate", 1)
def shapes_masks_and_padding_are_those_of_a_rollout(student, right):
    """Completions of a prompt in consecutive rows; after the first EOS pad_token_id, mask 0 and
    log-prob 0; finished says which rows ended with EOS."""
    G, twin = 16, student.child.twin("tiny_gpt2", built("tiny_gpt2"), {})
    # The scripts give a mask of 0 and 1.
    found = sampled(student, twin, mask=PROMPT_MASK.long(), num_generations=G, temperature=3.0)
    assert found.tokens.shape == (3 * G, 9), f"tokens have shape {tuple(found.tokens.shape)}"
    same(found.tokens[:, :4], PROMPTS.repeat_interleave(G, 0), "prompts")
    completions = found.tokens[:, 4:]
    expected = right.completion_mask(completions, EOS)
    same(found.completion_mask, expected, "completion_mask")
    whole = torch.cat([PROMPT_MASK.repeat_interleave(G, 0), expected], 1)
    same(found.attention_mask, whole, "attention_mask")
    assert (completions[~expected] == 0).all(), "not pad_token_id after EOS"
    assert (found.logprobs[~expected] == 0).all(), "log-probs after EOS are not 0"
    for name in ("completion_mask", "attention_mask", "finished"):
        assert getattr(found, name).dtype == torch.bool, f"{name} isn't bool"
    ended = (torch.isin(completions, torch.tensor(EOS)) & expected).any(1)
    same(found.finished, ended, "finished")
    assert 5 < ended.sum() < 3 * G and not expected.all(), "rows end nowhere, or all at once"
    # Nearly uniform, one of twelve tokens is EOS: most rows go on beside those that have ended.
    ends, options = EOS[:1], {"num_generations": G, "temperature": 50.0}
    found = sampled(student, twin, eos_token_ids=ends, **options)
    off = ~right.completion_mask(found.tokens[:, 4:], ends)
    assert (found.logprobs[off] == 0).all(), "log-probs after EOS are not 0"


@check("generate", 2)
def tokens_come_from_the_softmax_over_the_temperature(student, right):
    """The shares of the tokens drawn must be softmax(logits / temperature), whatever the
    checkpoint's generation_config says, and the log-probs theirs."""
    model, G = built("tiny_gpt2").eval(), 3000
    options = {"top_k": 1, "temperature": 0.1, "do_sample": True}
    twin = student.child.twin("tiny_gpt2", model, {}, **options)
    found = sampled(student, twin, num_generations=G, max_new_tokens=2, temperature=0.6)
    for row in range(3):
        real = PROMPTS[row][PROMPT_MASK[row]].unsqueeze(0)
        probs = (logits_of(model, real)[0, -1] / 0.6).softmax(-1)
        rows = slice(row * G, (row + 1) * G)
        counts = torch.bincount(found.tokens[rows, 4], minlength=12) / G
        distance = (counts - probs).abs().sum() / 2
        assert distance < 0.05, f"the shares are off by {distance:.2f} in total variation"
        drawn = probs.log()[found.tokens[rows, 4]]
        same(found.logprobs[rows, 0], drawn, "log-probs as drawn", 1e-4)


@check("generate", 1)
def the_seed_decides_and_prompts_differ(student, right):
    """The same generator must give the same tokens, another seed others; two completions of one
    prompt must not be the same by construction."""
    twin = student.child.twin("tiny_gpt2", built("tiny_gpt2"), {})
    first, again, other = (
        sampled(student, twin, s, num_generations=6, temperature=2.0).tokens for s in (3, 3, 4)
    )
    assert torch.equal(first, again), "the same seed gave other tokens"
    assert not torch.equal(first, other), "another seed gave the same tokens"
    assert len(first.unique(dim=0)) > 9, "completions of one prompt are all the same"


@check("generate", 3)
def greedy_tokens_are_those_of_each_prompt_alone(student, right):
    """At a temperature near 0 the result is known: the likeliest token each time. Rows that end
    early, left padding and positions must not change it."""
    model = built("tiny_gpt2")
    for seed in range(8):
        generator = torch.Generator().manual_seed(DRAW.seed(seed))
        for p in model.parameters():
            p.data.normal_(std=0.5, generator=generator)
        twin = student.child.twin("tiny_gpt2", model, {})
        found = sampled(student, twin, temperature=0.001, max_new_tokens=6)
        expected = sampled(right, model, temperature=0.001, max_new_tokens=6)
        same(found.tokens, expected.tokens, "tokens")


@check("generate", 1)
def dropout_is_off_while_sampling_and_the_mode_comes_back(student, right):
    """Sample in evaluation mode, without gradients, and leave the model in the mode it was in."""
    options = {"dropout": 0.5}
    model = built("tiny_gpt2", **options).train()
    twin = student.child.twin("tiny_gpt2", model, options)
    student.child.mode(twin, True)
    found = sampled(student, twin, temperature=0.001)
    training = student.child.look(twin, None)["training"]
    assert training, "the model was in training mode, and isn't any more"
    same(found.tokens, sampled(right, model, temperature=0.001).tokens, "tokens with dropout")
    assert not found.logprobs.requires_grad, "the log-probs have gradients"


@check("generate", 1)
def top_k_and_top_p_cut_the_distribution(student, right):
    """They are there to be shown: with top_k 2 only the two likeliest tokens come."""
    model = built("tiny_gpt2")
    twin = student.child.twin("tiny_gpt2", model, {})
    found = sampled(student, twin, num_generations=200, max_new_tokens=1, top_k=2)
    for row in range(3):
        tokens = found.tokens[row * 200 : (row + 1) * 200, 4].unique()
        real = PROMPTS[row][PROMPT_MASK[row]].unsqueeze(0)
        likely = logits_of(model.eval(), real)[0, -1].topk(2).indices
        assert torch.isin(tokens, likely).all(), "top_k 2 gave other tokens than the two likeliest"
    found = sampled(student, twin, num_generations=50, max_new_tokens=1, top_p=1e-6)
    expected = sampled(right, model, num_generations=50, max_new_tokens=1, top_k=1)
    same(found.tokens, expected.tokens, "tokens with top_p near 0")


# --- shape_rewards ---


@check("shape_rewards", 2)
def the_score_sits_on_the_last_real_token(student, right):
    """The score belongs to the last real token, usually EOS, not to the last column."""
    scores, kl = torch.arange(1.0, 6.0), torch.zeros(SHAPE)
    expected = torch.zeros(SHAPE)
    expected[torch.arange(5), MASK.sum(1) - 1] = scores
    same(student.shape_rewards(scores, kl, MASK, 0.1), expected, "rewards")


@check("shape_rewards", 1)
def each_token_pays_for_its_kl(student, right):
    """-kl_coef * kl at every real token, the last included, where the score is added to it."""
    scores, kl = randn(5), randn(*SHAPE)
    found = student.shape_rewards(scores, kl, MASK, 0.3)
    same(found, right.shape_rewards(scores, kl, MASK, 0.3), "rewards")
    same(found.sum(1), scores - 0.3 * (kl * MASK).sum(1), "sum of a row's rewards")


@check("shape_rewards", 1)
def padding_gets_nothing_whatever_is_there(student, right):
    """Off the mask the KL may be NaN: fill it, a product would keep the NaN."""
    scores, kl = randn(5), randn(*SHAPE)
    found = student.shape_rewards(scores, junk(kl, MASK, NAN), MASK, 0.3)
    same(found, right.shape_rewards(scores, kl, MASK, 0.3), "rewards")
    same(student.shape_rewards(scores, kl, MASK.long(), 0.3), found, "mask of 0 and 1")
    unchanged(lambda s, k: student.shape_rewards(s, k, MASK, 0.3), scores, kl)


# --- gae ---


def brute_gae(r: Tensor, v: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """The definition: A_t is the sum over l of (gamma lam)^l delta_{t+l}, row by row."""
    found = torch.zeros(r.shape, dtype=torch.float64)
    for b, length in enumerate(mask.sum(1).tolist()):
        values = [*v[b, :length].tolist(), 0.0]
        deltas = [float(r[b, t]) + gamma * values[t + 1] - values[t] for t in range(length)]
        for t in range(length):
            found[b, t] = sum((gamma * lam) ** i * d for i, d in enumerate(deltas[t:]))
    return found


@check("gae", 3)
def the_discounted_sum_of_deltas(student, right):
    """A_t is the sum of (gamma lam)^l delta_{t+l}, with delta_t = r_t + gamma V_{t+1} - V_t, row by
    row, ended by the last real token."""
    r, v = (junk(randn(*SHAPE, seed=s), MASK, 0.0) for s in (0, 1))
    for gamma, lam in ((1.0, 0.95), (0.9, 0.8), (0.5, 1.0), (0.9, 0.0)):
        advantages, _ = student.gae(r, v, MASK, gamma, lam)
        expected = brute_gae(r, v, MASK, gamma, lam)
        same(advantages, expected, f"advantages for gamma {gamma}, lambda {lam}")


@check("gae", 2)
def an_episode_ends_with_its_last_real_token(student, right):
    """The value model also says something at padding: it must not leak into the last token's
    delta, nor may there be advantages or returns after it."""
    r, v = randn(*SHAPE), randn(*SHAPE, seed=1)
    # Against the student's own with padding of 0: whether the sum is right is for another check.
    expected, _ = student.gae(junk(r, MASK, 0.0), junk(v, MASK, 0.0), MASK, 0.9, 0.8)
    expected = expected.masked_fill(~MASK, 0)
    for value in (3.0, NAN):
        dirty = junk(r, MASK, value), junk(v, MASK, value)
        found, returns = student.gae(*dirty, MASK, 0.9, 0.8)
        same(found, expected, f"advantages with {value} at padding")
        same(returns.masked_fill(MASK, 0), torch.zeros(SHAPE), "returns at padding")
    # Or a function that looks at no other token would pass.
    r[0, -1] += 1
    found, _ = student.gae(junk(r, MASK, 0.0), junk(v, MASK, 0.0), MASK, 0.9, 0.8)
    assert found[0, 0] != expected[0, 0], "the last reward doesn't reach the first advantage"


@check("gae", 1)
def returns_are_advantages_plus_values(student, right):
    """The targets of the value model are A + V at real tokens, with the A that is returned, not
    whitened."""
    r, v = randn(*SHAPE), randn(*SHAPE, seed=1)
    advantages, returns = student.gae(r, v, MASK, 0.9, 0.8)
    # Whether those advantages are right is for other checks.
    expected = (advantages + v).masked_fill(~MASK, 0)
    same(returns.masked_fill(~MASK, 0), expected, "returns")


@check("gae", 1)
def the_inputs_stay_as_they_are(student, right):
    """A mask of 0 and 1 does as well as one of bool, and no input is changed."""
    r, v = randn(*SHAPE), randn(*SHAPE, seed=1)
    unchanged(lambda r, v: student.gae(r, v, MASK, 0.9, 0.8), r, v)
    expected, _ = student.gae(r, v, MASK, 0.9, 0.8)
    found, _ = student.gae(r, v, MASK.long(), 0.9, 0.8)
    same(found, expected, "advantages with a mask of integers")


# --- policy_loss ---


@check("policy_loss", 1)
def the_larger_of_two_losses_at_each_token(student, right):
    """max(-A ratio, -A clipped ratio), with the ratio of new to old, for either sign of A."""
    new, old, A = randn(*SHAPE), randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)
    ratio = torch.exp(new.double() - old.double())
    expected = -torch.min(A * ratio, A * ratio.clamp(0.8, 1.2))
    same(loss_of(student.policy_loss(new, old, A, 0.2)), expected, "loss")
    expected = -torch.min(A * ratio, A * ratio.clamp(0.5, 1.5))
    same(loss_of(student.policy_loss(new, old, A, 0.5)), expected, "loss with clip_range 0.5")


@check("policy_loss", 1)
def the_clip_stops_the_gradient_only_where_moving_on_would_pay(student, right):
    """Outside the range: no gradient for A > 0 above and A < 0 below, the full one else."""
    old, A = torch.zeros(1, 4), torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    new = torch.tensor([[0.5, 0.5, -0.5, -0.5]], requires_grad=True)
    loss_of(student.policy_loss(new, old, A, 0.2)).sum().backward()
    ratio = new.detach().exp()
    expected = -A * ratio * torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    same(new.grad, expected, "gradient")


@check("policy_loss", 1)
def clipped_says_where_the_clip_decides(student, right):
    """clipped (B, T), bool: True where a token gets no gradient, its ratio above the range and
    A > 0 or below it and A < 0."""
    new, old, A = 0.3 * randn(*SHAPE), 0.3 * randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)
    A[0] = 0
    for clip_range in (0.2, 0.5):
        expected = clipped_tokens((new - old).exp(), A, clip_range, clip_range)
        what = f"clip_range {clip_range}"
        same_clipped(student.policy_loss(new, old, A, clip_range), expected, what)


def clipped_tokens(ratio: Tensor, A: Tensor, low: float, high: float) -> Tensor:
    return ((ratio > 1 + high) & (A > 0)) | ((ratio < 1 - low) & (A < 0))


@check("policy_loss", 1)
def the_result_is_per_token(student, right):
    """(B, T): the loop averages it over the mask. At ratio 1 the loss is -A."""
    x, A = randn(*SHAPE), randn(*SHAPE, seed=2)
    same(loss_of(student.policy_loss(x, x, A, 0.2)), -A, "loss at ratio 1")
    unchanged(lambda x, A: student.policy_loss(x, x, A, 0.2), x, A)


# --- value_loss ---


@check("value_loss", 1)
def half_the_larger_of_two_squared_errors(student, right):
    """0.5 * max((V - R)^2, (clipped V - R)^2), V clipped to within the range of the old value."""
    v, old, R = randn(*SHAPE), randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)
    clipped = torch.min(torch.max(v, old - 0.2), old + 0.2)
    expected = 0.5 * torch.max((v - R) ** 2, (clipped - R) ** 2)
    same(loss_of(student.value_loss(v, old, R, 0.2)), expected, "loss")


@check("value_loss", 1)
def the_clip_range_is_used(student, right):
    """With a huge range nothing is clipped: the loss is that of a value that hasn't moved from the
    old one. With a narrow one it isn't."""
    v, old, R = randn(*SHAPE), randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)
    # Against the student's own loss: whether it has its factor is for another check.
    unmoved = loss_of(student.value_loss(v, v, R, 0.2))
    same(loss_of(student.value_loss(v, old, R, 100.0)), unmoved, "loss with range 100")
    clipped = loss_of(student.value_loss(v, old, R, 0.2))
    assert not torch.allclose(clipped, unmoved), "a range of 0.2 clips nothing"


@check("value_loss", 1)
def no_gradient_where_the_clipped_error_decides(student, right):
    """A value that has moved away from the old one, past the clip, towards the return, has no
    gradient."""
    R, gradients = torch.full((1, 3), 2.0), []
    for moved in (False, True):
        v = torch.tensor([[1.0, 0.1, -1.0]], requires_grad=True)
        old = torch.zeros(1, 3) if moved else v.detach().clone()
        loss_of(student.value_loss(v, old, R, 0.2)).sum().backward()
        gradients.append(v.grad)
    assert (gradients[0] < 0).all(), "values below the return aren't raised"
    expected = gradients[0] * torch.tensor([[0.0, 1.0, 1.0]])
    same(gradients[1], expected, "gradient, of which the first is clipped")


@check("value_loss", 1)
def clipped_says_where_the_clipped_prediction_decides(student, right):
    """clipped (B, T), bool: True where the clipped prediction has the larger error of the two, and
    nowhere by rounding: old + clamp(V - old) isn't V to the last digit."""
    v, old, R = randn(*SHAPE), randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)
    for clip_range in (0.2, 1.0):
        bounded = torch.min(torch.max(v, old - clip_range), old + clip_range)
        expected = (bounded - R) ** 2 > (v - R) ** 2
        what = f"clip_range_value {clip_range}"
        same_clipped(student.value_loss(v, old, R, clip_range), expected, what)


# --- group_advantages ---


def brute_group(rewards: Tensor, G: int, scale: str) -> Tensor:
    groups = rewards.double().view(-1, G)
    centred = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        centred = centred / (groups.std(1, keepdim=True) + 1e-4)
    if scale == "batch":
        centred = centred / (groups.std() + 1e-4)
    return centred.flatten()


@check("group_advantages", 1)
def each_reward_is_compared_with_its_own_group(student, right):
    """Groups are consecutive rows: mean and standard deviation (with n - 1) of the group, and 1e-4
    is added to the latter."""
    rewards = randn(12) * torch.tensor([1.0, 10.0, 0.01]).repeat_interleave(4) + 3
    found = student.group_advantages(rewards, 4)
    same(found, brute_group(rewards, 4, "group"), "advantages", 1e-3, 1e-3)


@check("group_advantages", 1)
def the_three_ways_of_scaling(student, right):
    """ "batch" divides by the standard deviation of all rewards, "none" by nothing."""
    rewards = randn(12) + torch.arange(3.0).repeat_interleave(4)
    for scale in ("group", "batch", "none"):
        found = student.group_advantages(rewards, 4, scale)
        same(found, brute_group(rewards, 4, scale), f"advantages, scale_rewards {scale!r}", 1e-4)


@check("group_advantages", 1)
def equal_rewards_teach_nothing(student, right):
    """A group of equal rewards must get exactly 0. The mean of three times 0.1 isn't 0.1 in
    float32, and a standard deviation of about 0 blows that up: compute in float64."""
    for value in (0.1, 1 / 3, 7e6 + 0.3):
        for G in (3, 7):
            found = student.group_advantages(torch.full((2 * G,), value), G)
            assert (found == 0).all(), f"rewards of {value:g} gave {found.abs().max():g}"


@check("group_advantages", 1)
def a_missing_reward_stays_out(student, right):
    """NaN means that the function gave no reward: advantage 0, and not in mean and deviation."""
    rewards = torch.tensor([1.0, NAN, 3.0, 5.0, NAN, 2.0, NAN, NAN])
    for scale in ("group", "none", "batch"):
        expected = right.group_advantages(rewards, 4, scale)
        same(student.group_advantages(rewards, 4, scale), expected, f"{scale!r}", 1e-4)


@check("group_advantages", 1)
def impossible_arguments_are_refused(student, right):
    """Groups of one have nothing to be compared with, and a scaling must be known: ValueError."""
    rewards = randn(4)
    raises_value_error("groups of one", lambda: student.group_advantages(rewards, 1))
    raises_value_error("scale 'std'", lambda: student.group_advantages(rewards, 2, "std"))
    unchanged(lambda x: student.group_advantages(x, 2), rewards)


# --- grpo_loss ---


def loss_inputs(seed: int = 0) -> list[Tensor]:
    new, old, ref = (0.4 * randn(*SHAPE, seed=seed + s) - 1 for s in range(3))
    return [new, old, ref, randn(5, seed=seed + 3)]


def brute_grpo(
    new, old, A, mask, kind, level="token", low=0.2, high=None, bound=5.0, ref=None, kl=0.0
):
    """Token by token, with the loops of the definition; 9 is max_new_tokens."""
    high = low if high is None else high
    rows = []
    for b, length in enumerate(mask.sum(1).tolist()):
        log_ratios = (new[b, :length] - old[b, :length]).double()
        if level == "sequence":
            log_ratios = log_ratios.mean().expand(length)
        row = []
        for t in range(length):
            ratio, a = log_ratios[t].exp(), A[b].double()
            if kind == "cispo":
                loss = -a * min(ratio.item(), bound) * new[b, t].double()
            else:
                loss = -torch.min(a * ratio, a * ratio.clamp(1 - low, 1 + high))
            if ref is not None:
                d = (new[b, t] - ref[b, t]).double()
                loss = loss + kl * ((-d).exp() - 1 + d)
            row.append(loss)
        rows.append(torch.stack(row))
    if kind == "grpo":
        return torch.stack([row.mean() for row in rows]).mean()
    total = torch.stack([row.sum() for row in rows]).sum()
    return total / (mask.sum() if kind in ("dapo", "cispo") else 9 * len(rows))


def compare_grpo(student, what: str, kind: str = "grpo", **options: object) -> None:
    """Loss and gradient against the definition."""
    new, old, ref, A = loss_inputs()
    names = {"low": "clip_range", "high": "clip_range_high", "kl": "kl_coef"}
    names |= {"level": "importance_sampling_level", "ref": "ref_logprobs", "bound": "cispo_bound"}
    if "kl" in options:
        options["ref"] = ref
    given = {names[k]: v for k, v in options.items()}
    given = {"clip_range": 0.2, "loss_type": kind, "max_new_tokens": 9} | given
    gradients = []
    for run in (
        lambda x: loss_of(student.grpo_loss(x, old, A, MASK, **given)),
        lambda x: brute_grpo(x, old, A, MASK, kind, **options),
    ):
        x = new.clone().requires_grad_()
        loss = run(x)
        loss.backward()
        gradients.append((loss, x.grad))
    same(gradients[0][0], gradients[1][0], what)
    same(gradients[0][1], gradients[1][1], f"gradient of {what}")


@check("grpo_loss", 1)
def the_mean_over_completions_of_their_mean_over_tokens(student, right):
    """loss_type grpo: clipped surrogate per token, mean over the tokens of each row, then over the
    rows."""
    compare_grpo(student, "the loss")
    compare_grpo(student, "the loss with clip_range_high", low=0.1, high=0.4)


@check("grpo_loss", 1)
def dapo_and_dr_grpo_count_tokens(student, right):
    """dapo divides the sum over all tokens by their number, dr_grpo by rows * max_new_tokens."""
    compare_grpo(student, "the loss of dapo", "dapo")
    compare_grpo(student, "the loss of dr_grpo", "dr_grpo")


@check("grpo_loss", 1)
def cispo_bounds_the_weight_and_keeps_the_gradient(student, right):
    """-A * min(ratio, cispo_bound) * logprobs, the weight without gradient, over tokens."""
    compare_grpo(student, "the loss of cispo", "cispo", bound=1.1)
    compare_grpo(student, "the loss of cispo with clip_range_high", "cispo", bound=1.5, high=0.1)


@check("grpo_loss", 1)
def clipped_says_at_which_tokens_the_clip_decides(student, right):
    """clipped (B, T), bool: True where the ratio is above the range and A > 0 or below it and
    A < 0, at level "sequence" that of the completion; for cispo where it is above cispo_bound and A
    isn't 0."""
    new, old, _, A = loss_inputs()
    A[3] = 0
    log_ratio = new - old
    mean = (log_ratio * MASK).sum(1, keepdim=True) / MASK.sum(1, keepdim=True)
    for level, ratio in (("token", log_ratio.exp()), ("sequence", mean.exp().expand(SHAPE))):
        options = {"clip_range": 0.02, "clip_range_high": 0.1, "importance_sampling_level": level}
        found = student.grpo_loss(new, old, A, MASK, **options)
        expected = clipped_tokens(ratio, A.unsqueeze(1), 0.02, 0.1)
        same_clipped(found, expected, f"level {level!r}", MASK)
    options = {"clip_range": 0.2, "loss_type": "cispo", "cispo_bound": 1.1}
    expected = (log_ratio.exp() > 1.1) & (A != 0).unsqueeze(1)
    same_clipped(student.grpo_loss(new, old, A, MASK, **options), expected, "cispo", MASK)


@check("grpo_loss", 1)
def the_ratio_of_a_sequence_is_a_geometric_mean(student, right):
    """importance_sampling_level "sequence" (GSPO): the exponential of the mean log-ratio."""
    compare_grpo(student, "the loss of GSPO", level="sequence")


@check("grpo_loss", 1)
def the_kl_is_k3_with_its_gradient(student, right):
    """kl_coef * k3 is added to the loss of each token, and its gradient flows."""
    compare_grpo(student, "the loss with a KL", kl=0.7)
    compare_grpo(student, "the loss of dapo with a KL", "dapo", kl=0.7)


@check("grpo_loss", 1)
def micro_batches_add_up(student, right):
    """With num_rows and num_tokens of the whole minibatch the shares of its parts must sum to the
    whole."""
    new, old, ref, A = loss_inputs()
    for kind in ("grpo", "dapo", "dr_grpo", "cispo"):
        options = {"clip_range": 0.2, "clip_range_high": 0.3, "loss_type": kind}
        options |= {"max_new_tokens": 9, "kl_coef": 0.5, "cispo_bound": 1.2}
        whole = loss_of(student.grpo_loss(new, old, A, MASK, ref_logprobs=ref, **options))
        options |= {"num_rows": 5, "num_tokens": MASK.sum()}
        parts = [
            student.grpo_loss(new[r], old[r], A[r], MASK[r], ref_logprobs=ref[r], **options)
            for r in (slice(0, 2), slice(2, 5))
        ]
        total = sum(loss_of(part) for part in parts)
        same(total, whole, f"the sum of two parts, loss_type {kind}")


@check("grpo_loss", 1)
def padding_and_impossible_arguments(student, right):
    """What is off the mask has no influence, even NaN; an unknown loss_type, and dr_grpo without
    max_new_tokens, are a ValueError."""
    new, old, ref, A = loss_inputs()
    expected, _ = right.grpo_loss(new, old, A, MASK, clip_range=0.2, ref_logprobs=ref, kl_coef=0.1)
    dirty = [junk(x, MASK, value) for x, value in ((new, 50.0), (old, -50.0), (ref, 9.0))]
    dirty[0].requires_grad_()
    options = {"clip_range": 0.2, "kl_coef": 0.1}
    found = loss_of(student.grpo_loss(*dirty[:2], A, MASK, ref_logprobs=dirty[2], **options))
    same(found, expected, "the loss with other padding")
    found.backward()
    assert (dirty[0].grad[~MASK] == 0).all(), "there is a gradient at padding"
    call = lambda **o: student.grpo_loss(new, old, A, MASK, clip_range=0.2, **o)  # noqa: E731
    raises_value_error("loss_type 'x'", lambda: call(loss_type="x"))
    raises_value_error("dr_grpo without max_new_tokens", lambda: call(loss_type="dr_grpo"))


# --- rloo_advantages ---


@check("rloo_advantages", 1)
def the_baseline_is_the_mean_of_the_others(student, right):
    """A_i = R_i - mean of the other rewards of its group, groups in consecutive rows."""
    rewards = randn(12) + torch.arange(3.0).repeat_interleave(4)
    rows = range(12)
    others = [[j for j in rows if j // 4 == i // 4 and j != i] for i in rows]
    expected = torch.stack([rewards[i] - rewards[others[i]].mean() for i in rows])
    same(student.rloo_advantages(rewards, 4), expected, "advantages")
    same(student.rloo_advantages(rewards, 2), right.rloo_advantages(rewards, 2), "groups of two")


@check("rloo_advantages", 1)
def normalised_they_have_variance_1_over_the_batch(student, right):
    """normalize divides the advantages of all groups by their standard deviation (with n - 1) plus
    1e-4; a NaN has no part in it."""
    rewards = randn(12) * torch.tensor([1.0, 10.0, 0.01]).repeat_interleave(4) + 3
    rewards[5], rewards[8:] = NAN, NAN
    expected = student.rloo_advantages(rewards, 4).double()
    expected = expected / (expected[~rewards.isnan()].std() + 1e-4)
    same(student.rloo_advantages(rewards, 4, normalize=True), expected, "normalised advantages")
    same(student.rloo_advantages(rewards, 4, True), expected, "with True as third argument")


@check("rloo_advantages", 1)
def a_missing_reward_is_nobodys_sibling(student, right):
    """NaN gets advantage 0 and stays out of the others' mean."""
    rewards = torch.tensor([1.0, NAN, 3.0, 5.0, NAN, 2.0, NAN, NAN])
    expected = torch.tensor([-3.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    same(student.rloo_advantages(rewards, 4), expected, "advantages")


@check("rloo_advantages", 1)
def equal_rewards_and_groups_of_one(student, right):
    """Equal rewards teach nothing: 0, up to rounding. Groups of one are a ValueError."""
    for value in (0.1, 1 / 3, 7e6 + 0.3):
        for G in (3, 7):
            found = student.rloo_advantages(torch.full((2 * G,), value), G)
            assert (found.abs() <= 1e-6 * value).all(), f"rewards of {value:g} gave {found.max():g}"
    raises_value_error("groups of one", lambda: student.rloo_advantages(randn(4), 1))
    unchanged(lambda x: student.rloo_advantages(x, 2), randn(4))


# --- rloo_loss ---


@check("rloo_loss", 1)
def one_ratio_for_each_completion(student, right):
    """The ratio is that of whole completions: the exponential of the summed difference; the clip
    acts on rows."""
    new, old, _, A = loss_inputs()
    log_ratio = ((new - old).double() * MASK).sum(1)
    ratio = log_ratio.exp()
    expected = -torch.min(A * ratio, A * ratio.clamp(0.8, 1.2)).mean()
    same(loss_of(student.rloo_loss(new, old, A, MASK, clip_range=0.2)), expected, "loss")


@check("rloo_loss", 1)
def its_gradient_at_ratio_1_is_that_of_reinforce(student, right):
    """At ratio 1 the gradient is -A/B at every real token: no division by the length."""
    new, _, _, A = loss_inputs()
    x = new.clone().requires_grad_()
    loss_of(student.rloo_loss(x, new, A, MASK, clip_range=0.2)).backward()
    same(x.grad, -(A / 5).unsqueeze(1) * MASK, "gradient")


@check("rloo_loss", 1)
def clipped_says_in_which_rows_the_clip_decides(student, right):
    """clipped (B,), bool: True where the ratio of the completion is above the range and A > 0 or
    below it and A < 0: its tokens get no gradient."""
    new, old, _, A = loss_inputs()
    new[0], new[1] = old[0] + 0.5, old[1] - 0.5  # one above the range, one below it
    A[0], A[1] = A[0].abs() + 0.1, A[1].abs() + 0.1
    ratio = ((new - old) * MASK).sum(1).exp()
    for sign in (1, -1):
        expected = clipped_tokens(ratio, sign * A, 0.2, 0.2)
        found = student.rloo_loss(new, old, sign * A, MASK, clip_range=0.2)
        same_clipped(found, expected, "the loss")


@check("rloo_loss", 1)
def shares_add_up_and_padding_has_no_influence(student, right):
    """num_rows is the number of rows of the whole minibatch; what is off the mask, even NaN,
    doesn't count."""
    new, old, _, A = loss_inputs()
    whole, _ = right.rloo_loss(new, old, A, MASK, clip_range=0.2)
    rows = (slice(0, 2), slice(2, 5))
    parts = [
        student.rloo_loss(new[r], old[r], A[r], MASK[r], clip_range=0.2, num_rows=5) for r in rows
    ]
    same(sum(loss_of(part) for part in parts), whole, "the sum of two parts")
    dirty = junk(new, MASK, NAN)
    found = loss_of(student.rloo_loss(dirty, old, A, MASK, clip_range=0.2))
    same(found, whole, "with NaN at padding")


# --- preference_loss ---


def five_pairs() -> tuple[Tensor, Tensor]:
    """Scores of the chosen and of the rejected texts: new tensors, in case they are changed."""
    chosen = torch.tensor([1.0, -0.5, 3.0, 0.0, 2.0])
    return chosen, torch.tensor([0.5, 1.5, 3.0, -4.0, -1.0])


def brute_preference(margin: Tensor, center_rewards_coef: float = 0.0) -> Tensor:
    """The loss of the five pairs by its definition, in float64."""
    chosen, rejected = (x.double() for x in five_pairs())
    probability = 1 / (1 + torch.exp(-(chosen - rejected - margin)))
    return -probability.log() + center_rewards_coef * (chosen + rejected) ** 2


@check("preference_loss", 1)
def the_loss_of_each_pair_is_minus_its_log_probability(student, right):
    """(N,), no mean: -log sigmoid(chosen - rejected), log 2 where the two scores are equal."""
    same(student.preference_loss(*five_pairs()), brute_preference(torch.tensor(0.0)), "loss")
    gradients = [[x.requires_grad_() for x in five_pairs()] for _ in range(2)]
    for module, scores in zip((student, right), gradients):
        module.preference_loss(*scores).sum().backward()
    for (found, expected), name in zip(zip(*gradients), ("chosen", "rejected")):
        same(found.grad, expected.grad, f"gradient with respect to {name}")


@check("preference_loss", 1)
def the_margin_is_taken_off_the_difference(student, right):
    """A margin asks for more: sigmoid(chosen - rejected - margin). It is one number, or one for
    each pair."""
    margin = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0])
    same(student.preference_loss(*five_pairs(), margin), brute_preference(margin), "loss")
    found = student.preference_loss(*five_pairs(), margin=0.7)
    same(found, brute_preference(torch.tensor(0.7)), "loss with margin 0.7")


@check("preference_loss", 1)
def scores_are_centred_by_the_square_of_their_sum(student, right):
    """center_rewards_coef (chosen + rejected)^2 is added to the loss of each pair, without the
    margin."""
    margin = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0])
    for coef in (0.1, 2.0):
        found = student.preference_loss(*five_pairs(), margin, center_rewards_coef=coef)
        same(found, brute_preference(margin, coef), f"loss with center_rewards_coef {coef}")


@check("preference_loss", 1)
def pairs_that_are_badly_wrong_have_a_loss_and_a_gradient(student, right):
    """At a difference of -200 the sigmoid is 0 in float32, the loss is 200 and its gradient -1; at
    +200 both are 0: use logsigmoid."""
    chosen, rejected = torch.tensor([-150.0, 100.0, 0.0]), torch.tensor([50.0, -100.0, 40.0])
    x = chosen.clone().requires_grad_()
    loss = student.preference_loss(x, rejected)
    same(loss, torch.tensor([200.0, 0.0, 40.0]), "loss")
    loss.sum().backward()
    same(x.grad, torch.tensor([-1.0, 0.0, -1.0]), "gradient with respect to chosen")
    unchanged(student.preference_loss, chosen, rejected)
    call = lambda c, r, m: student.preference_loss(c, r, m, 0.1)  # noqa: E731
    unchanged(call, *five_pairs(), torch.ones(5))


# --- last_real_token ---

RIGHT, LEFT = MASK, MASK.flip(1)  # the side of the padding


@check("last_real_token", 1)
def padding_on_the_right_is_left_out(student, right):
    """A row of n real tokens ends in column n - 1: the first row fills the width, the third has one
    token. x may have two or three dimensions."""
    columns = torch.tensor([6, 2, 0, 4, 5])
    for x in (randn(*SHAPE), randn(*SHAPE, 3)):
        expected = torch.stack([row[column] for row, column in zip(x, columns)])
        same(student.last_real_token(x, RIGHT), expected, f"of x {tuple(x.shape)}")


@check("last_real_token", 1)
def padding_on_the_left_changes_the_place(student, right):
    """Padded on the left, each row ends in the last column, however many tokens it has."""
    for x in (randn(*SHAPE), randn(*SHAPE, 3)):
        same(student.last_real_token(x, LEFT), x[:, -1], f"of x {tuple(x.shape)}")


@check("last_real_token", 1)
def the_mask_alone_decides(student, right):
    """What is off the mask may be anything, even NaN; the mask may be of bool or of 0 and 1; no
    gradient goes elsewhere; no input is changed."""
    for side, mask in (("right", RIGHT), ("left", LEFT)):
        x = randn(*SHAPE, 3)
        expected = right.last_real_token(x, mask)
        dirty = junk(x, mask.unsqueeze(2), NAN)
        same(student.last_real_token(dirty, mask), expected, f"padded on the {side} with NaN")
        found = student.last_real_token(x, mask.long())
        same(found, expected, f"padded on the {side}, a mask of 0 and 1")
        tokens = torch.arange(35).view(SHAPE) % 3 * mask  # pad is 0, and so are real tokens
        found = student.last_real_token(tokens, mask)
        same(found, right.last_real_token(tokens, mask), f"token ids, padded on the {side}")
        gradients = [x.clone().requires_grad_() for _ in range(2)]
        for module, inputs in zip((student, right), gradients):
            module.last_real_token(inputs, mask).sum().backward()
        same(gradients[0].grad, gradients[1].grad, f"gradient, padded on the {side}")
        unchanged(student.last_real_token, x, mask.long())
        unchanged(student.last_real_token, x, mask)


# --- The loops ---

SMALL = (
    "--num_steps 2 --warmup_steps 2 --num_eval_prompts 4 --eval_every 2 --device cpu"
    " --temperature 0.9 --record_tokens false"
    " --learning_rate 2e-3 --rollout_batch_size 16 --micro_batch_size 8 --prompts_per_step"
)
# What says whether the mathematics of a step is right; times and memory differ anyway.
TOLD = (
    "objective/kl objective/scores objective/rlhf_reward loss/policy_avg loss/value_avg grad_norm"
    " policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg val/ratio lr episode"
    " val/explained_variance reward/std_within_group"
).split()


def trained(module: object, flags: str, spied: bool = False) -> dict:
    """A short run of module.main: its metrics as they were written, and of each step of the
    optimiser what it was made of.
    """
    # Always this seed: with drawn ones right loops have differed by more than the tolerance.
    flags = f"--seed 0 {SMALL} {flags}"
    found = module.child.train(flags.split(), spied)
    lines = [json.loads(line) for line in found["metrics"].splitlines()]
    assert all(isinstance(line, dict) for line in lines), "metrics.jsonl has other lines"
    return {"metrics": lines, "steps": found["steps"]}


def same_training(student, right, flags: str) -> None:
    """The metrics of two steps: the first is the arithmetic, the second what the first has done."""
    runs = trained(student, flags)["metrics"], trained(right, flags)["metrics"]
    lengths = [len(lines) for lines in runs]
    assert lengths[0] == lengths[1], f"{lengths[0]} lines of metrics, not {lengths[1]}"
    for found, expected in zip(*runs):
        for name in TOLD:
            value = found.get(name)
            if name in expected and expected[name] is None:
                assert value is None, f"step {expected['step']}: {name} is unknown, not {value}"
            if expected.get(name) is not None:
                assert value is not None, f"step {expected['step']}: there is no {name}"
                what = f"step {expected['step']}, {name}, flags {flags!r}"
                # A token at the edge of the clip may fall on either side by rounding.
                near_0 = 0.02 if "clipfrac" in name else 1e-5
                same(torch.tensor(value), torch.tensor(expected[name]), what, 2e-3, near_0)


@check("ppo_loop", 3)
def two_steps_of_ppo_have_the_metrics_of_the_solution(student, right):
    """Rewards per token from score and KL, GAE, whitened advantages."""
    same_training(student, right, "16 --kl_coef 0.5 --num_epochs 2 --num_mini_batches 1")


@check("ppo_loop", 1)
def the_flags_of_rewards_and_advantages_are_used(student, right):
    """whiten_rewards without shifting the mean, gamma, lam and kl_estimator come from the
    config."""
    flags = "--whiten_rewards --gamma 0.9 --lam 0.5 --kl_estimator k3 --num_mini_batches 1"
    same_training(student, right, f"16 --kl_coef 0.5 --num_epochs 2 {flags}")


@check("ppo_loop", 1)
def without_a_reference_the_kl_is_0(student, right):
    """kl_coef 0 builds no reference: kl is 0, and there are no ref_logprobs."""
    same_training(student, right, "16 --kl_coef 0 --num_epochs 1 --num_mini_batches 1")


@check("grpo_loop", 5)
def two_updates_of_grpo_have_the_metrics_of_the_solution(student, right):
    """One minibatch: loss, gradient norm, learning rate, and after the update the KL of the next
    step."""
    same_training(student, right, "4 --num_generations 4 --kl_coef 0.3 --num_epochs 1")


@check("grpo_loop", 2)
def the_loss_gets_its_flags_and_the_mask_its_truncated_rows(student, right):
    """loss_type, the clip ranges, cispo_bound, the level, max_new_tokens and
    mask_truncated_completions."""
    flags = "--loss_type dr_grpo --mask_truncated_completions --max_new_tokens 3 --num_epochs 3"
    same_training(student, right, f"4 --num_generations 4 --clip_range 0.01 {flags}")
    flags = "--loss_type dapo --importance_sampling_level sequence --clip_range_high 0.001"
    same_training(student, right, f"4 --num_generations 4 --num_epochs 3 {flags}")
    flags = "--loss_type cispo --cispo_bound 1.001 --num_epochs 3"
    same_training(student, right, f"4 --num_generations 4 {flags}")


@check("grpo_loop", 2)
def every_epoch_steps_once_for_each_minibatch_of_new_order(student, right):
    """2 epochs of 2 minibatches are 4 optimiser steps per rollout, each row once per epoch, and the
    gradient is set to zero between them."""
    flags = "4 --num_generations 4 --num_epochs 2 --num_mini_batches 2 --loss_type dapo"
    flags += " --max_grad_norm 0.1"
    found, reference = (trained(module, flags, spied=True) for module in (student, right))
    steps = [calls for _, calls in found["steps"]]
    for norm, _ in found["steps"]:
        assert 0 < norm < 0.101, f"a gradient of norm {norm:.3g} at --max_grad_norm 0.1"
    assert len(steps) == 8, f"{len(steps)} optimiser steps in two rollouts, not 8"
    rows = []
    for part in steps:
        rows.append([value for values, *_ in part for value in values])
        counts = {tuple(given) for _, _, given, _ in part}
        expected = (len(rows[-1]), sum(tokens for _, tokens, *_ in part))
        assert counts == {expected}, f"num_rows and num_tokens {counts}, not {expected}"
        assert len(rows[-1]) == 8, f"a minibatch of {len(rows[-1])} rows, not 8"
    for first in (0, 4):  # steps of a rollout: 2 minibatches, and again
        epochs = [sorted(rows[i] + rows[i + 1]) for i in (first, first + 2)]
        same(torch.tensor(epochs[0]), torch.tensor(epochs[1]), "advantages of the two epochs")
    theirs = [
        value for _, part in reference["steps"][:2] for values, *_ in part for value in values
    ]
    whole = torch.tensor(sorted(theirs))
    same(torch.tensor(sorted(rows[0] + rows[1])), whole, "advantages of the first epoch", 1e-3)
    sets = [sorted(round(x, 4) for *_, known in part for x in known) for part in steps]
    assert sets[0] not in sets[2:4], "the second epoch has the minibatches of the first"
    first, expected = (run["metrics"][0] for run in (found, reference))
    assert first["val/ratio_max_dev_first"] < 1e-3, "the ratio isn't 1 before the first update"
    ours, theirs = (line["grad_norm"] for line in (first, expected))
    assert 0.5 < ours / theirs < 2, f"the mean gradient norm is {ours:.3g}, not about {theirs:.3g}"


@check("rloo_loop", 2)
def two_steps_of_rloo_have_the_metrics_of_the_solution(student, right):
    """The KL, k1 summed over the completion, is taken off the score before the baseline."""
    same_training(student, right, "4 --num_generations 4 --kl_coef 0.5 --num_epochs 2")


@check("rloo_loop", 1)
def the_clip_acts_on_the_score_and_normalising_on_the_advantages(student, right):
    """reward_clip_range clips scores and not the KL; normalize_advantages goes to
    rloo_advantages."""
    for flags in ("--reward_clip_range 0.1 0.6", "--normalize_advantages"):
        same_training(student, right, f"4 --num_generations 4 --kl_coef 0.5 {flags}")


@check("rloo_loop", 1)
def without_a_reference_the_reward_is_the_score(student, right):
    """kl_coef 0 builds no reference: kl is None, and logged as unknown."""
    same_training(student, right, "4 --num_generations 4 --kl_coef 0")


# --- Running them ---


class Solution:
    """The repository's own answers: functions here, runs in a process of the sandbox."""

    def __init__(self, sandbox: Sandbox, file: str) -> None:
        self.sandbox, self.file, self.child = sandbox, file, self

    def __getattr__(self, name: str) -> Callable:
        return getattr(_solution(self.file), name)

    def train(self, flags: list[str], spied: bool) -> dict:
        """As child.Harness.train; each run is made once."""
        key = self.file, *flags, spied
        with LOCK:
            lock = LOCKS.setdefault(key, threading.Lock())
        with lock:
            if key not in RUNS:
                with folder_for(repository_files()) as folder:
                    process = self.sandbox.start(folder, 600)
                    try:
                        student = Student(process, self.file)
                        student.child.load(self.file, 0, 0)
                        RUNS[key] = student.child.train(flags, spied)
                    finally:
                        process.close()
        return RUNS[key]


RUNS: dict[tuple, dict] = {}
LOCKS: dict[tuple, threading.Lock] = {}
LOCK = threading.Lock()


@functools.cache
def _solution(file: str) -> ModuleType:
    name = f"solution_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


GIVEN = ("*.py", "plumbing/*.py", "tools/*.py", "tiny/*.json", "tiny/*.safetensors", "tiny/*.py")


@functools.cache
def repository_files() -> dict[str, bytes]:
    """{path: data} of what the scripts need to run, and the prompts of the runs of a loop."""
    paths = sorted(path for pattern in GIVEN for path in REPOSITORY.glob(pattern))
    given = {path.relative_to(REPOSITORY).as_posix(): path.read_bytes() for path in paths}
    # Only 320: reading all sums would take a third of the time of such a run.
    rng = random.Random(0)
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(320)]
    sums = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
    return given | {"sums.jsonl": "\n".join(sums).encode()}


def shortened(text: str) -> str:
    """The text, cut where it is longer than a message may be."""
    more = len(text) - MESSAGE
    return text if more <= 0 else f"{text[:MESSAGE]} ... ({more:,} characters more)"


def run_check(item: Check, student: Student, right: Solution, number: int) -> str:
    """'' if the submission passes, else why not. Raises Ended."""
    try:
        student.child.load(right.file, number, DRAW.seed(0))
        item.run(student, right)
    except Ended:
        raise
    except (AssertionError, Fault) as e:
        return shortened(" ".join(str(e).strip().split("\n")[:1])) or "it fails"
    except Exception as e:  # data of another form than a check reads
        return shortened(f"{type(e).__name__}: {e}".split("\n")[0])
    return ""


def run_checks(
    problem: str, files: dict[str, bytes], sandbox: Sandbox, time_limit: float
) -> tuple[list[str], list[str]]:
    """([fault of each check, '' where it passes], what the process did that no answer needs)."""
    verdicts, items, file = [], CHECKS[problem], BY_NAME[problem].file
    with folder_for(files) as folder:
        process = sandbox.start(folder, time_limit)
        student = Student(process, file)
        try:
            for number, item in enumerate(items):
                verdicts.append(run_check(item, student, Solution(sandbox, file), number))
        except Ended as e:
            verdicts += [shortened(str(e))] * (len(items) - len(verdicts))
        finally:
            process.close()
    return verdicts, student.notes
