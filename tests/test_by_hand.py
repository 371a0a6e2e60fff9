"""The second step of each script is that of its page in one_page/: the same tensors and weights.

1. `RUNS` has the runs: flags, and the lines of the page that are others then. In the first step
   every log-ratio, KL and value is 0, so a wrong sign wouldn't show.
2. Both get POLICY, in float64, and take SAMPLED for what it has sampled. SAMPLED has log-probs of
   its own, so that a loop which trains on these is found.
3. `Job` runs a script, and `Page` the page, as it stands where no line is another. After each
   update the page goes on with the script's weights, so that one fault isn't many.
4. `check` compares the tensors in the order of a step, and says which one is the first to differ.
"""

import copy
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest
import torch
from small import job_maker, letter_tokenizer, small_gpt2
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook as after_each_update
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_each_update

import grpo
import ppo
import rloo
from common import Rollout
from plumbing.errors import Fault

EOS, N, G, T, STEPS = 19, 3, 4, 5, 2  # all differ: none can stand for another
B = N * G
POLICY = small_gpt2(dropout=0.1, vocab_size=20, n_layer=1).double()
# Where EOS stands, from 1 on; at 6 > T it doesn't.
ENDS = torch.tensor([5, 6, 3, 4, 2, 1, 6, 3, 6, 4, 2, 5])
TOKENS = torch.randint(EOS, (B, 3 + T), generator=torch.Generator().manual_seed(67))
TOKENS[:, :3] = TOKENS[::G, :3].repeat_interleave(G, 0)  # the prompt of a group
TOKENS[:, 3:][torch.arange(1, T + 1) >= ENDS[:, None]] = EOS
MASK = torch.arange(1, T + 1) <= ENDS[:, None]
LOGPROBS = torch.linspace(-3.2, -2.8, B * T).double().view(B, T)
SAMPLED = Rollout(TOKENS, torch.cat([MASK[:, [0] * 3], MASK], 1), MASK, LOGPROBS, ENDS <= T)
# By `spread` of small.py. Those of the second group are equal: RLOO's first step, which has no KL,
# leaves its rows out.
SCORES = (TOKENS[:, 3:] * MASK).sum(1).double() % 7 - 3
FLAGS = {
    "num_steps": STEPS, "completions": B, "num_generations": G, "max_new_tokens": T,
    "temperature": 3, "kl_coef": 0.3, "learning_rate": 0.01, "warmup_steps": 0,
    "max_grad_norm": 1e9, "rollout_batch_size": 4, "micro_batch_tokens": 16, "eval_every": 1,
    "seed": 1, "num_epochs": 1, "num_mini_batches": 2, "clip_range": 0.05,
}  # fmt: skip
CONSTANTS = {"N": N, "G": G, "T": T, "STEPS": STEPS, "LEARNING_RATE": 0.01, "KL_COEF": 0.3}
CONSTANTS |= {"GAMMA": 0.9, "LAMBDA": 0.5, "CLIP": 0.05, "game": lambda: ("", "")}
PPO = {"gamma": 0.9, "lam": 0.5, "vf_coef": 2, "clip_range_value": 1e9}
CLIPPED = "token_loss = torch.max(-A * ratio, -A * ratio.clamp(1 - CLIP, {high})) + KL_COEF * kl"
BONUS = "0.4 * (entropy(tokens) * mask).sum() / mask.sum().clamp(min=1)"
NO_CUT = {"A =": "mask = mask & (tokens == EOS).any(1, True)\nA = advantages.unsqueeze(1)"}
# The run: its flags, and {how a line of the page begins: what stands there then}. Whole lines go: a
# mistake in one is seen by its value, in the run that has the page as it stands.
RUNS = {
    "ppo": (PPO | {"num_epochs": 2, "num_mini_batches": 4}, {}),
    "ppo_variant": (
        PPO | {"kl_estimator": "k3", "missing_eos_penalty": 0.75, "num_epochs": 3, "vf_coef": 0.5}
        | {"clip_range_value": 0.03, "entropy_coef": 0.4, "max_grad_norm": 0.8},
        {"kl =": "kl = (ref_logprobs - old_logprobs).exp() - 1 + old_logprobs - ref_logprobs\n"
         "kl = kl * mask",
         "for _ in": "for _ in range(3):",
         "for rows in": "for rows in torch.randperm(N * G).split(N * G // 2):",
         "vf =": "near = values.clamp(old_values[rows] - 0.03, old_values[rows] + 0.03)\n"
         "worse = torch.max((values - returns[rows]) ** 2, (near - returns[rows]) ** 2)\n"
         "vf = worse / 4",
         "loss =": "loss = (pg + vf - 0.4 * entropy(tokens[rows]))[mask[rows]].mean()"},
    ),
    "grpo": ({"num_epochs": 2, "num_mini_batches": 1}, {}),  # the second needs old log-probs
    "dr_grpo": (  # one epoch, so the minibatches alone need old log-probs
        {"loss_type": "dr_grpo", "scale_rewards": "none", "kl_estimator": "unbiased"}
        | {"entropy_coef": 0.4, "max_grad_norm": 0.8, "mask_truncated_completions": True},
        {"advantages =": "advantages = (groups - mean).flatten()", **NO_CUT,
         "token_loss =": f"{CLIPPED.format(high='1 + CLIP')} * ratio",
         "loss =": f"loss = (token_loss * mask).sum() / (len(A) * T) - {BONUS}"},
    ),
    "dapo": (  # minibatches of two rows: of one, rows 6 and 8, all rows are masked
        {"loss_type": "dapo", "clip_range_high": 0.08, "scale_rewards": "batch"}
        | {"mask_truncated_completions": True, "entropy_coef": 0.4, "num_mini_batches": 6},
        {"std, mean =": "std, mean = groups.std(), groups.mean(1, True)", **NO_CUT,
         "token_loss =": CLIPPED.format(high=1.08),
         "loss =": f"loss = (token_loss * mask).sum() / mask.sum().clamp(min=1) - {BONUS}"},
    ),
    "rloo": ({"max_grad_norm": 0.8}, {}),
}  # fmt: skip


