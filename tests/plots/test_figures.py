import sys

import pytest

from vl_plugins.errors import MissingExtraError, UserError
from vl_plugins.plots.figures import new_figure, picture_file, write_figure


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".pdf", b"%PDF-"), (".svg", b"<?xml")])
def test_a_picture_of_each_suffix(tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    out = picture_file(str(tmp_path / "new" / f"picture{suffix}"))
    write_figure(new_figure(2, 1), out)
    assert out.read_bytes().startswith(start)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_figure_has_the_stated_size_and_is_not_pyplots(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pil_image = pytest.importorskip("PIL.Image")
    write_figure(new_figure(2, 1), tmp_path / "picture.png")
    with pil_image.open(tmp_path / "picture.png") as picture:
        assert picture.size == (240, 120)
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("name", ["picture.jpg", "picture", "png", ".png"])
def test_other_suffixes_are_refused(name):
    with pytest.raises(UserError, match=rf"the picture must end in .png, .pdf or .svg, got {name}"):
        picture_file(name)


def test_missing_matplotlib_is_named_before_the_work(monkeypatch):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"vl_plugins\[eval\]"):
        picture_file("picture.png")


def test_a_failed_write_keeps_the_old_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.png"
    out.write_bytes(b"old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match=r"cannot write .*picture.png: No space left on device"):
        write_figure(new_figure(2, 1), out)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("picture.png", b"old")]
