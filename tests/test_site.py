"""The site that `mkdocs build --strict` makes of docs/: no warning, no dead link, nothing from
outside, formulas without a script, and a search that works from the folder.
"""

import html
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not there: pip install -r requirements-dev.txt")

REPOSITORY = Path(__file__).parent.parent
OUTSIDE = re.compile(r"^(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr, built.stderr
    return folder


def pages(site: Path) -> dict[Path, str]:
    return {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}


def test_every_page_of_docs_and_the_readme_are_there(site):
    expected = {page.relative_to(REPOSITORY / "docs") for page in REPOSITORY.glob("docs/**/*.md")}
    built = {page.relative_to(site).with_suffix(".md") for page in pages(site)}
    assert expected <= built
    assert "Your model, your prompts, your reward" in (site / "index.html").read_text("utf-8")


def test_no_page_loads_anything_from_outside(site):
    loading = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\s(?:src|href)=\"?([^\">\s]+)")
    found = {url for text in pages(site).values() for url in loading.findall(text)}
    assert len(found) > 10 and not [url for url in found if OUTSIDE.match(url)]
    for style in site.rglob("*.css"):
        urls = re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", style.read_text("utf-8"))
        assert not [url for url in urls if OUTSIDE.match(url)], style.name


def test_each_link_leads_to_a_page_and_each_anchor_to_a_place_in_it(site):
    texts, links = pages(site), 0
    ids = {p: {*re.findall(r"\s(?:id|name)=\"?([^\">\s]+)", t), ""} for p, t in texts.items()}
    for page, text in texts.items():
        if page.name == "404.html":  # its links start at the root of a server
            continue
        for url in map(html.unescape, re.findall(r"<a\b[^>]*?\shref=\"?([^\">\s]+)", text)):
            if not re.match(r"\w+:", url):
                links += 1
                path, _, anchor = unquote(url).partition("#")
                target = (page.parent / path).resolve() if path else page
                target = target / "index.html" if target.is_dir() else target
                assert target.exists(), f"{page.name} links to {url}"
                assert anchor in ids.get(target, {anchor}), f"{page.name} links to {url}"
    assert links > 1000


def test_a_line_of_code_that_a_page_names_is_the_one_that_its_link_leads_to(site):
    page = (site / "evidence" / "from-trl-ppo.html").read_text(encoding="utf-8")
    file, line = re.search(
        r'href="\.\./source/(\w+\.py)\.html#__codelineno-0-(\d+)"', page
    ).groups()
    code = (site / "source" / f"{file}.html").read_text(encoding="utf-8")
    shown = re.search(rf'name="__codelineno-0-{line}"[^>]*></a>(.*)', code)[1]
    text = html.unescape(re.sub(r"<[^>]+>", "", shown))
    lines = (REPOSITORY / file).read_text(encoding="utf-8").split("\n")
    assert text.strip() == lines[int(line) - 1].strip()


def test_formulas_are_mathml_and_none_is_left_as_text(site):
    texts = pages(site)
    assert texts[site / "metrics.html"].count("<math") > 10
    left = re.compile(r'<(?:span|div) class="arithmatex"')
    assert not [page.name for page, text in texts.items() if left.search(text)]


@pytest.mark.slow
def test_in_a_browser_without_a_server_it_asks_for_files_alone_and_its_search_finds(site, chromium):
    for log in ("performance", "browser"):
        chromium.get_log(log)
    chromium.set_window_size(1280, 900)
    chromium.get(site.joinpath("metrics.html").as_uri())
    size = "return document.querySelector('math[display=block]').getBoundingClientRect().width"
    assert chromium.execute_script(size) > 200
    field = chromium.find_element("css selector", "input[name=query]")
    field.click()
    field.send_keys("entropy collapses")
    deadline, found = time.monotonic() + 30, []
    while not found and time.monotonic() < deadline:
        time.sleep(0.2)
        found = chromium.find_elements("css selector", "a.md-search-result__link")
    assert found and "debugging.html" in found[0].get_attribute("href")
    chromium.get(site.joinpath("source", "ppo.py.html").as_uri())
    events = [json.loads(x["message"])["message"] for x in chromium.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"].endswith("WillBeSent")]
    assert asked and not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
    assert not [x for x in chromium.get_log("browser") if x["level"] == "SEVERE"]
