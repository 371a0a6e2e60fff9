"""What a page of one_page/ does besides its updates, which test_by_hand.py has: it makes games up,
samples, scores, prints, and ends with greedy answers. The steps of RLHF are in test_pipeline.py.
"""

import contextlib
import io
import random
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_each_update
from transformers import AutoModelForCausalLM

import tasks

REPOSITORY = Path(__file__).parent.parent
PAGES = {path.stem: path for path in sorted((REPOSITORY / "one_page").glob("*.py"))}
PROMPT = r"([1-5]):((?:(?:12|13|14|15|23|24|25|34|35|45),?){6})="
FEW = {"N": 3, "G": 4, "T": 7, "STEPS": 2}  # no two are equal, nor to the six swaps of a game
# The constants with which the pages were measured.
ALL = {"N": 32, "G": 8, "T": 16, "LEARNING_RATE": 1e-3}
OWN = {
    "rloo": ALL | {"STEPS": 30, "KL_COEF": 0.02},
    "grpo": ALL | {"STEPS": 25, "KL_COEF": 0.01, "CLIP": 0.2},
    "tool": ALL | {"STEPS": 12, "KL_COEF": 0.02},
    "ppo": ALL | {"STEPS": 18, "KL_COEF": 0.01, "CLIP": 0.2, "GAMMA": 1.0, "LAMBDA": 0.95},
}


class Page(dict):
    """The names of a page that has run as it stands, or as `text`; what it printed, its seed, and
    the values that it gave to names. Those that are given keep their values. `check` is called with
    the page before each update.
    """

    def __init__(
        self, name: str, text: str = "", check: Callable = lambda page: None, **given: object
    ) -> None:
        super().__init__(given)
        self.name, self.given, self.own = name, {*given}, {}
        code = text or SourceFileLoader(name, str(PAGES[name])).get_code(name)
        with (
            contextlib.redirect_stdout(printed := io.StringIO()),
            before_each_update(lambda *_: check(self)),
        ):
            exec(code, self)
        self.out, self.seed = printed.getvalue().splitlines(), torch.initial_seed()

    def __setitem__(self, name: str, value: object) -> None:
        self.own[name] = value
        if name not in self.given:
            super().__setitem__(name, value)
        if name == "logprobs" and value.requires_grad:
            value.retain_grad()


@pytest.fixture(scope="module", params=OWN)
def page(request) -> Page:
    """No test may change it."""
    torch.manual_seed(1)  # the page sets its own
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        return Page(request.param, **FEW)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_page_samples_from_its_policy_and_scores(page, greedy):
    eos, games = page["EOS"], [page["game"]() for _ in range(64)]
    torch.manual_seed(2)
    tokens, mask, texts, scores = page["sample"](games, greedy=greedy)
    torch.manual_seed(2)
    for t in range(20, 27):
        probs = page["policy"](tokens[:, :t]).logits[:, -1].softmax(-1)
        drawn = probs.argmax(1) if greedy else probs.multinomial(1).squeeze(1)
        ended = (tokens[:, 20:t] == eos).any(1)
        own = tokens[:, t - 1] != page.get("CALL", -1)  # what follows a call is the tool's
        assert tokens[own, t].equal(drawn.where(~ended, eos)[own]), f"token {t - 20}"
    lengths = [[*ids, eos].index(eos) + 1 for ids in tokens[:, 20:].tolist()]
    own = tokens[:, 19:-1] != page.get("CALL", -1)
    assert mask.equal(own & (torch.arange(7) < torch.tensor(lengths)[:, None]))
    assert greedy or {2, 8} <= {*lengths}, "some end, and some are cut"
    assert texts == page["tokenizer"].batch_decode(tokens[:, 20:], skip_special_tokens=True)
    assert scores.tolist() == [text.endswith(cups[-1]) for text, (_, cups) in zip(texts, games)]


def test_a_page_prints_its_steps_and_512_greedy_answers(page):
    games, texts, mask = (page[x] for x in ("games", "texts", "mask"))
    scores = page["right" if "right" in page else "scores"]  # the page of PPO has both
    random.seed(0)
    made_up = [page["game"]() for _ in range(3 + 3 + 512)]
    assert games == [g for g in made_up[3:6] for _ in range(4)], "four completions of each prompt"
    assert scores.equal(page["sample"](made_up[6:], greedy=True)[-1]), "they are greedy"
    right = sum(text.endswith(cups[-1]) for text, (_, cups) in zip(texts, games)) / 12
    figures = f"right {right:.2f} tokens {mask.sum() / 12:.1f}"
    if page.name == "ppo":
        figures += f" score {right:.2f} KL {page['kl'].sum() / 12:.2f}"
    assert page.out[1] == f"1 {figures} {games[0][0]} {games[0][1]} {texts[0]}"
    assert page.out[0].startswith("0 right ")
    assert page.out[2:] == [f"greedy: right {scores.mean():.3f}"]


def test_a_game_follows_the_ball_through_its_swaps(page):
    games = [page["game"]() for _ in range(512)]
    for prompt, cups in games:
        start, swaps = re.fullmatch(PROMPT, prompt).groups()
        assert "".join(tasks.cups_path(start, swaps.split(","))) == cups, prompt
    assert len({prompt[0] for prompt, _ in games}) == 5


def test_a_page_has_the_constants_that_were_measured(page):
    assert {x: page.own[x] for x in OWN[page.name]} == OWN[page.name] and page.seed == 0
    cups = AutoModelForCausalLM.from_pretrained(REPOSITORY / "tiny/cups")
    assert all(map(torch.equal, page["ref_model"].parameters(), cups.parameters()))
    assert not any(p.requires_grad for p in page["ref_model"].parameters())
    assert not all(map(torch.equal, page["policy"].parameters(), cups.parameters()))


@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_a_group_of_one_is_refused(name):
    with pytest.raises(AssertionError, match="compared with the others of its prompt"):
        Page(name, **FEW | {"G": 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_page_learns_the_cups(name):
    command = [sys.executable, f"one_page/{name}.py"]
    text = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True).stdout
    assert text.count("\n") == OWN[name]["STEPS"] + 1
    *_, sampled, greedy = [float(x) for x in re.findall(r"right ([\d.]+)", text)]
    assert sampled >= 0.9 and greedy >= 0.97
