"""Random changes of files: content is dropped, retyped, nested and swapped, and bytes are cut and flipped."""

import copy
import io
import json
import struct
import tarfile

import numpy as np
import torch
import yaml

__all__ = ["MARKER", "PLANTED", "damage"]

MARKER = "marker"  # a file that planted code would make
PLANTED = f"open({MARKER!r}, 'w').close()\n"  # of a module in the folder
DEEP = "@deep@"
WRONG = [None, True, False, 0, -1, 1, 3, 2.5, 1e308, float("nan"), float("inf"), 10**6, 2**31, 2**63, -(2**64), 10**30]
WRONG += ["", "x", "0", "\0", "\ud800", "é" * 300, "../../x", "/dev/zero", f"pipe:touch {MARKER}", "planted:Class"]
WRONG += [[], {}, [None], [[1, 2], [3]], {"name": "x"}, {"name": "planted:Class"}, {"trust_remote_code": True}]
WRONG += [{"auto_map": {"AutoTokenizer": ["planted.Class", None]}}, DEEP]


class Code:
    def __reduce__(self):
        return open, (MARKER, "w")


def damage(file, draw):
    """Change a file once or twice at random, by its kind or byte by byte."""
    by_kind = KINDS.get(file.suffix)
    for _ in range(draw.choice([1, 1, 2])):
        if by_kind is None or draw.random() < 0.4:
            _change_bytes(file, draw)
        else:
            try:
                by_kind(file, draw)
            except Exception:  # of a file that is damaged already, or content that cannot be written
                _change_bytes(file, draw)


def _change_bytes(file, draw):
    data = bytearray(file.read_bytes())
    start = draw.randrange(len(data) + 1)
    length = draw.choice([1, 1, 8, 512, 5000])
    how = draw.choice(["cut", "flip", "flip", "flip", "zero", "insert", "drop", "repeat"])
    if how == "cut":
        del data[start:]
    elif how == "flip" and start < len(data):
        data[start] ^= 1 << draw.randrange(8)
    elif how == "zero":
        data[start : start + length] = bytes(len(data[start : start + length]))
    elif how == "insert":
        data[start:start] = draw.randbytes(length)
    elif how == "drop":
        del data[start : start + length]
    elif how == "repeat":
        data[start:start] = data[start : start + length]
    file.write_bytes(data)


def change_tree(tree, draw, wrong=WRONG):
    """Return nested lists and mappings with one change."""
    tree = [copy.deepcopy(tree)]
    parent, key = tree, 0
    while isinstance(parent[key], (dict, list)) and parent[key] and draw.random() < 0.8:
        parent = parent[key]
        key = draw.choice([*parent]) if isinstance(parent, dict) else draw.randrange(len(parent))
    how = draw.choice(["drop", "retype", "retype", "nest", "swap", "repeat"])
    others = [*parent] if isinstance(parent, dict) else range(len(parent))
    if how == "drop" and parent is not tree:
        del parent[key]
    elif how == "nest":
        parent[key] = draw.choice([[parent[key]], {"x": parent[key]}, {"name": parent[key]}])
    elif how == "swap":
        other = draw.choice(others)
        parent[key], parent[other] = parent[other], parent[key]
    elif how == "repeat" and isinstance(parent, list):
        parent.insert(key, parent[key])
    else:
        parent[key] = draw.choice(wrong)
    return tree[0]


def _deep(text):
    return text.replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000)


def _change_json(file, draw):
    file.write_text(_deep(json.dumps(change_tree(json.loads(file.read_text()), draw))))


def _change_lines(file, draw):
    lines = file.read_text().splitlines()
    place = draw.randrange(len(lines))
    lines[place] = _deep(json.dumps(change_tree(json.loads(lines[place]), draw)))
    file.write_text("\n".join(lines) + "\n")


def _change_yaml(file, draw):
    tree = yaml.safe_load(file.read_text())
    changed = change_tree(tree, draw)
    file.write_text(_deep(yaml.safe_dump(changed, sort_keys=False).replace(f"'{DEEP}'", f'"{DEEP}"')))


def _change_text(file, draw):
    """Change fields of a table, or lines of ``name: value``."""
    separator = next((mark for mark in ("\t", ": ", ",") if mark in file.read_text()), " ")
    rows = change_tree([line.split(separator) for line in file.read_text().splitlines()], draw)
    texts = (row if isinstance(row, str) else separator.join(map(str, row)) for row in rows)
    file.write_text("\n".join(texts) + "\n")


