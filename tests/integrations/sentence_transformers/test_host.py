"""A version of sentence-transformers that lacks what this package uses of it is an error that names the versions."""

import importlib.util
import sys

import pytest

from vl_plugins.errors import MissingExtraError

reason = "needs pip install 'vl_plugins[sentence-transformers]'"
host = pytest.importorskip("sentence_transformers", minversion="6.0", reason=reason)
ours = pytest.importorskip("vl_plugins.integrations.sentence_transformers.host", exc_type=ImportError, reason=reason)


def import_again():
    """Execute the module as a new one, because others have imported it."""
    specification = importlib.util.find_spec(ours.__name__)
    specification.loader.exec_module(importlib.util.module_from_spec(specification))


NAMES = [
    "MultiVectorEncoder",
    "base.evaluation.BaseEvaluator",
    "base.losses.CachedLossMixin",
    "base.losses.RandContext",
]
NAMES += ["base.losses.gradcache._create_minibatch", "base.losses.merged_forward.embed_columns"]
NAMES += ["base.modality.is_image_url_or_path"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_gone(name, monkeypatch):
    import_again()
    monkeypatch.delattr(f"sentence_transformers.{name}")
    installed = host.__version__.replace(".", r"\.")
    with pytest.raises(
        ImportError, match=rf"^sentence-transformers {installed} lacks .*{name.split('.')[-1]}.*tested, 6"
    ):
        import_again()


def test_without_sentence_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'vl_plugins\[sentence-transformers\]'$"):
        import_again()
