#!/usr/bin/python3
"""Fake `nvidia-smi` of the lab: `-L` and `--query-gpu=FIELDS --format=csv[,noheader][,nounits]` from the fake NVML."""

from __future__ import annotations

import ctypes
import sys

UNITS = {"utilization.gpu": "%", "memory.used": "MiB", "memory.total": "MiB", "power.draw": "W"}


class Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Utilisation(ctypes.Structure):
    """nvmlUtilization_t, percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Library:
    """NVML, as far as the fake has it."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._nvml.nvmlErrorString.restype = ctypes.c_char_p
        self.call("nvmlInit_v2")

    def call(self, function: str, *arguments: object) -> None:
        """Call it, and end the program with NVML's words on an error."""
        result = getattr(self._nvml, function)(*arguments)
        if result != 0:
            sys.exit(f"Failed to run {function}: {self._nvml.nvmlErrorString(result).decode()}")

    def unsigned(self, function: str, *arguments: object) -> int:
        """The unsigned integer that it gives back through its last argument."""
        value = ctypes.c_uint()
        self.call(function, *arguments, ctypes.byref(value))
        return value.value

    def text(self, function: str, *arguments: object) -> str:
        """The text that it gives back."""
        buffer = ctypes.create_string_buffer(96)
        self.call(function, *arguments, buffer, len(buffer))
        return buffer.value.decode()

    def device(self, index: int) -> ctypes.c_void_p:
        """Handle of a GPU."""
        handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        return handle

    def fields(self, index: int) -> dict[str, str]:
        """All fields that can be asked for."""
        device = self.device(index)
        memory, utilisation = Memory(), Utilisation()
        self.call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        self.call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(utilisation))
        return {
            "index": str(index),
            "name": self.text("nvmlDeviceGetName", device),
            "uuid": self.text("nvmlDeviceGetUUID", device),
            "driver_version": self.text("nvmlSystemGetDriverVersion"),
            "temperature.gpu": str(self.unsigned("nvmlDeviceGetTemperature", device, 0)),
            "utilization.gpu": str(utilisation.gpu),
            "memory.used": str(memory.used >> 20),
            "memory.total": str(memory.total >> 20),
            "power.draw": f"{self.unsigned('nvmlDeviceGetPowerUsage', device) / 1000:.2f}",
        }


def main(arguments: list[str]) -> None:
    """Print the list or the table."""
    library = Library()
    gpus = [library.fields(index) for index in range(library.unsigned("nvmlDeviceGetCount_v2"))]
    options = dict(argument.partition("=")[::2] for argument in arguments)
    if "--query-gpu" not in options:
        for gpu in gpus:
            print(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})")
        return
    names = [name.strip() for name in options["--query-gpu"].split(",")]
    unknown = [name for name in names if gpus and name not in gpus[0]]
    if unknown:
        sys.exit(f'Field "{unknown[0]}" is not a valid field to query.')
    style = options.get("--format", "csv").split(",")
    units = {} if "nounits" in style else UNITS
    if "noheader" not in style:
        print(", ".join(f"{name} [{units[name]}]" if name in units else name for name in names))
    for gpu in gpus:
        print(", ".join(f"{gpu[name]} {units[name]}" if name in units else gpu[name] for name in names))


if __name__ == "__main__":
    main(sys.argv[1:])
