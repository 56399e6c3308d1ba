"""Write the metadata of a checkout, so that it can be imported where it is not installed.

    python -m benchmarks.metadata FOLDER

With FOLDER and the checkout on ``PYTHONPATH``, ``importlib.metadata`` finds the version and the losses by name. So a
checkout runs on a GPU machine that has no package index, and beside another version that is installed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_metadata(folder: Path, checkout: Path = ROOT) -> Path:
    """Write ``vl_plugins-VERSION.dist-info`` with version and entry points of a checkout, and return it."""
    import tomllib  # noqa: PLC0415 - Python 3.10 has none

    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = folder / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(header, encoding="utf-8")
    lines = []
    for group, entry_points in project["entry-points"].items():
        lines.append(f"[{group}]")
        for name, target in entry_points.items():
            lines.append(f"{name} = {target}")
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return metadata


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    if sys.version_info < (3, 11):
        print("benchmarks.metadata: error: needs Python 3.11 or newer; install the package instead", file=sys.stderr)
        return 2
    write_metadata(arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
