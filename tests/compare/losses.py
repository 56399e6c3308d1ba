"""Losses, miners, reducers, distances, wrappers, regularizers and modules on random cases in float64."""

# ruff: noqa: B023, F811 - a case is computed where it is defined

import inspect
import itertools
import os
import random
import tempfile
import warnings
from zlib import crc32

import torch
from common import Cases, get, run
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers
from torch import nn

PAIR_LOSSES = ("unified", "vlc", "triplet_hn", "triplet_sh", "goal")
MINERS = {
    "MultiSimilarity": lambda: miners.MultiSimilarityMiner(epsilon=0.5),
    "TripletMargin": lambda: miners.TripletMarginMiner(margin=0.3),
    "SemihardTriplet": lambda: miners.TripletMarginMiner(margin=0.5, type_of_triplets="semihard"),
    "BatchHard": miners.BatchHardMiner,
    "BatchEasyHard": miners.BatchEasyHardMiner,
    "PairMargin": miners.PairMarginMiner,
    "Angular": miners.AngularMiner,
    "DistanceWeighted": miners.DistanceWeightedMiner,
    "UniformHistogram": lambda: miners.UniformHistogramMiner(distance=distances.SNRDistance()),
    "HardestNegative": lambda: get("miners").HardestNegativeMiner(),
    "HardestNegatives3": lambda: get("miners").HardestNegativeMiner(3),
}
REDUCERS = {
    "default": lambda: None,
    "sum": reducers.SumReducer,
    "avg_non_zero": reducers.AvgNonZeroReducer,
    "threshold": lambda: reducers.ThresholdReducer(low=0.1, high=3),
    "per_anchor": reducers.PerAnchorReducer,
    "divisor": reducers.DivisorReducer,
    "class_weighted": lambda: reducers.ClassWeightedReducer(weights=torch.linspace(0.5, 2, 20).double()),
    "nothing": reducers.DoNothingReducer,
}
DISTANCES = {
    "default": lambda: None,
    "dot": distances.DotProductSimilarity,
    "raw_dot": lambda: distances.DotProductSimilarity(normalize_embeddings=False),
    "lp": distances.LpDistance,
    "l1": lambda: distances.LpDistance(p=1),
    "cosine^2": lambda: distances.CosineSimilarity(power=2),
    "chamfer": lambda: get("distances").ChamferSimilarity(set_size=2),
}
REGULARIZERS = {
    "none": lambda: None,
    "lp": regularizers.LpRegularizer,
    "mmd": lambda: get("regularizers").MMDRegularizer(),
    "diversity": lambda: get("regularizers").DiversityRegularizer(set_size=2),
    "uniformity": lambda: get("regularizers").UniformityRegularizer(),
}
# Anchors, candidates, classes; the data are random around class centers.
SIZES = {
    "small": (5, 7, 3),
    "one": (1, 1, 1),
    "captions": (9, 9, 4),
    "unmatched": (13, 12, 8),
    "one class": (6, 4, 1),
    "other": (12, 3, 4),
}
SET_DISTANCES = ("SmoothChamferSimilarity", "ChamferSimilarity", "MILSimilarity", "MatchProbability")
UPSTREAM = 0.7  # a gradient other than 1 from what follows the loss


