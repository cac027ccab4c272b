"""One step, one epoch, one evaluation: where the techniques of train_techniques.py are practised.

Nothing between two steps waits for the GPU: no .item(), no .cpu(), no print of a tensor.
"""

import argparse
import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from train_data import MEAN, STD
from train_model import SmallResNet, odd_sizes

import fastload

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Metrics:
    """Sums over images: numbers, or tensors on the device that nobody has read yet."""

    loss: torch.Tensor | float = 0.0
    hits: torch.Tensor | float = 0.0
    num_images: int = 0

    def add(self, loss: torch.Tensor | float, hits: torch.Tensor | float, num_images: int) -> None:
        """The sums of one more batch."""
        self.loss = self.loss + loss
        self.hits = self.hits + hits
        self.num_images += num_images

    def read(self) -> tuple[float, float]:
        """Mean loss and accuracy; here the host waits for the device, once."""
        num_images = max(self.num_images, 1)
        return float(self.loss) / num_images, float(self.hits) / num_images


class Trainer:
    """A model with its optimizer, and how to step them."""

    def __init__(self, options: argparse.Namespace, num_classes: int, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.shapes: set[tuple[int, ...]] = set()  # of the batches seen in training
        self.memory_format = torch.channels_last if options.channels_last else torch.contiguous_format
        torch.manual_seed(options.seed)  # the same weights whatever was drawn before
        network = SmallResNet(
            num_classes,
            options.width,
            input_batchnorm=options.input_batchnorm,
            checkpointing=options.checkpointing,
        )
        self.network = network.to(device, memory_format=self.memory_format)
        # The compiled model shares the network's weights; checkpoints hold the network's names.
        self.model = torch.compile(self.network) if options.compile else self.network
        self.normalize = fastload.transforms.Normalize(
            MEAN, STD, memory_format=self.memory_format, layout="HWC"
        )
        self.normalize.to(device)
        fused = options.fused_optimizer
        self.kernels = {"fused": fused, "foreach": options.foreach_optimizer and not fused}
        parameters = self.network.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr=options.lr, momentum=0.9, **self.kernels)

    # --- training ---------------------------------------------------------------------------------------

    def train_epoch(self, loader: Iterable[Batch], max_steps: int | None = None) -> Metrics:
        """A step for each batch, or ``max_steps``."""
        metrics = Metrics()
        self.model.train()
        for batch in itertools.islice(loader, max_steps):
            self.step(batch, metrics)
        return metrics

    def step(self, batch: Batch, metrics: Metrics) -> None:
        """Forward, backward and the optimizer's step."""
        options = self.options
        self.shapes.add(tuple(batch[0].shape))
        self.optimizer.zero_grad(set_to_none=options.set_to_none)
        with torch.autograd.set_detect_anomaly(options.debug):
            if options.oom_retry:
                # The second try runs where the error, its traceback and the frames in it are gone.
                results = fastload.training.retry_on_oom(self.add_gradients, batch, model=self.network)
            else:
                results = [self.add_gradients(batch, 1.0)]
        self.optimizer.step()
        for loss, hits, num_images in results:
            if options.metrics_on_device:
                metrics.add(loss, hits, num_images)
            else:
                metrics.add(loss.item(), hits.item(), num_images)  # the host waits, twice a step
        if self.device.type == "cuda" and not options.empty_cache_once:
            torch.cuda.empty_cache()

    def add_gradients(self, batch: Batch, weight: float) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Forward and backward of ``weight`` of a batch; the sum of its losses, its hits and its size."""
        options = self.options
        num_images = len(batch[1])
        loss_sum = torch.zeros((), device=self.device)
        hits = torch.zeros((), device=self.device)
        history: torch.Tensor | None = None
        for images, labels in zip(*(part.chunk(options.micro_batches) for part in batch), strict=True):
            floats, logits, loss = self.forward(images, labels)
            # detach(): a sum of losses with their history would keep every step's graph alive.
            loss_sum += loss.detach() * len(labels)
            hits += (logits.detach().argmax(1) == labels).sum()
            share = loss * (weight * len(labels) / num_images)
            if options.delete_temporaries:
                del floats, logits, loss
            if options.accumulate_parts:
                share.backward()
            else:
                history = share if history is None else history + share
        if history is not None:
            history.backward()
        return loss_sum, hits, num_images

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The float images `(B, 3, H, W)`, the logits `(B, num_classes)`, and the mean loss."""
        floats = self.to_floats(images)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.mixed_precision):
            logits = self.model(floats)
            return floats, logits, nn.functional.cross_entropy(logits, labels)

    def to_floats(self, images: torch.Tensor) -> torch.Tensor:
        """`(B, H, W, 3)` as the loader gives them to `(B, 3, H, W)` float32."""
        if self.options.normalize_on_device and not self.options.input_batchnorm:
            return self.normalize(images)
        channels_second = images.permute(0, 3, 1, 2)
        floats = channels_second.to(torch.float32, memory_format=self.memory_format)
        return floats / 255 if self.options.input_batchnorm else floats

    # --- evaluation -------------------------------------------------------------------------------------

    def evaluate(self, loader: Iterable[Batch], max_steps: int | None = None) -> Metrics:
        """The metrics of these batches; nothing is learnt."""
        metrics = Metrics()
        self.model.eval()
        with torch.inference_mode() if self.options.inference_mode else contextlib.nullcontext():
            for images, labels in itertools.islice(loader, max_steps):
                _, logits, loss = self.forward(images, labels)
                metrics.add(loss.detach() * len(labels), (logits.argmax(1) == labels).sum(), len(labels))
        return metrics

    # --- settings and state -----------------------------------------------------------------------------

    def backends(self) -> contextlib.AbstractContextManager[None]:
        """A `with` block in which torch's global switches are as these options want them."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        options = self.options
        return fastload.training.tune_backends(tf32=options.tf32, cudnn_benchmark=options.cudnn_benchmark)

    def hints(self) -> list[str]:
        """What the sizes seen so far mean for the techniques that are on."""
        hints = []
        odd = odd_sizes(self.network, self.options.batch_size) if self.options.mixed_precision else []
        if odd:
            hints.append(f"mixed precision is fastest with multiples of 8; here are {', '.join(odd)}")
        if self.options.cudnn_benchmark and len(self.shapes) > 1:
            hints.append(f"batches came in {len(self.shapes)} shapes: --no-cudnn-benchmark might be faster")
        return hints

    def state_dict(self) -> dict[str, Any]:
        """The weights and the optimizer's state, for a checkpoint."""
        return {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group.update(self.kernels)  # this run's flags, not those of the run that saved
