"""HTML pages that are well-formed XML too: their elements and texts."""

import base64
from xml.etree import ElementTree

NASTY = "</p><script>document.title='x'</script><img src=x onerror=\"document.title='x'\"><!-- <b>&amp; $x$ \u2028 ünï"


def parse(file):
    """The elements of a page, which is well-formed XML too."""
    return ElementTree.fromstring(file.read_text())


def every(node, tag="*", **attributes):
    """The elements below with these attributes; ``class_`` for ``class``."""
    return node.findall(f".//{tag}" + "".join(f"[@{name.strip('_')}='{value}']" for name, value in attributes.items()))


def raw(node):
    return "".join(node.itertext())


def text(node):
    return " ".join(raw(node).split())


def picture_content(page, node):
    """The JPEG that the first thumbnail below a node refers to."""
    (image,) = every(page, "image", id=every(node, "use")[0].attrib["href"].removeprefix("#"))
    return base64.b64decode(image.attrib["href"].partition(",")[2])
