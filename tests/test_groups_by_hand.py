"""Two steps of grpo.py and rloo.py against the same steps written out naively from the equations.

At the first step every log-ratio and KL is 0, so a wrong sign or a dropped coefficient cannot show.
Of the second one, rewards, advantages, gradients, metrics and the weights at the end are computed
here a second time, row by row. Both sides in float64: the models, the scores (eighths, which
float32 holds exactly) and with them all of the loop. So they agree to nine digits; the metrics,
which the loop adds up in float32, to six.
"""

import copy
import json
import statistics

import pytest
import torch
from small import in_float64, letter_tokenizer, save_model, small_gpt2
from transformers import AutoModelForCausalLM

import grpo
import rloo
from plumbing.prompts import prompt_batch

EOS, ROWS, UPDATES = 19, 12, 4  # 4 prompts x 3 completions; 2 epochs x 2 minibatches
FLAGS = {
    "num_steps": 2, "prompts_per_step": 4, "num_generations": 3, "rollout_batch_size": 6,
    "max_new_tokens": 5, "temperature": 1.5, "kl_coef": 0.3, "learning_rate": 0.01,
    "warmup_steps": 0, "num_epochs": 2,
    "num_mini_batches": 2, "micro_batch_size": 4, "clip_range": 0.05, "max_grad_norm": 0.8,
    "eval_every": 9, "num_eval_prompts": 2, "device": "cpu",
    "sample_every": 1,
}  # fmt: skip
REWARD = """
def by_prompt(prompts, completions, **columns):
    return [len(p) + 0.125 * len(c) + c.count("a") for p, c in zip(prompts, completions)]
"""
RUNS = {
    "grpo": (grpo, {}),
    "dr_grpo": (grpo, {"loss_type": "dr_grpo", "scale_rewards": "none", "entropy_coef": 0.4}),
    "dapo": (
        grpo,
        {"loss_type": "dapo", "clip_range_high": 0.08, "scale_rewards": "batch"}
        | {"mask_truncated_completions": True, "seed": 6},
    ),
    "cispo": (grpo, {"loss_type": "cispo", "cispo_bound": 1.02}),
    "gspo": (grpo, {"importance_sampling_level": "sequence", "clip_range": 0.01}),
    "rloo": (rloo, {"entropy_coef": 0.4}),
    "rloo, normalised and clipped": (
        rloo,
        {"normalize_advantages": True, "reward_clip_range": [2.0, 4.0]},
    ),
}


