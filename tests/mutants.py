"""Mutants of cosmic-ray, an off-the-shelf tool, of the mathematics, the scripts and the sampler.

  pip install cosmic-ray && python tests/mutants.py 200    # 200 of them, drawn at random
  python tests/mutants.py grpo.py masked    # those whose file or line has such a word

Where several of its operators fit one place, the one nearest to the code is taken (`<` becomes
`<=`, `+` becomes `-`): a cruder one is caught more easily. Type annotations are left alone. Some
mutants change nothing that a test could see, so read those that survive.
"""

import ast
import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import mutations
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

FILES = "common.py ppo.py grpo.py rloo.py sampling.py".split()
# The families whose members stand for each other, and the member that is taken.
FAMILIES = ("ReplaceBinaryOperator", "ReplaceComparisonOperator", "ReplaceUnaryOperator")
NEAREST = """Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Div Mod_FloorDiv Pow_Mul BitAnd_BitOr
BitOr_BitAnd Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is In_NotIn NotIn_In
Delete_USub Delete_Invert Delete_Not""".split()
NEEDS_ARGUMENTS = ("VariableReplacer", "VariableInserter")


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
    keys = ("annotation", "returns")
    nodes = [getattr(n, key, None) for n in ast.walk(ast.parse(code)) for key in keys]
    found = [n for n in nodes if isinstance(n, ast.expr)]
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in found]


def mutants_of(file: str) -> Iterator[Mutant]:
    code = (mutations.REPOSITORY / file).read_text(encoding="utf-8")
    left_alone = annotations(code)
    for operator_name in operators():
        operator = get_operator(operator_name)()
        places = [p for node in ast_nodes(get_ast(code)) for p in operator.mutation_positions(node)]
        for index, (start, end) in enumerate(places):
            if not any(first <= start and end <= last for first, last in left_alone):
                mutated = mutate_code(code, operator, index)
                pairs = zip(code.splitlines(), mutated.splitlines())
                line = next((y.strip() for x, y in pairs if x != y), "")
                yield Mutant(file, f"{operator_name.removeprefix('core/')}: {line}", mutated)


def attempt(mutant: Mutant) -> str | None:
    fast, slow = mutations.rounds_for(mutant.file.removesuffix(".py"))
    edit = (mutations.REPOSITORY / mutant.file, mutant.code)
    return mutations.first_failure(edit, fast, slow)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    mutations.FORKSERVER.set_forkserver_preload(mutations.PRELOAD)
    chosen = [mutant for file in FILES for mutant in mutants_of(file)]
    random.Random(0).shuffle(chosen)
    words = sys.argv[1:]
    if len(words) == 1 and words[0].isdecimal():
        chosen = chosen[: int(words[0])]
    elif words:
        chosen = [m for m in chosen if any(w in f"{m.file} {m.name}" for w in words)]
    caught = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, test in zip(chosen, pool.map(attempt, chosen)):
            caught += test is not None
            print(f"{mutant.file:12} {mutant.name:80} {test or 'SURVIVED'}", flush=True)
    print(f"{caught} of {len(chosen)} caught")


if __name__ == "__main__":
    main()
