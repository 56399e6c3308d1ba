import sys

import pytest
from matplotlib import pyplot
from PIL import Image

from vl_plugins.errors import MissingExtraError, UserError
from vl_plugins.plots.figures import check_picture, new_figure, write_figure


def test_a_picture_of_each_suffix(tmp_path):
    for suffix, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF-"), (".svg", b"<?xml")):
        out = tmp_path / "new" / f"picture{suffix}"
        write_figure(new_figure(2, 1), out)
        assert out.read_bytes().startswith(start)
    with Image.open(tmp_path / "new" / "picture.png") as picture:
        assert picture.size == (240, 120)
    assert pyplot.get_fignums() == []


def test_what_is_wrong_is_named_before_the_work(monkeypatch):
    for name in ("picture.jpg", "picture", ".png"):
        with pytest.raises(UserError, match=rf"the picture must end in .png, .pdf or .svg, got {name}"):
            check_picture(name)
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"vl_plugins\[eval\]"):
        check_picture("picture.png")
