"""float16 conversions for x86 processors without F16C: LLVM calls two library functions there that Numba does not have.

They are added to Numba's execution engine, where every kernel finds them. Slow (one call per number), exact to the bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding
from numba.core.registry import cpu_target

from ... import machine
from .. import isa

# Extend: the bits of a float16, shifted into a float32, are 2**112 too small, subnormal or not; infinity and NaN apart.
# Truncate: drop bits with a carry that rounds to even; below 2**-14 adding 0.5 leaves the rounded fraction.
LLVM_IR = """
define float @__extendhfsf2(half %x) {
  %short = bitcast half %x to i16
  %bits = zext i16 %short to i32
  %size = and i32 %bits, 32767
  %upper = xor i32 %bits, %size
  %sign = shl i32 %upper, 16
  %placed = shl i32 %size, 13
  %small = bitcast i32 %placed to float
  %value = fmul float %small, 0x46F0000000000000
  %finite = bitcast float %value to i32
  %special = or i32 %placed, 2139095040
  %is_special = icmp uge i32 %size, 31744
  %chosen = select i1 %is_special, i32 %special, i32 %finite
  %signed = or i32 %chosen, %sign
  %result = bitcast i32 %signed to float
  ret float %result
}

define half @__truncsfhf2(float %x) {
  %bits = bitcast float %x to i32
  %size = and i32 %bits, 2147483647
  %upper = xor i32 %bits, %size
  %sign = lshr i32 %upper, 16
  %last = lshr i32 %size, 13
  %odd = and i32 %last, 1
  %moved = add i32 %size, -939520001
  %carried = add i32 %moved, %odd
  %normal = lshr i32 %carried, 13
  %positive = bitcast i32 %size to float
  %shifted = fadd float %positive, 0.5
  %fraction = bitcast float %shifted to i32
  %subnormal = sub i32 %fraction, 1056964608
  %is_subnormal = icmp ult i32 %size, 947912704
  %finite = select i1 %is_subnormal, i32 %subnormal, i32 %normal
  %is_nan = icmp ugt i32 %size, 2139095040
  %special = select i1 %is_nan, i32 32256, i32 31744
  %is_special = icmp uge i32 %size, 1199570944
  %chosen = select i1 %is_special, i32 %special, i32 %finite
  %signed = or i32 %chosen, %sign
  %short = trunc i32 %signed to i16
  %result = bitcast i16 %short to half
  ret half %result
}
"""


def install() -> None:
    """Add the functions if this processor needs them."""
    if machine.is_x86() and "f16c" not in isa.llvm_features():
        compiler: Any = cpu_target.target_context.codegen()
        module = binding.parse_assembly(LLVM_IR)
        module.triple, module.data_layout = compiler._llvm_module.triple, compiler._llvm_module.data_layout
        compiler._engine.add_module(module)
        compiler._engine.finalize_object()
