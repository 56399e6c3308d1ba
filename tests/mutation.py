"""Change a random operator, comparison or constant of the sources at a time, and count what the tests notice.

    python tests/mutation.py --number 150 --seed 0

Each mutant is written into a copy of the checkout, where the tests of its part run in a forked process: first the files
with its module's name, then all. The lines that survive are printed. It takes an hour or two.
"""

import argparse
import ast
import importlib
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

ROOT = Path(__file__).parents[1]
# Sources and tests of each part.
PARTS = {
    "losses": (["vl_plugins/*.py", "vl_plugins/losses/*.py"], ["tests/losses/*.py", "tests/sets/*.py", "tests/*.py"]),
    "modules": (["vl_plugins/modules/*.py", "vl_plugins/distances.py"], ["tests/sets/*.py"]),
    "data": (["vl_plugins/data/*.py"], ["tests/data/*.py", "tests/commands/test_shards*.py"]),
    "retrieval": (["vl_plugins/retrieval/*.py"], ["tests/retrieval/*.py"]),
    "integrations": (["integrations/**/*.py"], ["tests/integrations/**/*.py"]),
}
# Tests that train, measure or build.
LONG = "readme docs packaging study benchmarks real_data configs files_v0_2 early_errors checkpoints compile fsdp "
LONG += "launcher heads_in_training open_clip_4 resuming runs trainer guide lowest_version loops_on_shards "
LONG += "transformers_trainer third_party_loss without_open_clip"
EXCLUDED = ("open_clip/test_distributed.py", *(f"/test_{name}.py" for name in LONG.split()))
SLOW_TO_IMPORT = ("torch", "pytorch_metric_learning", "open_clip", "timm", "hypothesis")  # by each process
IGNORED = ("__pycache__", ".git", ".venv*", "build", ".*_cache", ".hypothesis")
SECONDS = 180  # after which a mutant hangs; the tests of a part take less than 60

PAIRS = [(ast.Add, ast.Sub), (ast.And, ast.Or), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)]
PAIRS += [(ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.BitAnd, ast.BitOr)]
SWAPS = dict(PAIRS) | {second: first for first, second in PAIRS} | {ast.Mult: ast.Add}
SWAPS |= dict.fromkeys((ast.Div, ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)


def places(tree):
    """Return the nodes that can be changed, always in the same order."""
    # Annotations, messages and texts are for readers; tests are of behavior.
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


def draw(part, number, seed):
    """Return files of a part, each with the index of a place in it."""
    files = sorted({file for pattern in PARTS[part][0] for file in ROOT.glob(pattern)})
    found = [(file, index) for file in files for index in range(len(places(ast.parse(file.read_text("utf-8")))))]
    return random.Random(f"{seed} {part}").sample(found, min(len(found), number))


def tests_of(part):
    files = {str(file.relative_to(ROOT)) for pattern in PARTS[part][1] for file in ROOT.glob(pattern)}
    return sorted(file for file in files if Path(file).name.startswith("test_") and not file.endswith(EXCLUDED))


def run_tests(folder, tests):
    """Run in a process of its own, whose end is 0 if all tests pass."""
    os.chdir(folder)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path.insert(0, str(folder))
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1), os.dup2(null.fileno(), 2)
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]))


def passes(folder, tests, seconds=SECONDS):
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, tests))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode == 0


def survivor(folder, part, file, index):
    """Return the line of a mutant that passes the tests in a copy of the checkout, None if they notice it."""
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    node = places(tree)[index]
    name = file.relative_to(ROOT)
    line = f"{name}:{node.lineno}: {source.splitlines()[node.lineno - 1].strip()}"
    change(node)
    line += f"  ->  {ast.unparse(node).splitlines()[0]}"
    (folder / name).write_text(ast.unparse(tree), encoding="utf-8")
    everything = tests_of(part)
    own = [test for test in everything if Path(test).stem.startswith(f"test_{file.stem}")]
    try:
        return line if all(passes(folder, tests) for tests in (own, everything) if tests) else None
    finally:
        shutil.copy(file, folder / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=150, help="of mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of their choice (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="of the sources (default: all)")
    arguments = parser.parse_args()
    for name in SLOW_TO_IMPORT:
        importlib.import_module(name)
    folders = SimpleQueue()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as executor:
        for number in range(os.cpu_count() or 1):
            folder = Path(temporary, str(number))
            shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*IGNORED))
            folders.put(folder)

        def in_folder(function, *arguments):
            folder = folders.get()
            try:
                return function(folder, *arguments)
            finally:
                folders.put(folder)

        for part in arguments.parts:
            if not in_folder(passes, tests_of(part)):
                sys.exit(f"{part}: the tests of the unchanged sources fail, or take more than {SECONDS} s")
            mutants = draw(part, arguments.number // len(PARTS), arguments.seed)
            found = executor.map(lambda mutant, part=part: in_folder(survivor, part, *mutant), mutants)
            lines = [line for line in found if line is not None]
            print(*lines, f"{part}: {len(mutants) - len(lines)} of {len(mutants)} noticed", sep="\n", flush=True)


if __name__ == "__main__":
    main()
