"""The page that tools/look.py makes of a run, in a browser too, and tokens.jsonl, its source."""

import importlib.util
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from base64 import b64encode
from functools import partial

import pytest
import torch
from small import lines_of
from test_parity import grpo_of_the_page
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import grpo
import ppo
import rloo
from plumbing.run import token_texts
from tools import look

WRITTEN_BY_MODELS = {  # and as the page shows it
    "</script><script>hacked = 1</script>": "</script><script>hacked␣=␣1</script>",
    "<img src=x onerror=hacked=1>": "<img␣src=x␣onerror=hacked=1>",
    "<!--": "<!--",
    " a\n": "␣a↵",
    "": "∅",
    "\u202e": "\\u202e",
    "&amp;": "&amp;",
}
LOSSES = ["GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "RLOO", "PPO", "SAPO"]
NUMBERS = ["old_logprobs", "new_logprobs", "advantages", "ratio", "clipped"]


@pytest.fixture
def folder(tmp_path):
    """Made up: at step 2 the first of three completions becomes more likely and the others less, at
    step 0 all become more likely, and at the last step little changes.
    """
    (folder := tmp_path / "ppo-made-up-s0").mkdir()
    texts, records = list(WRITTEN_BY_MODELS), []
    for step, completion in itertools.product((0, 2, 4), (0, 1, 2)):
        line = {"step": step, "tokens": texts, "num_tokens": 7, "finished": completion != 1}
        line |= {"prompt": f"<b>{completion // 2}</b>\n & 2", "completion_index": completion}
        line["score"] = [1.0, 0.0, None][completion]
        for n, name in enumerate(NUMBERS):
            line[name] = [0.25 * i + n + step - completion / 3 for i in range(7)]
        change = (-1 if completion and step else 1) * (0.01 if step == 4 else 0.5)
        line["new_logprobs"] = [x + change for x in line["old_logprobs"]]
        records.append(line)
    records[0]["new_logprobs"][0] = 50.0  # this one may not bleach the others
    write(folder / "config.json", [{"num_generations": 2, "max_new_tokens": 9}])
    write(folder / "metrics.jsonl", [{"step": 0, "objective/scores": 0.5}])
    write(folder / "tokens.jsonl", records)
    write(folder / "warnings.jsonl", [{"step": 2, "text": "80% of the completions were cut"}])
    return folder


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_page_holds_each_run_whole_and_its_curves(folder, monkeypatch, capsys):
    def draw(folders, file):
        getattr(file, "write", getattr(file, "write_bytes", None))(str(folders).encode())

    monkeypatch.setattr(look, "draw_curves", draw)
    shutil.copytree(folder, other := folder.parent / "other" / folder.name)
    lines = lines_of(folder / "tokens.jsonl")
    lines[0]["tokens"][0] = "half a pair: \ud83d"
    write(folder / "tokens.jsonl", lines)
    with (folder / "tokens.jsonl").open("ab") as file:  # the last line is being written
        file.write('{"step": 9, "split": "é'.encode()[:-1])
    (other / "look.html").symlink_to(other / "config.json")
    before = (other / "config.json").read_text()
    look.main([str(other), str(folder)])
    assert (other / "config.json").read_text() == before, "a link is replaced"
    assert capsys.readouterr().out == f"{other / 'look.html'}: open this in a browser\n"
    look.main([str(other), str(folder), "--output", str(folder / "both.png")])
    curves = (folder / "both.png").read_bytes()
    assert curves == str([other, folder]).encode()
    data = (other / "look.html").read_text().partition('type="application/json">')[2]
    data = json.loads(data.partition("</script>")[0])
    assert [run["name"] for run in data["runs"]] == [str(other), str(folder)]
    assert [run["lines"] for run in data["runs"]] == [lines_of(other / "tokens.jsonl"), lines]
    assert data["curves"] == f"data:image/png;base64,{b64encode(curves).decode()}"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert look.curves_of([folder]) is None, "matplotlib isn't there"


def test_the_page_is_written_without_torch(folder):
    """Which takes many seconds to load."""
    run = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv.pop(1), None, "
    command = [sys.executable, "-c", run + "'__main__')", look.__file__]
    for place, code, said in ((folder, 0, ""), (folder / "none", 2, "error: ")):
        done = subprocess.run([*command, place], capture_output=True, text=True)
        assert done.returncode == code and done.stderr.startswith(said), done.stderr
        assert done.stderr.count("\n") == (code > 0)
    assert (folder / "look.html").exists()


# --- In a browser ---

RIGHT, LEFT, CONTROL = "\ue014", "\ue012", "\ue009"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = not (CHROMIUM and DRIVER) and "PLAINRLHF_BROWSER" not in os.environ


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if MISSING:
        pytest.skip("needs chromium and chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = f"user-data-dir={tmp_path_factory.mktemp('profile')}"
    for flag in ("headless=new", "no-sandbox", "window-size=1280,1200", profile):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER)) as chromium:
        yield chromium


