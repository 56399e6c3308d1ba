"""What every source does with an image that cannot be used."""

import pytest

from vl_plugins.data.captions import RejectedImage
from vl_plugins.errors import UserError


def check_rejected(read, place, split, reason, kept):
    """Check that ``read(on_error=...)`` raises an error about an image, or yields it as rejected.

    ``kept`` are the files of all images in order, with None for the rejected one.
    """
    with pytest.raises(UserError) as raised:
        list(read(on_error="raise"))
    message = str(raised.value)
    assert message.startswith(f"{place}: ")
    assert reason in message
    assert "\n" not in message
    rejected = RejectedImage(place, split, message.removeprefix(f"{place}: "))
    assert [getattr(image, "file", image) for image in read(on_error="skip")] == [file or rejected for file in kept]
