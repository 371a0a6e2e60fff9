"""Options of later papers: by hand, by the definition, and in a run."""

import json
import math

import pytest
import torch
from small import EOS, IN_GROUPS, RAGGED, in_float64, make_rollout, small_gpt2, small_llama
from test_scripts import record_gradients

import grpo
import ppo
import rloo
from common import token_entropy
from grpo import grpo_loss
from plumbing.extras import overlong_penalty, replace_flat_groups, sequence_weighted, token_weighted
from plumbing.forward import completion_logprobs
from plumbing.metrics import Meter
from ppo import policy_loss
from rloo import rloo_loss

SCRIPTS = {"ppo": ppo, "grpo": grpo, "rloo": rloo}


def noise(seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(RAGGED.completion_mask.shape, generator=generator).double()


# --- Truncated importance sampling ---


def test_the_weight_is_the_ratio_to_the_sampler_up_to_the_cap():
    """By hand: weights 1, 2 and 4, the last one capped at 3; padding has none."""
    rollout = make_rollout([[1]] * 2, [[5, 6, 7], [8, EOS]])
    rollout.logprobs = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, 9.0]])
    old = -1 + torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.5, 7.0]]).log()
    mask = rollout.completion_mask
    tokens = token_weighted(torch.tensor([2.0, -1.0]), old, rollout, mask, 3.0)
    assert torch.allclose(tokens[mask], torch.tensor([2.0, 4.0, 6.0, -0.5, -0.5]))
    per_token = token_weighted(torch.ones(2, 3), old, rollout, mask, 3.0)
    assert torch.allclose(per_token[mask], torch.tensor([1.0, 2.0, 3.0, 0.5, 0.5]))
    # A completion as one action: 1 * 2 * 4 is capped at 3, and 0.5 * 0.5 is not.
    whole = sequence_weighted(torch.tensor([2.0, -1.0]), old, rollout, mask, 3.0)
    assert torch.allclose(whole, torch.tensor([6.0, -0.25]))


def test_without_a_cap_the_advantages_are_the_same_object():
    advantages = torch.ones(6)
    for weighted in (token_weighted, sequence_weighted):
        assert weighted(advantages, None, None, None, None) is advantages


def test_the_weight_has_no_gradient_and_a_huge_one_is_the_cap():
    rollout = make_rollout([[1]], [[5, 6]])
    old = torch.tensor([[300.0, 0.0]], requires_grad=True)
    found = token_weighted(torch.ones(1), old, rollout, rollout.completion_mask, 2.0)
    assert found.tolist() == [[2.0, 1.0]] and not found.requires_grad


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_a_weight_on_the_advantages_is_the_weight_on_the_loss_and_not_on_the_kl(loss_type):
    """Of the surrogates: each is homogeneous in the advantage. The KL keeps its weight."""
    mask, logprobs, old, ref = RAGGED.completion_mask, noise(1), noise(2), noise(3)
    A, w = noise(4)[:, 0], noise(5).exp()
    options = dict(clip_range=0.2, loss_type=loss_type, max_new_tokens=9, cispo_bound=2.0)

    def loss(advantages, row, column, **kl):
        one = torch.zeros_like(mask)
        one[row, column] = True
        counts = {"num_rows": 6, "num_tokens": mask.sum()}
        arguments = logprobs, old, advantages, one
        return grpo_loss(*arguments, **options, **counts, **kl)[0]

    kl = {"ref_logprobs": ref, "kl_coef": 0.5}
    for row, column in mask.nonzero().tolist():
        plain = loss(A, row, column)
        assert loss(A.unsqueeze(1) * w, row, column) == pytest.approx(
            plain.item() * w[row, column].item(), abs=1e-12
        )
        of_kl = loss(A, row, column, **kl) - plain
        with_kl = loss(A.unsqueeze(1) * w, row, column, **kl)
        assert with_kl - loss(A.unsqueeze(1) * w, row, column) == pytest.approx(
            of_kl.item(), abs=1e-12
        )
    pg, _ = policy_loss(logprobs, old, A.unsqueeze(1) * w, 0.2)
    assert torch.allclose(pg, policy_loss(logprobs, old, A.unsqueeze(1), 0.2)[0] * w)
    per_row = w[:, 0]
    one_row = [rloo_loss(logprobs[i : i + 1], old[i : i + 1], A[i : i + 1], mask[i : i + 1],
                         clip_range=0.2)[0] for i in range(6)]  # fmt: skip
    whole, _ = rloo_loss(logprobs, old, A * per_row, mask, clip_range=0.2)
    assert whole == pytest.approx(sum(x * p for x, p in zip(one_row, per_row)).item() / 6)


