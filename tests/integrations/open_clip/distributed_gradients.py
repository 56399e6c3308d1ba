"""Gradients of features in several processes, beside those of one process in float64.

As a script it writes the table of all losses: ``python -m tests.integrations.open_clip.distributed_gradients``.
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss
from pytorch_metric_learning.losses import NTXentLoss

from tests.processes import in_processes
from vl_plugins.integrations.open_clip.loss import TwoTowerLoss, build_loss
from vl_plugins.integrations.open_clip.options import PluginOptions

D, K = 16, 4
LOGIT_SCALE = 14.0


def options(loss, **fields):
    names = {name: fields.pop(name) for name in ("miner", "reducer", "distance", "head") if name in fields}
    return PluginOptions(loss=loss, loss_kwargs=fields, **names)


CASES = {
    "ClipLoss of open_clip": ClipLoss,
    "unified": options("unified", scale=20),
    "unified, scale=learned": options("unified", scale="learned"),
    "vlc, scale=learned": options("vlc", scale="learned"),
    "triplet_hn": options("triplet_hn", margin=0.3),
    "triplet_hn, warm-up": options("triplet_hn", margin=0.3, warmup_steps=10**6),
    "triplet_sh": options("triplet_sh", margin=0.3),
    "goal, nca and sig": options("goal", triplet_weight="nca", pair_weight="sig"),
    "goal, cir and sig_ms": options("goal", triplet_weight="cir", pair_weight="sig_ms"),
    "goal, con and lin_ms": options("goal", triplet_weight="con", pair_weight="lin_ms"),
    "unified of a miner": options("unified", scale=20, miner="MultiSimilarityMiner"),
    "triplet_hn, AvgNonZeroReducer": options("triplet_hn", margin=0.1, reducer="AvgNonZeroReducer"),
    "unified, image to text only": options("unified", scale=20, symmetric=False),
    "NTXentLoss of PML": lambda **gathering: TwoTowerLoss("nt_xent", NTXentLoss(0.1), **gathering),
    "smooth_chamfer of triplet_hn": options("smooth_chamfer", head="set", mmd_weight=0.3, diversity_weight=0.2),
    "smooth_chamfer of unified": options("smooth_chamfer", head="set", base="unified", scale=20),
    "unified of match_probability": options("unified", head="set", distance="match_probability", scale=20),
}

FLAGS = {
    "neither": {"local_loss": False, "gather_with_grad": False},
    "--local-loss": {"local_loss": True, "gather_with_grad": False},
    "--gather-with-grad": {"local_loss": False, "gather_with_grad": True},
    "both": {"local_loss": True, "gather_with_grad": True},
}


class Batch(NamedTuple):
    """Sizes of the processes' shares, captions of an image, and numbers of the images where some are the same."""

    sizes: tuple[int, ...]
    captions: int = 2
    image_ids: tuple[int, ...] | None = None

    def shares(self):
        """Return the images of each process, and its texts."""
        bounds = [sum(self.sizes[:rank]) for rank in range(len(self.sizes) + 1)]
        return [
            (slice(start, stop), slice(self.captions * start, self.captions * stop))
            for start, stop in itertools.pairwise(bounds)
        ]


def make_loss(name, **gathering):
    made = CASES[name]
    return build_loss(made, **gathering) if isinstance(made, PluginOptions) else made(**gathering)


def inputs(name, batch, dtype):
    """Return leaves of the type ``dtype``, by the names of open_clip's outputs; the scale is float64, or float32."""
    generator = torch.Generator().manual_seed(1)
    compares_sets = getattr(CASES[name], "head", None) == "set"
    shape = (K, D) if compares_sets else (D,)
    leaves = {}
    for tower, number in (("image", sum(batch.sizes)), ("text", batch.captions * sum(batch.sizes))):
        drawn = torch.randn(number, *shape, generator=generator, dtype=torch.float64)
        leaves[f"{tower}_features"] = F.normalize(drawn, dim=-1)
        if compares_sets:
            leaves[f"{tower}_slots"] = drawn
    leaves = {key: leaf.to(dtype).requires_grad_() for key, leaf in leaves.items()}
    scale_type = torch.promote_types(dtype, torch.float32)
    leaves["logit_scale"] = torch.tensor(LOGIT_SCALE, dtype=scale_type, requires_grad=True)
    return leaves


def gradients(loss, leaves, share=None, image_ids=None):
    """Return the gradients of one step by the leaves, and the value; ``share`` is a process's."""
    given = dict(leaves)
    if share is not None:
        images, texts = share
        given = {
            key: leaf if leaf.ndim == 0 else leaf[images if key.startswith("image") else texts]
            for key, leaf in leaves.items()
        }
    if image_ids is not None:
        given["image_ids"] = torch.tensor(image_ids)[share[0] if share else slice(None)]
    for leaf in leaves.values():
        leaf.grad = None
    value = sum(loss(**given, output_dict=True).values())
    value.backward()
    return {key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for key, leaf in leaves.items()}


