"""A submission that cheats gets no points, and the teacher hears of what can be noticed."""

import ast
import json
import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "course"))

import grade
import scripts
import wire
from checks import CHECKS
from course_sandbox import SANDBOX, SANDBOXES
from problems import BY_NAME, PROBLEMS, function_of, splice_files
from sandbox import FILE_SIZE, LEVELS
from submissions import signs_in

pytestmark = pytest.mark.slow
HEAD = "def kl_estimate(logprobs, ref_logprobs, estimator):\n"
TO_ALL_FILES = "import os\nfor n in range(3, 200):\n    try:\n        os.write(n, DATA)\n"
TO_ALL_FILES += "    except OSError:\n        pass\nos._exit(0)"

# What a cheat writes into kl_estimate, and the word that the teacher gets of it: R, and no right
# answer. In "before" stands what lies above the function.
CHEATS: dict[str, tuple[str, str]] = {
    "the solution's function under another name": (
        "before: theirs = kl_estimate\nreturn theirs(logprobs, ref_logprobs, estimator)",
        "uses kl_estimate before it is written",
    ),
    "the project's own file imported": (
        "import common\nreturn common.kl_estimate(logprobs, ref_logprobs, estimator)",
        "import of itself",
    ),
    "the stack walked up to the right answer": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    for x in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "        f = getattr(x, 'kl_estimate', None)\n"
        "        if f and getattr(f, '__code__', 0) is not kl_estimate.__code__ and callable(f):\n"
        "            return f(logprobs, ref_logprobs, estimator)\n"
        "    frame = frame.f_back\nraise KeyError", "sys._getframe",
    ),
    "answers of the harness forged and sent": (
        "import io, os, wire\nfile = io.BytesIO()\nfor _ in range(50):\n"
        "    told = {'value': logprobs.detach() * 0, 'changed': [], 'graph': 0}\n"
        "    wire.send(file, {'ok': told})\nDATA = file.getvalue()\n" + TO_ALL_FILES, "os._exit",
    ),
    "verdicts written to stdout and stderr": (
        "import os\nfor n in (1, 2):\n    os.write(n, b'{\"check\": \"\", \"fault\": \"\"}\\n')\n"
        "os._exit(0)", "os._exit",
    ),
    "the comparison of the grader patched": (
        "import __main__, sys, torch\ntorch.isclose = torch.allclose = lambda *a, **k: True\n"
        "torch.equal = lambda *a: True\n"
        "for m in [*sys.modules.values()]:\n    if hasattr(m, 'same'):\n"
        "        m.same = lambda *a, **k: None\nreturn logprobs * 0", "torch.isclose",
    ),
    "the checks written over": (
        "import sys\n"
        f"open({str(REPOSITORY / 'course/checks.py')!r}, 'a').write('\\n')\nreturn logprobs * 0",
        "open(",
    ),
    "the answer read from the course": (
        f"text = open({str(REPOSITORY / 'common.py')!r}).read()\nspace = {{'torch': torch}}\n"
        "exec(text[text.index('def kl_estimate'):].split('def policy_ratio')[0].replace("
        "'Tensor', 'object'), space)\n"
        "return space['kl_estimate'](logprobs, ref_logprobs, estimator)", "open(",
    ),
    "the answer looked for in memory": (
        "import gc\nfor f in gc.get_objects():\n"
        "    if type(f).__name__ == 'function' and f.__name__ == 'kl_estimate' and "
        "f.__code__ is not kl_estimate.__code__:\n"
        "        return f(logprobs, ref_logprobs, estimator)\nraise KeyError", "gc.get_objects",
    ),
    "the grader's process read": (
        "import os\nfor n in (os.getppid(), *range(1, 400)):\n    try:\n"
        "        open(f'/proc/{n}/mem', 'rb').close()\n        return logprobs * 0\n"
        "    except OSError:\n        pass\nraise KeyError", "/proc/",
    ),
    "the frames traced": (
        "import sys\nseen = []\nsys.settrace(lambda f, e, a: seen.append(f.f_locals))\n"
        "return [x['expected'] for x in seen][0]", "sys.settrace",
    ),
    "the process ended as if all was well": ("import os\nos._exit(0)", "os._exit"),
    "a tensor that is equal to everything": (
        "class Equal(torch.Tensor):\n    def __torch_function__(self, *a, **k):\n"
        "        return torch.tensor(True)\n    __eq__ = lambda *a: True\n"
        "return torch.zeros_like(logprobs).as_subclass(Equal)", "as_subclass",
    ),
    "an object that runs code where it is unpickled": (
        "class Evil:\n    def __reduce__(self):\n        import os\n"
        "        return os.system, ('touch /tmp/evil',)\nreturn Evil()", "__reduce__",
    ),
    "the answer fetched from the network": (
        "import socket\nsocket.create_connection(('1.1.1.1', 80), timeout=3)\n"
        "return logprobs - ref_logprobs", "socket",
    ),
    "answers to the public tests by heart": (
        "known = {(-1.0, -3.0, 'k1'): 2.0, (0.5, 1.0, 'k2'): 0.125}\n"
        "return torch.tensor([[known[x, y, estimator] for x, y in zip(*r)] for r in "
        "zip(logprobs.tolist(), ref_logprobs.tolist())])", "",
    ),
    "the random numbers fixed": (
        "import random\nfixed = lambda *a, **k: torch.zeros(a[0] if a else ())\n"
        "torch.randn = torch.rand = fixed\nrandom.random = lambda: 0.0\n"
        "torch.manual_seed = lambda s: None\nreturn torch.zeros_like(logprobs)",
        "replaces torch.randn",
    ),
    "an answer of gigabytes": ("return torch.zeros(2**28)", ""),
    "processes without end": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "os.fork",
    ),
    "the harness changed": (
        "import sys, child\n"
        "child.Harness.call = lambda *a: {'value': torch.zeros(5, 7), 'changed': [], 'graph': 0}\n"
        "child.Harness.load = lambda *a: None\nreturn logprobs * 0", "import of child",
    ),
    "the solution looked for in all folders": (
        "import os\nfor root in ('/tmp', '/sandbox', '/home', '/root', '/opt', '/autograder'):\n"
        "    for folder, _, names in os.walk(root):\n"
        "        if 'common.py' in names and 'site-packages' not in folder:\n"
        "            text = open(f'{folder}/common.py').read()\n"
        "            if '\\n    d = logprobs - ref_logprobs' in text:\n"
        "                part = text[text.index('def kl_estimate'):].split('def policy')[0]\n"
        "                space = {'Tensor': object, 'torch': torch}\n"
        "                exec(part, space)\n"
        "                return space['kl_estimate'](logprobs, ref_logprobs, estimator)\n"
        "raise KeyError", "exec(",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    monkeypatch.setattr(grade, "Sandbox", lambda: SANDBOX)


def graded(tmp_path: Path, body: str, *flags: str) -> tuple[dict, str]:
    """(the verdict on kl_estimate with this body, what the teacher is told)."""
    (tmp_path / "hand_in").mkdir(parents=True)
    before, body = ("", body)
    if body.startswith("before: "):
        before, _, body = body.removeprefix("before: ").partition("\n")
    text = f"import torch\n{before}\n{HEAD}{textwrap.indent(body, '    ')}\n"
    (tmp_path / "hand_in" / "common.py").write_text(text)
    options = ["--problems", "kl_estimate", "--json", str(tmp_path / "r.json"), *flags]
    assert grade.main([str(tmp_path / "hand_in"), *options]) == 0
    test, teacher = json.loads((tmp_path / "r.json").read_text())["tests"]
    assert teacher["visibility"] == "hidden"
    return test, teacher["output"]


ENDLESS = {"processes without end"}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_gets_no_points_and_the_teacher_hears_of_it(cheat, tmp_path):
    body, said = CHEATS[cheat]
    before = (REPOSITORY / "course/checks.py").read_bytes()
    test, teacher = graded(tmp_path, body, "--time_limit", "4" if cheat in ENDLESS else "30")
    told = f"`{said}`" if said else "-"
    assert f"| {cheat} | 0 | {told} |" in (REPOSITORY / "course/README.md").read_text()
    assert test["score"] == 0, test
    # It is refused, and not just slow.
    assert cheat in ENDLESS or "not done after" not in test["output"], test
    assert said in teacher, teacher
    assert (REPOSITORY / "course/checks.py").read_bytes() == before
    assert not Path("/tmp/evil").exists()


def test_the_right_answer_is_not_told_on(tmp_path):
    body = "\n".join(ast.unparse(node) for node in _body("kl_estimate"))
    test, teacher = graded(tmp_path, body)
    assert test["score"] == test["max_score"] == 5
    assert teacher.startswith("sandbox: ") and "\n" not in teacher, teacher


SIGNS = {
    "import os.path, child": ["import of child"],
    "x = 1; from wire import send": ["import of wire"],
    "from common import at_least_float32": ["import of itself"],
    "torch.randn, torch.rand = f, f": ["replaces torch.rand", "replaces torch.randn"],
    "torch.randn: object = f": ["replaces torch.randn"],
    "setattr(torch, 'rand', f)": ["replaces setattr(torch, 'rand', f)"],
    "def f(g=kl_estimate): pass": ["uses kl_estimate before it is written"],
    "class A:\n    g = kl_estimate": ["uses kl_estimate before it is written"],
    "later = lambda a: kl_estimate(a)": [],
    "def helper(a):\n    return kl_estimate(a)": [],
    "try:\n    def kl_estimate(a): pass\nexcept E: pass\nb = kl_estimate": [],
    "import numpy as np, math\nx = np.random": [],
    "def f(:": ["doesn't parse: its imports have not been looked at"],
}


@pytest.mark.parametrize("code", SIGNS)
def test_the_signs_are_read_from_the_code_and_not_from_its_spelling(code):
    found = signs_in({"common.py": f"{code}\n\n\ndef kl_estimate(a):\n    return a\n"})
    assert [line.partition(" ")[2].removeprefix("has ") for line in found] == SIGNS[code]


def _body(name: str) -> list[ast.stmt]:
    problem = BY_NAME[name]
    return function_of((REPOSITORY / problem.file).read_text(), problem.function).body


def test_the_solution_of_a_problem_lies_in_no_file_of_its_process():
    for problem in PROBLEMS:
        hole = f"def {problem.function}(*a, **k):\n    raise NotImplementedError\n"
        text = splice_files({problem.file: hole}, problem)[problem.file]
        found = function_of(text, problem.function)
        assert ast.unparse(found) == hole.strip() and text.count(f"\ndef {problem.function}(") == 1


# --- What it may use up ---


def test_a_process_that_a_submission_starts_ends_with_the_grading(tmp_path):
    mark = f"300.{os.getpid()}"
    body = "import subprocess, os\nos.setsid() if os.fork() == 0 else 0\n"
    body += f"subprocess.Popen(['sleep', {mark!r}])\nreturn 0"
    test, teacher = graded(tmp_path, body)
    assert test["score"] == 0 and "subprocess" in teacher

    def running() -> bool:
        lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))
        return any(mark.encode() in line for line in _readable(lines))

    deadline = time.monotonic() + 20
    while running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running()


