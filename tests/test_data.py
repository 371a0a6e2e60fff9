"""Prompts: read from files and datasets, in a template, split, in batches, as tokens."""

import json
import os
import random
import re
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
from small import byte_tokenizer, task_of
from tokenizers import normalizers, processors

from plumbing import data
from plumbing.data import Task, prompt_batch, prompt_tokens, read_rows
from plumbing.errors import InputError

CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def write(path: Path, rows: list) -> str:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return str(path)


def message(content: str, role: str = "user") -> dict:
    return {"role": role, "content": content}


def test_json_lines_are_read_with_all_their_columns(tmp_path):
    # A line separator of Unicode ends no line of JSON, and a byte order mark is no part of it.
    rows = [{"prompt": "a\u2028b", "level": 3}, {"prompt": "c", "level": None}]
    path = Path(write(tmp_path / "p.txt", rows))  # whatever its name
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + path.read_bytes() + b"  \n")
        assert read_rows(str(path), "train") == rows
    end, start = os.pipe()  # as of <(zcat p.jsonl.gz)
    os.write(start, path.read_bytes())
    os.close(start)
    assert read_rows(f"/dev/fd/{end}", "train") == rows


def test_the_cells_of_a_csv_file_are_text(tmp_path):
    (tmp_path / "p.csv").write_bytes(b'\xef\xbb\xbfprompt,answer\r\n1+1=,02\r\n"""2"", 3\n",\r\n')
    rows = [{"prompt": "1+1=", "answer": "02"}, {"prompt": '"2", 3\n', "answer": ""}]
    assert read_rows(str(tmp_path / "p.csv"), "train") == rows
    (tmp_path / "p.TSV").write_text("prompt\tanswer\n1,1\tNA\n")
    assert read_rows(str(tmp_path / "p.TSV"), "train") == [{"prompt": "1,1", "answer": "NA"}]


def test_a_datasets_name_gives_its_subset_and_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("C:hub.csv").mkdir()  # a folder with a colon, as on drive C:
    monkeypatch.setitem(sys.modules, "datasets", datasets := Mock())
    for name, expected in (
        ("hub", call("hub", None, split="train")),
        ("hub:main", call("hub", "main", split="train")),
        ("hub:main:", call("hub", "main", split="train")),
        ("hub:more:test[:3]", call("hub", "more", split="test[:3]")),
        ("C:hub.csv", call("C:hub.csv", None, split="train")),
    ):
        assert read_rows(name, "train") is datasets.load_dataset.return_value.to_list.return_value
        assert datasets.load_dataset.call_args == expected, name


@pytest.mark.slow
def test_a_folder_is_a_dataset(tmp_path, monkeypatch):
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (folder := tmp_path / "C:hub.csv").mkdir()
    rows = {split: [{"prompt": split, "n": n} for n in range(9)] for split in ("train", "test")}
    for split in rows:
        write(folder / f"{split}.jsonl", rows[split])
    assert read_rows(str(folder), "test") == rows["test"]


# --- The template and the system prompt ---

SYSTEM, HI = message("Be brief.", "system"), message("hi")


@pytest.mark.parametrize(
    ("row", "flags", "expected"),
    [
        # Any column; doubled braces are braces; its blanks and line breaks belong to it.
        (
            {"prompt": "{n}", "n": 3, "x": None},
            {"prompt_template": "{{{prompt}}} \\boxed{{}} {n:02} {x} \n"},
            "{{n}} \\boxed{} 03 None \n",
        ),
        ({"question": [0, 2]}, {"prompt_template": "{question}?"}, "[0, 2]?"),
        # A column alone is the prompt, text or messages, as it is.
        ({"prompt": "{c}"}, {}, "{c}"),
        ({"prompt": [SYSTEM, HI]}, {}, [SYSTEM, HI]),
        ({"messages": [HI]}, {"prompt_template": "{messages}"}, [HI]),
        # A system prompt makes messages of text. An empty one is no message.
        ({"prompt": "i"}, {"system_prompt": "Be brief.", "prompt_template": "h{prompt}"}, None),
        ({"prompt": "hi"}, {"system_prompt": ""}, [HI]),
        ({"prompt": [HI]}, {"system_prompt": "Be brief."}, None),
    ],
)
def test_a_template_makes_the_prompt_of_a_row(row, flags, expected, tmp_path, capsys):
    path = write(tmp_path / "p.jsonl", [row] * 2)
    task = task_of(CHAT_TEMPLATE, reward=["brevity"], prompts=path, eval_prompts=path, **flags)
    assert task.train == task.heldout == [row | {"prompt": expected or [SYSTEM, HI]}] * 2
    advised = "makes messages of them and of completions" in capsys.readouterr().out
    assert advised == isinstance(task.train[0]["prompt"], str)


