"""RLHF on pages: sft.py, reward_model.py, ppo.py with `rlhf`, dpo.py and tool.py of one_page/.

Each gradient is compared with that of another's function: transformers' loss with labels, the
script's preference_loss, TRL's DPOTrainer.
"""

import ast
import contextlib
import copy
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from small import small_gpt2
from test_one_page import PAGES, REPOSITORY, Page
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from reward_model import preference_loss

P, T = 3, 5


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder to run pages in, without runs."""
    torch.manual_seed(1)  # a page sets its own
    shutil.copytree(REPOSITORY / "tiny" / "cups", tmp_path / "tiny" / "cups")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["page"])
    return tmp_path


def small_models(vocab_size: int = 20) -> SimpleNamespace:
    """In place of AutoModelForCausalLM: a small model in float64, whatever is to be loaded."""
    model = small_gpt2(vocab_size=vocab_size, n_layer=1).double().eval()
    return SimpleNamespace(from_pretrained=lambda path, dtype: model)


def sampled(games: list, greedy: bool = False) -> tuple:
    """In place of a page's `sample`: random answers, most of which end, with random scores."""
    generator = torch.Generator().manual_seed(len(games))
    lengths = torch.randint(1, T + 3, (len(games), 1), generator=generator)
    tokens = torch.randint(19, (len(games), P + T), generator=generator)
    tokens[:, P:][torch.arange(1, T + 1) >= lengths] = 19
    scores = torch.randint(2, (len(games),), generator=generator).float()
    return tokens, torch.arange(1, T + 1) <= lengths, [""] * len(games), scores


def assert_gradient(model: nn.Module, loss: Tensor, error: float = 1e-12) -> None:
    """The gradient that the page has left in a model must be that of another's loss."""
    theirs = torch.cat([x.flatten() for x in torch.autograd.grad(loss, [*model.parameters()])])
    ours = torch.cat([p.grad.flatten() for p in model.parameters()])
    difference, scale = ((ours - theirs).abs().max().item(), theirs.abs().max().item())
    assert scale > 1e-3 and difference <= error * scale


def own_tokens(page: Page, row: int) -> Tensor:
    """Prompt and answer of a row, without what stands behind its last token: (1, at most P + T)."""
    return page["tokens"][row : row + 1, : P + page["mask"][row].sum()]


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_sft_has_the_gradient_of_labels(pad, folder):
    tokenizer = AutoTokenizer.from_pretrained("tiny/cups")
    tokenizer.pad_token, eos = pad, tokenizer.eos_token_id

    def check(page: Page) -> None:
        rows = [torch.tensor(tokenizer(text).input_ids) for text in page["texts"]]
        assert {len(row) for row in rows} == {22, 33} and {int(row[-1]) for row in rows} == {eos}
        labels = [torch.cat([torch.full((20,), -100), row[20:]]) for row in rows]
        ids, labels = pad_sequence(rows, True), pad_sequence(labels, True, -100)
        loss = page["policy"](ids, labels=labels).loss  # by float32
        assert_gradient(page["policy"], loss, 1e-6)

    given = {"AutoModelForCausalLM": small_models(99), "B": 6, "T": 2, "STEPS": 2}
    tokenizers = SimpleNamespace(from_pretrained=lambda path: tokenizer)
    Page("sft", check=check, AutoTokenizer=tokenizers, **given)


def test_the_reward_page_has_the_loss_of_the_script(folder, request):
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)  # that of the new head

    def score(page: Page, row: int) -> Tensor:
        return page["judge"](own_tokens(page, row)).logits[0, -1, 0]

    def check(page: Page) -> None:
        r = [torch.stack([score(page, i) for i in page[x]]) for x in ("chosen", "rejected")]
        assert page["scores"][page["chosen"]].all() and not page["scores"][page["rejected"]].any()
        assert page["chosen"].sub(page["rejected"]).abs().eq(page["N"]).all(), "of one game"
        assert_gradient(page["judge"], preference_loss(*r).mean())

    (folder / "runs" / "page-sft").mkdir(parents=True)
    given = {"AutoModelForCausalLM": small_models(), "sample": sampled, "N": 600, "B": 16, "T": T}
    page = Page("reward_model", check=check, **given)
    assert not torch.isin(torch.cat(page["batches"], 1), page["heldout"]).any(), "new pairs are new"
    kept = torch.load("runs/page-judge.pt")
    assert all(map(torch.equal, kept.values(), page["judge"].state_dict().values()))


def by_hand(page: Page, reference: nn.Module) -> Tensor:
    """DPO's loss, row by row."""
    rewards = []
    for row in page["pairs"]:
        ids = own_tokens(page, row)
        log_p = [m(ids).logits[:, :-1].log_softmax(-1) for m in (page["policy"], reference)]
        log_p = [x.gather(2, ids[:, 1:, None])[:, P - 1 :].sum() for x in log_p]
        rewards.append(0.1 * (log_p[0] - log_p[1].detach()))
    chosen, rejected = torch.stack(rewards).view(2, -1)
    return (1 + (rejected - chosen).exp()).log().mean()


