"""Features are evaluated where nothing is installed but the extra ``judge``."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.features import features
from vl_plugins.retrieval.features import save_features

ROOT = Path(__file__).parents[2]

# The finder stands before all others, and finds nothing for modules of other packages.
BLOCKED = """
import json, sys
names = set(json.loads(sys.argv[1]))
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
at_start = set(sys.modules)  # some packages are imported by .pth files
from vl_plugins.cli import main
status = main(sys.argv[2:])
assert not names & {name.partition(".")[0] for name in set(sys.modules) - at_start}
sys.exit(status)
"""


def packages_of(extra):
    """Return the names of the packages that an extra installs, with all that they need."""
    names, waiting = set(), [("vl_plugins", frozenset({extra}))]
    visited = set()
    while waiting:
        package, extras = waiting.pop()
        if (package, extras) in visited:
            continue
        visited.add((package, extras))
        names.add(canonicalize_name(package))
        for line in importlib.metadata.requires(package) or ():
            requirement = Requirement(line)
            markers = [{"extra": name} for name in ("", *extras)]
            if requirement.marker is None or any(requirement.marker.evaluate(marker) for marker in markers):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    return names


def modules_of_other_packages(extra):
    own = packages_of(extra)
    modules = set()
    for module, packages in importlib.metadata.packages_distributions().items():
        if own.isdisjoint(map(canonicalize_name, packages)):
            modules.add(module)
    return modules


def run_alone(extra, *arguments):
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, json.dumps(sorted(modules_of_other_packages(extra))), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_features_of_each_kind_need_the_extra_judge_only(tmp_path):
    blocked = modules_of_other_packages("judge")
    heavy = {"torchvision", "open_clip", "msgspec", "webdataset", "PIL", "pandas", "matplotlib"}
    assert heavy <= blocked
    assert blocked.isdisjoint({"torch", "numpy", "scipy", "safetensors", "pyarrow", "pytorch_metric_learning"})
    example = features()
    for name in ("a.npz", "b.safetensors", "c"):
        save_features(example, tmp_path / name)
    owners = example.image_of_caption.numpy()
    columns = {
        "image_id": np.asarray(example.image_ids)[owners],
        "image_features": list(example.images.numpy()[owners]),
        "caption_features": list(example.captions.numpy()),
    }
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    files = sorted(map(str, tmp_path.iterdir()))
    finished = run_alone("judge", "evaluate", "--features", *files)
    assert (finished.returncode, finished.stderr) == (0, "")
    rows = [line.split()[1:] for line in finished.stdout.splitlines() if line[:1] in set("abcd")]
    assert len(rows) >= 4
    assert rows[0] == rows[1] == rows[2] == rows[3]
    assert len(rows[0]) == 9


def test_what_the_extra_judge_does_not_bring_is_named(tmp_path):
    save_features(features(), tmp_path / "a.npz")
    finished = run_alone("judge", "evaluate", "--features", f"{tmp_path}/a.npz", "--shards", "toy-{000000..000001}.tar")
    assert finished.returncode == 2
    assert finished.stderr.endswith("is not installed; install it with: pip install 'vl_plugins[data]'\n")
