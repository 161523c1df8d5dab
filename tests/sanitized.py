"""A plugin for pytest that scripts/sanitize.py names: the C++ kernels call the plain products of sanitized.cpp."""

import ctypes

from model.attention import cpu


def pytest_configure(config):
    kernel, reason = cpu.load_library()
    assert kernel is not None, reason
    for name in cpu.library.SYMBOLS:
        setattr(kernel, name, ctypes.cast(getattr(kernel, f"plain_{name}"), ctypes.c_void_p).value)
