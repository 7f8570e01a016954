"""`python -m tests.support.compile_for_hopper`: compile every Triton kernel for an H200, at SD 1.5's
shapes, without one.

The wrappers run on tensors of a CPU; where they would launch a kernel, Triton's compiler is called with the launch's
own arguments. Prints a JSON line for each kernel: its name, options, loads by width, and bytes of shared memory.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.operands import ConvEpilogue, DevicePointer
from fisedit.sparse_kernels.triton import backend, launch

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def compiled(kernel, *args, grid=None, warmup=None, **kwargs):
    """Stands in for a launch: signature, constants and divisibility as the launcher would find them."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=HOPPER, options=options)
    said = {name: value for name, value in constants.items() if name.isupper()}
    report = {
        "kernel": kernel.__name__,
        **options,
        **said,
        **loads(made.asm["ptx"]),
        **arrival(made.asm["ptx"]),
        "waits": waits(made.asm["ptx"]),
        "shared": made.metadata.shared,
    }
    sys.stdout.write(json.dumps(report) + "\n")
    assert made.asm["cubin"]


def loads(ptx):
    """Instructions that read memory sixteen bytes at a time, and two at a time."""
    wide = len(re.findall(r"cp\.async\S* .*, 0x10\b|ld\.global\S*v4", ptx))
    return {"wide": wide, "narrow": len(re.findall(r"ld\.global\S*b16", ptx))}


def waits(ptx):
    """Whether a program waits for the kernel before its own before it reads or writes anything."""
    before, waited, _ = ptx.partition("griddepcontrol.wait")
    return bool(waited) and not re.search(r"\b(ld|st|atom)\.global|cp\.async", before)


def arrival(ptx):
    """Whether a program counts when all its threads have written, and then reads past stale caches."""
    before, counted, after = ptx.partition("atom.")
    if not counted:
        return {}
    written, waited, read = before.rfind("st.global"), before.rfind("bar.sync"), after.find("ld.global.cg")
    return {
        "counted": after.split()[0],
        "written_first": 0 <= written < waited,
        "read_after": "ld.global.cg" not in before and 0 <= after.find("bar.sync") < read,
    }


