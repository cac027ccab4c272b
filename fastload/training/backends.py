"""Set torch's global speed switches for a block of code, and restore them afterwards.

The switches are global to the process: other threads see them.

1. A switch whose argument is None is neither read nor written.
2. TF32 is set through torch's older switches and, if torch has them (2.9 and later), also through the
   ``fp32_precision`` fields: torch raises when code (for example its own compiler) reads an older switch that
   disagrees with a field. If they disagree at the start, only the fields are set.
3. The CPU's matrix products keep their precision, although torch's older switch sets it too. One exception:
   if reading that switch would then raise (the CPU used TF32 or bfloat16), they follow it in the block.
4. Every switch reads the same afterwards, also after an exception. (A field that inherited its parent's value
   then has it as its own: torch cannot distinguish the two.)
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def tune_backends(
    *, tf32: bool | None = None, cudnn_benchmark: bool | None = None
) -> contextlib._GeneratorContextManager[None]:
    """Set torch's speed switches inside a ``with`` block, or a function decorated with it.

    A call without ``with`` sets nothing. A decorated generator or coroutine runs without the switches: write
    the ``with`` block inside it. An argument of None leaves its switch unchanged. This works without a GPU
    and makes no CUDA context.

    Args:
        tf32: Whether float32 matrix products and convolutions on the GPU can use TF32, which keeps 10 bits of
            mantissa and is several times faster on Ampere and later GPUs. torch's default: convolutions only.
            Products on the CPU keep their precision, with two exceptions. torch before 2.9 has one switch for
            both. And if reading that switch would raise, products on the CPU follow it: True turns bfloat16
            into TF32, and False turns bfloat16 and TF32 into float32.
        cudnn_benchmark: Whether cuDNN tries its algorithms at the first batch of each shape and keeps the
            fastest. Useful if shapes repeat; wastes time and memory if shapes vary.

    Raises:
        TypeError: A value is neither a bool nor None.
    """
    for name, value in (("tf32", tf32), ("cudnn_benchmark", cudnn_benchmark)):
        if not isinstance(value, bool) and value is not None:
            raise TypeError(f"{name} should be True, False or None (leave it as it is), but got {value!r}")
    return _tuned(tf32, cudnn_benchmark)


@contextlib.contextmanager
def _tuned(tf32: bool | None, cudnn_benchmark: bool | None) -> Iterator[None]:
    with contextlib.ExitStack() as to_restore:
        if cudnn_benchmark is not None:
            to_restore.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = cudnn_benchmark
        if tf32 is not None:
            _set_tf32(tf32, to_restore)
        yield


def _set_tf32(tf32: bool, to_restore: contextlib.ExitStack) -> None:
    # The callbacks run in reverse: they restore the older switches first, then the fields. The fields include
    # the CPU's matrix products, because set_float32_matmul_precision() changes these too.
    before = [(field, field.fp32_precision) for field in _fields()]
    for field, precision in before:
        to_restore.callback(setattr, field, "fp32_precision", precision)
    with contextlib.suppress(RuntimeError):  # they disagree: rule 2
        to_restore.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        for on_cpu in before[-1:]:
            _keep(*on_cpu)
    with contextlib.suppress(RuntimeError):
        to_restore.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
        torch.backends.cudnn.allow_tf32 = tf32
    for field, _ in before[:-1]:
        field.fp32_precision = "tf32" if tf32 else "ieee"


def _keep(field: Any, precision: str) -> None:
    """Restore the CPU's field, unless torch's older switch could then not be read (rule 3)."""
    as_torch_set_it = field.fp32_precision
    field.fp32_precision = precision
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError:
        field.fp32_precision = as_torch_set_it


def _fields() -> list[Any]:
    """The objects with an ``fp32_precision`` of their own, the CPU's last; none before torch 2.9."""
    if not hasattr(torch.backends, "fp32_precision"):
        return []
    backends: Any = torch.backends
    return [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
