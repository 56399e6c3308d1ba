"""``open_clip_train.main``: what it imports by name and calls, in the order of 4.x."""

import logging
from pathlib import Path

import numpy as np
import open_clip_train.data
import torch
from open_clip import create_model_and_transforms, get_tokenizer
from open_clip_train.distributed import broadcast_object, init_distributed_device, is_master
from open_clip_train.logger import setup_logging
from open_clip_train.main import get_latest_checkpoint, random_seed
from open_clip_train.scheduler import cosine_lr

from tests.integrations.open_clip.open_clip_4.params import parse_args
from tests.integrations.open_clip.open_clip_4.task import create_task, load_checkpoint, save_checkpoint
from tests.integrations.open_clip.open_clip_4.train import (
    TrainState,
    evaluate,
    restore_train_state_counters,
    train_one_epoch,
)

__all__ = ["main"]

_logger = logging.getLogger("open_clip_train.main")


def get_data(args, preprocess_fns, epoch=0, tokenizer=None, naflex_data_config=None):
    """Give the batches of 3.x as mappings."""
    data = open_clip_train.data.get_data(args, preprocess_fns, epoch=epoch, tokenizer=tokenizer)
    for split in data.values():
        split.dataloader = AsMappings(split.dataloader)
    return data


class AsMappings:
    def __init__(self, loader):
        self.loader, self.num_batches, self.num_samples = loader, loader.num_batches, loader.num_samples

    def __iter__(self):
        return ({"image": images, "text": texts} for images, texts in self.loader)


def main(args):
    args = parse_args(args)
    device = init_distributed_device(args)
    resume_latest = args.resume == "latest"
    folder = Path(args.logs, args.name)
    args.checkpoint_path = str(folder / "checkpoints")
    args.log_path = None
    if is_master(args):
        Path(args.checkpoint_path).mkdir(parents=True, exist_ok=True)
        args.log_path = str(folder / "out.log")
        if Path(args.log_path).exists() and not resume_latest:
            return -1
    setup_logging(args.log_path, logging.INFO)
    args.wandb = args.tensorboard = False
    if resume_latest:
        args.resume = get_latest_checkpoint(args.checkpoint_path, remote=False) if is_master(args) else None
        if args.distributed:
            args.resume = broadcast_object(args, args.resume)

    args.distill = args.distill_model is not None and args.distill_pretrained is not None
    random_seed(args.seed, 0)
    of_siglip = {"init_logit_scale": np.log(10), "init_logit_bias": -10} if args.siglip else {}
    model, *preprocess = create_model_and_transforms(
        args.model,
        args.pretrained,
        precision=args.precision,
        device=device,
        force_image_size=args.force_image_size,
        aug_cfg=args.aug_cfg,
        output_dict=True,
        **of_siglip,
    )
    random_seed(args.seed, args.rank)
    if args.lock_image:
        model.lock_image_tower(args.lock_image_unlocked_groups, args.lock_image_freeze_bn_stats)
    if args.lock_text:
        model.lock_text_tower(args.lock_text_unlocked_layers, args.lock_text_freeze_layer_norm)
    if args.grad_checkpointing:
        model.set_grad_checkpointing(impl="composable" if args.fsdp else "inline")
    if is_master(args):
        lines = [f"{name}: {value}\n" for name, value in sorted(vars(args).items())]
        (folder / "params.txt").write_text("".join(lines))

    task = create_task(args, model=model, dist_model=None, naflex_data_config=None)
    args.fsdp = args.fsdp and args.distributed
    compile_options = {"backend": args.torchcompile_backend or "inductor", "mode": args.torchcompile_mode}
    if args.torchcompile and args.torchcompile_strategy == "model":
        task.compile(target="model", **compile_options)
    if args.fsdp:
        task.prepare_fsdp(reshard_after_forward=not args.fsdp_no_reshard_after_forward)
    elif args.distributed:
        task.prepare_distributed(device_ids=[device], **task.ddp_extra_kwargs())

    optimizer = None
    if args.train_data or args.dataset_type in ("synthetic", "synthetic-audio"):
        named = [(name, p) for name, p in task.trainable_module.named_parameters() if p.requires_grad]
        plain = [p for name, p in named if p.ndim < 2 or any(part in name for part in ("bn", "ln", "bias"))]
        rest = [p for _, p in named if not any(p is other for other in plain)]
        groups = [{"params": plain, "weight_decay": 0.0}, {"params": rest, "weight_decay": args.wd}]
        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps)

    start_epoch, metadata = 0, {}
    if args.resume is not None:
        start_epoch = load_checkpoint(
            task, args.resume, optimizer=optimizer, is_distributed=args.distributed, metadata=metadata
        )
    tokenizer = get_tokenizer(args.model, cache_dir=args.cache_dir, context_length=args.force_context_length)
    data = get_data(args, tuple(preprocess), epoch=start_epoch, tokenizer=tokenizer, naflex_data_config=None)
    scheduler = None
    if "train" in data:
        steps = data["train"].dataloader.num_batches // args.accum_freq * args.epochs
        scheduler = cosine_lr(optimizer, args.lr, args.warmup, steps)
    state = TrainState(task=task, optimizer=optimizer, scheduler=scheduler, epoch=start_epoch)
    restore_train_state_counters(state, metadata, data, args)
    args.save_logs = args.logs and args.logs.lower() != "none" and is_master(args)
    if args.torchcompile and args.torchcompile_strategy == "task":
        task.compile(target="task", **compile_options)

    if "train" not in data:
        evaluate(task, data, state.epoch, args, tb_writer=None, tokenizer=tokenizer)
        return None
    for epoch in range(start_epoch, args.epochs):
        state.epoch = epoch
        train_one_epoch(state, data, args, tb_writer=None)
        if "val" in data:
            evaluate(task, data, epoch + 1, args, tb_writer=None, tokenizer=tokenizer)
            if args.distributed:
                torch.distributed.barrier()
        if task._fsdp_enabled or args.save_logs:
            counters = {"global_step": state.global_step, "samples_seen": state.samples_seen}
            checkpoint = save_checkpoint(task, optimizer, epoch=epoch + 1, name=args.name, **counters)
        if args.save_logs:
            torch.save(checkpoint, Path(args.checkpoint_path) / f"epoch_{epoch + 1}.pt")
        if args.distributed:
            torch.distributed.barrier()
    return None