def _tensors(draw):
    """Return arrays that are wrong in place of most others."""
    dtype = draw.choice([torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    return [torch.ones(3, dtype=dtype), torch.tensor([float("nan")] * 16), torch.zeros(0), torch.ones(12, 16)]


def _change_torch(file, draw):
    content = torch.load(file, weights_only=True)
    wrong = [*WRONG, *_tensors(draw), Code(), torch.ones(1).expand(10**12), torch.ones(4, 4).to_sparse()]
    torch.save(change_tree(content, draw, wrong), file, _use_new_zipfile_serialization=draw.random() < 0.8)


def _change_arrays(arrays, draw):
    """Change arrays by name, of which ``vl_plugins`` is a JSON text."""
    text = arrays.pop("vl_plugins")
    if draw.random() < 0.5:
        text = _deep(json.dumps(change_tree(json.loads(text), draw)))
    else:
        name = draw.choice([*arrays])
        array = arrays[name]
        rows = np.random.default_rng(draw.randrange(99)).permutation(len(array))
        wrong = [tensor.numpy() for tensor in _tensors(draw) if tensor.dtype != torch.bfloat16]
        array = draw.choice([*wrong, array[1:], array[None], array[rows], array.astype("f8"), array * 2, -array, None])
        arrays |= {name: array} if array is not None else {}
        if array is None:
            del arrays[name]
    return arrays, text


def _change_npz(file, draw):
    arrays, text = _change_arrays(dict(np.load(file)), draw)
    if draw.random() < 0.1:
        arrays[draw.choice([*arrays])] = np.array([Code()])
    np.savez(file, **arrays, vl_plugins=np.array(text))


def _change_safetensors(file, draw):
    from safetensors.numpy import load_file, save

    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    if draw.random() < 0.5:
        text = _deep(json.dumps(change_tree(header, draw))).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    else:
        arrays, text = _change_arrays(load_file(file) | {"vl_plugins": header["__metadata__"]["vl_plugins"]}, draw)
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        file.write_bytes(save(arrays, metadata={"vl_plugins": text}))


def _change_tar(file, draw):
    with tarfile.open(file) as archive:
        members = [[member.name, archive.extractfile(member).read()] for member in archive]
    place = draw.randrange(len(members))
    name, data = members[place]
    how = draw.choice(["drop", "rename", "repeat", "swap", "content", "content", "link"])
    if how == "drop":
        del members[place]
    elif how == "rename":
        names = ["x", "../x", "a.b.json", "/tmp/x.jpg", f"{name}.pyd", f"{name}.pickle", name.upper(), "é.txt"]
        members[place][0] = draw.choice(names)
    elif how == "repeat":
        members.insert(draw.randrange(len(members)), [name, data])
    elif how == "swap":
        other = draw.choice(members)
        members[place][1], other[1] = other[1], data
    elif name.endswith(".json"):
        members[place][1] = _deep(json.dumps(change_tree(json.loads(data), draw))).encode()
    else:
        members[place][1] = draw.choice([data[: len(data) // 2], b"", data[::-1], data + b"x", b"\xff" + data])
    with tarfile.open(file, "w") as archive:
        for number, (name, data) in enumerate(members):
            info = tarfile.TarInfo(name)
            if how == "link" and number == place:
                info.type, info.linkname = draw.choice([(tarfile.SYMTYPE, "/dev/zero"), (tarfile.FIFOTYPE, "")])
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def change_folder(folder, draw):
    """Remove, empty, rename or replace one of the files below a folder."""
    file = draw.choice(sorted(file for file in folder.rglob("*") if file.is_file()))
    how = draw.choice(["remove", "empty", "rename", "folder", "damage", "damage"])
    if how == "damage":
        damage(file, draw)
        return
    data = file.read_bytes()
    file.unlink()
    if how == "empty":
        file.touch()
    elif how == "rename":
        file.with_name(draw.choice(["x.pt", "epoch_9.pt", "epoch_99999999999999999999.pt", "best.pt"])).write_bytes(
            data
        )
    elif how == "folder":
        file.mkdir()


KINDS = {
    ".json": _change_json,
    ".jsonl": _change_lines,
    ".yaml": _change_yaml,
    ".csv": _change_text,
    ".tsv": _change_text,
    ".txt": _change_text,
    ".pt": _change_torch,
    ".npz": _change_npz,
    ".safetensors": _change_safetensors,
    ".tar": _change_tar,
}
