"""The page that tools/look.py makes: its data here, and the page itself in a real browser."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from synthetic_runs import PROMPTS, completion_lines, write_run

from plumbing.errors import InputError
from tools import look

REPOSITORY = Path(__file__).parent.parent
WRITTEN_BY_MODELS = ["</script>", "<script>window.hacked = 1</script>", "<!--", "\ud800", "&lt;"]


def make_page(*folders: Path) -> str:
    look.main([str(folder) for folder in folders])
    return (folders[0] / "look.html").read_text(encoding="utf-8")


def embedded(html: str) -> str:
    start = '<script id="data" type="application/json">'
    assert html.count(start) == 1
    return html.partition(start)[2].partition("</script>")[0]


def data_of(html: str) -> list[dict]:
    return json.loads(embedded(html))["runs"]


def rewrite(path: Path, change) -> None:
    """Give every record of a .jsonl file to `change`, which may alter it."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_what_models_wrote_comes_through_and_cannot_end_the_script_that_holds_it(tmp_path):
    folder = write_run(tmp_path)
    rewrite(folder / "tokens.jsonl", lambda line: line.update(tokens=WRITTEN_BY_MODELS))
    html = make_page(folder)
    (run,) = data_of(html)
    assert "<" not in embedded(html)
    assert all(line["tokens"] == WRITTEN_BY_MODELS for line in run["lines"])


def test_numbers_come_through_unchanged_and_what_is_no_number_is_null(tmp_path):
    folder = write_run(tmp_path)
    lines = completion_lines(folder)
    assert data_of(make_page(folder))[0]["lines"] == lines
    path = folder / "tokens.jsonl"
    first, rest = path.read_text().split("\n", 1)
    record = json.loads(first) | {"kl": [float("nan"), float("-inf"), 1, 2, 3]}
    path.write_text(f"{json.dumps(record)}\n{rest}")
    assert data_of(make_page(folder))[0]["lines"][0]["kl"] == [None, None, 1, 2, 3]


def test_a_line_that_is_half_written_is_left_out(tmp_path):
    folder = write_run(tmp_path)
    before = make_page(folder)
    for name in ("metrics", "tokens"):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 99, "split": "hel')
    assert make_page(folder) == before


def test_the_page_is_the_same_each_time_and_nothing_else_is_left_behind(tmp_path, capsys):
    folder = write_run(tmp_path)
    before = set(folder.iterdir())
    assert make_page(folder) == make_page(folder)
    assert set(folder.iterdir()) - before == {folder / "look.html"}
    assert capsys.readouterr().out.splitlines() == [str(folder / "look.html")] * 2


def test_curves_keep_unknown_values_apart_from_those_that_are_not_there(tmp_path):
    folder = write_run(tmp_path, steps=4, every=2)
    curves = {c["title"].split()[0]: c["lines"] for c in data_of(make_page(folder))[0]["curves"]}
    clipped, accuracy = curves["share"][0], curves["held"][0]
    assert clipped[0] == [0, None] and [step for step, _ in clipped] == [0, 1, 2, 3]
    assert accuracy == [[0, 0.0], [2, 0.5], [4, 1.0]]
    drop = ("eval/accuracy", "eval/accuracy_greedy")
    for name in drop:  # a task without right and wrong answers
        rewrite(folder / "metrics.jsonl", lambda line, name=name: line.update({name: None}))
    rewrite(folder / "metrics.jsonl", lambda line: line.update({"eval/reward": 2.0}))
    rewrite(folder / "metrics.jsonl", lambda line: line.update({"objective/kl": None}))
    curves = {c["title"].split()[0]: c["lines"] for c in data_of(make_page(folder))[0]["curves"]}
    assert curves["held"][0][0] == [0, 2.0] and curves["held"][1] is None
    assert curves["KL"] == [None]