def options_of(name: str) -> list[dict]:
    """Return options of a loss: each one with several values, and some together."""
    if name == "unified":
        pair = ([0.5, -0.7], [0.03, 0.9])
        found = [{"margin": 0.0}, {"margin": 0.5}, {"scale": 1.0}, {"scale": 7.0}, {"scale": 60.0, "margin": 0.1}]
        found += [{"weights": [0.5, 0.3]}, {"weights": [1.0]}, {"weights": pair}, {"weights": pair, "scale": 9.0}]
        found += [{"relative": [0, 1, 0.5]}, {"relative": [0.1, 1.0, 0.0, 0.2]}]
        return [{}, *found, {"weights": pair, "relative": [0, 1, 0.5], "scale": 9.0}]
    if name == "vlc":
        return [{}, {"scale": 1.0}, {"scale": 5.0}, {"scale": 14.3}, {"scale": 100.0}]
    if name == "triplet_sh":
        return [{}, {"margin": 0.0}, {"margin": 0.05}, {"margin": 0.4}, {"margin": 1.0}]
    if name == "triplet_hn":
        return [*options_of("triplet_sh"), {"warmup_steps": 1}, {"warmup_steps": 2, "margin": 0.3}]
    kinds = itertools.product(("con", "nca", "cir"), ("con", "lin", "sig", "sig_ms", "lin_ms"))
    found = [{"triplet_weight": triplet, "pair_weight": pair} for triplet, pair in kinds]
    found += [options | {"warmup_steps": 1} for options in found]
    found += [{"triplet_weight": "con", "pair_weight": "lin", "margin": margin} for margin in (0.0, 0.5, 2.5)]
    found += [{"triplet_weight": "cir", "pair_weight": "lin", "offset": offset} for offset in (0.0, 1.0)]
    found += [{"triplet_weight": kind, "tau": tau} for kind in ("nca", "cir") for tau in (1.0, 30.0)]
    for pair_weight in ("sig", "sig_ms", "lin_ms"):
        changes = {"alpha": 0.0, "beta": 40.0, "lam": 0.2, "eps": 0.4, "tau": 3.0}
        found += [{"pair_weight": pair_weight, name: value} for name, value in changes.items()]
    return [{}, *found, {"pair_weight": "sig_ms", "alpha": 5.0, "beta": 2.0, "lam": -0.1, "eps": 0.0}]


def backend(name: str | None) -> dict:
    """Return the option by which similarities are one matrix, "dense", or computed in blocks, "tiled"."""
    if name is None:
        return {}
    options = inspect.signature(get("distances").SmoothChamferSimilarity.__init__).parameters
    return {"backend": name} if "backend" in options else {"tiled": name == "tiled"}


def use_small_blocks() -> None:
    """Compute in several blocks even for small batches."""
    for name, value in {"CPU_BLOCK": 64, "LEAST_ROWS": 4}.items():
        if hasattr(get("blocks"), name):
            setattr(get("blocks"), name, value)
    if hasattr(get("blocks"), "block_rows"):
        get("blocks").block_rows = lambda *_, **__: 4


def generator(case: str) -> torch.Generator:
    return torch.Generator().manual_seed(crc32(case.encode()))


def data(case: str, size: str = "captions", two_sets: bool = True, width: int = 6) -> dict:
    """Return the arguments of a loss's call."""
    anchors, candidates, classes = SIZES[size]
    g = generator(case)
    centers = torch.randn(classes, width, generator=g, dtype=torch.float64)
    call = {}
    for prefix, count in (("", anchors), ("ref_", candidates))[: 1 + two_sets]:
        labels = torch.randint(classes, (count,), generator=g)
        noise = torch.randn(count, width, generator=g, dtype=torch.float64)
        name = "ref_emb" if prefix else "embeddings"
        call |= {name: (centers[labels] + noise).requires_grad_(), f"{prefix}labels": labels}
    return call


def sets(case: str, items: int, elements: int, width: int = 5, padding: bool = True) -> torch.Tensor:
    g = generator(case)
    x = torch.randn(items, elements, width, generator=g, dtype=torch.float64)
    if padding and elements > 1:
        x[torch.rand(items, elements, generator=g) < 0.2] = 0
    return x.requires_grad_()


def labels_of(case: str, items: int, classes: int = 4) -> torch.Tensor:
    return torch.randint(classes, (items,), generator=generator(case))


def value_and_gradients(output, **leaves: torch.Tensor) -> dict:
    """Return the values of a loss, or of the dict or tuple of its parts, and their gradients."""
    if isinstance(output, dict):
        output = {f"{name}_{key}": value for name, part in output.items() for key, value in part.items()}
        parts = {name: value for name, value in output.items() if name.endswith(("losses", "reduction_type"))}
        for name in [name for name in output if name.endswith("indices") and output[name] is not None]:
            indices = output[name]
            parts[name] = indices if isinstance(indices, torch.Tensor) else torch.cat(list(indices))
    else:
        parts = {"value": output} if isinstance(output, torch.Tensor) else dict(output._asdict())
    total, found = 0, {}
    for name, part in parts.items():
        found[name] = part
        if isinstance(part, torch.Tensor) and part.requires_grad:
            # Different weights, so that rows cannot be exchanged.
            weights = torch.linspace(0.5, 1.5, part.numel(), dtype=part.dtype).view_as(part) if part.ndim else 1
            total = total + UPSTREAM * (weights * part).sum()
    leaves = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    if isinstance(total, torch.Tensor):
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        zeros = map(torch.zeros_like, leaves.values())
        found |= {
            f"grad_{name}": zero if grad is None else grad
            for name, grad, zero in zip(leaves, grads, zeros, strict=True)
        }
    return found


