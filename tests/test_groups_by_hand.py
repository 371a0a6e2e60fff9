"""Two steps of grpo.py and rloo.py against the same steps written out naively from the equations.

At the first step every log-ratio and KL is 0, so a wrong sign or a dropped coefficient cannot show.
Of the second one, rewards, advantages, gradients, metrics and the weights at the end are computed
here a second time, row by row. Both sides are in float64, so they agree to nine digits; the
metrics, which the loop adds up in float32, to six.
"""

import copy
import json
import statistics
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

import grpo
import rloo
from plumbing.data import Task

EOS, ROWS = 19, 12  # 4 prompts x 3 completions
FLAGS = {"num_epochs": 2, "num_mini_batches": 2, "clip_range": 0.05}
SHARED = """
--num_steps=2 --prompts_per_step=4 --num_generations=3 --max_new_tokens=5 --temperature=1.5
--kl_coef=0.3 --learning_rate=0.01 --warmup_steps=0 --max_grad_norm=0.8 --rollout_batch_size=6
--micro_batch_tokens=32 --eval_every=1 --num_eval_prompts=2 --device=cpu --seed=11
""".split()
RUNS = {  # the kind of loss: the flags in which its run differs
    "grpo": {},
    "dr_grpo": {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "entropy_coef": 0.4,
        "num_epochs": 1,  # so old log-probs are needed for the minibatches alone
    },
    "dapo": {
        "loss_type": "dapo",
        "clip_range_high": 0.08,
        "scale_rewards": "batch",
        "mask_truncated_completions": True,
    },
    "gspo": {"loss_type": "gspo", "clip_range": 0.01},
    "cispo": {"loss_type": "cispo"},
    "rloo": {"entropy_coef": 0.4},
}
PROMPTS = ["x", "yy y", "zz", "w", "the", "a bc", "q", "rs", "to", "u", "p o", "n"] * 2
REWARD = """
def by_prompt(prompts, completions, **columns):
    return [len(p) + 0.125 * len(c) + c.count("a") for p, c in zip(prompts, completions)]
"""  # eighths: float32 holds them exactly


