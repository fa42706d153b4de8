"""Learning rate as a pure function of the update, so that saving a run saves its schedule with the step number."""

from __future__ import annotations

import math

from trainfit.train.recipe import ScheduleSettings


def learning_rate_at(update: int, total_updates: int, peak: float, settings: ScheduleSettings) -> float:
    """Rate of the update-th optimizer update, counted from 0 (updates, never micro batches).

    It rises linearly to peak at update warmup_steps - 1, then falls along a half cosine and reaches
    min_ratio * peak at the last update; past the end it stays there.
    """
    warmup = settings.warmup_steps
    if update < warmup:
        return peak * (update + 1) / warmup
    progress = min(1.0, (update - warmup + 1) / max(1, total_updates - warmup))
    return peak * (settings.min_ratio + (1 - settings.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