def parameters(module: nn.Module) -> dict:
    return {name.replace(".", "_"): value for name, value in module.named_parameters()}


def call_loss(loss, call: dict, miner=None, steps: int = 1) -> dict:
    """Call a loss, after a miner and, for a warm-up, ``steps`` times."""
    loss.double()
    if miner is not None:
        given = {name: value for name, value in call.items() if name in ("embeddings", "labels", "ref_emb")}
        given |= {"ref_labels": call["ref_labels"]} if "ref_labels" in call else {}
        call = call | {"indices_tuple": miner(**given)}
    for _ in range(steps - 1):
        loss(**call)
    return value_and_gradients(loss(**call), **call, **parameters(loss))


def describe(options: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items()).replace("/", ":") or "defaults"


def pair_losses(found: Cases) -> None:
    """All losses of positive pairs, with labels and with miners, in one set and in two."""
    for name in PAIR_LOSSES:
        modes = ("labels", "labels 2", *(["tiled"] if name != "triplet_sh" else []), *MINERS)
        for options, two_sets, mode in itertools.product(options_of(name), (False, True), modes):
            kind = "miner" if mode in MINERS else mode.split()[0]
            case = f"{name} {kind}/{describe(options)} {mode} {1 + two_sets} sets"
            if kind == "tiled" and options.get("pair_weight", "").endswith("_ms"):
                case = f"gone {case}"
            choose = random.Random(crc32(case.encode()))
            size = choose.choice(list(SIZES))
            reducer, distance, regularizer = (
                choose.choice(list(table)) if choose.random() < share else next(iter(table))
                for table, share in ((REDUCERS, 0.8), (DISTANCES, 0.4), (REGULARIZERS, 0.15))
            )
            symmetric, steps = choose.random() < 0.7, choose.choice([1, 2, 3])
            scale = choose.choice([3.0, 20.0]) if name in ("unified", "vlc") and choose.random() < 0.4 else None
            if kind == "tiled":
                distance = choose.choice(["default", "dot", "raw_dot"])
            if options.keys() & {"weights", "relative"} and distance == "raw_dot":
                distance = "dot"  # powers of large numbers
            if name == "goal" and distance in ("lp", "l1") and options:
                distance = "cosine^2"  # most weights need similarities

            @found.case(f"{case} {size} {reducer} {distance} {regularizer} symmetric={symmetric} scale={scale}")
            def compute():
                torch.manual_seed(crc32(case.encode()))
                call = data(case, size, two_sets)
                if scale:
                    call["scale"] = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
                loss = get("create_loss")(
                    name,
                    **options,
                    **(backend("tiled") if kind == "tiled" else {}),
                    symmetric=symmetric,
                    reducer=REDUCERS[reducer](),
                    distance=DISTANCES[distance](),
                    embedding_regularizer=REGULARIZERS[regularizer](),
                    embedding_reg_weight=0.3,
                )
                miner = MINERS[mode]() if kind == "miner" else None
                return call_loss(loss, call, miner, steps if options.get("warmup_steps") else 1)


