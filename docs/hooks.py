"""Hooks of mkdocs: links to files of the repository."""

import logging
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(\.\./[^)#]+)")

logger = logging.getLogger("mkdocs.hooks")


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
