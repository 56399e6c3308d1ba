import pytest

from vl_plugins.errors import MissingExtraError, UserError, one_of, require, unknown_name


def test_the_nearest_of_many_names_are_listed():
    text = str(unknown_name("model", "ViT-L-33", [f"ViT-{size}-{patch}" for size in "BL" for patch in range(50)]))
    assert text.startswith("unknown model 'ViT-L-33' (did you mean 'ViT-L-3")
    assert "the nearest of 100: " in text
    assert text.count(",") == 4


def test_no_hint_if_no_name_is_near():
    assert one_of("loss", "vlc", ["unified", "vlc"]) == "vlc"
    with pytest.raises(UserError, match=r"^unknown loss 'xyz'; known: unified, vlc$"):
        one_of("loss", "xyz", ["unified", "vlc"])


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(
        MissingExtraError, match=r"^no_such.part is not installed; .* pip install 'vl_plugins\[data\]'$"
    ):
        require("no_such.part", extra="data")


def test_a_broken_package_is_not_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        require("broken_package", extra="data")