class Job:
    """A run of a script: its metrics, the gradient of each update and the weights after it, and
    the names of its `main`.
    """

    def __init__(self, kind: str, make_job: Callable) -> None:
        self.kind, (changes, self.edits) = kind, RUNS[kind]
        self.script = {"ppo": ppo, "rloo": rloo}.get(kind.partition("_")[0], grpo)
        self.flags, self.run = FLAGS | changes, make_job(self.script)
        self.gradient, self.weights, self.names = [], [], {**vars(self.script)}
        loaded = copy.deepcopy(POLICY).train(), letter_tokenizer()

        def sample(*args, **options):
            torch.rand(1)  # other draws change no order of rows
            return SAMPLED

        def keep(optimizer, *_):
            parameters = optimizer.param_groups[0]["params"]
            self.gradient.append([p.grad.clone() for p in parameters])
            self.weights.append([p.detach().clone() for p in parameters])

        def keep_names():
            self.names.update(sys._getframe(1).f_locals)

        with after_each_update(keep), pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.script, "load_policy", lambda config: loaded)
            patch.setattr(self.script, "sample", sample)
            patch.setattr(self.script, "clear_cache", keep_names)
            patch.setattr("plumbing.run.draw_curves", lambda folders, path: None)  # half its time
            try:
                self.metrics = self.run(**self.flags)
            except Fault as e:
                text = f"{self.script.__name__}.py, run {kind!r}, has stopped: {e}"
                pytest.fail(text, pytrace=False)


