"""Compiles every Triton kernel for sm_90, which needs no GPU. test_triton.py runs it in a process of its own."""

import torch
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kernels import (
    triton_attention,
    triton_blocks,
    triton_decode_attention,
    triton_elementwise,
    triton_sampling,
)
from kernels.triton_attention_keys import key_tile

SHARED_BYTES = 227 * 1024  # what one program of an sm_90 may have
ROPE = {"NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HALF": 32, "PADDED_HALF": 32, "BLOCK_SIZE": 16, "HAS_NORM": True}
TYPES = {
    "*i32": ("query_starts", "context_lens", "block_tables", "limits", "tokens", "packed"),
    "*i64": ("positions", "slot_mapping", "top_ks", "keys", "block_ids"),
    "*fp32": ("cos_sin", "partial", "peaks", "totals", "logits", "temperatures", "best"),
    "*fp64": ("top_ps", "sums"),
    "i64": ("block_stride", "head_stride"),
    "i32": (
        "num_seqs",
        "max_blocks",
        "num_heads",
        "num_columns",
        "num_splits",
        "width",
        "vocab_size",
        "num_chunks",
    ),
    "fp32": ("scale", "eps"),
}


def compile_kernel(kernel, constants, element=None):
    """Arguments that TYPES does not name point to elements of the model's type."""
    signature = dict.fromkeys(kernel.arg_names, element)
    for kind, names in TYPES.items():
        signature |= {name: kind for name in names if name in signature}
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32))
    ptx = compiled.asm["ptx"]
    assert ".target sm_90" in ptx, kernel
    assert compiled.metadata.shared <= SHARED_BYTES, (kernel, constants, compiled.metadata.shared)
    return ptx


def compile_attention(dtype, dot_type, head_dim):
    element = f"*{dot_type.name}"
    rows = 64 if dtype.itemsize == 2 else 16
    head = {"HEAD_DIM": head_dim, "PADDED_DIM": head_dim}
    keys = {"GROUP": 3, "BLOCK_SIZE": 16, "KEYS": key_tile(dtype, head_dim), "DOT_TYPE": dot_type}
    tile = head | keys | {"ROWS": rows, "QUERIES": rows // 3}
    compile_kernel(triton_attention._attention, tile, element)
    compile_kernel(triton_decode_attention._attend_split, head | keys | {"ROWS": 16, "SPLIT": 256}, element)
    compile_kernel(triton_decode_attention._merge_splits, head | {"SPLIT": 256, "TILE": 16}, element)


def compile_elementwise(element):
    compile_kernel(triton_elementwise._rope_and_cache, ROPE, element)
    compile_kernel(triton_elementwise._rms_norm, {"WIDTH": 1024, "ADD": True}, element)
    compile_kernel(triton_elementwise._silu_mul, {"BLOCK": 1024}, element)


def compile_sampling():
    """Every argument has a type of its own. Noise needs a logarithm that is right near 1."""
    compile_kernel(triton_sampling._find_limits, {"CHUNK": 4096})
    draw = compile_kernel(triton_sampling._draw_chunk, {"CHUNK": 4096})
    assert "lg2.approx" not in draw and "div.full" not in draw
    compile_kernel(triton_sampling._choose, {"CHUNKS": 32})


for dtype, dot_type in ((torch.bfloat16, tl.bfloat16), (torch.float32, tl.float32)):
    compile_attention(dtype, dot_type, 128)
    compile_elementwise(f"*{dot_type.name}")
compile_attention(torch.bfloat16, tl.bfloat16, 64)
for gathers in (True, False):
    compile_kernel(triton_blocks._copy_blocks, {"CHUNK": 2048, "GATHERS": gathers}, "*i16")
compile_sampling()
