"""Mutants of an off-the-shelf tool, cosmic-ray, of the mathematics, the scripts and the sampler.

  pip install cosmic-ray && python tests/mutants.py    # hours; goes on where it was stopped
  python tests/mutants.py 500                          # the first 500 of the random order
  python tests/mutants.py grpo.py masked               # those whose file or line has such a word

cosmic-ray finds the places and makes the edits. Where several of its operators fit one place, the
one nearest to the code is taken (`<` becomes `<=`, `+` becomes `-`): a cruder one is caught more
easily. Type annotations are left alone. All mutants meet the fast tests of their own file first;
those left meet the other fast ones, then the slow ones. The order is random, so that whatever is
done when it is stopped is a fair sample. Results are kept in docs/evidence/mutants.json; the score
goes to docs/evidence/mutants.md, with the mutants that no test could tell from the code and why.
"""

import ast
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import mutations
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

REPOSITORY = Path(__file__).parent.parent
FILES = "common.py ppo.py grpo.py rloo.py sampling.py".split()
RESULTS = REPOSITORY / "docs" / "evidence" / "mutants.json"
PAGE = REPOSITORY / "docs" / "evidence" / "mutants.md"
# The families whose members stand for each other, and the member that is taken.
FAMILIES = ("ReplaceBinaryOperator", "ReplaceComparisonOperator", "ReplaceUnaryOperator")
NEAREST = """Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Div Mod_FloorDiv Pow_Mul BitAnd_BitOr
BitOr_BitAnd Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is In_NotIn NotIn_In
Delete_USub Delete_Invert Delete_Not""".split()
NEEDS_ARGUMENTS = ("VariableReplacer", "VariableInserter")
STAGES = "the fast tests of its file", "the other fast tests", "the slow tests"
# Of the other tests those that see most of what a loop does.
OF_LOOPS = "test_scripts test_runs test_evaluation test_golden test_resume".split()
SURVIVED = "survived "  # and the stages so far
NOT_TRIED = "not tried"
# Mutants that change nothing that a test could see: the file, a part of the mutant's name, and why.
LAST_OF_TWO = "the last of two dimensions"
EQUIVALENT: list[tuple[str, str, str]] = [
    ("common.py", "rewards.masked_fill(~mask, ", "the advantages of padding are set to 0 after it"),
    ("common.py", "torch.zeros_like(values[:, -1])", "every column has the same shape"),
    ("sampling.py", "topk(min(top_k, logits.shape[1]))", LAST_OF_TWO),
    ("sampling.py", "softmax(1)", LAST_OF_TWO),
    ("sampling.py", "sorted_probs.cumsum(1)", LAST_OF_TWO),
    ("sampling.py", "logits.amax(1, keepdim=True)", LAST_OF_TWO),
    ("sampling.py", "sums.sum(1)", LAST_OF_TWO),
    ("sampling.py", "weights.cumsum(1)", LAST_OF_TWO),
    ("sampling.py", "Mul_Div: /,", "what a keyword must name may be given by its place as well"),
    ("sampling.py", "top_k: int = -1", "off, as 0 is"),
    ("sampling.py", "top_p: float = 2.0", "off, as 1 is"),
    ("sampling.py", "if top_p <= 1:", "top_p 1 drops what float32 can't add, if anything"),
    ("sampling.py", "if top_p < 2:", "top_p 1 drops what float32 can't add, if anything"),
    ("ppo.py", "fused=False", "the same steps, slower"),
    ("grpo.py", "fused=False", "the same steps, slower"),
    ("rloo.py", "fused=False", "the same steps, slower"),
    *(
        (
            f"{x}.py",
            f'"entropy_grad"] = config.entropy_coef {y}',
            "times 0: slower, the same gradient",
        )
        for x in ("ppo", "grpo", "rloo")
        for y in (">= 0", "> -1")
    ),
    ("rloo.py", ".sum().clamp(min= 0)", "every completion has a token"),
    ("grpo.py", "(entropy / m).sum()", "NaN off the mask, where no gradient comes from"),
    ("rloo.py", "(entropy / m).sum()", "NaN off the mask, where no gradient comes from"),
    ("grpo.py", "logprobs.masked_fill(~mask, ", "what is off the mask counts nowhere"),
    ("grpo.py", "is not None or kl_coef != 0", "the loop gives both or none, and KL times 0 is 0"),
    ("grpo.py", "kl_coef != -1", "KL times 0 is 0, and a negative coefficient is refused"),
    ("grpo.py", "(num_known - 1).clamp(min= 0)", "0 / 0 is NaN, which becomes 0 as well"),
    ("rloo.py", "(num_known - 1).clamp(min= 0)", "0 / 0 is NaN, which becomes 0 as well"),
]


class Mutant(NamedTuple):
    file: str
    name: str  # the operator, and the line after the edit
    code: str  # the whole file


def operators() -> Iterator[str]:
    for name in operator_names():
        family, _, member = name.removeprefix("core/").partition("_")
        if family not in NEEDS_ARGUMENTS and (family not in FAMILIES or member in NEAREST):
            yield name


