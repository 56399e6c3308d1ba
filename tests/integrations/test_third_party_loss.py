"""A loss of another distribution, installed by pip into an environment of its own, is known to both hosts by name."""

import os
import subprocess
import sys
import sysconfig
import textwrap

import pytest

FILES = {
    "pyproject.toml": """
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"

        [project]
        name = "euclidean-pull"
        version = "1.0"

        [project.entry-points."vl_plugins.losses"]
        euclidean_pull = "euclidean_pull:EuclideanPull"

        [tool.setuptools]
        py-modules = ["euclidean_pull"]
        """,
    "euclidean_pull.py": """
        from pytorch_metric_learning.losses import ContrastiveLoss


        class EuclideanPull(ContrastiveLoss):
            "Pulls positives together, as a loss of one direction."

            def __init__(self, strength=1.0, **kwargs):
                super().__init__(pos_margin=0, neg_margin=strength, **kwargs)

            def forward(self, *args, **kwargs):
                print("called with strength", self.neg_margin)
                return super().forward(*args, **kwargs)
        """,
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Python of a new virtual environment that has what this one has, and the distribution with the loss."""
    folder = tmp_path_factory.mktemp("third_party")
    project = folder / "project"
    project.mkdir()
    for name, content in FILES.items():
        (project / name).write_text(textwrap.dedent(content))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # Not by PYTHONPATH: what is installed for development is found by .pth files of its folder.
    with open(os.path.join(site, "parent.pth"), "w") as file:
        file.write(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--no-build-isolation", project], check=True, timeout=200)
    return python


def run(python, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [python, *map(str, arguments)], capture_output=True, text=True, timeout=200, env=environment, cwd="/"
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_both_hosts_find_it(environment, tmp_path):
    loss = {"name": "euclidean_pull", "strength": 0.25, "distance": "LpDistance"}
    code = f"""
import torch
from vl_plugins.integrations.pytorch_metric_learning import build_loss
build_loss({loss!r})(torch.eye(2), torch.arange(2), ref_emb=torch.eye(2), ref_labels=torch.arange(2))
"""
    assert "called with strength 0.25" in run(environment, "-c", code)
    flags = "--model vl-tiny --device cpu --precision fp32 --dataset-type synthetic --train-num-samples 2"
    flags += " --batch-size 2 --workers 0 --epochs 1 --loss euclidean_pull --loss-kwargs strength=0.25 --logs"
    output = run(environment, "-m", "vl_plugins.integrations.open_clip", *flags.split(), tmp_path)
    assert "called with strength 0.25" in output