def test_a_warning_stands_at_the_step_where_it_came_first(tmp_path):
    folder = write_run(tmp_path, steps=20)
    (warning,) = data_of(make_page(folder))[0]["warnings"]
    assert warning["step"] == 10 and warning["text"].startswith("80% of the completions were cut")
    assert look.PANELS and list(look.PANELS)[warning["panel"]].startswith("tokens")

    def change(line: dict) -> None:
        line["val/ratio_max_dev_first"] = 0.3 if line["step"] >= 7 else None
        line["objective/scores"] = None if line["step"] < 5 else 1.0 if line["step"] < 10 else 0.5

    rewrite(folder / "metrics.jsonl", change)
    found = {w["text"].split()[1]: w["step"] for w in data_of(make_page(folder))[0]["warnings"]}
    assert found == {"ratio": 7, "mean": 9, "of": 10}, "null is not known: it is never constant"
    config = json.dumps({"script": "ppo", "bf16": True})
    (folder / "config.json").write_text(config)
    assert len(data_of(make_page(folder))[0]["warnings"]) == 2, "with bf16 0.3 is usual"


def write_judge(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"script": "reward_model", "bf16": None}))
    lines = []
    for step in range(6):
        line = {"step": step, "loss/pairs": 0.7, "reward/accuracy": 0.5, "reward/margin": None}
        line |= {"reward/mean": 11.0 if step > 2 else 0.0, "grad_norm": 1.0}
        lines.append(line)
    lines += [{"step": 6, "eval/loss": 0.6, "eval/accuracy": 0.5, "eval/length_correlation": 0.9}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def test_a_reward_model_shows_its_own_curves_and_warnings_and_says_why_no_tokens(tmp_path):
    (run,) = data_of(make_page(write_judge(tmp_path / "judge")))
    assert [c["title"] for c in run["curves"]] == list(look.OF_REWARD_MODELS)
    assert [(w["step"], w["panel"]) for w in run["warnings"]] == [(3, 3), (6, 4)]
    assert run["lines"] == [] and "reward model" in run["note"]


def test_a_run_without_tokens_says_why(tmp_path):
    folder = write_run(tmp_path, tokens=False)
    assert "--record_tokens false" in data_of(make_page(folder))[0]["note"]
    (folder / "tokens.jsonl").touch()
    assert data_of(make_page(folder))[0]["note"] == "No tokens are recorded yet."


def test_several_runs_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / name, "grpo") for name in "ab"]
    names = [run["name"] for run in data_of(make_page(*folders))]
    assert names == [str(folder) for folder in folders]
    folders[1] = write_run(tmp_path, "ppo")
    names = [run["name"] for run in data_of(make_page(*folders))]
    assert names == ["grpo-made-up-s0", "ppo-made-up-s0"]


def test_the_page_names_nothing_outside_of_itself_but_the_metrics_beside_it(tmp_path):
    folder = write_run(tmp_path / "with space")
    template = (REPOSITORY / "tools" / "look.html").read_text(encoding="utf-8")
    assert "//" not in re.sub(r"(?<![:\"'])// ", "", template), "no address, with http or without"
    links = re.findall(r"(?:src|href|action|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", template)
    assert sorted(links) == ["METRICS.MD", "data:,"]
    link = re.search(r'<a href="([^"]+)">metrics.md', make_page(folder))[1]
    path = urllib.request.url2pathname(link)
    assert (folder / path).resolve() == REPOSITORY / "docs" / "metrics.md"
    assert "'none'" in template.partition("default-src ")[2][:10]


def test_the_licence_of_the_library_is_beside_it():
    vendor = REPOSITORY / "tools" / "vendor"
    assert "MIT" in (vendor / "uPlot-LICENSE.txt").read_text()
    assert "</script" not in (vendor / "uPlot.min.js").read_text(encoding="utf-8").lower()


def no_metrics(folder: Path) -> str:
    (folder / "metrics.jsonl").unlink()
    return "is not the folder of a run, it has no metrics.jsonl"


def empty(folder: Path) -> str:
    (folder / "metrics.jsonl").write_text("")
    return "metrics.jsonl: holds no metrics yet"