def annotations(code: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Start and end of every type annotation, as (line, column)."""
    nodes = [getattr(n, key, None) for n in ast.walk(ast.parse(code)) for key in ANNOTATED]
    found = [n for n in nodes if isinstance(n, ast.expr)]
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in found]


ANNOTATED = ("annotation", "returns")


def mutants_of(file: str) -> Iterator[Mutant]:
    code = (REPOSITORY / file).read_text()
    left_alone, names = annotations(code), set()
    for operator_name in operators():
        operator = get_operator(operator_name)()
        places = [p for node in ast_nodes(get_ast(code)) for p in operator.mutation_positions(node)]
        for index, (start, end) in enumerate(places):
            if any(first <= start and end <= last for first, last in left_alone):
                continue
            mutated = mutate_code(code, operator, index)
            line = changed_line(code, mutated)
            name = f"{operator_name.removeprefix('core/')}: {line}"
            while name in names:  # the same edit of a line that is there twice
                name += " (again)"
            names.add(name)
            yield Mutant(file, name, mutated)


def changed_line(before: str, after: str) -> str:
    """The first line that differs, as it is after the edit; of lines taken out, the last."""
    old, new = before.splitlines(), after.splitlines()
    if len(old) == len(new):
        return next(y for x, y in zip(old, new) if x != y).strip()
    gone = Counter(old) - Counter(new)
    return f"without {[line for line in old if line.strip() and line in gone][-1].strip()}"


def try_mutant(mutant: Mutant, stage: int) -> str:
    edit = (mutant.file, (REPOSITORY / mutant.file).read_text(), mutant.code, mutant.name)
    own, others = mutations.quickest_first(mutant.file)
    others.sort(key=lambda test: not any(name in test for name in OF_LOOPS))
    tests = (["-m", "fast", *own], ["-m", "fast", *others], ["-m", "slow", *own, *others])[stage]
    return mutations.run_tests(edit, tests) or SURVIVED + STAGES[stage]


def key(mutant: Mutant) -> str:
    return f"{mutant.file} {mutant.name}"


def why_equivalent(mutant: Mutant) -> str | None:
    reasons = (why for file, part, why in EQUIVALENT if mutant.file == file and part in mutant.name)
    return next(reasons, None)


INTRODUCTION = """# Mutants of cosmic-ray

cosmic-ray, an off-the-shelf tool, makes small edits of the code: `+` becomes `-`, 0 becomes 1. Each
edit should make a test fail. `python tests/mutants.py` tries them in a random order, keeps the
results in [mutants.json](mutants.json) and writes this page. If it is stopped, those tried are a
random sample. With some edits no test starts: they count neither as caught nor as missed.
Equivalent edits change nothing that a test could see. "Of the rest" is the share caught of the
edits that are left.

| file | mutants | not tried | don't start | equivalent | caught | of the rest |
|---|---|---|---|---|---|---|
"""


def page(everything: list[Mutant], results: dict[str, str]) -> str:
    lines = INTRODUCTION.splitlines()
    alive, total = [], Counter()
    for file in FILES:
        count = Counter()
        for mutant in (m for m in everything if m.file == file):
            result = results.get(key(mutant), NOT_TRIED)
            count["mutants"] += 1
            if why_equivalent(mutant):
                count["equivalent"] += 1
            elif result == NOT_TRIED:
                count["not tried"] += 1
            elif result.startswith(mutations.STUCK):
                count["stuck"] += 1
            elif result.startswith(SURVIVED):
                alive.append(mutant)
            else:
                count["caught"] += 1
        total.update(count)
        lines.append(row(file, count))
    lines += [row("all", total), "", "Alive:", ""]
    lines += [f"- {m.file}: `{m.name}`: {results[key(m)]}" for m in alive] or ["none."]
    lines += ["", "Equivalent, so not tried, and why:", ""]
    reasons = [(m, why) for m in everything if (why := why_equivalent(m))]
    lines += [f"- {m.file}: `{m.name}`: {why}" for m, why in reasons]
    return "\n".join(lines) + "\n"


def row(name: str, count: Counter) -> str:
    rest = count["mutants"] - count["not tried"] - count["stuck"] - count["equivalent"]
    numbers = [count[x] for x in ("mutants", "not tried", "stuck", "equivalent", "caught")]
    return f"| {name} | {' | '.join(map(str, numbers))} | {count['caught'] / max(1, rest):.1%} |"


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    mutations.FORKSERVER.set_forkserver_preload(mutations.PRELOAD)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    everything = [mutant for file in FILES for mutant in mutants_of(file)]
    results = {key(m): results[key(m)] for m in everything if key(m) in results}
    chosen = [m for m in everything if why_equivalent(m) is None]
    random.Random(0).shuffle(chosen)
    words = sys.argv[1:]
    if len(words) == 1 and words[0].isdecimal():
        chosen = chosen[: int(words[0])]
    elif words:
        chosen = [m for m in chosen if any(word in key(m) for word in words)]
        results = {name: result for name, result in results.items() if name not in map(key, chosen)}
    for stage, before in enumerate([None, *(SURVIVED + name for name in STAGES[:-1])]):
        left = [m for m in chosen if results.get(key(m)) == before]
        print(f"{STAGES[stage]}: {len(left)} of {len(everything)} mutants to try", flush=True)
        with ThreadPoolExecutor(2) as pool:
            for mutant, result in zip(left, pool.map(try_mutant, left, [stage] * len(left))):
                results[key(mutant)] = result
                RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                PAGE.write_text(page(everything, results))
                print(f"{key(mutant)} | {result}", flush=True)


if __name__ == "__main__":
    main()
