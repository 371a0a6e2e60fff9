"""Two steps of ppo.py against the same two steps written out naively from the equations.

At the first step every log-ratio, KL and value is 0, so a wrong sign or a dropped coefficient
cannot show. At the second one nothing is 0. Every number of the second step, down to the gradients
and the weights at the end, is computed here a second time, row by row. Both sides are in float64,
so they agree to nine digits; the metrics, which the loop adds up in float32, to six.
"""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from small import (
    equal_after_adam,
    equal_updates,
    in_float64,
    kept_update,
    letter_tokenizer,
    lines_of,
    save_model,
    small_gpt2,
)
from transformers import AutoModelForCausalLM

import ppo

EOS = 19
ROWS, UPDATES = 12, 6  # of a step: 6 prompts x 2 completions; 3 epochs x 2 minibatches
FLAGS = """
--num_steps=2 --prompts_per_step=6 --num_generations=2 --max_new_tokens=5 --temperature=1.5
--kl_coef=0.3 --kl_estimator=k3 --missing_eos_penalty=0.75 --gamma=0.9 --lam=0.5
--learning_rate=0.01 --warmup_steps=0 --num_epochs=3 --num_mini_batches=2 --clip_range=0.05
--clip_range_value=0.03 --vf_coef=0.5 --max_grad_norm=0.8 --rollout_batch_size=4
--micro_batch_tokens=32 --eval_every=1 --num_eval_prompts=2 --seed=5 --device=cpu
""".split()
PROMPTS = ["x", "yy y", "zz", "w", "the", "a bc", "q", "rs", "to", "u", "p o", "n"] * 2
REWARD = """
def by_prompt(prompts, completions, **columns):
    return [len(p) + 0.125 * len(c) + c.count("a") for p, c in zip(prompts, completions)]
"""  # eighths: float32 holds them exactly


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """The run, and what went through its loop, step by step and update by update."""
    folder = tmp_path_factory.mktemp("by-hand")
    model = save_model(folder / "m", small_gpt2(vocab_size=20), letter_tokenizer())
    (folder / "p.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in PROMPTS))
    (folder / "r.py").write_text(REWARD)
    args = [f"--model={model}", f"--prompts={folder}/p.jsonl", f"--output_dir={folder}/run"]
    run = SimpleNamespace(rollouts=[], before=[], updates=[])
    with pytest.MonkeyPatch.context() as patch:
        spy_on_the_loop(patch, run)
        ppo.main([*FLAGS, *args, f"--reward={folder}/r.py:by_prompt"])
    run.metrics, run.tokens = (
        lines_of(folder / f"run/{name}.jsonl") for name in ("metrics", "tokens")
    )
    run.final = AutoModelForCausalLM.from_pretrained(folder / "run/model", dtype=torch.float64)
    return run


def spy_on_the_loop(patch: pytest.MonkeyPatch, run: SimpleNamespace) -> None:
    build, sample, clip = ppo.ValueModel.on_backbone_of, ppo.sample, torch.nn.utils.clip_grad_norm_

    def build_and_keep(policy):
        run.value_model = build(policy)
        run.models = (policy, run.value_model)
        return run.value_model

    def sample_and_keep(*args, **kwargs):
        run.before.append(copy.deepcopy(run.models))
        run.rollouts.append(sample(*args, **kwargs))
        return run.rollouts[-1]

    def clip_and_keep(parameters, max_norm):
        update = kept_update(parameters, max_norm, clip)
        update.models = copy.deepcopy(run.models)
        run.updates.append(update)
        return update.norm

    in_float64(patch, ppo)
    patch.setattr(ppo.ValueModel, "on_backbone_of", build_and_keep)
    patch.setattr(ppo, "sample", sample_and_keep)
    patch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_keep)


