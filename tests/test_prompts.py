"""Prompts of one's own: columns, subsets, splits, templates, system messages, what is held out."""

import json
from pathlib import Path

import pytest
import torch
from small import byte_tokenizer
from test_tasks import CHAT_TEMPLATE, task_config

from plumbing.data import load_task
from plumbing.errors import InputError
from plumbing.prompts import after_system, fill, names_in, read_prompts, text_or_file
from tasks import REWARDS, TASKS

CPU = torch.device("cpu")
GSM8K = Path(__file__).with_name("gsm8k")


def load(chat=False, **options):
    tokenizer = byte_tokenizer()
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return load_task(task_config(**options), TASKS, REWARDS, tokenizer, CPU)


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def hub_folder(tmp_path):
    """A dataset as the hub stores it: a folder for each subset, a Parquet file for each split."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    for subset in ("main", "socratic"):
        (tmp_path / "hub" / subset).mkdir(parents=True)
        for split in ("train", "test"):
            lines = (GSM8K / f"{split}.jsonl").read_text().splitlines()
            rows = [json.loads(line) | {"subset": subset} for line in lines]
            path = tmp_path / "hub" / subset / f"{split}-00000-of-00001.parquet"
            datasets.Dataset.from_list(rows).to_parquet(path)
    return str(tmp_path / "hub")


def test_the_forty_problems_have_answers_that_their_own_calculations_give():
    for name, count in (("train", 30), ("test", 10)):
        rows = [json.loads(x) for x in (GSM8K / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count and all(row.keys() == {"question", "answer"} for row in rows)
        for row in rows:
            calculations = row["answer"].split("<<")[1:]
            last = calculations[-1].partition(">>")[0].rpartition("=")
            result = row["answer"].rpartition("#### ")[2].replace(",", "")
            assert float(last[2]) == pytest.approx(eval(last[0])) == float(result), row


@pytest.mark.slow
def test_a_folder_in_the_layout_of_the_hub_has_subsets_and_splits(hub_folder):
    options = dict(subset="socratic", prompt_column="question", reward=["gsm8k"])
    task = load(prompts=hub_folder, eval_split="test", **options)
    assert (len(task.train), len(task.heldout)) == (30, 10)
    assert {row["subset"] for row in task.train + task.heldout} == {"socratic"}
    assert task.train[0]["prompt"] == task.train[0]["question"]
    swapped = load(prompts=hub_folder, split="test", eval_split="train", **options)
    assert swapped.train == task.heldout and swapped.heldout == task.train


@pytest.mark.slow
def test_a_split_that_is_not_there_is_named_with_its_flags(hub_folder):
    with pytest.raises(InputError, match=r"--prompts .* --subset main --split dev: .*dev"):
        read_prompts(hub_folder, "dev", "main")
    with pytest.raises(InputError, match=r"--prompts .*hub --subset mian --split train: "):
        read_prompts(hub_folder, "train", "mian")


def test_what_is_held_out_is_the_whole_of_eval_prompts_and_nothing_of_prompts(tmp_path):
    train = write(tmp_path / "a.jsonl", [{"prompt": f"{i}", "answer": "1"} for i in range(20)])
    test = write(tmp_path / "b.jsonl", [{"prompt": f"x{i}", "answer": "2"} for i in range(30)])
    task = load(prompts=train, eval_prompts=test)
    assert [row["prompt"] for row in task.train] == [f"{i}" for i in range(20)]
    assert [row["prompt"] for row in task.heldout] == [f"x{i}" for i in range(30)]
    own = load(eval_prompts=test)
    assert own.heldout == task.heldout and len(own.train) > 1000, "trained on the task's sums"


def test_eval_prompts_of_a_dataset_are_its_split_test_unless_another_one_is_named(monkeypatch):
    asked = []

    def read(name, split, subset, **options):
        asked.append((name, split, subset))
        return [{"prompt": "1", "answer": "1"}]

    monkeypatch.setattr("plumbing.data.read_prompts", read)
    load(prompts="a/b", subset="main", eval_prompts="c/d")
    load(prompts="a/b", eval_split="dev")
    load(eval_prompts="c/d", eval_split="dev")
    assert asked == [
        ("a/b", "train", "main"), ("c/d", "test", "main"),
        ("a/b", "train", None), ("a/b", "dev", None),
        ("c/d", "dev", None),
    ]  # fmt: skip


def test_a_file_of_held_out_prompts_has_no_subset_whatever_the_dataset_has(tmp_path, monkeypatch):
    test = write(tmp_path / "b.jsonl", [{"prompt": "x", "answer": "2"}])
    asked = []
    monkeypatch.setattr(
        "plumbing.prompts._from_datasets",
        lambda *given: asked.append(given) or [(1, {"prompt": "1", "answer": "1"})],
    )
    task = load(prompts="a/b", subset="main", eval_prompts=test)
    assert task.heldout[0]["prompt"] == "x" and asked[0][:3] == ("a/b", "train", "main")


def test_held_out_prompts_of_ones_own_are_not_judged_by_the_verifier_of_the_task(tmp_path):
    test = write(tmp_path / "b.jsonl", [{"prompt": "x"}])
    assert load(eval_prompts=test, reward=["brevity"]).verifier is None


def test_rows_of_eval_prompts_need_the_answers_of_the_task_as_well(tmp_path):
    test = write(tmp_path / "b.jsonl", [{"prompt": "x"}])
    with pytest.raises(InputError, match=r"b.jsonl: task add needs a key \"answer\""):
        load(eval_prompts=test)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"eval_split": "test"}, "--eval_split test: needs --prompts or --eval_prompts"),
        ({"eval_split": "test", "prompts": "a.jsonl"}, "one file, and has no splits; --eval_pro"),
        ({"subset": "main", "prompts": "a.jsonl"}, "--subset main: a.jsonl is one file"),
        ({"prompts": "a.jsonl", "prompt_column": "questoin"},
         'a.jsonl, line 1: no key "questoin", there are prompt, question, answer: did you mean q'),
        ({"prompts": "a.jsonl", "prompt_column": "answer"}, '"answer" is neither text nor'),
        ({"prompts": "a.jsonl", "prompt_template": "{promt}:"},
         "--prompt_template: no column promt, there are prompt, question, answer: did you mean pr"),
        ({"prompts": "a.jsonl", "prompt_template": "Solve it."}, "names no column"),
        ({"prompt_template": "{promt}:"}, "^--prompt_template: no column promt"),
        ({"prompts": "a.jsonl", "system_prompt": "Be brief."}, "no chat template; write the text"),
        ({"subset": "main"}, "--subset main: needs --prompts or --eval_prompts"),
        ({"prompt_column": "question"}, "--prompt_column question: needs --prompts or"),
        ({"prompt_template": "templat.txt"}, "--prompt_template templat.txt: there is no such"),
        ({"prompts": "a.jsonl", "reward": ["gsm8k"], "eval_prompts": "b.jsonl"},
         "the reward gsm8k finds no number in the answer 'unknown'"),
        ({"prompts": "b.jsonl", "verifier": "numeric_match", "reward": ["brevity"]},
         "numeric_match needs a number as the answer of each row"),
        ({"eval_prompts": "none.jsonl"}, "--eval_prompts none.jsonl: can't be read"),
        ({"verifier": "nothing"}, "--verifier nothing: write it as FILE.py:FUNCTION, or choose"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_that_names_it(options, fault, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("a.jsonl"), [{"prompt": "1", "question": "2", "answer": 3}])
    write(Path("b.jsonl"), [{"prompt": "1", "answer": "unknown"}])
    with pytest.raises(InputError, match=fault) as error:
        load(**options)
    assert "\n" not in str(error.value)


def test_the_prompt_is_the_column_that_is_named_and_other_columns_stay(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "1+1?", "prompt": "not this", "answer": "2"}])
    expected = {"question": "1+1?", "prompt": "1+1?", "answer": "2"}
    assert read_prompts(path, column="question") == [expected]


def test_a_template_takes_any_column_and_doubled_braces_are_braces():
    template = "{{{prompt}}} \\boxed{} {n} {0x} { prompt }"
    assert names_in(template) == ["prompt", "n", "0x"]
    columns = {"prompt": "{n}", "n": 3, "0x": None}
    assert fill(template, columns) == "{{n}} \\boxed{} 3 None { prompt }"


def test_a_template_is_filled_once_for_files_for_tasks_and_for_what_is_held_out(tmp_path):
    rows = [{"prompt": f"{{prompt}}{i}", "answer": "1"} for i in range(20)]
    path = write(tmp_path / "a.jsonl", rows)
    task = load(prompts=path, prompt_template="<{prompt}|{answer}>")
    found = sorted(row["prompt"] for row in task.train + task.heldout)
    assert found == sorted(f"<{row['prompt']}|1>" for row in rows)
    both = load(prompts=path, eval_prompts=path, prompt_template="<{prompt}>")
    assert both.train == both.heldout and both.train[0]["prompt"] == "<{prompt}0>"
    own = load(prompt_template="Q: {prompt}")
    assert all(r["prompt"].startswith("Q: ") for r in own.train + own.heldout)
    assert own.train[0]["prompt"].count("Q: ") == 1
    mixed = load(eval_prompts=path, prompt_template="Q: {prompt}")
    assert mixed.train == own.train and mixed.heldout[0]["prompt"] == "Q: {prompt}0"


def test_rows_without_a_prompt_get_one_from_a_template_that_needs_none(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"nums": [1, 2, 3], "target": 6}])
    rows = read_prompts(path, template="Make {target} of {nums}.")
    assert rows == [{"nums": [1, 2, 3], "target": 6, "prompt": "Make 6 of [1, 2, 3]."}]


def test_of_messages_the_last_one_is_filled_into_the_template(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    path = write(tmp_path / "a.jsonl", [{"prompt": messages}])
    (row,) = read_prompts(path, template="<{prompt}>")
    assert row["prompt"] == [messages[0], {"role": "user", "content": "<b>"}]


def test_a_system_prompt_makes_messages_of_text_and_an_empty_one_no_system_message():
    user = {"role": "user", "content": "hi"}
    assert after_system("Be brief.", "hi") == [{"role": "system", "content": "Be brief."}, user]
    assert after_system("", "hi") == [user]
    assert after_system("Be brief.", [user]) == after_system("Be brief.", "hi")
    with pytest.raises(ValueError, match="already"):
        after_system("", [{"role": "system", "content": "x"}, user])


def test_the_system_prompt_comes_before_every_prompt_after_the_template(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"{i}", "answer": "1"} for i in range(20)])
    options = dict(prompts=path, prompt_template="<{prompt}>", system_prompt="Be brief.")
    task = load(chat=True, **options)
    for row in task.train + task.heldout:
        system, user = row["prompt"]
        assert system == {"role": "system", "content": "Be brief."}
        assert user["role"] == "user" and user["content"][0] + user["content"][-1] == "<>"
    task = load(chat=True, system_prompt="Be brief.")  # of the task's own prompts
    assert all(len(row["prompt"]) == 2 for row in task.train + task.heldout)


def test_text_or_the_file_of_that_name(tmp_path):
    path = tmp_path / "template.txt"
    path.write_text("{prompt}\nA:\n")
    assert text_or_file(str(path), "--x") == "{prompt}\nA:"
    for text in ("{prompt}\nA:", "a" * 5000, str(tmp_path / "other.template"), "", "\0"):
        assert text_or_file(text, "--x") == text
    assert text_or_file(None, "--x") is None
    with pytest.raises(InputError, match=r"--x othr.txt: there is no such file"):
        text_or_file("othr.txt", "--x")
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"--x .*template.txt: can't be read"):
        text_or_file(str(path), "--x")


# --- Verifiers ---


def test_the_verifier_is_the_one_that_is_named_else_a_reward_that_is_one_else_the_tasks(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "1"}] * 20)
    (tmp_path / "r.py").write_text("def own(completions, **columns): return [0.5] * 3")
    own = f"{tmp_path}/r.py:own"
    by_name = load(prompts=path, reward=["brevity", "gsm8k", "exact_match"])
    assert by_name.verifier is REWARDS["gsm8k"]
    assert (
        load(prompts=path, reward=["gsm8k"], verifier="exact_match").verifier
        is (REWARDS["exact_match"])
    )
    assert load(prompts=path, reward=["gsm8k"], verifier=own).verifier.__name__ == "own"
    assert load(prompts=path, reward=["brevity"]).verifier is None
    assert load(reward=["brevity"]).verifier is REWARDS["numeric_match"], "the task's"
    assert load(verifier="exact_match").verifier is REWARDS["exact_match"]
    assert load(verifier="exact_match").rewards == load().rewards, "trained on as before"


ANSWER = "She has 7 * 10 = <<7*10=70>>70, and 2 more: 72.\n#### 72"


@pytest.mark.parametrize(
    ("completion", "right", "strict"),
    [
        ("#### 72", 1, 1),
        ("so 72", 1, 0),
        ("It is $72.", 1, 0),
        ("#### $72.00", 1, 1),
        ("#### 72.", 1, 1),
        ("70 + 2 = 72 dollars, as 3 * 24", 0, 0),
        ("\\boxed{72}, since 70 + 2", 1, 0),
        ("The answer is \\boxed{\\text{72}} of 99.", 1, 0),
        ("#### 72 or so 5", 1, 1),
        ("#### 72\nQ: 99", 1, 1),
        ("#### 71\n#### 72", 1, 1),
        ("#### 72\n#### 71", 0, 0),
        ("72 ####", 1, 0),
        ("####\n72", 1, 1),
        ("#### Solution:\n3*24 = 72. The answer is 72.", 1, 0),
        ("#### Step 1: add\nso \\boxed{72}", 1, 0),
        ("#### -$72", 0, 0),
        ("#### Final Answer\n\\boxed{72}", 1, 0),
        ("#### 72\n#### ", 1, 1),
        ("72km", 1, 0),
        ("-72", 0, 0),
        ("172", 0, 0),
        ("72,000", 0, 0),
        ("no number", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k_reads_the_result_as_it_is_written(completion, right, strict):
    assert REWARDS["gsm8k"]([completion], answer=[ANSWER]) == [right]
    assert REWARDS["gsm8k_strict"]([completion], answer=[ANSWER]) == [strict]
    message = [{"role": "assistant", "content": completion}]
    assert REWARDS["gsm8k"]([message], answer=[ANSWER]) == [right]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("1,234.5", "#### 1234.50"), ("1234", "#### 1,234"), ("\\boxed{1{,}234}", "#### 1,234"),
        ("-7 degrees", "#### -7"), ("\\$ 5", "5"), ("12 345 678", "#### 678"), (".5", "#### 0.5"),
        ("1,024g", "#### 1024"), ("#### -$5", "#### -5"),
    ],
)  # fmt: skip
def test_gsm8k_compares_numbers_and_not_how_they_are_written(completion, answer):
    assert REWARDS["gsm8k"]([completion], answer=[answer]) == [1.0]


def test_an_answer_without_a_number_is_refused_by_its_text():
    with pytest.raises(InputError, match="the reward gsm8k finds no number in the answer 'none'"):
        REWARDS["gsm8k"](["1"], answer=["none"])


def test_the_form_of_an_answer_has_a_reward_of_its_own():
    texts = ["#### 72", "x\n#### 1,072 ", "#### 72 apples", "####", "#### 1 #### 1", "72", ""]
    assert REWARDS["answer_form"](texts) == [1, 1, 0.5, 0.5, 0, 0, 0]
