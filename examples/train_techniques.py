"""The techniques of fast training: each is a flag of train.py with its default, and a row of --ablate.

Read by train.py for its flags and by train_ablate.py for its rows. A technique is on in a run where
`options.NAME` is true; search for that in train_data.py and train_step.py to see what it does.
"""

import argparse
import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

CUDA = "cuda"  # as a default: on where there is a GPU


@dataclass(frozen=True)
class Technique:
    """One thing to do, or to leave.

    Attributes:
        name: Of the option; the flags are --na-me and --no-na-me.
        doc: Two lines: what it does, and when it does not pay.
        default: On, off, or on with a GPU.
        needs_cuda: It has no meaning without a GPU.
        phase: What its row times: "train" or "evaluate".
        beside: Options that both sides of its row share, to show the technique, and show it alone.
    """

    name: str
    doc: str
    default: bool | str = True
    needs_cuda: bool = False
    phase: str = "train"
    beside: Mapping[str, bool | int] = field(default_factory=dict)

    def obstacle(self, device: torch.device) -> str | None:
        """Why it cannot be on for this device; None if it can."""
        if self.needs_cuda and device.type != "cuda":
            return "needs CUDA"
        if self.name == "mixed_precision":
            return _bfloat16_missing(device)
        return _compiler_missing(device) if self.name == "compile" else None


