"""Two steps of ppo.py against the same two steps written out naively from the equations.

At the first step every log-ratio, KL and value is 0, so a wrong sign or a dropped coefficient
cannot show. At the second one nothing is 0. Every number of the second step, down to the gradients
and the weights at the end, is computed here a second time, row by row. Both sides in float64: the
models, the scores (eighths, which float32 holds exactly) and with them all of the loop. So they
agree to nine digits; the metrics, which the loop adds up in float32, to six.
"""

import copy
import json
import math

import pytest
import torch
from small import in_float64, letter_tokenizer, save_model, small_gpt2
from transformers import AutoModelForCausalLM

import ppo
from common import Rollout
from plumbing.prompts import prompt_batch, read_prompts

FLAGS = {
    "num_steps": 2, "prompts_per_step": 6, "num_generations": 2, "rollout_batch_size": 4,
    "max_new_tokens": 5, "temperature": 1.5, "kl_coef": 0.3, "kl_estimator": "k3",
    "missing_eos_penalty": 0.75, "gamma": 0.9, "lam": 0.5, "learning_rate": 0.01,
    "warmup_steps": 0, "num_epochs": 3,
    "num_mini_batches": 2, "micro_batch_size": 4, "clip_range": 0.05, "clip_range_value": 0.03,
    "vf_coef": 0.5, "max_grad_norm": 0.8, "eval_every": 9, "num_eval_prompts": 2, "device": "cpu",
    "sample_every": 1,
}  # fmt: skip
REWARD = """
def by_prompt(prompts, completions, **columns):
    return [len(p) + 0.125 * len(c) + c.count("a") for p, c in zip(prompts, completions)]
"""


class Records:
    """What went through the loop, step by step and update by update."""

    def __init__(self) -> None:
        self.policy, self.value_model, self.reference = None, None, None
        self.rollouts, self.before, self.updates, self.rates, self.clears = [], [], [], [], 0
        self.tokens: list[dict] = []  # of tokens.jsonl


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Records, list[dict], AutoModelForCausalLM, list[dict]]:
    folder = tmp_path_factory.mktemp("by-hand")
    model = save_model(folder / "m", small_gpt2(vocab_size=20), letter_tokenizer())
    prompts = ["x", "yy y", "zz", "w", "the", "a bc", "q", "rs", "to", "u", "p o", "n"] * 2
    lines = [json.dumps({"prompt": prompt, "id": i}) for i, prompt in enumerate(prompts)]
    (folder / "p.jsonl").write_text("\n".join(lines))
    (folder / "r.py").write_text(REWARD)
    records = Records()
    tasks = []
    with pytest.MonkeyPatch.context() as patch:
        spy_on_the_loop(patch, records, tasks)
        args = [f"--{name}={value}" for name, value in FLAGS.items()]
        args += [f"--model={model}", f"--prompts={folder}/p.jsonl", f"--output_dir={folder}/run"]
        ppo.main([*args, f"--reward={folder}/r.py:by_prompt"])
    metrics = [json.loads(x) for x in (folder / "run/metrics.jsonl").read_text().splitlines()]
    final = AutoModelForCausalLM.from_pretrained(folder / "run/model", dtype=torch.float64)
    assert len(read_prompts(folder / "p.jsonl")) == 24
    records.tokens = list(map(json.loads, (folder / "run/tokens.jsonl").read_text().splitlines()))
    return records, metrics, final, tasks[0].train