# --- What is held out, and the batch of a step ---


def test_a_tenth_of_the_prompts_is_held_out(capsys, tmp_path):
    def split(rows):
        path = write(tmp_path / "p.jsonl", rows)
        task = task_of(reward=["brevity"], prompts=path, prompt_template="p{id}")
        return task.train, task.heldout

    said = "Fewer than ten prompts: none is held out, they are trained on and evaluated.\n"
    for n, sizes in ((1, (1, 1)), (9, (9, 9)), (10, (9, 1)), (6000, (5488, 512))):
        both = split([{"id": i} for i in range(n)])
        assert tuple(map(len, both)) == sizes
        assert (said in capsys.readouterr().out) == (n < 10)
        train, heldout = ({row["prompt"] for row in rows} for rows in both)
        assert len(train | heldout) == n and (n < 10 or not train & heldout)
    train, heldout = split([{"id": i % 40, "n": i} for i in range(600)])
    assert (len(train), len(heldout)) == (36 * 15, 4 * 15), "each of four prompts with all its rows"
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    assert [row["n"] for row in heldout[:5]] == [541, 412, 52, 141, 261], "the same in every run"


def test_own_held_out_prompts_are_shuffled(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": str(i)} for i in range(100)])
    order = [int(row["prompt"]) for row in task_of(reward=["brevity"], eval_prompts=path).heldout]
    random.Random(0).shuffle(expected := [*range(100)])
    assert order == expected


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path, capsys):
    rows = [{"prompt": str(i)} for i in range(24)]
    trained = write(tmp_path / "p.jsonl", rows[:12])
    for start, count in ((0, 12), (9, 3), (12, 0)):
        evaluated = write(tmp_path / "e.jsonl", rows[start : start + 12])
        task_of(reward=["brevity"], prompts=trained, eval_prompts=evaluated)
        found = re.findall(r"(\d+) of the 12 held-out .* trained on", capsys.readouterr().out)
        assert found == [str(count)] * (count > 0)