def special_batches(found: Cases) -> None:
    """Larger batches, batches with nothing in them, equal and non-finite embeddings, and options of the call."""
    x, y = (sets(name, 6, 4).flatten(1).detach()[:, :4] for name in ("special x", "special y"))
    labels = torch.tensor([0, 0, 1, 2, 2, 3])
    with_nan, with_inf, with_zero = x.clone(), y.clone(), x.clone()
    with_nan[2, 1], with_inf[3, 0], with_zero[4] = torch.nan, torch.inf, 0
    batches = {
        "equal": (torch.ones(6, 4).double(), labels, torch.ones(6, 4).double(), labels),
        "NaN": (with_nan, labels, y, labels),
        "infinite": (x, labels, with_inf, labels),
        "zero vector": (with_zero, labels, y, labels),
        "empty": (x[:0], labels[:0], y[:0], labels[:0]),
        "no candidates": (x, labels, y[:0], labels[:0]),
        "no pairs": (x, labels, y, labels + 10),
        "no negatives": (x, labels * 0, y, labels * 0),
        "wrong width": (x, labels, y[:, :3], labels),
        "wrong labels": (x, labels[:5], y, labels),
        "aligned": (x, torch.arange(6), y, torch.arange(6)),
        "the same set": (x, labels, x, labels),
        "not contiguous": (x.T.contiguous().T, labels, y.repeat(1, 2)[:, ::2], labels),
    }
    wrong = {"margin": -1.0, "scale": 0.0, "warmup_steps": -1, "tau": 0.0, "pair_weight": "none", "unknown": 1}
    for name in PAIR_LOSSES:
        blocks = (None,) if name == "triplet_sh" else (None, "dense", "tiled")
        for block, normalize, two_sets in itertools.product(blocks, (True, False), (True, False)):

            @found.case(f"{name} large/{block} normalize={normalize} {1 + two_sets} sets")
            def compute():
                a, b = sets("a", 70, 1, 8).squeeze(1), sets("b", 90, 1, 8).squeeze(1)
                call = {"embeddings": a, "labels": labels_of("a", 70, 20)}
                call |= {"ref_emb": b, "ref_labels": labels_of("b", 90, 20)} if two_sets else {}
                distance = distances.DotProductSimilarity(normalize_embeddings=normalize)
                return call_loss(get("create_loss")(name, distance=distance, **backend(block)), call)

        reducing = ({}, {"reducer": reducers.AvgNonZeroReducer()})
        for (batch, values), block, options in itertools.product(batches.items(), blocks, reducing):

            @found.case(f"{name} special/{batch} {block} {' '.join(options)}")
            def compute():
                a, l1, b, l2 = (v.clone().requires_grad_() if v.is_floating_point() else v for v in values)
                call = {"embeddings": a, "labels": l1, "ref_emb": a if batch == "the same set" else b, "ref_labels": l2}
                return call_loss(get("create_loss")(name, **options, **backend(block)), call)

        for options in ({"symmetric": False}, {"symmetric": True}, {"scale": 4.0}, {"scale": -1.0}):

            @found.case(f"{name} special/call {describe(options)}")
            def compute():
                return call_loss(get("create_loss")(name), data(describe(options)) | options)

        for option, value in wrong.items():

            @found.case(f"{name} wrong/{option}")
            def compute():
                return {"value": type(get("create_loss")(name, **{option: value})).__name__}


def adaptive_margins(found: Cases) -> None:
    """Margins as tensors, of which the gradient is taken too, and the soft margin."""
    shapes = ((), (9,), (9, 9), (4,))
    for shape, block, symmetric, number in itertools.product(shapes, (None, "dense", "tiled"), (True, False), range(6)):
        case = f"unified margins/{shape} {block} symmetric={symmetric} {number}"

        @found.case(case)
        def compute():
            loss = get("create_loss")("unified", symmetric=symmetric, **backend(block))
            loss.margin = torch.rand(shape, generator=generator(case), dtype=torch.float64).requires_grad_()
            call = data(case)
            return value_and_gradients(loss(**call), **call, margin=loss.margin)

    for base, margin in itertools.product((2.0, 10.0, 1.0), (0.2, 0.5)):

        @found.case(f"soft margin/{base} {margin}")
        def compute():
            confidence = torch.linspace(0, 1, 11, dtype=torch.float64).requires_grad_()
            return value_and_gradients(get("soft_margin")(confidence, margin, base), confidence=confidence)


