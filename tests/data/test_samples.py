"""The files of one image in an archive."""

import contextlib
import io
import tarfile

from hypothesis import given
from hypothesis import strategies as st

from vl_plugins.data.samples import parse_sample, scan

FORMATS = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT, "ustar": tarfile.USTAR_FORMAT}


@given(
    key=st.sampled_from(["a", "00/b.c", "sub/folder/d", "\u00fc", "k" * 97, "k" * 150, "f/" * 60 + "n", "__x__"]),
    extensions=st.lists(st.sampled_from(["jpg", "JPG", "txt", "json", "seg.png", "cls"]), min_size=1, max_size=4),
    sizes=st.lists(st.sampled_from([0, 1, 511, 512, 513, 2000]), min_size=4, max_size=4),
    kind=st.sampled_from(sorted(FORMATS)),
    damage=st.none() | st.tuples(st.integers(0, 2000), st.integers(1, 255)) | st.integers(-600, -1),
)
def test_a_sample_is_what_tarfile_finds(key, extensions, sizes, kind, damage):
    """Headers that are read by hand: long names, other formats, damage, and files that belong to no sample."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=FORMATS[kind]) as archive:
        for extension, size in zip(extensions, sizes, strict=False):
            member = tarfile.TarInfo(f"{key}.{extension}")
            member.size = size
            with contextlib.suppress(ValueError):  # too long for ustar
                archive.addfile(member, io.BytesIO(bytes([size % 251]) * size))
        end = archive.offset
    data = bytearray(stream.getvalue()[:end])
    if isinstance(damage, int):
        del data[damage:]
    elif damage is not None and data:
        place, change = damage
        data[place % len(data)] ^= change
    results = []
    for parse in (parse_sample, parse_by_tarfile):
        try:
            sample = parse(bytes(data))
            results.append((sample.key, sample.members))
        except Exception:
            results.append("error")
    assert results[0] == results[1]


def parse_by_tarfile(data):
    (sample,) = scan(io.BytesIO(data + bytes(512)))
    return sample