class Page(dict):
    """The names of a job's page, which has run. Those that are given to it keep their values."""

    def __init__(self, job: Job) -> None:
        self.job, self.begun, self.updates = job, [], []
        self.assigned = set()
        policy = copy.deepcopy(POLICY).eval()
        policy.lm_head.register_forward_hook(lambda head, args, logits: logits / 3)
        models = SimpleNamespace(from_pretrained=lambda name, dtype: policy)
        tokenizers = SimpleNamespace(from_pretrained=lambda name: letter_tokenizer())
        self.given = CONSTANTS | {"AutoModelForCausalLM": models, "AutoTokenizer": tokenizers}
        self.given |= {"sample": self.sample}
        super().__init__(self.given, entropy=self.entropy)
        with before_each_update(self.before_update), after_each_update(self.after_update):
            exec(self.code(), self)

    def __setitem__(self, name: str, value: object) -> None:
        self.assigned.add(name)
        if name not in self.given:
            super().__setitem__(name, value)

    def code(self) -> CodeType:
        """The page as it stands; or with its other lines, and a loop over minibatches."""
        path = str(Path(__file__).parent.parent / f"one_page/{self.job.script.__name__}.py")
        if not self.job.edits:
            return SourceFileLoader("page", path).get_code("page")
        head, loop, text = Path(path).read_text(encoding="utf-8").partition("\nfor step in ")
        for start, other in self.job.edits.items():
            lines = [*re.finditer(rf"^( *){start} .*", text, re.MULTILINE)]
            assert len(lines) == 1, f"{path} has no line {start!r}"
            text = text.replace(lines[0][0], textwrap.indent(other, lines[0][1]))
        if self.job.script is not ppo:  # of that page the update is in minibatches as it stands
            text, update = re.split(r"^    for _ in .*\n", text, maxsplit=1, flags=re.MULTILINE)
            size = B // self.job.flags["num_mini_batches"]
            text += f"    for rows in torch.randperm(N * G).split({size}):\n"
            text += re.sub(
                r"\b(tokens|mask|A|advantages|\w+_logprobs)\b(?!\()", r"\1[rows]", update
            )
        return compile(head + loop + text, path, "exec")

    @torch.no_grad()
    def sample(self, games: list, greedy: bool = False) -> tuple:
        """SAMPLED. Keep what the models say of it, before each step and at the end."""
        penalty, optimizer = self.job.flags.get("missing_eos_penalty", 0), self["optimizer"]
        tokens, scores = TOKENS, SCORES - penalty * (ENDS > T)
        if not self.begun:
            torch.manual_seed(1)  # of the orders of rows
        if not self.begun and self.job.script is ppo:  # the head of its value model has a bias
            bias = self["value_model"].lm_head.bias = nn.Parameter(torch.zeros(1))
            optimizer.param_groups[0]["params"].append(bias)
        if self.job.script is not ppo:  # the rates of these pages don't fall
            optimizer.param_groups[0]["lr"] = 0.01 / (self["step"] + 1)
        old, ref = (self["completion_logprobs"](self[x], tokens) for x in ("policy", "ref_model"))
        kl = old - ref  # records and metrics have k1, unless a flag of PPO says k3
        kl = (-kl).exp() - 1 + kl if self.job.kind == "ppo_variant" else kl
        self.begun.append({"old_logprobs": old, "ref_logprobs": ref, "kl": kl, "score": scores})
        self.last_pass = self.last_pass if greedy else {}
        self["rows"] = torch.arange(B)  # of an update, if the page doesn't say which
        return tokens, MASK, [""], scores

    def entropy(self, tokens: Tensor) -> Tensor:
        log_p = self["policy"](tokens).logits[:, -T - 1 : -1].log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    def before_update(self, optimizer: torch.optim.Optimizer, *_) -> None:
        parameters = optimizer.param_groups[0]["params"]
        norm = nn.utils.clip_grad_norm_(parameters, self.job.flags["max_grad_norm"])
        gradient = [p.grad.clone() for p in parameters]
        self.updates.append({"gradient": gradient, "grad_norm": norm.view(1)} | self.metrics())

    def after_update(self, optimizer: torch.optim.Optimizer, *_) -> None:
        parameters, k = optimizer.param_groups[0]["params"], len(self.updates) - 1
        self.updates[k]["weights"] = [p.detach().clone() for p in parameters]
        assert k < len(self.job.weights), "the script makes fewer updates than its page"
        for p, x in zip(parameters, self.job.weights[k], strict=True):
            p.data.copy_(x)

    @torch.no_grad()
    def metrics(self) -> dict[str, Tensor]:
        """The numbers of an update whose means are metrics: of its tokens, or of its rows."""
        rows, flags = self["rows"], self.job.flags
        A, real, tokens = (self[name][rows] for name in ("advantages", "mask", "tokens"))
        old = self.begun[-1]["old_logprobs"][rows]
        d = self["completion_logprobs"](self["policy"], tokens) - old
        e = old - LOGPROBS[rows]
        found = {
            "policy/entropy_avg": self.entropy(tokens)[real],
            "val/sampler_kl": (e.exp() - 1 - e)[real],
        }
        if self.job.script is rloo:
            return found | {"loss/policy_avg": self["loss"].view(1)}
        ratio, A = self["ratio"], A.view(len(A), -1)  # GRPO has an advantage a row
        is_clipped = ratio.clamp(0.95, 1 + flags.get("clip_range_high", 0.05)) * A < ratio * A
        for name, x in (("ratio", ratio), ("clipped", 1.0 * is_clipped)):
            unknown = torch.full((B, T), torch.nan)
            self.last_pass.setdefault(name, unknown)[rows] = x.where(real, torch.nan)
        found |= {
            "policy/approxkl_avg": (d**2 / 2)[real],
            "policy/clipfrac_avg": 1.0 * is_clipped[real],
            "val/ratio": ratio[real],
        }
        if self.job.script is ppo:
            V, R = self["values"], self["returns"][rows]
            found["loss/policy_avg"] = self["pg"][real]
            found["loss/value_avg"] = self["vf"][real] / flags["vf_coef"]
            found["val/clipfrac_avg"] = 1.0 * ((self.get("near", V) - R) ** 2 > (V - R) ** 2)[real]
        else:  # a bonus is no part of the policy's loss
            bonus = flags.get("entropy_coef", 0) * found["policy/entropy_avg"].sum()
            found["loss/policy_avg"] = (self["loss"] + bonus / max(1, real.sum())).view(1)
        return found

    def mean(self, metric: str, step: int = 1) -> Tensor:
        """Of the updates of a step, by default the second."""
        half = len(self.updates) // 2
        return torch.cat([x[metric] for x in self.updates[half * step :][:half]]).mean()


