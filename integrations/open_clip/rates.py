"""Learning rates of parts of a model, in the optimizer that open_clip makes.

A parameter has the rate ``--lr`` times its scale. With the rate r of its part of the model, such as ``--image-lr``, and
the decay d of its tower, the scale is (r / lr) d^n, where n layers of the tower are above its own. The projection is
the top layer, then come the blocks, and the embeddings are the lowest one.

The layers are those of ``layer_groups()`` of open_clip 4.x, which itself multiplies the rates by d^n. So this file does
it for 3.x only.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

from timm.models import group_parameters
from torch import nn
from torch.optim import Optimizer

from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.flags import flag
from vl_plugins.integrations.open_clip.host import HAS_TASKS

__all__ = ["OWN_RATES", "RATES", "layer_groups", "parameter_rates", "split_groups"]

RATES = ("head_lr", "image_lr", "text_lr", "image_layer_decay", "text_layer_decay")
"""The options for rates."""

OWN_RATES = RATES[:3] if HAS_TASKS else RATES
"""Those that open_clip does not have itself."""

HEADS = ("image_head.", "text_head.", "similarity.", "trained_loss.")
NUMBERS = ("logit_scale", "logit_bias")
# Names of embeddings and of the list of blocks in towers of Hugging Face, by type; the table of 3.x lacks some.
HUGGING_FACE = {
    "bert": ("embeddings", "layer"),
    "roberta": ("embeddings", "layer"),
    "xlm-roberta": ("embeddings", "layer"),
    "mt5": ("embed_tokens", "block"),
    "m2m_100": ("embed_tokens", "layers"),
}


class Rate(NamedTuple):
    """What parameters with one rate share.

    Attributes:
        owner: ``"image"``, ``"text"`` or ``"head"``; "" for the rest of the model.
        depth: layers above theirs.
        scale: their rate divided by ``--lr``.
    """

    owner: str
    depth: int
    scale: float


REST = Rate("", 0, 1.0)


def split_groups(optimizer: Optimizer, model: nn.Module, args: Namespace) -> None:
    """Split the groups of a new optimizer, so that each has parameters of one rate.

    The rest of the model comes first, because open_clip logs the rate of the first group.

    Args:
        optimizer: its groups are changed; an ``lr_scale`` that a group has is multiplied.
        model: whose parameters it has.
        args: the launcher's options.

    Raises:
        UserError: a flag is for parameters of which none is trained.
    """
    rate_of_parameter = parameter_rates(model, args)
    groups: list[dict[str, Any]] = []
    groups_of_rest: list[dict[str, Any]] = []
    owners = set()
    for group in optimizer.param_groups:
        parameters_of_rate: dict[Rate, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            rate = rate_of_parameter.get(parameter, REST)
            parameters_of_rate.setdefault(rate, []).append(parameter)
        for rate, parameters in parameters_of_rate.items():
            owners.add(rate.owner)
            scale = group.get("lr_scale", 1.0) * rate.scale
            split = {**group, "params": parameters, "lr": group["lr"] * rate.scale, "lr_scale": scale}
            (groups_of_rest if rate == REST else groups).append(split)
    for option in OWN_RATES:
        owner = option.partition("_")[0]
        if getattr(args, option) is not None and owner not in owners:
            raise UserError(f"{flag(option)} has no effect: no parameter of the {owner} is trained: remove it")
    optimizer.param_groups[:] = groups_of_rest + groups


def parameter_rates(model: nn.Module, args: Namespace) -> dict[nn.Parameter, Rate]:
    """Return the rates of parameters that have another one than the rest of the model."""
    rates: dict[nn.Parameter, Rate] = {}
    for owner in ("image", "text"):
        rate = getattr(args, f"{owner}_lr")
        decay = None if HAS_TASKS else getattr(args, f"{owner}_layer_decay")
        if rate is None and decay is None:
            continue
        scale = 1.0 if rate is None else rate / args.lr
        depths = {} if decay is None else _depths(layer_groups(_tower(model, owner)))
        for parameter in _parameters(model, owner):
            depth = depths.get(parameter, 0)
            rates[parameter] = Rate(owner, depth, scale if decay is None else scale * decay**depth)
    if args.head_lr is not None:
        for parameter in _parameters(model, "head"):
            rates[parameter] = Rate("head", 0, args.head_lr / args.lr)
    return rates


def _tower(model: nn.Module, owner: str) -> Any:
    """Return a tower; CLIP's own text tower is the model itself."""
    return model.visual if owner == "image" else getattr(model, "text", model)


