"""Imports go down the layers, never in a circle, and stand at the top of a file."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = "errors tables untraced | numerics | negatives | distances miners regularizers modules distributed"
LAYERS += "| registry vl_plugins | losses | data | retrieval plots encoders | integrations configs | commands cli"
HEIGHTS = {part: height for height, layer in enumerate(LAYERS.split("|")) for part in layer.split()}

# What any function may import: optional packages, what needs one, and what is slow and rarely needed.
OPTIONAL = ("horovod", "open_clip", "torch.distributed.tensor", "torch.utils.tensorboard", "wandb")
OPTIONAL += ("vl_plugins.integrations.open_clip", "vl_plugins.distributed", "vl_plugins.untraced")
# Whose functions may import anything, so that `--help` and errors in a command line take no seconds.
COMMAND_LINES = ("vl_plugins/commands/", "integrations/pytorch_metric_learning/__init__.py")
COMMAND_LINES += ("integrations/open_clip/launcher.py", "integrations/open_clip/flags.py")
COMMAND_LINES += ("integrations/pytorch_metric_learning/command_line.py", "integrations/checkpoints.py")
COMMAND_LINES += ("vl_plugins/data/collection.py",)  # used without torch, see below

FILES = [str(path.relative_to(ROOT)) for part in ("vl_plugins", "integrations") for path in (ROOT / part).rglob("*.py")]
NAMES = {file: file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in FILES}
NAMES = {file: name if name.startswith("vl_plugins") else f"vl_plugins.{name}" for file, name in NAMES.items()}


def imports():
    """Yield each import as its file, its place, the imported module and whether it is inside a function."""
    for file in FILES:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
        inside = {node for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                package = [node.module] if isinstance(node, ast.ImportFrom) else []
                for name in (".".join([*package, alias.name]) for alias in node.names):
                    module = name if name in NAMES.values() else (*package, name)[0]
                    yield file, f"{file}:{node.lineno}: {ast.unparse(node)}", module, node in inside


def height(module):
    return HEIGHTS[module.split(".")[:2][-1]]


def test_no_import_goes_up():
    ours = [part for part in imports() if part[2].startswith("vl_plugins")]
    assert len(ours) > 300
    assert [place for file, place, module, _ in ours if height(module) > height(NAMES[file])] == []


def test_no_circle_of_files():
    graph = {name: set() for name in NAMES.values()}
    for file, _, module, _ in imports():
        graph[NAMES[file]] |= {module} - {NAMES[file]}
    graphlib.TopologicalSorter(graph).prepare()  # the error lists a circle


def test_functions_import_only_what_is_optional_or_slow():
    inner = [part for part in imports() if part[3] and not part[0].startswith(COMMAND_LINES)]
    assert [place for _, place, module, _ in inner if not module.startswith(OPTIONAL)] == []


def test_shards_are_written_and_checked_without_torch():
    """It takes half a gigabyte, in each worker process too."""
    code = "import sys; from vl_plugins.data import expand_shards, read_table, verify_shards, write_shards; "
    code += "import vl_plugins.data.inspection; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_test_module_imports_another():
    """What several of them share is in ``tests/helpers``."""
    files = sorted(ROOT.glob("tests/**/*.py"))
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.name.startswith("test_")}
    assert len(names) > 100
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                assert not imported & names, f"{file}:{node.lineno}: {ast.unparse(node)}"