@pytest.fixture(scope="module", params=RUNS)
def step(request, tmp_path_factory) -> tuple[Job, Page]:
    """A job, and its page."""
    make_job = job_maker(tmp_path_factory.mktemp("by-hand"))
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    job = Job(request.param, make_job)
    return job, Page(job)


def compared(job: Job, page: Page) -> Iterator[tuple]:
    """(Tensor, where, the script's numbers, the page's, tolerance), in the order of a step."""
    close = {"rtol": 6e-5, "atol": 1e-6}
    names = {"values": "old_values", "rewards": "rewards", "returns": "returns"}
    names = {"advantages": "advantages"} | (names if job.script is ppo else {})
    records = page.begun[1] | {name: page[x] for name, x in names.items()} | page.last_pass
    records["new_logprobs"] = page.begun[2]["old_logprobs"]
    text = (job.run.folder / "tokens.jsonl").read_text().replace("null", "NaN")
    lines = [json.loads(line) for line in text.splitlines()[8:]]  # a step has those of eight rows
    for name, theirs in records.items():
        for i, (line, row) in enumerate(zip(lines, theirs[:8], strict=True)):
            ours, n = torch.tensor(line[name]).view(-1), line["num_tokens"]
            yield name, f"completion {i}", ours, row.view(-1)[:n], close
    losses = {"loss": "loss/policy_avg", "entropy": "policy/entropy_avg"}
    losses |= {"value loss": "loss/value_avg"} if job.script is ppo else {}
    for (name, metric), k in itertools.product(losses.items(), (0, 1)):
        loss, theirs = torch.tensor([job.metrics[k][metric]]), page.mean(metric, k).view(1)
        yield name, f"its mean over the updates of step {k}", loss, theirs, close
    for name, error in (("gradient", 1e-12), ("weights", 1e-8)):
        for k, (update, of_script) in enumerate(zip(page.updates, getattr(job, name), strict=True)):
            for ours, theirs in zip(of_script, update[name], strict=True):
                yield name, f"update {k}", ours, theirs, {"rtol": 0, "atol": error}