def set_losses(found: Cases) -> None:
    """The smooth-Chamfer loss: bases, sets and packed sets, slots, weights, miners and reducers."""
    changes = ({}, {"alpha": 4.0}, {"mmd_weight": 0.0}, {"diversity_weight": 0.5, "mmd_weight": 0.3})
    changes = {describe(change): change for change in (*changes, {"symmetric": False}, {"reducer": "SumReducer"})}
    changes |= {"tiled": backend("tiled"), "warmup": {"warmup_steps": 1}}
    sizes = ((1, 1), (3, 3), (2, 4))
    for base, (k, ref_k), two_sets, slots, change in itertools.product(
        PAIR_LOSSES, sizes, (True, False), (True, False), changes
    ):
        case = f"smooth_chamfer {base}/{k} {ref_k} {1 + two_sets} sets slots={slots} {change}"
        if change == "warmup" and base not in ("triplet_hn", "goal"):
            continue

        @found.case(case)
        def compute():
            call = {"embeddings": sets(case, 9, k), "labels": labels_of(case, 9)}
            call |= {"slots": sets(f"{case} slots", 9, 3, padding=False)} if slots else {}
            if two_sets:
                call |= {"ref_emb": sets(f"{case} ref", 11, ref_k), "ref_labels": labels_of(f"{case} ref", 11)}
                call |= {"ref_slots": sets(f"{case} ref_slots", 11, 3, padding=False)} if slots else {}
            given = {"base": base} | changes[change]
            if "tiled" in given:  # an option of the similarity
                given["distance"] = get("distances").SmoothChamferSimilarity(tiled=given.pop("tiled"))
            return call_loss(get("create_loss")("smooth_chamfer", **given), call)

    mining = (None, "MultiSimilarity", "TripletMargin", "HardestNegative")
    for base, miner, reducer, k in itertools.product(PAIR_LOSSES, mining, REDUCERS, (1, 2)):
        case = f"smooth_chamfer packed/{base} {miner} {reducer} {k}"

        @found.case(case)
        def compute():
            mine = None if miner is None else MINERS[miner]()
            if mine is not None:
                mine.distance = get("distances").SmoothChamferSimilarity(set_size=k)
            loss = get("create_loss")("smooth_chamfer", base=base, set_size=k, reducer=REDUCERS[reducer]())
            return call_loss(loss, data(case, width=5 * k), mine)

    for distance, base in itertools.product(SET_DISTANCES, (*PAIR_LOSSES, "MultiSimilarityLoss", "NTXentLoss")):
        case = f"smooth_chamfer other/{distance} {base}"

        @found.case(case)
        def compute():
            options = {"base": base, "distance": getattr(get("distances"), distance)(set_size=2)}
            if base not in PAIR_LOSSES:
                options = {"base": getattr(losses, base)(distance=options["distance"])}
            return call_loss(get("create_loss")("smooth_chamfer", **options), data(case, width=10))


def set_distances(found: Cases) -> None:
    """Similarities of sets: all against all, in blocks, item by item, packed; and in losses of the other library."""
    sizes = ((1, 1), (3, 3), (2, 4), (4, 1))
    options = {"SmoothChamferSimilarity": {"alpha": 3.0}, "MatchProbability": {"scale": 3.0, "shift": -0.5}}
    for name, normalize, (k, ref_k), padding, number, mode in itertools.product(
        SET_DISTANCES, (True, False), sizes, (True, False), range(2), ("all", "paired", "packed", "dense", "tiled")
    ):
        if mode in ("dense", "tiled") and name != "SmoothChamferSimilarity":
            continue
        case = f"{name}/normalize={normalize} {k} {ref_k} padding={padding} {number}"

        @found.case(f"{case} {mode}")
        def compute():
            x, y = sets(f"{case} x", 9, k, padding=padding), sets(f"{case} y", 11, ref_k, padding=padding)
            chosen = options.get(name, {}) if number else {}
            chosen = chosen | ({"set_size": k} if mode == "packed" else {})
            chosen = chosen | (backend(mode) if mode in ("dense", "tiled") else {})
            distance = getattr(get("distances"), name)(normalize_embeddings=normalize, **chosen).double()
            if mode == "packed":
                output = distance(x.flatten(1), y.flatten(1))
            else:
                output = distance.pairwise_distance(x, y[:9]) if mode == "paired" else distance(x, y)
            return value_and_gradients(output, x=x, y=y, **parameters(distance))

    host = ("TripletMarginLoss", "ContrastiveLoss", "MultiSimilarityLoss", "NTXentLoss", "SupConLoss")
    for name, loss in itertools.product(SET_DISTANCES, host):
        case = f"{name} in losses/{loss}"

        @found.case(case)
        def compute():
            margins = {"pos_margin": 1, "neg_margin": 0} if loss == "ContrastiveLoss" else {}
            distance = getattr(get("distances"), name)(set_size=2)
            return call_loss(getattr(losses, loss)(distance=distance, **margins), data(case, width=10))


