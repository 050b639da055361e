"""Finds and loads the C++ library of CPU kernels. Knows its C interface (engine/csrc/c_api.h), no tensors.

When the library is missing or does not fit, `load()` returns None, `reason()` says why, and one warning is logged.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import sysconfig
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

ABI_VERSION: Final = 3
FILE_NAME: Final = "libagentserve_cpu.so"

# struct asv_op: code, flags, 14 pointers, 14 integers, 4 floats.
RECORD: Final = struct.Struct("@2i14Q14i4f")

ISAS: Final = ("scalar", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated")
"""As in c_api.h. amx_emulated is what amx is, with the tiles in memory: for tests, slow."""

ROWS, SEQS, OUTPUTS = -1, -2, -3

(GATHER, RMSNORM, LINEAR, ROPE, KV_STORE, ATTENTION, CONV, DELTA, ROUTE, EXPERTS, SILU_MUL, SIGMOID_MUL, GATED_ADD) = range(13)

_library: ctypes.CDLL | None = None
_reason: str | None = None


def candidates() -> list[Path]:
    """Where an installed or locally built library may lie, best first."""
    package = Path(__file__).resolve().parent.parent
    places = [package / "_lib", Path(sysconfig.get_path("platlib")) / "engine" / "_lib"]
    return [place / FILE_NAME for place in places]


def load(path: Path | None = None) -> ctypes.CDLL | None:
    """The library, loaded once; None if there is none that fits. `path` replaces the search (tests, sanitizer builds)."""
    global _library, _reason
    if path is None and (_library is not None or _reason is not None):
        return _library
    _library, _reason = _open(path)
    if _library is None:
        log.warning("CPU kernels unavailable, using torch, which is several times slower reason=%s", _reason)
    return _library


def reason() -> str | None:
    """Why there is no library; None when it is loaded."""
    load()
    return _reason


def _open(path: Path | None) -> tuple[ctypes.CDLL | None, str | None]:
    files = [path] if path is not None else candidates()
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        return None, f"not built: no {FILE_NAME} in " + " or ".join(str(file.parent) for file in files)
    try:
        library = ctypes.CDLL(str(found))
        declare(library)
    except (OSError, AttributeError) as error:
        return None, f"{found} cannot be loaded: {error}"
    if library.asv_abi_version() != ABI_VERSION or library.asv_op_bytes() != RECORD.size:
        return None, (
            f"{found} has interface {library.asv_abi_version()} with {library.asv_op_bytes()}-byte records, "
            f"this package needs {ABI_VERSION} with {RECORD.size}: build it again"
        )
    return library, None


def declare(library: ctypes.CDLL) -> None:
    """Argument and result types of every function. Raises AttributeError where one is missing."""
    integer = ctypes.c_int
    library.asv_isa_name.restype = ctypes.c_char_p
    library.asv_isa_name.argtypes = [integer]
    library.asv_isa_supported.argtypes = [integer]
    library.asv_set_isa.argtypes = [integer]
    library.asv_set_threads.argtypes = [integer, integer]
    library.asv_pool_stats.argtypes = [ctypes.POINTER(ctypes.c_uint64)]
    library.asv_pool_stats.restype = None
    library.asv_advise_huge.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.asv_run.argtypes = [ctypes.c_char_p, integer, integer, integer, integer]
    pointer = ctypes.c_void_p
    library.asv_serve_start.argtypes = [pointer]
    library.asv_serve_start.restype = pointer
    library.asv_serve_state.argtypes = [pointer, ctypes.POINTER(ctypes.c_uint64)]
    library.asv_serve_state.restype = None
    library.asv_serve_fault.argtypes = [pointer, ctypes.c_int32, ctypes.c_int32]
    library.asv_serve_fault.restype = None
    library.asv_serve_wake.argtypes = [pointer]
    library.asv_serve_wake.restype = None
    library.asv_serve_stop.argtypes = [pointer]
    for name in ("asv_serve_config_bytes", "asv_abi_version", "asv_op_bytes", "asv_isa_best", "asv_get_isa", "asv_get_threads"):
        getattr(library, name).argtypes = []
