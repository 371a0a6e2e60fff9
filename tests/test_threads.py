"""docs/threads.md and docs/climb.md: their commands print what the pages say."""

import re
import shlex

import pytest
from small import run_command
from test_pages import PAGES, commands

import grpo
from tools import exact

PROGRAMS = {"grpo.py": grpo, "tools/exact.py": exact}
SECTIONS = PAGES["threads.md"].split("\n## ")[1:] + PAGES["climb.md"].split("\n## ")[:1]
QUICK = [part for part in SECTIONS if 'python -c "' in part]


def test_there_are_ten_questions():
    assert [int(part.split(".")[0]) for part in SECTIONS[:-1]] == [*range(1, 11)]


@pytest.mark.parametrize(
    "section", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in SECTIONS]
)
def test_a_command_prints_what_its_page_says(section, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, program, *flags = shlex.split(commands(section)[0])
    if program == "-c":
        exec(flags[0], {})
        printed = capsys.readouterr().out
    else:
        code, printed = run_command(PROGRAMS[program], flags, capsys)
        assert code == 0, printed
    lines = re.search(r":\n\n((?:    .*\n)+)", section.partition("python ")[2])[1]
    wanted = [line.strip() for line in lines.splitlines()]
    assert wanted and {*wanted} <= {line.strip() for line in printed.splitlines()}, printed
