"""Change a random operator, comparison or constant of the sources at a time, and count what the tests notice.

    python tests/mutation.py --number 150 --seed 0

Each mutant is written into a copy of the checkout, where the tests of its module run: the files with its name, or all
of its folder. The lines that survive are printed. Long: a mutant takes as long as the tests of one module.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
PARTS = ("losses", "data", "retrieval")
IGNORED = ("__pycache__", ".git", ".venv*", "build", ".*_cache", ".hypothesis")
SECONDS = 300

PAIRS = [(ast.Add, ast.Sub), (ast.And, ast.Or), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)]
PAIRS += [(ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.BitAnd, ast.BitOr)]
SWAPS = dict(PAIRS) | {second: first for first, second in PAIRS} | {ast.Mult: ast.Add}
SWAPS |= dict.fromkeys((ast.Div, ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)


def places(tree):
    """Return the nodes that can be changed, always in the same order."""
    # What annotations, errors and texts have is seen by readers, not by tests of behavior.
    skipped = set()
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        parts += [node] if isinstance(node, (ast.Raise, ast.JoinedStr)) else []
        skipped |= {inner for part in parts if part is not None for inner in ast.walk(part)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {node for function in functions for statement in function.body for node in ast.walk(statement)}
    return [node for node in ast.walk(tree) if node in inside - skipped and can_change(node)]


def can_change(node):
    if isinstance(node, (ast.BinOp, ast.BoolOp)):
        return type(node.op) in SWAPS
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (bool, int, float))
    return isinstance(node, (ast.Compare, ast.If, ast.IfExp))


def change(node):
    if isinstance(node, (ast.BinOp, ast.BoolOp)):
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    else:
        node.test = ast.UnaryOp(ast.Not(), node.test)


def draw(number, seed):
    """Return as many files with the index of a place in each, the same number in every part."""
    rng = random.Random(seed)
    drawn = []
    for part in PARTS:
        files = sorted((ROOT / "vl_plugins" / part).glob("*.py"))
        found = [
            (file.relative_to(ROOT), index)
            for file in files
            for index in range(len(places(ast.parse(file.read_text(encoding="utf-8")))))
        ]
        drawn += rng.sample(found, min(len(found), number // len(PARTS)))
    return drawn


def survives(folder, file, index):
    """Return the line of a mutant that passes the tests in a copy of the checkout, None if it fails."""
    source = (ROOT / file).read_text(encoding="utf-8")
    tree = ast.parse(source)
    node = places(tree)[index]
    line = f"{file}:{node.lineno}: {source.splitlines()[node.lineno - 1].strip()}"
    change(node)
    line += f"  ->  {ast.unparse(node).splitlines()[0]}"
    (folder / file).write_text(ast.unparse(tree), encoding="utf-8")
    tests = folder / "tests" / file.parent.name
    own = sorted(tests.glob(f"*{file.stem}*.py"))
    try:
        for chosen in ([own] if own else []) + [[tests]]:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *chosen]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            try:
                finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=SECONDS)
            except subprocess.TimeoutExpired:
                return None
            if finished.returncode:
                return None
        return line
    finally:
        shutil.copy(ROOT / file, folder / file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=150, help="of mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of their choice (default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="copies of the checkout (default: the cores)"
    )
    arguments = parser.parse_args()
    mutants = draw(arguments.number, arguments.seed)
    survivors, folders = Counter(), SimpleQueue()
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(arguments.workers):
            shutil.copytree(ROOT, Path(temporary, str(number)), ignore=shutil.ignore_patterns(*IGNORED))
            folders.put(Path(temporary, str(number)))

        def run(mutant):
            folder = folders.get()
            try:
                return survives(folder, *mutant)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(arguments.workers) as executor:
            for (file, _), line in zip(mutants, executor.map(run, mutants), strict=True):
                if line is not None:
                    survivors[file.parent.name] += 1
                    print(line, flush=True)
    for part in PARTS:
        number = sum(file.parent.name == part for file, _ in mutants)
        print(f"{part}: {number - survivors[part]} of {number} killed")


if __name__ == "__main__":
    main()