def check(step: tuple[Job, Page], *wanted: str) -> None:
    """Fail if a wanted tensor differs, with a sentence about the first of all that do."""
    wrong = {}
    for name, where, ours, theirs, close in compared(*step):
        if not torch.allclose(ours, theirs, **close, equal_nan=True):
            k = (ours - theirs).abs().nan_to_num(torch.inf).argmax()
            x, y = (f"{x.flatten()[k]:.9g}" for x in (ours, theirs))
            wrong.setdefault(name, f"{name}, {where}: {x}, the page has {y}")
    if wrong.keys() & {*wanted}:
        run = f"{step[0].script.__name__}.py, run {step[0].kind!r}"
        pytest.fail(f"{run}. First to differ: {next(iter(wrong.values()))}", pytrace=False)


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
    names = "values rewards advantages returns ratio clipped new_logprobs"
    check(step, *step[1].begun[1], *names.split())


@pytest.mark.problem("grpo_loop", 1, "grpo")
@pytest.mark.problem("rloo_loop", 1, "rloo")
def test_the_loop_logs_the_metrics_of_its_page(step):
    check(step, "loss", "entropy")
    job, page = step
    now, logged, real = page.begun[1], job.metrics[1], MASK
    scores, kl = now["score"], now["kl"][real].sum()
    means = page.updates[0].keys() - {"gradient", "weights"}
    expected = {name: page.mean(name).item() for name in means} | {
        "objective/scores": scores.mean(),
        "objective/kl": kl / B,
        "objective/kl_token": kl / real.sum(),
        "objective/entropy": -LOGPROBS[MASK].mean(),
        "objective/non_score_reward": -0.3 * kl / B,
        "objective/rlhf_reward": scores.mean() - 0.3 * kl / B,
        "val/num_eos_tokens": (ENDS <= T).sum(),
        "length/mean": real.sum() / B,
        "length/max": T,
        "length/truncated_frac": (ENDS > T).double().mean(),
        "tokens_per_second": real.sum() / (logged["time/rollout"] + logged["time/update"]),
        "lr": 0.005,
        "episode": 2 * B,
    }
    if job.script is ppo:
        errors, returns = (page["returns"] - page["old_values"])[real], page["returns"][real]
        expected["val/explained_variance"] = 1 - errors.var() / returns.var()
    else:
        groups = scores.view(N, G)
        expected["reward/std_within_group"] = groups.std(1).mean()
        expected["reward/frac_flat_groups"] = 1 / N
    for name, value in expected.items():
        assert logged[name] == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    assert all("eval/reward" in line for line in job.metrics), "eval_every is 1"
    if job.script is rloo:
        return
    hint = "the old log-probs are not of the policy, temperature and forward of the first update?"
    assert logged["val/ratio_max_dev_first"] < 1e-10, hint
    assert 0.02 < expected["policy/clipfrac_avg"] < 0.98, "the clip acts"
    assert job.kind != "ppo_variant" or 0.05 < expected["val/clipfrac_avg"] < 0.95, "it acts"
    assert job.kind != "dapo" or not all(len(x["val/ratio"]) for x in page.updates), "all masked"


def kind(x: object) -> object:
    """What a name stands for; of a tensor its type and dimensions. A script cuts rows, so their
    number differs.
    """
    if isinstance(x, Tensor):
        return x.dtype, x.dim(), x.shape[1:]
    kinds = (nn.Module, torch.optim.Optimizer, Callable)
    return next((kind for kind in kinds if isinstance(x, kind)), type(x))


def test_a_name_is_the_same_on_page_and_script(step):
    job, page = step
    names = page.assigned & job.names.keys() - {"_"}
    ours, theirs = ({name: kind(x[name]) for name in names} for x in (job.names, page))
    assert {"advantages", "logprobs", "ref_logprobs", "scores"} < names and ours == theirs