def components(found: Cases) -> None:
    """Components by name, of this package and of the other library, and our miner."""
    found.add("components/losses", value=" ".join(get("list_losses")()))
    named = {
        "distance": ("CosineSimilarity", "LpDistance", "smooth_chamfer", "chamfer", "mil", "match_probability"),
        "loss": ("TripletMarginLoss", "NTXentLoss", "MultiSimilarityLoss", "CircleLoss", "FastAPLoss", "LiftedLoss"),
        "miner": ("HardestNegativeMiner", "MultiSimilarityMiner", "BatchHardMiner"),
        "reducer": ("MeanReducer", "AvgNonZeroReducer", "PerAnchorReducer"),
        "regularizer": ("LpRegularizer", "DiversityRegularizer", "ZeroMeanRegularizer"),
    }
    for kind, name in [(kind, name) for kind, names in named.items() for name in (*names, "Unknown")]:

        @found.case(f"components/{kind} {name}")
        def compute():
            component = get("create_component")(kind, name).double()
            call = data(name, "small")
            if kind == "loss":
                return call_loss(component, call)
            if kind == "reducer":
                return call_loss(get("create_loss")("triplet_hn", reducer=name), call)
            if kind == "miner":
                return {"value": torch.cat(component(*call.values()))}
            return value_and_gradients(component(call["embeddings"]), x=call["embeddings"])

    for k, two_sets, size, number in itertools.product((1, 2, 20), (True, False), SIZES, range(3)):
        case = f"HardestNegativeMiner/k={k} {1 + two_sets} sets {size} {number}"

        @found.case(case)
        def compute():
            distance = (None, distances.LpDistance(), get("distances").MILSimilarity(set_size=3))[number]
            miner = get("miners").HardestNegativeMiner(k, **({"distance": distance} if distance else {}))
            return {"value": torch.stack(miner(*data(case, size, two_sets).values()))}


def regularization(found: Cases) -> None:
    """Regularizers of embeddings and sets, and the circular variance."""
    options = {"DiversityRegularizer": "scale", "MMDRegularizer": "gamma", "UniformityRegularizer": "t"}
    for name, k, padding, value, squared, packed in itertools.product(
        (*options, "circular_variance"), (1, 2, 4), (True, False), (0.5, 2.0, 3.5), (False, True), (False, True)
    ):
        if (squared and name != "MMDRegularizer") or (name == "circular_variance" and (packed or value > 1)):
            continue
        case = f"{k} padding={padding} {value}"

        @found.case(f"{name}/{case} squared={squared} packed={packed}")
        def compute():
            x, y = sets(f"{case} x", 9, k, padding=padding), sets(f"{case} y", 11, k, padding=padding)
            if name == "circular_variance":  # padding is zero vectors, of which an older version takes a mask
                function = get(name)
                mask = {"mask": (x != 0).any(2)} if "mask" in inspect.signature(function).parameters else {}
                return value_and_gradients(function(x, **mask), x=x)
            chosen = {options[name]: value, "set_size": k if packed else 1} | ({"squared": True} if squared else {})
            sides = (x, y) if name == "MMDRegularizer" else (x,)
            sides = [side.flatten(1) for side in sides] if packed else sides
            return value_and_gradients(getattr(get("regularizers"), name)(**chosen)(*sides), x=x, y=y)


