"""Prompts: read from files and datasets, in a template, split, in batches, as tokens."""

import json
import random
import sys
from pathlib import Path

import pytest
from small import byte_tokenizer, letter_tokenizer, task_of
from tokenizers import normalizers, processors

import grpo
import tasks
from plumbing.data import Task, encode_prompts, prompt_batch
from plumbing.errors import InputError

CHAT_TEMPLATE = (
    "{{ '<|endoftext|>' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def load(chat=False, **flags) -> Task:
    return task_of(CHAT_TEMPLATE if chat else None, **flags)


def rows_of(path, chat=False, **flags) -> list[dict]:
    """The rows of a file, in its order."""
    paths = {"prompts": str(path), "eval_prompts": str(path)}
    return load(chat, reward=["brevity"], **paths, **flags).heldout


def write(path: Path, rows: list) -> str:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return str(path)


def message(content: str, role: str = "user") -> dict:
    return {"role": role, "content": content}


# --- Rows ---


def test_json_lines_are_read_with_all_their_columns(tmp_path):
    # A line separator of Unicode ends no line of JSON, and a byte order mark is no part of it.
    rows = [{"prompt": "a\u2028b", "level": 3}, {"prompt": [message("c")]}]
    path = write(tmp_path / "p.jsonl", rows)
    for mark in (b"", b"\xef\xbb\xbf"):
        Path(path).write_bytes(mark + Path(path).read_bytes())
        assert rows_of(path, chat=True) == rows


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return datasets


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_are_read_with_all_their_columns(kind, datasets, tmp_path):
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": "2, 3", "answer": 5}]
    path = tmp_path / f"p.{kind}"
    getattr(datasets.Dataset.from_list(rows), f"to_{kind}")(str(path))
    assert rows_of(path) == rows


@pytest.mark.parametrize(
    ("prompts", "eval_prompts", "expected"),
    [
        ("flat", "flat", ("flat train", "flat test", 20)),
        ("flat::test[:3]", "flat:", ("flat test", "flat test", 3)),
        ("hub:main", "hub:main", ("main train", "main test", 20)),
        ("hub:main:test", "hub:more:train", ("main test", "more train", 20)),
    ],
)
def test_of_a_dataset_the_named_subset_and_split_are_read_else_train_and_test(
    prompts, eval_prompts, expected, datasets, tmp_path, monkeypatch
):
    """Folders as the hub stores them: a file for each split, a folder for each subset."""
    monkeypatch.chdir(tmp_path)
    for folder in ("flat", "hub/main", "hub/more"):
        Path(folder).mkdir(parents=True)
        for split in ("train", "test"):
            rows = [{"prompt": f"{Path(folder).name} {split}", "n": n} for n in range(20)]
            path = f"{folder}/{split}-00000-of-00001.parquet"
            datasets.Dataset.from_list(rows).to_parquet(path)
    task = load(prompts=prompts, eval_prompts=eval_prompts, reward=["brevity"])
    assert (task.train[0]["prompt"], task.heldout[0]["prompt"], len(task.train)) == expected
    assert [row["n"] for row in task.heldout] == [*range(20)]
    with pytest.raises(InputError, match=r"--eval_prompts flat::none \(split none\): "):
        load(eval_prompts="flat::none", reward=["brevity"])


def test_without_the_library_datasets_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets, or give a file of JSON lines"):
        load(prompts="some/where")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty; each line must be"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}', 'line 3: no key "prompt"'),
        ('["prompt"]', "line 1: not an object"),
        ('{"prompt": 5}', "line 1"),
        ('{"prompt": ""}', "line 1"),
        ('{"prompt": [{"role": "user"}]}', 'line 1: a message has no text as "content"'),
        ('{"prompt": [{"content": "a"}]}', 'line 1: a message has no text as "role"'),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "line 1: .* no text"),
        ('{"prompt": [{"role": "user", "content": ["a", {}]}]}', "line 1: .* no text"),
    ],
)
def test_a_fault_in_a_file_is_named_with_its_line(text, fault, tmp_path):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(InputError, match=f"p.jsonl.*{fault}") as error:
        rows_of(tmp_path / "p.jsonl")
    assert "\n" not in str(error.value)