def test_advantages_of_each_token_and_of_each_row_give_the_same_loss():
    arguments = noise(1), noise(2)
    A, mask = noise(4)[:, 0], RAGGED.completion_mask
    losses = [
        grpo_loss(*arguments, x, mask, clip_range=0.2)[0]
        for x in (A, A.unsqueeze(1), A.unsqueeze(1).expand_as(mask))
    ]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("script", SCRIPTS)
def test_in_a_run_the_cap_acts_where_the_sampler_is_rounded_and_nowhere_else(
    script, make_job, monkeypatch
):
    """On a CPU in float32 the weights are 1; rounded to bfloat16 they are not."""
    job = make_job(SCRIPTS[script])
    recorded = record_gradients(monkeypatch)
    grads = []
    for cap, bf16 in ((None, False), (2.0, False), (None, True), (2.0, True)):
        job(importance_cap=cap or 1e9, bf16=bf16) if cap else job(bf16=bf16)
        grads.append(torch.cat([g.flatten() for g in recorded[-1][0]]))
    norm = grads[0].norm()
    assert (grads[1] - grads[0]).norm() < 1e-4 * norm
    assert (grads[3] - grads[2]).norm() > 1e-4 * norm


# --- How far the sampler is from the training forward ---


def test_the_kl_from_sampler_to_policy_and_the_largest_deviation_by_hand():
    rollout = make_rollout([[1]] * 3, [[5, 6, 7], [8, EOS], [9]])
    rollout.logprobs = torch.tensor([[-1.0, -2.0, -1.0], [-1.0, -3.0, 0], [-1.0, 0, 0]])
    old = rollout.logprobs + torch.tensor([[0.1, -0.2, 0], [0.3, 0, 99], [0, 99, 99]])
    meter, mask = Meter(), rollout.completion_mask
    for rows in (torch.tensor([0]), torch.tensor([2, 1])):
        x = old[rows]
        flat = torch.zeros_like(x)
        meter.add_policy(rollout, rows, x, x, flat, flat + 1, flat, mask[rows])
    found = meter.results()
    k3 = sum(math.exp(d) - 1 - d for d in (0.1, -0.2, 0, 0.3, 0, 0)) / 6
    assert found["val/sampler_kl"] == pytest.approx(k3, rel=1e-5)
    assert found["val/sampler_max_dev"] == pytest.approx(0.3, rel=1e-5)


def test_in_float32_the_sampler_agrees_with_the_training_forward_and_in_bfloat16_less(make_job):
    job = make_job(grpo)
    plain, rounded = job()[0], job(bf16="true")[0]
    assert 0 <= plain["val/sampler_kl"] < 1e-9 and plain["val/sampler_max_dev"] < 1e-4
    assert rounded["val/sampler_kl"] > 1e-7 and 1e-3 < rounded["val/sampler_max_dev"] < 2


