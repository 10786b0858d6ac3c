"""Every threshold and period of the guards, with its default. The inventory's section `guards` takes its keys,
defaults and descriptions from here; `guards.json` carries all values to the box."""

from __future__ import annotations

from dataclasses import dataclass, field

HOUR_SECONDS = 3600.0
DAY_SECONDS = 86_400.0


def setting(default: float, description: str) -> float:
    """A number with its description, for the inventory's documentation."""
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True)
class ThermalSettings:
    """Heat: the stage's limits go down above `high_celsius` and up below `low_celsius`, one step a period at most."""

    period_seconds: float = setting(2.0, "how often temperatures are read")
    high_celsius: float = setting(80.0, "above it the limits of the stage go down a step")
    low_celsius: float = setting(70.0, "below it they go up a step")
    critical_celsius: float = setting(95.0, "above it the box is unhealthy whatever the guard has done")
    down_dwell_seconds: float = setting(10.0, "from one step down to the next")
    up_dwell_seconds: float = setting(30.0, "from any step to the next step up")
    lead_seconds: float = setting(8.0, "temperatures are judged as they will be in so long along the present trend")
    urgent_celsius: float = setting(82.0, "a limit goes down in every period while more is to be expected")
    rise_celsius: float = setting(1.0, "so much warmer than at the last step down calls for the next one")
    patience_seconds: float = setting(120.0, "a step down that brought no relief within so long calls for the next one")
    step_percent: float = setting(90.0, "a step down keeps so much of the batch limit or the duty cycle")
    least_duty_percent: float = setting(25.0, "least share of the time in which the stage computes")
    pmic_celsius: float = setting(110.0, "a warmer power chip (PMIC) is unhealthy; the limits don't follow it")
    clock_lost_percent: float = setting(10.0, "a busy hot box that lost more of its clock counts as throttled")
    unknown_seconds: float = setting(60.0, "no temperature for so long is degraded")
    zone_deadline_seconds: float = setting(1.0, "a sensor that answers later is left out")
    zone_quarantine_seconds: float = setting(300.0, "a sensor that hung is asked again after so long")


@dataclass(frozen=True)
class MemorySettings:
    """Leaks and pressure."""

    period_seconds: float = setting(10.0, "how often memory is read")
    leak_mb_per_hour: float = setting(10.0, "growth of a process that counts as a leak, in 10^6 bytes")
    least_window_seconds: float = setting(1800.0, "shortest stretch after the plateau that a slope is judged over")
    warm_up_seconds: float = setting(300.0, "a process that started, or changed its layers, less long ago isn't judged")
    window_seconds: float = setting(120.0, "of each window of that length the floor of memory is kept")
    level_shift_mb: float = setting(1.0, "weights that change by more begin a new judgement, in 10^6 bytes")
    plateau_seconds: float = setting(1800.0, "so long without growth is a plateau; what grows after one may be a leak")
    step_mb: float = setting(4.0, "a rise within a few windows that is larger may be an arena's step, in 10^6 bytes")
    settling_mb: float = setting(96.0, "without a plateau, growth by more than that may be a leak, in 10^6 bytes")
    steady_seconds: float = setting(9000.0, "without a plateau, growth at a steady rate for so long may be a leak")
    settled_percent: float = setting(
        85.0, "growth whose second half is slower than that share of its first is settling"
    )
    unseen_block_mb: float = setting(12.0, "a leak in blocks of that size that hasn't struck yet isn't ruled out")
    trim_period_seconds: float = setting(600.0, "an idle stage gives freed memory back at most so often")
    least_available_percent: float = setting(8.0, "less memory available than that is pressure")
    critical_available_percent: float = setting(4.0, "less is unhealthy: the kernel is about to kill a process")
    recovered_available_percent: float = setting(12.0, "more memory available than that ends the shedding")
    pressure_some_percent: float = setting(20.0, "share of a minute in which some task waited for memory (PSI)")
    gpu_memory_percent: float = setting(85.0, "above it the box sheds new sequences")
    gpu_recovered_percent: float = setting(75.0, "below it the box takes new sequences again")
    gpu_deadline_seconds: float = setting(2.0, "a GPU driver that answers later is left out")
    gpu_retry_seconds: float = setting(300.0, "a GPU driver that is absent or fails is asked again after so long")
    restarts_per_day: float = setting(4.0, "restarts for leaks; then a person is called")
    ask_again_seconds: float = setting(300.0, "a restart or shedding not done yet is asked for again after so long")
    restart_apart_seconds: float = setting(HOUR_SECONDS, "from one restart for a leak to the next")
    rolling_restart_hours: float = setting(0.0, "restart the stage every so many hours, as a last resort; 0: never")


