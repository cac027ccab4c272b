"""The tour: a small network trained on the cached demo images, with every tuning technique as a flag.

    python examples/train.py                      # two epochs; on a GPU if there is one
    python examples/train.py --help               # each technique: what it does, and when it does not pay
    python examples/train.py --ablate --steps 20  # each technique off and on, timed; an estimate first
    python examples/train.py --ablate channels_last compile

`make photos` draws the images. See train_techniques.py (the list), train_data.py (cache and loaders),
train_step.py (the step), train_model.py (the network) and train_ablate.py (the table).
"""

import argparse
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import train_ablate
from train_data import Data
from train_step import Trainer
from train_techniques import TECHNIQUES, add_flags, resolve

import fastload


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--photos", type=Path, default=Path("build/photos"), help="a folder for each class")
    parser.add_argument("--epochs", type=positive, default=2, help="in all, those before --resume included")
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument(
        "--micro-batches", type=positive, default=1, help="parts of a batch, one after the other"
    )
    parser.add_argument("--size", type=positive, default=64, help="height and width of the crops")
    parser.add_argument("--width", type=positive, default=16, help="channels of the first block")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="auto", help="auto (the current GPU, else the CPU), cpu, cuda or cuda:N"
    )
    parser.add_argument("--disable-cuda", action="store_true", help="the same as --device cpu")
    parser.add_argument("--checkpoint", type=Path, help="where to save after each epoch")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    names = [technique.name for technique in TECHNIQUES]
    ablate = {"nargs": "*", "choices": names, "metavar": "TECHNIQUE"}
    ablate["help"] = "time these techniques, or all; estimates first how long that takes"
    parser.add_argument("--ablate", **ablate)
    parser.add_argument("--steps", type=positive, default=20, help="steps in a round of --ablate")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds of each side in --ablate")
    add_flags(parser)
    options = parser.parse_args(arguments)
    if options.debug:
        # Read when CUDA starts, which the next line can do.
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    device = choose_device("cpu" if options.disable_cuda else options.device)
    for line in resolve(options, device):
        print(line)
    return options, device


def positive(text: str) -> int:
    """An int above zero, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above zero, but got {text}")
    return int(text)


def choose_device(name: str) -> torch.device:
    """The device by its name; CUDA_VISIBLE_DEVICES and torch's current device count."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:  # torch's message is a list of all devices that it has ever had
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SystemExit(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(f"--device {name}: there is no GPU here; --device auto takes the CPU then")
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            there = ", ".join(f"cuda:{index}" for index in range(count))
            raise SystemExit(f"--device {name}: the GPUs here are {there}")
        # The index of "cuda" itself is None: the current device, which can change later.
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def train(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Train and evaluate; gives what it printed for each epoch."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.empty_cache()  # what others left in this process; ours is not allocated yet
    generator = fastload.seed_everything(options.seed)  # random, numpy and torch; and one for the loader
    data = Data(options, device)
    trainer = Trainer(options, len(data.classes), device)
    first_epoch = 0
    if options.resume:
        state = torch.load(options.resume, map_location=device, weights_only=True)
        trainer.load_state_dict(state)
        generator.set_state(state["generator"].cpu())
        first_epoch = state["epoch"]

    history = []
    for epoch in range(first_epoch, options.epochs):
        if on_cuda and options.reset_peaks:
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        with trainer.backends():
            with data.train_loader(generator) as loader:
                metrics = trainer.train_epoch(loader)
            loss, _ = metrics.read()  # waits for the device, for the true time
            seconds = time.perf_counter() - started
            with data.held_out_loader() as loader:
                held_out_loss, accuracy = trainer.evaluate(loader).read()
        figures = {
            "epoch": epoch + 1,
            "loss": loss,
            "held_out_loss": held_out_loss,
            "accuracy": accuracy,
            "images_per_s": metrics.num_images / seconds,
            "peak_bytes": peak_bytes(device),
        }
        history.append(figures)
        print(
            f"epoch {epoch + 1}: loss {loss:.4f}, held out {held_out_loss:.4f}, accuracy {accuracy:.1%}, "
            f"{figures['images_per_s']:,.0f} images/s, peak {figures['peak_bytes'] / 1e6:,.0f} MB"
        )
        if options.checkpoint:
            state = trainer.state_dict() | {"epoch": epoch + 1, "generator": generator.get_state()}
            torch.save(state, options.checkpoint)
    for hint in trainer.hints():
        print(hint, file=sys.stderr)
    return history


def peak_bytes(device: torch.device) -> int:
    """Of tensors on the GPU since the last reset; of the whole process since its start on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments: list[str] | None = None) -> None:
    options, device = parse(arguments)
    on_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_cuda else f"threads: {torch.get_num_threads()}"
    print(f"{device} ({name}), torch {torch.__version__}, seed {options.seed}")
    if options.ablate is None:
        train(options, device)
    else:
        train_ablate.run(options, device)


if __name__ == "__main__":  # workers that are spawned import this file
    main()