PICTURE = "data:image/gif;base64,R0lGODlhAQABAAAAACw="


@pytest.fixture
def opened(chromium, monkeypatch):
    """opened(folder): the Page of a run, with this picture as its curves."""
    monkeypatch.setattr(look, "curves_of", lambda folders: PICTURE)
    yield lambda folder: Page(chromium, folder)
    # The page allows itself no request: one would be an error in the log.
    assert chromium.get_log("browser") == []


class Page:
    def __init__(self, chromium, folder):
        look.main([str(folder)])
        chromium.get((folder / "look.html").as_uri())
        self.run = chromium.execute_script
        self.find = partial(chromium.find_element, "css selector")

    def texts(self, selector, what="textContent"):
        script = "return [...document.querySelectorAll(arguments[0])].map((x) => x[arguments[1]])"
        found = self.run(script, selector, what)
        return [x.replace("\N{MINUS SIGN}", "-") if isinstance(x, str) else x for x in found]

    def press(self, name):
        self.find("body").find_element("xpath", f"//button[.='{name}']").click()

    def put(self, **values):
        """Set controls of the page, as a hand would."""
        script = "for (const [id, value] of Object.entries(arguments[0])) {"
        script += "const x = document.getElementById(id); x.value = value;"
        script += "x.dispatchEvent(new Event(x.localName === 'select' ? 'change' : 'input')) }"
        self.run(script, values)


@pytest.mark.slow
def test_a_browser_shows_what_models_wrote_as_text(folder, opened):
    page = opened(folder)
    assert page.texts(".t")[:7] == list(WRITTEN_BY_MODELS.values())
    prompts = [f"<b>{n}</b>\n & 2" for n in (0, 1)]
    groups = ["sum of the group 0 · 67%", "1 of its 2 completions, sum of the group -3.5 · 33%"]
    assert page.texts(".prompt") == [x + y for x, y in zip(prompts, groups)]
    scores = page.texts("#runs div > small:not(.sum, .prompt small)")
    assert scores == ["score 1 ", "score 0, cut ", "no score "]
    warning = f"warning: {folder}, step 2: 80% of the completions were cut"
    assert page.texts("#warnings li") == [warning] and page.texts("#note", "open") == [True]
    found = page.run("return [window.hacked, document.images.length, document.scripts.length]")
    assert found == [None, 1, 2] and page.texts("#curves:not([hidden])", "src") == [PICTURE]


@pytest.mark.slow
def test_the_page_opens_where_the_update_pulled_both_ways(folder, opened):
    page = opened(folder)
    assert page.texts("[aria-pressed=true]") == ["log-prob change"]
    for key, step in zip(["", RIGHT, RIGHT, LEFT, CONTROL + RIGHT], [2, 4, 4, 2, 2]):
        page.find("body").send_keys(key)
        assert page.texts("#step") == [f"step {step}"], key
        strength = {2: "--a: 100%", 4: "--a: 2%"}[step]
        assert strength in page.texts(".t", "outerHTML")[0], "of the log-prob's change"
    for button, step in ("#forward", 4), ("#back", 2):
        page.find(button).click()
        assert page.texts("#step") == [f"step {step}"], button
    page.press("GRPO")
    page.find("#moved").send_keys(RIGHT)  # it moves the slider that has the focus alone
    assert page.texts(".loss output") == ["0.2", "0.1 times as far"]
    assert page.texts("#step") == ["step 2"]


