"""Two steps of each loop against the same steps written out naively from the equations.

How to read this:

1. `RUNS` names six runs of two steps each. In the first step every log-ratio, KL and value is 0, so
   a wrong sign or a dropped coefficient cannot show: what is compared is the second one.
2. `Job.spy` replaces functions that the loop calls. `sample`, `clip_grad_norm_` and
   `on_backbone_of` do their work and keep a copy: of the rollout, of each update's gradient, of the
   models before both. Two change numbers: all is in float64, so that both sides agree to nine
   digits (metrics, which are added up in float32, to six), and NOISE lies on the log-probs as
   drawn, so that a loop which trains on these is found.
3. `Job.second_step` is the step by hand. Row by row, without padding or dropout, it computes
   log-probs, KL, score and advantages. `Job.loss` makes the loss of a minibatch of them at once, by
   the losses of the scripts, which have tests of their own; autograd gives the gradient.
4. Each test compares one thing: gradients, weights at the end, metrics, what is recorded of tokens.
"""

import copy
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small import job_maker, letter_tokenizer, lines_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import grpo
import ppo
import rloo
from plumbing.data import Task
from plumbing.errors import Fault

EOS, ROWS = 19, 12  # 4 prompts x 3 completions
FLAGS = {
    "num_steps": 2, "completions": ROWS, "num_generations": 3, "max_new_tokens": 5,
    "temperature": 1.5, "kl_coef": 0.3, "learning_rate": 0.01, "warmup_steps": 0,
    "max_grad_norm": 0.8, "rollout_batch_size": 6, "micro_batch_tokens": 16, "eval_every": 1,
    "seed": 12, "num_epochs": 2, "num_mini_batches": 2, "clip_range": 0.05,
}  # fmt: skip
RUNS = {  # the kind of loss: the flags in which its run differs
    "ppo": {
        "kl_estimator": "k3", "missing_eos_penalty": 0.75, "gamma": 0.9, "lam": 0.5,
        "clip_range_value": 0.03, "vf_coef": 0.5, "entropy_coef": 0.4, "num_epochs": 3,
    },
    "grpo": {"num_mini_batches": 1},  # two epochs, so old log-probs are needed for the second
    "dr_grpo": {  # one epoch, so old log-probs are needed for the minibatches alone
        "loss_type": "dr_grpo", "scale_rewards": "none", "entropy_coef": 0.4, "num_epochs": 1,
        "seed": 11,
    },
    "dapo": {
        "loss_type": "dapo", "clip_range_high": 0.08, "scale_rewards": "batch",
        "mask_truncated_completions": True, "entropy_coef": 0.4, "num_epochs": 1,
    },
    "gspo": {"loss_type": "gspo", "clip_range": 0.01, "kl_estimator": "unbiased"},
    "rloo": {"num_epochs": 1},  # two minibatches
}  # fmt: skip
NOISE = torch.linspace(-0.3, 0.3, ROWS * 5).double().view(ROWS, 5)  # on the sampler's log-probs


