"""A few PTX instructions in torch, to run a kernel's inline assembly without a GPU."""

import re

import torch

MASK = 0xFFFFFFFF


def run(assembly: str, operands: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Execute straight-line `assembly`; registers are int64 tensors of 32-bit values, by name."""
    registers = dict(operands)

    def value(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for statement in assembly.strip()[1:-1].split(";"):
        text = " ".join(statement.split())
        if not text or text.startswith(".reg"):
            continue
        opcode, arguments = text.split(None, 1)
        if opcode == "mov.b32":
            registers |= _mov(arguments, registers)
            continue
        target, *sources = (a.strip() for a in arguments.split(","))
        registers[target] = _OPCODES[opcode](*map(value, sources))
    return registers


def _mov(arguments: str, registers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`{low, high}, whole` takes apart, `whole, {low, high}` puts together; halves of 16 bits."""
    if parts := re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", arguments):
        whole = registers[parts[3]]
        return {parts[1]: whole & 0xFFFF, parts[2]: whole >> 16}
    parts = re.fullmatch(r"(\w+), \{(\w+), (\w+)\}", arguments)
    assert parts, arguments
    return {parts[1]: registers[parts[2]] | (registers[parts[3]] << 16)}


def _lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    result = torch.zeros((), dtype=torch.int64)
    for row in range(8):
        if int(table) >> row & 1:
            terms = [x if row >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            result = result | (terms[0] & terms[1] & terms[2])
    return result & MASK


def _mul_bf16x2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    def half(x: torch.Tensor, shift: int) -> torch.Tensor:
        return (x >> shift & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)

    products = [(half(a, s) * half(b, s)).view(torch.int16).long() & 0xFFFF for s in (0, 16)]
    return products[0] | (products[1] << 16)


def _prmt(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    """Pick four of eight bytes; a nibble's highest bit asks for eight copies of the byte's sign."""
    eight, result = a | (b << 32), torch.zeros((), dtype=torch.int64)
    for place in range(4):
        nibble = selector >> 4 * place & 0xF
        byte = eight >> 8 * (nibble & 7) & 0xFF
        byte = torch.where(nibble > 7, (byte >> 7) * 0xFF, byte)
        result = result | (byte << 8 * place)
    return result


_OPCODES = {
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: (a + b) & MASK,
    "shl.b32": lambda a, n: a << n & MASK,
    "prmt.b32": _prmt,
    "shr.u32": lambda a, b: a >> b,
    "shf.l.wrap.b32": lambda low, high, n: (high << n | low >> (32 - n)) & MASK,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & MASK,
    "lop3.b32": _lop3,
    "mul.rn.bf16x2": _mul_bf16x2,
}