def no_settings(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "is no run of this version"


def other_settings(folder: Path) -> str:
    (folder / "config.json").write_text("[]")
    return "is no run of this version"


def other_metrics(folder: Path) -> str:
    rewrite(folder / "metrics.jsonl", lambda line: line.pop("length/truncated_frac", None))
    return "is no run of this version ('length/truncated_frac')"


def no_json(folder: Path) -> str:
    (folder / "tokens.jsonl").write_text("{\n")
    return "tokens.jsonl: can't be read"


def no_completion(folder: Path) -> str:
    (folder / "tokens.jsonl").write_text('{"step": 1}\n')
    return "tokens.jsonl: can't be read (line 1 lacks something)"


def no_text(folder: Path) -> str:
    (folder / "tokens.jsonl").write_bytes(b"\xff\n")
    return "tokens.jsonl: can't be read"


BREAKS = [no_metrics, empty, no_settings, other_settings, other_metrics, no_json, no_completion]
BREAKS += [no_text]


@pytest.mark.parametrize("spoil", BREAKS)
def test_what_is_no_run_is_said_in_one_line(spoil, tmp_path):
    folder = write_run(tmp_path)
    message = spoil(folder)
    with pytest.raises(InputError) as e:
        look.main([str(folder)])
    assert message in str(e.value) and "\n" not in str(e.value)
    assert not (folder / "look.html").exists()


def test_where_it_cannot_write_it_says_so(tmp_path):
    folder = write_run(tmp_path)
    with pytest.raises(InputError, match=r"--out .*no\.html: can't be written"):
        look.main([str(folder), "--out", str(tmp_path / "no" / "no.html")])
    with pytest.raises(InputError, match="--port 99999: can't be used"):
        look.main([str(folder), "--serve", "--port", "99999"])


@pytest.mark.slow
def test_it_opens_without_waiting_for_torch():
    code = "import sys; from tools import look; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_from_the_shell_an_error_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "tools/look.py", str(tmp_path / "nothing")]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert found.returncode == 2 and found.stderr.count("\n") == 1
    assert found.stderr.startswith("error: ") and found.stdout == ""


# --- Served ---


class Served:
    """look.py --serve in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "tools/look.py", str(folder), "--serve", "--port", "0"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # A shell makes what it runs in the background ignore Ctrl-C, and children inherit that.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipes)
        signal.signal(signal.SIGINT, handler)
        self.url = self.process.stdout.readline().split()[0]

    def get(self, path: str, host: str | None = None) -> tuple[int, str]:
        request = urllib.request.Request(self.url + path, headers={"Host": host} if host else {})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()

    def stop(self) -> str:
        """What it has said until it ended."""
        self.process.send_signal(signal.SIGINT)
        return "".join(self.process.communicate(timeout=30))


@pytest.fixture
def served(tmp_path):
    server = Served(write_run(tmp_path))
    yield server
    server.process.kill()
    server.process.communicate()


@pytest.mark.slow
def test_served_it_answers_this_machine_and_says_what_has_changed(served, tmp_path):
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", served.url)
    folder = tmp_path / "ppo-made-up-s0"
    status, html = served.get("/")
    version = json.loads(embedded(html))["version"]
    assert status == 200 and version and not (folder / "look.html").exists()
    assert served.get(f"/data.json?{version}") == (204, "")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 21, "eval/accuracy": 1.0}) + "\n")
    status, text = served.get(f"/data.json?{version}")
    assert status == 200 and json.loads(text)["runs"][0]["steps"][-1] == 21
    assert served.get(f"/data.json?{json.loads(text)['version']}")[0] == 204
    assert served.get("/metrics.md")[1].startswith("# The metrics of a run")
    assert served.get("/config.json")[0] == served.get("/../README.md")[0] == 404
    assert served.get("/", host="evil.example:80")[0] == 403
    folder.rename(tmp_path / "moved")
    status, text = served.get("/data.json?x")
    assert status == 503 and text.endswith("it has no metrics.jsonl")
    assert "Traceback" not in served.stop()


# --- In a browser ---

WIDE, PHONE = (1280, 900), (390, 844)


def wait_for(what) -> None:
    deadline = time.monotonic() + 30
    while not what() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert what()


class Page:
    """The page in the browser."""

    def __init__(self, driver) -> None:
        self.driver = driver

    def open(self, url: str | Path, size: tuple[int, int] = WIDE, scheme: str = "light") -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.command("Emulation.setDeviceMetricsOverride", metrics | {"mobile": width < 600})
        self.prefer(scheme)
        self.driver.get(url.as_uri() if isinstance(url, Path) else url)

    def command(self, name: str, options: dict) -> None:
        self.driver.execute_cdp_cmd(name, options)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", {"features": features})

    def run(self, script: str, *args):
        return self.driver.execute_script(script, *args)

    def all(self, css: str) -> list:
        return self.driver.find_elements("css selector", css)

    def one(self, css: str):
        return self.driver.find_element("css selector", css)

    def texts(self, css: str) -> list[str]:
        """All the text of the elements, seen or not."""
        script = "return [...document.querySelectorAll(arguments[0])].map((x) => x.textContent)"
        return self.run(script, css)

    def keys(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    @property
    def step(self) -> int:
        return int(self.one("#step").text.removeprefix("step "))

    def choose(self, quantity: str) -> None:
        (button,) = [b for b in self.all("#quantities button") if b.text == quantity]
        button.click()

    def select(self, name: str, text: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.one(f"#{name}")).select_by_visible_text(text)

    def shown(self) -> dict[str, str]:
        """The numbers of the inspector, as text by the key of tokens.jsonl."""
        pairs = self.run("""return [...document.querySelectorAll("#inspector [data-key]")]
            .map((td) => [td.dataset.key, td.textContent])""")
        return dict(pairs)

    def colours(self) -> list[str]:
        return self.run("""return [...document.querySelectorAll("#completions .t")]
            .map((t) => getComputedStyle(t).background)""")


@pytest.fixture
def page(chromium):
    """The page; what it has asked for and complained of is judged at the end of each test."""
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    yield Page(chromium)
    messages = [json.loads(x["message"])["message"] for x in chromium.get_log("performance")]
    asked = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    urls = {x["request"]["url"] for x in asked}
    assert urls and all(re.match(r"file:|data:|http://127\.0\.0\.1:", url) for url in urls), urls
    assert chromium.get_log("browser") == []
    chromium.get("data:,")


@pytest.fixture(scope="module")
def ppo(tmp_path_factory) -> Path:
    """The folder of a run, and its page."""
    folder = write_run(tmp_path_factory.mktemp("ppo"), "ppo")
    make_page(folder)
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    """The page of two runs that have recorded different steps."""
    work = tmp_path_factory.mktemp("both")
    folders = [write_run(work, "ppo", every=5), write_run(work, "grpo", steps=24, every=4)]
    make_page(*folders)
    return folders[0] / "look.html"


PLUS, MINUS = '"+"', '"\N{MINUS SIGN}"'
LEFT, RIGHT, HOME, END, ESCAPE = "\ue012", "\ue014", "\ue011", "\ue010", "\ue00c"


@pytest.mark.slow
def test_keys_buttons_and_clicks_go_from_step_to_step(page, ppo):
    from selenium.webdriver import ActionChains

    page.open(ppo / "look.html")
    assert page.step == 0
    page.keys(RIGHT)
    assert page.step == 5, "the next step that is recorded"
    page.keys(RIGHT, RIGHT, LEFT)
    assert page.step == 10
    page.keys(END, RIGHT)
    assert page.step == 20
    page.keys(HOME, LEFT)
    assert page.step == 0
    page.one("#forward").click()
    page.one("#forward").click()
    page.one("#back").click()
    assert page.step == 5
    plot = page.one("#curves .u-over")
    width = plot.size["width"]
    to_13 = ActionChains(page.driver).move_to_element_with_offset(plot, int(width * 0.15), 0)
    to_13.click().perform()
    assert page.step == 13, "a click chooses the step under it, recorded or not"
    assert "step 10" in page.one("#completions").text, "and the newest recorded one is named"
    assert [x.text for x in page.all(".now")] == ["10"]
    ((left, x),) = page.run("""return [...document.querySelectorAll(".mark")].slice(0, 1).map((m) =>
        [m.getBoundingClientRect().left, m.parentNode.getBoundingClientRect().left])""")
    assert abs((left - x) / width - 13 / 20) < 0.02, "the mark is where the step is"
    page.all("#rows .at")[1].click()
    assert page.step == 5
    page.one("#warnings button").click()
    assert page.step == 10


NUMBERS = {"kl", "rewards", "values", "returns", "advantages", "ratio", "clipped"}


def expected(line: dict) -> list[dict]:
    """What the inspector should show of each token of a completion."""
    tokens = []
    for i in range(len(line["tokens"])):
        row = {}
        for key, x in line.items():
            if key.endswith("logprobs") or key in NUMBERS:
                row[key] = x[i] if isinstance(x, list) else x
        tokens.append(row)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo", "grpo", "rloo"])
@pytest.mark.parametrize("split", ["training", "held-out prompts"])
def test_the_numbers_shown_are_those_of_the_file(script, split, page, tmp_path):
    folder = write_run(tmp_path, script)
    make_page(folder)
    page.open(folder / "look.html")
    page.select("split", split)
    page.keys(RIGHT)
    name = "train" if split == "training" else "heldout"
    lines = [x for x in completion_lines(folder) if (x["step"], x["split"]) == (5, name)]
    chips = page.all("#completions .t")
    rows = [row for line in lines for row in expected(line)]
    assert len(chips) == len(rows) > 10
    for index, (chip, row) in enumerate(zip(chips, rows)):
        if index < 3:
            chip.click()  # as a reader does
        else:
            page.run("arguments[0].dispatchEvent(new Event('pointerover', {bubbles: true}))", chip)
        shown = page.shown()
        change = shown.pop("change")
        found = {key: None if text == "—" else float(text) for key, text in shown.items()}
        assert found == row
        both = (row.get("new_logprobs"), row["old_logprobs"])
        if None in both:
            assert change == "—"
        else:
            assert float(change) == pytest.approx(both[0] - both[1], rel=1e-4, abs=1e-9)


@pytest.mark.slow
def test_a_quantity_that_is_chosen_colours_the_tokens_and_its_sign_is_shown_otherwise(page, ppo):
    page.open(ppo / "look.html")
    page.keys(RIGHT)
    names = [b.text for b in page.all("#quantities button")]
    assert names[:3] == ["advantage", "log-prob change", "KL"] and "log-prob" in names
    seen = set()
    for name in names:
        page.choose(name)
        assert [b.text for b in page.all("[aria-pressed=true]")] == [name]
        seen.add(tuple(page.colours()))
    assert len(seen) == len(names), "each has colours of its own"
    page.keys("q")
    assert page.one("[aria-pressed=true]").text == "advantage"
    page.keys("n")  # no numbers: the sign is still there
    signs = page.run("""return [...document.querySelectorAll("#completions .t")].map((t) =>
        [getComputedStyle(t, "::after").content, getComputedStyle(t).backgroundColor])""")
    lines = [x for x in completion_lines(ppo) if (x["step"], x["split"]) == (5, "heldout")]
    numbers = [x for line in lines for x in line["advantages"]]
    assert [sign for sign, _ in signs] == [PLUS if x > 0 else MINUS for x in numbers]
    # In oklab(L a b) the sign of b parts blue from orange.
    blue = [float(re.findall(r"[-\d.e]+", colour)[2]) < 0 for _, colour in signs]
    strong = [i for i, x in enumerate(numbers) if abs(x) > 1]
    assert [blue[i] for i in strong] == [numbers[i] > 0 for i in strong]
    assert {blue[i] for i in strong} == {True, False}
    # The larger of two numbers has the stronger colour.
    strength = page.run("""return [...document.querySelectorAll("#completions .t")].map((t) =>
        +t.style.getPropertyValue("--a"))""")
    order = sorted(range(len(numbers)), key=lambda i: abs(numbers[i]))
    assert [strength[i] for i in order] == sorted(strength) and len(set(strength)) > 5


@pytest.mark.slow
def test_where_there_is_no_number_a_token_is_hatched(page, ppo):
    page.open(ppo / "look.html")
    page.choose("ratio")
    assert all("gradient" in x for x in page.colours()), "held-out tokens have no ratio"
    page.select("split", "training")
    assert not any("gradient" in x for x in page.colours())
    (line, *_) = [x for x in completion_lines(ppo) if (x["step"], x["split"]) == (0, "train")]
    chips = page.all("#completions .t")[: len(line["clipped"])]
    dashed = [chip.value_of_css_property("outline-style") == "dashed" for chip in chips]
    assert dashed == [x == 1 for x in line["clipped"]]


@pytest.mark.slow
def test_what_models_wrote_stays_text(page, tmp_path):
    folder = write_run(tmp_path)
    shown_as = {
        "</script><script>hacked = 1</script>": "</script><script>hacked␣=␣1</script>",
        "<img src=x onerror=hacked=1>": "<img␣src=x␣onerror=hacked=1>",
        " a\n": "␣a↵",
        "\t": "⇥",
        "": "∅",
        "\u202e": "\\u202e",
        "&amp;": "&amp;",
    }
    texts = list(shown_as)
    prompt = f"{texts[1]}\n b"
    rewrite(folder / "tokens.jsonl", lambda line: line.update(tokens=texts, prompt=prompt))
    make_page(folder)
    page.open(folder / "look.html")
    assert page.texts("#completions .t")[: len(texts)] == list(shown_as.values())
    assert page.texts("#completions .prompt")[0] == prompt
    page.all("#completions .t")[0].click()
    assert page.texts("#inspector code") == [json.dumps(texts[0])]
    found = page.run("return [window.hacked, document.images.length, document.scripts.length]")
    assert found == [None, 0, 3]


@pytest.mark.slow
def test_a_token_that_is_kept_stays_in_sight_from_step_to_step(page, ppo):
    page.open(ppo / "look.html")
    page.all("#completions .t")[2].click()
    lines = [x for x in completion_lines(ppo) if x["split"] == "heldout"]
    for step in (5, 10):
        page.keys(RIGHT)
        line = next(x for x in lines if x["step"] == step)
        assert float(page.shown()["advantages"]) == line["advantages"][2]
        assert page.run("return document.activeElement.it.i") == 2, "the focus stays as well"
    assert f"step {step}" in page.one("#inspector").text
    page.keys("\ue004")  # Tab
    assert float(page.shown()["advantages"]) == line["advantages"][3]
    page.keys(ESCAPE)
    assert not page.one("#inspector").is_displayed()
    label = page.all("#completions .t")[3].get_attribute("aria-label")
    assert label.endswith(f"advantage {line['advantages'][3]}")


@pytest.mark.slow
def test_two_runs_stand_side_by_side_each_with_its_newest_step(page, both):
    page.open(both)
    page.keys(RIGHT, RIGHT)
    assert page.step == 5, "4 is recorded by one, 5 by the other"
    assert page.texts(".heads small") == [" step 5", " step 4"]
    left, right = page.all("#completions .cell")[:2]
    assert left.rect["y"] == right.rect["y"] and left.rect["x"] < right.rect["x"]
    prompts = page.texts("#completions .prompt")
    assert prompts == PROMPTS, "a prompt that both have stands there once"
    page.keys("p", "p")
    assert page.texts("#completions .prompt") == page.texts("#rows .prompt") == [PROMPTS[1]]
    assert page.texts("#rows .at") == [str(x) for x in sorted({*range(0, 21, 5), *range(0, 25, 4)})]
    page.keys("s")
    assert "training" in page.run("return document.querySelector('#split').selectedOptions[0].text")


@pytest.mark.slow
def test_a_run_without_tokens_shows_its_curves_and_says_why(page, tmp_path):
    folder = write_run(tmp_path, tokens=False)
    make_page(folder)
    page.open(folder / "look.html")
    page.keys(RIGHT)
    assert page.step == 1 and len(page.all("#curves canvas")) == 6
    assert "--record_tokens false" in page.one("#completions").text
    assert not any(x.is_displayed() for x in page.all(".tokens"))
    page.open(write_judged_page(tmp_path))
    assert len(page.all("#curves canvas")) == 4 and "reward model" in page.one("#completions").text


def write_judged_page(folder: Path) -> Path:
    make_page(write_judge(folder / "judge"))
    return folder / "judge" / "look.html"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_colour_and_the_button_changes_the_theme(scheme, page, both):
    page.open(both, scheme=scheme)
    ratios = """
        const canvas = document.createElement("canvas").getContext("2d",
            {willReadFrequently: true});
        const light = (colour) => {
            canvas.fillStyle = colour;
            canvas.fillRect(0, 0, 1, 1);
            const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((x) => x / 255)
                .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
        };
        const on = (node) => {
            const colour = getComputedStyle(node).backgroundColor;
            return colour === "rgba(0, 0, 0, 0)" ? on(node.parentElement ?? document.body) : colour;
        };
        return [...document.querySelectorAll(arguments[0])].map((node) => {
            const pair = [light(getComputedStyle(node).color), light(on(node))];
            return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
        });"""
    for theme in (scheme, "the other"):
        background = page.one("body").value_of_css_property("background-color")
        for name in ("advantage", "log-prob"):
            page.choose(name)
            contrast = page.run(ratios, ".t")
            strong = page.run("""return [...document.querySelectorAll(".t")].filter((t) =>
                +t.style.getPropertyValue("--a") === 1).length""")
            assert strong > 0, "no token has the colour of the end of the scale"
            assert min(contrast) >= 4.5, (theme, name)
        others = "h1, h2, small, button, select, .run, figcaption, figcaption span, footer, a"
        assert min(page.run(ratios, others)) >= 4.5 - 0.1, theme
        page.one("#theme").click()
        assert page.one("body").value_of_css_property("background-color") != background


@pytest.mark.slow
def test_on_a_phone_nothing_is_wider_than_the_page_and_a_finger_gets_the_numbers(page, both):
    page.open(both, PHONE)
    page.run("document.querySelector('#completions').scrollIntoView()")
    width, inner = page.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner == 390
    cells = page.all("#completions .cell")[:2]
    assert cells[0].rect["x"] == cells[1].rect["x"], "one below the other"
    assert cells[0].text.startswith("ppo-made-up-s0 step 0")
    page.command("Emulation.setTouchEmulationEnabled", {"enabled": True})
    x, y = page.run("""const chip = document.querySelector("#completions .t");
        scrollBy(0, chip.getBoundingClientRect().top - 300);
        return [chip.getBoundingClientRect().left + 8, chip.getBoundingClientRect().top + 8]""")
    for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
        page.command("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    deadline = time.monotonic() + 5
    while not page.one("#inspector").is_displayed() and time.monotonic() < deadline:
        time.sleep(0.05)
    page.command("Emulation.setTouchEmulationEnabled", {"enabled": False})
    box = page.run("return document.querySelector('#inspector').getBoundingClientRect().toJSON()")
    assert page.shown()["advantages"] and box["left"] == 0 and box["bottom"] == 844
    assert page.run("return document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
@pytest.mark.parametrize("size", [PHONE, WIDE])
def test_four_runs_are_no_wider_than_the_page(page, tmp_path, size):
    runs = [write_run(tmp_path / str(i), "ppo", steps=30) for i in range(4)]
    make_page(*runs)
    page.open(runs[0] / "look.html", size)
    width, inner = page.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner == size[0]


@pytest.mark.slow
def test_500_steps_and_5_megabytes_open_and_turn_without_lag(page, tmp_path):
    folder = write_run(tmp_path, steps=500, every=5, generations=4, length=45)
    size = (folder / "tokens.jsonl").stat().st_size
    assert 4_500_000 < size < 6_000_000
    html = make_page(folder)
    assert len(html) < 1.2 * size
    started = time.monotonic()
    page.open(folder / "look.html")
    assert len(page.all("#completions .t")) == 4 * 45
    opened = time.monotonic() - started
    rows = [int(text) for text in page.texts("#rows .at")]
    assert len(rows) == 40 and rows[0] == 0 and rows[-1] == 500
    # The time from the key to the end of the layout that it asks for.
    times = sorted(
        page.run("""return [...Array(50)].map(() => {
            const before = performance.now();
            document.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
            document.body.getBoundingClientRect();
            return performance.now() - before;
        })""")
    )
    assert page.step == 250
    before = time.monotonic()
    page.choose("KL")
    chosen = time.monotonic() - before
    median, slowest = times[25], times[-1]
    print(f"\nopened in {opened:.2f} s, {len(html) / 1e6:.1f} MB; a step takes {median:.0f} ms,")
    print(f"at most {slowest:.0f} ms; another quantity {1000 * chosen:.0f} ms")
    assert opened < 10 and median < 100 and slowest < 500 and chosen < 3


@pytest.mark.slow
def test_served_it_follows_a_run_and_keeps_the_readers_place(page, served, tmp_path):
    folder = tmp_path / "ppo-made-up-s0"

    def add_step(step: int) -> None:
        line = {"step": step, "objective/scores": 0.5, "eval/accuracy": 1.0}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        with (folder / "tokens.jsonl").open("a") as file:
            for line in completion_lines(folder)[:4]:
                file.write(json.dumps(line | {"step": step, "split": "heldout"}) + "\n")

    page.open(served.url)
    assert page.step == 20, "a run that goes on is shown at its end"
    wait_for(lambda: page.one("#live").text == "● following")
    add_step(25)
    wait_for(lambda: page.step == 25)
    page.keys(LEFT, LEFT)
    page.choose("KL")
    page.all("#completions .t")[1].click()
    page.one("h1").click()  # the pointer is over no token, what was clicked on is kept
    page.all("#completions .t")[1].send_keys("\ue007")  # Enter
    page.run("scrollTo(0, 150)")
    mark = page.run("return (window.same = document.querySelector('#completions .t')) !== null")
    time.sleep(3)
    assert mark and page.run("return window.same.isConnected"), "nothing new: nothing is drawn"
    kept = page.shown()
    add_step(30)
    wait_for(lambda: page.run("return steps.at(-1)") == 30)
    assert page.step == 15 and page.one("[aria-pressed=true]").text == "KL"
    assert page.shown() == kept and page.run("return scrollY") == 150
    assert "Traceback" not in served.stop()
    wait_for(lambda: "ended" in page.one("#live").text)
    # Each question that nobody answers is a line in the console.
    found = page.driver.get_log("browser")
    assert all("data.json" in x["message"] for x in found)


@pytest.mark.slow
def test_the_keyboard_keeps_its_token_and_its_button_while_the_page_is_drawn_anew(page, both):
    page.open(both)
    page.run("document.querySelector('#completions .t').focus()")
    focused = "const x = document.activeElement; return [x.className, x.textContent]"
    for keys in ("q", RIGHT):
        page.keys(keys)
        assert page.run(focused)[0].startswith("t"), keys
        assert page.one("#inspector").is_displayed(), keys
    page.run("document.querySelectorAll('#quantities button')[1].focus()")
    name = page.run(focused)[1]
    page.keys("\ue007")  # Enter
    assert page.run(focused)[1] == name


@pytest.mark.slow
def test_long_completions_over_many_steps_are_fewer_rows(page, tmp_path):
    folder = write_run(tmp_path, steps=45, every=1, generations=1, length=1000)
    make_page(folder)
    page.open(folder / "look.html")
    # 5 MB are read before the first row is drawn.
    wait_for(lambda: page.all("#rows .t"))
    assert 1000 < len(page.all("#rows .t")) <= 4000


def test_a_file_that_ends_in_half_a_character_is_read_up_to_it(tmp_path):
    folder = write_run(tmp_path)
    with (folder / "tokens.jsonl").open("ab") as file:
        file.write('{"step": 3, "tokens": ["\N{REPLACEMENT CHARACTER}'.encode()[:-1])
    make_page(folder)
