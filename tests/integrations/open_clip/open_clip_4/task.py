"""``open_clip.task``: model and loss in one module, which prepares batches, wraps, and gives and takes its state."""

import math

import torch
from open_clip import create_loss
from open_clip.modified_resnet import Bottleneck
from open_clip.transformer import CustomResidualAttentionBlock, ResidualAttentionBlock
from open_clip_train import file_utils
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as distributed_state

__all__ = ["CLIPTask", "create_task", "load_checkpoint", "save_checkpoint"]

BLOCKS = (Bottleneck, CustomResidualAttentionBlock, ResidualAttentionBlock)


def unwrap_model(model):
    for wrapper in ("module", "_orig_mod"):
        model = getattr(model, wrapper, model)
    return model


class CLIPTask(nn.Module):
    """Calls the model by keyword and the loss by what the model gives; adds up the terms that end in ``_loss``."""

    data_keys = ("image", "text")

    def __init__(self, model, *, loss=None, device=None, dtype=None, verbose=True):
        super().__init__()
        self.trainable_module = model
        self.loss = loss
        self._fsdp_enabled = False
        self._compiled = {}

    def forward(self, *args, **kwargs):
        batch = args[0] if args and isinstance(args[0], dict) else dict(zip(self.data_keys, args, strict=False))
        batch = {**batch, **kwargs}
        name = "training_forward" if self.training else "eval_forward"
        return self._compiled.get(name, getattr(self, name))(batch)

    def training_forward(self, batch):
        output = self.trainable_module(image=batch["image"], text=batch["text"])
        losses = self.loss(**output, output_dict=True)
        losses["loss"] = total(losses)
        return losses, report(output)

    def eval_forward(self, batch):
        return self.get_trainable_module()(**{key: batch[key] for key in self.data_keys})

    def compute_accum_loss(self, inputs, inputs_no_accum, accum_batches):
        return self.loss(**inputs, **inputs_no_accum, output_dict=True), report(inputs_no_accum)

    def get_trainable_module(self, use_ema=True):
        return unwrap_model(self.trainable_module)

    def batch_size(self, batch):
        return len(batch["image"])

    def prepare_batch(self, batch, device, input_dtype=None):
        return {
            key: tensor.to(device, input_dtype if tensor.is_floating_point() else None) for key, tensor in batch.items()
        }

    def clamp_logit_scale(self):
        with torch.no_grad():
            unwrap_model(self.trainable_module).logit_scale.clamp_(0, math.log(100))

    def compile(self, *, target="task", **options):
        if target == "model":
            self.trainable_module = torch.compile(self.trainable_module, **options)
        else:
            for name in ("training_forward", "eval_forward"):
                self._compiled[name] = torch.compile(getattr(self, name), **options)

    def ddp_extra_kwargs(self):
        return {}

    def prepare_distributed(self, device_ids=None, **options):
        self.trainable_module = nn.parallel.DistributedDataParallel(
            self.trainable_module, device_ids=device_ids, **options
        )

    def prepare_fsdp(self, **options):
        """Shard the model; numbers become vectors of one element, which can be sharded."""
        model = self.trainable_module
        for name, parameter in list(model.named_parameters()):
            if parameter.ndim == 0:
                parent, _, attribute = name.rpartition(".")
                as_vector = nn.Parameter(parameter.detach().unsqueeze(0), requires_grad=parameter.requires_grad)
                setattr(model.get_submodule(parent), attribute, as_vector)
        for module in [module for module in model.modules() if isinstance(module, BLOCKS)]:
            fsdp.fully_shard(module, **options)
        fsdp.fully_shard(model, **options)
        for method in ("encode_image", "encode_text"):
            fsdp.register_fsdp_forward_method(model, method)
        self._fsdp_enabled = True

    def state_dict(self):
        model = unwrap_model(self.trainable_module)
        if not self._fsdp_enabled:
            return {"state_dict": model.state_dict()}
        options = distributed_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = distributed_state.get_model_state_dict(model, options=options)
        # An entry that is no tensor fails here.
        return {"state_dict": {name: value[0] if value.shape == (1,) else value for name, value in state.items()}}

    def load_state_dict(self, state_dict, strict=True):
        assert not self._fsdp_enabled
        unwrap_model(self.trainable_module).load_state_dict(state_dict["state_dict"], strict=strict)


def total(losses):
    return sum(value for name, value in losses.items() if name.endswith("_loss"))


def report(output):
    return {name: output[name].detach() for name in ("logit_scale", "logit_bias") if name in output}


def create_task(args, model, dist_model=None, naflex_data_config=None):
    args.horovod = False  # for the function of 3.x
    assert not args.distill
    assert dist_model is None
    assert naflex_data_config is None
    return CLIPTask(model, loss=create_loss(args))


def save_checkpoint(task, optimizer, epoch, scaler=None, name=None, global_step=None, samples_seen=None):
    """Return the dictionary to save."""
    model = unwrap_model(task.trainable_module)
    options = distributed_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    counters = {"global_step": global_step, "samples_seen": samples_seen}
    return {
        "epoch": epoch,
        "name": name,
        **task.state_dict(),
        "optimizer": distributed_state.get_optimizer_state_dict(model, optimizer, options=options)
        if task._fsdp_enabled
        else optimizer.state_dict(),
        **{name: counter for name, counter in counters.items() if counter is not None},
    }


def load_checkpoint(task, path, optimizer=None, scaler=None, is_distributed=False, metadata=None):
    """Load a file and return the epoch to go on with."""
    checkpoint = file_utils.pt_load(path, map_location="cpu")
    task.load_state_dict({"state_dict": checkpoint["state_dict"]})
    if optimizer is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
    if metadata is not None:
        metadata.update({name: checkpoint[name] for name in ("global_step", "samples_seen") if name in checkpoint})
    return checkpoint["epoch"]