def reference(name, batch, dtype, flags):
    """Return the gradients that the processes' average should be: those of one process in float64, by stock's rules.

    Without gradients through gathered features these are divided by the number of processes; with ``--local-loss``
    alone they are those of anchors as if all candidates were constant.
    """
    rounded = {key: leaf.detach() for key, leaf in inputs(name, batch, dtype).items()}
    exact = {key: leaf.double().requires_grad_() for key, leaf in rounded.items()}
    loss = make_loss(name).double()
    anchors_only = flags == "--local-loss" and len(batch.sizes) > 1 and _is_split(name)
    if not anchors_only:
        found = gradients(loss, exact, image_ids=batch.image_ids)
        factor = 1.0 if FLAGS[flags]["gather_with_grad"] else 1 / len(batch.sizes)
        return {key: gradient if key == "logit_scale" else gradient * factor for key, gradient in found.items()}
    pair_loss = getattr(loss, "pair_loss", None)
    if pair_loss is None:  # ClipLoss: half of each direction
        images, texts, scale = exact.values()
        labels = torch.arange(len(images))
        sum(
            0.5 * F.cross_entropy(scale * one @ other.detach().T, labels)
            for one, other in ((images, texts), (texts, images))
        ).backward()
        return {key: leaf.grad for key, leaf in exact.items()}
    # Each direction is a call of its own, with candidates without a gradient.
    call = {"symmetric": False} | ({"scale": exact["logit_scale"]} if loss.learned_scale else {})
    images, texts = exact["image_features"], exact["text_features"]
    ids = torch.tensor(batch.image_ids) if batch.image_ids else torch.arange(len(images))
    text_labels = ids.repeat_interleave(batch.captions)
    total = pair_loss(images, ids, ref_emb=texts.detach(), ref_labels=text_labels, **call)
    if loss.symmetric:
        total = total + pair_loss(texts, text_labels, ref_emb=images.detach(), ref_labels=ids, **call)
    if hasattr(loss.loss, "regularization"):
        # Of gathered features, in which only those of the process itself have a gradient.
        terms = loss.loss.regularization(images, texts, exact["image_slots"], exact["text_slots"])
        total = total + sum(terms.values()) / len(batch.sizes)
    (total + 0 * exact["logit_scale"]).backward()
    return {key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for key, leaf in exact.items()}


def _is_split(name):
    """Return whether the loss is computed of the processes' own rows where that is asked for."""
    loss = make_loss(name, local_loss=True, rank=0, world_size=2)
    return getattr(loss, "compares_own_rows", True)


def difference(actual, expected):
    """Return the largest difference of gradients, relative to the largest gradient."""
    differences = []
    for key, gradient in expected.items():
        largest = gradient.abs().max().item()
        differences.append((actual[key].double() - gradient).abs().max().item() / (largest or 1))
    return max(differences)


def averaged(gradients_by_rank, batch):
    """Return the gradients of the joined batch that DistributedDataParallel's average over processes amounts to."""
    # Each process has zeros where the features are not its own.
    return {
        key: sum(found[key].double() for found in gradients_by_rank) / len(batch.sizes) for key in gradients_by_rank[0]
    }


def step(name, batch, dtype, flags, rank=0):
    gathering = {**FLAGS[flags], "rank": rank, "world_size": len(batch.sizes)}
    loss = make_loss(name, **gathering)
    if dtype == torch.float64:
        loss = loss.double()
    return gradients(loss, inputs(name, batch, dtype), batch.shares()[rank], batch.image_ids)


def steps(rank, work):
    return [step(*job, rank=rank) for job in work]


def averaged_gradients(work, world_size):
    """Return the averaged gradients of each job, ``(name, batch, dtype, flags)``."""
    by_rank = [steps(0, work)] if world_size == 1 else in_processes(steps, world_size, work)
    return [averaged(found, job[1]) for found, job in zip(zip(*by_rank, strict=True), work, strict=True)]


def main():
    """Write, as a table, the largest difference of a gradient relative to the largest gradient."""
    print(f"| loss | type | processes | {' | '.join(FLAGS)} |\n|---|---|---|{'---|' * len(FLAGS)}")
    rows = {}
    for world_size in (1, 2, 4):
        batch = Batch((12 // world_size,) * world_size)
        work = [
            (name, batch._replace(captions=1) if made is ClipLoss else batch, dtype, flags)
            for name, made in CASES.items()
            for dtype in (torch.float32, torch.bfloat16)
            for flags in FLAGS
        ]
        for job, actual in zip(work, averaged_gradients(work, world_size), strict=True):
            name, _, dtype, _ = job
            row = list(CASES).index(name), dtype.itemsize, world_size
            rows.setdefault(row, [name, str(dtype).removeprefix("torch."), str(world_size)])
            rows[row].append(f"{difference(actual, reference(*job)):.1e}")
    for row in sorted(rows):
        print(f"| {' | '.join(rows[row])} |")


if __name__ == "__main__":
    main()