def wrapped_losses(found: Cases) -> None:
    """A queue of embeddings, two views without labels, sums of losses."""
    mining, extras = (None, "MultiSimilarity", "HardestNegative"), ("", "enqueue", "indices")
    for name, miner, extra in itertools.product((*PAIR_LOSSES, "smooth_chamfer", "NTXentLoss"), mining, extras):
        case = f"CrossBatchMemory/{name} {miner} {extra}"

        @found.case(case)
        def compute():
            options = {"mmd_weight": 0} if name == "smooth_chamfer" else {}
            loss = losses.NTXentLoss() if name == "NTXentLoss" else get("create_loss")(name, **options)
            mine = MINERS[miner]() if miner else None
            memory = get("wrappers").CrossBatchMemory(loss, 6, memory_size=20, miner=mine).double()
            results = {}
            for step in range(6):
                x, labels = data(f"{case} {step}", two_sets=False).values()
                options = {"enqueue_mask": torch.arange(9) % 2 == 0} if extra == "enqueue" else {}
                options |= {"indices_tuple": miners.MultiSimilarityMiner()(x, labels)} if extra == "indices" else {}
                output = value_and_gradients(memory(x, labels, **options), x=x)
                results |= {f"{quantity}_{step}": value for quantity, value in output.items()}
            return results

    both = (True, False)
    for name, symmetric, own, number in itertools.product((*PAIR_LOSSES, "NTXentLoss"), both, both, (0, 1)):
        case = f"SelfSupervisedLoss/{name} symmetric={symmetric} {own} {number}"

        @found.case(case)
        def compute():
            loss = losses.NTXentLoss() if name == "NTXentLoss" else get("create_loss")(name, symmetric=own)
            x, _, y, _ = data(case).values()
            return value_and_gradients(get("wrappers").SelfSupervisedLoss(loss, symmetric=symmetric)(x, y), x=x, y=y)

    for pair in itertools.combinations(PAIR_LOSSES, 2):

        @found.case(f"MultipleLosses/{' '.join(pair)}")
        def compute():
            summed = losses.MultipleLosses([get("create_loss")(name) for name in pair], weights=[1, 0.3])
            return call_loss(summed, data(str(pair), two_sets=False))


def building_blocks(found: Cases) -> None:
    """Set prediction, pooling and positions."""
    choices = {"slots": ("learned", "random"), "update": ("residual", "gru"), "attention": ("slots", "inputs")}
    choices |= {"global_feature": (True, False), "padding": (True, False)}
    for values in itertools.product(*choices.values()):
        options = dict(zip(choices, values, strict=True))
        is_plain = list(options.values())[:4] == ["learned", "residual", "slots", True]
        case = f"{'' if is_plain else 'gone '}SetPrediction/{describe(options)}"
        padding = options.pop("padding")

        @found.case(case)
        def compute():
            torch.manual_seed(crc32(case.encode()))
            has_choices = "update" in inspect.signature(get("modules").SetPrediction).parameters
            chosen = options if has_choices or not is_plain else {}
            module = get("modules").SetPrediction(6, local_dim=7, num_slots=3, num_iters=2, hidden_dim=10, **chosen)
            module = module.double().eval()
            local, pooled = sets(case, 4, 5, 7, padding=False), sets(case, 4, 1, 6).squeeze(1)
            call = {"padding_mask": torch.rand(4, 5, generator=generator(case)) < 0.3} if padding else {}
            call |= {"positions": get("modules").sinusoidal_positions(5, 7)} if padding else {}
            output = module(local, pooled if options["global_feature"] else None, **call)
            head = get("modules").SetHead(module)(get("TowerFeatures")(local[:, :4], pooled, None, (2, 2), False))
            results = value_and_gradients(output, local=local, pooled=pooled, **parameters(module))
            return results | {"head": head["features"]}

    for name, padding, number in itertools.product(("avg", "max", "gpo"), (True, False), range(4)):
        case = f"pooling/{name} padding={padding} {number}"

        @found.case(case)
        def compute():
            torch.manual_seed(crc32(case.encode()))
            pool = get("modules").POOLINGS[name]
            pool = pool().double() if isinstance(pool, type) else pool
            x = sets(case, 5, 6, padding=False)
            mask = torch.rand(5, 6, generator=generator(case)) < 0.4 if padding else None
            return value_and_gradients(pool(x, mask), x=x, **(parameters(pool) if name == "gpo" else {}))

    for length, width in ((1, 4), (7, 6), (5, 9)):

        @found.case(f"positions/{length} {width}")
        def compute():
            modules = get("modules")
            return {
                "value": modules.sinusoidal_positions(length, width),
                "value_2d": modules.sinusoidal_positions_2d(length, 3, width),
            }