class Job:
    """A run, what went through its loop, and its second step by hand."""

    def __init__(self, kind: str, folder) -> None:
        self.kind, self.script = kind, rloo if kind == "rloo" else grpo
        self.flags = FLAGS | RUNS[kind]
        self.rollouts, self.before, self.updates = [], [], []
        model = save_model(folder / "m", small_gpt2(vocab_size=20), letter_tokenizer())
        (folder / "p.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in PROMPTS))
        (folder / "r.py").write_text(REWARD)
        args = [f"--model={model}", f"--prompts={folder}/p.jsonl", f"--output_dir={folder}/run"]
        args += [f"--reward={folder}/r.py:by_prompt", *SHARED]
        with pytest.MonkeyPatch.context() as patch:
            self.spy(patch)
            self.script.main([*args, *(f"--{name}={x}" for name, x in self.flags.items())])
        self.metrics, self.tokens = (
            lines_of(folder / f"run/{name}.jsonl") for name in ("metrics", "tokens")
        )
        self.final = AutoModelForCausalLM.from_pretrained(folder / "run/model", dtype=torch.float64)
        self.last = self.updates[len(self.updates) // 2 :]  # of the second step
        self.rows = self.second_step()

    def spy(self, patch: pytest.MonkeyPatch) -> None:
        sample, clip = self.script.sample, torch.nn.utils.clip_grad_norm_

        def sample_and_keep(policy, *args, **kwargs):
            self.policy = policy
            self.before.append(copy.deepcopy(policy))
            self.rollouts.append(sample(policy, *args, **kwargs))
            return self.rollouts[-1]

        def clip_and_keep(parameters, max_norm):
            update = kept_update(parameters, max_norm, clip)
            update.model = copy.deepcopy(self.policy)
            self.updates.append(update)
            return update.norm

        in_float64(patch, self.script)
        patch.setattr(self.script, "sample", sample_and_keep)
        patch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_keep)
        # Scores in float64; a bound in reach.
        score, loss = Task.score, grpo.grpo_loss
        patch.setattr(Task, "score", lambda *args: (lambda s, t: (s.double(), t))(*score(*args)))
        patch.setattr(grpo, "grpo_loss", lambda *a, **k: loss(*a, **k | {"cispo_bound": 1.02}))

    def second_step(self) -> list[SimpleNamespace]:
        """Its rows, up to their advantages."""
        tokenizer, rollout, rows = letter_tokenizer(), self.rollouts[1], []
        for tokens, real in zip(rollout.tokens, rollout.attention_mask, strict=True):
            row = SimpleNamespace(prompt=tokens[:-5][real[:-5]].tolist())
            row.ids = tokens[-5:][real[-5:]].tolist()
            with torch.no_grad():
                row.old, _ = naive_forward(self.before[1], row)
                row.ref, _ = naive_forward(self.before[0], row)
            row.kl = (row.old - row.ref).tolist()  # the log has k1, also where the loss has k3
            text, row.ended = tokenizer.decode([i for i in row.ids if i != EOS]), EOS in row.ids
            row.score = len(row.prompt) + 0.125 * len(text) + text.count("a")
            row.reward = row.score - 0.3 * sum(row.kl) if self.kind == "rloo" else row.score
            rows.append(row)
        scale = self.flags.get("scale_rewards", "none" if self.kind == "rloo" else "group")
        for i, row in enumerate(rows):
            group = rows[i // 3 * 3 : i // 3 * 3 + 3]
            assert all(other.prompt == row.prompt for other in group)
            rewards = [other.reward for other in group]
            row.advantage = row.reward - statistics.mean(rewards)
            if self.kind == "rloo":  # less the mean of the other two
                row.advantage = row.reward - (sum(rewards) - row.reward) / 2
            if scale != "none":
                among = rewards if scale == "group" else [other.reward for other in rows]
                row.advantage /= statistics.stdev(among) + 1e-4
        return rows

    def loss(self, model, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """By definition: (loss, loss less the bonus for entropy, what is logged) of a minibatch."""
        log = {name: [] for name in ("clipped", "ratio", "kl", "entropy", "row")}
        low, high = 1 - self.flags["clip_range"], 1 + self.flags["clip_range"]
        high = 1 + self.flags.get("clip_range_high", self.flags["clip_range"])
        losses, entropies = [], []  # of each row, the losses of its tokens or, in RLOO, of the row
        for i in chosen:
            row, values = self.rows[i], []
            logprobs, entropy = naive_forward(model, row)
            losses.append(values)
            if self.kind == "dapo" and not row.ended:
                continue  # masked, as it is truncated
            entropies.append(entropy)
            d, A = logprobs - row.old, row.advantage
            log["kl"] += (0.5 * d**2).tolist()
            log["entropy"] += entropy.tolist()
            ratios = d.exp()
            if self.kind == "gspo":
                ratios = d.mean().exp().repeat(len(d))
            if self.kind == "rloo":
                ratios = d.sum().exp().view(1)
            for t, ratio in enumerate(ratios):
                if self.kind == "cispo":  # the weight is bounded, for either sign
                    value = -min(ratio.item(), 1.02) * A * logprobs[t]
                    clipped = ratio > 1.02 and A != 0
                else:
                    value = -torch.minimum(ratio * A, ratio.clamp(low, high) * A)
                    clipped = ratio.clamp(low, high) * A < ratio * A
                if self.kind != "rloo":
                    x = row.ref[t] - logprobs[t]
                    value = value + 0.3 * (x.exp() - 1 - x)
                values.append(value)
                log["row"].append(i)
                log["ratio"].append(ratio.item())
                log["clipped"].append(float(clipped))
        total = sum(map(sum, losses)) + 0 * entropy.sum()  # a tensor also if all rows are masked
        if self.kind in ("dapo", "cispo"):
            loss = total / max(1, sum(map(len, losses)))
        elif self.kind == "dr_grpo":
            loss = total / (len(chosen) * 5)
        else:
            loss = sum(sum(values) / len(values) for values in losses) / len(chosen)
        bonus = self.flags.get("entropy_coef", 0) * sum(x.sum() for x in entropies)
        return loss, loss - bonus / max(1, len(log["entropy"])), log


def naive_forward(model, row: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the tokens of one row, without padding."""
    tokens = torch.tensor([row.prompt + row.ids])
    log_p = (model(tokens).logits[0, len(row.prompt) - 1 : -1] / 1.5).log_softmax(-1)
    return log_p[torch.arange(len(row.ids)), row.ids], -(log_p.exp() * log_p).sum(-1)


@pytest.fixture(scope="module", params=RUNS)
def job(request, tmp_path_factory) -> Job:
    return Job(request.param, tmp_path_factory.mktemp("by-hand"))


@pytest.fixture(scope="module")
def naive(job) -> list[tuple]:
    """(loss, gradients, logged numbers) of each update of the second step."""
    shuffler = torch.Generator().manual_seed(11)
    epochs, size = job.flags["num_epochs"], ROWS // job.flags["num_mini_batches"]
    orders = [torch.randperm(ROWS, generator=shuffler) for _ in range(2 * epochs)]  # of 2 steps
    chosen = [part.tolist() for order in orders[epochs:] for part in order.split(size)]
    results = []
    for update, rows in zip(job.last, chosen, strict=True):
        loss, whole, log = job.loss(update.model, rows)
        gradients = torch.autograd.grad(whole, list(update.model.parameters()))
        results.append((loss.item(), gradients, log))
    return results


@pytest.mark.problem("grpo_loop", 4, "grpo dr_grpo dapo")
@pytest.mark.problem("rloo_loop", 2, "rloo")
def test_every_gradient_of_the_second_step_is_that_of_the_definition(job, naive):
    hint = (
        "another gradient: a sign, a coefficient (kl_coef, the temperature), the clip, the"
        " level of the ratio, the advantages of a group, a normaliser (rows or tokens of the"
        " minibatch), other rows, or gradients of the update before not cleared?"
    )
    equal_updates(job.last, [gradients for _, gradients, _ in naive], hint)


@pytest.mark.problem("grpo_loop", 1, "grpo dr_grpo dapo")
def test_the_weights_at_the_end_are_those_of_adam_without_decay(job):
    equal_after_adam(job.updates, job.before[0].parameters(), job.final.parameters())


@pytest.mark.problem("grpo_loop", 1, "grpo dr_grpo dapo")
@pytest.mark.problem("rloo_loop", 1, "rloo")
def test_every_metric_of_the_second_step_is_that_of_its_definition(job, naive):
    def mean(name: str) -> float:
        values = [x for _, _, log in naive for x in log[name]]
        return sum(values) / len(values)

    num_tokens = sum(len(row.ids) for row in job.rows)
    kl, scores = sum(sum(row.kl) for row in job.rows), [row.score for row in job.rows]
    groups = [scores[i : i + 3] for i in range(0, ROWS, 3)]
    expected = {
        "objective/scores": statistics.mean(scores),
        "objective/kl": kl / ROWS,
        "objective/kl_token": kl / num_tokens,
        "objective/entropy": -sum(row.old.sum().item() for row in job.rows) / num_tokens,
        "objective/non_score_reward": -0.3 * kl / ROWS,
        "objective/rlhf_reward": statistics.mean(scores) - 0.3 * kl / ROWS,
        "policy/approxkl_avg": mean("kl"),
        "policy/clipfrac_avg": mean("clipped"),
        "policy/entropy_avg": mean("entropy"),
        "val/ratio": mean("ratio"),
        "loss/policy_avg": statistics.mean(loss for loss, _, _ in naive),
        "reward/std_within_group": statistics.mean(map(statistics.stdev, groups)),
        "reward/frac_flat_groups": sum(min(g) == max(g) for g in groups) / len(groups),
        "val/num_eos_tokens": sum(row.ended for row in job.rows),
        "length/mean": num_tokens / ROWS,
        "grad_norm": statistics.mean(update.norm.item() for update in job.last),
        "lr": 0.005,
        "episode": 2 * ROWS,
    }
    for name, value in expected.items():
        hint = f"{name}: over padding, a mean of means, another sign, or of another policy?"
        assert job.metrics[1][name] == pytest.approx(value, rel=1e-5, abs=1e-6), hint
    assert job.metrics[1]["val/ratio_max_dev_first"] < 1e-10, "old log-probs of another forward?"
    assert abs(job.metrics[1]["objective/kl"]) > 1e-3 and len({len(x.ids) for x in job.rows}) > 1
    assert 0.02 < mean("clipped") < 0.98, "the clip is at work"


def test_what_is_recorded_of_trained_tokens_is_what_the_step_did_to_them(job, naive):
    lines = [x for x in job.tokens if x["split"] == "train" and x["step"] == 1]
    assert [line["completion_index"] for line in lines] == list(range(8))  # of 12 rows
    for i, line in enumerate(lines):
        row = job.rows[i]
        expected = {"old_logprobs": row.old, "ref_logprobs": row.ref, "kl": row.kl}
        expected |= {"advantages": [row.advantage], "score": [row.score]}
        logs = [log for _, _, log in naive[-job.flags["num_mini_batches"] :] if i in log["row"]]
        if not logs:  # a completion that is masked
            assert set(line["ratio"]) == set(line["clipped"]) == {None}
        for log in logs:
            at = [k for k, other in enumerate(log["row"]) if other == i]
            expected |= {name: [log[name][k] for k in at] for name in ("ratio", "clipped")}
        for name, x in expected.items():
            values = line[name] if isinstance(line[name], list) else [line[name]]
            assert values == pytest.approx(list(map(float, x)), rel=6e-5, abs=1e-6), name