def spy_on_the_loop(patch: pytest.MonkeyPatch, records: Records, tasks: list) -> None:
    def wrap(name: str, after) -> None:
        original = getattr(ppo, name)

        def wrapped(*args, **kwargs):
            result = original(*args, **kwargs)
            other = after(result, *args, **kwargs)
            return result if other is None else other

        patch.setattr(ppo, name, wrapped)

    build = ppo.ValueModel.on_backbone_of

    def on_backbone_of(policy):
        records.policy, records.value_model = policy, build(policy)
        return records.value_model

    def on_score(result, task, rows, rollout, tokenizer):
        records.rollouts.append(rollout)
        records.before.append(copy.deepcopy((records.policy, records.value_model)))
        return result[0].double(), result[1]

    def on_sample(result, *args, **kwargs):
        assert not {"top_k", "top_p"} & set(kwargs)

    in_float64(patch, ppo)
    wrap("load_task", lambda task, *args: tasks.append(task))
    patch.setattr(ppo.ValueModel, "on_backbone_of", on_backbone_of)
    wrap("reference", lambda ref, *args: setattr(records, "reference", ref))
    wrap("score", on_score)
    wrap("sample", on_sample)
    wrap("clear_cache", lambda result: setattr(records, "clears", records.clears + 1))
    clip = torch.nn.utils.clip_grad_norm_

    def on_clip(parameters, max_norm):
        models = copy.deepcopy((records.policy, records.value_model))
        gradients = [p.grad.clone() for p in parameters]
        norm = clip(parameters, max_norm)
        records.updates.append((models, gradients, [p.grad.clone() for p in parameters], norm))
        return norm

    patch.setattr(torch.nn.utils, "clip_grad_norm_", on_clip)


