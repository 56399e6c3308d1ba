"""What our reader does about the options that open_clip's data modules read."""

import ast

from vl_plugins.integrations.open_clip.data import NOT_OURS

__all__ = ["data_flags", "without_rule"]

# Beside those that it does not support.
FOLLOWED = {"batch_size", "csv_caption_key", "csv_img_key", "csv_separator", "dataset_type", "max_image_pixels"}
FOLLOWED |= {"seed", "train_data", "val_data", "workers"}
# Of other data, or of no consequence for what is read.
UNRELATED = {
    "audio_ext",
    "audio_multiprocessing_context",
    "imagenet_v2",
    "imagenet_val",
    "naflex_batch_divisor",
    "naflex_max_tokens_per_batch",
}
UNRELATED |= {"naflex_num_train_image_tokens", "naflex_pad_multiple", "naflex_patch_size_probs", "naflex_patch_sizes"}
UNRELATED |= {
    "genlap",
    "genlip",
    "naflex_seq_len_probs",
    "naflex_seq_lens",
    "naflexclap",
    "use_naflex",
    "val_num_samples",
}


def data_flags(folder, options):
    """Return those of the options of open_clip's parser that the data modules in a folder read."""
    read = {name for module in folder.glob("*data*.py") for name in _options_read_in(module.read_text())}
    return read & set(options)


def without_rule(flags):
    """Return flags that our reader would ignore without a word."""
    return flags - FOLLOWED - set(NOT_OURS) - UNRELATED


def _options_read_in(source):
    """Yield what a module reads of ``args``, as attributes or by ``getattr``."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="args"), attr=name):
                yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="args"), ast.Constant(value=name), *_]):
                yield name