def _readable(lines):
    while True:
        try:
            yield next(lines)
        except StopIteration:
            return
        except OSError:
            return


LONG = {
    "a fault": "raise RuntimeError('x' * 3_000_000)",
    "stderr": "import os\nos.write(2, b'x' * 3_000_000)\nos._exit(3)",
    "a value": "return 'x' * 3_000_000",
}


@pytest.mark.parametrize("way", LONG)
def test_a_message_of_megabytes_is_cut(way, tmp_path, capsys):
    test, _ = graded(tmp_path, LONG[way])
    assert test["score"] == 0 and len(test["output"]) < 5000
    assert len(capsys.readouterr().out) < 9000


def test_a_submission_that_writes_gigabytes_is_stopped(tmp_path):
    body = "import os\nfile = open('long', 'wb')\n"
    body += "for _ in range(300):\n    os.write(file.fileno(), b'x' * 2**20)\nreturn 0"
    test, _ = graded(tmp_path, body)
    assert (test["score"] == 0 and "OSError" in test["output"]) or "ended" in test["output"]
    assert FILE_SIZE < 300 * 2**20


def test_a_submission_that_takes_all_memory_is_stopped(tmp_path):
    test, _ = graded(tmp_path, "return torch.zeros(6 * 2**30, dtype=torch.uint8)")
    assert "DefaultCPUAllocator" in test["output"]


