"""Pictures, and tar archives of a few small files."""

import io
import json
import tarfile

from PIL import Image


def encode_picture(size=(8, 6), image_format="PNG", color=None, mode="L"):
    """Return a gradient, or a picture of one color, as the content of an image file."""
    stream = io.BytesIO()
    picture = Image.linear_gradient("L").resize(size).convert(mode) if color is None else Image.new(mode, size, color)
    picture.save(stream, image_format)
    return stream.getvalue()


def encode_archive(members):
    """Return a tar archive of pairs of name and content; None is a symbolic link, other objects become JSON."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname, content = tarfile.SYMTYPE, "elsewhere", b""
            if not isinstance(content, bytes):
                content = (content if isinstance(content, str) else json.dumps(content)).encode()
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def read_archive(file):
    """Return the contents of an archive by name."""
    with tarfile.open(file) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}
