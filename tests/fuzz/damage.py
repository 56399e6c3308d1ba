"""Random changes of files: content is dropped, retyped, nested, swapped and repeated, and bytes are cut and flipped."""

import copy
import io
import json
import struct
import tarfile

import numpy as np
import torch
import yaml
from safetensors.numpy import load_file, save

__all__ = ["MARKER", "damage"]

MARKER = "marker"  # a file that planted code would make
DEEP = "@deep@"
WRONG = [None, True, 0, -1, 3, 2.5, 1e308, float("nan"), float("inf"), 10**6, 2**63, -(2**64), 10**30, "", "x", "0"]
WRONG += ["\0", "\ud800", "é" * 300, "../../x", "/dev/zero", f"pipe:touch {MARKER}", "planted:Class", [], {}, [None]]
WRONG += [[[1, 2], [3]], {"name": "planted:Class"}, {"trust_remote_code": True}, DEEP]
WRONG += [{"auto_map": {"AutoTokenizer": ["planted.Class", None]}}]


class Code:
    def __reduce__(self):
        return open, (MARKER, "w")


def damage(file, draw):
    """Change a file once or twice, or something in a folder."""
    if file.is_dir():
        file = draw.choice(sorted(each for each in file.rglob("*") if each.is_file()))
        name = draw.choice(["", "x", "best.pt", f"epoch_{10**30}.pt", file.name, file.name, file.name])
        if name != file.name:
            file.rename(file.with_name(name)) if name else file.unlink()
            return
    load, dump = FORMATS.get(file.suffix, FORMATS[".txt"])
    for _ in range(draw.choice([1, 1, 2])):
        try:
            assert draw.random() < 0.6
            dump(file, change(load(file), draw))
        except Exception:  # also of a file that is damaged already, or of content that it cannot hold
            file.write_bytes(change_bytes(bytearray(file.read_bytes()), draw))


def change_bytes(data, draw):
    start, length = draw.randrange(len(data) + 1), draw.choice([1, 1, 8, 512, 5000])
    part = data[start : start + length]
    flipped = bytes(byte ^ 1 << draw.randrange(8) for byte in data[start : start + 1])
    changes = [b"", part + part, bytes(len(part)), part + draw.randbytes(length), flipped, flipped, flipped]
    if draw.random() < 0.2:
        return data[:start]
    new = draw.choice(changes)
    return data[:start] + new + data[start + (1 if new is flipped else length) :]


def change(tree, draw):
    """Return nested lists and mappings with one change."""
    tree = [copy.deepcopy(tree)]
    parent, key = tree, 0
    while isinstance(parent[key], (dict, list)) and parent[key] and draw.random() < 0.8:
        parent = parent[key]
        key = draw.choice([*parent]) if isinstance(parent, dict) else draw.randrange(len(parent))
    how, value = draw.choice(["drop", "retype", "retype", "retype", "nest", "swap", "repeat"]), parent[key]
    if how == "drop" and parent is not tree:
        del parent[key]
    elif how == "nest":
        parent[key] = draw.choice([[value], {"x": value}, {"name": value}])
    elif how == "swap":
        other = draw.choice([*parent] if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], value
    elif how == "repeat" and isinstance(parent, list):
        parent.insert(key, value)
    elif isinstance(value, (torch.Tensor, np.ndarray)) and draw.random() < 0.7:
        parent[key] = draw.choice(
            [value[:0], value[1:], value[None], value * 2, -value, value * float("nan"), value > 0]
        )
    elif isinstance(value, bytes) and draw.random() < 0.7:
        parent[key] = bytes(change_bytes(bytearray(value), draw))
    else:
        wrong = [Code(), torch.ones(1).expand(10**12), torch.ones(4, 4).to_sparse()] if _has_tensor(tree) else []
        parent[key] = draw.choice(WRONG + wrong)
    return tree[0]


def _has_tensor(tree):
    if isinstance(tree, (dict, list)):
        return any(map(_has_tensor, tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, (torch.Tensor, np.ndarray))


def _to_json(tree):
    return json.dumps(tree).replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000)


def _fields(file):
    """Return the fields of a table, or lines of ``name: value``."""
    text = file.read_text()
    mark = next((mark for mark in (": ", ",") if mark in text), " ")
    return [[line.partition(mark)[0], mark, line.partition(mark)[2]] for line in text.splitlines()]


def _load_npz(file):
    arrays = dict(np.load(file))
    return arrays | {"vl_plugins": json.loads(str(arrays["vl_plugins"]))}


def _load_safetensors(file):
    size = struct.unpack("<Q", file.read_bytes()[:8])[0]
    text = json.loads(file.read_bytes()[8 : 8 + size])["__metadata__"]["vl_plugins"]
    return load_file(file) | {"vl_plugins": json.loads(text)}


def _dump_arrays(file, tree):
    text = _to_json(tree.pop("vl_plugins", {}))
    arrays = {name: np.ascontiguousarray(array) for name, array in tree.items()}
    if file.suffix == ".npz":
        np.savez(file, **arrays, vl_plugins=np.array(text))
    else:
        file.write_bytes(save(arrays, metadata={"vl_plugins": text}))


def _load_tar(file):
    with tarfile.open(file) as archive:
        members = [[member.name, archive.extractfile(member).read()] for member in archive]
    return [[name, json.loads(data) if name.endswith(".json") else data] for name, data in members]


def _dump_tar(file, members):
    with tarfile.open(file, "w") as archive:
        for name, content in members:
            data = content if isinstance(content, bytes) else _to_json(content).encode()
            info = tarfile.TarInfo(str(name))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


FORMATS = {  # how each is read and written
    ".json": (lambda file: json.loads(file.read_text()), lambda file, tree: file.write_text(_to_json(tree))),
    ".jsonl": (
        lambda file: [json.loads(line) for line in file.read_text().splitlines()],
        lambda file, lines: file.write_text("".join(_to_json(line) + "\n" for line in lines)),
    ),
    ".yaml": (
        lambda file: yaml.safe_load(file.read_text()),
        lambda file, tree: file.write_text(
            yaml.safe_dump(tree, sort_keys=False).replace(DEEP, "[" * 3000 + "]" * 3000)
        ),
    ),
    ".txt": (_fields, lambda file, rows: file.write_text("\n".join("".join(map(str, row)) for row in rows) + "\n")),
    ".pt": (lambda file: torch.load(file, weights_only=True), lambda file, tree: torch.save(tree, file)),
    ".npz": (_load_npz, _dump_arrays),
    ".safetensors": (_load_safetensors, _dump_arrays),
    ".tar": (_load_tar, _dump_tar),
}
