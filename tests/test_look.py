"""The page that tools/look.py makes of a run, in a browser too, and tokens.jsonl, its source."""

import itertools
import json
import os
import shutil
from base64 import b64encode

import pytest
from small import lines_of
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
NUMBERS = ["old_logprobs", "new_logprobs", "advantages", "ratio", "clipped"]


@pytest.fixture
def folder(tmp_path):
    """Made up: the first of three completions becomes likelier, hardly so at the last step."""
    (folder := tmp_path / "ppo-made-up-s0").mkdir()
    texts, records = list(WRITTEN_BY_MODELS), []
    for step, completion in itertools.product((0, 2, 4), (0, 1, 2)):
        line = {"step": step, "tokens": texts, "num_tokens": 7, "finished": completion != 1}
        line |= {"prompt": f"<b>{completion // 2}</b>\n & 2", "score": [1.0, 0.0, None][completion]}
        for n, name in enumerate(NUMBERS):
            line[name] = [0.25 * i + n + step - completion / 3 for i in range(len(texts))]
        change = (-1 if completion else 1) * (0.01 if step == 4 else 0.5)
        line["new_logprobs"] = [x + change for x in line["old_logprobs"]]
        records.append(line)
    records[0]["new_logprobs"][0] = 50.0  # this one may not bleach the others
    write(folder / "metrics.jsonl", [{"step": 0, "objective/scores": 0.5}])
    write(folder / "tokens.jsonl", records)
    write(folder / "warnings.jsonl", [{"step": 2, "text": "80% of the completions were cut"}])
    return folder


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def shown(*folders):
    """What the page of these runs has as data."""
    look.main([*map(str, folders), "--out", str(folders[0] / "page.html")])
    html = (folders[0] / "page.html").read_text()
    data = html.partition('<script id="data" type="application/json">')[2]
    return json.loads(data.partition("</script>")[0])


def test_runs_are_told_apart_their_curves_are_there_and_half_a_line_is_left_out(
    folder, monkeypatch
):
    monkeypatch.setattr(look, "draw_curves", lambda folders, file: file.write(b"curves"))
    shutil.copytree(folder, other := folder.parent / "other" / folder.name)
    lines = lines_of(folder / "tokens.jsonl")
    lines[0]["tokens"][0] = "half a pair: \ud83d"
    write(folder / "tokens.jsonl", lines)
    with (folder / "tokens.jsonl").open("ab") as file:
        file.write('{"step": 9, "split": "é'.encode()[:-1])
    data = shown(other, folder)
    assert [run["name"] for run in data["runs"]] == [str(other), str(folder)]
    assert [run["lines"] for run in data["runs"]] == [lines_of(other / "tokens.jsonl"), lines]
    assert data["curves"] == f"data:image/png;base64,{b64encode(b'curves').decode()}"


RIGHT, LEFT = "\ue014", "\ue012"  # the arrow keys
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = not (CHROMIUM and DRIVER) and "PLAINRLHF_BROWSER" not in os.environ


@pytest.mark.skipif(MISSING, reason="needs chromium and chromedriver")
def test_in_a_browser_the_last_colours_come_first_numbers_are_right_and_text_stays_text(folder):
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("headless=new", "no-sandbox", f"user-data-dir={folder / 'profile'}"):
        options.add_argument(f"--{flag}")
    options.add_argument("--window-size=1280,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    [run] = shown(folder)["runs"]
    with webdriver.Chrome(options=options, service=service) as chromium:
        chromium.get((folder / "page.html").as_uri())
        script = "return [...document.querySelectorAll(arguments[0])].map((x) => x.textContent)"
        keys = chromium.find_element("css selector", "body").send_keys
        assert chromium.execute_script(script, "[aria-pressed=true]") == ["log-prob change"]
        for key, step in zip(["", RIGHT, RIGHT, LEFT], [2, 4, 4, 2]):
            keys(key)
            assert chromium.execute_script(script, "#step") == [f"step {step}"]
        assert chromium.execute_script(script, ".t")[:7] == list(WRITTEN_BY_MODELS.values())
        assert chromium.execute_script(script, ".prompt") == [f"<b>{n}</b>\n & 2" for n in (0, 1)]
        scores = chromium.execute_script(script, "#runs small")
        assert scores == ["score 1 ", "score 0, cut ", "no score "]
        assert "80% of the completions" in chromium.execute_script(script, "#warnings li")[0]
        chips = chromium.find_elements("css selector", ".t")
        places = [(line, i) for line in run["lines"] if line["step"] == 2 for i in range(7)]
        for chip, (line, i) in zip(chips, places, strict=True):
            chip.click()
            pairs = zip(line["old_logprobs"], line["new_logprobs"])
            line["change"] = [after - before for before, after in pairs]
            for name in [*NUMBERS, "change"]:
                (text,) = chromium.execute_script(script, f"#inspector [data-key={name}]")
                assert float(text) == pytest.approx(line[name][i], abs=1e-5)
            colour = "plus" if line["change"][i] > 0 else "minus"
            assert f"var(--{colour})" in chip.get_attribute("style")
        found = "return [window.hacked, document.images.length, document.scripts.length]"
        assert chromium.execute_script(found) == [None, 1, 2]
        # The page allows itself no request: one would be an error in the log.
        assert chromium.get_log("browser") == []


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
def test_what_is_not_known_is_null_and_recording_changes_nothing_of_a_run(script, make_job):
    job, found = make_job(script), []
    (job.folder.parent / "reward.py").write_text(
        "def some(prompts, completions):\n"
        "    both = zip(prompts, completions)\n"
        "    return [None if 'a' in c else len(p) % 2 * sum(map(ord, c)) % 7 for p, c in both]\n"
    )
    flags = {"reward": f"{job.folder.parent}/reward.py:some", "kl_coef": 0, "num_steps": 2}
    for often in (99, 1):
        job(disable_dropout=False, eval_every=often, **flags)
        lines = lines_of(job.folder / "tokens.jsonl")
        assert {line["step"] for line in lines} == ({0, 1} if often == 1 else {0})
        found.append((job.folder / "model" / "model.safetensors").read_bytes())
    assert found[0] == found[1]
    for line in lines:
        assert "kl" not in line and (line["score"] is None) == ("a" in line["tokens"])
        ratios = line["ratio"] if isinstance(line["ratio"], list) else [line["ratio"]]
        assert {x is None for x in ratios} == {line["advantages"] == 0}, line
    for unknown in ("score", "ratio"):
        assert {line[unknown] in (None, [None] * line["num_tokens"]) for line in lines} == {0, 1}


def test_the_text_of_a_token_keeps_its_space_and_its_half_of_a_character():
    vocab = {"<s>": 0, "▁the": 1, "▁cat": 2, "s": 3, "<0xC3>": 4, "<0xA9>": 5}  # as in Llama 2
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<s>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    assert token_texts(tokenizer, [1, 2, 3, 1]) == [" cat", "s", " the"]
    texts = token_texts(tokenizer, [1, 4, 5, 2])
    assert texts[0] == "\N{REPLACEMENT CHARACTER}" and texts[2:] == [" cat"]