@pytest.mark.slow
def test_a_clicked_token_shows_its_numbers(folder, opened):
    page = opened(folder)
    styles = page.texts(".t", "outerHTML")
    lines = [line for line in lines_of(folder / "tokens.jsonl") if line["step"] == 2]
    for n, (line, i) in enumerate(itertools.product(lines, range(7))):
        page.run("document.querySelectorAll('.t')[arguments[0]].click()", n)
        numbers = {name: line[name][i] for name in NUMBERS}
        numbers["change"] = numbers["new_logprobs"] - numbers["old_logprobs"]
        for name, number in numbers.items():
            (shown,) = page.texts(f"#inspector [data-key={name}]")
            assert float(shown) == pytest.approx(number, abs=1e-5), (n, name)
        assert f"var(--{'plus' if numbers['change'] > 0 else 'minus'})" in styles[n], n


SCALES = {  # of the made-up run: from, to, and the words
    "log-prob change": ("-0.5", "0.5", "log-prob change: Log-prob after"),
    "ratio": ("0.000058", "17000", "ratio: Probability at the last pass"),
    "log-prob": ("0", "-20", "log-prob: Before the update"),
    "value": ("0", "8.3", "value: What"),
    "reward": ("-4.3", "4.3", "reward: PPO"),  # signed, as some are below 0
    "GRPO": ("-0.034", "0.034", "GRPO pushes by A"),
}


@pytest.mark.slow
def test_scales_and_sums_are_those_of_their_numbers(folder, opened):
    lines = lines_of(folder / "tokens.jsonl")
    for line in lines:
        line["values"], line["rewards"] = line["ratio"], [x - 4 for x in line["ratio"]]
        line["ratio"] = [math.exp(3 * (x - 5)) for x in line["ratio"]]
        for name in ("old_logprobs", "new_logprobs"):
            line[name] = [x - 20 for x in line[name]]
    lines[0]["old_logprobs"][0] = None
    write(folder / "tokens.jsonl", lines)
    page = opened(folder)
    for name, (least, most, text) in SCALES.items():
        page.press(name)
        assert page.texts(".scale")[0].startswith(f"{least}\xa0{most} one scale"), name
        assert page.texts(".meaning")[0].startswith(text), name
    page.put(slider=0)
    # +-0.5 from the mean of two; the third completion's group has no other one.
    push = 0.5 / (0.5**0.5 + 1e-4) / (3 * 7)
    for moved, first in (0, push), (1, None):  # what isn't recorded is needed for the ratio
        page.put(moved=moved)
        found, classes = page.texts(".t", "number"), page.texts(".t", "className")
        assert found[0] == pytest.approx(first) and {*found[14:]} == {None}
        assert [x is None for x in found] == [" none" in x for x in classes]
        assert [x for x in classes if " none clipped" in x] == []
    page.put(moved=0, beside="RLOO")
    assert page.texts("h2") == [f"{folder} · {loss}" for loss in ("GRPO", "RLOO")]
    sums = ["+0.24 · 50%", "-0.24 · 50%", "no number"]
    assert page.texts(".sum") == [*sums, "+2.3 · 50%", "-2.3 · 50%", "no number"]
    are_orange = ["var(--minus)" in x for x in page.texts(".sum", "outerHTML")]
    assert are_orange == [False, True, False] * 2


@pytest.mark.slow
def test_a_kept_token_stays_while_the_mouse_moves_on(folder, opened, chromium):
    from selenium.webdriver import ActionChains

    page = opened(folder)
    page.press("GRPO")
    page.put(slider=0, beside="RLOO")
    page.run("document.querySelectorAll('.t')[1].click()")
    for selector, token, side in (
        (".t:nth-of-type(3)", 3, ""),
        ("section:last-child .t", 1, "left"),  # it may not lie on the token
        ("h1", 2, "left"),
    ):
        ActionChains(chromium).move_to_element(page.find(selector)).perform()
        assert page.texts("#inspector small") == [f" token {token} of 7"]
        assert page.texts("#inspector", "className") == [side]
        pushed = [x.split(",")[0] for x in page.texts("#inspector tr")]
        assert pushed[:2] == ["push by GRPO0.033667A 0.70701", "push by RLOO0.33333A 1"]
        kept = [i for i, x in enumerate(page.texts(".t", "className")) if " kept" in x]
        assert kept == [1, 22], "in both columns"
    page.put(epsilon=0)
    assert page.texts("#inspector small") == [" token 2 of 7"]
    page.put(slider=1)
    assert page.texts("#inspector", "hidden") == [True]


