"""CUDA's virtual memory management: addresses of a GPU apart from the memory behind them.

Through the driver's own library, which torch has loaded. Struct layouts and signatures are those of cuda.h from CUDA
11.3 on (`CUmemAllocationProp`, `CUmemLocation`, `CUmemAccessDesc`; CUDA Driver API, "Virtual Memory Management").
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable

import torch
from jaxtyping import UInt8
from torch import Tensor

_LIBRARY = "libcuda.so.1"

_SUCCESS = 0
_OUT_OF_MEMORY = 2
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: the only type that there is
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM

_Address = ctypes.c_ulonglong  # CUdeviceptr
_Handle = ctypes.c_ulonglong  # CUmemGenericAllocationHandle
_Flags = ctypes.c_ulonglong
_Size = ctypes.c_size_t


class _Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    """The struct in CUmemAllocationProp"""

    _fields_ = (
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", _Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuCtxGetCurrent": (ctypes.POINTER(ctypes.c_void_p),),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_Size), ctypes.POINTER(_AllocationProperties), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_Address), _Size, _Size, _Address, _Flags),
    "cuMemAddressFree": (_Address, _Size),
    "cuMemCreate": (ctypes.POINTER(_Handle), _Size, ctypes.POINTER(_AllocationProperties), _Flags),
    "cuMemRelease": (_Handle,),
    "cuMemMap": (_Address, _Size, _Size, _Handle, _Flags),
    "cuMemSetAccess": (_Address, _Size, ctypes.POINTER(_Access), _Size),
    "cuMemUnmap": (_Address, _Size),
}


class DriverError(RuntimeError):
    """A call of CUDA's driver was refused."""


class _Owner:
    """The owner of a tensor over driver memory: the CUDA array interface, version 3."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaVirtualMemory:
    """The memory of one GPU. All sizes and addresses are multiples of `granule` bytes.

    Methods raise `DriverError`, or `torch.OutOfMemoryError` where the GPU has no memory left. Nothing may be unmapped
    while a kernel that could touch it still runs.
    """

    def __init__(self, device: int) -> None:
        """``device``: its index. Makes torch's context the one of this thread."""
        torch.cuda.synchronize(device)
        self.device = torch.device("cuda", device)
        self._library = _load()
        self._properties = _AllocationProperties(type=_PINNED, location=_Location(_ON_DEVICE, device))
        self._access = _Access(_Location(_ON_DEVICE, device), _READ_AND_WRITE)
        context, granule = ctypes.c_void_p(), _Size()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            raise DriverError("no CUDA context is current in this thread after torch.cuda.synchronize()")
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(self._properties), _MINIMUM)
        self.granule = granule.value

    def reserve(self, nbytes: int) -> int:
        """The address of ``nbytes`` that nothing is behind: touching them is an illegal memory access."""
        address = _Address()
        self._call("cuMemAddressReserve", ctypes.byref(address), nbytes, 0, 0, 0)
        return address.value

    def give_back(self, address: int, nbytes: int) -> None:
        """End a reservation, of which nothing is mapped any more."""
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> int:
        """A handle of memory without an address; whatever it holds."""
        handle = _Handle()
        self._call("cuMemCreate", ctypes.byref(handle), nbytes, ctypes.byref(self._properties), 0)
        return handle.value

    def release(self, handle: int) -> None:
        """Let memory go once it is mapped nowhere."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put all of the memory, which is as large, behind an address; it may be behind others as well."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int) -> None:
        """Permit reading and writing; all of these addresses have memory behind them."""
        self._call("cuMemSetAccess", address, nbytes, ctypes.byref(self._access), 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Take away the memory behind these addresses, which begin and end where mappings do."""
        self._call("cuMemUnmap", address, nbytes)

    def synchronize(self) -> None:
        """Wait until nothing runs any more that could touch the memory."""
        torch.cuda.synchronize(self.device)

    def tensor(
        self, address: int, nbytes: int, *, once_unused: Callable[[], None] | None = None
    ) -> UInt8[Tensor, " nbytes"]:
        """Mapped memory as a tensor. ``once_unused`` is called when no tensor refers to it any more."""
        owner = _Owner(address, nbytes)
        if once_unused is not None:
            weakref.finalize(owner, once_unused).atexit = False  # tensors may outlive the interpreter
        found = torch.as_tensor(owner, dtype=torch.uint8, device=self.device)
        if found.data_ptr() != address:
            raise DriverError(f"torch copied the memory at {address:#x} instead of using it")
        return found

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result == _SUCCESS:
            return
        text = f"{name} failed with {self._error_name(result)}"
        if result == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{text}: the GPU has no memory left; let fewer processes share it")
        raise DriverError(text)

    def _error_name(self, result: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(result, ctypes.byref(name))
        return name.value.decode() if name.value else f"error {result}"


@functools.cache
def virtual_memory(device: int) -> CudaVirtualMemory:
    """The virtual memory of a GPU, made once per process."""
    return CudaVirtualMemory(device)


def _load() -> ctypes.CDLL:
    """The driver with the signatures of what is called. Raises `DriverError`."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
        library.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
        library.cuGetErrorName.restype = ctypes.c_int
    except (OSError, AttributeError) as error:
        raise DriverError(f"{_LIBRARY} has no virtual memory management ({error}); it needs CUDA 11.3") from error
    return library
