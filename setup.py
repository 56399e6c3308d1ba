"""The packages, found by a rule: two folders beside the package are installed in it. All else is in pyproject.toml."""

from setuptools import find_namespace_packages, find_packages, setup

FOLDERS = ("configs", "integrations")

setup(
    packages=[
        *find_packages(include=["vl_plugins*"]),
        *(
            f"vl_plugins.{package}"
            for folder in FOLDERS
            for package in (folder, *(f"{folder}.{inner}" for inner in find_namespace_packages(folder)))
            if "__pycache__" not in package
        ),
    ],
    package_dir={f"vl_plugins.{folder}": folder for folder in FOLDERS},
)
