"""The only inline PTX: single instructions that the DSL has no pure operation for, on 32-bit words."""

import cutlass.cute as cute
from cutlass import Float32, Uint32

OR_OF_AND = 0xEA  # lop3 table of (a & b) | c
# L2 cache policies, their high words: what createpolicy.fractional gives for all bytes
EVICT_FIRST, EVICT_UNCHANGED = 0x12F00000, 0x10F00000


def one_word(text: str, *operands) -> Uint32:
    """The word {$w0} that an instruction makes of operands {$r0}, {$r1}, ..."""
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=list(operands))


def some_words(text: str, count: int, *operands) -> list[Uint32]:
    """The words {$w0}, {$w1}, ... of an instruction that makes ``count``, at least two."""
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * count, read_only_args=list(operands)))


def bulk_copy(target, source, nbytes: int, barrier, policy) -> None:
    """Start a bulk copy from global memory to this CTA's shared memory; barrier: counts its bytes; policy: high word of
    L2's. The DSL's own copy compiles without its policy."""
    cute.arch.inline_ptx(
        "{ .reg .b64 policy; cvt.u64.u32 policy, {$r3}; shl.b64 policy, policy, 32; cp.async.bulk"
        ".shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        f" [{{$r0}}], [{{$r1}}], {nbytes}, [{{$r2}}], policy; }}",
        read_only_args=[target, source, barrier, policy])


def load_relaxed(source, count: int) -> list[Uint32]:
    """``count`` (2 or 4) words of global memory that other CTAs may be writing, in one access: each is an old value or
    a new one."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    return some_words(f"ld.relaxed.gpu.global.v{count}.b32 {{{names}}}, [{{$r0}}];", count, source)


def nanosleep(ns) -> None:
    """Let a warp sleep for about so many nanoseconds."""
    cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[ns])


def load_words(source, policy) -> list[Uint32]:
    """16 bytes of global memory; policy: L2's, 64 bits."""
    return some_words("ld.global.L2::cache_hint.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}], {$r1};", 4,
                      source, policy)


