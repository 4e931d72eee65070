"""A fingerprint of a kernel. Two are equal only if compiling the kernels would give the same code.

Numba's cache depends on a kernel's bytecode and closure, but not on the device functions that it calls. This module
walks the whole tree: code, constants, closures, and the globals that the code names, through all functions. A kernel
that refers to an object unknown to the walk is not cached.
"""

import hashlib
import sys
import types
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np

# Functions and classes of these are identified by name. Their versions are part of the fingerprint.
LIBRARIES = {
    "numba": "numba",
    "numba_cuda": "numba-cuda",
    "llvmlite": "llvmlite",
    "numpy": "numpy",
    "cuda": "cuda-bindings",
    "ml_dtypes": "ml_dtypes",
    "builtins": None,
    "math": None,
    "operator": None,
    "functools": None,
    "typing": None,
    "nvshmem": "nvshmem4py-cu13",
}
COMPILERS = (
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvrtc",
    "nvidia-nvjitlink",
    "nvidia-nvvm",
    "cuda-core",
    "nvidia-nvshmem-cu13",
)
PACKAGE = __name__.partition(".")[0]
DECORATORS = f"{PACKAGE}.device.gpu_decorators"
FOLDER = Path(__file__).parent.parent  # of the package
# of Numba and llvmlite
TYPE_MODULES = ("abstract", "containers", "functions", "misc", "npytypes", "scalars", "types")
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), np.generic, np.dtype)


class Unknown(Exception):
    """The walk met an object and does not know how it affects the compiled code."""


def fingerprint(function, *more):
    """Hex digest of a function with everything it refers to, and of more plain values. None if an object is unknown."""
    walk = _Walk()
    try:
        walk.value(more)
        walk.value(function)
    except Unknown:
        return None
    walk.put(versions(), source_digest())
    return walk.digest.hexdigest()


@cache
def versions():
    """Versions of Python and of every package that compiles kernels."""
    names = sorted({name for name in LIBRARIES.values() if name} | set(COMPILERS))
    return repr((sys.version_info[:3], [(name, _version(name)) for name in names]))


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def source_digest():
    """Digest of the source of kernels and intrinsics."""
    return _digest([*(FOLDER / "device").glob("*.py"), *(FOLDER / "kernels").rglob("*.py"), FOLDER / "layout.py"])


@cache
def package_digest():
    """Digest of all source of this package. It determines which kernels a run needs."""
    return _digest(FOLDER.rglob("*.py"))


def _digest(files):
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(FOLDER).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class _Walk:
    """Feeds everything that a function refers to into a digest, each object once."""

    def __init__(self):
        self.digest = hashlib.sha256()
        self._seen = {}
        self._alive = []  # keeps the objects alive, so their ids stay unique

    def put(self, *words):
        for word in words:
            raw = word if isinstance(word, bytes) else str(word).encode()
            self.digest.update(b"%d:" % len(raw) + raw)

    def value(self, v):
        if isinstance(v, PLAIN):
            self.put(type(v).__name__, repr(v))
            return
        # Whether equal constants are the same object depends on where Python got the bytecode.
        if isinstance(v, tuple):
            self.items(v)
            return
        if isinstance(v, types.CodeType):
            self.code(v)
            return
        # device_fn shares equal functions, so a namespace may belong to another kernel: use its contents instead.
        if isinstance(v, types.ModuleType) and v.__spec__ is None:
            made = {name: x for name, x in sorted(vars(v).items()) if not name.startswith("__")}
            self.put("namespace", v.__name__)
            self.value(made)
            return
        if id(v) in self._seen:
            self.put("seen", self._seen[id(v)])
            return
        self._seen[id(v)] = len(self._seen)
        self._alive.append(v)
        if isinstance(v, list):
            self.items(v)
        elif isinstance(v, dict):
            self.put("dict", len(v))
            for key, item in v.items():
                self.value(key)
                self.value(item)
        elif isinstance(v, (set, frozenset)):
            self.put("set", repr(sorted(map(repr, v))))
        elif isinstance(v, types.ModuleType) and v.__name__.partition(".")[0] in (*LIBRARIES, PACKAGE):
            self.put("module", v.__name__)
        elif isinstance(v, types.FunctionType):
            self.function(v)
        elif isinstance(getattr(v, "py_func", None), types.FunctionType):  # a device function
            self.put("device function", repr(sorted(map(str, getattr(v, "targetoptions", {}).items()))))
            self.function(v.py_func)
        elif isinstance(getattr(v, "_defn", None), types.FunctionType):  # an intrinsic
            self.put("intrinsic")
            self.function(v._defn)
        elif isinstance(v, type) and v.__module__.partition(".")[0] == PACKAGE:
            self.put("class", v.__module__, v.__qualname__)  # its source is in the digest
        elif _library(v) and hasattr(v, "__qualname__"):  # a class or a function
            self.put("library", _library(v), v.__qualname__)
        elif _library(v) and type(v).__module__.rpartition(".")[2] in TYPE_MODULES:
            self.put("type", type(v).__name__, str(v))
        else:
            raise Unknown(repr(v))

    def items(self, sequence):
        self.put(type(sequence).__name__, len(sequence))
        for item in sequence:
            self.value(item)

    def function(self, f):
        if _library(f) or f.__module__ == DECORATORS:  # DECORATORS' source is in the digest
            self.put("library", f.__module__, f.__qualname__)
            return
        self.put("function", f.__name__)
        self.code(f.__code__)
        self.value(f.__defaults__)
        self.value(f.__kwdefaults__)
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
            self.put(name)
            if _is_filled(cell):
                self.value(cell.cell_contents)
            else:
                self.put("never assigned")  # a name in a branch that this kernel does not have
        for name in sorted(_names(f.__code__)):
            if name in f.__globals__ and not name.startswith("__"):
                self.put(name)
                self.value(f.__globals__[name])

    def code(self, code):
        self.put("code", code.co_code, repr((code.co_names, code.co_varnames, code.co_freevars, code.co_flags)))
        self.value(code.co_consts)


def _is_filled(cell):
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


def _names(code):
    """The names that a function and its inner functions look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _library(v):
    """The module that defines a function or class, or another object's class, if it belongs to a library; else None."""
    module = getattr(v, "__module__", None)
    return module if isinstance(module, str) and module.partition(".")[0] in LIBRARIES else None
