"""Clock and power draw of a GPU during a measurement."""

import ctypes
import statistics
import threading
from typing import Any

from ..environment import gpu_uuid

_SECONDS = 0.005
#: NVML's constant for the clock of the SMs.
_NVML_CLOCK_SM = 1


class PowerMeter:
    """Sampler of clocks and power in a ``with`` block. It drops the first half of all samples."""

    def __init__(self) -> None:
        self._nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._samples: list[tuple[int, float]] = []
        self._check(self._nvml.nvmlInit_v2())
        self._check(
            self._nvml.nvmlDeviceGetHandleByUUID(gpu_uuid().encode(), ctypes.byref(self._device))
        )

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"NVML failed with {status}")

    def _sample(self) -> tuple[int, float]:
        """Return the clock in MHz and the draw in watts."""
        values = ctypes.c_uint(), ctypes.c_uint()
        clock, power = map(ctypes.byref, values)
        self._check(self._nvml.nvmlDeviceGetClockInfo(self._device, _NVML_CLOCK_SM, clock))
        self._check(self._nvml.nvmlDeviceGetPowerUsage(self._device, power))
        return values[0].value, values[1].value / 1000

    def __enter__(self) -> "PowerMeter":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(_SECONDS):
            self._samples.append(self._sample())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def result(self) -> dict[str, dict[str, float]]:
        """Return the mean clock in MHz and draw in watts, as fields of ``Record``."""
        late = self._samples[len(self._samples) // 2 :] or [self._sample()]
        return {
            "clocks": {"sm": round(statistics.fmean(clock for clock, _ in late))},
            "power": {"draw": round(statistics.fmean(power for _, power in late))},
        }
