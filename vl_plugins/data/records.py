"""The names and captions of an image in a shard, and where they are in the files of other programs."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from vl_plugins.data.captions import CaptionedImage, is_blank
from vl_plugins.errors import UserError, one_of, user_errors

LINES = {"yes": True, "no": False, "auto": None}


class Record(msgspec.Struct, omit_defaults=True, gc=False):  # without cycles; tracking millions takes long
    """The names and captions of one image.

    Args:
        key: names its files in the archive, ``<key>.jpg``, ``<key>.json``, ``<key>.txt``.
        captions: at least one, in source order.
        image_id: the key where the shard has none.
        caption_ids: ``<image id>#<number>`` where the shard has none.
        dataset, split, group: as of :class:`~vl_plugins.data.captions.CaptionedImage`, where the shard has them.
    """

    key: str
    captions: tuple[str, ...]
    image_id: int | str
    caption_ids: tuple[int | str, ...]
    dataset: str | None = None
    split: str | None = None
    group: int | str | None = None


def record_of(key: str, image: CaptionedImage) -> Record:
    """Return the names and captions of an image that has this key."""
    return Record(key, image.captions, image.image_id, image.caption_ids, image.dataset, image.split, image.group)


class CaptionRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the captions of a sample are, if its ``json`` has no list ``captions`` as our shards have.

    Args:
        lines: each line of a text file is a caption. None: yes, if each text of the shards has several lines.
        texts: extensions of the text file, of which the first that is there counts.
        fields: of the ``json``; each text in them, or in a list in them, is a caption, and nothing else is.
        first_field: only the first of ``fields`` with a text that is not blank is the caption, as in open_clip.
        pictures: extensions of the picture; empty for those that are usual.
    """

    lines: bool | None = None
    texts: tuple[str, ...] = ("txt",)
    fields: tuple[str, ...] = ()
    first_field: bool = False
    pictures: tuple[str, ...] = ()

    def place(self) -> "CaptionRule":
        """Return the rule without what an index does not depend on, or tells itself: ``pictures`` and ``lines``."""
        return msgspec.structs.replace(self, lines=None, pictures=())


DEFAULT_RULE = CaptionRule()


def as_rule(caption_lines: str | CaptionRule, fields: Sequence[str] = ()) -> CaptionRule:
    """Return a rule, or that of ``"yes"``, ``"no"`` or ``"auto"``, and of fields that are a caption each.

    Raises:
        UserError: ``caption_lines`` is something else.
    """
    if isinstance(caption_lines, CaptionRule):
        return caption_lines
    return CaptionRule(LINES[one_of("caption_lines", caption_lines, LINES)], fields=tuple(fields))


def parse_record(key: str, members: Mapping[str, bytes], rule: CaptionRule = DEFAULT_RULE) -> Record:
    """Return the names and captions of a sample.

    Args:
        key: of the sample.
        members: its files by extension.
        rule: where its captions are.

    Raises:
        UserError: there are no captions, or something else in place of other fields.
    """
    with user_errors("its json or txt is not valid", TypeError, AttributeError):
        metadata, captions = _read_captions(members, rule)
        if not captions or all(map(is_blank, captions)):
            raise UserError(_missing(members, rule))
        image_id, ids = metadata.get("image_id", key), metadata.get("caption_ids")
        if rule.fields or not isinstance(ids, list) or len(ids) != len(captions):
            ids = [f"{image_id}#{number}" for number in range(len(captions))]
        fields = {"key": key, "captions": captions, "image_id": image_id, "caption_ids": ids}
        for name in ("dataset", "split", "group"):
            fields[name] = metadata.get(name)
        record = msgspec.convert(fields, Record)
        msgspec.json.encode(record)  # which finds half a character, as JSON can have it
    return record


def only_picture(members: dict[str, bytes], rule: CaptionRule) -> dict[str, bytes]:
    """Return only the picture of a sample that a rule names, as ``jpg`` whatever its format; all files without one."""
    for extension in rule.pictures:
        if extension in members:
            return {"jpg": members[extension]}
    return {} if rule.pictures else members


def _read_captions(members: Mapping[str, bytes], rule: CaptionRule) -> tuple[dict[str, Any], list[str]]:
    """Return the names of a sample, and its captions.

    Only a ``json`` with a list of captions has names: that of another program may mean anything by them.
    """
    metadata = json.loads(members.get("json", b"{}").decode("utf-8-sig"))
    listed = _texts_in(metadata.get("captions")) if isinstance(metadata, dict) else []
    names = metadata if listed else {}
    if rule.fields:
        return names, _texts_of_fields(metadata, rule)
    if listed:
        return names, listed
    text = _text_of(members, rule)
    return names, lines_of(text) if rule.lines else [text]


def _texts_of_fields(metadata: Any, rule: CaptionRule) -> list[str]:
    captions = []
    for field in rule.fields if isinstance(metadata, dict) else ():
        value = metadata.get(field)
        if isinstance(value, str):
            texts = [value]
        else:
            texts = [] if rule.first_field else _texts_in(value)
        captions += [text.strip() for text in texts if not is_blank(text)]
        if captions and rule.first_field:
            return captions[:1]
    return captions


def _texts_in(value: Any) -> list[str]:
    """Return a list of texts; an empty one for anything else."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        return []
    return value


def _text_of(members: Mapping[str, bytes], rule: CaptionRule, errors: str = "strict") -> str:
    for extension in rule.texts:
        if extension in members:
            return members[extension].decode("utf-8-sig", errors)
    return ""


def lines_of(text: str) -> list[str]:
    """Return the lines of a text that are not blank."""
    return [line.strip() for line in text.splitlines() if not is_blank(line)]


def have_lines(texts: int, texts_of_lines: int) -> bool:
    """Return whether lines are captions, if there are so many texts, and so many of them have several lines."""
    return 0 < texts_of_lines == texts


def all_have_lines(texts: Iterable[str]) -> bool:
    """Return whether each line of some texts is a caption; blank texts do not count."""
    texts_by_lines = Counter(len(lines_of(text)) for text in texts)
    count = texts_by_lines.total() - texts_by_lines[0]
    return have_lines(count, count - texts_by_lines[1])


def lines_without_list(members: Mapping[str, bytes], rule: CaptionRule) -> int:
    """Return how many lines that are not blank the text file of a sample has; 0 if its captions are in its ``json``."""
    metadata = members.get("json", b"")
    if rule.fields or (b'"captions"' in metadata and _read_captions(members, rule)[0]):
        return 0
    return len(lines_of(_text_of(members, rule, "replace")))


def _missing(members: Mapping[str, bytes], rule: CaptionRule) -> str:
    """Return a message about a sample without captions."""
    expected = f"a text in the fields {', '.join(map(repr, rule.fields))} of json"
    if not rule.fields:
        expected = f"a list of strings 'captions' in json, or {' or '.join(rule.texts)}"
    message = f"it has no captions; expected {expected}; it has {', '.join(sorted(members))}"
    if any("." in extension for extension in members):
        message += "; the name of a sample ends at the first dot of its files' names"
    return message