@pytest.mark.slow
@pytest.mark.parametrize("size, why", [(1, "each prompt has one completion"), (2, "PPO needs")])
def test_a_loss_without_its_numbers_is_grey(folder, size, why, opened):
    lines = lines_of(folder / "tokens.jsonl")
    for line in lines:
        line["advantages"] = line["advantages"] if size == 1 else 0.5
    write(folder / "tokens.jsonl", lines)
    write(folder / "config.json", [{"num_generations": size, "max_new_tokens": 9}])
    page, pressed = opened(folder), []
    assert page.texts("#pushes small")[-1].startswith(f"grey: {why}")
    grey = page.texts("#pushes :disabled")
    assert grey == ([x for x in LOSSES if x != "PPO"] if size == 1 else ["PPO"])
    for _ in range(9 - len(grey)):
        pressed += page.texts("[aria-pressed=true]")
        page.find("body").send_keys("q")
    assert pressed == ["log-prob change", *(x for x in LOSSES if x not in grey)]
    page.find(".t").click()
    scalars = [x for x in page.texts("#inspector tr") if x.endswith("of the completion")]
    assert scalars == ["advantages0.5of the completion"] * (size == 2)


# --- Losses ---


LENGTHS = torch.tensor([1, 7, 3, 5, 4, 6, 2, 4])
MASK = torch.arange(7) < LENGTHS[:, None]
SCORES = [[1, 0, 0.5, 0.5, 0, 1, 1, None], [0.3, 0.1, 0.7, 0.1, 0.1, 0.1, 0.1, None]]
CLIPPED = {
    "CISPO": {-1, 1},
    "SAPO": set(),
    "RLOO": set(),
}  # the signs of the pushes where a clip decides; else 0


def pushes_of(name, scores, logprobs, old, of_tokens, clip_range):
    """Minus the gradient of a loss by each log-prob, and where the clip decides."""
    A, options = grpo.group_advantages(scores, 4), {"clip_range": clip_range}
    logprobs = logprobs.clone().requires_grad_()
    if name == "RLOO":
        A = rloo.rloo_advantages(scores, 4)
        loss, clipped = rloo.rloo_loss(logprobs, A, MASK), torch.zeros(8, 7).bool()
    elif name == "PPO":
        loss, _, clipped = ppo.policy_loss(logprobs, old, of_tokens, clip_range)
        loss = loss[MASK].mean()
    else:
        options["loss_type"] = name.lower().replace(". ", "_")
        if name == "Dr. GRPO":
            A, options["max_new_tokens"] = grpo.group_advantages(scores, 4, "none"), 9
        if name == "DAPO":
            options["clip_range_high"] = 1.4 * clip_range
        script = grpo_of_the_page() if name == "SAPO" else grpo
        loss, _, clipped = script.grpo_loss(logprobs, old, A, MASK, **options)
    return -torch.autograd.grad(loss, logprobs)[0][MASK], (clipped & MASK)[MASK]