def test_the_prompts_of_a_task_are_checked_as_those_of_a_file(monkeypatch):
    rows = [{"prompt": [message(None)]}]
    monkeypatch.setitem(tasks.TASKS, "mine", lambda chat: Task(rows, rows, [tasks.brevity]))
    with pytest.raises(InputError, match=r"^--task mine: a message has no text as .content"):
        load(chat=True, task="mine")


# --- The template and the system prompt ---


def test_a_template_takes_any_column_and_doubled_braces_are_braces(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": "{n}", "n": 3, "x": None}])
    (row,) = rows_of(path, prompt_template="{{{prompt}}} \\boxed{{}} {n:02} {x}")
    assert row == {"prompt": "{{n}} \\boxed{} 03 None", "n": 3, "x": None}
    path = write(tmp_path / "q.jsonl", [{"question": [1, 2]}])
    (row,) = rows_of(path, prompt_template="{question}?")
    assert row == {"prompt": "[1, 2]?", "question": [1, 2]}, "a row needs no prompt of its own"


def test_a_column_alone_is_the_prompt_text_or_messages_as_they_are(tmp_path):
    rows = [{"messages": [message("a", "system"), message("b")]}, {"messages": "{c}"}]
    found = rows_of(write(tmp_path / "p.jsonl", rows), chat=True, prompt_template="{messages}")
    assert found == [row | {"prompt": row["messages"]} for row in rows]


@pytest.mark.parametrize(
    ("template", "row", "fault"),
    [
        ("\\boxed{} {prompt}", {"prompt": "a"}, "--prompt_template: {} names no column; a brace"),
        ("{prompt", {"prompt": "a"}, "--prompt_template: .*; a brace"),
        ("prompt", {"prompt": "a"}, "--prompt_template: names no column"),
        ("{qestion}", {"question": "a"}, 'line 1: no key "qestion", .*; did you mean question?'),
        ("{n:d}", {"n": None}, "line 1: unsupported format"),
        ("{n}", {"n": 3}, 'line 1: "n" is neither text nor messages'),
        ("<{prompt}>", {"prompt": ""}, 'line 1: "prompt" is neither .* or is empty'),
        ("<{prompt}>", {"prompt": []}, 'line 1: "prompt" is neither'),
        (
            "<{prompt}>",
            {"prompt": [{"role": "user"}]},
            'line 1: a message has no text as "content"',
        ),
    ],
)
def test_a_template_that_does_not_fit_a_row_is_refused_in_one_line(template, row, fault, tmp_path):
    path = write(tmp_path / "p.jsonl", [row])
    with pytest.raises(InputError, match=fault) as error:
        rows_of(path, prompt_template=template)
    assert "\n" not in str(error.value)


def test_every_prompt_gets_the_template_once_and_of_messages_the_last_one(tmp_path):
    texts = [f"{{prompt}}{i}" for i in range(20)]
    path = write(tmp_path / "a.jsonl", [{"prompt": text, "answer": "1"} for text in texts])
    template = tmp_path / "template.txt"
    template.write_text("<{prompt}>\n")  # the last line break is not part of it
    split = load(prompts=path, prompt_template=str(template))
    found = {row["prompt"] for row in split.train + split.heldout}
    assert found == {f"<{text}>" for text in texts}
    mixed = load(eval_prompts=path, prompt_template="<{prompt}>")  # the task's, and those of a file
    assert [row["prompt"] for row in mixed.heldout] == [f"<{text}>" for text in texts]
    plain = load().train
    assert [row["prompt"] for row in mixed.train] == [f"<{row['prompt']}>" for row in plain]
    chat = write(tmp_path / "b.jsonl", [{"prompt": [message("a"), message("b")]}])
    assert rows_of(chat, chat=True, prompt_template="<{prompt}>") == [
        {"prompt": [message("a"), message("<b>")]}
    ]


def test_a_system_prompt_comes_before_every_prompt_and_makes_messages_of_text(tmp_path):
    system = message("Be brief.", "system")
    path = write(tmp_path / "a.jsonl", [{"prompt": "hi"}, {"prompt": [message("hi")]}])
    expected = [{"prompt": [system, message("<hi>")]}] * 2
    flags = {"chat": True, "prompt_template": "<{prompt}>"}
    assert rows_of(path, system_prompt="Be brief.", **flags) == expected
    task = load(chat=True, system_prompt="Be brief.")  # of the task's own prompts
    assert all(row["prompt"][0] == system for row in task.train + task.heldout)
    without = [{"prompt": [message("<hi>")]}] * 2
    assert rows_of(path, system_prompt="", **flags) == without, "no empty system message"
    path = write(tmp_path / "b.jsonl", [{"prompt": [system, message("hi")]}])
    with pytest.raises(InputError, match=r"b.jsonl, line 1: .* already: leave out --system_prompt"):
        rows_of(path, system_prompt="x", **flags)


# --- What is held out, and the batch of a step ---


def test_a_tenth_of_a_file_is_held_out_and_of_fewer_than_ten_none(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    for n, sizes in ((1, (1, 1)), (2, (2, 2)), (9, (9, 9)), (10, (9, 1)), (6000, (5488, 512))):
        write(path, [{"prompt": f"p{i}"} for i in range(n)])
        task = load(prompts=str(path), reward=["brevity"])
        assert (len(task.train), len(task.heldout)) == sizes
        assert ("none is held out" in capsys.readouterr().out) == (n < 10)
        sides = [{row["prompt"] for row in rows} for rows in (task.train, task.heldout)]
        assert len(sides[0] | sides[1]) == n and (n < 10 or not sides[0] & sides[1])
    write(path, [{"prompt": f"p{i % 40}", "n": i} for i in range(50)])  # some twice
    task = load(prompts=str(path), reward=["brevity"])
    heldout = {row["prompt"] for row in task.heldout}
    assert heldout and heldout.isdisjoint(row["prompt"] for row in task.train)


def test_what_is_held_out_is_the_whole_of_eval_prompts_and_nothing_of_prompts(tmp_path):
    rows = [{"prompt": f"{i}", "answer": "1"} for i in range(50)]
    train = write(tmp_path / "a.jsonl", rows[:20])
    test = write(tmp_path / "b.jsonl", rows[20:])
    task = load(prompts=train, eval_prompts=test)
    assert (task.train, task.heldout) == (rows[:20], rows[20:])
    own = load(eval_prompts=test)
    assert (own.train, own.heldout) == (load().train, rows[20:]), "trained on the task's sums"


def test_every_prompt_is_seen_once_per_pass_and_batches_depend_on_seed_and_step_alone():
    rows = [{"prompt": str(i)} for i in range(10)]
    steps = [prompt_batch(rows, step, 4, seed=0) for step in range(5)]
    assert all(len(batch) == 4 for batch in steps)
    seen = [row["prompt"] for batch in steps for row in batch]
    assert sorted(seen[:10]) == sorted(seen[10:]) == sorted(str(i) for i in range(10))
    assert seen[:10] != seen[10:]
    assert prompt_batch(rows, 3, 4, seed=0) == steps[3]
    assert prompt_batch(rows, 3, 4, seed=1) != steps[3]
    assert len(prompt_batch(rows[:2], 0, 7, seed=0)) == 7
    # The second pass of a seed is not the first one of the next seed.
    assert prompt_batch(rows, 1, 10, seed=0) != prompt_batch(rows, 0, 10, seed=1)
    # A run that began before the orders were kept is resumed with the same prompts.
    passes = [random.Random(f"7,{number}").sample(rows, 10) for number in (1, 2)]
    assert prompt_batch(rows, 2, 8, seed=7) == passes[0][6:] + passes[1][:4]


# --- Tokens ---


def test_prompts_are_padded_on_the_left_and_masked():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<added to the tokenizer alone>"})
    ids, mask = encode_prompts(tokenizer, [{"prompt": "abc"}, {"prompt": "d"}])
    assert tokenizer.pad_token_id == 257 and ids.max() < 257, "an id that the model doesn't know"
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]] and ids[1, 2] == ids[0, 0] + 3