# --- An entropy bonus ---


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_the_entropy_has_a_gradient_where_it_is_asked_for_and_nowhere_else(make, monkeypatch):
    monkeypatch.setattr("plumbing.forward.CHUNK", 40 * 4)  # several chunks
    model, rollout = make().eval().double(), IN_GROUPS
    _, plain = completion_logprobs(model, rollout, 0.7)
    model.zero_grad()
    plain.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    model.zero_grad()
    _, entropy = completion_logprobs(model, rollout, 0.7, entropy_grad=True)
    assert torch.allclose(entropy, plain)
    entropy.sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    positions = (rollout.attention_mask.long().cumsum(1) - 1).clamp(min=0)
    mask = rollout.attention_mask.long()
    logits = model(rollout.tokens, attention_mask=mask, position_ids=positions).logits
    length = rollout.completion_mask.shape[1]
    logits = logits[:, -length - 1 : -1] / 0.7
    token_entropy(logits)[rollout.completion_mask].sum().backward()
    for mine, p in zip(found, model.parameters(), strict=True):  # Llama's rotations are float32
        assert torch.allclose(mine, p.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("parts", [{"micro_batch_size": 8}, {"micro_batch_size": 3}])
def test_the_bonus_adds_its_weight_times_the_gradient_of_the_mean_entropy(
    script, parts, make_job, monkeypatch, tmp_path
):
    """Whatever the micro-batches; of the rows some have no advantage."""
    (tmp_path / "half.py").write_text(
        "def half(prompts, completion_ids):\n"
        "    return [len(p) > 1 and sum(i) % 7 - 3.0 for p, i in zip(prompts, completion_ids)]\n"
    )
    module, rollouts = SCRIPTS[script], []
    in_float64(monkeypatch, module)
    draw = module.sample

    def spy(*args, **options):
        rollouts.append(draw(*args, **options))
        return rollouts[-1]

    monkeypatch.setattr(module, "sample", spy)
    recorded, grads = record_gradients(monkeypatch), []
    for coef in (0, 0.5):
        flags = {"reward": f"{tmp_path}/half.py:half", "completions": 16}
        make_job(module)(entropy_coef=coef, kl_coef=0, max_grad_norm=1e9, **flags, **parts)
        grads.append(recorded[0][0])  # of the first update
        recorded.clear()
    model, rollout = module.load_policy(make_job(module).model).eval(), rollouts[-1]
    _, entropy = completion_logprobs(model, rollout, 0.7, entropy_grad=True)
    (entropy.sum() / rollout.completion_mask.sum()).backward()
    expected = [p.grad for p in model.parameters()]
    for before, after, g in zip(*grads, expected):  # the policy's come first
        assert torch.allclose(after - before, -0.5 * g, atol=1e-8)
    assert max(g.abs().max() for g in expected) > 1e-4


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_bonus_of_a_minibatch_with_a_single_token_has_its_full_weight(
    script, make_job, monkeypatch, tmp_path
):
    (tmp_path / "flat.py").write_text("def flat(prompts, **_):\n    return [1.0] * len(prompts)\n")
    module, recorded = SCRIPTS[script], record_gradients(monkeypatch)
    in_float64(monkeypatch, module)
    job, grads, flags = make_job(module), [], {"reward": f"{tmp_path}/flat.py:flat", "kl_coef": 0}
    flags |= {"completions": 4, "num_mini_batches": 4, "max_new_tokens": 1, "max_grad_norm": 1e9}
    draw, rollouts = module.sample, []

    def spy(*args, **options):
        rollouts.append(draw(*args, **options))
        return rollouts[-1]

    monkeypatch.setattr(module, "sample", spy)
    for coef in (0, 0.5):
        recorded.clear()
        job(entropy_coef=coef, num_epochs=1, **flags)
        grads.append(recorded[0][0])
    model, possible = module.load_policy(job.model).eval(), []
    for row in range(4):  # which one comes first is drawn
        model.zero_grad()
        one = rollouts[-1][torch.tensor([row])]
        completion_logprobs(model, one, 0.7, entropy_grad=True)[1].sum().backward()
        possible.append([0.5 * p.grad for p in model.parameters()])
    bonus = [before - after for before, after in zip(*grads)]
    assert any(
        all(torch.allclose(x, y, atol=1e-8) for x, y in zip(bonus, expected))
        for expected in possible
    )


# --- DAPO's length penalty ---


def test_the_length_penalty_is_equation_13_at_every_length():
    """|y| <= L_max - L_cache: 0; then ((L_max - L_cache) - |y|) / L_cache."""
    lengths, longest, cache = range(1, 11), 10, 4
    rollout = make_rollout([[1]] * 10, [[5] * n for n in lengths])
    expected = [0 if n <= longest - cache else ((longest - cache) - n) / cache for n in lengths]
    assert overlong_penalty(rollout, cache).tolist() == pytest.approx(expected)
    assert expected[5:] == [0, -0.25, -0.5, -0.75, -1]
    assert overlong_penalty(rollout, 0) == 0.0
    assert overlong_penalty(rollout, 10).tolist() == pytest.approx([-n / 10 for n in lengths])


def test_in_a_run_the_penalty_is_part_of_the_score(make_job):
    job = make_job(grpo)
    plain, less = job()[0], job(overlong_buffer=6)[0]
    assert less["objective/scores"] == pytest.approx(
        plain["objective/scores"] - plain["length/mean"] / 6, abs=1e-5
    )


# --- DAPO's dynamic sampling ---


class FakeRun:
    """What replace_flat_groups needs of a run; a prompt's first token says what its group gets."""

    def __init__(self, num_prompts: int, rounds: int, useful: set[int]) -> None:
        self.train = [{"prompt": str(i), "id": i} for i in range(num_prompts)]
        self.useful, self.asked = useful, []
        self.config = grpo.Config(num_generations=2, dynamic_sampling=rounds, seed=5)
        self.config.rollout_batch_size = 4
        self.policy = self.tokenizer = None
        self.sampling, self.task = {}, self

    def drawn(self, ids: list[int]):
        """Groups of two completions; of prompt i the tokens are i, the prompts i % 3 + 1 long."""
        rows = [self.train[i] for i in ids]
        twice = [i for i in ids for _ in range(2)]
        rollout = make_rollout([[i] * (i % 3 + 1) for i in twice], [[i, EOS] for i in twice])
        rollout.logprobs = -torch.tensor(twice, dtype=torch.float).unsqueeze(1).expand(-1, 2)
        scores = [float(i in self.useful and j) for i in ids for j in range(2)]
        return rows, rollout, torch.tensor(scores), [f"{i}.{j}" for i in ids for j in range(2)]


@pytest.fixture
def fake(monkeypatch):
    def make(num_prompts, rounds, useful):
        run = FakeRun(num_prompts, rounds, useful)

        def encode(tokenizer, rows):
            run.asked.append([row["id"] for row in rows])
            return None, None

        monkeypatch.setattr("plumbing.extras.encode_prompts", encode)
        monkeypatch.setattr("plumbing.extras.sample", lambda *a, **k: run.drawn(run.asked[-1])[1])
        monkeypatch.setattr("plumbing.extras.score", lambda *a: run.drawn(run.asked[-1])[2:])
        return run

    return make


def check(run, drawn) -> list[int]:
    """Every part of `drawn` belongs to the prompt at its place; returns the prompts."""
    rows, rollout, scores, texts = drawn
    ids = [row["id"] for row in rows]
    expected = run.drawn(ids)
    assert texts == expected[3] and torch.equal(scores, expected[2])
    width = rollout.tokens.shape[1] - expected[1].tokens.shape[1]
    assert torch.equal(rollout.tokens[:, width:], expected[1].tokens)
    assert torch.equal(rollout.attention_mask[:, width:], expected[1].attention_mask)
    assert not rollout.attention_mask[:, :width].any()
    for name in ("completion_mask", "logprobs", "finished"):
        assert torch.equal(getattr(rollout, name), getattr(expected[1], name))
    return ids


def test_flat_groups_are_replaced_in_their_places_and_the_others_stay(fake):
    run = fake(20, 1, set(range(2, 20)))
    ids = check(run, (found := replace_flat_groups(run, 0, run.drawn([0, 7, 1, 8])))[0])
    assert ids[1::2] == [7, 8] and run.asked == [[ids[0], ids[2]]]
    assert {0, 1, 7, 8}.isdisjoint(run.asked[0]), "of prompts that are not in the batch"
    assert found[1] == {"reward/groups_dropped": 2}


def test_it_goes_on_for_the_groups_that_are_still_flat_and_stops_when_none_is(fake):
    run = fake(40, 50, set(range(20, 40)))
    drawn, dropped = replace_flat_groups(run, 3, run.drawn([0, 1, 2, 20]))
    ids = check(run, drawn)
    assert len(set(ids)) == 4 and min(ids) >= 20
    asked = [len(some) for some in run.asked]
    assert (
        asked[0] == 3
        and asked == sorted(asked, reverse=True)
        and dropped == {"reward/groups_dropped": sum(asked)}
    )
    everything = [i for some in run.asked for i in some]
    assert len(set(everything)) == len(everything), "no prompt twice"


def test_after_the_last_round_what_is_still_flat_stays(fake):
    run = fake(40, 2, set())
    drawn, dropped = replace_flat_groups(run, 0, run.drawn([0, 1]))
    assert check(run, drawn) == [0, 1] and dropped == {"reward/groups_dropped": 4}
    few = fake(3, 9, set())
    assert check(few, replace_flat_groups(few, 0, few.drawn([0, 1]))[0]) == [0, 1]
    assert few.asked == [[2]], "all prompts have been tried"


def test_which_prompts_follow_depends_on_seed_step_and_round(fake):
    def asked(step, seed=5):
        run = fake(40, 2, set())
        run.config.seed = seed
        replace_flat_groups(run, step, run.drawn([0, 1]))
        return run.asked

    assert asked(0) == asked(0)
    assert asked(0) != asked(1) and asked(0) != asked(0, seed=6)


def test_a_run_replaces_flat_groups_and_logs_what_it_dropped(make_job, tmp_path):
    (tmp_path / "r.py").write_text(
        "def some(prompts, completion_ids):\n"
        "    return [len(p) > 1 and sum(i) % 7 for p, i in zip(prompts, completion_ids)]\n"
    )
    job = make_job(grpo)
    options = dict(reward=f"{tmp_path}/r.py:some", num_steps=2, num_generations=2)
    plain, more = job(**options), job(dynamic_sampling=3, **options)
    assert "reward/groups_dropped" not in plain[0] and more[0]["reward/groups_dropped"] > 0
    assert job(dynamic_sampling=1, **options)[0]["reward/groups_dropped"] > 0
    for a, b in zip(plain[:2], more[:2]):
        assert b["reward/frac_flat_groups"] < a["reward/frac_flat_groups"]
    rows = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    trained = [s for s in map(json.loads, rows) if s["split"] == "train"]
    groups = [trained[i : i + 2] for i in range(0, len(trained), 2)]
    assert all(a["prompt"] == b["prompt"] for a, b in groups)
    again = job(dynamic_sampling=3, **options)
    names = ("objective/scores", "grad_norm", "reward/groups_dropped")
    assert [[x[n] for n in names] for x in again[:2]] == [[x[n] for n in names] for x in more[:2]]