def rows_of(rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    """The prompt and the completion of each row, as lists of ids without padding."""
    length = rollout.completion_mask.shape[1]
    return [
        (tokens[:-length][real[:-length]].tolist(), tokens[-length:][real[-length:]].tolist())
        for tokens, real in zip(rollout.tokens, rollout.attention_mask, strict=True)
    ]


def naive_forward(models, prompt: list[int], completion: list[int]) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies and values of the tokens of one row, each (n,), in float64."""
    policy, value_model = models
    tokens = torch.tensor([prompt + completion])
    logits = policy(tokens).logits[0, len(prompt) - 1 : -1] / FLAGS["temperature"]
    log_p = logits.log_softmax(-1)
    hidden = value_model.backbone(tokens).last_hidden_state[0, len(prompt) - 1 : -1]
    values = value_model.head(hidden).squeeze(-1)
    logprobs = log_p[torch.arange(len(completion)), completion]
    return logprobs, -(log_p.exp() * log_p).sum(-1), values


def naive_credit(score: float, old, ref, values: list[float]) -> tuple[list[float], ...]:
    """KL (k3), rewards, advantages before whitening and returns of a row, each (n,)."""
    d = [(o - r).item() for o, r in zip(old, ref, strict=True)]
    kl = [math.exp(-x) - 1 + x for x in d]
    rewards = [-0.3 * x for x in kl]
    rewards[-1] += score
    n, v = len(values), [*values, 0.0]
    delta = [rewards[t] + 0.9 * v[t + 1] - v[t] for t in range(n)]
    advantages = [sum((0.9 * 0.5) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
    return kl, rewards, advantages, [a + b for a, b in zip(advantages, values, strict=True)]


@pytest.fixture(scope="module")
def by_hand(recorded) -> dict:
    """Step 1 (the second) up to the advantages, written out from the equations, in Python."""
    records, _, _, train = recorded
    tokenizer = letter_tokenizer()
    models = tuple(model.eval() for model in copy.deepcopy(records.before[1]))
    with records.reference as reference:
        pass
    rollout = records.rollouts[1]
    prompts = [row["prompt"] for row in prompt_batch(train, 1, 6, seed=0) for _ in range(2)]
    step = {"rows": rows_of(rollout), "old": [], "old_values": [], "scores": [], "kl": []}
    step |= {"advantages": [], "returns": [], "rewards": [], "ref": []}
    for prompt, (prompt_ids, ids) in zip(prompts, step["rows"], strict=True):
        assert tokenizer(prompt).input_ids == prompt_ids, "a completion went to another prompt"
        with torch.no_grad():
            old, _, values = naive_forward(models, prompt_ids, ids)
            ref, _, _ = naive_forward((reference, models[1]), prompt_ids, ids)
        text = tokenizer.decode([i for i in ids if i != 19])
        score = len(prompt) + 0.125 * len(text) + text.count("a") - 0.75 * (19 not in ids)
        kl, rewards, advantages, returns = naive_credit(score, old, ref, values.tolist())
        step["ref"].append(ref)
        step["rewards"].append(rewards)
        step["old"].append(old)
        step["old_values"].append(values)
        step["scores"].append(score)
        step["kl"].append(kl)
        step["advantages"].append(advantages)
        step["returns"].append(returns)
    flat = torch.tensor([a for row in step["advantages"] for a in row], dtype=torch.float64)
    mean, std = flat.mean(), (flat.var() + 1e-8).sqrt()
    step["advantages"] = [[((a - mean) / std).item() for a in row] for row in step["advantages"]]
    return step


def naive_loss(models, step: dict, chosen: list[int]) -> tuple[torch.Tensor, dict[str, list]]:
    """The loss of a minibatch by its definition, and every per-token number that is logged."""
    names = "pg vf clipped value_clipped ratio kl entropy row".split()
    log = {name: [] for name in names}
    for i in chosen:
        logprobs, entropy, values = naive_forward(models, *step["rows"][i])
        log["entropy"] += entropy.tolist()
        log["row"] += [i] * len(values)
        for t in range(len(values)):
            advantage, ret, old_v = step["advantages"][i][t], step["returns"][i][t], 0.0
            old_v = step["old_values"][i][t].item()
            ratio = torch.exp(logprobs[t] - step["old"][i][t])
            plain = -advantage * ratio
            bounded = -advantage * torch.clamp(ratio, 0.95, 1.05)
            near = torch.clamp(values[t], old_v - 0.03, old_v + 0.03)
            errors = 0.5 * (values[t] - ret) ** 2, 0.5 * (near - ret) ** 2
            log["pg"].append(torch.maximum(plain, bounded))
            log["vf"].append(torch.maximum(*errors))
            log["clipped"].append(float(bounded > plain))
            log["value_clipped"].append(float(errors[1] > errors[0]))
            log["ratio"].append(ratio.item())
            log["kl"].append(0.5 * (logprobs[t] - step["old"][i][t]).item() ** 2)
    loss = sum(log["pg"]) / len(log["pg"]) + 0.5 * sum(log["vf"]) / len(log["vf"])
    return loss, log


@pytest.fixture(scope="module")
def naive_updates(recorded, by_hand) -> list[tuple]:
    """(gradients, logged numbers) of each of the 6 updates of the second step."""
    shuffler = torch.Generator().manual_seed(0)
    orders = [torch.randperm(12, generator=shuffler) for _ in range(6)]  # 3 epochs of 2 steps
    chosen = [half.tolist() for order in orders[3:] for half in order.split(6)]
    results = []
    for (models, *_), rows in zip(recorded[0].updates[6:], chosen, strict=True):
        models = copy.deepcopy(models)
        parameters = [p for model in models for p in model.eval().parameters()]
        for p in parameters:
            p.grad = None
        loss, log = naive_loss(models, by_hand, rows)
        results.append((torch.autograd.grad(loss, parameters), log))
    return results


def test_every_gradient_of_the_second_step_is_that_of_the_definition(recorded, naive_updates):
    for (_, gradients, clipped, norm), (expected, _) in zip(
        recorded[0].updates[6:], naive_updates, strict=True
    ):
        assert all(g.dtype == torch.float64 for g in gradients), "not in float64 throughout"
        hint = (
            "another gradient: a sign, a coefficient (vf_coef, kl_coef, the temperature), the"
            " clip, a normaliser (tokens of the minibatch), the order of whitening and returns,"
            " other rows in the minibatch, or gradients of the update before not cleared?"
        )
        for ours, theirs in zip(gradients, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-8), hint
        length = torch.cat([g.flatten() for g in expected]).norm().item()
        assert norm.item() == pytest.approx(length, rel=1e-8), "the norm of other parameters?"
        scale = min(1.0, 0.8 / (length + 1e-6))  # torch adds 1e-6
        for ours, theirs in zip(clipped, expected, strict=True):
            hint = "max_grad_norm ignored, or each tensor scaled by itself?"
            assert torch.allclose(ours, theirs * scale, rtol=0, atol=1e-8), hint


def test_the_clips_of_ratio_and_value_are_at_work_in_that_step(naive_updates):
    """If not, the test above would not see them."""
    for name in ("clipped", "value_clipped"):
        values = [x for _, log in naive_updates for x in log[name]]
        assert 0.05 < sum(values) / len(values) < 0.95, name


def test_the_weights_at_the_end_are_those_of_adam_without_decay(recorded):
    records, _, final, _ = recorded
    first = copy.deepcopy(records.before[0])
    parameters = [p for model in first for p in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for index, (_, _, clipped, _) in enumerate(records.updates):
        optimizer.param_groups[0]["lr"] = 0.01 if index < 6 else 0.005
        for p, g in zip(parameters, clipped, strict=True):
            p.grad = g
        optimizer.step()
    for ours, theirs in zip(final.parameters(), first[0].parameters(), strict=True):
        hint = "weight decay, another learning rate, or a step more or less of the optimiser?"
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-8), hint


def test_every_metric_of_the_second_step_is_that_of_its_definition(
    recorded, by_hand, naive_updates
):
    records, metrics, _, _ = recorded
    step, logged = by_hand, metrics[1]
    lengths = [len(ids) for _, ids in step["rows"]]
    num_tokens, num_rows = sum(lengths), 12

    def mean(name: str) -> float:
        values = [torch.as_tensor(x).item() for _, log in naive_updates for x in log[name]]
        return sum(values) / len(values)

    kl = sum(map(sum, step["kl"]))
    returns = torch.tensor([x for row in step["returns"] for x in row], dtype=torch.float64)
    errors = returns - torch.cat(step["old_values"])
    scores = sum(step["scores"]) / num_rows
    rollout = records.rollouts[1]
    expected = {
        "objective/scores": scores,
        "objective/kl": kl / num_rows,
        "objective/kl_token": kl / num_tokens,
        "objective/entropy": -sum(x.sum().item() for x in step["old"]) / num_tokens,
        "objective/non_score_reward": -0.3 * kl / num_rows,
        "objective/rlhf_reward": scores - 0.3 * kl / num_rows,
        "policy/approxkl_avg": mean("kl"),
        "policy/clipfrac_avg": mean("clipped"),
        "policy/entropy_avg": mean("entropy"),
        "loss/policy_avg": mean("pg"),
        "loss/value_avg": mean("vf"),
        "val/clipfrac_avg": mean("value_clipped"),
        "val/ratio": mean("ratio"),
        "val/num_eos_tokens": sum(19 in ids for _, ids in step["rows"]),
        "val/explained_variance": (1 - errors.var(correction=0) / returns.var(correction=0)).item(),
        "length/mean": num_tokens / num_rows,
        "length/max": max(lengths),
        "length/truncated_frac": sum(19 not in ids for _, ids in step["rows"]) / num_rows,
        "grad_norm": sum(norm.item() for *_, norm in records.updates[6:]) / 6,
        "lr": 0.005,
        "episode": 24,
    }
    for name, value in expected.items():
        hint = f"{name}: over padding, a mean of means, another sign, or of another policy?"
        assert logged[name] == pytest.approx(value, rel=1e-5, abs=1e-6), hint
    hint = "the old log-probs are not of the policy, temperature and forward of the first update?"
    assert logged["val/ratio_max_dev_first"] < 1e-10, hint
    seconds = logged["time/rollout"] + logged["time/update"]
    assert logged["tokens_per_second"] == pytest.approx(num_tokens / seconds)
    assert abs(logged["objective/kl"]) > 1e-3 and len(rollout.tokens) == num_rows


def test_the_cache_is_cleared_after_the_rollout_and_after_the_update(recorded):
    assert recorded[0].clears == 4


def test_what_is_recorded_of_trained_tokens_is_what_the_step_did_to_them(
    recorded, by_hand, naive_updates
):
    records, _, final, _ = recorded
    lines = [x for x in records.tokens if x["split"] == "train" and x["step"] == 1]
    places = [(x["prompt_index"], x["completion_index"]) for x in lines]
    assert sorted(places) == [(i // 2, i % 2) for i in range(8)]  # of 12 rows, 2 of each prompt
    for line, (prompt, completion) in zip(lines, places, strict=True):
        row = 2 * prompt + completion
        with torch.no_grad():
            hidden = (final.eval(), records.value_model)
            new, _, _ = naive_forward(hidden, *by_hand["rows"][row])
        last_pass = [log for _, log in naive_updates[4:] if row in log["row"]]
        at = [k for k, i in enumerate(last_pass[0]["row"]) if i == row]
        expected = {
            "sampler_logprobs": records.rollouts[1].logprobs[row][: line["num_tokens"]],
            "old_logprobs": by_hand["old"][row],
            "new_logprobs": new,
            "ref_logprobs": by_hand["ref"][row],
            "kl": by_hand["kl"][row],
            "rewards": by_hand["rewards"][row],
            "values": by_hand["old_values"][row],
            "returns": by_hand["returns"][row],
            "advantages": by_hand["advantages"][row],
            "ratio": [last_pass[0]["ratio"][k] for k in at],
            "clipped": [last_pass[0]["clipped"][k] for k in at],
        }
        assert expected.keys() == {k for k, x in line.items() if isinstance(x, list)} - {"tokens"}
        for name, numbers in expected.items():
            assert line[name] == pytest.approx([float(x) for x in numbers], rel=6e-5, abs=1e-6), (
                name
            )
        assert line["score"] == pytest.approx(by_hand["scores"][row])
        assert line["num_tokens"] == len(line["tokens"]) == len(by_hand["rows"][row][1])
        assert line["finished"] == (19 in by_hand["rows"][row][1])
    assert any(x["clipped"] != [0] * len(x["clipped"]) for x in lines)
    assert any(x["new_logprobs"] != x["old_logprobs"] for x in lines)


def test_held_out_completions_get_the_credit_that_the_step_would_give_them_and_none_is_trained_on(
    recorded,
):
    records, tokenizer = recorded[0], letter_tokenizer()
    with records.reference as reference:
        pass
    lines = [x for x in records.tokens if x["split"] == "heldout" and x["step"] == 2]
    assert len(lines) == 4  # the prompts that are held out are two of 24
    for line in lines:
        ids = tokenizer.convert_tokens_to_ids(line["tokens"])
        row, models = (
            (tokenizer(line["prompt"]).input_ids, ids),
            (records.policy, records.value_model),
        )
        with torch.no_grad():
            old, _, values = naive_forward(models, *row)
            ref, _, _ = naive_forward((reference, records.value_model), *row)
        text = tokenizer.decode([i for i in ids if i != 19])
        score = len(line["prompt"]) + 0.125 * len(text) + text.count("a")
        assert line["score"] == pytest.approx(score)
        kl, rewards, advantages, returns = naive_credit(
            score - 0.75 * (19 not in ids), old, ref, values.tolist()
        )
        expected = {"old_logprobs": old.tolist(), "ref_logprobs": ref.tolist(), "kl": kl}
        expected |= {"rewards": rewards, "advantages": advantages, "returns": returns}
        for name, numbers in expected.items():
            assert line[name] == pytest.approx(numbers, rel=6e-5, abs=1e-6), name
        assert not {"ratio", "clipped", "new_logprobs"} & line.keys()
    first = [x for x in records.tokens if x["split"] == "heldout" and x["step"] == 0]
    assert [x["prompt"] for x in first] == [x["prompt"] for x in lines]
    assert all(x["new_logprobs"] != x["old_logprobs"] for x in first)