ODD = ["[" * 100_000, "7", "{}", '{"ok": {"tensor": ["float32", [-1], false]}}',
       '{"ok": {"tensor": ["float32", [999999999, 999999999], false]}}',
       '{"ok": {"generator": 3}}', '{"note": 7}']  # fmt: skip


@pytest.mark.parametrize("line", ODD, ids=lambda line: line[:20])
def test_an_answer_of_another_form_breaks_nothing(line, tmp_path):
    data = f"struct.pack('<II', {len(line)}, 0) + {line!r}.encode()"
    test, _ = graded(tmp_path, f"import struct\nDATA = {data}\n{TO_ALL_FILES}")
    assert test["score"] == 0


def test_tensors_of_every_kind_cross_the_pipe_as_they_are():
    import io

    import torch

    for value in (
        torch.randn(2, 3), torch.tensor(1.5), torch.zeros(0, 4), torch.tensor([True, False]),
        torch.randn(4).bfloat16(), torch.tensor([math_nan := float("nan")]), torch.arange(5),
    ):  # fmt: skip
        file = io.BytesIO()
        wire.send(file, [value, {"a": (1, None, "x")}])
        file.seek(0)
        found, rest = wire.receive(file)
        assert found.dtype == value.dtype and found.shape == value.shape
        assert torch.equal(found.nan_to_num(), value.nan_to_num()) and rest == {"a": (1, None, "x")}
    assert math_nan != math_nan


