"""Print the tests of the files that differ from the last commit: ``python -m tests.of_changes``.

``make check`` runs them before a commit. A test file belongs to a source file if it is named after it, such as
``tests/data/test_index.py`` of ``vl_plugins/data/index.py``. Where there is none, :data:`TESTS` lists them, or else
those belong to it that import the module, the ones first that name it most often. The whole suite is for ``make test``.
"""

import fnmatch
import subprocess
from collections.abc import Iterable
from pathlib import Path

__all__ = ["changed_files", "related_tests"]

ROOT = Path(__file__).parents[1]
# Quick tests of source files that have none of their own name, by pattern.
LOSSES = ("tests/losses/test_formulas.py", "tests/losses/test_operations.py", "tests/losses/test_wrong_calls.py")
TESTS = {
    "vl_plugins/losses/*.py": LOSSES,
    "vl_plugins/engine.py": LOSSES,
    "vl_plugins/numerics.py": LOSSES,
    "vl_plugins/untraced.py": LOSSES,
    "vl_plugins/miners.py": ("tests/losses/test_miner.py",),
    "vl_plugins/modules/positions.py": ("tests/sets/test_set_prediction.py",),
    "vl_plugins/commands/evaluat*.py": (
        "tests/commands/test_evaluate.py",
        "tests/commands/test_evaluate_comparison.py",
    ),
    "vl_plugins/data/collection.py": ("tests/data/test_index.py", "tests/data/test_reading.py"),
    "vl_plugins/data/encodable.py": ("tests/commands/test_encode.py",),
    "vl_plugins/data/one_side.py": ("tests/commands/test_encode.py",),
    "vl_plugins/data/grouping.py": ("tests/data/test_caption_table.py", "tests/data/test_sources.py"),
    "vl_plugins/data/limits.py": ("tests/data/test_picture_formats.py",),
    "vl_plugins/data/records.py": ("tests/data/test_index.py", "tests/data/test_reading.py"),
    "vl_plugins/data/shard_names.py": ("tests/data/test_index.py",),
    "vl_plugins/data/table_collection.py": ("tests/data/test_reading.py",),
    "vl_plugins/data/rows.py": ("tests/data/test_caption_table.py",),
    "vl_plugins/retrieval/embeddings.py": ("tests/retrieval/test_features.py",),
    "vl_plugins/retrieval/examples.py": ("tests/retrieval/test_report.py",),
    "vl_plugins/retrieval/feature_folders.py": (
        "tests/retrieval/test_feature_files.py",
        "tests/commands/test_encode.py",
    ),
    "vl_plugins/retrieval/feature_*.py": ("tests/retrieval/test_feature_files.py",),
    "vl_plugins/retrieval/id_order.py": ("tests/retrieval/test_rules.py",),
    "vl_plugins/retrieval/norms.py": ("tests/retrieval/test_ranks.py",),
    "vl_plugins/retrieval/places.py": ("tests/retrieval/test_rules.py",),
    "vl_plugins/retrieval/table_files.py": ("tests/retrieval/test_per_query.py",),
    "vl_plugins/retrieval/tools.py": ("tests/retrieval/test_rules.py",),
    "vl_plugins/tables.py": ("tests/retrieval/test_metrics.py", "tests/test_benchmarks.py"),
    "integrations/encoder.py": ("tests/commands/test_encode.py",),
    "integrations/encoding.py": ("tests/commands/test_encode.py", "tests/commands/test_evaluate.py"),
    "integrations/saved_models.py": ("tests/commands/test_merge.py",),
    "integrations/open_clip/exporting.py": ("tests/commands/test_export.py",),
    "integrations/open_clip/model_card.py": ("tests/commands/test_export.py",),
    "integrations/open_clip/models.py": ("tests/integrations/open_clip/test_wrong_input.py",),
    "integrations/open_clip/pictures.py": ("tests/integrations/open_clip/test_data.py",),
    "integrations/open_clip/checks.py": ("tests/integrations/open_clip/test_wrong_input.py",),
    "integrations/open_clip/clip_loss.py": ("tests/integrations/open_clip/test_retrieval_clip_loss.py",),
    "integrations/open_clip/host.py": ("tests/integrations/open_clip/test_matrix.py",),
    "integrations/open_clip/tokens.py": ("tests/integrations/open_clip/test_mistakes.py",),
    "integrations/open_clip/steps.py": ("tests/integrations/open_clip/test_data.py",),
    "integrations/open_clip/resume.py": ("tests/integrations/open_clip/test_resuming.py",),
    "integrations/open_clip/train.py": ("tests/integrations/open_clip/test_failures.py",),
    "integrations/pytorch_metric_learning/*.py": ("tests/integrations/pytorch_metric_learning/test_wrong_options.py",),
    "integrations/sentence_transformers/*.py": ("tests/integrations/sentence_transformers/test_trainer.py",),
    "integrations/examples/*.py": ("tests/integrations/examples/test_loops_on_shards.py",),
    "benchmarks/compare/*.py": ("tests/test_compare.py",),
    "benchmarks/at_scale.py": ("tests/test_claims.py",),
    "benchmarks/claim.py": ("tests/test_claims.py",),
    "benchmarks/findings.py": ("tests/test_claims.py",),
    "benchmarks/frozen_trunk.py": ("tests/test_study.py",),
    "benchmarks/exact_captions.py": ("tests/test_study_data.py",),
    "benchmarks/inverted_pictures.py": ("tests/test_study_data.py",),
    "benchmarks/openclipart.py": ("tests/test_study_data.py",),
    "benchmarks/swapped_captions.py": ("tests/test_study_data.py",),
    "benchmarks/jobs.py": ("tests/test_study.py",),
    "benchmarks/outcomes.py": ("tests/test_study.py", "tests/test_claims.py"),
    "benchmarks/grid.py": ("tests/test_study.py", "tests/test_claims.py"),
    "benchmarks/study*.py": ("tests/test_study.py",),
    "benchmarks/training.py": ("tests/test_study.py",),
    "benchmarks/*.py": ("tests/test_benchmarks.py",),
}
# Test files that are taken for a module of no pattern; more would take minutes.
MOST_IMPORTERS = 3