class Job:
    """A run, what went through its loop, and its flags."""

    def __init__(self, name: str, folder) -> None:
        self.script, changes = RUNS[name]
        self.flags = FLAGS | changes
        self.is_grpo = self.script is grpo
        self.rollouts, self.before, self.updates = [], [], []
        model = save_model(folder / "m", small_gpt2(vocab_size=20), letter_tokenizer())
        prompts = ["x", "yy y", "zz", "w", "the", "a bc", "q", "rs", "to", "u", "p o", "n"] * 2
        (folder / "p.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in prompts))
        (folder / "r.py").write_text(REWARD)
        args = [f"--model={model}", f"--prompts={folder}/p.jsonl", f"--output_dir={folder}/run"]
        args += [f"--reward={folder}/r.py:by_prompt"]
        for name, value in self.flags.items():
            values = value if isinstance(value, list) else [value]
            args += [f"--{name}", *map(str, values)]
        with pytest.MonkeyPatch.context() as patch:
            self.spy(patch)
            self.script.main(args)
        lines = (folder / "run/metrics.jsonl").read_text().splitlines()
        self.metrics = json.loads(lines[1])
        lines = (folder / "run/tokens.jsonl").read_text().splitlines()
        self.tokens = list(map(json.loads, lines))
        self.final = AutoModelForCausalLM.from_pretrained(folder / "run/model", dtype=torch.float64)
        self.by_hand()

    def spy(self, patch: pytest.MonkeyPatch) -> None:
        def wrap(name: str, after) -> None:
            original = getattr(self.script, name)

            def wrapped(*args, **kwargs):
                result = original(*args, **kwargs)
                other = after(result, *args)
                return result if other is None else other

            patch.setattr(self.script, name, wrapped)

        def on_score(result, task, rows, rollout, tokenizer):
            self.rollouts.append(rollout)
            self.before.append(copy.deepcopy(self.policy))
            return result[0].double(), result[1]

        in_float64(patch, self.script)
        wrap("load_task", lambda task, *args: setattr(self, "train", task.train))
        wrap("load_policy", lambda policy, *args: setattr(self, "policy", policy))
        wrap("reference", lambda ref, *args: setattr(self, "reference", ref))
        wrap("score", on_score)
        clip = torch.nn.utils.clip_grad_norm_

        def on_clip(parameters, max_norm):
            model = copy.deepcopy(self.policy)
            gradients = [p.grad.clone() for p in parameters]
            norm = clip(parameters, max_norm)
            self.updates.append((model, gradients, [p.grad.clone() for p in parameters], norm))
            return norm

        patch.setattr(torch.nn.utils, "clip_grad_norm_", on_clip)

    def forward(self, model, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the tokens of one row, without padding."""
        prompt, completion = self.ids[row]
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        log_p = (logits / 1.5).log_softmax(-1)
        return log_p[torch.arange(len(completion)), completion], -(log_p.exp() * log_p).sum(-1)

    def by_hand(self) -> None:
        """The second step up to the advantages."""
        rollout, tokenizer = self.rollouts[1], letter_tokenizer()
        rows = zip(rollout.tokens, rollout.attention_mask, strict=True)
        self.ids = [(x[:-5][m[:-5]].tolist(), x[-5:][m[-5:]].tolist()) for x, m in rows]
        seed = self.flags.get("seed", 0)
        prompts = [row["prompt"] for row in prompt_batch(self.train, 1, 4, seed)]
        prompts = [prompt for prompt in prompts for _ in range(3)]
        self.old, self.ref, self.scores, self.kl, rewards = [], [], [], [], []
        policy = self.before[1].eval()
        with self.reference as reference, torch.no_grad():
            for i, prompt in enumerate(prompts):
                assert tokenizer(prompt).input_ids == self.ids[i][0]
                self.old.append(self.forward(policy, i)[0])
                self.ref.append(self.forward(reference, i)[0])
                text = tokenizer.decode([t for t in self.ids[i][1] if t != EOS])
                self.scores.append(len(prompt) + 0.125 * len(text) + text.count("a"))
                d = (self.old[i] - self.ref[i]).tolist()
                self.kl.append(d)  # the log has k1, also where the loss has k3
        for score, kl in zip(self.scores, self.kl, strict=True):
            low, high = self.flags.get("reward_clip_range", [-99, 99])
            rewards.append(score if self.is_grpo else min(max(score, low), high) - 0.3 * sum(kl))
        self.advantages = []
        for i, reward in enumerate(rewards):
            group = rewards[i // 3 * 3 : i // 3 * 3 + 3]
            if not self.is_grpo:
                self.advantages.append(reward - (sum(group) - reward) / 2)
                continue
            scale = self.flags.get("scale_rewards", "group")
            std = statistics.stdev(rewards if scale == "batch" else group) + 1e-4
            advantage = reward - statistics.mean(group)
            self.advantages.append(advantage / (1 if scale == "none" else std))
        if self.flags.get("normalize_advantages"):
            mean, std = statistics.mean(self.advantages), statistics.stdev(self.advantages)
            self.advantages = [(a - mean) / (std + 1e-4) for a in self.advantages]

    def loss(self, model, rows: list[int]) -> tuple[torch.Tensor, ...]:
        """The loss of a minibatch by its definition, without and with the bonus for the entropy of
        its tokens, and the numbers that are logged.
        """
        log = {name: [] for name in ("clipped", "ratio", "kl", "entropy", "row")}
        low, high = 1 - self.flags["clip_range"], 1 + self.flags["clip_range"]
        high = 1 + self.flags.get("clip_range_high", self.flags["clip_range"])
        kind = self.flags.get("loss_type", "grpo")
        if kind == "cispo":
            low, high = 0.0, 1.02
        losses = []  # a list of the losses of its tokens for each row, or of the row in RLOO
        entropies = []
        for i in rows:
            logprobs, entropy = self.forward(model, i)
            if self.flags.get("mask_truncated_completions") and EOS not in self.ids[i][1]:
                losses.append([])
                continue
            log["entropy"] += entropy.tolist()
            entropies.append(entropy)
            d, a = logprobs - self.old[i], self.advantages[i]
            log["kl"] += (0.5 * d**2).tolist()
            if not self.is_grpo:
                ratios = [d.sum().exp()]
            elif self.flags.get("importance_sampling_level") == "sequence":
                ratios = [d.mean().exp()] * len(d)
            else:
                ratios = list(d.exp())
            row = []
            for t, ratio in enumerate(ratios):
                if kind == "cispo":
                    value = -min(ratio.item(), high) * a * logprobs[t]
                else:
                    value = -torch.minimum(ratio * a, ratio.clamp(low, high) * a)
                if self.is_grpo:
                    x = self.ref[i][t] - logprobs[t]
                    value = value + 0.3 * (x.exp() - 1 - x)
                row.append(value)
                log["row"].append(i)
                log["ratio"].append(ratio.item())
                if kind == "cispo":  # the weight was bounded, for either sign
                    outside = ratio > high and a != 0
                else:  # the clipped term was the smaller one
                    outside = ratio.clamp(low, high) * a < ratio * a
                log["clipped"].append(float(outside))
            losses.append(row)
        total = sum(map(sum, losses)) + 0 * entropy.sum()  # a tensor also if all rows are masked
        if kind == "grpo":  # and RLOO, whose rows are one action
            loss = sum(sum(row) / len(row) for row in losses) / len(rows)
        else:
            loss = total / (len(rows) * 5 if kind == "dr_grpo" else max(1, sum(map(len, losses))))
        bonus = self.flags.get("entropy_coef", 0) * torch.cat([*entropies, entropy * 0]).sum()
        return loss, loss - bonus / max(1, len(log["entropy"])), log


@pytest.fixture(scope="module", params=RUNS)
def job(request, tmp_path_factory) -> Job:
    return Job(request.param, tmp_path_factory.mktemp("by-hand"))


@pytest.fixture(scope="module")
def naive(job) -> list[tuple]:
    """(loss, gradients, logged numbers) of each update of the second step."""
    shuffler = torch.Generator().manual_seed(job.flags.get("seed", 0))
    orders = [torch.randperm(ROWS, generator=shuffler) for _ in range(4)]  # 2 steps x 2 epochs
    chosen = [half.tolist() for order in orders[2:] for half in order.split(ROWS // 2)]
    results = []
    for (model, *_), rows in zip(job.updates[UPDATES:], chosen, strict=True):
        parameters = list(model.eval().parameters())
        loss, whole, log = job.loss(model, rows)
        results.append((loss.item(), torch.autograd.grad(whole, parameters), log))
    return results


def test_every_gradient_of_the_second_step_is_that_of_the_definition(job, naive):
    for (_, gradients, clipped, norm), (_, expected, _) in zip(
        job.updates[UPDATES:], naive, strict=True
    ):
        assert all(g.dtype == torch.float64 for g in gradients), "not in float64 throughout"
        hint = (
            "another gradient: a sign, a coefficient (kl_coef, the temperature), the clip, the"
            " level of the ratio, the advantages of a group, a normaliser (rows or tokens of the"
            " minibatch), other rows, or gradients of the update before not cleared?"
        )
        for ours, theirs in zip(gradients, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-8), hint
        length = torch.cat([g.flatten() for g in expected]).norm().item()
        assert norm.item() == pytest.approx(length, rel=1e-8), "the norm of other parameters?"
        scale = min(1.0, 0.8 / (length + 1e-6))  # torch adds 1e-6
        for ours, theirs in zip(clipped, expected, strict=True):
            hint = "max_grad_norm ignored, or each tensor scaled by itself?"
            assert torch.allclose(ours, theirs * scale, rtol=0, atol=1e-8), hint


def test_the_clip_is_at_work_in_that_step(naive):
    """If not, the test above would not see it."""
    clipped = [x for _, _, log in naive for x in log["clipped"]]
    assert 0.02 < sum(clipped) / len(clipped) < 0.98


def test_the_weights_at_the_end_are_those_of_adam_without_decay(job):
    model = copy.deepcopy(job.before[0])
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for index, (_, _, clipped, _) in enumerate(job.updates):
        optimizer.param_groups[0]["lr"] = 0.01 if index < UPDATES else 0.005
        for p, g in zip(parameters, clipped, strict=True):
            p.grad = g
        optimizer.step()
    for ours, theirs in zip(job.final.parameters(), parameters, strict=True):
        hint = "weight decay, another learning rate, or a step more or less of the optimiser?"
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-8), hint


def test_every_metric_of_the_second_step_is_that_of_its_definition(job, naive):
    def mean(name: str) -> float:
        values = [x for _, _, log in naive for x in log[name]]
        return sum(values) / len(values)

    num_tokens = sum(len(ids) for _, ids in job.ids)
    kl, scores = sum(map(sum, job.kl)), sum(job.scores) / ROWS
    groups = [job.scores[i : i + 3] for i in range(0, ROWS, 3)]
    flat = [max(group) - min(group) < 1e-9 for group in groups]
    expected = {
        "objective/scores": scores,
        "objective/kl": kl / ROWS,
        "objective/kl_token": kl / num_tokens,
        "objective/entropy": -sum(x.sum().item() for x in job.old) / num_tokens,
        "objective/non_score_reward": -0.3 * kl / ROWS,
        "objective/rlhf_reward": scores - 0.3 * kl / ROWS,
        "policy/approxkl_avg": mean("kl"),
        "policy/clipfrac_avg": mean("clipped"),
        "policy/entropy_avg": mean("entropy"),
        "val/ratio": mean("ratio"),
        "loss/policy_avg": sum(loss for loss, _, _ in naive) / UPDATES,
        "reward/std_within_group": sum(map(statistics.stdev, groups)) / len(groups),
        "reward/frac_flat_groups": sum(flat) / len(flat),
        "val/num_eos_tokens": sum(EOS in ids for _, ids in job.ids),
        "length/mean": num_tokens / ROWS,
        "grad_norm": sum(norm.item() for *_, norm in job.updates[UPDATES:]) / UPDATES,
        "lr": 0.005,
        "episode": 2 * ROWS,
    }
    for name, value in expected.items():
        hint = f"{name}: over padding, a mean of means, another sign, or of another policy?"
        assert job.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), hint
    hint = "the old log-probs are not of the policy, temperature and forward of the first update?"
    assert job.metrics["val/ratio_max_dev_first"] < 1e-10, hint
    assert abs(job.metrics["objective/kl"]) > 1e-3


def test_what_is_recorded_of_tokens_is_what_the_step_did_to_them_or_would_have_done(job, naive):
    def assert_equal(line: dict, expected: dict) -> None:
        for name, numbers in expected.items():
            values = line[name] if isinstance(line[name], list) else [line[name]]
            numbers = [float(x) for x in torch.as_tensor(numbers).reshape(-1)]
            assert values == pytest.approx(numbers, rel=6e-5, abs=1e-6), name

    lines = [x for x in job.tokens if x["split"] == "train" and x["step"] == 1]
    places = [(x["prompt_index"], x["completion_index"]) for x in lines]
    assert sorted(places) == [(i // 3, i % 3) for i in range(8)]
    for line, (prompt, completion) in zip(lines, places, strict=True):
        row = 3 * prompt + completion
        assert line["score"] == pytest.approx(job.scores[row])
        with torch.no_grad():
            new, _ = job.forward(job.final.eval(), row)
        expected = {"old_logprobs": job.old[row], "new_logprobs": new, "kl": job.kl[row]}
        expected |= {"ref_logprobs": job.ref[row], "advantages": [job.advantages[row]]}
        logs = [log for _, _, log in naive[2:] if row in log["row"]]  # of the last epoch
        if not logs:  # a completion that is masked
            assert set(line["ratio"]) == set(line["clipped"]) == {None}
        for log in logs:
            at = [k for k, i in enumerate(log["row"]) if i == row]
            expected |= {name: [log[name][k] for k in at] for name in ("ratio", "clipped")}
        assert_equal(line, expected)
        per_token = {"ratio", "clipped"} if job.is_grpo else set()
        assert all(isinstance(line[name], list) for name in per_token)
        assert not isinstance(line["advantages"], list)
    heldout = [x for x in job.tokens if x["split"] == "heldout" and x["step"] == 2]
    rewards, job = [], copy.copy(job)
    job.ids = job.ids.copy()  # other tests have them too
    with job.reference as reference, torch.no_grad():
        for line in heldout:
            tokenizer = letter_tokenizer()
            ids = tokenizer.convert_tokens_to_ids(line["tokens"])
            job.ids[0] = tokenizer(line["prompt"]).input_ids, ids
            old, ref = job.forward(job.final, 0)[0], job.forward(reference, 0)[0]
            assert_equal(line, {"old_logprobs": old, "ref_logprobs": ref, "kl": old - ref})
            low, high = job.flags.get("reward_clip_range", [-99, 99])
            reward = min(max(line["score"], low), high) - 0.3 * (old - ref).sum().item()
            rewards.append(line["score"] if job.is_grpo else reward)
    # The lines of a prompt stand apart: first the first completion of each.
    by_prompt = [rewards[i::2] for i in range(2)]
    assert [x["prompt_index"] for x in heldout] == [0, 1] * 3
    advantages = []
    for line, reward in zip(heldout, rewards, strict=True):
        group = by_prompt[line["prompt_index"]]
        advantage = (reward - statistics.mean(group)) * (1 if job.is_grpo else 3 / 2)
        scale = job.flags.get("scale_rewards", "group") if job.is_grpo else "none"
        if scale != "none":
            advantage /= statistics.stdev(rewards if scale == "batch" else group) + 1e-4
        advantages.append(advantage)
    if job.flags.get("normalize_advantages"):
        std = statistics.stdev(advantages) + 1e-4
        advantages = [advantage / std for advantage in advantages]
    found = [line["advantages"] for line in heldout]
    assert found == pytest.approx(advantages, rel=1e-3, abs=1e-4)
