"""Hooks of mkdocs: pictures that the package's own commands draw, and links to files of the repository."""

import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from mkdocs.exceptions import BuildError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "docs"
PML = "python -m vl_plugins.integrations.pytorch_metric_learning"

# What a command writes, in build/docs, and the command. It runs once; the training takes some minutes.
COMMANDS = {
    "gradients.svg": "vl-plugins plot gradients unified scale=10 triplet_hn --out gradients.svg",
    "demo/toy": "vl-plugins toy --out demo/toy --train 2048",
    "demo/shards": "vl-plugins shards coco --annotations demo/toy/dataset_toy.json --images demo/toy --out demo/shards "
    "--samples-per-shard 512",
    "sets/best.pt": f"{PML} --config toy.yaml --loss smooth_chamfer --loss-kwargs base=unified --device cpu --out sets "
    "--set head.name=set head.num_slots=4 head.num_iters=4 head.hidden_dim=256",
    "attention.svg": "vl-plugins plot attention --checkpoint sets/best.pt --shards demo/shards/toy-test-000000.tar "
    "--out attention.svg",
    "training.svg": "vl-plugins plot training sets --out training.svg",
    "report.html": "vl-plugins evaluate --checkpoint sets/best.pt --shards demo/shards/toy-test-000000.tar "
    "--device cpu --report report.html",
}
LINK = re.compile(r"(?<=\]\()(\.\./[^)#]+)")

logger = logging.getLogger("mkdocs.hooks")


def on_files(files, config):
    """Add the pictures to the site."""
    BUILD.mkdir(parents=True, exist_ok=True)
    for name, command in COMMANDS.items():
        if not (BUILD / name).exists():
            run(command)
        if name.endswith((".svg", ".html")):
            files.append(File.generated(config, f"pictures/{name}", abs_src_path=str(BUILD / name)))
    return files


def run(command: str) -> None:
    logger.info(f"$ {command}")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    finished = subprocess.run(shlex.split(command), cwd=BUILD, env=environment, capture_output=True, text=True)
    if finished.returncode:
        raise BuildError(f"{command}\n{finished.stdout}{finished.stderr}")


def on_page_markdown(markdown, page, config, files):
    """Let links that leave docs/ lead to the repository's host."""

    def absolute(link):
        path = Path(os.path.normpath(Path(page.file.abs_src_path).parent / link[1]))
        if path.is_relative_to(config.docs_dir):
            return link[1]
        if not path.exists():
            logger.warning(f"{page.file.src_path}: no such file: {link[1]}")
        return f"{config.repo_url.rstrip('/')}/blob/main/{path.relative_to(ROOT)}"

    return LINK.sub(absolute, markdown)
