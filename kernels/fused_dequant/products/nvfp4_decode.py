"""Decodes fragments of NVFP4 weights into the registers from which `wgmma` reads its operand A.

bf16: `w4a16.to_fragments` lays weights out. A thread reads pairs of words, 16 codes per pair, and
words of four block scales. Two values take a funnel shift, a mask and a multiplication by their
scale. Decoding the scales adds 5 instructions per 16 values. The result, e2m1 * scale * 2^-7, is
exact; `w4a16.decode_fragments` computes it in torch.
e4m3: a table per block takes six instructions, and eight look-ups in it take seven (`w4a8`).

`gl.convert_layout(..., assert_trivial=True)` fails to compile if values would move between threads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fused_dequant.weights.w4a16 import REGISTERS, SELECT_FIRST


def decode_assembly() -> str:
    """Return PTX that decodes the 16 codes in words $8 and $9 to registers $0 to $7, two bf16 in each.

    Byte 2 * step + row // 8 of $10 is a scale; its bf16 value has the bits (byte << 4) + 0x7380.
    A scale is moved to both halves of a register; ptxas folds the moves into HMUL2 (.H0_H0, .H1_H1).
    """
    select = sum(1 << (bit + half) for bit in SELECT_FIRST for half in (0, 16))
    lines = [
        ".reg .b16 h0, h1;",
        ".reg .b32 both, t, even, odd, s0, s1, s2, s3;",
        "and.b32 even, $10, 0x00ff00ff; mad.lo.u32 even, even, 16, 0x73807380;",
        "shr.u32 odd, $10, 8; and.b32 odd, odd, 0x00ff00ff; mad.lo.u32 odd, odd, 16, 0x73807380;",
        "mov.b32 {h0, h1}, even; mov.b32 s0, {h0, h0}; mov.b32 s2, {h1, h1};",
        "mov.b32 {h0, h1}, odd; mov.b32 s1, {h0, h0}; mov.b32 s3, {h1, h1};",
        f"lop3.b32 both, $8, $9, {select:#x}, 0xE4;",  # (first & mask) | (second & ~mask)
    ]
    for register, (source, rotation) in enumerate(REGISTERS):
        word = ("$8", "$9", "both")[source]
        lines.append(f"shf.l.wrap.b32 t, {word}, {word}, {rotation}; and.b32 t, t, 0x81c081c0;")
        lines.append(f"mul.rn.bf16x2 ${register}, t, s{2 * (register >> 2) + (register & 1)};")
    return "{ " + "\n".join(lines) + " }"


_DECODE = gl.constexpr(decode_assembly())
_CONSTRAINTS = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")  # two words, the scale word twice
_BF16 = gl.constexpr((gl.bfloat16,) * 8)


def e4m3_assembly() -> str:
    """Return PTX that decodes four words of eight codes to registers $0 .. $7 of four e4m3 each.

    Row g has words $8 (step 0) and $9 (step 1); row g + 8 has $10 and $11. $12 has the scale bytes of
    both rows (`w4a8`). Register 4s + 2h + r: step s, row g + 8r, columns 16h + 4(lane%4) + {0..3}.
    """
    lines = [
        ".reg .b32 base, odd, low, high, codes, four;",
        "and.b32 base, $12, 0x7f7f; shr.u32 odd, $12, 7; and.b32 odd, odd, 0x0101;",
        "add.u32 odd, odd, base;",
    ]
    for row in range(2):
        low = (4 + row) << 12 | row << 8 | row << 4 | 8 | row  # 8: its sign, which is 0
        high = (4 + row) << 12 | row << 8 | (4 + row) << 4 | row
        lines.append(f"prmt.b32 low, base, odd, {low:#x}; add.u32 low, low, 0x0c080000;")
        lines.append(f"prmt.b32 high, base, odd, {high:#x}; add.u32 high, high, 0x1c181410;")
        for step in range(2):
            word, first = f"${8 + 2 * row + step}", 4 * step + row
            lines += [
                f"and.b32 codes, {word}, 0x77777777; prmt.b32 four, low, high, codes;",
                f"lop3.b32 ${first}, four, {word}, 0x80808080, 0xF8;",  # four | (word & signs)
                "shr.u32 codes, codes, 16; prmt.b32 four, low, high, codes;",
                f"shl.b32 codes, {word}, 4;",
                f"lop3.b32 ${first + 2}, four, codes, 0x80808080, 0xF8;",
            ]
    return "{ " + "\n".join(lines) + " }"


_E4M3_DECODE = gl.constexpr(e4m3_assembly())
_E4M3_CONSTRAINTS = gl.constexpr(
    ",".join(["=&r"] * 8 + ["r"] * 8)
)  # four words, their scale 4 times
_E4M3 = gl.constexpr((gl.float8e4nv,) * 8)


@gluon.constexpr_function
def fragment_layout(row_tiles, warpgroups):
    """Return a layout of words [row tile, 1, warp, row%8, lane%4, 2, 2]; a thread has 4 per tile."""
    registers = [[0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1, 0]]
    registers += [
        [1 << i, 0, 0, 0, 0, 0, 0]
        for i in range(warpgroups.bit_length() - 1, row_tiles.bit_length() - 1)
    ]
    lanes = [[0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 2, 0, 0]]
    lanes += [[0, 0, 0, 1 << i, 0, 0, 0] for i in range(3)]
    warps = [[0, 0, 1, 0, 0, 0, 0], [0, 0, 2, 0, 0, 0, 0]]
    warps += [[1 << i, 0, 0, 0, 0, 0, 0] for i in range(warpgroups.bit_length() - 1)]
    shape = [row_tiles, 1, 4, 8, 4, 2, 2]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.jit
def decode_e4m3(words, scales, operand: gl.constexpr, ROW_TILES: gl.constexpr):
    """Return e4m3 [rows, 64] of `fragment_layout`'s words and int16 scales [ROW_TILES, 1, 4, 8, 4]."""
    scales = gl.expand_dims(gl.expand_dims(scales.to(gl.int32), 5), 6)
    words, scales = gl.broadcast(words, scales)
    r0, r1, r2, r3, r4, r5, r6, r7 = gl.inline_asm_elementwise(
        _E4M3_DECODE, _E4M3_CONSTRAINTS, [words, scales], dtype=_E4M3, is_pure=True, pack=4
    )
    low = gl.join(gl.join(r0, r1), gl.join(r2, r3))
    values = gl.join(low, gl.join(gl.join(r4, r5), gl.join(r6, r7)))
    # axes: row tile, column tile, warp, row%8, t, j, in two, row//8, columns // 16 % 2, step
    values = values.permute([0, 2, 7, 3, 1, 9, 8, 4, 5, 6]).reshape([64 * ROW_TILES, 64])
    return gl.convert_layout(values, operand, assert_trivial=True)


@gluon.jit
def decode(words, scales, operand: gl.constexpr, ROW_TILES: gl.constexpr):
    """Return bf16 [rows, 64] of `fragment_layout`'s words and scale words [ROW_TILES, 1, 4, 8, 2]."""
    scales = gl.expand_dims(gl.expand_dims(scales, 4), 6)
    words, scales = gl.broadcast(words, scales)
    r0, r1, r2, r3, r4, r5, r6, r7 = gl.inline_asm_elementwise(
        _DECODE, _CONSTRAINTS, [words, scales], dtype=_BF16, is_pure=True, pack=2
    )
    low = gl.join(gl.join(r0, r1), gl.join(r2, r3))
    values = gl.join(low, gl.join(gl.join(r4, r5), gl.join(r6, r7)))
    # axes: row tile, column tile, warp, row%8, lane%4, pair of steps, k%2, row//8, k//8, step
    values = values.permute([0, 2, 7, 3, 1, 5, 9, 8, 4, 6]).reshape([64 * ROW_TILES, 64])
    return gl.convert_layout(values, operand, assert_trivial=True)
