"""Against what open_clip does for each value of its ``--precision``."""

import contextlib
import re

import pytest
import torch
from open_clip import get_input_dtype
from open_clip_train.precision import get_autocast

from vl_plugins.errors import UserError
from vl_plugins.integrations.loading import PRECISIONS, autocast, input_dtype
from vl_plugins.integrations.open_clip.flags import parse_args


def product_type(context):
    with context:
        return (torch.ones(1, 1) @ torch.ones(1, 1)).dtype


@pytest.mark.parametrize("precision", PRECISIONS)
def test_types_are_those_of_open_clip(precision):
    assert input_dtype(precision) == get_input_dtype(precision)
    expected = get_autocast(precision, device_type="cpu")()
    assert isinstance(autocast(precision, "cpu"), contextlib.nullcontext) == isinstance(expected, contextlib.suppress)
    assert product_type(autocast(precision, "cpu")) == product_type(expected)


def test_every_precision_of_open_clip_is_known():
    with pytest.raises(UserError) as raised:
        parse_args(["--precision", "none"])
    _, _, choices = str(raised.value).partition("(choose from ")
    assert sorted(re.findall(r"\w+", choices)) == sorted(PRECISIONS)
