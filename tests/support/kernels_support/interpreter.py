"""Repairs of the Triton interpreter's arithmetic, for tests with TRITON_INTERPRET=1.

Triton 3.6 to 3.9 interpret these wrongly, without an error (triton-lang/triton #11584, #8322, #11897):

    bf16 `tl.dot`, `*`, `+`, ...        operate on the raw 16-bit codes
    float32 -> bf16                     truncates; hardware rounds to nearest even
    float -> e4m3                       loses the mantissa carry, cuts subnormals; hardware saturates
    e4m3 NaN                            decodes to 480

`tl.dot_scaled` of NVFP4 is missing; `install` gives it one, as PTX defines the instruction.

And 3.6 takes `int` of an array of one element where a loop ends at a number read from memory, which
numpy 2.4 refuses.

Three habits only cost time, and most of it: each call of a device function patches the language anew,
each integer operation is done again in 64 bits to see that 32 hold it, which the small shapes of tests
cannot exceed, and each result's type and shape are built of new objects.

`install` replaces the conversion and wraps the arithmetic of `InterpreterBuilder`: bf16 operands are
widened to float32, the result is rounded back. The names are private to Triton: where a release moves
one, every test in the interpreter fails.
"""

from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from fused_dequant.launch import dispatch
from triton import knobs

_FLOATS = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_INTEGER = {1: (np.uint8, torch.uint8), 2: (np.uint16, torch.int16), 4: (np.uint32, torch.int32)}


def _to_torch(data: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    data = np.ascontiguousarray(data)
    signed = {1: np.uint8, 2: np.int16, 4: np.int32}[data.dtype.itemsize]
    return torch.from_numpy(data.view(signed).copy()).view(_FLOATS[dtype])


def _convert_float(data, source, target, rounding, *, stock=interpreter._convert_float):
    """Round to nearest even through torch; e4m3 saturates, as `cvt.rn.satfinite` does."""
    if source not in _FLOATS or target not in _FLOATS:
        return stock(data, source, target, rounding)
    values = _to_torch(data, source).to(torch.float32)
    if target == tl.float8e4nv:
        values = torch.where(values.isnan(), values, values.clamp(-448, 448))
    unsigned, signed = _INTEGER[target.primitive_bitwidth // 8]
    return values.to(_FLOATS[target]).view(signed).numpy().view(unsigned).reshape(np.shape(data))


def _widen(handle):
    """float32 numpy values of a bf16 or e4m3 handle, other data as they are."""
    scalar = handle.dtype.scalar
    if scalar in (tl.bfloat16, tl.float8e4nv):
        return _convert_float(handle.data, scalar, tl.float32, None).view(np.float32)
    return handle.data


def _dot(self, a, b, acc, input_precision, max_num_imprecise_acc):
    product = np.matmul(_widen(a), _widen(b), dtype=acc.data.dtype)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)


def _scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values f64 [rows, K] of codes [rows, K/2] under scale_vec::4X: a ue4m3 scale for 16 columns.

    The even column is in the low half of a byte. e2m1 has exponent bias 1, e4m3 bias 7; ue4m3 has no
    sign, and its NaN is 0x7f.
    """
    code = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1).astype(np.int64)
    exponent, odd = code >> 1 & 3, code & 1
    magnitude = np.where(exponent == 0, odd / 2, (1 + odd / 2) * 2.0 ** (exponent - 1))
    byte = scales.view(np.uint8).astype(np.int64) & 0x7F
    power, fraction = byte >> 3, (byte & 7) / 8
    scale = np.where(power == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (power - 7))
    scale = np.where(byte == 0x7F, np.nan, scale)
    assert code.shape[1] == 16 * scale.shape[1]
    return np.where(code > 7, -magnitude, magnitude) * scale.repeat(16, 1)


def _dot_scaled(self, a, a_scale, a_type, b, b_scale, b_type, fast, a_packed, b_packed, acc):
    assert a_packed, "an even column is in the low half of a byte"
    assert b_packed
    product = _scaled(a.data, a_scale.data) @ _scaled(b.data.T, b_scale.data).T
    return interpreter.TensorHandle(product.astype(np.float32) + acc.data, acc.dtype.scalar)


def _is_bf16(value) -> bool:
    return isinstance(value, interpreter.TensorHandle) and value.dtype.scalar == tl.bfloat16


def _in_float32(operation):
    def repaired(self, *args, **kwargs):
        if not any(_is_bf16(a) for a in args):
            return operation(self, *args, **kwargs)
        wide = [interpreter.TensorHandle(_widen(a), tl.float32) if _is_bf16(a) else a for a in args]
        result = operation(self, *wide, **kwargs)
        if result.dtype.scalar != tl.float32:
            return result
        rounded = _convert_float(result.data.astype(np.float32), tl.float32, tl.bfloat16, None)
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    return repaired


def _patch_lang_tensor(tensor, scope, *, stock=interpreter._patch_lang_tensor) -> None:
    stock(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


_patched: set[int] = (
    set()
)  # modules of device functions, by the id of their names, since the launch


def _patch_lang(fn, *, stock=interpreter._patch_lang):
    _patched.clear()  # a launch: what it patches is taken back at its end
    return stock(fn)


def _call(self, *args, _stock=interpreter._patch_lang, **kwargs):
    """Call a device function, whose module's language is patched once a launch."""
    if id(self.fn.__globals__) not in _patched:
        _stock(self.fn)
        _patched.add(id(self.fn.__globals__))
    return self.rewrite()(*args, **kwargs)


# By the name of a type; of a block's type, by the name of its elements and its sizes.
_numpy: dict[str, np.dtype] = {}
_of_type: dict[str, dict] = {}  # all of a tensor but its handle
_of_shape: dict[tuple, dict] = {}


def _get_np_dtype(type, *, stock=interpreter._get_np_dtype) -> np.dtype:
    if type.name not in _numpy:
        _numpy[type.name] = stock(type)
    return _numpy[type.name]


def _make_tensor(self, handle, type, *, stock=tl.tensor.__init__) -> None:
    known = _of_type.get(type.name)
    if known is None:
        stock(self, handle, type)
        known = _of_type[type.name] = dict(vars(self))
    self.__dict__.update(known)
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _make_block_type(self, element_ty, shape, *, stock=tl.block_type.__init__) -> None:
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    known = _of_shape.get((element_ty.name, sizes))
    if known is None:
        stock(self, element_ty, shape)
        known = _of_shape[element_ty.name, sizes] = dict(vars(self))
    self.__dict__.update(known)
    self.element_ty = element_ty


def install() -> None:
    """Repair the interpreter of this process. Raises RuntimeError when it is not interpreting."""
    if not knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
    dispatch.interpreted = True
    interpreter._convert_float = _convert_float
    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter._patch_lang = _patch_lang
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = _get_np_dtype
    tl.tensor.__init__, tl.block_type.__init__ = _make_tensor, _make_block_type
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot
    builder.create_dot_scaled = _dot_scaled
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(builder, name, _in_float32(getattr(builder, name)))