class Job:
    """A run, what went through its loop, and its second step by hand. Models: the policy, and in
    PPO the value model.
    """

    def __init__(self, kind: str, folder) -> None:
        self.kind, self.script = kind, {"ppo": ppo, "rloo": rloo}.get(kind, grpo)
        self.flags = FLAGS | RUNS[kind]
        self.rollouts, self.before, self.updates, self.values = [], [], [], []
        run = job_maker(folder)(self.script)
        with pytest.MonkeyPatch.context() as patch:
            self.spy(patch)
            try:
                self.metrics = run(**self.flags)
            except Fault as e:  # in dapo's run all rows of a minibatch are masked
                hint = "is the number of tokens 0 where all rows of a minibatch are masked?"
                pytest.fail(f"{hint} {e}" if kind == "dapo" else str(e))
        self.tokens = lines_of(folder / "run/tokens.jsonl")
        self.final = AutoModelForCausalLM.from_pretrained(folder / "run/model", dtype=torch.float64)
        self.last = self.updates[len(self.updates) // 2 :]  # of the second step
        self.rows = self.second_step()

    def spy(self, patch: pytest.MonkeyPatch) -> None:
        load, sample = self.script.load_policy, self.script.sample
        clip, score = torch.nn.utils.clip_grad_norm_, Task.score
        build = ppo.ValueModel.on_backbone_of

        def load_in_double(config):  # so are the value model and the reference, which are copies
            policy, tokenizer = load(config)
            return policy.double(), tokenizer

        def build_and_keep(policy):
            self.values = [build(policy)]
            return self.values[0]

        def sample_and_keep(policy, *args, **kwargs):
            self.models = [policy, *self.values]
            self.before.append(copy.deepcopy(self.models))
            rollout = sample(policy, *args, **kwargs)
            torch.rand(1)  # other draws change no order of rows
            self.rollouts.append(rollout)
            return replace(rollout, logprobs=rollout.logprobs + NOISE)

        def clip_and_keep(parameters, max_norm):
            update = SimpleNamespace(gradients=[p.grad.clone() for p in parameters])
            update.norm = clip(parameters, max_norm)
            update.clipped = [p.grad.clone() for p in parameters]
            update.models = copy.deepcopy(self.models)
            self.updates.append(update)
            return update.norm

        def score_in_double(*args, **options):
            scores, texts = score(*args, **options)
            return scores.double(), texts

        patch.setattr(self.script, "load_policy", load_in_double)
        patch.setattr(ppo.ValueModel, "on_backbone_of", build_and_keep)
        patch.setattr(self.script, "sample", sample_and_keep)
        patch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_keep)
        patch.setattr(Task, "score", score_in_double)
        patch.setattr("plumbing.run.draw_curves", lambda folders, path: None)  # half of its time

    def second_step(self) -> list[SimpleNamespace]:
        """Its rows, up to their advantages, one for each token."""
        rollout, rows = self.rollouts[1], []
        for i, (tokens, real) in enumerate(zip(rollout.tokens, rollout.attention_mask)):
            row = SimpleNamespace(prompt=tokens[:-5][real[:-5]].tolist())
            row.ids = tokens[-5:][real[-5:]].tolist()
            row.drawn = rollout.logprobs[i, : len(row.ids)].double()
            row.sampler = row.drawn + NOISE[i, : len(row.ids)]
            with torch.no_grad():
                row.old, row.entropy, row.values = naive_forward(self.before[1], row)
                row.ref, _, _ = naive_forward(self.before[0], row)
            row.kl = (row.old - row.ref).tolist()  # the log has k1, also where the loss has k3
            if self.kind == "ppo":
                row.kl = [math.exp(-d) - 1 + d for d in row.kl]
            row.ended = EOS in row.ids
            row.score = sum(row.ids) % 7 - 3.0  # the reward `spread` of small.py
            row.score -= self.flags.get("missing_eos_penalty", 0) * (not row.ended)
            rows.append(row)
        assert all(row.prompt == rows[i // 3 * 3].prompt for i, row in enumerate(rows))
        (credit_tokens if self.kind == "ppo" else self.credit_completions)(rows)
        return rows

    def credit_completions(self, rows: list[SimpleNamespace]) -> None:
        is_rloo = self.kind == "rloo"
        rewards = [row.score - 0.3 * sum(row.kl) if is_rloo else row.score for row in rows]
        scale = self.flags.get("scale_rewards", "none" if is_rloo else "group")
        for i, row in enumerate(rows):
            group = rewards[i // 3 * 3 : i // 3 * 3 + 3]
            advantage = rewards[i] - statistics.mean(group)
            if is_rloo:  # less the mean of the other two
                advantage = rewards[i] - (sum(group) - rewards[i]) / 2
            if scale != "none":
                advantage /= statistics.stdev(group if scale == "group" else rewards) + 1e-4
            row.advantages = row.returns = [advantage] * len(row.ids)  # no returns

    def loss(self, models, chosen: list[int]) -> tuple[Tensor, Tensor, dict[str, list]]:
        """(Policy loss, the whole that is trained on, what is logged) of a minibatch at once."""
        if self.kind == "dapo":  # what is truncated is masked
            chosen = [i for i in chosen if self.rows[i].ended]
        rows = [self.rows[i] for i in chosen]
        logprobs, entropy, values = map(padded, zip(*(naive_forward(models, x) for x in rows)))
        names = "old ref sampler values advantages returns".split()
        old, ref, sampler, old_values, A, returns = (
            padded(getattr(row, name) for row in rows) for name in names
        )
        mask, clip = padded([1] * len(row.ids) for row in rows).bool(), FLAGS["clip_range"]
        d, off, log = logprobs - old, sampler - old, {}
        ratio, of_row = d.exp(), torch.tensor(chosen).unsqueeze(1).expand_as(mask)
        if self.kind == "ppo":
            loss, _, clipped = ppo.policy_loss(logprobs, old, A, clip)
            vf, vf_clipped = ppo.value_loss(values, old_values, returns, 0.03)
            log |= {"vf": vf[mask], "value_clipped": vf_clipped[mask].double()}
            loss = loss[mask].mean()
        elif self.kind == "rloo":
            loss, _, clipped = rloo.rloo_loss(logprobs, old, A[:, 0], mask, clip_range=clip)
            ratio, of_row = ratio.prod(1), torch.tensor(chosen)
        else:
            names = {"clip_range", "clip_range_high", "loss_type", "kl_estimator"}
            options = {name: self.flags[name] for name in names & {*self.flags}}
            options |= {"ref_logprobs": ref, "kl_coef": 0.3, "max_new_tokens": 5}
            loss, _, clipped = grpo.grpo_loss(logprobs, old, A[:, 0], mask, **options)
        if self.kind == "gspo":
            ratio = (d.sum(1) / mask.sum(1)).exp().unsqueeze(1).expand_as(mask)
        where = mask if ratio.dim() == 2 else slice(None)
        log |= {"row": of_row[where], "ratio": ratio[where], "clipped": clipped[where].double()}
        log |= {"kl": (0.5 * d**2)[mask], "entropy": entropy[mask]}
        log |= {"sampler_kl": (off.neg().exp() - 1 + off)[mask]}
        whole = loss - self.flags.get("entropy_coef", 0) * log["entropy"].mean()
        if self.kind == "ppo":
            whole = whole + 0.5 * log["vf"].mean()
        return loss, whole, {name: x.tolist() for name, x in log.items()}


def padded(rows: Iterator) -> Tensor:
    return pad_sequence([torch.as_tensor(x, dtype=torch.float64) for x in rows], batch_first=True)


def credit_tokens(rows: list[SimpleNamespace]) -> None:
    """PPO's: GAE, whitened over all tokens."""
    for row in rows:
        row.rewards = [-0.3 * x for x in row.kl]
        row.rewards[-1] += row.score
        n, v = len(row.ids), [*row.values.tolist(), 0.0]
        delta = [row.rewards[t] + 0.9 * v[t + 1] - v[t] for t in range(n)]
        row.advantages = [sum(0.45 ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        row.returns = [row.advantages[t] + v[t] for t in range(n)]
    whole = [a for row in rows for a in row.advantages]
    mean, std = statistics.mean(whole), (statistics.variance(whole) + 1e-8) ** 0.5
    for row in rows:
        row.advantages = [(a - mean) / std for a in row.advantages]


def naive_forward(models, row: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and values of the tokens of one row, without padding."""
    policy, *value_models = models
    tokens, before_each = torch.tensor([row.prompt + row.ids]), slice(len(row.prompt) - 1, -1)
    log_p = (policy(tokens).logits[0, before_each] / 1.5).log_softmax(-1)
    logprobs, entropy = log_p[torch.arange(len(row.ids)), row.ids], -(log_p.exp() * log_p).sum(-1)
    for model in value_models:
        hidden = model.backbone(tokens).last_hidden_state[0, before_each]
        return logprobs, entropy, model.head(hidden).squeeze(-1)
    return logprobs, entropy, torch.zeros_like(entropy)


@pytest.fixture(scope="module", params=RUNS)
def job(request, tmp_path_factory) -> Job:
    return Job(request.param, tmp_path_factory.mktemp("by-hand"))


def parameters_of(models: list[torch.nn.Module]) -> list[Tensor]:
    return [p for model in models for p in model.parameters()]


@pytest.fixture(scope="module")
def naive(job) -> list[tuple]:
    """(policy loss, gradients, logged numbers) of each update of the second step."""
    shuffler = torch.Generator().manual_seed(job.flags["seed"])
    epochs, size = job.flags["num_epochs"], ROWS // job.flags["num_mini_batches"]
    orders = [torch.randperm(ROWS, generator=shuffler) for _ in range(2 * epochs)]  # of 2 steps
    chosen = [part.tolist() for order in orders[epochs:] for part in order.split(size)]
    results = []
    for update, rows in zip(job.last, chosen, strict=True):
        loss, whole, log = job.loss(update.models, rows)
        gradients = torch.autograd.grad(whole, parameters_of(update.models))
        results.append((loss.item(), gradients, log))
    return results


@pytest.mark.problem("ppo_loop", 3, "ppo")
@pytest.mark.problem("grpo_loop", 3, "grpo")
@pytest.mark.problem("grpo_loop", 1, "dr_grpo")
@pytest.mark.problem("grpo_loop", 1, "dapo")
@pytest.mark.problem("rloo_loop", 3, "rloo")
def test_every_gradient_of_the_second_step_is_that_of_the_definition(job, naive):
    hint = (
        "another gradient: a sign, a coefficient (vf_coef, kl_coef, entropy_coef, the"
        " temperature), the clip, the level of the ratio, the advantages, the order of whitening"
        " and returns, a normaliser (rows or tokens of the minibatch), other rows, or gradients"
        " of the update before not cleared?"
    )
    for update, (_, gradients, _) in zip(job.last, naive, strict=True):
        length = torch.cat([g.flatten() for g in gradients]).norm().item()
        scale = min(1.0, 0.8 / (length + 1e-6))  # torch adds 1e-6
        for ours, clipped, g in zip(update.gradients, update.clipped, gradients, strict=True):
            assert torch.allclose(ours, g, rtol=0, atol=1e-8), hint
            assert torch.allclose(clipped, g * scale, rtol=0, atol=1e-8), "max_grad_norm?"
        assert update.norm.item() == pytest.approx(length, rel=1e-8), "of other parameters?"


@pytest.mark.problem("grpo_loop", 1, "grpo dr_grpo")
def test_the_weights_at_the_end_are_those_of_adam_without_decay(job, naive):
    gradients = [update.clipped for update in job.updates[: -len(naive)]]
    for _, whole, _ in naive:
        length = torch.cat([g.flatten() for g in whole]).norm().item()
        gradients.append([g * min(1.0, 0.8 / (length + 1e-6)) for g in whole])
    parameters = parameters_of(copy.deepcopy(job.before[0]))
    optimizer = torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for index, gradient in enumerate(gradients):
        optimizer.param_groups[0]["lr"] = 0.01 if index < len(job.last) else 0.005
        for p, g in zip(parameters, gradient, strict=True):
            p.grad = g
        optimizer.step()
    for ours, theirs in zip(job.final.parameters(), parameters):  # of the policy, which is first
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-8), "another rate, decay or order?"


@pytest.mark.problem("grpo_loop", 1, "grpo")
@pytest.mark.problem("rloo_loop", 1, "rloo")
def test_every_metric_of_the_second_step_is_that_of_its_definition(job, naive):
    def mean(name: str) -> float:
        values = [x for _, _, log in naive for x in log[name]]
        return sum(values) / len(values)

    lengths = [len(row.ids) for row in job.rows]
    num_tokens = sum(lengths)
    of_rollout = sum(row.entropy.sum().item() for row in job.rows) / num_tokens
    kl, scores = sum(sum(row.kl) for row in job.rows), [row.score for row in job.rows]
    expected = {
        "objective/scores": statistics.mean(scores),
        "objective/kl": kl / ROWS,
        "objective/kl_token": kl / num_tokens,
        "objective/entropy": -sum(row.sampler.sum().item() for row in job.rows) / num_tokens,
        "objective/non_score_reward": -0.3 * kl / ROWS,
        "objective/rlhf_reward": statistics.mean(scores) - 0.3 * kl / ROWS,
        "policy/approxkl_avg": mean("kl"),
        "policy/clipfrac_avg": mean("clipped"),
        "policy/entropy_avg": of_rollout if job.kind == "rloo" else mean("entropy"),
        "val/ratio": mean("ratio"),
        "val/sampler_kl": mean("sampler_kl"),
        "loss/policy_avg": statistics.mean(loss for loss, _, _ in naive),
        "val/num_eos_tokens": sum(row.ended for row in job.rows),
        "length/mean": num_tokens / ROWS,
        "length/max": max(lengths),
        "length/truncated_frac": sum(not row.ended for row in job.rows) / ROWS,
        "grad_norm": statistics.mean(update.norm.item() for update in job.last),
        "lr": 0.005,
        "episode": 2 * ROWS,
    }
    if job.kind == "ppo":
        returns = torch.tensor([x for row in job.rows for x in row.returns], dtype=torch.float64)
        errors = returns - torch.cat([row.values for row in job.rows])
        expected["val/explained_variance"] = (1 - errors.var() / returns.var()).item()
        # Over all tokens that the step trained on; minibatches have different numbers of them.
        counts = [len(log["row"]) for _, _, log in naive]
        sums = [loss * n for (loss, _, _), n in zip(naive, counts)]
        expected["loss/policy_avg"] = sum(sums) / sum(counts)
        expected |= {"loss/value_avg": mean("vf"), "val/clipfrac_avg": mean("value_clipped")}
        assert 0.05 < mean("value_clipped") < 0.95, "the clip is at work"
    else:
        groups = [scores[i : i + 3] for i in range(0, ROWS, 3)]
        expected["reward/std_within_group"] = statistics.mean(map(statistics.stdev, groups))
        expected["reward/frac_flat_groups"] = sum(min(g) == max(g) for g in groups) / len(groups)
    logged = job.metrics[1]
    for name, value in expected.items():
        hint = f"{name}: over padding, a mean of means, another sign, or of another policy?"
        assert logged[name] == pytest.approx(value, rel=1e-5, abs=1e-6), hint
    hint = "the old log-probs are not of the policy, temperature and forward of the first update?"
    assert logged["val/ratio_max_dev_first"] < 1e-10, hint
    seconds = logged["time/rollout"] + logged["time/update"]
    assert logged["tokens_per_second"] == pytest.approx(num_tokens / seconds)
    assert abs(logged["objective/kl"]) > 1e-3 and len(set(lengths)) > 1
    ends = {row.ended for row in job.rows if len(row.ids) == 5}
    assert ends == {True, False}, "EOS as the last token that is allowed, and no EOS"
    assert 0.02 < mean("clipped") < 0.98, "the clip is at work"
    assert all("eval/reward" in line for line in job.metrics), "eval_every is 1"


@pytest.mark.problem("ppo_loop", 2, "ppo")
def test_what_is_recorded_of_trained_tokens_is_what_the_step_did_to_them(job, naive):
    lines = [x for x in job.tokens if x["split"] == "train" and x["step"] == 1]
    assert len(lines) == 8  # of 12 rows
    for line in lines:
        row = job.rows[i := line["completion_index"]]
        expected = {"old_logprobs": row.old, "ref_logprobs": row.ref, "kl": row.kl}
        expected |= {"score": [row.score], "advantages": row.advantages[:1]}
        with torch.no_grad():
            expected["new_logprobs"], _, _ = naive_forward([job.final, *job.values], row)
        if job.kind == "ppo":
            expected |= {"rewards": row.rewards, "values": row.values, "returns": row.returns}
            expected["advantages"] = row.advantages
        logs = [log for _, _, log in naive[-job.flags["num_mini_batches"] :] if i in log["row"]]
        if not logs:  # a completion that is masked
            assert set(line["ratio"]) == set(line["clipped"]) == {None}
        for log in logs:  # of the last epoch
            at = [k for k, other in enumerate(log["row"]) if other == i]
            expected |= {name: [log[name][k] for k in at] for name in ("ratio", "clipped")}
        expected["sampler_logprobs"] = row.sampler
        hint = "not drawn from softmax(logits / temperature), rounded to bfloat16?"
        assert torch.allclose(row.drawn, row.old, rtol=0, atol=0.05), hint
        for name, x in expected.items():
            values = line[name] if isinstance(line[name], list) else [line[name]]
            assert values == pytest.approx(list(map(float, x)), rel=6e-5, abs=1e-6), name
        assert line["tokens"] == [letter_tokenizer().decode([i]) for i in row.ids]
        assert line["num_tokens"] == len(row.ids)
        assert line["finished"] == row.ended


# --- The step that docs/equations.md works by hand ---

STEP = {  # completions of 12+9=: score, probabilities of the tokens before the update, and now
    "2 1 EOS": (1.0, (0.4, 0.5, 0.9), (0.6, 0.45, 0.9)),
    "2 2 EOS": (0.0, (0.4, 0.2, 0.9), (0.6, 0.1, 0.9)),
    "3 EOS": (0.0, (0.1, 0.5), (0.1, 0.55)),
    "1 1 1": (0.0, (0.5, 0.2, 0.1), (0.3, 0.25, 0.11)),
}


def worked_step() -> str:
    """GRPO's and RLOO's losses of STEP, by the functions of the scripts."""
    scores, *probs = zip(*STEP.values())
    scores = torch.tensor(scores).double()
    old, new = (pad_sequence([Tensor(p).double().log() for p in x], True) for x in probs)
    mask, new = old != 0, new.requires_grad_()
    ratio = (new - old).exp()

    def line(start: str, numbers: list[Tensor], clipped: Tensor) -> str:
        return start + "".join(f"{x + 0.0:8.3g}" for x in numbers) + "  clipped" * bool(clipped)

    A = grpo.group_advantages(scores, 4)
    loss, _, clipped = grpo.grpo_loss(new, old, A, mask, clip_range=0.2)
    [slopes] = torch.autograd.grad(loss, new)
    each, _, _ = ppo.policy_loss(new, old, A.unsqueeze(1), 0.2)  # GRPO's of a token is PPO's
    lines = ["score       A  token  pi_old      pi   ratio    loss   slope"]
    for i, text in enumerate(STEP):
        for t, token in enumerate(text.split()):
            first = line(f"{scores[i]:5.0f}", [A[i]], False) if t == 0 else " " * 13
            numbers = [x[i, t] for x in (old.exp(), new.exp(), ratio, each, slopes)]
            lines.append(line(f"{first}  {token:5}", numbers, clipped[i, t]))
    lines += [f"GRPO's loss: {loss:.3g}", "", "completion       A   ratio    loss   slope"]

    A, log_ratio = rloo.rloo_advantages(scores, 4), (new - old).sum(1)
    loss, _, clipped = rloo.rloo_loss(new, old, A, mask, clip_range=0.2)
    [slopes] = torch.autograd.grad(loss, new, retain_graph=True)
    each, _, _ = ppo.policy_loss(log_ratio, torch.zeros(4), A, 0.2)
    for i, text in enumerate(STEP):
        lines.append(line(f"{text:10}", [A[i], ratio[i].prod(), each[i], slopes[i, 0]], clipped[i]))
    return "\n".join([*lines, f"RLOO's loss: {loss:.3g}"])


if __name__ == "__main__":
    print(worked_step())