def resnet(dtype, items, rows, channels, size):
    """Half of a ResNet block."""
    x, halo = torch.empty(items, rows, channels, dtype=dtype), torch.empty(items, rows // 2, channels, dtype=dtype)
    weight = torch.empty(channels, channels, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
    gamma, taps = torch.empty(channels, dtype=dtype), torch.empty(items, rows, 9, dtype=torch.int32)
    num_rows, totals = torch.empty(items, dtype=torch.int32), torch.empty(2, 32, 2, dtype=torch.float64)
    norm, _ = backend.group_norm_affine(x, x, totals, num_rows, size * channels // 32, gamma, gamma, 1e-5)
    parts = torch.empty(items, rows, 64)
    backend.summed_group_norm_affine(x, parts, totals, num_rows, size * channels // 32, gamma, gamma, 1e-5)
    backend.norm_conv3x3(x, halo, taps, weight, gamma, norm, ConvEpilogue(torch.empty(1, channels, dtype=dtype), x))
    beside(dtype, x, num_rows, totals, taps, size)
    return x, norm


def beside(dtype, x, num_rows, totals, taps, size):
    """A ResNet block of two maps side by side: statistics, the first conv, the second one with the shortcut."""
    items, rows, channels = x.shape
    recorded, gamma = torch.empty(items, rows, 2 * channels, dtype=dtype), torch.empty(2 * channels, dtype=dtype)
    norm, _ = backend.group_norm_affine(
        (x, x.clone()), recorded, totals, num_rows, size * channels // 16, gamma, gamma, 1e-5
    )
    wide = torch.empty(channels, 2 * channels, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
    more = torch.empty(channels, 2 * channels, dtype=dtype)
    backend.norm_conv3x3((x, x.clone()), recorded, taps, wide, None, norm)
    weight = torch.empty(channels, channels, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
    backend.norm_conv3x3(
        x, x, taps, weight, None, norm[..., :channels].contiguous(), ConvEpilogue(shortcut=((x, x.clone()), more, None))
    )


def transformer(dtype, x, norm, size):
    """A transformer's kernels on a ResNet block's rows."""
    items, rows, channels = x.shape
    gamma, square = torch.empty(channels, dtype=dtype), torch.empty(channels, channels, dtype=dtype)
    layer, wide = (gamma, gamma, 1e-5), torch.empty(8 * channels, channels, dtype=dtype)
    placement = RowPlacement.empty(items, rows, size, torch.device("cpu"))
    backend.norm_linear(x, square, gamma, affine=norm)
    packed = backend.norm_linear(x, wide[: 3 * channels], None, layer_norm=layer)
    recorded = torch.empty(2, size, channels, dtype=dtype)
    backend.attention(*packed.chunk(3, -1), recorded, recorded, placement, 8)
    numbers, scales = torch.empty(2, size, channels, dtype=torch.int8), torch.empty(2, size, 8, dtype=dtype)
    backend.attention(*packed.chunk(3, -1), numbers, numbers, placement, 8, (scales, scales))
    plain, byte, unit = (
        DevicePointer(torch.zeros(1, dtype=torch.int64), t.shape, t.dtype) for t in (recorded, numbers, scales)
    )
    backend.attention(*packed.chunk(3, -1), plain, plain, placement, 8)
    backend.attention(*packed.chunk(3, -1), byte, byte, placement, 8, (unit, unit))
    floats = numbers.view(torch.float8_e4m3fn)
    backend.attention(*packed.chunk(3, -1), floats, floats, placement, 8, (scales, scales))
    small = byte._replace(dtype=torch.float8_e4m3fn)
    backend.attention(*packed.chunk(3, -1), small, small, placement, 8, (unit, unit))
    backend.norm_linear(x, square, gamma, residual=x)
    gated = backend.norm_geglu(x, wide, torch.empty(8 * channels, dtype=dtype), layer)
    backend.norm_linear((gated, x), torch.empty(channels, 5 * channels, dtype=dtype), gamma, residual=x)
    text = torch.empty(items, 77, channels, dtype=dtype)
    backend.cross_attention(x, layer, square, text, text, 8)


def ends(dtype):
    """The resamplers' plain conv, the last conv's four channels, and the time."""
    x = torch.empty(2, 256, 320, dtype=dtype)
    taps = torch.empty(2, 256, 9, dtype=torch.int32)
    backend.norm_conv3x3(x, x[:, :128], taps, torch.empty(4, 320, 3, 3, dtype=dtype), torch.empty(4, dtype=dtype))
    times = [torch.empty(1280, wide, dtype=dtype) for wide in (320, 1280)]
    backend.time_projections(
        torch.empty(1), torch.empty(160), [(weight, torch.empty(1280, dtype=dtype)) for weight in times]
    )


def main(names: list[str]) -> None:
    """Compile in each named precision: edits of 5 % and 50 %, and sixteen at once; without a name, fp16 and 5 %."""
    JITFunction.run = compiled
    launch.PDL, launch._launches_dependents = True, lambda device: True  # the longer form of every kernel
    for dtype in [getattr(torch, name) for name in names] or [torch.float16]:
        transformer(dtype, *resnet(dtype, 2, 256, 320, 4096), 4096)
        transformer(dtype, *resnet(dtype, 2, 32, 1280, 256), 256)
        resnet(dtype, 2, 16, 1280, 64)
        if names:
            transformer(dtype, *resnet(dtype, 2, 2048, 320, 4096), 4096)
            transformer(dtype, *resnet(dtype, 32, 96, 640, 1024), 1024)
        ends(dtype)


if __name__ == "__main__":
    main(sys.argv[1:])