def _parameters(model: nn.Module, owner: str) -> Iterator[nn.Parameter]:
    """Yield the parameters of a tower, or of the heads and the loss."""
    has_text_module = hasattr(model, "text")
    for name, parameter in model.named_parameters():
        if name.startswith(HEADS):
            owner_of_name = "head"
        elif name.startswith("visual."):
            owner_of_name = "image"
        elif name.startswith("text.") or not (has_text_module or name.startswith(NUMBERS)):
            owner_of_name = "text"
        else:
            owner_of_name = ""
        if owner_of_name == owner:
            yield parameter


def _depths(layers: list[list[nn.Parameter]]) -> dict[nn.Parameter, int]:
    """Return how many layers are above each parameter; 4.x counts those of no layer as the top, so they have 0."""
    depths = {}
    for depth, layer in enumerate(reversed(layers)):
        for parameter in layer:
            depths[parameter] = depth
    return depths


def layer_groups(tower: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of each layer of a tower of open_clip 3.x, from bottom to top.

    They are those of ``layer_groups()`` of 4.x. A pooler of a text tower of Hugging Face belongs to the projection,
    which is the default there.
    """
    if hasattr(tower, "trunk"):
        layers = [*_timm_layers(tower.trunk), [tower.head]]
    elif hasattr(tower, "attnpool"):  # a ResNet
        stem = [tower.conv1, tower.bn1, tower.conv2, tower.bn2, tower.conv3, tower.bn3]
        layers = [stem, [tower.layer1], [tower.layer2], [tower.layer3], [tower.layer4], [tower.attnpool]]
    elif hasattr(tower, "config"):
        layers = _hugging_face_layers(tower)
    elif hasattr(tower, "conv1"):  # a vision transformer
        embeddings = [tower.conv1, tower.class_embedding, tower.positional_embedding, tower.ln_pre]
        layers = [embeddings, *_blocks(tower.transformer, tower.ln_post), [tower.proj]]
    else:
        embeddings = [tower.token_embedding, tower.positional_embedding, getattr(tower, "cls_emb", None)]
        layers = [embeddings, *_blocks(tower.transformer, tower.ln_final), [tower.text_projection]]
    parameters_of_layers = []
    for layer in layers:
        parameters: list[nn.Parameter] = []
        for member in layer:
            if isinstance(member, nn.Parameter):
                parameters.append(member)
            elif member is not None:
                parameters += member.parameters()
        if parameters:  # a projection may be the identity
            parameters_of_layers.append(parameters)
    return parameters_of_layers


def _blocks(transformer: Any, norm: nn.Module) -> list[list[Any]]:
    """Return the blocks of a transformer; the normalization after the last one belongs to it."""
    blocks = [[block] for block in transformer.resblocks]
    blocks[-1].append(norm)
    return blocks


def _timm_layers(trunk: Any) -> list[list[Any]]:
    """Return the parameters of each layer as timm numbers them."""
    names_of_layer = group_parameters(trunk, trunk.group_matcher())
    layers = []
    for layer in sorted(names_of_layer):
        layers.append([trunk.get_parameter(name) for name in names_of_layer[layer]])
    return layers


def _hugging_face_layers(tower: Any) -> list[list[Any]]:
    model_type = tower.config.model_type
    if model_type not in HUGGING_FACE:
        raise UserError(f"--text-layer-decay knows the layers of {', '.join(HUGGING_FACE)}, not of {model_type}")
    name_of_embeddings, name_of_blocks = HUGGING_FACE[model_type]
    transformer = tower.transformer
    encoder = getattr(transformer, "encoder", transformer)
    blocks = [[block] for block in getattr(encoder, name_of_blocks)]
    top = [getattr(transformer, "pooler", None), tower.proj]
    return [[getattr(transformer, name_of_embeddings)], *blocks, top]