def fma_f16x2(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """a * b + c on both fp16 halves, one rounding; subnormals kept. No operand may be a constant."""
    return one_word("fma.rn.f16x2 {$w0}, {$r0}, {$r1}, {$r2};", a, b, c)


def subtract_f16x2(c: Uint32, a: Uint32, b: Uint32) -> Uint32:
    """c - a * b on both fp16 halves, one rounding; subnormals kept."""
    return one_word("{ .reg .b32 n; neg.f16x2 n, {$r1}; fma.rn.f16x2 {$w0}, n, {$r2}, {$r0}; }", c, a, b)


def fma_f16x2_const(a: Uint32, b: int, c: int) -> Uint32:
    """a * b + c on both fp16 halves, where b and c are the constants' bits, both halves of 32."""
    text = f"mov.b32 b, {b:#x}; mov.b32 c, {c:#x}; fma.rn.f16x2 {{$w0}}, {{$r0}}, b, c;"
    return one_word(f"{{ .reg .b32 b, c; {text} }}", a)


def low_halves(a: Uint32, b: Uint32) -> Uint32:
    """Low half of a in the low half, low half of b in the high half."""
    return one_word("prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410;", a, b)


def high_halves(a: Uint32, b: Uint32) -> Uint32:
    """High half of a in the low half, high half of b in the high half."""
    return one_word("prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632;", a, b)


def mul_f16x2(a: Uint32, b: Uint32) -> Uint32:
    """a * b on both fp16 halves, one rounding; subnormals kept. No operand may be a constant."""
    return one_word("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", a, b)


def max_u16x2(a: Uint32, b: Uint32) -> Uint32:
    """Maximum of both unsigned 16-bit halves: of fp16 and of bf16 without sign bits, where a NaN is the largest."""
    return one_word("max.u16x2 {$w0}, {$r0}, {$r1};", a, b)


def movmatrix(a: Uint32) -> Uint32:
    """Transpose an 8x8 matrix of 16-bit values of which each lane holds two: by the whole warp."""
    return one_word("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", a)


def permute(a: Uint32, b: Uint32, selector) -> Uint32:
    """Bytes of a (0 .. 3) and b (4 .. 7), chosen by the selector's nibbles, lowest first; selector: int or Uint32."""
    return one_word("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", a, b, Uint32(selector))


def lookup(address, offset: int, words: int, space: str = "shared") -> list[Uint32]:
    """``words`` (1, 2 or 4) words of memory that does not change while lookups run, ``offset`` bytes behind an address:
    free to be moved between other accesses, unlike the DSL's loads. space: "shared", "global.nc" (64-bit address)."""
    if words == 1:
        return [one_word(f"ld.{space}.b32 {{$w0}}, [{{$r0}}+{offset}];", address)]
    names = ", ".join(f"{{$w{i}}}" for i in range(words))
    return some_words(f"ld.{space}.v{words}.b32 {{{names}}}, [{{$r0}}+{offset}];", words, address)


def add_f16x2(a: Uint32, b: Uint32) -> Uint32:
    """a + b on both fp16 halves."""
    return one_word("add.rn.f16x2 {$w0}, {$r0}, {$r1};", a, b)


def clamp_f16x2(a: Uint32) -> Uint32:
    """Both fp16 halves within the finite range; a NaN stays one."""
    text = "mov.b32 x, 0x7BFF7BFF; min.NaN.f16x2 y, {$r0}, x; mov.b32 x, 0xFBFFFBFF; max.NaN.f16x2 {$w0}, y, x;"
    return one_word(f"{{ .reg .b32 x, y; {text} }}", a)


def multiply_bytes(a: list[Uint32], b: list[Uint32], acc: list[Uint32], is_signed: bool) -> list[Uint32]:
    """m16n8k32: acc + a b in s32; a: 4 registers of u8, b: 2 registers of s8 or u8, acc: 4 registers.

    With half as many registers of a and b it is m16n8k16.
    """
    kind = "s8" if is_signed else "u8"
    names = iter(range(len(a) + len(b) + len(acc)))
    operands = ", ".join(f"{{ {', '.join(f'{{$r{next(names)}}}' for _ in registers)} }}" for registers in (a, b, acc))
    return some_words(f"mma.sync.aligned.m16n8k{16 * len(b)}.row.col.s32.u8.{kind}.s32 "
                      f"{{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, {operands};", 4, *a, *b, *acc)


def multiply_tf32(a: list[Uint32], b: list[Uint32], acc: list[Float32]) -> list[Float32]:
    """m16n8k8: acc + a b in fp32; a: 4 registers of tf32, which is fp32 without its low 13 bits, b: 2, acc: 4."""
    text = ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, "
            "{ {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} };")
    return list(cute.arch.inline_ptx(text, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *acc]))


def of_cta(address, rank) -> Uint32:
    """Where this CTA's shared address is in CTA ``rank`` of its cluster."""
    return one_word("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", address, rank)


def load_of_cta(address) -> Uint32:
    """A word at an address of ``of_cta``."""
    return one_word("ld.shared::cluster.b32 {$w0}, [{$r0}];", address)


def trap() -> None:
    """Stop the kernel with an error."""
    cute.arch.inline_ptx("trap;")


def opaque(x) -> Uint32:
    """x, of which the compiler knows nothing."""
    return one_word("mov.b32 {$w0}, {$r0};", Uint32(x))


def any_of(barrier, threads: int, flag: Uint32) -> Uint32:
    """1 if ``flag`` is not 0 in any of the ``threads`` that meet at a named barrier, else 0; by whole warps."""
    return one_word("{ .reg .pred own, any; setp.ne.u32 own, {$r1}, 0;"
                    f" barrier.cta.red.or.pred any, {{$r0}}, {threads}, own; selp.u32 {{$w0}}, 1, 0, any; }}",
                    barrier, flag)