def naive_forward(models, prompt: list[int], completion: list[int]) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies and values of the tokens of one row without padding, each (n,)."""
    policy, value_model = models
    tokens = torch.tensor([prompt + completion])
    before_each = slice(len(prompt) - 1, -1)
    log_p = (policy(tokens).logits[0, before_each] / 1.5).log_softmax(-1)
    logprobs = log_p[torch.arange(len(completion)), completion]
    hidden = value_model.backbone(tokens).last_hidden_state[0, before_each]
    return logprobs, -(log_p.exp() * log_p).sum(-1), value_model.head(hidden).squeeze(-1)


@pytest.fixture(scope="module")
def step(run) -> list[SimpleNamespace]:
    """The rows of the second step, up to their advantages."""
    tokenizer, rollout, rows = letter_tokenizer(), run.rollouts[1], []
    for tokens, real in zip(rollout.tokens, rollout.attention_mask, strict=True):
        row = SimpleNamespace(prompt=tokens[:-5][real[:-5]].tolist())
        row.ids = tokens[-5:][real[-5:]].tolist()
        with torch.no_grad():
            row.old, _, row.values = naive_forward(run.before[1], row.prompt, row.ids)
            row.ref, _, _ = naive_forward(run.before[0], row.prompt, row.ids)
        text, row.ended = tokenizer.decode([i for i in row.ids if i != EOS]), EOS in row.ids
        row.score = len(row.prompt) + 0.125 * len(text) + text.count("a") - 0.75 * (not row.ended)
        d = (row.old - row.ref).tolist()
        row.kl = [math.exp(-x) - 1 + x for x in d]
        row.rewards = [-0.3 * x for x in row.kl]
        row.rewards[-1] += row.score
        n, v = len(row.ids), [*row.values.tolist(), 0.0]
        delta = [row.rewards[t] + 0.9 * v[t + 1] - v[t] for t in range(n)]
        row.advantages = [sum(0.45 ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        row.returns = [row.advantages[t] + v[t] for t in range(n)]
        rows.append(row)
    assert all(rows[i].prompt == rows[i + 1].prompt for i in range(0, ROWS, 2))
    flat = torch.tensor([a for row in rows for a in row.advantages], dtype=torch.float64)
    mean, std = flat.mean().item(), (flat.var() + 1e-8).sqrt().item()
    for row in rows:
        row.advantages = [(a - mean) / std for a in row.advantages]
    return rows


def naive_loss(models, step: list, chosen: list[int]) -> tuple[torch.Tensor, dict[str, list]]:
    """The loss of a minibatch by its definition, and every per-token number that is logged."""
    log = {name: [] for name in "pg vf clipped value_clipped ratio kl entropy row".split()}
    for i in chosen:
        row = step[i]
        logprobs, entropy, values = naive_forward(models, row.prompt, row.ids)
        log["entropy"] += entropy.tolist()
        log["row"] += [i] * len(values)
        for t in range(len(values)):
            advantage, ret, old_v = row.advantages[t], row.returns[t], row.values[t].item()
            ratio = torch.exp(logprobs[t] - row.old[t])
            plain = -advantage * ratio
            bounded = -advantage * torch.clamp(ratio, 0.95, 1.05)
            near = torch.clamp(values[t], old_v - 0.03, old_v + 0.03)
            errors = 0.5 * (values[t] - ret) ** 2, 0.5 * (near - ret) ** 2
            log["pg"].append(torch.maximum(plain, bounded))
            log["vf"].append(torch.maximum(*errors))
            log["clipped"].append(float(bounded > plain))
            log["value_clipped"].append(float(errors[1] > errors[0]))
            log["ratio"].append(ratio.item())
            log["kl"].append(0.5 * (logprobs[t] - row.old[t]).item() ** 2)
    loss = sum(log["pg"]) / len(log["pg"]) + 0.5 * sum(log["vf"]) / len(log["vf"])
    return loss, log


@pytest.fixture(scope="module")
def naive_updates(run, step) -> list[tuple]:
    """(gradients, logged numbers) of each update of the second step."""
    shuffler = torch.Generator().manual_seed(5)
    orders = [torch.randperm(ROWS, generator=shuffler) for _ in range(6)]  # 3 epochs of 2 steps
    chosen = [half.tolist() for order in orders[3:] for half in order.split(ROWS // 2)]
    results = []
    for update, rows in zip(run.updates[UPDATES:], chosen, strict=True):
        parameters = [p for model in update.models for p in model.parameters()]
        loss, log = naive_loss(update.models, step, rows)
        results.append((torch.autograd.grad(loss, parameters), log))
    return results


@pytest.mark.problem("ppo_loop", 3)
def test_every_gradient_of_the_second_step_is_that_of_the_definition(run, naive_updates):
    hint = (
        "another gradient: a sign, a coefficient (vf_coef, kl_coef, the temperature), the"
        " clip, a normaliser (tokens of the minibatch), the order of whitening and returns,"
        " other rows in the minibatch, or gradients of the update before not cleared?"
    )
    equal_updates(run.updates[UPDATES:], [gradients for gradients, _ in naive_updates], hint)


def test_the_weights_at_the_end_are_those_of_adam_without_decay(run):
    before = [p for model in run.before[0] for p in model.parameters()]
    equal_after_adam(run.updates, before, run.final.parameters())  # of the policy, which is first


def test_every_metric_of_the_second_step_is_that_of_its_definition(run, step, naive_updates):
    def mean(name: str) -> float:
        values = [torch.as_tensor(x).item() for _, log in naive_updates for x in log[name]]
        return sum(values) / len(values)

    lengths = [len(row.ids) for row in step]
    num_tokens = sum(lengths)
    scores, kl = sum(row.score for row in step) / ROWS, sum(sum(row.kl) for row in step)
    returns = torch.tensor([x for row in step for x in row.returns], dtype=torch.float64)
    errors = returns - torch.cat([row.values for row in step])
    expected = {
        "objective/scores": scores,
        "objective/kl": kl / ROWS,
        "objective/kl_token": kl / num_tokens,
        "objective/entropy": -sum(row.old.sum().item() for row in step) / num_tokens,
        "objective/non_score_reward": -0.3 * kl / ROWS,
        "objective/rlhf_reward": scores - 0.3 * kl / ROWS,
        "policy/approxkl_avg": mean("kl"),
        "policy/clipfrac_avg": mean("clipped"),
        "policy/entropy_avg": mean("entropy"),
        "loss/policy_avg": mean("pg"),
        "loss/value_avg": mean("vf"),
        "val/clipfrac_avg": mean("value_clipped"),
        "val/ratio": mean("ratio"),
        "val/num_eos_tokens": sum(row.ended for row in step),
        "val/explained_variance": (1 - errors.var() / returns.var()).item(),
        "length/mean": num_tokens / ROWS,
        "length/max": max(lengths),
        "length/truncated_frac": sum(not row.ended for row in step) / ROWS,
        "grad_norm": sum(update.norm.item() for update in run.updates[UPDATES:]) / UPDATES,
        "lr": 0.005,
        "episode": 2 * ROWS,
    }
    logged = run.metrics[1]
    for name, value in expected.items():
        hint = f"{name}: over padding, a mean of means, another sign, or of another policy?"
        assert logged[name] == pytest.approx(value, rel=1e-5, abs=1e-6), hint
    hint = "the old log-probs are not of the policy, temperature and forward of the first update?"
    assert logged["val/ratio_max_dev_first"] < 1e-10, hint
    seconds = logged["time/rollout"] + logged["time/update"]
    assert logged["tokens_per_second"] == pytest.approx(num_tokens / seconds)
    assert abs(logged["objective/kl"]) > 1e-3 and len(set(lengths)) > 1
    assert all(0.05 < mean(name) < 0.95 for name in ("clipped", "value_clipped")), "at work"
    assert all("eval/reward" in line for line in run.metrics), "eval_every is 1"


@pytest.mark.problem("ppo_loop", 2)
def test_what_is_recorded_of_trained_tokens_is_what_the_step_did_to_them(run, step, naive_updates):
    lines = [x for x in run.tokens if x["split"] == "train" and x["step"] == 1]
    assert [line["completion_index"] for line in lines] == list(range(8))  # of 12 rows
    for i, line in enumerate(lines):
        row = step[i]
        with torch.no_grad():
            new, _, _ = naive_forward((run.final, run.value_model), row.prompt, row.ids)
        (log,) = [log for _, log in naive_updates[-2:] if i in log["row"]]  # of the last epoch
        at = [k for k, other in enumerate(log["row"]) if other == i]
        expected = {
            "old_logprobs": row.old,
            "new_logprobs": new,
            "ref_logprobs": row.ref,
            "kl": row.kl,
            "rewards": row.rewards,
            "values": row.values,
            "returns": row.returns,
            "advantages": row.advantages,
            "ratio": [log["ratio"][k] for k in at],
            "clipped": [log["clipped"][k] for k in at],
        }
        hint = "not drawn from softmax(logits / temperature), rounded to bfloat16?"
        assert line["sampler_logprobs"] == pytest.approx(row.old.tolist(), abs=0.05), hint
        for name, numbers in expected.items():
            found = pytest.approx([float(x) for x in numbers], rel=6e-5, abs=1e-6)
            assert line[name] == found, name
        assert line["score"] == pytest.approx(row.score)
        assert line["num_tokens"] == len(line["tokens"]) == len(row.ids)
        assert line["finished"] == row.ended
    assert any(x["clipped"] != [0] * len(x["clipped"]) for x in lines)
