"""Asking a GPU's memory for what a load will want later."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl


@triton.jit
def prefetch(pointers):
    """Has the lines that hold ``pointers`` brought into the second-level cache; nothing waits for them.

    Triton has no word for it; PTX has, which only NVIDIA's GPUs take and no interpreter.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
