"""Pictures that readers must refuse: one that starts a program, and one that fills the memory."""

import io
import os
from functools import lru_cache

from PIL import EpsImagePlugin, Image

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
VAST = "13,000 x 13,000 pixels"


@lru_cache(maxsize=1)
def vast_png():
    """Return 169 million pixels in 20 KB, which PIL warns of, but opens."""
    stream = io.BytesIO()
    Image.new("1", (13_000, 13_000)).save(stream, "PNG")
    return stream.getvalue()


def replace_ghostscript(monkeypatch, folder):
    """Put a stand-in first on the PATH; return the file that it makes when it is started."""
    mark, program = folder / "gs has run", folder / "gs"
    program.write_text(f"#!/bin/sh\ntouch '{mark}'\necho 10.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # which PIL looks for once
    return mark


def fail_to_decode(monkeypatch):
    """Make any decoding of a PNG fail the test."""

    def fail(image):
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", fail)