def trl(page: Page, reference: nn.Module) -> Tensor:
    """DPO's loss by TRL's trainer, for which there is a stand-in."""
    trainer = pytest.importorskip("trl").trainer
    off = "ld_alpha aux_loss_enabled precompute_ref_logps use_weighting".split()
    t = mock.MagicMock(**dict.fromkeys(off), ref_model=reference, beta=0.1, loss_weights=[1.0])
    t.loss_types, t.f_divergence_type, t._tp_size = ["sigmoid"], "reverse_kl", 1
    t.accelerator.gather = t.accelerator.gather_for_metrics = lambda x: x
    fields = "log_probs", "entropy", "mean_logits", "is_top1"
    tokens, mask = (page[name][page["pairs"]] for name in ("tokens", "mask"))
    inputs = {"input_ids": tokens, "completion_mask": nn.functional.pad(mask, (P, 0))}
    inputs["attention_mask"] = inputs["completion_mask"] | (torch.arange(P + T) < P)
    with contextlib.ExitStack() as stack:
        for model in (page["policy"], reference):
            stack.enter_context(mock.patch.object(model, "forward", model.forward))
            trainer.utils.add_fused_lm_head(model, outputs=fields)
        return trainer.dpo_trainer.DPOTrainer._compute_loss(t, page["policy"], inputs, False)


@pytest.mark.parametrize(
    "theirs, error", [(by_hand, 1e-12), pytest.param(trl, 1e-6, marks=pytest.mark.slow)]
)
def test_dpo_has_the_gradient_of_others(theirs, error, folder):
    models = small_models()
    reference, updates = copy.deepcopy(models.from_pretrained("", None)), []

    def check(page: Page) -> None:
        chosen, rejected = page["pairs"].view(2, -1)
        assert page["scores"][chosen].all() and not page["scores"][rejected].any()
        assert (chosen - rejected).abs().eq(page["N"]).all(), "of one game"
        updates.append(1)
        assert_gradient(page["policy"], theirs(page, reference), error)

    (folder / "runs" / "page-sft").mkdir(parents=True)
    given = {"AutoModelForCausalLM": models, "sample": sampled, "N": 40, "B": 8, "T": T}
    Page("dpo", check=check, LEARNING_RATE=0.1, **given)
    assert len(updates) > 1, "in the second the policy isn't the reference"


def test_what_the_tool_writes_has_no_gradient(folder):
    page = Page("tool", N=3, G=8, STEPS=2)
    tokens, mask, gradient = page["tokens"], page["mask"], page["logprobs"].grad
    written = tokens[:, -page["T"] - 1 : -1] == page["CALL"]  # the token before it is a call
    assert written.any() and not mask[written].any()
    assert gradient[~mask].eq(0).all() and page["kl"][~mask].eq(0).all()
    assert gradient[mask & (page["advantages"] != 0)[:, None]].ne(0).all()


@pytest.mark.parametrize("greedy", [False, True])
def test_the_tool_plays_the_swaps(greedy, folder):
    page = Page("tool", N=3, G=2, STEPS=1)
    games = [page["game"]() for _ in range(256)]
    _, _, texts, _ = page["sample"](games, greedy=greedy)
    for (_, cups), text in zip(games, texts):
        answers = re.findall(">(.)", text)
        assert answers == [*cups, *cups[-1] * 99][: len(answers)]


def definitions(name: str) -> dict[str, list[str]]:
    """{function of a page: its lines}"""
    text = PAGES[name].read_text(encoding="utf-8")
    functions = [x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)]
    return {x.name: text.splitlines()[x.lineno - 2 : x.end_lineno] for x in functions}


def test_what_pages_share_is_the_same_text():
    found = {name: definitions(name) for name in PAGES}
    lines = iter(found["tool"]["sample"])
    assert all(line in lines for line in found["rloo"]["sample"]), "the tool only adds lines"
    found["tool"]["sample"] = found["rloo"]["sample"]
    for functions in found.values():
        for name in functions.keys() & {"game", "sample", "completion_logprobs", "show"}:
            assert [x[name] for x in found.values() if name in x].count(functions[name]) > 1, name
            assert all(x.get(name, functions[name]) == functions[name] for x in found.values())
    loops = [PAGES[x].read_text(encoding="utf-8").partition("\nfor ")[2] for x in ("rloo", "tool")]
    assert loops[0] == loops[1]


@pytest.mark.parametrize("page", ["reward_model", "dpo", "ppo"])
def test_a_page_names_the_one_that_comes_first(page, folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["page", "rlhf"])
    with pytest.raises(SystemExit, match=r"python one_page/sft\.py"):
        Page(page)


def test_ppo_begins_with_what_people_taught(folder, monkeypatch):
    Page("sft", B=4, T=2, STEPS=1)
    judge = Page("reward_model", N=1200, T=4)["judge"]
    monkeypatch.setattr(sys, "argv", ["ppo.py", "rlhf", "0.125"])
    page = Page("ppo", N=2, G=4, T=4, STEPS=2)
    assert page["KL_COEF"] == 0.125
    taught = page["AutoModelForCausalLM"].from_pretrained("runs/page-sft").parameters()
    assert all(map(torch.equal, page["ref_model"].parameters(), taught))
    for tokens, mask, score in zip(page["tokens"], page["mask"], page["scores"]):
        alone = judge(tokens[None, : 20 + mask.sum()]).logits[0, -1, 0]
        assert score.item() == pytest.approx(alone.item(), abs=1e-5)
    said = f"score {page['scores'].mean():.2f} KL {page['kl'].sum(1).mean():.2f}"
    assert [line for line in page.out if said in line]


@pytest.mark.slow
def test_people_show_and_choose_and_ppo_learns(tmp_path):
    shutil.copytree(REPOSITORY / "tiny" / "cups", tmp_path / "tiny" / "cups")

    def run(command: str) -> str:
        name, *words = command.split()
        command = [sys.executable, str(PAGES[name]), *words]
        said = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
        return said.stdout

    run("sft")
    alike = float(re.search("both or none.* (.+)", run("reward_model"))[1])
    assert 0.3 <= alike <= 0.7
    sampled, greedy = re.findall(r"right ([\d.]+)", run("ppo rlhf"))[-2:]
    assert float(sampled) >= 0.9 and float(greedy) >= 0.97
