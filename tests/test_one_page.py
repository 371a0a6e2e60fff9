"""The pages of one_page/ make the scripts' updates: from the same tokens, the same weights.

A page runs as it stands, but in float64 and with other constants. It is told what it draws.
"""

import contextlib
import copy
import io
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import common
import forward
import grpo
import ppo
import rloo
import sampling
import tasks

REPOSITORY = Path(__file__).parent.parent
# Three groups: all wrong; ragged; one row is cut at T = 6. c is the ball's cup, w another one.
TEXTS = "w >w w>w >w w c >c>c>w >w>c >>w >w>w>c c w".split()
PROMPT = r"([1-5]):((?:(?:12|13|14|15|23|24|25|34|35|45),?){6})="
GIVEN = {"N": 3, "G": 4, "T": 6, "STEPS": 2, "LEARNING_RATE": 0.01, "KL_COEF": 0.3}
GIVEN |= {"CLIP": 0.02, "GAMMA": 0.9, "LAMBDA": 0.8}
# The constants with which the pages were measured.
ALL = {"N": 32, "G": 8, "T": 16, "LEARNING_RATE": 1e-3}
OWN = {
    "rloo": ALL | {"STEPS": 30, "KL_COEF": 0.02},
    "grpo": ALL | {"STEPS": 25, "KL_COEF": 0.01, "CLIP": 0.2},
    "ppo": ALL | {"STEPS": 18, "KL_COEF": 0.01, "CLIP": 0.2, "GAMMA": 1.0, "LAMBDA": 0.95},
}


class Names(dict):
    """The names of a page while it runs. Those in GIVEN keep their values."""

    def __init__(self, page: dict) -> None:
        self.page, self.own = page, {}

    def __setitem__(self, name: str, value: object) -> None:
        self.own[name] = value
        if name not in GIVEN:
            self.page[name] = value

    def __missing__(self, name: str) -> object:
        return self.page[name]


def losses(name: str, rollout: common.Rollout, scores: torch.Tensor, models: list):
    """The losses of a step, each made after the step before it, by the functions of the script."""
    mask, (policy, ref, *critic) = rollout.completion_mask, models
    logprobs = lambda model, rows: forward.completion_logprobs(model, rows, 1.0)[0]  # noqa: E731
    old, ref = logprobs(policy, rollout).detach(), logprobs(ref, rollout)
    kl = common.kl_estimate(old, ref, "k1")
    if name == "rloo":
        A = rloo.rloo_advantages(scores - 0.3 * kl.sum(1), 4)
        yield rloo.rloo_loss(logprobs(policy, rollout), old, A, mask, clip_range=0.02)[0]
    for _ in range(2 if name == "grpo" else 0):
        A, options = grpo.group_advantages(scores, 4), {"ref_logprobs": ref, "kl_coef": 0.3}
        new = logprobs(policy, rollout)
        yield grpo.grpo_loss(new, old, A, mask, clip_range=0.02, **options)[0]
    if name == "ppo":
        value = forward.ValueModel(critic[0].base_model, 64)
        value.head.weight = critic[0].lm_head.weight
        V = forward.completion_values(value, rollout).detach()
        A, R = common.gae(ppo.shape_rewards(scores, kl, mask, 0.3), V, mask, 0.9, 0.8)
        A = common.masked_whiten(A, mask)
        for i in 2 * torch.arange(12).flip(0).split(3):
            pg = ppo.policy_loss(logprobs(policy, rollout[i]), old[i], A[i], 0.02)[0]
            vf = ppo.value_loss(forward.completion_values(value, rollout[i]), V[i], R[i], torch.inf)
            yield (pg + 2 * vf[0])[mask[i]].mean()