def changed_files() -> list[Path]:
    """Return the Python files that git lists as changed or new, relative to the checkout."""
    status = ["git", "status", "--porcelain", "--untracked-files=all", "--no-renames", "-z"]
    printed = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = []
    for entry in printed.split("\0"):
        file = Path(entry[3:])
        if file.suffix == ".py" and (ROOT / file).is_file():
            files.append(file)
    return files


def related_tests(files: Iterable[Path]) -> list[Path]:
    """Return the test files of some Python files, and modules whose doctests run, all relative to the checkout."""
    tests, doctests = [], []
    for file in files:
        if file.parts[0] == "tests":
            tests += [file] if file.name.startswith("test_") else []
            continue
        if file.parts[0] == "vl_plugins" and ">>>" in (ROOT / file).read_text(encoding="utf-8"):
            doctests.append(file)
        tests += _named_after(file) or _of_pattern(file) or _importers(file)
    return list(dict.fromkeys([*tests, *doctests]))  # pytest imports a module of doctests again


def _named_after(file: Path) -> list[Path]:
    """Return the test files with the name of a source file, from the folder that mirrors its own if it has any."""
    test_files = sorted((ROOT / "tests").rglob(f"test_{file.stem}.py"))
    mirrored = [test_file for test_file in test_files if test_file.parent.name == file.parent.name]
    return [test_file.relative_to(ROOT) for test_file in mirrored or test_files]


def _of_pattern(file: Path) -> list[Path]:
    for pattern, tests in TESTS.items():
        if fnmatch.fnmatch(file.as_posix(), pattern):
            return [Path(test) for test in tests]
    return []


def _importers(file: Path) -> list[Path]:
    """Return the test files that name the module of a source file most often."""
    module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    if not module.startswith(("vl_plugins", "benchmarks")):
        module = f"vl_plugins.{module}"
    counts = {}
    for test_file in sorted((ROOT / "tests").rglob("test_*.py")):
        mentions = test_file.read_text(encoding="utf-8").count(f"{module} ")
        if mentions:
            counts[test_file.relative_to(ROOT)] = mentions
    importers = sorted(counts, key=lambda test_file: -counts[test_file])
    return importers[:MOST_IMPORTERS]


if __name__ == "__main__":
    print("\n".join(map(str, related_tests(changed_files()))))
