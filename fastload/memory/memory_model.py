"""The order in which one process sees what another one writes to shared memory.

x86 shows the stores of a CPU to all others in program order. ARM, RISC-V and POWER reorder stores, and loads.
Where no lock is held, one of these gives the order:

1. The kernel. What a thread did before it sent a message, made or renamed a file, or released a lock, is
   visible to the thread that receives, finds or locks it. This holds for channels, slots of the ring,
   segments of jobs, shared lists, the registry, and the cursor of a cache (under flock).
2. An address dependency. A load whose address is computed from a loaded value comes after that load, also if
   the value passes through a Python int or an array of indices. A branch on the value does not order loads.
   Samples are found through the table of their cache (see `cache.ram.arena`).
3. `fence`, between a sample and its entry.

The number that publishes must also appear at once, as an aligned store of eight bytes does. With pwrite it
might appear byte by byte, because kernels copy with `rep movsb` or ARM's `cpyf`, which promise no more.

Between threads of one process, with or without the GIL, Python's attributes, deques, queues and weak
references give the order. Memory that several processes map is the same for threads.
"""

from __future__ import annotations

import threading


def fence() -> None:
    """Order all earlier loads and stores of this thread before all later ones, as every process sees them.

    A lock is released, then acquired. All that came before precedes the release, the acquisition reads what
    the release wrote, and all that follows comes after the acquisition. ARMv8 keeps this order also on one
    CPU (`rmw; rfi; [A]` in its model), as do RISC-V and the model of Linux. The lock is new, so no fork can
    copy it while another thread holds it. A fence takes 0.2 us. membarrier(2) takes milliseconds, or needs
    each architecture's number of the system call and the registration of all readers; the fence of C11 is
    in a library that not every system has.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
