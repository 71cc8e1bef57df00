"""Words between the GPUs of a host: written to slots of each other's memory over NVLink, each with its call's number.

A word and its number are one access of 64 bits, which is old or new as a whole: no fence and no barrier between ranks.

Slots have two halves, which calls take in turn. A rank writes a half again two calls later: by then it has seen the
other's number of the call between, which that rank pushed after it had read this half. Numbers are counted by the
device, a row's own, so a call may be captured and replayed as often as it likes.

A rank that does not come is given up after ``POLLS`` reads of a slot, about ten minutes: the kernel stops with an
error, which the host's next call of CUDA raises.
"""

import cutlass.cute as cute
from cutlass import Int64, Uint32

from lowbit_attn.device import ptx

SLOT_BYTES = 8
POLLS = 0x8000_0000  # each takes a read of L2, 0.3 us or so
LOW_WORD = 0xFFFF_FFFF


@cute.jit
def push(at: Int64, word: Uint32, number: Uint32):
    """Write a word and the call's number to a slot of another GPU."""
    slot = cute.make_ptr(Int64, at, cute.AddressSpace.gmem, assumed_align=SLOT_BYTES)
    cute.arch.store(slot, Int64(word) | (Int64(number) << 32), sem="relaxed", scope="sys")


@cute.jit
def load_slot(at: Int64) -> Int64:
    """What a slot of this GPU holds now."""
    return cute.arch.load(cute.make_ptr(Int64, at, cute.AddressSpace.gmem, assumed_align=SLOT_BYTES), Int64,
                          sem="relaxed", scope="sys")


@cute.jit
def wait(at: Int64, number: Uint32) -> Uint32:
    """A slot's word, once it is the call's."""
    return wait_from(load_slot(at), at, number)


@cute.jit
def wait_from(found: Int64, at: Int64, number: Uint32) -> Uint32:
    """As ``wait``, after a first look that found this; stops the kernel after ``POLLS`` more."""
    polls = Uint32(0)
    while Uint32(found >> 32) != number:
        found = load_slot(at)
        polls += Uint32(1)
        if polls == Uint32(POLLS):
            ptx.trap()
    return Uint32(found & Int64(LOW_WORD))
