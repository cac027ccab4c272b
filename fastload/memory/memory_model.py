"""The order in which one process sees what another one writes to shared memory.

x86 shows the stores of a CPU to all others in program order. ARM, RISC-V and POWER reorder both stores and
loads. Where no lock is held, one of these gives the order:

1. The kernel. What a thread did before it sent a message, made or renamed a file, or released a lock, is
   visible to the thread that receives the message, opens the file or takes the lock. Channels, slots of the
   ring, segments of plans, shared lists, the registry, and the cursor of a cache (under flock) rely
   on this.
2. An address dependency. A load whose address is computed from a loaded value comes after that load, also if
   the value passes through a Python int or an array of indices. A branch on the value does not order loads.
   Samples are found through the table of their cache (see `cache.ram.arena`).
3. `fence`, between a sample and its entry.

The number that publishes must also appear at once, as an aligned store of eight bytes does. With pwrite it
might appear byte by byte, because kernels copy with `rep movsb` or ARM's `cpyf`, which promise no more.

Between threads of one process, with or without the GIL, Python's attributes, deques, queues and weak
references give the order, also for memory that other processes map.
"""

from __future__ import annotations

import threading


def fence() -> None:
    """Order all earlier loads and stores of this thread before all later ones, as every process sees them."""
    # All that came before precedes the release, the second acquisition reads what the release wrote, and all
    # that follows comes after the acquisition. ARMv8 keeps this order also on one CPU (`rmw; rfi; [A]` in its
    # model), as do RISC-V and the model of Linux. A new lock, because a fork would copy one that another
    # thread holds. This takes 0.2 us; membarrier(2) takes milliseconds, or the number of the system call on
    # each architecture and the registration of all readers, and not every system has a library with C11's
    # fence.
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
