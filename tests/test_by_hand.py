"""The second step of each loop is that of its method's page in one_page/: the same tensors.

1. `RUNS` has the runs: flags, and the lines of the page that are others then. In the first step
   every log-ratio, KL and value is 0, so a wrong sign wouldn't show.
2. `Job` runs a script in float64, and keeps what it sampled, its weights and its gradients. NOISE
   lies on the log-probs as drawn, so that a loop which trains on these is found.
3. `second_step` runs the code of the page on the same tokens, from the same weights. Its models
   read each row alone, without padding.
4. `check` compares the tensors in the order of a step, and says which one is the first to differ.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest
import torch
from small import job_maker, letter_tokenizer, lines_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import grpo
import ppo
import rloo
from forward import ValueModel
from plumbing.errors import Fault

EOS, N, G, T = 19, 4, 3, 5
B = N * G
FLAGS = {
    "num_steps": 2, "completions": B, "num_generations": G, "max_new_tokens": T,
    "temperature": 1.5, "kl_coef": 0.3, "learning_rate": 0.01, "warmup_steps": 0,
    "max_grad_norm": 1e9, "rollout_batch_size": 6, "micro_batch_tokens": 16, "eval_every": 1,
    "seed": 1, "num_epochs": 2, "num_mini_batches": 2, "clip_range": 0.05,
}  # fmt: skip
PPO = {"gamma": 0.9, "lam": 0.5, "vf_coef": 2, "clip_range_value": 1e9}
TRUNCATED = "    mask = mask & (tokens == EOS).any(1, True)\n    old, ref ="
MEAN = "-((objective * mask).sum(1) / mask.sum(1)).mean()"
BONUS = "0.4 * (entropy(tokens) * mask).sum() / mask.sum().clamp(min=1)"
RUNS = {  # the run: its flags, and {a line of the page: what stands there then}
    "ppo": (PPO | {"num_mini_batches": 4}, {}),
    "ppo_variant": (
        PPO | {"kl_estimator": "k3", "missing_eos_penalty": 0.75, "num_epochs": 3, "vf_coef": 0.5}
        | {"clip_range_value": 0.03, "entropy_coef": 0.4, "max_grad_norm": 0.8},
        {"-KL_COEF * (old - ref)": "-KL_COEF * ((ref - old).exp() - 1 + old - ref)",
         "error = (V - returns[rows]) ** 2": "clipped = V.clamp(old_V - 0.03, old_V + 0.03)\n"
         "        error = torch.max((V - returns) ** 2, (clipped - returns) ** 2) / 4",
         "(error - objective)": "(error - objective - 0.4 * entropy(tokens))"},
    ),
    "grpo": ({"num_mini_batches": 1}, {}),  # two epochs, so the second needs old log-probs
    "dr_grpo": (  # one epoch, so the minibatches alone need old log-probs
        {"loss_type": "dr_grpo", "scale_rewards": "none", "entropy_coef": 0.4, "num_epochs": 1},
        {" / (std + 1e-4)": "", MEAN: f"-(objective * mask).sum() / (len(A) * T) - {BONUS}"},
    ),
    "dapo": (  # minibatches of two rows: of one, all rows are masked
        {"loss_type": "dapo", "clip_range_high": 0.08, "scale_rewards": "batch", "num_epochs": 1}
        | {"mask_truncated_completions": True, "entropy_coef": 0.4, "num_mini_batches": 6},
        {"torch.std_mean(scores.view(G, N), 0)": "scores.std(), scores.view(G, N).mean(0)",
         "    old, ref =": TRUNCATED, "1 + CLIP": "1.08",
         MEAN: f"-(objective * mask).sum() / mask.sum().clamp(min=1) - {BONUS}"},
    ),
    "gspo": (
        {"loss_type": "gspo", "clip_range": 0.01, "kl_estimator": "unbiased", "max_grad_norm": 0.8},
        {"ratio = (new - old).exp()":
         "ratio = (((new - old) * mask).sum(1) / mask.sum(1)).exp().unsqueeze(1)",
         "KL_COEF * kl": "KL_COEF * kl * (new - old).exp()"},
    ),
    "rloo": ({"num_epochs": 1, "num_mini_batches": 1}, {}),
    "rloo_clipped": (
        {"num_epochs": 1, "max_grad_norm": 0.8},
        {"loss = -(A * logp.sum(1)).mean()":
         "ratio = ((logprobs(policy, tokens) - old) * mask).sum(1).exp()\n"
         "    loss = -torch.min(A * ratio, A * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()"},
    ),
}  # fmt: skip
NOISE = torch.linspace(-0.3, 0.3, B * T).double().view(B, T)  # on the sampler's log-probs
# Tensors in the order of a step, by their names in tokens.jsonl, if they stand there.
STAGES = "old_logprobs ref_logprobs kl score values rewards advantages returns".split()
STAGES += "ratio clipped loss gradient weights new_logprobs".split()


class Job:
    """A run of a script: what it sampled, weights and gradients at each update, its records."""

    def __init__(self, kind: str, folder: Path, make_job: Callable) -> None:
        self.kind, (changes, self.edits) = kind, RUNS[kind]
        self.script = {"ppo": ppo, "rloo": rloo}.get(kind.partition("_")[0], grpo)
        self.flags, self.rollouts, self.updates = FLAGS | changes, [], []
        with pytest.MonkeyPatch.context() as patch:
            self.keep(patch)
            try:
                self.metrics = make_job(self.script)(**self.flags)
            except Fault as e:
                text = f"{self.script.__name__}.py, run {kind!r}, has stopped: {e}"
                pytest.fail(text, pytrace=False)
        self.tokens = lines_of(folder / "run/tokens.jsonl")
        self.final = AutoModelForCausalLM.from_pretrained(folder / "run/model", dtype=torch.float64)

    def keep(self, patch: pytest.MonkeyPatch) -> None:
        load, sample, job = self.script.load_policy, self.script.sample, self

        def load_in_double(config):
            job.policy, tokenizer = load(config)
            return job.policy.double(), tokenizer

        def sample_and_keep(*args, **options):
            job.rollouts.append(rollout := sample(*args, **options))
            torch.rand(1)  # other draws change no order of rows
            return replace(rollout, logprobs=rollout.logprobs + NOISE)

        class KeepingAdamW(torch.optim.AdamW):
            def step(self):
                parameters = self.param_groups[0]["params"]
                weights = [p.detach().clone() for p in parameters]
                job.updates.append((weights, [p.grad.clone() for p in parameters]))
                super().step()

        patch.setattr(self.script, "load_policy", load_in_double)
        patch.setattr(self.script, "sample", sample_and_keep)
        patch.setattr(torch.optim, "AdamW", KeepingAdamW)
        patch.setattr("plumbing.run.draw_curves", lambda folders, path: None)  # half of its time

    def code_of_page(self) -> Iterator[CodeType]:
        """Its function of log-probs, how it makes advantages, and its update."""
        file = Path(__file__).parent.parent / f"one_page/{self.script.__name__}.py"
        text = file.read_text(encoding="utf-8")
        for line, other in self.edits.items():
            assert text.count(line) == 1, f"{file.name} of one_page/ has no {line!r}"
            text = text.replace(line, other)
        functions, loop = text.partition("\n    print(")[0].split("\nset_seed(0)")
        _, _, *advantages, update = re.split(r"\n(?=    # \d\. )", loop)
        yield compile(functions[functions.index("def logprobs") :], file, "exec")
        update = re.sub(r"(?m)^    for .*:$", "    if True:", update)  # `second_step` has the loop
        for part in ("\n".join(advantages), update):
            yield compile(f"if True:\n{part}", file, "exec")


def of_each_row(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], SimpleNamespace]:
    """A model for a page: it reads each row by itself, without the padding, which is -1."""

    def read(tokens: Tensor) -> SimpleNamespace:
        rows = [forward(row[row >= 0].unsqueeze(0))[0, -T - 1 :] for row in tokens]
        return SimpleNamespace(logits=torch.stack(rows))

    return read


def with_weights(weights: Iterable[Tensor], models: list[nn.Module]) -> list[nn.Module]:
    """Give models these weights, in the order of their parameters, and no gradient."""
    for p, x in zip([p for model in models for p in model.parameters()], weights, strict=True):
        p.data.copy_(x)
        p.grad = None
    return models


def second_step(job: Job) -> tuple[dict, list[dict]]:
    """The names of the page in its second step, and in each of its updates. Rows are in the order
    of the job.
    """
    rollout, given = job.rollouts[1], job.updates[len(job.updates) // 2 :]
    models = [policy := copy.deepcopy(job.policy).eval()]
    first = job.updates[0][0][: len([*policy.parameters()])]
    [ref] = with_weights(first, [copy.deepcopy(policy).requires_grad_(False)])
    models += [ValueModel.on_backbone_of(policy)] * (job.script is ppo)
    with_weights(given[0][0], models)
    tokens, mask = rollout.tokens.masked_fill(~rollout.attention_mask, -1), rollout.completion_mask
    tokens[:, -T:][~mask] = EOS
    scores = [sum(ids[real].tolist()) % 7 - 3.0 for ids, real in zip(tokens[:, -T:], mask)]
    scores = torch.tensor(scores) - job.flags.get("missing_eos_penalty", 0) * ~rollout.finished
    # The groups of a page are columns: row 0 is followed by a row of the next group.
    order = torch.arange(B).view(N, G).T.flatten()
    page = {"tokens": tokens[order], "mask": mask[order], "scores": scores[order]}
    page |= {"torch": torch, "N": N, "G": G, "T": T, "EOS": EOS, "KL_COEF": 0.3, "GAMMA": 0.9}
    page |= {"LAMBDA": 0.5, "CLIP": job.flags["clip_range"]}
    page["optimizer"] = SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
    page["policy"] = of_each_row(lambda x: policy(x).logits / 1.5)
    page["reference"] = of_each_row(lambda x: ref(x).logits / 1.5)
    page["critic"] = of_each_row(lambda x: models[1].head(models[1].backbone(x).last_hidden_state))

    def entropy(tokens: Tensor) -> Tensor:
        log_p = page["policy"](tokens).logits[:, :-1].log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    def of_rows(rows: Tensor) -> dict[str, Tensor]:
        tensors = {name: x for name, x in page.items() if isinstance(x, Tensor)}
        return {name: x[rows] for name, x in tensors.items() if x.shape[:1] == (B,)}

    page["entropy"], (logprobs, advantages, update) = entropy, job.code_of_page()
    exec(logprobs, page)
    with torch.no_grad():  # RLOO's page has no names for these
        page["old"] = page["logprobs"](page["policy"], page["tokens"])
        page["ref"] = page["logprobs"](page["reference"], page["tokens"])
        page["old_entropy"] = entropy(page["tokens"])
    exec(advantages, page)
    page |= of_rows(order.argsort()) | {"sampler": rollout.logprobs + NOISE}
    # Records and metrics have k1, unless a flag of PPO says k3. They have names of their own.
    d = page["old"] - page["ref"]
    page["kl"] = d.neg().exp() - 1 + d if job.kind == "ppo_variant" else d
    page |= {"old_logprobs": page["old"], "ref_logprobs": page["ref"], "score": page["scores"]}
    page |= {"advantages": page["A"].squeeze(-1), "values": page.get("old_V")}
    shuffler, epochs = torch.Generator().manual_seed(job.flags["seed"]), job.flags["num_epochs"]
    orders = [torch.randperm(B, generator=shuffler) for _ in range(2 * epochs)][epochs:]
    parts = [x for order in orders for x in order.split(B // job.flags["num_mini_batches"])]
    updates = []
    for (weights, _), rows in zip(given, parts, strict=True):
        with_weights(weights, models)
        exec(update, names := page | of_rows(rows) | {"rows": slice(None)})
        names["gradient"] = [p.grad for model in models for p in model.parameters()]
        updates.append(names | of_metrics(job, names) | {"rows": rows})
    for name in ("ratio", "clipped"):  # of the last epoch
        last = torch.cat([x[name] for x in updates[-job.flags["num_mini_batches"] :]])
        page[name] = last[orders[-1].argsort()]
    with_weights(job.final.parameters(), [policy])
    with torch.no_grad():
        page["new_logprobs"] = page["logprobs"](page["policy"], page["tokens"])
    return page, updates


@torch.no_grad()
def of_metrics(job: Job, names: dict) -> dict[str, Tensor]:
    """What the metrics count of an update: (b, T) or (b,), NaN where all is masked."""
    A, mask, old, clip = (names[x] for x in ("A", "mask", "old", "CLIP"))
    d = names["logprobs"](names["policy"], names["tokens"]) - old
    ratio = names.get("ratio", torch.ones(len(A)))  # REINFORCE has none
    near = ratio.clamp(1 - clip, 1 + job.flags.get("clip_range_high", clip))
    found = {"approxkl": d**2 / 2, "entropies": names["entropy"](names["tokens"])}
    found["sampler_kl"] = (old - names["sampler"]).exp() - 1 - old + names["sampler"]
    found |= {"ratio": ratio, "clipped": 1.0 * (near * A < ratio * A)}
    if job.script is ppo:
        V, old_V, R = names["V"], names["old_V"], names["returns"]
        eps = job.flags["clip_range_value"]
        free, near = (V - R) ** 2, (V.clamp(old_V - eps, old_V + eps) - R) ** 2
        found |= {"value_loss": torch.max(free, near) / 2, "value_clipped": 1.0 * (near > free)}
        found["policy_loss"] = -names["objective"]
    else:  # a bonus is no part of the policy's loss
        bonus = found["entropies"][mask].sum() / mask.sum().clamp(min=1)
        found["policy_loss"] = names["loss"] + job.flags.get("entropy_coef", 0) * bonus
    if job.kind == "rloo":  # the page has another number with the same gradient
        found["policy_loss"] = -A.mean()
    for name in ("ratio", "clipped") if job.script is grpo else ():
        found[name] = found[name].expand_as(d)
    masks = {0: torch.tensor(True), 1: mask.any(1), 2: mask}
    return {name: x.where(masks[x.dim()], torch.nan) for name, x in found.items()}


Step = tuple[Job, dict, list[dict]]


@pytest.fixture(scope="module", params=RUNS)
def step(request, tmp_path_factory) -> Step:
    """A job, and the second step of its page."""
    folder = tmp_path_factory.mktemp("by-hand")
    make_job = job_maker(folder)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    job = Job(request.param, folder, make_job)
    return job, *second_step(job)


def mean_of(updates: list[dict], name: str) -> float:
    return torch.cat([x[name].flatten() for x in updates]).nanmean().item()


def compared(job: Job, page: dict, updates: list[dict]) -> Iterator[tuple]:
    """(Stage, where, the script's numbers, the page's, their tolerance), in the order of a step."""
    close, exact = {"rtol": 6e-5, "atol": 1e-6}, {"rtol": 0, "atol": 1e-8}
    lines = [x for x in job.tokens if x["split"] == "train" and x["step"] == 1]
    assert len(lines) == 8  # of 12 rows
    for name in STAGES:
        for line in lines if name in lines[0] else ():
            i, n = line["completion_index"], line["num_tokens"]
            ours = line[name] if isinstance(line[name], list) else [line[name]]
            ours = torch.tensor([torch.nan if x is None else x for x in ours])
            yield name, f"completion {i}", ours, page[name][i].reshape(-1)[:n], close
        if name == "loss":
            pair = [job.metrics[1]["loss/policy_avg"]], [mean_of(updates, "policy_loss")]
            yield name, "its mean over the updates", *map(torch.tensor, pair), close
    gradients = [gradient for _, gradient in job.updates[: -len(updates)]]
    for k, ((_, ours), update) in enumerate(zip(job.updates[len(gradients) :], updates)):
        update["norm"] = torch.cat([x.flatten() for x in update["gradient"]]).norm()
        scale = job.flags["max_grad_norm"] / (update["norm"].item() + 1e-6)  # torch adds 1e-6
        gradients.append([x * min(1.0, scale) for x in update["gradient"]])
        for x, y in zip(ours, gradients[-1], strict=True):
            yield "gradient", f"update {k}", x, y, exact
    weights = [x.clone() for x in job.updates[0][0]]
    optimizer = torch.optim.AdamW(weights, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for k, gradient in enumerate(gradients):
        optimizer.param_groups[0]["lr"] = 0.01 if k < len(updates) else 0.005
        for p, x in zip(weights, gradient, strict=True):
            p.grad = x
        optimizer.step()
    for ours, theirs in zip(job.final.parameters(), weights):  # of the policy, which is first
        yield "weights", "at the end", ours.detach(), theirs, exact


def differences(step: Step) -> tuple[set[str], str]:
    """The tensors that aren't the page's, and a sentence about the one that differs first."""
    right, wrong = set(), []
    for name, where, ours, theirs, close in compared(*step):
        if ours.shape != theirs.shape:
            wrong.append((name, f"{where}: {len(ours)} numbers, the page has {len(theirs)}"))
        elif torch.allclose(ours, theirs, **close, equal_nan=True):
            right.add(name)
        else:
            k = (ours - theirs).abs().nan_to_num(torch.inf).argmax()
            x, y = ours.flatten()[k], theirs.flatten()[k]
            wrong.append((name, f"{where}: {x:.9g}, the page has {y:.9g}"))
    name, text = min(wrong, key=lambda x: STAGES.index(x[0]), default=("nothing", ""))
    before = STAGES[: STAGES.index(name)] if wrong else STAGES
    said = f"{step[0].script.__name__}.py, run {step[0].kind!r}. First to differ: {name}, {text}."
    said += f" Right before it: {', '.join(x for x in before if x in right) or 'nothing'}."
    return {name for name, _ in wrong}, said


def check(step: Step, *wanted: str) -> None:
    wrong, said = differences(step)
    if wrong & {*wanted}:
        pytest.fail(said, pytrace=False)


@pytest.mark.problem("ppo_loop", 3, "ppo")
@pytest.mark.problem("grpo_loop", 3, "grpo")
@pytest.mark.problem("grpo_loop", 1, "dr_grpo")
@pytest.mark.problem("grpo_loop", 1, "dapo")
@pytest.mark.problem("rloo_loop", 3, "rloo")
def test_the_loop_has_the_gradients_of_its_page(step):
    check(step, "gradient")


@pytest.mark.problem("grpo_loop", 1, "grpo dr_grpo")
def test_the_loop_ends_with_the_weights_of_adam(step):
    check(step, "weights")


@pytest.mark.problem("ppo_loop", 2, "ppo")
def test_the_loop_records_the_tensors_of_its_page(step):
    check(step, *STAGES[:10], "new_logprobs")
    job, page, _ = step
    for line in [x for x in job.tokens if x["split"] == "train" and x["step"] == 1]:
        i, n = line["completion_index"], line["num_tokens"]
        drawn, ids = (page["sampler"] - NOISE)[i, :n], page["tokens"][i, -T:][:n].tolist()
        hint = "not drawn from softmax(logits / temperature), rounded to bfloat16?"
        assert torch.allclose(drawn, page["old"][i, :n], rtol=0, atol=0.05), hint
        assert line["sampler_logprobs"] == pytest.approx((drawn + NOISE[i, :n]).tolist(), rel=6e-5)
        assert line["tokens"] == [letter_tokenizer().decode([x]) for x in ids]
        assert line["finished"] == (ids[-1] == EOS)


@pytest.mark.problem("grpo_loop", 1, "grpo")
@pytest.mark.problem("rloo_loop", 1, "rloo")
def test_the_loop_logs_the_metrics_of_its_page(step):
    check(step, "loss")
    job, page, updates = step
    mean, scores = partial(mean_of, updates), page["scores"]
    real = job.rollouts[1].completion_mask
    lengths, ended, kl = real.sum(1), job.rollouts[1].finished, page["kl"][real].sum().item()
    entropy = page["old_entropy"][real].mean().item()
    expected = {
        "objective/scores": scores.mean().item(),
        "objective/kl": kl / B,
        "objective/kl_token": kl / real.sum().item(),
        "objective/entropy": -page["sampler"][real].mean().item(),
        "objective/non_score_reward": -0.3 * kl / B,
        "objective/rlhf_reward": scores.mean().item() - 0.3 * kl / B,
        "policy/approxkl_avg": mean("approxkl"),
        "policy/clipfrac_avg": mean("clipped"),
        "policy/entropy_avg": entropy if job.script is rloo else mean("entropies"),
        "val/ratio": mean("ratio"),
        "val/sampler_kl": mean("sampler_kl"),
        "val/num_eos_tokens": ended.sum().item(),
        "length/mean": real.sum().item() / B,
        "length/max": lengths.max().item(),
        "length/truncated_frac": 1 - ended.double().mean().item(),
        "grad_norm": mean("norm"),
        "lr": 0.005,
        "episode": 2 * B,
    }
    if job.script is ppo:
        errors, returns = (page["returns"] - page["values"])[real], page["returns"][real]
        expected["val/explained_variance"] = (1 - errors.var() / returns.var()).item()
        expected["loss/value_avg"] = mean("value_loss")
        expected["val/clipfrac_avg"] = mean("value_clipped")
        assert job.kind == "ppo" or 0.05 < mean("value_clipped") < 0.95, "the clip is at work"
    else:
        groups = scores.view(N, G)
        expected["reward/std_within_group"] = groups.std(1).mean().item()
        expected["reward/frac_flat_groups"] = (groups.amin(1) == groups.amax(1)).double().mean()
    logged = job.metrics[1]
    for name, value in expected.items():
        if logged[name] != pytest.approx(float(value), rel=1e-5, abs=1e-6):
            text = f"{name} is {logged[name]:.6g}, and should be {value:.6g}."
            pytest.fail(f"{text} {differences(step)[1]}", pytrace=False)
    hint = "the old log-probs are not of the policy, temperature and forward of the first update?"
    assert logged["val/ratio_max_dev_first"] < 1e-10, hint
    seconds = logged["time/rollout"] + logged["time/update"]
    assert logged["tokens_per_second"] == pytest.approx(real.sum().item() / seconds)
    assert abs(kl) > 1e-2 and len({*lengths.tolist()}) > 1
    assert {*ended[lengths == T].tolist()} == {True, False}, "EOS as the last token, and no EOS"
    assert job.kind == "rloo" or 0.02 < mean("clipped") < 0.98, "the clip is at work"
    assert all("eval/reward" in line for line in job.metrics), "eval_every is 1"
