"""The page that tools/look.py makes of a run, in a browser too, and tokens.jsonl, its source."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import grpo
import ppo
import rloo
from plumbing import tokens
from plumbing.errors import InputError
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
    """A run of four steps, made up; two completions are recorded at steps 0 and 2."""
    (folder := tmp_path / "ppo-made-up-s0").mkdir()
    texts, records = list(WRITTEN_BY_MODELS), []
    metrics = [{"step": step, "objective/scores": step / 10} for step in range(5)]
    for step, completion in ((0, 0), (0, 1), (2, 0), (2, 1)):
        line = {"step": step, "split": "train", "completion_index": completion, "tokens": texts}
        line |= {"prompt": "<b>1</b>\n & 2", "score": 1.0, "finished": True}
        line |= {"num_tokens": len(texts)}
        for n, name in enumerate(NUMBERS):
            line[name] = [0.25 * i + n + step - completion / 3 for i in range(len(texts))]
        records.append(line)
    records[0]["ratio"] = [None] * len(texts)
    write(folder / "metrics.jsonl", metrics)
    write(folder / "tokens.jsonl", records)
    write(folder / "warnings.jsonl", [{"step": 2, "text": "80% of the completions were cut"}])
    return folder


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def shown(monkeypatch, *folders, curves=None):
    """What the page of these runs has as data."""
    monkeypatch.setattr(look, "curves_of", lambda folders: curves)
    look.main([str(folder) for folder in folders])
    html = (folders[0] / "look.html").read_text()
    data = html.partition('<script id="data" type="application/json">')[2]
    return json.loads(data.partition("</script>")[0])["runs"]


def test_what_models_wrote_comes_through_what_is_no_number_is_null_half_a_line_is_left_out(
    folder, monkeypatch
):
    lines = [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]
    lines[0]["kl"] = [float("nan"), float("-inf"), 1]
    write(folder / "tokens.jsonl", lines)
    with (folder / "tokens.jsonl").open("ab") as file:
        file.write('{"step": 9, "split": "é'.encode()[:-1])
    (run,) = shown(monkeypatch, folder)
    assert run["lines"] == [lines[0] | {"kl": [None, None, 1]}, *lines[1:]]


@pytest.mark.draws
def test_runs_are_told_apart_and_their_curves_are_in_the_page(folder):
    (other := folder.parent / "other" / folder.name).mkdir(parents=True)
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    look.main([str(other), str(folder), "--out", str(folder / "both.html")])
    html = (folder / "both.html").read_text()
    assert re.findall(r'"name":"([^"]+)"', html) == [str(other), str(folder)]
    assert '"curves":"data:image/png;base64,' in html


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("warnings.jsonl", "{}\n", "warnings.jsonl: can't be read (line 1 lacks something)"),
        ("tokens.jsonl", "", "tokens.jsonl: holds no completions, or none yet"),
        ("tokens.jsonl", "{\n", "tokens.jsonl: can't be read"),
        ("tokens.jsonl", '{"step": 1}\n', "tokens.jsonl: can't be read (line 1 lacks something)"),
    ],
)
def test_what_is_no_run_is_said_in_one_line(name, text, message, folder):
    (folder / name).write_text(text)
    with pytest.raises(InputError, match=re.escape(message)) as error:
        look.main([str(folder)])
    assert "\n" not in str(error.value) and not (folder / "look.html").exists()
    assert str(error.value).count(str(folder)) == 1, "one error, not one inside another"


@pytest.mark.slow
def test_in_a_browser_keys_change_the_step_numbers_are_the_file_s_and_text_stays_text(
    folder, chromium, monkeypatch
):
    for log in ("browser", "performance"):
        chromium.get_log(log)
    pixel = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
    (run,) = shown(monkeypatch, folder, curves=pixel)
    chromium.get((folder / "look.html").as_uri())
    script = "return [...document.querySelectorAll(arguments[0])].map((x) => x.textContent)"
    keys = chromium.find_element("css selector", "body").send_keys
    assert chromium.execute_script(script, "#step") == ["step 0"]
    keys("\ue014")  # the right arrow
    assert chromium.execute_script(script, "#step") == ["step 2"], "the next one that is recorded"
    assert chromium.execute_script(script, ".t")[:7] == list(WRITTEN_BY_MODELS.values())
    assert chromium.execute_script(script, ".prompt") == ["<b>1</b>\n & 2"]
    assert "80% of the completions" in chromium.execute_script(script, "#warnings li")[0]
    chips = chromium.find_elements("css selector", ".t")
    lines = [line for line in run["lines"] if line["step"] == 2]
    assert len(chips) == 14
    for chip, (line, i) in zip(chips, [(line, i) for line in lines for i in range(7)]):
        chip.click()
        for name in NUMBERS:
            (text,) = chromium.execute_script(script, f"#inspector [data-key={name}]")
            assert float(text) == line[name][i]
    meanings = set()
    for _ in range(4):
        keys("q")
        meanings.update(chromium.execute_script(script, "#meaning"))
    assert len(meanings) == 4, "advantage, change, ratio, log-prob: each says what it is"
    found = "return [window.hacked, document.images.length, document.scripts.length]"
    assert chromium.execute_script(found) == [None, 1, 2]
    events = [json.loads(x["message"])["message"] for x in chromium.get_log("performance")]
    asked = {x["params"]["request"]["url"] for x in events if x["method"].endswith("WillBeSent")}
    assert asked and all(re.match(r"file:|data:", url) for url in asked), asked
    assert chromium.get_log("browser") == []


# --- tokens.jsonl ---


PAGE = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
SCRIPTS = [grpo, *(pytest.param(x, marks=pytest.mark.slow) for x in (rloo, ppo))]


def recorded(job, **flags):
    """The lines of tokens.jsonl of a run that records at every step."""
    job(**{"eval_every": 1} | flags)
    lines = [json.loads(x) for x in (job.folder / "tokens.jsonl").read_text().splitlines()]
    page = PAGE.partition("## tokens.jsonl")[2]
    assert all(f"`{key}`" in page for line in lines for key in line)
    return lines


def test_recording_changes_nothing_of_a_run_even_with_dropout(make_job):
    job, found = make_job(grpo), []
    for often in (1, 99):
        recorded(job, num_steps=3, eval_every=often, disable_dropout=False)
        found.append([x.read_bytes() for x in sorted(job.folder.glob("model/*.safetensors"))])
    assert found[0] == found[1] != []


@pytest.mark.parametrize("script", SCRIPTS[:2], ids=lambda x: x.__name__)
def test_what_is_not_known_is_null(script, make_job, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def some(prompts, completions):\n"
        "    both = zip(prompts, completions)\n"
        "    return [None if 'a' in c else len(p) % 2 * sum(map(ord, c)) % 7 for p, c in both]\n"
    )
    lines = recorded(make_job(script), reward=f"{tmp_path}/reward.py:some", kl_coef=0)
    for line in lines:
        assert "kl" not in line and (line["score"] is None) == ("a" in line["tokens"])
        ratios = line["ratio"] if isinstance(line["ratio"], list) else [line["ratio"]]
        assert {x is None for x in ratios} == {line["advantages"] == 0}, line
    for unknown in ("score", "ratio"):
        assert {line[unknown] in (None, [None] * line["num_tokens"]) for line in lines} == {0, 1}


def test_the_file_keeps_its_bound_and_each_step_has_a_completion(make_job, monkeypatch):
    monkeypatch.setattr(tokens, "MOST_TOKENS", 60)
    lines = recorded(make_job(ppo), num_steps=6)
    assert {line["step"] for line in lines} == set(range(6))
    for step in range(6):
        shown = [line for line in lines if line["step"] == step]
        assert sum(len(line["tokens"]) for line in shown) == 10
        assert all(len(line["tokens"]) == line["num_tokens"] for line in shown[:-1])
        assert len(shown[-1]["ratio"]) == len(shown[-1]["tokens"])


def test_the_text_of_a_token_keeps_its_space_and_its_half_of_a_character():
    vocab = {"<s>": 0, "▁the": 1, "▁cat": 2, "s": 3, "<0xC3>": 4, "<0xA9>": 5}  # as in Llama 2
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<s>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    assert tokens.token_texts(tokenizer, [1, 2, 3, 1]) == [" cat", "s", " the"]
    texts = tokens.token_texts(tokenizer, [1, 4, 5, 2])
    assert texts[0] == "\N{REPLACEMENT CHARACTER}" and texts[2:] == [" cat"]
