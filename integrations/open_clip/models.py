"""Model names: open_clip's own and those of ``configs/models``."""

from importlib import resources

import open_clip

from vl_plugins.errors import unknown_name

__all__ = ["check_model", "register_models"]


def register_models() -> None:
    """Make the configurations of ``configs/models`` known to open_clip under their file names."""
    with resources.as_file(resources.files("vl_plugins.configs") / "models") as folder:
        if any(file.stem not in open_clip.list_models() for file in folder.glob("*.json")):
            open_clip.add_model_config(folder)


def check_model(name: str) -> None:
    """Raise ``UserError`` with the nearest match where no such model exists; names with a schema, as hf-hub:, pass."""
    register_models()
    if ":" not in name and name not in open_clip.list_models():
        raise unknown_name("model", name, open_clip.list_models())