BEGUN = [message("q"), message("So", "assistant")]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", "<s>a"),
        ("<s>a", "<s>a"),
        ("a</s>", "<s>a</s>"),  # one that the text holds itself
        ([message("a")], "<s>[user]a;[assistant]"),
        ([message("<s>a", "system")], "<s>[system]<s>a;[assistant]"),
        ([message("<s>a", "")], "<s>a;[assistant]"),
        (BEGUN, "<s>[user]q;[assistant]So"),
        ([message([{"type": "text", "text": "a"}, "b"])], "<s>[user]ab;[assistant]"),
        ([message("q") | {"tool_calls": None}], "<s>[user]q;[assistant]"),
        ([CALL, message("3", "tool")], "<s>[assistant];(1)[tool]3;[assistant]"),
        ([message("")], "<s>[user];[assistant]"),
    ],
)
def test_a_prompt_has_one_bos_no_eos_and_opens_or_continues_the_assistants_turn(
    prompt, expected, tmp_path
):
    """Of a tokenizer that adds BOS and EOS, with a template that writes BOS."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{% if m.role %}[{{ m.role }}]{% endif %}{{ m.content }};"
        "{% if m.tool_calls is defined %}({{ m.tool_calls | length }}){% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ends = [(str(x), tokenizer.convert_tokens_to_ids(str(x))) for x in ("<s>", "</s>")]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    (row,) = {
        str(r): r for r in rows_of(write(tmp_path / "p.jsonl", [{"prompt": prompt}]), chat=True)
    }.values()
    ids, _ = encode_prompts(tokenizer, [row])
    assert tokenizer.decode(ids[0]) == expected


@pytest.mark.parametrize(
    ("prompt", "template", "fault"),
    [
        (" ", None, "' ' has no tokens"),
        ("a\ud800", None, "can't be tokenised"),
        ([message("a")], None, "the prompts are chat messages, .* no chat template"),
        ([message("a")], "{{ raise_exception('roles must alternate') }}", "can't be tokenised"),
    ],
)
def test_a_prompt_that_gives_no_tokens_is_refused_in_one_line(prompt, template, fault):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer._tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(InputError, match=fault) as error:
        encode_prompts(tokenizer, [{"prompt": "b"}, {"prompt": prompt}])
    assert "\n" not in str(error.value)


def test_prompts_that_leave_no_room_or_that_the_model_lacks_a_token_of_are_refused(
    make_job, tmp_path
):
    """Of a model with 20 tokens and a context of 64, before the run; the last token is <eos>."""
    job, path = make_job(grpo), tmp_path / "p.jsonl"
    job(prompts=write(path, [{"prompt": "<eos>" + "x" * 57}]), max_new_tokens=6)
    write(path, [{"prompt": "x" * 59}])
    for flag in ("prompts", "eval_prompts"):
        with pytest.raises(InputError, match="59 tokens leaves no room for 6 new ones"):
            job(**{flag: path}, max_new_tokens=6)
    tokenizer = letter_tokenizer()
    tokenizer.add_tokens("<new>")
    tokenizer.save_pretrained(job.model)
    write(path, [{"prompt": "a<new>"}])
    with pytest.raises(InputError, match="gives id 20, and the model knows 20 tokens"):
        job(prompts=path)
