import pytest


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory):
    """Folder of a tiny CLIP with random weights and a tokenizer of whole words."""
    example = pytest.importorskip(
        "vl_plugins.integrations.examples.sentence_transformers_trainer", exc_type=ImportError
    )
    folder = tmp_path_factory.mktemp("clip")
    example.make_model(folder)
    return str(folder)
