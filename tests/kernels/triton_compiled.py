"""Compiles every Triton kernel to PTX, which needs no GPU. test_triton.py runs it in a process of its own."""

from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kernels import triton_attention, triton_elementwise

ATTENTION = {
    "GROUP": 3,
    "HEAD_DIM": 64,
    "PADDED_DIM": 64,
    "BLOCK_SIZE": 16,
    "ROWS": 16,
    "QUERIES": 5,
    "KEYS": 32,
}
ROPE = {"NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HALF": 32, "PADDED_HALF": 32, "BLOCK_SIZE": 16, "HAS_NORM": True}
TYPES = {
    "*i32": ("query_starts", "context_lens", "block_tables"),
    "*i64": ("positions", "slot_mapping"),
    "*fp32": ("cos_sin",),
    "i64": ("block_stride", "head_stride"),
    "i32": ("num_seqs", "max_blocks", "num_heads", "num_columns", "width"),
    "fp32": ("scale", "eps"),
}


def compile_kernel(kernel, constants, element):
    """Arguments that TYPES does not name point to elements of the model's type."""
    signature = dict.fromkeys(kernel.arg_names, element)
    for kind, names in TYPES.items():
        signature |= {name: kind for name in names if name in signature}
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32)).asm["ptx"]


for element, dot_type in (("*bf16", tl.bfloat16), ("*fp32", tl.float32)):
    for kernel, constants in (
        (triton_attention._attention, ATTENTION | {"DOT_TYPE": dot_type}),
        (triton_elementwise._rope_and_cache, ROPE),
        (triton_elementwise._rms_norm, {"WIDTH": 1024, "ADD": True}),
        (triton_elementwise._silu_mul, {"BLOCK": 1024}),
    ):
        assert ".target sm_90" in compile_kernel(kernel, constants, element)