@dataclass(frozen=True)
class ClockSettings:
    """Time."""

    period_seconds: float = setting(16.0, "how often the clock is judged")
    offset_milliseconds: float = setting(1.0, "largest offset inside a pipeline; more is degraded")
    step_milliseconds: float = setting(128.0, "above it the clock is set at once, below it is slewed")
    query_seconds: float = setting(3.0, "chronyc or a time server must have answered by then")
    name_seconds: float = setting(600.0, "how long the address of a time server's name is used")
    kiss_seconds: float = setting(HOUR_SECONDS, "a time server that asks to be left alone is, for so long")
    root_distance_seconds: float = setting(3.0, "a time server that may be off by more itself is not believed")
    local_stratum: float = setting(
        10.0,
        "a time server of this stratum or above is taken to have no source itself (chrony's `local`); "
        "16: a server without a source is as good as any, as at a site that has none",
    )
    silent_seconds: float = setting(120.0, "time servers silent for so long leave the clock free-running")
    timesyncd_seconds: float = setting(
        4096.0, "timesyncd that set the clock longer ago has lost its server: twice its longest poll interval"
    )
    settle_seconds: float = setting(120.0, "a clock that is not synchronised is left alone so long after boot")
    loose_offset_milliseconds: float = setting(100.0, "largest offset of a box that is in no pipeline")
    drift_ppm: float = setting(200.0, "a clock that runs faster or slower by more is degraded")
    step_kept_seconds: float = setting(HOUR_SECONDS, "a step of the clock that nothing explains is shown so long")
    future_years: float = setting(20.0, "a clock so long after the release was built is insane, as one before it")
    corrections_per_day: float = setting(12.0, "corrections by the guard; then a person is called")
    correction_apart_seconds: float = setting(300.0, "from one correction to the next")


@dataclass(frozen=True)
class LivenessSettings:
    """Processes."""

    period_seconds: float = setting(2.0, "how often programs are looked at")
    answer_seconds: float = setting(5.0, "a program's socket must have answered by then")
    silent_rounds: float = setting(3.0, "a running program that fails to answer so often in a row is hung")
    grace_seconds: float = setting(120.0, "a program that started less long ago is left alone while it loads")
    hung_seconds: float = setting(20.0, "a stage with work that finishes no step for so long is hung")
    restarts_per_day: float = setting(10.0, "restarts of hung programs, each; then a person is called")
    restart_apart_seconds: float = setting(60.0, "from one restart of a program to the next")
    fatal_restart_apart_seconds: float = setting(900.0, "a program that supervisord has given up is started so often")
    fatal_restarts_per_day: float = setting(24.0, "and at most so often a day")
    stopped_rounds: float = setting(2.0, "a process that SIGSTOP holds at so many looks in a row is killed")
    blocked_seconds: float = setting(60.0, "a silent process that waits in the kernel (state D) for so long is killed")
    loading_seconds: float = setting(1800.0, "a stage that loads for longer is hung")
    down_rounds: float = setting(2.0, "a program that has ended at so many looks in a row is started")
    stopped_start_seconds: float = setting(
        900.0, "a program that somebody stopped, and that stays so for so long, is started; 0: never"
    )
    flaps_per_hour: float = setting(3.0, "a program that restarts more often is degraded")


@dataclass(frozen=True)
class SurroundingsSettings:
    """Disk, network, power, kernel."""

    period_seconds: float = setting(30.0, "how often the surroundings are looked at")
    disk_percent: float = setting(80.0, "more of a file system used is degraded")
    disk_full_percent: float = setting(95.0, "more is unhealthy: old logs go")
    inodes_percent: float = setting(90.0, "more of its inodes used is degraded")
    drive_celsius: float = setting(70.0, "a warmer SSD is degraded")
    drive_period_seconds: float = setting(300.0, "how often drives are asked (smartctl)")
    link_flaps_per_hour: float = setting(6.0, "more changes of a link's carrier are degraded")
    log_mb_per_hour: float = setting(50.0, "logs that grow faster are degraded, in 10^6 bytes")
    log_drops_per_day: float = setting(24.0, "how often old logs are dropped")
    log_drop_apart_seconds: float = setting(60.0, "from one drop of old logs to the next")
    log_window_seconds: float = setting(600.0, "shortest stretch that the growth of logs is judged over")
    file_seconds: float = setting(2.0, "a file of the kernel or a file system must have answered by then")
    quarantine_seconds: float = setting(300.0, "one that did not is asked again after so long")
    tool_seconds: float = setting(10.0, "smartctl, systemctl, dmesg or journalctl must have answered by then")
    emmc_used_percent: float = setting(90.0, "more of an eMMC's estimated life used is degraded")
    units_period_seconds: float = setting(300.0, "how often systemd is asked for failed units")
    kernel_log_period_seconds: float = setting(300.0, "how often a tool reads the kernel's log, if no counter moves")
    oom_shown_seconds: float = setting(HOUR_SECONDS, "a kill for memory counts as news for so long")


@dataclass(frozen=True)
class GuardSettings:
    """All of them."""

    thermal: ThermalSettings = field(default_factory=ThermalSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    clock: ClockSettings = field(default_factory=ClockSettings)
    liveness: LivenessSettings = field(default_factory=LivenessSettings)
    surroundings: SurroundingsSettings = field(default_factory=SurroundingsSettings)