def test_what_one_submission_locks_stops_no_other(tmp_path):
    """A progress bar that was shown before the forks would have made a lock for all of them."""
    held = "from tqdm import tqdm\ntqdm.get_lock().acquire()\nraise KeyError"
    test, _ = graded(tmp_path, held)
    assert test["score"] == 0
    body = "\n".join(ast.unparse(node) for node in _body("kl_estimate"))
    shown = f"from tqdm import tqdm\nfor _ in tqdm(range(2)):\n    pass\n{body}"
    test, _ = graded(tmp_path / "next", shown, "--time_limit", "20")
    assert test["score"] == 5, test["output"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_process_that_forks_has_one_thread_and_shares_no_memory(tmp_path):
    graded(tmp_path, "return 0")
    process = Path("/proc") / str(SANDBOX.zygote[0].pid)
    assert len(list((process / "task").iterdir())) == 1
    assert "/dev/shm" not in (process / "maps").read_text()


@pytest.mark.parametrize("level", LEVELS)
def test_at_each_level_a_right_answer_gets_its_points_and_the_level_is_told(level):
    sandbox = SANDBOXES[level]
    files = {p: t.encode() for p, t in splice_files(_texts(), BY_NAME["kl_estimate"]).items()}
    found = grade.run_checks("kl_estimate", grade.repository_files() | files, sandbox, 60)
    assert found == ([""] * len(CHECKS["kl_estimate"]), [])
    assert LEVELS.index(sandbox.level) >= LEVELS.index(level)


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_without_namespaces_the_network_is_refused_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(grade, "Sandbox", lambda: SANDBOXES["limits"])
    body = "import socket\nsocket.create_connection(('1.1.1.1', 80), timeout=3)"
    test, teacher = graded(tmp_path, body)
    assert "Operation not permitted" in test["output"] and "sandbox: limits" in teacher


def _texts() -> dict[str, str]:
    files = {problem.file for problem in PROBLEMS}
    return {file: (REPOSITORY / file).read_text() for file in files}


# --- The submission as a whole ---

THREE_D = """def token_logprobs(logits, tokens):
    logits = at_least_float32(logits)
    chosen = logits.gather(2, tokens[:, :, None])[:, :, 0]
    return chosen - logits.logsumexp(dim=2)
"""


def whole(tmp_path: Path, change: tuple[str, str, str], *names: str) -> dict[str, dict]:
    """{name: verdict} of a submission that is the solution but for one change."""
    for file, text in _texts().items():
        (tmp_path / "hand_in" / file).parent.mkdir(parents=True, exist_ok=True)
        if file == change[0]:
            assert text.count(change[1]) == 1
            text = text.replace(change[1], change[2])
        (tmp_path / "hand_in" / file).write_text(text)
    command = [str(tmp_path / "hand_in"), "--problems", *names, "--json", str(tmp_path / "r.json")]
    assert grade.main(command) == 0
    tests = json.loads((tmp_path / "r.json").read_text())["tests"]
    return {test["name"].split(":")[0]: test for test in tests}


def test_log_probs_that_the_scripts_can_not_use_lose_their_points_and_the_whole_run(tmp_path):
    text = _texts()["common.py"]
    ours = ast.get_source_segment(text, function_of(text, "token_logprobs"))
    found = whole(tmp_path, ("common.py", ours, THREE_D), "token_logprobs", "rloo_script")
    assert found["token_logprobs"]["score"] <= 1 and found["rloo_script"]["score"] == 0


def test_a_script_that_runs_and_does_not_learn_gets_points_for_running_alone(tmp_path):
    change = ("rloo.py", "                optimizer.step()\n", "                pass\n")
    found = whole(tmp_path, change, "rloo_script")["rloo_script"]
    assert found["score"] == 6 and "an accuracy of" in found["output"], found


def test_metrics_that_are_made_up_lose_the_points_for_them(tmp_path):
    last = "run.log(config.num_steps, run.evaluate(config.num_steps)"
    change = ("rloo.py", f"{last})", last + ' | {"eval/accuracy": 1.0})')
    found = whole(tmp_path, change, "rloo_script")["rloo_script"]
    assert found["score"] == 8 and "of the weights" in found["output"], found


def test_a_run_that_is_handed_in_is_repeated_and_a_changed_one_is_told(tmp_path):
    files = scripts.files_of(_texts(), {})
    flags = "--num_steps 2 --eval_every 2 --num_eval_prompts 20 --seed 4 --sample_every 1".split()
    wanted = [scripts.METRICS, scripts.SAMPLES, "run/config.json"]
    found, fault, _ = scripts._run("rloo.py", flags, wanted, files, SANDBOX, 60)
    assert not fault
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    for name, data in found.items():
        (folder / Path(name).name).write_bytes(data)
    assert scripts.runs_of(tmp_path) == [folder]
    assert "come again" in scripts.repeated(folder, files, SANDBOX, 60)
    lines = [json.loads(line) for line in found[scripts.METRICS].decode().splitlines()]
    lines[1]["objective/scores"] += 0.2
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "step 1, objective/scores: handed in" in scripts.repeated(folder, files, SANDBOX, 60)
