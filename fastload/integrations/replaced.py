"""The loader that `torch.utils.data.DataLoader` builds after `patch_torch`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.utils.data

import fastload.loader
from fastload.batch.loader_collate import carried_settings
from fastload.integrations.patch_status import status
from fastload.system.notes import add_note

# Its position among the arguments.
_COLLATE_FN = list(inspect.signature(torch.utils.data.DataLoader).parameters).index("collate_fn")


class DataLoader(fastload.loader.DataLoader[Any]):
    """fastload's loader, for a call written for torch's loader.

    Arguments of fastload that the call does not set come from the loader that a framework rebuilds, or else
    from `patch_torch`. A separate class, because frameworks rebuild a loader by its type. Classes derived
    from torch's class after `patch_torch` derive from this one.

    Args:
        args: As `fastload.DataLoader`.
        kwargs: As `fastload.DataLoader`.
    """

    @functools.wraps(fastload.loader.DataLoader.__init__)  # type: ignore[misc]  # for inspect.signature
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        added: dict[str, Any] = {}
        if status.is_patched:
            collate_fn = args[_COLLATE_FN] if len(args) > _COLLATE_FN else kwargs.get("collate_fn")
            carried = carried_settings(collate_fn, args[0] if args else kwargs.get("dataset"))
            added = {
                name: value for name, value in status.defaults.items() if name not in {*carried, *kwargs}
            }
            kwargs = {**carried, **added, **kwargs}
        try:
            super().__init__(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if added:
                text = ", ".join(f"{name}={value!r}" for name, value in added.items())
                add_note(error, f"fastload.patch_torch() or `fastload run` added these arguments: {text}")
            raise
        status.num_replaced += status.is_patched
        status.seeds_pipelines |= status.is_patched and self.seeding != "torch"


# A derived class that calls torch's constructor by name after unpatch_torch() sets none of these.
for _name, _default in fastload.loader.default_options().items():
    setattr(DataLoader, _name, _default)
