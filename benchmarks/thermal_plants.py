"""Boxes that heat up, for `benchmarks.thermal`: drawn from the ranges below, unknown to the controllers.

A plant is one thermal mass behind one resistance, its power given as the rise above ambient that it would reach:

    dT/dt = (ambient + idle_rise + load_rise · duty · (batch / max_batch)^alpha − T) / time_constant
    throughput = duty · (batch / max_batch)^beta        share of full throughput, under saturated load

From `THROTTLE_CELSIUS` on the hardware throttles until it is cooler by a hysteresis: clocked down to 500 MHz it yields
60 % less (document S2 of the seeds), and its load power falls by as much.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

STEP_SECONDS = 2.0
THROTTLE_CELSIUS = 85.0
THROTTLED_SHARE = 0.4
HOT_CELSIUS = 80.0
HOUR_SECONDS = 3600.0

RANGES: dict[str, tuple[float, float]] = {
    "time constant, s (log-uniform)": (30.0, 600.0),
    "sensor delay, s": (0.0, 4.0),
    "sensor noise, °C (standard deviation)": (0.05, 0.5),
    "ambient at start, °C": (15.0, 40.0),
    "ambient steps by up to, °C": (-8.0, 8.0),
    "hours from one ambient step to the next": (0.5, 6.0),
    "rise above ambient, idle, °C": (5.0, 15.0),
    "steady temperature under full load in the first ambient, °C": (70.0, 110.0),
    "alpha, power over batch": (0.3, 0.9),
    "beta, throughput over batch": (0.4, 0.9),
    "seconds without tokens after a restart": (20.0, 90.0),
    "hysteresis of the hardware's throttle, °C": (5.0, 20.0),
}
MAX_BATCHES = (4, 8, 16, 32)
AMBIENT_CELSIUS = (10.0, 45.0)
"""Ambient steps never lead out of this."""


@dataclass(frozen=True)
class Plant:
    """One box.

    Attributes:
        ambient: (seconds, °C), each from its seconds on.
        load_rise_celsius: at full batch and duty, above idle.
        seed: of its sensor's noise.
    """

    seed: int
    time_constant_seconds: float
    delay_seconds: float
    noise_celsius: float
    idle_rise_celsius: float
    load_rise_celsius: float
    alpha: float
    beta: float
    max_batch: int
    restart_seconds: float
    hysteresis_celsius: float
    ambient: tuple[tuple[float, float], ...]

    def load_rise(self, batch: int, duty: float) -> float:
        """°C above idle that it would settle at."""
        return self.load_rise_celsius * duty * float((batch / self.max_batch) ** self.alpha)

    def throughput(self, batch: int, duty: float) -> float:
        """Share of the full one."""
        return duty * float((batch / self.max_batch) ** self.beta)

    def best_throughput(self, rise_celsius: float) -> float:
        """Largest throughput of all limits whose load rise stays within a bound: each batch with the duty it allows."""
        best = 0.0
        for batch in range(1, self.max_batch + 1):
            whole = self.load_rise(batch, 1.0)
            best = max(best, self.throughput(batch, min(1.0, max(0.0, rise_celsius) / whole)))
        return best


def draw_plant(seed: int, hours: float) -> Plant:
    """A plant from the ranges; the same seed and hours give the same."""
    dice = random.Random(seed)  # noqa: S311  # a simulation, no secret

    def draw(name: str) -> float:
        return dice.uniform(*RANGES[name])

    low, high = RANGES["time constant, s (log-uniform)"]
    time_constant = math.exp(dice.uniform(math.log(low), math.log(high)))
    ambient_celsius = draw("ambient at start, °C")
    idle_rise = draw("rise above ambient, idle, °C")
    full = draw("steady temperature under full load in the first ambient, °C")
    ambient = [(0.0, ambient_celsius)]
    while ambient[-1][0] < hours * HOUR_SECONDS:
        at = ambient[-1][0] + HOUR_SECONDS * draw("hours from one ambient step to the next")
        stepped = ambient[-1][1] + draw("ambient steps by up to, °C")
        ambient.append((at, min(AMBIENT_CELSIUS[1], max(AMBIENT_CELSIUS[0], stepped))))
    return Plant(
        seed=seed,
        time_constant_seconds=time_constant,
        delay_seconds=draw("sensor delay, s"),
        noise_celsius=draw("sensor noise, °C (standard deviation)"),
        idle_rise_celsius=idle_rise,
        load_rise_celsius=full - ambient_celsius - idle_rise,
        alpha=draw("alpha, power over batch"),
        beta=draw("beta, throughput over batch"),
        max_batch=dice.choice(MAX_BATCHES),
        restart_seconds=draw("seconds without tokens after a restart"),
        hysteresis_celsius=draw("hysteresis of the hardware's throttle, °C"),
        ambient=tuple(ambient),
    )


class Running:
    """A plant under way, one `STEP_SECONDS` after the other.

    Attributes:
        celsius: true temperature.
        produced: throughput so far, in seconds of the full one. hot_seconds: spent above `HOT_CELSIUS`.
        throttle_events: how often the hardware began to throttle.
    """

    def __init__(self, plant: Plant) -> None:
        self.plant = plant
        self.celsius = plant.ambient[0][1] + plant.idle_rise_celsius
        self.produced = 0.0
        self.hot_seconds = 0.0
        self.throttle_events = 0
        self.throttling = False
        self._now = 0.0
        self._ambient = plant.ambient[0][1]
        self._next_ambient = 1
        self._keeps = math.exp(-STEP_SECONDS / plant.time_constant_seconds)
        delayed = round(plant.delay_seconds / STEP_SECONDS)
        self._sensor = deque([self.celsius] * (delayed + 1), maxlen=delayed + 1)
        self._noise = random.Random(plant.seed + 1)  # noqa: S311

    def read(self) -> float:
        """What the sensor says: late and noisy."""
        return self._sensor[0] + self._noise.gauss(0.0, self.plant.noise_celsius)

    def advance(self, load_rise: float, throughput: float) -> None:
        """One step under limits with such a load rise and throughput; 0 and 0: it computes nothing."""
        ambient = self.plant.ambient
        if self._next_ambient < len(ambient) and self._now >= ambient[self._next_ambient][0]:
            self._ambient = ambient[self._next_ambient][1]
            self._next_ambient += 1
        share = THROTTLED_SHARE if self.throttling else 1.0
        settles = self._ambient + self.plant.idle_rise_celsius + load_rise * share
        self.celsius = settles + (self.celsius - settles) * self._keeps
        self.produced += throughput * share * STEP_SECONDS
        self._now += STEP_SECONDS
        if self.celsius > HOT_CELSIUS:
            self.hot_seconds += STEP_SECONDS
        if self.throttling:
            self.throttling = self.celsius > THROTTLE_CELSIUS - self.plant.hysteresis_celsius
        elif self.celsius >= THROTTLE_CELSIUS:
            self.throttling = True
            self.throttle_events += 1
        self._sensor.append(self.celsius)


def oracle_produced(plant: Plant, hours: float, most_celsius: float = HOT_CELSIUS) -> float:
    """Throughput, in seconds of the full one, of who knows the plant and keeps it at `most_celsius` at most.

    It runs full until the plant is at that temperature, then holds it there with the best pair of batch and duty.
    Closed form for each stretch of constant ambient.
    """
    end = hours * HOUR_SECONDS
    celsius = plant.ambient[0][1] + plant.idle_rise_celsius
    produced = 0.0
    for index, (begin, ambient) in enumerate(plant.ambient):
        if begin >= end:
            break
        until = min(end, plant.ambient[index + 1][0] if index + 1 < len(plant.ambient) else end)
        base = ambient + plant.idle_rise_celsius
        settles = base + plant.load_rise_celsius
        full_seconds = until - begin
        if settles > most_celsius:
            full_seconds = min(
                full_seconds,
                plant.time_constant_seconds * math.log(max(1.0, (settles - celsius) / (settles - most_celsius))),
            )
        held_seconds = until - begin - full_seconds
        produced += full_seconds + held_seconds * plant.best_throughput(most_celsius - base)
        if held_seconds > 0:
            celsius = most_celsius
        else:
            celsius = settles + (celsius - settles) * math.exp(-full_seconds / plant.time_constant_seconds)
    return produced