TECHNIQUES = (
    # --- data ---
    Technique(
        "shared_cache",
        "Decodes and resizes each image once, into memory that all workers and jobs on this host share.\n"
        "Does not pay for a single epoch, or where the decoded images do not fit into memory or on disk.",
    ),
    Technique(
        "fastload_loader",
        "fastload.DataLoader: batches are written once, into memory that is used again. Off: torch's.\n"
        "Does not pay where the model, not the loader, sets the pace.",
    ),
    Technique(
        "pinned",
        "Pinned host memory and non_blocking copies: the host goes on during the copy.\n"
        "Does not pay for tiny batches, or on hosts with little memory: pinned pages cannot be swapped.",
        default=CUDA,
        needs_cuda=True,
        beside={"prefetcher": False},
    ),
    Technique(
        "prefetcher",
        "fastload.DevicePrefetcher copies the next two batches on its own stream, beside the model's work.\n"
        "Does not pay where copies are short against the step; the batches ahead take device memory.",
        default=CUDA,
        needs_cuda=True,
    ),
    Technique(
        "channels_last",
        "Images and weights in channels-last order, in which convolutions need no reordering of their own.\n"
        "Does not pay for models with few convolutions, or with layers that have no channels-last kernel.",
    ),
    Technique(
        "normalize_on_device",
        "uint8 up to the device, Normalize there. Off: workers make floats, four times the bytes.\n"
        "Does not pay where the device is the bottleneck and workers idle.",
    ),
    Technique(
        "input_batchnorm",
        "BatchNorm2d(affine=False) as the first layer in place of Normalize: no mean and std to find out.\n"
        "Does not pay for small batches, whose statistics are noise, or where mean and std are known.",
        default=False,
    ),
    # --- arithmetic ---
    Technique(
        "mixed_precision",
        "bfloat16 autocast: half the bytes for activations, and tensor cores. Weights stay float32.\n"
        "Does not pay on CPUs and GPUs without bfloat16 units, or with sizes that are no multiples of 8.",
        default=CUDA,
    ),
    Technique(
        "tf32",
        "float32 products and convolutions on tensor cores, with 10 bits of mantissa.\n"
        "Does not pay before Ampere, beside bfloat16 autocast, or where results must have float32's digits.",
        default=CUDA,
        needs_cuda=True,
        beside={"mixed_precision": False},
    ),
    Technique(
        "cudnn_benchmark",
        "cuDNN tries its algorithms at the first batch of each shape, and keeps the fastest.\n"
        "Does not pay where input sizes vary: each new size is tried anew, in the middle of training.",
        default=CUDA,
        needs_cuda=True,
    ),
    Technique(
        "compile",
        "torch.compile fuses pointwise operations (batch norm, ReLU, the sum of a block) into few kernels.\n"
        "Does not pay in short runs, which wait longer for the compiler, or where input sizes vary.",
        default=False,
    ),
    # --- optimizer ---
    Technique(
        "set_to_none",
        "zero_grad(set_to_none=True): gradients are dropped, and the next backward writes, not adds.\n"
        "Does not pay where other code holds on to .grad, or expects zeros in parameters without gradients.",
        beside={"oom_retry": False},  # which would copy gradients that are zeros
    ),
    Technique(
        "foreach_optimizer",
        "The optimizer works on lists of all parameters at once, not on one after the other.\n"
        "Does not pay with few parameters, or with no memory to spare: temporaries as large as the weights.",
        beside={"fused_optimizer": False},
    ),
    Technique(
        "fused_optimizer",
        "The whole update of all parameters in one kernel; goes before --foreach-optimizer.\n"
        "Does not pay where the optimizer is a small part of the step, and not every optimizer has it.",
    ),
    # --- memory ---
    Technique(
        "checkpointing",
        "Activation checkpointing: keeps the blocks' inputs only, and computes the rest again in backward.\n"
        "Does not pay where the model fits anyway: a third more computing. Batch norm sees a batch twice.",
        default=False,
    ),
    Technique(
        "accumulate_parts",
        "With --micro-batches N: backward after each part, so only one part's activations live at a time.\n"
        "Off sums the losses first, which keeps all parts' history. More parts are smaller, slower kernels.",
        beside={"micro_batches": 4},
    ),
    Technique(
        "delete_temporaries",
        "Deletes what backward does not need before it starts, where memory peaks.\n"
        "Does not pay for what autograd keeps anyway, as the float32 input without mixed precision.",
        beside={"mixed_precision": True},
    ),
    Technique(
        "oom_retry",
        "fastload.training.retry_on_oom: a step that does not fit runs again in halves, outside the except.\n"
        "Does not pay as a way of life: find_batch_size finds a size that fits. Batch norm sees the halves.",
    ),
    Technique(
        "empty_cache_once",
        "torch.cuda.empty_cache() before the first allocation only. Off: after each step as well.\n"
        "Later it frees nothing that tensors use: each call waits for the GPU, and cudaMalloc starts over.",
        default=CUDA,
        needs_cuda=True,
    ),
    Technique(
        "reset_peaks",
        "Resets the peak of device memory before each epoch and reads it after: an epoch's own figure.\n"
        "Costs nothing. Off: the highest of all epochs so far, warm-up and cudnn.benchmark included.",
        default=CUDA,
        needs_cuda=True,
    ),
    # --- looking at it ---
    Technique(
        "metrics_on_device",
        "Loss and hits are summed on the device and read once an epoch. Off: .item() in every step.\n"
        "Does not pay on the CPU. On the GPU each .item() waits for all work that was queued before.",
    ),
    Technique(
        "inference_mode",
        "torch.inference_mode for evaluation: no history, no version counters. Off: as in training.\n"
        "Does not work for results that are to take part in a later backward: use no_grad there.",
        phase="evaluate",
    ),
    Technique(
        "debug",
        "CUDA_LAUNCH_BLOCKING=1, no workers, anomaly detection: errors come from the line that made them.\n"
        "Does not pay ever but when looking for an error: nothing runs beside anything else.",
        default=False,
    ),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A --flag and a --no-flag for each technique; what is not given is None until `resolve`."""
    group = parser.add_argument_group("techniques, on (+), off (-) or on with a GPU (*) by default")
    for technique in TECHNIQUES:
        sign = {True: "+", False: "-", CUDA: "*"}[technique.default]
        flag = "--" + technique.name.replace("_", "-")
        action = argparse.BooleanOptionalAction
        group.add_argument(flag, action=action, default=None, help=f"{sign} {technique.doc}")


def resolve(options: argparse.Namespace, device: torch.device) -> list[str]:
    """Set each technique in ``options`` to True or False; a line for each that was wanted and cannot be."""
    impossible = []
    for technique in TECHNIQUES:
        wanted = getattr(options, technique.name)
        obstacle = technique.obstacle(device)
        default = device.type == "cuda" if technique.default == CUDA else bool(technique.default)
        setattr(options, technique.name, obstacle is None and (default if wanted is None else wanted))
        if wanted and obstacle:
            impossible.append(f"--{technique.name.replace('_', '-')} stays off: {obstacle}")
    return impossible


def vary(options: argparse.Namespace, technique: Technique, value: bool) -> argparse.Namespace:
    """These options with one technique on or off, and with what its row needs beside it."""
    return argparse.Namespace(**{**vars(options), **technique.beside, technique.name: value})


def _bfloat16_missing(device: torch.device) -> str | None:
    # Older GPUs only emulate it, which is slower than float32.
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return "needs Ampere" if is_there and not torch.cuda.is_bf16_supported(False) else None


def _compiler_missing(device: torch.device) -> str | None:
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "needs Triton"
    elif not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        return "needs a C++ compiler"
    return None
