"""The magic %%into FILE of the notebooks: puts the functions of a cell into a file."""

import ast
from pathlib import Path


def with_functions(source: str, cell: str) -> str:
    """A file's source with the functions of a cell: one that the file has is replaced, a new one
    goes before the last function of the cell.
    """
    functions = ast.parse(cell).body
    if not functions or not all(isinstance(node, ast.FunctionDef) for node in functions):
        raise ValueError("put functions into this cell, and imports into the functions")
    lines = cell.split("\n")
    place = functions[-1].name
    for node in reversed(functions):
        there = {x.name: x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef)}
        if place not in there:
            raise ValueError(f"the file has no function {place}")
        new, old = lines[node.lineno - 1 : node.end_lineno], source.split("\n")
        start, end = there[place].lineno - 1, there[place].lineno - 1
        if node.name in there:
            start, end = there[node.name].lineno - 1, there[node.name].end_lineno
        else:
            new += ["", ""]
        source = "\n".join([*old[:start], *new, *old[end:]])
    return source


def into(line: str, cell: str) -> None:
    """Write the functions of the cell into the file that the line names."""
    path = Path(line.strip())
    if "raise NotImplementedError" in cell:
        print(f"not written yet: {path} stays as it is")
        return
    try:
        path.write_text(with_functions(path.read_text(encoding="utf-8"), cell), encoding="utf-8")
    except (OSError, SyntaxError, ValueError) as e:
        print(f"error: {e}")
        return
    print(f"{path} has it")


def load_ipython_extension(ipython) -> None:
    """%load_ext into."""
    ipython.register_magic_function(into, "cell")