@pytest.mark.slow
def test_each_loss_pushes_by_minus_its_gradient(folder, opened):
    steps, lines, kinds = [], [], set()
    generator = torch.Generator().manual_seed(0)
    noise = partial(torch.randn, 8, 7, generator=generator, dtype=torch.float64)
    for step, scores in enumerate(SCORES):
        # Tokens and rows leave the clip range, on either side, and two go beyond exp(20).
        old = noise().abs() * -1.5
        new = old + 0.35 - 0.1 * torch.arange(8).view(-1, 1) + 0.3 * noise()
        new[[1, 6], LENGTHS[[1, 6]] - 1] += 9
        A = noise().round()
        if step == 1:  # the second group is flat, and left out of the update
            A[4:] = 0
        for i, T in enumerate(LENGTHS.tolist()):
            line = {"step": step, "prompt": f"{i // 4}", "completion_index": i, "score": scores[i]}
            line |= {"num_tokens": T, "finished": True, "tokens": ["a"] * T}
            line["old_logprobs"] = [None] * T if step == 1 and i >= 4 else old[i, :T].tolist()
            line["new_logprobs"], line["advantages"] = new[i, :T].tolist(), A[i, :T].tolist()
            lines.append(line)
        known = [math.nan if x is None else x for x in scores]
        steps.append((torch.tensor(known, dtype=torch.float64), old, new, A))
    write(folder / "tokens.jsonl", lines)
    write(folder / "config.json", [{"num_generations": 4, "max_new_tokens": 9}])
    page = opened(folder)
    for position, name in itertools.product((0, 1), LOSSES):
        scores, old, new, A = steps[position]
        page.put(slider=position)
        page.press(name)
        for moved, place in ((0, 8), (1, 4), (1, 8), (2.5, 4)):
            page.put(moved=moved, epsilon=place)
            clip_range = float(page.texts(".loss output")[0])
            logprobs = old + moved * (new - old)
            push, clipped = pushes_of(name, scores, logprobs, old, A, clip_range)
            found = torch.tensor(page.texts(".t", "number"), dtype=torch.float64)
            error = ((found - push).abs() / push.abs().clamp(min=1)).max()
            # The 1.05 in the page's SAPO has the precision of float32.
            assert error < (1e-6 if name == "SAPO" else 1e-12), (name, moved, clip_range)
            frames = [" clipped" in x for x in page.texts(".t", "className")]
            assert frames == clipped.tolist(), (name, moved, clip_range)
            kinds |= {(name, *x) for x in zip(frames, push.sign().tolist())}
    page.press("GRPO")
    page.put(slider=0, moved=0)
    assert "sum of the group 0 ·" in page.texts(".prompt")[0], "no number that rounding makes"
    wanted = {(name, False, sign) for name in LOSSES for sign in (-1, 0, 1)}
    assert kinds == wanted | {(x, True, sign) for x in LOSSES for sign in CLIPPED.get(x, {0})}


# --- tokens.jsonl ---


SHOWN = [(grpo, 4, range(20, 24)), (ppo, 1, range(16, 24)), (grpo, 12, range(8))]


@pytest.mark.parametrize("script, size, rows", SHOWN)
def test_recorded_is_the_first_group_whose_scores_differ(script, size, rows, make_job):
    job = make_job(script)
    reward = "def last(prompts, **columns): return [float(i == 22) for i in range(len(prompts))]"
    (job.folder.parent / "reward.py").write_text(reward)
    flags = {"reward": f"{job.folder.parent}/reward.py:last", "rollout_batch_size": 12}
    job(completions=24, num_generations=size, **flags)
    samples = [x for x in lines_of(job.folder / "samples.jsonl") if x["split"] == "train"]
    for line, i in zip(lines_of(job.folder / "tokens.jsonl"), rows, strict=True):
        assert line["completion_index"] == i
        assert (line["prompt"], line["score"]) == (samples[i]["prompt"], samples[i]["score"])


@pytest.mark.parametrize("script", [grpo, rloo])
def test_recording_changes_nothing_of_a_run(script, make_job):
    job, found = make_job(script), []
    (job.folder.parent / "reward.py").write_text(
        "def some(prompts, completions):\n"
        "    both = zip(prompts, completions)\n"
        "    return [None if 'o' in c else len(p) % 2 * sum(map(ord, c)) % 7 for p, c in both]\n"
    )
    flags = {"reward": f"{job.folder.parent}/reward.py:some", "kl_coef": 0, "num_steps": 2}
    for often in (99, 1):
        job(disable_dropout=False, eval_every=often, **flags)
        lines = lines_of(job.folder / "tokens.jsonl")
        assert {line["step"] for line in lines} == ({0, 1} if often == 1 else {0})
        found.append((job.folder / "model" / "model.safetensors").read_bytes())
    assert found[0] == found[1]
    for line in lines:
        assert "kl" not in line and (line["score"] is None) == ("o" in line["tokens"])
        assert ("ratio" in line) == (script is grpo) and None not in line.get("ratio", []), line
    assert {line["score"] is None for line in lines} == {True, False}


def test_the_text_of_a_token_keeps_its_space():
    vocab = {"<s>": 0, "▁the": 1, "▁cat": 2, "s": 3, "<0xC3>": 4, "<0xA9>": 5}  # as in Llama 2
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<s>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    assert token_texts(tokenizer, [1, 2, 3, 1]) == [" cat", "s", " the"]
    half = "\N{REPLACEMENT CHARACTER}"
    assert token_texts(tokenizer, [1, 4, 5, 2]) == [half, half, " cat"]