def gone(found: Cases) -> None:
    """Features that only the older version has, and functions of single similarities, which stay."""
    functions = {
        "gone functions/margin": ("margin", lambda s, p, n: 0.1 + 0.1 * s.detach()),
        "unified functions/weights": ("weights", lambda s: 1 + s.square()),
        "unified functions/relative": ("relative", lambda s: s.tanh()),
        "unified functions/polynomial": ("relative", get("Polynomial")([0, 1, 0.5])),
    }
    rows, matrix = (torch.rand(shape, generator=generator("weights")).double() for shape in ((9,), (9, 9)))
    functions |= {"gone weights/rows": ("weights", rows), "gone weights/matrix": ("weights", matrix)}
    for case, (option, value) in functions.items():

        @found.case(case)
        def compute():
            return call_loss(get("create_loss")("unified", **{option: value}), data(case))

    for name, (power, p) in itertools.product(SET_DISTANCES, ((2, 2), (1, 1), (2, 1))):
        case = f"gone powers/{name} power={power} p={p}"

        @found.case(case)
        def compute():
            x, y = sets(case, 4, 2), sets(f"{case} y", 5, 2)
            return value_and_gradients(getattr(get("distances"), name)(power=power, p=p)(x, y), x=x, y=y)

    for name in PAIR_LOSSES:

        @found.case(f"gone second derivatives/{name}")
        def compute():
            call = data(name)
            x = call["embeddings"]
            (gradient,) = torch.autograd.grad(get("create_loss")(name)(**call), x, create_graph=True)
            return value_and_gradients(gradient.square().sum(), x=x)


def joined_batches(rank: int, folder: str, file: str) -> None:
    """Compute losses of a batch in two processes, and gradients averaged as DistributedDataParallel does."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/join", rank=rank, world_size=2)
    results = {}
    for name, miner in itertools.product(PAIR_LOSSES, (None, "MultiSimilarity", "HardestNegative")):
        x, labels, y, ref_labels = data(f"distributed {name} {miner}").values()
        part = slice(4 * rank, 4 * rank + 4)
        loss = get("DistributedLoss")(get("create_loss")(name))
        options = {}
        if miner is not None and "miner" in inspect.signature(loss.forward).parameters:
            options["miner"] = MINERS[miner]()
        elif miner is not None:
            mine = get("wrappers").DistributedMinerWrapper(MINERS[miner]())
            options["indices_tuple"] = mine(x[part], labels[part], y[part], ref_labels[part])
        value = loss(x[part], labels[part], ref_emb=y[part], ref_labels=ref_labels[part], **options)
        for quantity, tensor in value_and_gradients(value, x=x, y=y).items():
            mean = tensor.detach().clone()
            torch.distributed.all_reduce(mean)
            # The host's wrapper multiplies the loss of the whole batch by the number of processes.
            copies = 4 if quantity == "value" and "miner" not in inspect.signature(loss.forward).parameters else 2
            results[f"distributed {name}/{miner}/{quantity}"] = mean / copies
    if rank == 0:
        torch.save(results, file)
    torch.distributed.destroy_process_group()


def distributed(found: Cases) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "results.pt")
        torch.multiprocessing.spawn(joined_batches, args=(folder, file), nprocs=2)
        for key, tensor in torch.load(file, weights_only=True).items():
            case, quantity = key.rsplit("/", 1)
            found.add(case, **{quantity: tensor})


def cases(found: Cases, arguments) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    use_small_blocks()
    for part in (
        pair_losses,
        special_batches,
        adaptive_margins,
        set_losses,
        set_distances,
        components,
        regularization,
        wrapped_losses,
        building_blocks,
        gone,
        distributed,
    ):
        part(found)


if __name__ == "__main__":
    run(cases)