def filled_in(games: list) -> list[str]:
    """The texts of a step's rows: row i belongs to group i % 3."""
    texts = [TEXTS[4 * (i % 3) + i // 3] for i in range(12)]
    return [x.replace("c", c).replace("w", "12"[c == "1"]) for x, (_, c) in zip(texts, games)]


@pytest.fixture(scope="module", params=OWN)
def ran(request) -> SimpleNamespace:
    """A page that has run: its names, its models as loaded, the tokens and games of its steps, the
    probabilities from which it drew, its seed and what it printed. No test may change them.
    """
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    page, models, steps, probs = {**GIVEN}, [], [], []
    torch.manual_seed(1)  # the page sets its own

    def from_pretrained(*args, load=AutoModelForCausalLM.from_pretrained, **options):
        assert (args, options) == (("tiny/cups",), {"dtype": torch.float32})
        return load(*args, **options).double()

    def adam(weights, betas, lr=1):  # SGD, for Adam wouldn't see a wrong factor
        assert betas == (0.9, 0.95)
        named = [page[x] for x in ("policy", "reference", "critic") if x in page]
        models.extend(copy.deepcopy(named))
        return torch.optim.SGD(weights, lr)

    def multinomial(given, count):  # 33333 is junk after the end
        if len(probs) % 6 == 0:
            texts = zip(page["games"], filled_in(page["games"]))
            rows = page["tokenizer"]([prompt + x + "<eos>33333" for (prompt, _), x in texts])
            rows = torch.tensor([row[:26] for row in rows.input_ids])
            steps.append((page["games"], rows))
        probs.append(given)
        return steps[-1][1][:, 19 + len(probs) - 6 * (len(steps) - 1), None].clone()

    file = str(REPOSITORY / "one_page" / f"{request.param}.py")
    code = SourceFileLoader(request.param, file).get_code(request.param)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(REPOSITORY)
        patch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
        patch.setattr(torch.optim, "Adam", adam)
        patch.setattr(torch, "multinomial", multinomial)
        patch.setattr(torch, "randperm", lambda n: torch.arange(n).flip(0))
        exec(code, page, names := Names(page))
    out, seed = printed.getvalue().splitlines(), torch.initial_seed()
    found = {"name": request.param, "page": page, "own": names.own, "models": models, "out": out}
    return SimpleNamespace(**found, steps=steps, probs=probs, seed=seed)


def test_a_page_makes_the_updates_of_its_script(ran):
    models = copy.deepcopy(ran.models)
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    optimizer, probs, before = torch.optim.SGD(trained, lr=1), iter(ran.probs), trained[0].clone()
    for step, (games, rows) in enumerate(ran.steps):
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1 if ran.name == "ppo" else 1)
        texts = filled_in(games)
        mask = torch.arange(6) <= torch.tensor([[len(text)] for text in texts])
        for t in range(6):  # what stands behind the end is drawn from EOS
            mask_of_read = torch.cat([mask.new_ones(12, 20), mask[:, :t]], 1)
            read = rows[:, : 20 + t].where(mask_of_read, ran.page["EOS"])
            expected = models[0](read).logits[:, -1].softmax(-1)
            torch.testing.assert_close(next(probs), expected, rtol=0, atol=1e-12)
        seen = torch.cat([mask.new_ones(12, 20), mask], 1)
        rollout = common.Rollout(rows, seen, mask, mask, mask[:, 0])
        scores = torch.tensor([float(text[-1] == cup) for text, (_, cup) in zip(texts, games)])
        if ran.name == "ppo":
            i = torch.arange(12)
        else:
            i = torch.arange(12).view(4, 3).T.flatten()  # the scripts' groups are consecutive
        for loss in losses(ran.name, rollout[i], scores[i], models):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        figures = f"right {scores.mean():.2f} tokens {mask.sum() / 12:.1f}"
        assert ran.out[step] == f"{step} {figures} {games[0][0]} {games[0][1]} {texts[0]}"
    assert len(ran.steps) == 2 and not before.equal(trained[0])
    found = [ran.page[x] for x in ("policy", "reference", "critic") if x in ran.page]
    for model, expected in zip(found, models, strict=True):
        pairs = [list(x.parameters()) for x in (model, expected)]
        torch.testing.assert_close(*pairs, rtol=0, atol=1e-12)


def test_a_page_ends_with_greedy_answers_to_512_games(ran):
    page, scores = ran.page, ran.page["scores"]
    assert ran.out[2:] == [f"greedy: right {scores.mean():.3f}"] and len(scores) == 512
    games = [page["game"]() for _ in range(512)]
    for prompt, cup in games:
        start, swaps = re.fullmatch(PROMPT, prompt).groups()
        assert tasks.cups_path(start, swaps.split(","))[-1] == cup
    assert len({prompt[0] for prompt, _ in games}) == 5
    ids = page["tokenizer"]([prompt for prompt, _ in games], return_tensors="pt").input_ids
    options = {"eos_token_ids": [page["EOS"]], "pad_token_id": page["EOS"], "top_k": 1}
    expected = sampling.generate(page["policy"], ids, ids > -1, max_new_tokens=6, **options)
    tokens, _, texts, scores = page["rollout"](games, greedy=True)
    width = expected.tokens.shape[1]
    assert tokens[:, :width].equal(expected.tokens) and (tokens[:, width:] == page["EOS"]).all()
    assert texts == page["tokenizer"].batch_decode(tokens[:, 20:], skip_special_tokens=True)
    assert scores.tolist() == [x.endswith(cup) for x, (_, cup) in zip(texts, games)]


def test_a_page_has_the_constants_that_were_measured(ran):
    assert {name: ran.own[name] for name in GIVEN if name in ran.own} == OWN[ran.name]
    assert ran.seed == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_page_learns_the_cups(name):
    command = [sys.executable, f"one_page/{name}.py"]
    text = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True).stdout
    assert text.count("\n") == OWN[name]["STEPS"] + 1
    *_, sampled, greedy = [float(x) for x in re.findall(r"right ([\d.]+)", text)]
    assert sampled >= 0.9 and greedy >= 0.97
