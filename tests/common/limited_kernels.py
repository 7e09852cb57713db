"""Kernels that Triton's interpreter cannot run, and some that make mistakes which look much the same."""
# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

import inspect

import torch
import triton
import triton.language as tl

import attnfuzz

SMALL = attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,))


@triton.jit
def assembly(p, TILE: tl.constexpr):
    o = tl.arange(0, TILE)
    tl.store(p + o, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(p + o)], tl.float32, True, 1))


@triton.jit
def wrapped_constant(p, TILE: tl.constexpr):
    tl.store(p, TILE.value)


def driver():
    triton.runtime.driver.active.get_current_device()


@triton.jit
def static_assertion(p, TILE: tl.constexpr):
    tl.static_assert(TILE == 16, "tiles of 16 only")
    tl.store(p, 0.0)


@triton.jit
def absent_axis(p, TILE: tl.constexpr):
    tl.store(p, tl.sum(tl.zeros([TILE], tl.float32), axis=1))


@triton.jit
def unknown_name(p, TILE: tl.constexpr):
    tl.store(p, tl.load(p).to(tl.no_such_type))


@triton.jit
def unknown_attribute(p, TILE: tl.constexpr):
    tl.store(p, tl.load(p).no_such_method())


@triton.jit
def odd_range(p, TILE: tl.constexpr):
    tl.store(p + tl.arange(0, TILE - 1), 0.0)


@triton.jit
def endless_loop(p, TILE: tl.constexpr):
    step = (tl.load(p) * 0.0).to(tl.int32)
    for start in range(0, TILE, step):
        tl.store(p + start, 0.0)


def needs(mistake, *, only_longer_than=-1):
    """An eager kernel that launches ``mistake``, or calls it, for cases with a sequence that is long enough."""

    def run(inputs):
        if max(inputs.seq_lens.tolist()) > only_longer_than:
            if inspect.isfunction(mistake):
                mistake()
            else:
                mistake[(1,)](torch.zeros(32 * 32), TILE=32)
        out, lse = inputs.out.zero_(), torch.full_like(inputs.lse, -torch.inf)
        group = inputs.q.shape[1] // inputs.k.shape[2]
        for i, length in enumerate(inputs.seq_lens.tolist()):
            for head in range(inputs.q.shape[1] if length else 0):
                scores = inputs.scale * (inputs.k[i, :length, head // group] @ inputs.q[i, head])
                out[i, head] = scores.softmax(0) @ inputs.v[i, :length, head // group]
                lse[i, head] = scores.logsumexp(0)
        return out, lse

    return run


def not_implemented():
    raise NotImplementedError("inline_asm not supported in interpreter mode")


def pretended_limit():
    raise AttributeError("'InterpreterBuilder' object has no attribute 'get_bf16'")


def missing_key():
    return {}[tl.float32]


def declared(name, run):
    run.__name__ = name
    return attnfuzz.kernel("dense_decode", supports=SMALL)(run)


with_assembly = declared("with_assembly", needs(assembly))
sometimes_with_assembly = declared("sometimes_with_assembly", needs(assembly, only_longer_than=8))
with_wrapped_constant = declared("with_wrapped_constant", needs(wrapped_constant))
with_driver = declared("with_driver", needs(driver))
with_static_assertion = declared("with_static_assertion", needs(static_assertion))
with_absent_axis = declared("with_absent_axis", needs(absent_axis))
with_unknown_name = declared("with_unknown_name", needs(unknown_name))
with_unknown_attribute = declared("with_unknown_attribute", needs(unknown_attribute))
with_odd_range = declared("with_odd_range", needs(odd_range))
with_endless_loop = declared("with_endless_loop", needs(endless_loop))
with_not_implemented = declared("with_not_implemented", needs(not_implemented))
with_pretended_limit = declared("with_pretended_limit", needs(pretended_limit))
with_missing_key = declared("with_missing_key", needs(missing_key))


def expect_int64(inputs):
    """A check as launchers have it, without words; pytest does not rewrite it here."""
    assert inputs.seq_lens.dtype == torch.int64