def test_prompts_are_told_apart_by_what_the_model_reads(tmp_path, capsys):
    """Not by ids, times, other keys or their order, nor by blanks that the template strips."""
    chats, template = [], WHOLE.replace("{{ m.content }}", "{{ m.content.strip() }}")
    for n in range(60):
        turn = message(f"{n % 12}+1" + " " * (n // 12)) | {"id": n}
        chats.append([turn if n % 2 else dict(reversed(turn.items()))])
    path = write(tmp_path / "p.jsonl", [{"prompt": chat} for chat in chats])
    for flags in ({}, {"eval_prompts": write(tmp_path / "e.jsonl", [{"prompt": chats[13]}])}):
        task = task_of(template, reward=["brevity"], prompts=path, **flags)
        out = capsys.readouterr().out
        assert "Different prompts: 12." in out
        assert ("1 of the 1 held-out prompts are trained on" in out) == bool(flags)
        sides = [
            {row["prompt"][0]["content"].strip() for row in x} for x in (task.train, task.heldout)
        ]
        assert len(sides[1]) == 1 and (flags or not sides[0] & sides[1])


OPENS = "{% if add_generation_prompt %}[assistant]{% endif %}"
WHOLE = CHAT_TEMPLATE + OPENS
ONLY = "{% for m in messages if m.role in ROLES %}[{{ m.role }}]{{ m.content }}{% endfor %}" + OPENS
NO_SYSTEM = ONLY.replace("ROLES", "('user', 'assistant')")
NO_QUESTION = ONLY.replace("ROLES", "('assistant',)")
ENDS = CHAT_TEMPLATE.replace("{% endfor %}", "<|im_end|>\n{% endfor %}") + OPENS
CHAT = {"system_prompt": ""}


@pytest.mark.parametrize(
    ("flags", "template", "said"),
    [
        (CHAT, WHOLE, None),
        (CHAT, ENDS, "and no completion: --stop '<|im_end|>'"),
        (CHAT | {"stop": ["<|im_end|>"]}, ENDS, None),
        (CHAT, ENDS.replace("im_end", "endoftext"), None),
        (CHAT, "{{ strftime_now('%d') }}" + WHOLE, "writes the date"),
        ({"prompt_template": r"{prompt} \boxed{answer}"}, None, "A reward checks {answer} too"),
        ({"prompt_template": "{prompt} {gold[0]}"}, None, None),
        ({"prompt_template": "{prompt} {gold[0]}", "reward": ["FILE:f"]}, None, "{gold} too"),
        ({"prompt_template": "{answer}?", "reward": ["FILE:f"]}, None, None),  # the question
        ({"prompt_template": "{prompt}\n"}, None, None),
    ],
)
def test_what_templates_do_to_a_prompt_is_said(flags, template, said, tmp_path, capsys):
    (file := tmp_path / "judge.py").write_text("def f(completions, gold, **k): return [0.0]")
    flags = {"reward": ["numeric_match"]} | flags
    flags["reward"] = [x.replace("FILE", str(file)) for x in flags["reward"]]
    rows = [{"prompt": f"{n}+1", "answer": n + 1, "gold": [n]} for n in range(12)]
    task = task_of(template, prompts=write(tmp_path / "p.jsonl", rows), **flags)
    lines = capsys.readouterr().out.splitlines()
    lines = [x for x in lines if not x.startswith("Rewards: ") and "makes messages of" not in x]
    seen = task.tokenizer.decode(task.tokens[str(task.train[0]["prompt"])])
    assert lines[0] == f"Different prompts: 12. The model continues, for one, {seen!r}"
    assert len(lines) == 1 + (said is not None) and (said or "") in lines[-1]


@pytest.mark.parametrize(
    ("usual", "odd", "template", "said"),
    [
        ("{}", "{}\t", None, ["end in a space: 1."]),
        ("U{}", "U{}A", WHOLE, ["end with the assistant's words: 1."]),
        ("U{}", "U{}A ", WHOLE, ["end in a space: 1.", "end with the assistant's words: 1."]),
        ("U{}", "U{} ", WHOLE, []),
        ("U{}", "SU{}", NO_SYSTEM, ["leaves out what system says: 'S'"]),
        ("U{}A", "U{}", CHAT_TEMPLATE, ["assistant's words: 12.", "opens no assistant's turn"]),
        ("U{}A", "U{}A", CHAT_TEMPLATE, ["end with the assistant's words: 13."]),
    ],
)
def test_what_is_odd_in_the_last_row_is_said(usual, odd, template, said, tmp_path, capsys):
    roles, rows = {"S": "system", "U": "user", "A": "assistant"}, []
    for n, kind in enumerate([usual] * 11 + [odd]):
        turns = re.findall(r"[SUA][^SUA]*", kind.format(n))
        rows.append({"prompt": [message(x, roles[x[0]]) for x in turns] or kind.format(n)})
    heldout = write(tmp_path / "e.jsonl", rows[:1])
    path = write(tmp_path / "p.jsonl", rows)
    task_of(template, reward=["brevity"], prompts=path, eval_prompts=heldout)
    lines = capsys.readouterr().out.splitlines()
    lines = lines[1 + [x.startswith("Different") for x in lines].index(True) :]
    assert len(lines) == len(said) and all(x in line for x, line in zip(said, lines)), lines


@pytest.mark.parametrize(
    ("flags", "template"),
    [
        ({"prompt_template": "Solve it:"}, None),
        ({"prompt_template": "{{question}}", "system_prompt": ""}, WHOLE),
        ({"prompt_template": "{unit}"}, None),  # it is the same in all rows
        (CHAT, NO_QUESTION),
    ],
)
def test_rows_that_templates_make_one_prompt_of_are_refused(flags, template, tmp_path):
    rows = [{"prompt": f"{n}+1", "question": n, "answer": n, "unit": "m"} for n in range(12)]
    path, flags = tmp_path / "p.jsonl", flags | {"reward": ["brevity"]}
    task_of(template, prompts=write(path, rows[:1] * 2), **flags)  # they are the same row
    fault = r"^all (12|24) rows are one prompt to the model, .*: name a \{column\} in"
    with pytest.raises(InputError, match=fault):
        task_of(template, prompts=write(path, rows), **flags)


def test_rows_of_ones_own_may_have_one_prompt(tmp_path, capsys):
    rows = [{"prompt": "x" * 500, "n": n} for n in range(12)]
    task_of(reward=["brevity"], prompts=write(tmp_path / "p.jsonl", rows))
    assert f"'{'x' * 200} ... {'x' * 200}'" in capsys.readouterr().out


def test_held_out_prompts_are_checked_like_the_others(tmp_path, monkeypatch):
    """The prompt with the most tokens is neither the one with the most letters nor the last one."""
    good = [{"prompt": "é" * 1020, "answer": 1}]
    long = [{"prompt": x, "answer": 1} for x in ("ü", "é" * 1020 + "a", "x" * 1500)]
    for bad, fault in (
        (long, "a prompt of 2041 tokens and 8 new ones don't fit .* context of 2048: .* cut 'éé"),
        ([], "needs prompts to train on and held-out ones"),
        ([{"prompt": "a"}], "needs a column answer in each row"),
        ([{"prompt": [HI, message(5)], "answer": 1}], "a prompt is text or messages of text"),
    ):
        for sides in ((bad, good), (good, bad)):
            files = [write(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate(sides)]
            with pytest.raises(InputError, match=fault):
                task_of(prompts=files[0], eval_prompts=files[1])
    assert task_of(prompts=write(tmp_path / "p.jsonl", good)).train == good, "2048 in all"
    monkeypatch.setattr(data, "context_length", lambda model: None)  # Bloom
    assert len(task_of(prompts=write(tmp_path / "p.jsonl", long)).train) == 3


def test_every_prompt_is_seen_once_per_pass():
    rows = [{"prompt": str(i)} for i in range(10)]
    steps = [prompt_batch(rows, step, 4, seed=0) for step in range(5)]
    seen = [row["prompt"] for batch in steps for row in batch]
    assert sorted(seen[:10]) == sorted(seen[10:]) == sorted(str(i) for i in range(10))
    assert seen[:10] != seen[10:]
    assert prompt_batch(rows, 3, 4, seed=0) == steps[3] != prompt_batch(rows, 3, 4, seed=1)
    assert len(prompt_batch(rows[:2], 0, 7, seed=0)) == 7
    task = task_of(seed=7)
    of_seeds = [prompt_batch(task.train, 0, 4, seed) for seed in (7, 0)]
    assert task.batch(0, 4) == of_seeds[0] != of_seeds[1]
    # The second pass of a seed is not the first one of the next seed.
    assert prompt_batch(rows, 1, 10, seed=0) != prompt_batch(rows, 0, 10, seed=1)


# --- Tokens ---


def test_a_thousand_prompts_at_most_are_tokenised_at_once(monkeypatch):
    """A call with 30,000 of them took 638 MB."""
    sizes, task = [], Task([], [], [])
    found = lambda _, some: sizes.append(len(some)) or [[int(x)] for x in some]  # noqa: E731
    monkeypatch.setattr(data, "prompt_tokens", found)
    ids, mask = task.encode([{"prompt": str(i)} for i in range(2500)])
    assert ids.shape == mask.shape == (2500, 1) and mask.dtype == torch.bool
    assert sizes == [1000, 1000, 500] and [*task.tokens.values()] == [(i,) for i in range(2500)]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", "<s>a"),
        ("<s>a", "<s>a"),
        ("a</s>", "<s>a</s>"),  # one that the text holds itself
        ([message("a")], "<s>[user]a;[assistant]"),
        ([message("<s>a", "system")], "<s>[system]<s>a;[assistant]"),
        ([message("<s>a", "")], "<s>a;[assistant]"),
        ([message("q"), message("So", "assistant")], "<s>[user]q;[assistant]So"),
        ([message("")], "<s>[user];[assistant]"),
    ],
)
def test_a_prompt_has_one_bos_and_no_eos(prompt, expected):
    """Of a tokenizer that adds BOS and EOS, with a template that writes BOS."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{% if m.role %}[{{ m.role }}]{% endif %}{{ m.content }};"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ends = [(str(x), tokenizer.convert_tokens_to_ids(str(x))) for x in ("<s>", "</s>")]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    [ids] = prompt_tokens(tokenizer, [prompt])
    assert tokenizer.decode(ids) == expected


def test_a_prompt_without_tokens_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(InputError, match="the prompt '  ' has no tokens; leave it out"):
        prompt_tokens(tokenizer, ["a", "  "])
